"""`kvstore clear` and short names of prefixes, with a real daemon that is killed in between."""

from __future__ import annotations

import hashlib
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client, Namespace
from tests.cli.terminal import on_terminal
from tests.running import ROOT, TIMEOUT_S, Daemon, Place, kvstore

Serve = Callable[..., Daemon]
RECORD_BYTES = 100_000
TENANTS = {"acme": b"a" * 16, "beta": b"b" * 16}


def space_of(client: Client, tenant: str) -> Namespace:
    fields = {"model": "m", "tenant": tenant}
    return client.namespace(TENANTS[tenant], RECORD_BYTES, 32, 16, fields)


def hashes_of(name: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{name} {depth}".encode()).digest() for depth in range(count)]


def put(path: Path, tenant: str, hashes: list[bytes]) -> None:
    with Client(path, timeout_s=30, label="writer") as client:
        assert client.put(space_of(client, tenant), hashes, b"", [bytes(RECORD_BYTES)] * len(hashes)) == len(
            hashes
        )


def put_until_on(disk: Path, path: Path, tenant: str) -> None:
    """More of a tenant, until that disk has some of it: whichever disk is free first takes what waits."""
    give_up_s = time.monotonic() + TIMEOUT_S
    while TENANTS[tenant] not in (disk / "slots.table").read_bytes():
        assert time.monotonic() < give_up_s, f"nothing came onto {disk}"
        put(path, tenant, hashes_of(f"{tenant} {give_up_s - time.monotonic()}", 8))


def held(path: Path, tenant: str, hashes: list[bytes]) -> int:
    with Client(path, timeout_s=30, label="reader") as client:
        return client.lookup([space_of(client, tenant)], hashes)


def told(place: Place, *words: str) -> Any:
    """A command that must succeed; its JSON."""
    done = kvstore(*words, "-o", "json", "--socket", place.socket)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_is_cleared_stays_cleared(place: Place, serve: Serve) -> None:
    """A tenant leaves DRAM and NVMe, is listed no more, and after a kill -9 at once it is not found again; nobody
    else loses anything, and the answer has the fields of the manual."""
    daemon = serve(place, *place.with_nvme())
    acme, beta = hashes_of("acme", 8), hashes_of("beta", 5)
    put(place.socket, "acme", acme)
    put(place.socket, "beta", beta)
    dry = told(place, "clear", "--tenant", "acme", "--dry-run")
    assert (dry["blocks"], dry["cleared_blocks"], dry["dry_run"]) == (8, 0, True)
    assert held(place.socket, "acme", acme) == 8
    answer = told(place, "clear", "--tenant", "acme", "--yes")
    daemon.stop(signal.SIGKILL)
    assert (answer["blocks"], answer["cleared_blocks"], answer["rows_left"]) == (8, 8, 0)
    assert answer["namespaces"] == [TENANTS["acme"].hex()] and answer["forgotten_namespaces"] == 1
    text = (ROOT / "docs" / "cli.md").read_text()
    block = text.partition("## kvstore clear")[2].partition("```json")[2].partition("```")[0]
    assert set(json.loads(block)) == set(answer)
    daemon = serve(place, *place.with_nvme())
    status = told(place, "status")
    assert [space["fields"]["tenant"] for space in status["namespaces"]] == ["beta"]
    assert held(place.socket, "beta", beta) == 5
    assert held(place.socket, "acme", acme) == 0
    assert kvstore("fsck", "--socket", place.socket).stdout == "sound\n"


def test_a_disk_that_was_away_brings_back_nothing(place: Place, serve: Serve) -> None:
    """One of two disks is not mounted while a tenant is cleared: the answer does not wait for it, and when it is back, after a
    kill as well, nothing of the tenant is found; what others have on it is."""
    daemon = serve(place, *place.with_nvme())
    away, aside = place.path / "nvme1", place.path / "aside"
    acme, beta = hashes_of("acme", 32), hashes_of("beta", 32)
    put(place.socket, "acme", acme)
    put(place.socket, "beta", beta)
    put_until_on(away, place.socket, "acme")
    assert daemon.stop() == 0
    assert TENANTS["acme"] in (away / "slots.table").read_bytes()
    away.rename(aside)
    place.arena().unlink()
    daemon = serve(place, *place.with_nvme())
    assert told(place, "clear", "--tenant", "acme", "--yes")["rows_left"] == 0
    daemon.stop(signal.SIGKILL)
    aside.rename(away)
    daemon = serve(place, *place.with_nvme())
    with Client(place.socket, timeout_s=30, label="watch", attach=False) as client:
        give_up_s = time.monotonic() + TIMEOUT_S
        file = place.data_dir / "uncleared.json"
        while client.status()["adopting"] or json.loads(file.read_text())["disks"]:
            assert time.monotonic() < give_up_s, daemon.log()
            time.sleep(0.05)
    assert (held(place.socket, "beta", beta), held(place.socket, "acme", acme)) == (32, 0)
    assert daemon.stop() == 0
    assert TENANTS["acme"] not in (away / "slots.table").read_bytes()


def test_short_names_of_prefixes(place: Place, serve: Serve) -> None:
    """Any unique beginning of a hash names it, for pin, ttl, unpin and clear, in either case and at odd lengths; one that
    is not unique is one line with the candidates, and what is pinned is found by its rule after it is gone."""
    serve(place)
    twins = [b"\xab\xcd\xef" + bytes([n]) * 29 for n in (0x11, 0x22)]  # alike in their first digits
    chain = [*hashes_of("chain", 3), *twins]
    put(place.socket, "acme", chain)
    name = chain[2].hex()
    for beginning in (name[:10].upper(), name[:7], name):
        assert told(place, "pin", beginning)["block_hash"] == name
    assert told(place, "ttl", "1h", name[:9])["block_hash"] == name
    assert told(place, "ttl", "off", name[:9])["block_hash"] == name
    done = kvstore("pin", "abcdef", "--socket", place.socket)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"may be any of {twins[0].hex()[:10]}…, {twins[1].hex()[:10]}…: give more digits" in done.stderr
    assert told(place, "pin", "abcdef2")["block_hash"] == twins[1].hex()
    told(place, "unpin", "abcdef2")
    for words in (["pin", "0123456789"], ["clear", "--yes", "--prefix", "0123456789"]):
        done = kvstore(*words, "--socket", place.socket)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
        assert "no known prefix begins so" in done.stderr
    answer = told(place, "clear", "--prefix", chain[1].hex()[:10], "--yes")
    assert (answer["blocks"], answer["pinned_blocks"], answer["cleared_blocks"]) == (4, 2, 2)
    assert held(place.socket, "acme", chain) == 3
    told(place, "unpin", name[:10])
    told(place, "pin", "ff" * 32, "--namespace", TENANTS["acme"].hex())
    assert told(place, "unpin", "ffff")["block_hash"] == "ff" * 32  # of which nothing was ever held
    assert told(place, "clear", "--all", "--yes")["cleared_blocks"] == 3


def test_it_asks_on_a_terminal(place: Place, serve: Serve) -> None:
    """How much would go is said before; anything but yes leaves all of it; where nobody can be asked, --yes is required."""
    serve(place)
    hashes = hashes_of("acme", 3)
    put(place.socket, "acme", hashes)
    words = ["clear", "--namespace", TENANTS["acme"].hex()[:8], "--socket", str(place.socket)]
    for answer in ("\n", "nope\n", "\x04"):  # the last is the end of the input
        code, shown = on_terminal(100, *words, answer=answer)
        assert code == 1 and "This drops 3 blocks of namespace 616161616161: " in shown
        assert "kvstore: clear: nothing was cleared" in shown
    done = kvstore(*words, stdin="y\n")
    assert (done.returncode, done.stdout) == (2, "") and "give --yes or --dry-run" in done.stderr
    assert held(place.socket, "acme", hashes) == 3
    code, shown = on_terminal(100, *words, answer="yes\n")
    assert code == 0 and "cleared 3 blocks; there were 3 blocks of namespace 616161616161: " in shown
    assert held(place.socket, "acme", hashes) == 0


def test_blocks_in_use_are_told(place: Place, serve: Serve) -> None:
    """What an engine reads stays, with an exit code of 1; afterwards it can be cleared. The namespace of a connected
    engine stays known, empty."""
    serve(place)
    hashes = hashes_of("acme", 4)
    put(place.socket, "acme", hashes)
    with Client(place.socket, timeout_s=30, label="reader") as client:
        space = space_of(client, "acme")
        with client.acquire(space, hashes[:2]):
            done = kvstore("clear", "--all", "--yes", "--socket", place.socket)
            assert done.returncode == 1
            assert done.stdout.splitlines()[0].startswith(
                "cleared 2 blocks; there were 4 blocks of namespace "
            )
            assert "2 blocks in use stay" in done.stdout
            assert client.lookup([space], hashes) == 2
        assert told(place, "clear", "--all", "--yes")["cleared_blocks"] == 2
        assert client.lookup([space], hashes) == 0
        (left,) = told(place, "status")["namespaces"]
        assert left["blocks"] == 0
        assert client.put(space, hashes, b"", [bytes(RECORD_BYTES)] * 4) == 4


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "clear: what? give one of --tenant, --namespace, --prefix, --all"),
        (["--all", "--tenant", "x"], "clear: too much is named: give one of"),
        (["--tenant", "x", "--prefix", "abcd"], "clear: too much is named: give one of"),
        (
            ["--prefix", "abc"],
            "clear: prefix abc: not a block hash in hex, nor the beginning of one (4 to 128 digits)",
        ),
        (["--namespace", "q"], "clear: --namespace q: not a digest in hex"),
    ],
)
def test_bad_words_are_one_line(place: Place, words: list[str], says: str) -> None:
    """Exit code 2, before any daemon is asked."""
    done = kvstore("clear", *words, "--yes", "--socket", place.socket)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr and done.stderr.count("\n") == 1
