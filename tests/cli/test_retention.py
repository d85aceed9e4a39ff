"""Pins, TTLs and quotas from the command line, with a real daemon that is killed in between."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client, Namespace
from kvstore.protocol import outcomes
from kvstore.units import exact_duration, parse_duration
from tests.running import ROOT, Daemon, Place, kvstore

Serve = Callable[..., Daemon]
RECORD_BYTES = 250_000
SLOT_BYTES = 253_952
TENANTS = {"acme": b"a" * 16, "beta": b"b" * 16}


def space_of(client: Client, tenant: str) -> Namespace:
    return client.namespace(TENANTS[tenant], RECORD_BYTES, 32, 16, {"model": "m", "tenant": tenant})


def hashes_of(name: str, count: int) -> list[bytes]:
    return [f"{name}-{depth}".encode().ljust(32, b".") for depth in range(count)]


def put(path: Path, tenant: str, name: str, count: int) -> int:
    with Client(path, timeout_s=10, label="writer") as client:
        hashes = hashes_of(name, count)
        return client.put(space_of(client, tenant), hashes, b"", [bytes(RECORD_BYTES)] * count)


def held(path: Path, tenant: str, name: str, count: int) -> int:
    with Client(path, timeout_s=10, label="reader") as client:
        return client.lookup([space_of(client, tenant)], hashes_of(name, count))


def last(name: str, count: int) -> str:
    return hashes_of(name, count)[-1].hex()


def run(place: Place, *words: str) -> Any:
    """A command that must succeed; its JSON."""
    done = kvstore(*words, "-o", "json", "--socket", place.socket)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def flood(place: Place) -> None:
    for number in range(20):
        put(place.socket, "beta", f"flood{number}", 5)


def test_a_pin_survives_kill_9(place: Place, serve: Serve) -> None:
    """Acknowledged, then kill -9 at once: the next daemon keeps the prefix through a flood."""
    daemon = serve(place)
    put(place.socket, "acme", "system", 6)
    answer = run(place, "pin", last("system", 6))
    daemon.stop(signal.SIGKILL)
    assert answer == {"block_hash": last("system", 6), "pinned": True, "namespaces": [TENANTS["acme"].hex()]}
    serve(place)
    flood(place)
    assert held(place.socket, "acme", "system", 6) == 6
    assert kvstore("fsck", "--socket", place.socket).stdout == "sound\n"
    run(place, "unpin", last("system", 6))
    flood(place)
    assert held(place.socket, "acme", "system", 6) < 6


def test_a_ttl_survives_kill_9(place: Place, serve: Serve) -> None:
    """Set, stored, killed: after the restart the blocks still expire when they must, and the miss says why."""
    daemon = serve(place, *place.with_nvme())
    run(place, "ttl", "5", "--tenant", "acme")
    assert put(place.socket, "acme", "a", 4) == 4
    stored_at = time.monotonic()
    put(place.socket, "beta", "b", 4)
    daemon.stop(signal.SIGKILL)
    serve(place, *place.with_nvme())
    found = held(place.socket, "acme", "a", 4)  # whose tenant it is may be known only now
    assert found == 4 or time.monotonic() > stored_at + 4.9
    time.sleep(max(1.0, stored_at + 5.1 - time.monotonic()))
    assert held(place.socket, "acme", "a", 4) == 0
    with Client(place.socket, timeout_s=10, attach=False) as client:
        _, why = client.explain([TENANTS["acme"]], b"".join(hashes_of("a", 4)))
    assert list(why) == [outcomes.EXPIRED] * 4
    assert held(place.socket, "beta", "b", 4) == 4
    limit_s = time.monotonic() + 20
    while {row["tenant"] for row in run(place, "retention")["tenants"]} != {"beta"}:
        assert time.monotonic() < limit_s
    assert kvstore("fsck", "--socket", place.socket).stdout == "sound\n"


def test_a_quota_survives_kill_9(place: Place, serve: Serve) -> None:
    """A tenant never holds more than its quota in either tier. After a kill rows of evicted blocks may come back: from
    the first look at which they are within the quota again, it holds as before."""
    daemon = serve(place, *place.with_nvme())
    run(place, "quota", "--tenant", "acme", "--dram", str(8 * SLOT_BYTES), "--nvme", str(10 * SLOT_BYTES))
    put(place.socket, "beta", "b", 4)
    for number in range(10):
        put(place.socket, "acme", f"a{number}", 3)
    daemon.stop(signal.SIGKILL)
    serve(place, *place.with_nvme())
    limit_s = time.monotonic() + 20
    put(place.socket, "acme", "a10", 3)  # whose tenant it is may be known only now
    while run(place, "retention")["quotas"][0]["nvme_used_bytes"] > 10 * SLOT_BYTES:
        assert time.monotonic() < limit_s
    for number in range(11, 20):
        put(place.socket, "acme", f"a{number}", 3)
        (quota,) = run(place, "retention")["quotas"]
        assert quota["dram_used_bytes"] <= 8 * SLOT_BYTES
        assert quota["nvme_used_bytes"] <= 10 * SLOT_BYTES
    assert held(place.socket, "beta", "b", 4) == 4
    limit_s = time.monotonic() + 20  # until NVMe has what came before, a quota may have no room for more
    put(place.socket, "acme", "latest", 3)
    while held(place.socket, "acme", "latest", 3) < 3 and time.monotonic() < limit_s:
        time.sleep(0.05)
        put(place.socket, "acme", "latest", 3)
    assert held(place.socket, "acme", "latest", 3) == 3
    assert kvstore("fsck", "--socket", place.socket).stdout == "sound\n"


def test_a_damaged_file_does_not_stop_the_daemon(place: Place, serve: Serve) -> None:
    """It is put aside with a warning; commands work again."""
    daemon = serve(place)
    put(place.socket, "acme", "a", 2)
    run(place, "pin", last("a", 2))
    daemon.stop(signal.SIGKILL)
    (place.data_dir / "retention.json").write_text("{ damaged")
    daemon = serve(place)
    assert run(place, "retention")["pins"] == []
    assert "pins, TTLs and quotas are lost" in daemon.log()
    assert (place.data_dir / "retention.unreadable").read_text() == "{ damaged"
    run(place, "pin", last("a", 2))


def test_the_lists_are_what_the_manual_says(place: Place, serve: Serve) -> None:
    """docs/cli.md has every field of `retention -o json`, and no other; people get tables."""
    serve(place, *place.with_nvme())
    put(place.socket, "acme", "a", 3)
    run(place, "pin", last("a", 3))
    run(place, "ttl", "90min", last("a", 2))
    run(place, "ttl", "never", "--namespace", TENANTS["acme"].hex()[:6])
    run(place, "quota", "--tenant", "acme", "--dram", "8MiB")
    run(place, "quota", "--tenant", "acme", "--nvme", "32MiB")
    report = run(place, "retention")
    text = (ROOT / "docs" / "cli.md").read_text()
    block = text.partition("## kvstore retention -o json")[2].partition("```json")[2].partition("```")[0]
    manual = json.loads(block)
    assert set(manual) == set(report)
    for name in manual:
        assert set(manual[name][0]) == set(report[name][0]), name
    assert report["pins"][0]["held_blocks"] == report["pins"][0]["guarded_blocks"] == 3
    assert [ttl["ttl_s"] for ttl in report["ttls"]] == [5400.0, None]
    assert report["quotas"][0]["dram_bytes"] == 8 << 20
    assert report["quotas"][0]["nvme_bytes"] == 32 << 20
    table = kvstore("retention", "--socket", place.socket).stdout
    assert last("a", 3) in table and "90 min" in table and "8 MiB" in table
    run(place, "quota", "--tenant", "acme", "--dram", "none", "--nvme", "none")
    assert run(place, "retention")["quotas"] == []


def test_whoever_has_no_name_is_called_so(place: Place, serve: Serve) -> None:
    """A rule for the tenant "" says "(none)", and one for a namespace names that once."""
    serve(place)
    with Client(place.socket, timeout_s=10, label="writer") as client:
        space = client.namespace(TENANTS["acme"], RECORD_BYTES, 32, 16, {"model": "m", "tenant": ""})
        assert client.put(space, hashes_of("a", 1), b"", [bytes(RECORD_BYTES)]) == 1
    digest = TENANTS["acme"].hex()[:12]
    for words, told in [
        (["ttl", "1h", "--tenant", ""], "tenant (none) expires 1 h after it was stored"),
        (["quota", "--nvme", "1GiB", "--tenant", ""], "tenant (none): nvme 1 GiB"),
        (["quota", "--dram", "0", "--namespace", digest[:4]], f"namespace {digest}: dram 0 B"),
        (["ttl", "2h", "--namespace", digest[:4]], f"namespace {digest} expires 2 h after it was stored"),
        (["ttl", "3h", "ab" * 32], f"{'ab' * 32} expires 3 h after it was stored (namespace {digest})"),
    ]:
        done = kvstore(*words, "--socket", place.socket)
        assert (done.returncode, done.stdout.strip()) == (0, told), done.stderr
    rows = [line.split() for line in kvstore("retention", "--socket", place.socket).stdout.splitlines()]
    assert ["(all)", "(all)", "(none)", "1", "h"] in rows
    assert ["(all)", digest, "m", "(none)", "2", "h"] in rows


def test_names_cannot_steer_a_terminal(place: Place, serve: Serve) -> None:
    """Escape codes in what engines call themselves are harmless in the tables of status and retention."""
    serve(place)
    name = "t\u00e9\x1b[2J\nx"
    with Client(place.socket, timeout_s=10, label=name) as client:
        space = client.namespace(TENANTS["acme"], RECORD_BYTES, 32, 16, {"model": name, "tenant": name})
        assert client.put(space, hashes_of("a", 2), b"", [bytes(RECORD_BYTES)] * 2) == 2
        status = kvstore("status", "--socket", place.socket).stdout
    kvstore("pin", last("a", 2), "--socket", place.socket)
    for told in (status, kvstore("retention", "--socket", place.socket).stdout):
        assert told.count("t\u00e9\ufffd[2J\ufffdx") >= 3 and "\x1b" not in told


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["pin"], 2, "the following arguments are required: PREFIX"),
        (
            ["pin", "xyz"],
            2,
            "pin: prefix xyz: not a block hash in hex, nor the beginning of one (4 to 128 digits)",
        ),
        (["pin", "00" * 32, "--namespace", "q"], 2, "pin: --namespace q: not a digest in hex"),
        (["ttl", "soon", "--tenant", "acme"], 2, "ttl: time soon: not a time: allowed are"),
        (["ttl", "5s"], 2, "ttl: for what? Give a prefix, --namespace or --tenant"),
        (["ttl", "0", "--tenant", "acme"], 2, "ttl: time 0: allowed are 0.001 s to"),
        (["ttl", "1h", "00" * 32, "--tenant", "acme"], 2, "give one of them"),
        (["quota", "--tenant", "acme"], 2, "quota: nothing to set: give --dram, --nvme, or both"),
        (["quota", "--dram", "1GiB"], 2, "quota: give --tenant or --namespace, one of them"),
        (["quota", "--tenant", "acme", "--dram", "1GB"], 2, "unit 'GB' is ambiguous: write GiB"),
        (["retention"], 4, "kvstore"),
    ],
)
def test_bad_input_is_one_line(place: Place, words: list[str], code: int, says: str) -> None:
    """What, where, and what is allowed; no daemon is needed to say so."""
    done = kvstore(*words, "--socket", place.socket)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_the_daemon_does_not_know_is_one_line(place: Place, serve: Serve) -> None:
    """Unknown, ambiguous and misfitting names, and a pin beyond the share: each with its exit code."""
    serve(place)
    nobody = kvstore("pin", "00" * 32, "--socket", place.socket)
    assert (nobody.returncode, nobody.stdout) == (3, "")
    put(place.socket, "acme", "a", 36)
    put(place.socket, "beta", "b", 3)
    for words, code, says in [
        (["pin", "00" * 32], 2, "2 namespaces, as "),
        (["pin", "00" * 32, "--namespace", "ff"], 3, "namespace ff: none is known here"),
        (
            ["pin", "00" * 8, "--namespace", "61"],
            3,
            "pin: prefix 0000000000000000: no known prefix begins so",
        ),
        (["unpin", last("a", 3)], 3, "no pin is set for prefix"),
        (["ttl", "off", "--tenant", "acme"], 3, "no ttl is set for tenant 'acme'"),
        (["pin", last("a", 36)], 1, "this prefix would pin "),
    ]:
        done = kvstore(*words, "--socket", place.socket)
        assert (done.returncode, done.stdout) == (code, ""), words
        assert says in done.stderr
        assert done.stderr.count("\n") == 1
    done = kvstore("pin", "00" * 32, "--namespace", "62", "--socket", place.socket)
    assert (done.returncode, done.stdout.count("\n")) == (0, 1)


def test_times_are_read_and_written() -> None:
    """Units are s, min (or m), h, d and w; anything else says what is allowed."""
    assert [parse_duration(text) for text in ("90", "90s", "1.5 h", "7d", "2min", "2m", "1w")] == [
        90,
        90,
        5400,
        604_800,
        120,
        120,
        604_800,
    ]
    assert [exact_duration(s) for s in (90, 120, 5400, 86_400, 0.5)] == [
        "90 s",
        "2 min",
        "90 min",
        "1 d",
        "0.5 s",
    ]
    for text in ("", "h", "-1", "1 week", "1M", "1y", "1e3"):
        with pytest.raises(ValueError, match="allowed are seconds"):
            parse_duration(text)
