"""kvstore prefetch: a prefix that somebody names is in DRAM before it is asked for."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.client import Client
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from tests.cli.terminal import on_terminal
from tests.cli.test_service import HASHES, RECORD_BYTES, namespace, put, records
from tests.running import TIMEOUT_S, Daemon, Place, kvstore

Serve = Callable[..., Daemon]
LAST = HASHES[-1].hex()
BIG_BLOCKS = 200  # more than the 16 MiB of DRAM hold


def prefetch(place: Place, *words: str, code: int = 0) -> dict[str, Any]:
    done = kvstore("prefetch", *words, "-o", "json", "--socket", place.socket)
    assert done.returncode == code, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def until_demoted(client: Client, blocks: int) -> None:
    give_up_s = time.monotonic() + TIMEOUT_S
    while client.live()["counters"]["demoted"] < blocks:
        assert time.monotonic() < give_up_s


def on_nvme_only(place: Place, serve: Serve) -> None:
    """A daemon of which NVMe holds HASHES, and DRAM nothing."""
    words = [*place.with_nvme(), "--set=dram.keep_on_stop=false"]
    daemon = serve(place, *words)
    put(place.socket)
    assert daemon.stop() == 0
    serve(place, *words)
    with Client(place.socket, timeout_s=10, attach=False) as client:
        while client.live()["adopting"]:
            pass
        assert set(client.residency(namespace(client), HASHES)) == {IN_NVME}


def test_a_prefix_is_in_dram_before_it_is_asked_for(place: Place, serve: Serve) -> None:
    """By the beginning of the hash of its last block, with all before it; warm again, it was there already."""
    on_nvme_only(place, serve)
    told = prefetch(place, LAST[:8])
    (row,) = told["prefixes"]
    count = len(HASHES)
    assert row == {
        "prefix": LAST,
        "state": "done",
        "loaded": count,
        **dict.fromkeys(("held", "under_way", "left", "failed", "refused", "gone"), 0),
        "namespaces": [(b"n" * 16).hex()],
        "blocks": count,
        "bytes": count * RECORD_BYTES,
        "loaded_bytes": count * RECORD_BYTES,
        "is_over": True,
    }
    with Client(place.socket, timeout_s=10) as client:
        assert all(where & IN_DRAM for where in client.residency(namespace(client), HASHES))
        into = [bytearray(RECORD_BYTES) for _ in HASHES]
        assert client.get(namespace(client), HASHES, into) == count
        assert [bytes(got) for got in into] == records()
    (row,) = prefetch(place, LAST, "--namespace", "6e6e")["prefixes"]
    assert (row["held"], row["loaded"], row["state"]) == (count, 0, "done")
    assert kvstore("fsck", "--socket", place.socket).returncode == 0
    code, shown = on_terminal(80, "prefetch", LAST[:12], "--socket", place.socket)
    assert code == 0 and "into DRAM" in shown and "done" in shown


def test_a_prefix_that_dram_cannot_hold_says_so(place: Place, serve: Serve) -> None:
    """Twice the capacity of DRAM, and all of it leased: what came is counted, what found no room, too."""
    serve(place, *place.with_nvme())
    with Client(place.socket, timeout_s=30) as client:
        space = namespace(client)
        hashes = [bytes([9]) * 24 + n.to_bytes(8, "big") for n in range(BIG_BLOCKS)]
        for n in range(BIG_BLOCKS):
            while not client.put(
                space, hashes[n : n + 1], hashes[n - 1] if n else b"", [bytes(RECORD_BYTES)]
            ):
                pass  # until something has left
        until_demoted(client, BIG_BLOCKS)
        held = [n for n, where in enumerate(client.residency(space, hashes)) if where & IN_DRAM]
        with client.acquire(space, [hashes[n] for n in held[: len(held) // 2]]):
            (row,) = prefetch(place, hashes[-1].hex(), code=1)["prefixes"]
    assert row["state"] == "no room" and row["refused"] > 0 and row["is_over"]
    assert row["held"] + row["loaded"] + row["refused"] + row["failed"] == row["blocks"] == BIG_BLOCKS
    assert kvstore("fsck", "--socket", place.socket).returncode == 0


def test_what_is_gone_is_told(place: Place, serve: Serve) -> None:
    """Behind a block that no tier has nothing is loaded; a hash that nobody knows is not found."""
    serve(place)
    with Client(place.socket, timeout_s=10) as client:
        space = namespace(client)
        client.put(space, HASHES[1:3], HASHES[0], records(2))
    (row,) = prefetch(place, HASHES[2].hex(), code=1)["prefixes"]
    assert (row["state"], row["gone"], row["blocks"]) == ("gone", 3, 3)
    done = kvstore("prefetch", "ff" * 32, "--socket", place.socket)
    assert (
        done.returncode == 3 and "neither a tier of this node nor the region's bucket has it" in done.stderr
    )
    assert done.stdout == ""
    told = prefetch(place, HASHES[2].hex(), "ff" * 32, code=3)  # what was done before is told all the same
    assert told["prefixes"] == [row]
    done = kvstore("prefetch", "ffff", "--socket", place.socket)
    assert done.returncode == 3 and "no known prefix begins so" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "prefetch: the following arguments are required: PREFIX"),
        (["ffff", "--to", "nvme"], "unrecognized arguments: --to nvme"),
        (["ffff", "xyz\x1b[2J"], "not a block hash in hex"),
        (["ffff", "--namespace", "nobody"], "not a digest in hex"),
    ],
)
def test_wrong_words(words: list[str], says: str) -> None:
    """One line, exit code 2, before anybody is asked."""
    done = kvstore("prefetch", *words, "--socket", "/nowhere/s")
    assert (done.returncode, done.stdout) == (2, "") and says in done.stderr
    assert done.stderr.count("\n") == 1 and "\x1b" not in done.stderr


def test_a_command_that_is_killed_stops_loading(place: Place, serve: Serve) -> None:
    """Without somebody who asks again nothing further is begun, the daemon serves on and its books balance."""
    on_nvme_only(place, serve)
    with Client(place.socket, timeout_s=10, attach=False) as client:
        told = client.warm_prefix(HASHES[-1])
        assert told["under_way"] + told["left"] + told["loaded"] == len(HASHES)
    with Client(place.socket, timeout_s=10, attach=False) as client:
        while any(queue["length"] for queue in client.live()["queues"] if queue["name"] == "loads"):
            pass
        again = client.warm_prefix(HASHES[-1])
        assert again["held"] + again["under_way"] + again["left"] + again["loaded"] == len(HASHES)
    assert kvstore("fsck", "--socket", place.socket).returncode == 0
