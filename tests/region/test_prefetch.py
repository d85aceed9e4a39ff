"""kvstore prefetch: from the region's bucket, where this node's tiers have nothing left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.client import Client
from kvstore.protocol.residency_bits import IN_DRAM
from tests.region.regions import RECORD_BYTES, arguments, init, regions_file, space_of
from tests.region.test_warm import BLOCKS, node, persist
from tests.running import Daemon, kvstore


@pytest.mark.slow
def test_a_prefix_comes_from_the_bucket(tmp_path: Path, serve: Callable[..., Daemon]) -> None:
    """A prompt that is durable and was cleared here: its last block names all of it, packs and all, and it hits DRAM again."""
    file = regions_file(tmp_path, "na")
    init(file, "na")
    place = node(tmp_path, "node-na")
    serve(place, *arguments(place, file, "na"))
    with Client(str(place.socket), timeout_s=5.0) as client:
        [hashes] = persist(client)
    assert kvstore("clear", "--all", "--yes", "--socket", place.socket).returncode == 0
    with Client(str(place.socket), timeout_s=5.0, attach=False) as client:
        assert not any(client.residency(space_of(client, ""), hashes))
    done = kvstore("prefetch", hashes[-1].hex(), "-o", "json", "--socket", place.socket)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(done.stdout)["prefixes"]
    assert (row["state"], row["loaded"], row["loaded_bytes"]) == ("done", BLOCKS, BLOCKS * RECORD_BYTES)
    with Client(str(place.socket), timeout_s=5.0, attach=False) as client:
        assert all(where & IN_DRAM for where in client.residency(space_of(client, ""), hashes))
    done = kvstore("prefetch", "ab" * 32, "--socket", place.socket)
    assert (
        done.returncode == 3 and "neither a tier of this node nor the region's bucket has it" in done.stderr
    )
