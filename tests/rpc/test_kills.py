"""Whoever is killed, nothing is left half: no lease, no slot, no block; and a daemon that comes back is waited for.

ROUNDS=50 kills them more often (`make soak`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from kvstore.client import Client
from tests.rpc.reflecting import Reflecting
from tests.rpc.serving import Serving, door_of, serving, target_of, until
from tests.rpc.spaces import Space, named
from tests.running import Daemon, Place, environment, kvstore

ROUNDS = int(os.environ.get("ROUNDS", "1"))

WRITER = """
import sys, time
from tests.rpc.reflecting import Reflecting
from tests.rpc.spaces import Space, named

client = Reflecting(sys.argv[1])
space = Space(client, "killed")
hashes = named(8, sys.argv[2])
def messages():
    yield space.start(hashes)
    for index in range(4):
        yield from space.pieces(index, space.record(index))
    print("writing", flush=True)
    time.sleep(600)
for answer in client.start("CacheService/Put", messages(), timeout=600):
    pass
"""


def books_balance(node: Serving) -> bool:
    """No lease is open, and the daemon finds nothing wrong."""
    with Client(node.place.socket, 10, attach=False) as local:
        return not sum(s["leases"] for s in local.status()["sessions"]) and local.check() == []


@pytest.mark.parametrize("victim", ["client", "door"])
def test_a_writer_or_the_door_is_killed(tmp_path: Path, victim: str) -> None:
    """kill -9 in the middle of a Put: its slots come back; of its blocks none is stored that had not come whole; the next Put
    stores what is missing."""
    with serving(Place(tmp_path)) as node:
        for number in range(ROUNDS):
            writer = subprocess.Popen(
                [sys.executable, "-c", WRITER, node.target, f"round {number}"],
                stdout=subprocess.PIPE,
                env=environment(),
            )
            assert writer.stdout is not None and writer.stdout.readline() == b"writing\n"
            until(lambda: not books_balance(node), "a lease is open")
            os.kill(writer.pid if victim == "client" else node.process(), signal.SIGKILL)
            until(lambda: books_balance(node), "everything was given back")
            if victim == "door":
                node.target = target_of(node.daemon, lives=2 + number)
            writer.kill()
            writer.wait()
            writer.stdout.close()
            client = Reflecting(node.target)
            space, hashes = Space(client, "killed"), named(8, f"round {number}")
            records = [space.record(n) for n in range(8)]
            held, found = space.get(hashes)
            assert held <= 4 and found == records[:held]
            assert space.put(hashes, records)[1].blocks == 8 - held and space.get(hashes) == (8, records)
            client.close()


def test_a_daemon_that_is_started_again_is_waited_for(place: Place, serve: Callable[..., Daemon]) -> None:
    """The door beside it goes on: calls that came while it was away are answered when it is back, within their deadline; one
    whose deadline is shorter says that it may be tried again."""
    daemon = serve(place)
    with door_of(place.socket) as (_, target):
        client = Reflecting(target)
        space, hashes = Space(client, "lasting"), named(3, "lasting")
        records = [space.record(n) for n in range(3)]
        space.put(hashes, records)
        asked = {"namespace": space.selector, "blocks": {"hashes": b"".join(hashes)}}
        for _ in range(ROUNDS):
            daemon.stop(signal.SIGKILL)
            lookup = client.method_future("CacheService/Lookup", asked)
            rules = client.method_future("CacheService/ListRules", {})
            get = client.start(
                "CacheService/Get", [{"namespace": space.selector, "hashes": b"".join(hashes)}]
            )
            with pytest.raises(grpc.RpcError) as refused:
                client.method_future("CacheService/ListRules", {}, timeout=0.3).result()
            assert refused.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            daemon = serve(place)
            assert lookup.result().held_blocks == 3 and rules.result().document_json
            assert next(get).held == 3 and b"".join(answer.data for answer in get) == b"".join(records)
        client.close()


def test_wrong_settings_are_one_line(place: Place) -> None:
    """An address that is none, none at all, and one beyond this machine without certificates."""
    for words, told in (
        (["--listen", "here"], "allowed are ADDRESS:PORT"),
        ([], "grpc.listen is"),
        (["--listen", "0.0.0.0:0"], "certificate"),
    ):
        done = kvstore("grpc", *words, "--socket", place.socket)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and told in done.stderr, done.stderr
