"""`kvstore region erase`: what a tenant stored is gone from the bucket and from every node, and does not come back."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore.client import Client
from kvstore.commands.erased_file import ErasedFile
from kvstore.units import format_bytes
from tests.region.regions import arguments, chain, init, read, regions_file, space_of, status, store, until
from tests.running import Daemon, Place, kvstore

Serve = Callable[..., Daemon]


def test_a_tenant_is_erased_everywhere(tmp_path: Path, serve: Serve) -> None:
    """Of two tenants on two nodes one is erased: its packs go, its blocks leave DRAM, it is not persisted again, and the
    other one's are hit as before, on both nodes. Erased again, what was computed anew goes, too: on a node that was killed
    meanwhile and has lost the names of its namespaces as well."""
    file = regions_file(tmp_path, "na")
    init(file, "na")
    prompts = {tenant: chain(tenant, 8) for tenant in ("acme", "umbrella")}
    nodes, clients = [], []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        place = Place(tmp_path / name)
        daemon = serve(place, *arguments(place, file, "na", "--set=durable.seen_times=1"))
        nodes.append((place, daemon))
        clients.append(Client(str(daemon.socket), timeout_s=5.0))
    first, second = clients
    for tenant, hashes in prompts.items():
        space = space_of(first, tenant)
        store(first, space, hashes)
        first.lookup([space], hashes, ticket=1, tokens=8 * 64)
    until(lambda: status(second)["blocks"] == 16)
    for tenant, hashes in prompts.items():
        assert read(second, space_of(second, tenant), hashes) == 8
    erase = ("region", "erase", "--yes", "--tenant", "acme", "--regions", file, "-o", "json")
    said = kvstore(*erase, "--wait")
    assert said.returncode == 0 and json.loads(said.stdout)["regions"] == [{"region": "na", "state": "gone"}]
    for client in clients:
        until(lambda: status(client)["blocks"] == 8)  # noqa: B023 called in this round
        until(lambda: client.lookup([space_of(client, "acme")], prompts["acme"]) == 0)  # noqa: B023 called in this round
        assert client.lookup([space_of(client, "umbrella")], prompts["umbrella"]) == 8
    until(lambda: len([path for path in (tmp_path / "na" / "packs").rglob("*") if path.is_file()]) == 1)
    space = space_of(first, "acme")
    store(first, space, prompts["acme"])
    first.lookup([space], prompts["acme"], ticket=2, tokens=8 * 64)
    until(lambda: first.status()["counters"]["persist_failed"] > 0)
    assert status(first)["blocks"] == 8
    store(second, space_of(second, "acme"), prompts["acme"])
    assert read(second, space_of(second, "acme"), prompts["acme"]) == 8
    place, daemon = nodes[1]
    until((place.data_dir / "namespaces.json").exists)
    daemon.stop(signal.SIGKILL)
    (place.data_dir / "namespaces.json").unlink()
    said = kvstore(*erase, "--wait", "1s")  # one of the two is not there
    assert said.returncode == 1 and "has not erased it yet" in json.loads(said.stdout)["regions"][0]["state"]
    until(lambda: first.lookup([space_of(first, "acme")], prompts["acme"]) == 0)
    daemon = serve(place, *daemon.arguments)
    for client in clients:
        client.close()
    with Client(str(daemon.socket), timeout_s=5.0) as client:
        assert client.status()["counters"]["adopted"] >= 16
        until(lambda: client.lookup([space_of(client, "umbrella")], prompts["umbrella"]) == 8)
        until(lambda: client.lookup([space_of(client, "acme")], prompts["acme"]) == 0)


def test_a_node_that_cannot_put_it_down_says_so(tmp_path: Path, serve: Serve) -> None:
    """Whoever waits waits on, and the daemon names it as a problem, until a start would know what is erased."""
    file = regions_file(tmp_path, "na")
    init(file, "na")
    place = Place(tmp_path)
    serve(place, *arguments(place, file, "na"))
    erased = place.data_dir / "erased.bin"
    (erased / "full").mkdir(parents=True)
    with Client(str(place.socket), timeout_s=5.0) as client:
        space = space_of(client, "acme")
        store(client, space, chain("acme", 4))

        def told() -> list[str]:
            return [one["subject"] for one in client.status()["problems"] if one["kind"] == "unsaved"]

        words = (
            "region",
            "erase",
            "--yes",
            "--force",
            "--tenant",
            "acme",
            "--regions",
            file,
            "-o",
            "json",
            "--wait",
        )
        until(lambda: len(nodes_of(file)) == 1)
        said = kvstore(*words, "15s")  # a node says that it is done after a few
        assert (
            said.returncode == 1 and "has not erased it yet" in json.loads(said.stdout)["regions"][0]["state"]
        )
        until(lambda: told() == ["erased"])
        assert client.lookup([space], chain("acme", 4)) == 0
        shutil.rmtree(erased)
        assert kvstore(*words).returncode == 0
        until(lambda: told() == [])
        assert ErasedFile(erased).known.keys()


def nodes_of(file: Path) -> list[Any]:
    told = kvstore("region", "nodes", "na", "--regions", file, "-o", "json").stdout
    return list(json.loads(told)["nodes"])


def test_what_is_wrong_is_told_in_one_line(tmp_path: Path) -> None:
    """No subject, no digest, no hash, no region: exit code 2; a bucket that is no region: 1; nothing is written."""
    file = regions_file(tmp_path, "na")
    for words, said in (
        ((), "--tenant NAME or --namespace is required"),
        (("--namespace", "abc"), "32 hex digits"),
        (("--tenant", "a", "--prefix", "xyz"), "not a block hash"),
        (("--tenant", "a", "--region", "eu"), "known are na"),
        (("--tenant", "a", "--days", "0"), "allowed are"),
    ):
        run = kvstore("region", "erase", "--yes", *words, "--regions", file)
        assert run.returncode == 2 and said in run.stderr and len(run.stderr.splitlines()) == 1
    run = kvstore("region", "erase", "--yes", "--tenant", "a", "--regions", file)
    assert run.returncode == 1 and "kvstore region init" in run.stderr and not run.stdout
    run = kvstore("region", "erase", "--yes", "--force", "--tenant", "a", "--regions", file)
    assert run.returncode == 1 and "kvstore region init" in run.stdout
    for words, said in (
        (("--tenant", "a"), "nobody to ask: this is no terminal; give --yes or --dry-run"),
        (("--ls", "--tenant", "a"), "--ls and --cancel take no --tenant"),
        (("--cancel", "abc"), "a tombstone has 32 hex digits"),
        (("--ls", "--dry-run"), "not allowed with argument"),
    ):
        run = kvstore("region", "erase", *words, "--regions", file)
        assert (run.returncode, run.stdout) == (2, "") and said in run.stderr
        assert len(run.stderr.splitlines()) == 1
    assert not list((tmp_path / "na").iterdir())


def test_the_beginning_of_a_hash_is_enough_where_a_daemon_knows_it(tmp_path: Path, serve: Serve) -> None:
    """The daemon of this node completes it; without one, and without a whole hash, nothing is erased and the line says so."""
    file = regions_file(tmp_path, "na")
    init(file, "na")
    place = Place(tmp_path)
    serve(place, *arguments(place, file, "na"))
    with Client(str(place.socket), timeout_s=5.0) as client:
        hashes, space = chain("prompt", 3), space_of(client, "acme")
        store(client, space, hashes)
    words: list[str | Path] = [
        "region",
        "erase",
        "--yes",
        "--namespace",
        space.digest.hex(),
        "--regions",
        file,
        "-o",
        "json",
    ]
    done = kvstore(*words, "--prefix", hashes[2].hex()[:10], "--socket", place.socket)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prefix"] == hashes[2].hex()
    done = kvstore(*words, "--prefix", "abcd0123", "--socket", place.socket)
    assert (done.returncode, done.stdout) == (3, "") and "no known prefix begins so" in done.stderr
    done = kvstore(*words, "--prefix", hashes[2].hex()[:10], "--socket", tmp_path / "nobody")
    assert (done.returncode, done.stdout) == (2, "") and "give the whole hash" in done.stderr
    words += ["--force"]
    for digits, socket, code in (
        (16, tmp_path / "nobody", 0),
        (20, tmp_path / "nobody", 2),
        (32, place.socket, 0),
        (40, place.socket, 3),
    ):
        done = kvstore(*words, "--prefix", "ab" * (digits // 2), "--socket", socket)
        assert done.returncode == code, done.stderr
        assert ("taken as a whole hash" in done.stderr) == (code == 0)
    done = kvstore(*words, "--prefix", hashes[2].hex(), "--socket", tmp_path / "nobody")
    assert done.returncode == 0 and json.loads(done.stdout)["prefix"] == hashes[2].hex()


def test_whoever_is_erased_is_known_and_can_be_taken_back(tmp_path: Path, serve: Serve) -> None:
    """A name that nobody knows is refused, with those that there are; a dry run says what would go and changes nothing; what is in force
    is listed; taken back before a node reads it, nothing is lost, and after it what comes anew is kept again."""
    file = regions_file(tmp_path, "na")
    init(file, "na")
    place = Place(tmp_path)
    daemon = serve(place, *arguments(place, file, "na", "--set=durable.seen_times=1"))
    with Client(str(place.socket), timeout_s=5.0) as client:
        hashes, space = chain("prompt", 8), space_of(client, "acme")
        store(client, space, hashes)
        client.lookup([space], hashes, ticket=1, tokens=8 * 64)
        until(lambda: status(client)["blocks"] == 8)
    assert daemon.stop() == 0

    def erase(*words: str, code: int = 0) -> Any:
        run = kvstore("region", "erase", *words, "--regions", file, "-o", "json", "--socket", place.socket)
        assert run.returncode == code, run.stderr
        return json.loads(run.stdout) if run.stdout else run.stderr

    said = erase("--tenant", "amce", "--yes", code=3)
    assert "tenant amce: nothing of it is known: tenants are acme" in said and said.count("\n") == 1
    would = erase("--tenant", "acme", "--dry-run")
    (row,) = would["regions"]
    assert would["dry_run"] and (row["state"], row["packs"]) == ("ready", 1) and row["bytes"] > 1024
    words = ("region", "erase", "--tenant", "acme", "--dry-run", "--regions", file, "--socket", place.socket)
    assert f"  {format_bytes(row['bytes'])}\n" in kvstore(*words).stdout
    assert erase("--ls")["tombstones"] == []
    erased = erase("--tenant", "acme", "--yes")["tombstone"]
    assert erased == would["tombstone"]
    (stone,) = erase("--ls")["tombstones"]
    assert (stone["tombstone"], stone["tenant"], stone["namespaces"]) == (erased, "acme", [])
    assert erase("--cancel", erased)["regions"] == [{"region": "na", "state": "taken back"}]
    assert erase("--ls")["tombstones"] == []
    assert erase("--cancel", erased)["regions"] == [{"region": "na", "state": "was taken back before"}]
    assert "no such tombstone" in erase("--cancel", "0" * 32, code=3)
    daemon = serve(place, *daemon.arguments)
    with Client(str(place.socket), timeout_s=5.0) as client:
        until(lambda: status(client)["blocks"] == 8)
        erase("--tenant", "acme", "--yes")
        until(lambda: status(client)["blocks"] == 0 and status(client)["tombstones"] == 1)
        erase("--cancel", erased)
        until(lambda: status(client)["tombstones"] == 0)
