"""What a lookup says of blocks that are on their way: reserved by somebody who lives, and not committed."""

from __future__ import annotations

import time

import pytest

from kvstore.client import IN_ANY, WRITING, Client, Leading, Namespace
from kvstore.engine import lookups
from tests.door.conftest import hashes_of, records_of, space_of
from tests.door.daemon import Daemon
from tiers.checksum import digest


def told(leading: Leading) -> tuple[int, int]:
    return int(leading), leading.writing


def writer(daemon: Daemon) -> Client:
    return Client(daemon.socket_path, timeout_s=20, label="writer")


def until_told(client: Client, space: Namespace, hashes: list[bytes], wanted: tuple[int, int]) -> None:
    deadline_s = time.monotonic() + 30
    while (now := told(client.lookup([space], hashes))) != wanted:
        assert time.monotonic() < deadline_s, now
        time.sleep(0.005)


def test_what_is_being_written_is_told_behind_what_is_held(daemon: Daemon, client: Client) -> None:
    """A lookup counts blocks that are held, then those being written up to the first that is neither."""
    space, hashes = space_of(client), hashes_of(10)
    client.put(space, hashes[:2], b"", records_of(2))
    assert told(client.lookup([space], hashes)) == (2, 0)
    with writer(daemon) as other:
        lease = other.reserve(space_of(other), hashes[2:6], hashes[1])
        client.put(space, hashes[6:8], hashes[5], records_of(2))
        assert told(client.lookup([space], hashes)) == (2, 6), "held behind what is being written"
        places = client.residency(space, hashes)
        assert list(places[2:6]) == [WRITING] * 4 and places[8] == 0 and not WRITING & IN_ANY
        for slot, record in zip(lease.slots, records_of(4), strict=True):
            slot.view[:] = record
        lease.commit({number: digest(record) for number, record in enumerate(records_of(4)) if number != 2})
        assert told(client.lookup([space], hashes)) == (4, 0), "the third was given up"
        assert WRITING not in client.residency(space, hashes)


def test_a_dead_writer_writes_nothing(daemon: Daemon, client: Client) -> None:
    """When the connection of a writer ends, so does what it was writing."""
    space, hashes = space_of(client), hashes_of(4)
    other = writer(daemon)
    other.reserve(space_of(other), hashes)
    assert told(client.lookup([space], hashes)) == (0, 4)
    other.close()
    until_told(client, space, hashes, (0, 0))


def test_each_namespace_must_hold_it_or_be_given_it(daemon: Daemon, client: Client) -> None:
    """Of several namespaces a block is on its way where each holds it or is being given it."""
    first, second, hashes = space_of(client, "a"), space_of(client, "b"), hashes_of(5)
    client.put(first, hashes[:4], b"", records_of(4))
    with writer(daemon) as other:
        other.reserve(space_of(other, "b"), hashes[:3])
        assert told(client.lookup([first, second], hashes)) == (0, 3)
        other.reserve(space_of(other, "a"), hashes[4:], hashes[3])
        other.reserve(space_of(other, "b"), hashes[3:], hashes[2])
        assert told(client.lookup([first, second], hashes)) == (0, 5)


def test_a_last_block_alone_is_computed(daemon: Daemon, client: Client) -> None:
    """Where only the last block of a prompt is missing the engine computes it anyway: nothing to wait for."""
    space, hashes = space_of(client), hashes_of(3)
    client.put(space, hashes[:2], b"", records_of(2))
    with writer(daemon) as other:
        other.reserve(space_of(other), hashes[2:], hashes[1])
        assert client.lookup([space], hashes, tokens=48, local_tokens=32).writing == 0
        assert client.lookup([space], hashes, tokens=48, local_tokens=16).writing == 1


def test_a_long_prompt_is_told_up_to_a_limit(
    daemon: Daemon, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much is being written, a lookup says no more of it than it can look at in passing."""
    monkeypatch.setattr(lookups, "LOOKUP_WRITING_MAX", 4)
    space, hashes = space_of(client), hashes_of(10)
    client.put(space, hashes[:3], b"", records_of(3))
    with writer(daemon) as other:
        other.reserve(space_of(other), hashes[3:], hashes[2])
        assert told(client.lookup([space], hashes)) == (3, 4)
