"""kvstore clients and kvstore slow: who is connected, hanging up on one, and what was slow, of a real daemon."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest

from kvstore.client import Client
from tests.cli.test_service import HASHES, namespace, put
from tests.running import Daemon, Place, kvstore

FIELDS = {
    "id", "label", "pid", "uid", "model", "tenant", "namespaces", "connected_s", "requests", "asked_blocks", "hit_blocks",
    "stored_bytes", "loaded_bytes", "leases", "attached", "lease_bytes",
}  # fmt: skip


def test_who_is_connected_and_what_was_slow(place: Place, serve: Callable[..., Daemon]) -> None:
    """As documents and as tables: the engine with its pid, the command itself without a model; the one that is cut off is gone, and
    told of though another one is nobody; what took longer than the setting says is kept with whose it was."""
    serve(place, *place.arguments, "--set=door.slow_s=0.001")
    put(place.socket)
    with Client(place.socket, timeout_s=10, label="vllm \x1b[31m") as client:
        for _ in range(50):
            client.lookup([namespace(client)], HASHES, ticket=1)
        clients, interval = ["clients", "--socket", place.socket, "--interval", "0.2s"], 0.2
        done = kvstore(*clients, "-o", "json")
        document = json.loads(done.stdout)
        engine = next(one for one in document["clients"] if one["label"].startswith("vllm"))
        assert set(engine) == FIELDS | {"requests_per_s", "loaded_bytes_per_s", "stored_bytes_per_s"}
        assert (engine["pid"], engine["model"], engine["requests_per_s"]) == (os.getpid(), "test", 0.0)
        assert engine["hit_blocks"] == engine["asked_blocks"] > 0 and document["interval_s"] >= interval
        told = kvstore(*clients).stdout
        assert "requests/s" in told and "kvstore cli" in told and "\x1b" not in told
        done = kvstore("clients", "--kill", str(engine["id"]), "--socket", place.socket)
        assert (
            done.returncode == 0
            and f"client {engine['id']} (vllm" in done.stdout
            and "\x1b" not in done.stdout
        )
        done = kvstore("clients", "--kill", str(engine["id"]), "--socket", place.socket)
        assert (done.returncode, done.stdout) == (3, "") and done.stderr.count("\n") == 1
    for form, says in (("table", "client {} (other, pid"), ("json", '"id": {},')):
        with Client(place.socket, timeout_s=10, label="other") as client:
            number = next(one["id"] for one in client.clients() if one["label"] == "other")
            two = ["--kill", str(number), "--kill", "999999", "-o", form]
            done = kvstore("clients", *two, "--socket", place.socket)
            assert (done.returncode, says.format(number) in done.stdout) == (3, True), done
            assert "999999" in done.stderr and done.stderr.count("\n") == 1
    document = json.loads(kvstore("slow", "--socket", place.socket, "-o", "json").stdout)
    assert document["slow_s"] == 0.001 and document["total"] >= len(document["slow"])
    assert kvstore("slow", "--all", "--socket", place.socket).returncode == 0
    kvstore("config", "set", "door.slow_s", "3600", "--socket", place.socket)
    assert json.loads(kvstore("slow", "--socket", place.socket, "-o", "json").stdout)["slow_s"] == 3600


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["clients", "--interval", "soon"], 2, "clients: --interval soon: not a time"),
        (["clients", "--kill", "-1"], 2, "clients: "),
        (["clients", "--kill", "0"], 2, "argument --kill: 0: allowed are whole numbers from 1"),
        (["clients", "--kill", "9" * 40], 2, "argument --kill: 999"),
        (["clients", "--kill", "٣"], 2, "argument --kill: ٣"),
        (["clients", "--kill", "3"], 4, "No such file"),
        (["slow"], 4, "No such file"),
    ],
)
def test_what_is_wrong_is_one_line(place: Place, words: list[str], code: int, says: str) -> None:
    """A wrong interval or id is 2, no daemon is 4."""
    done = kvstore(*words, "--socket", place.socket)
    assert (
        (done.returncode, done.stdout) == (code, "") and says in done.stderr and done.stderr.count("\n") == 1
    )
