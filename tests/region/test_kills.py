"""A daemon that is killed with -9 while it persists: what is announced is there and true, and nothing is announced by half.

ROUNDS=50 kills it more often (`make soak`).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest

from kvstore.client import Client, Namespace
from replication.formats.segment import FEED, decode, segment_number
from tests.objects import MemoryObjects, S3Server
from tests.region.regions import (
    RECORD_BYTES,
    S3_KEYS,
    STORES,
    arguments,
    chain,
    content,
    init,
    read,
    regions_file,
    space_of,
    status,
    store,
    until,
)
from tests.region.test_mirror_process import bucket
from tests.running import Daemon, Place
from tiers.packs.pack_io import copy_pack
from tiers.packs.packs import PACKS

ROUNDS = int(os.environ.get("ROUNDS", "3"))
PROMPTS = 6  # of a round
BLOCKS = 12  # of a prompt
PACK_BLOCKS = 4
SETTINGS = ("--set=durable.seen_times=1", f"--set=durable.pack_bytes={PACK_BLOCKS * RECORD_BYTES}")
Serve = Callable[..., Daemon]


@pytest.fixture(params=STORES)
def regions(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in S3_KEYS.items():
        monkeypatch.setenv(name, value)
    s3: S3Server | None = request.getfixturevalue("s3_server") if request.param == "s3" else None
    file = regions_file(tmp_path, "na", s3=s3)
    init(file, "na")
    return file


async def _announced(file: Path) -> set[bytes]:
    """The hashes of all blocks in the feed; every pack of them is in the bucket, and each of its bytes is right."""
    objects, seen = bucket(file, "na"), MemoryObjects()
    found: set[bytes] = set()
    names = [info.name async for page in objects.list(FEED) for info in page]
    for name in names:
        writer = name[len(FEED) :].partition("/")[0]
        segment = decode(bytes(await objects.get(name)), writer, segment_number(name))
        for entry in segment.entries:
            await copy_pack(
                objects, seen, entry.pack
            )  # compares each record; raises where one is missing or wrong
            seen.stored.clear()
            found.update(entry.pack.header.each_hash())
    return found


async def _packs(file: Path) -> int:
    return sum([len(page) async for page in bucket(file, "na").list(PACKS)])


def packs(file: Path) -> int:
    """How many are in the bucket, announced or not."""
    return asyncio.run(_packs(file))


def announced(file: Path) -> set[bytes]:
    return asyncio.run(_announced(file))


def prefix(hashes: Sequence[bytes], there: set[bytes]) -> int:
    """How many leading blocks are announced; nothing is, behind one that is not."""
    flags = [block_hash in there for block_hash in hashes]
    length = flags.index(False) if False in flags else len(flags)
    assert not any(flags[length:]), "a block is durable without its ancestors"
    return length


def look(client: Client, prompts: Sequence[Sequence[bytes]], tickets: Iterator[int]) -> None:
    for hashes in prompts:
        client.lookup([space_of(client)], hashes, ticket=next(tickets), tokens=len(hashes) * 64)


def check(client: Client, space: Namespace, prompts: Sequence[Sequence[bytes]], there: set[bytes]) -> int:
    """A node finds all that is announced, and gives it back byte by byte; returns how many blocks that are."""
    blocks = 0
    for hashes in prompts:
        length = prefix(hashes, there)
        # What it did not get once, on a busy machine, it does not hold for a minute.
        until(lambda: client.lookup([space], hashes) >= length, 120.0)  # noqa: B023 called in this round
        until(lambda: read(client, space, hashes[:length]) == length, 120.0)  # noqa: B023 called in this round
        blocks += length
    return blocks


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_daemon_that_is_killed_while_it_persists(tmp_path: Path, serve: Serve, regions: Path) -> None:
    """After each kill everything announced is in the bucket and true, prefixes are whole, nothing that was durable is not; the
    daemon that starts again and another one that never computed it give it back; in the end all of it is durable."""
    chance, tickets = random.Random(7), count(1)
    for name in ("killed", "other"):
        (tmp_path / name).mkdir()
    place, other_place = Place(tmp_path / "killed"), Place(tmp_path / "other")
    words = arguments(
        place, regions, "na", *SETTINGS, f"--set=nvme.directories={tmp_path / 'killed' / 'nvme'}"
    )
    other = serve(other_place, *arguments(other_place, regions, "na", *SETTINGS))
    prompts: list[list[bytes]] = []
    figures = {"in_part": 0, "blocks_checked": 0}
    with Client(str(other.socket), timeout_s=20.0) as reader:
        for number in range(ROUNDS):
            daemon = serve(place, *words)
            fresh = [chain(f"{number} {index}", BLOCKS) for index in range(PROMPTS)]
            with Client(str(daemon.socket), timeout_s=20.0) as client:
                until(lambda: status(client)["open"])
                figures["blocks_checked"] += check(
                    client, space_of(client), prompts[-PROMPTS:], announced(regions)
                )
                figures["blocks_checked"] += check(
                    reader, space_of(reader), prompts[-PROMPTS:], announced(regions)
                )
                before, put = len(announced(regions)), packs(regions)
                for hashes in fresh:
                    store(client, space_of(client), hashes)
                look(client, fresh, tickets)
                dies_after = put + chance.randrange(PROMPTS * BLOCKS // PACK_BLOCKS + 1)
                until(lambda: packs(regions) >= dies_after)  # noqa: B023 called in this round
                time.sleep(chance.uniform(0.0, 0.5))  # when it dies; nothing is waited for
                durable = status(client)["blocks"]
                daemon.stop(signal.SIGKILL)
            prompts += fresh
            there = announced(regions)
            assert len(there) >= max(durable, before), "what was durable is not"
            figures["in_part"] += 0 < len(there) - before < PROMPTS * BLOCKS
        daemon = serve(place, *words)
        with Client(str(daemon.socket), timeout_s=20.0) as client:
            until(lambda: status(client)["open"])
            for hashes in prompts[-2 * PROMPTS :]:
                store_what_lacks(client, hashes)
            until(lambda: _all_asked(client, prompts[-2 * PROMPTS :], tickets, regions), 120.0)
        there = announced(regions)
        figures["blocks_checked"] += check(reader, space_of(reader), prompts, there)
    assert daemon.stop() == other.stop() == 0
    print(f"{ROUNDS} kills, {len(there)} blocks durable, {figures}")


def store_what_lacks(client: Client, hashes: Sequence[bytes]) -> None:
    """As an engine would: what the node has not is computed again, and stored when there is room."""
    space = space_of(client)

    def is_held() -> bool:
        client.put(space, hashes, b"", list(map(content, hashes)))
        return client.lookup([space], hashes) == len(hashes)

    until(is_held)


def _all_asked(
    client: Client, prompts: Sequence[Sequence[bytes]], tickets: Iterator[int], file: Path
) -> bool:
    """Whether all of these are durable; asks for them once more."""
    look(client, prompts, tickets)
    time.sleep(0.2)
    there = announced(file)
    return all(block_hash in there for hashes in prompts for block_hash in hashes)
