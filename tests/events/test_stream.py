"""The journal, the stream and a mirror of it: whatever is lost, a mirror ends up with what is held."""

from __future__ import annotations

import random
from collections import deque

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples.kv_events.mirror import Mirror, Wants
from kvstore.events import journal
from kvstore.events.journal import Journal
from kvstore.events.stream import Stream, Writer
from kvstore.events.wire import AllBlocksCleared, Batch, BlockRemoved, BlockStored, Event, Frames, hash_values
from kvstore.index import forest
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from tests.events.simulated import Follower, Shelf, name, space

ACTIONS = ("come", "come", "come", "go", "go", "publish", "publish", "slice", "take", "take", "beat")
RARE = ("deaf", "hear", "cut", "restart", "restart back")


def events_of(payload: bytes) -> list[Event]:
    return msgspec.msgpack.decode(payload, type=Batch).events


def act(shelf: Shelf, follower: Follower, chance: random.Random) -> None:
    """One thing happens."""
    action = chance.choice(RARE) if chance.random() < 0.04 else chance.choice(ACTIONS)
    number, block, bit = chance.randrange(2), chance.randrange(40), chance.choice((IN_DRAM, IN_NVME))
    match action:
        case "come":
            shelf.come(number, block, bit)
        case "go":
            shelf.go(number, block, bit)
        case "publish":
            shelf.publish()
        case "slice":
            shelf.read_slice()
        case "take":
            follower.take()
        case "beat":
            shelf.stream.beat()
        case "deaf":
            follower.deaf = True
        case "hear":
            follower.deaf = False
        case "cut":
            follower.lose_answer()
        case "restart":  # what was not published is lost with the process; an answer ends with it
            follower.lose_answer()
            shelf.start(shelf.stream.next + chance.randrange(10_000, 9_000_000))
        case "restart back":
            follower.lose_answer()
            shelf.start(shelf.stream.next - chance.randrange(10_000, 9_000_000))


@given(st.integers(0, 1 << 32), st.sampled_from([300, 3000, 1 << 20]), st.sampled_from([8, 1 << 20]))
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_mirror_ends_up_with_what_is_held(seed: int, kept_bytes_max: int, waiting_max: int) -> None:
    """Lost messages, cut answers, full journals, restarts, clocks put back: afterwards the mirror is exact."""
    chance = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "EVENTS_SLICE_BLOCKS", 5)
        shelf = Shelf(kept_bytes_max=kept_bytes_max, waiting_max=waiting_max, first=1 << 50)
        follower = Follower(shelf)
        for _ in range(400):
            act(shelf, follower, chance)
        follower.deaf = False
        shelf.publish()
        shelf.stream.beat()
        follower.catch_up()
        shelf.stream.beat()  # what a beat shows to be missing is missing no more
        assert follower.mirror.wants is Wants.NOTHING
        assert follower.mirror.held == shelf.truth()


def test_while_nothing_is_missing_each_batch_leaves_the_mirror_exact() -> None:
    """A mirror that wants nothing equals what was held when the last batch was published, at every batch."""
    chance = random.Random(7)
    shelf = Shelf(first=1 << 50)
    follower = Follower(shelf)
    follower.catch_up()
    proved = 0
    for _ in range(3000):
        act(shelf, follower, chance)
        follower.take()
        shelf.publish()
        if follower.mirror.wants is Wants.NOTHING and not follower.deaf:
            assert follower.mirror.next is not None and follower.mirror.next > follower.heard
            if follower.mirror.next == shelf.stream.next:
                assert follower.mirror.held == shelf.truth()
                proved += 1
    assert proved > 300


def test_a_short_gap_is_replayed_and_a_long_one_costs_everything() -> None:
    """A subscriber that missed what is still kept gets only that; else it gets all that is held."""
    shelf = Shelf(kept_bytes_max=2000)
    follower = Follower(shelf)
    follower.catch_up()
    asked = follower.asked_for_all
    for blocks, for_all in ((2, 0), (200, 1)):
        follower.deaf = True
        for block in range(blocks):
            shelf.come(0, block, IN_DRAM)
            shelf.publish()
        follower.deaf = False
        shelf.stream.beat()
        assert follower.mirror.wants is Wants.REPLAY
        follower.catch_up()
        assert follower.asked_for_all == asked + for_all
        assert follower.mirror.held == shelf.truth()
    assert shelf.stream.kept_bytes <= 2000


def test_a_full_journal_forgets_the_oldest_and_leaves_a_number_out() -> None:
    """Beyond its limit nothing is kept in memory, and the stream shows that something is missing. What is published goes one by
    one: all of it at once would hold up the engine's thread."""
    shelf = Shelf(waiting_max=10)
    follower = Follower(shelf)
    follower.catch_up()
    for block in range(25):
        shelf.come(0, block, IN_DRAM)
        assert shelf.journal.waiting <= 10
    assert shelf.journal.lost == 15
    before, taken = shelf.stream.next, shelf.journal.take()
    assert taken is not None
    shelf.stream.publish(taken)
    assert not taken.changes and shelf.stream.stored == 10
    assert (shelf.stream.gaps, shelf.stream.next) == (1, before + 2)
    assert follower.mirror.wants is Wants.REPLAY
    follower.catch_up()
    assert follower.mirror.held == shelf.truth()
    assert len(follower.mirror.held["dram", shelf.spaces[0].digest.hex()]) == 25


def test_neighbours_share_an_event_and_order_is_kept() -> None:
    """What comes in turn to one tier of one namespace is one event; a block that left and came again is held."""
    one, other = space(0, model="org/m", group="2"), space(1)
    blocks = [forest.arrived(one, name(n), b"", IN_DRAM) for n in range(3)]
    there = forest.arrived(other, name(9), b"", IN_NVME)
    kept = Journal()
    kept.came(IN_DRAM, blocks[:2])
    kept.came(IN_DRAM, blocks[2:])
    kept.left(IN_DRAM, blocks[:1])
    kept.came(IN_DRAM, blocks[:1])
    kept.came(IN_NVME, [there])
    taken = kept.take()
    assert taken is not None and kept.take() is None
    (payload,) = Writer("bytes", lambda: 12.5).batches(taken.changes)
    digest = "01" * 16
    common = {"group_idx": 2, "locality": "LOCAL", "ownership": f"kvstore/dram/{digest}/org/m"}
    stored: dict[str, object] = {
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 16,
        "lora_id": None,
        "lora_name": None,
    }
    assert msgspec.msgpack.decode(payload) == [
        12.5,
        [
            {"type": "BlockStored", "block_hashes": [name(0), name(1), name(2)], "medium": "CPU"} | stored | common,
            {"type": "BlockRemoved", "block_hashes": [name(0)], "medium": "CPU"} | common,
            {"type": "BlockStored", "block_hashes": [name(0)], "medium": "CPU"} | stored | common,
            {"type": "BlockStored", "block_hashes": [name(9)], "medium": "STORAGE"}
            | stored
            | {"locality": "LOCAL", "ownership": f"kvstore/nvme/{'02' * 16}/"},
        ],
        None,
    ]  # fmt: skip


def test_batches_are_bounded() -> None:
    """Many changes are many messages, none of which is large."""
    one = space()
    kept = Journal()
    blocks = [forest.arrived(one, name(n), b"", IN_DRAM) for n in range(10_000)]
    for block in blocks:
        kept.came(IN_DRAM, [block])
    taken = kept.take()
    assert taken is not None
    payloads = list(Writer("int", lambda: 0.0).batches(taken.changes))
    told = [h for p in payloads for e in events_of(p) if isinstance(e, BlockStored) for h in e.block_hashes]
    assert told == list(range(10_000))
    assert len(payloads) == 10 and max(map(len, payloads)) < 11_000


@pytest.mark.parametrize("size", [8, 20, 32, 64])
def test_numbers_are_the_last_eight_bytes(size: int) -> None:
    """A hash as a number is its low 64 bits, whatever its length."""
    hashes = [random.Random(n).randbytes(size) for n in range(5)]
    assert hash_values(hashes, "int") == [int.from_bytes(h, "big") & (1 << 64) - 1 for h in hashes]
    assert hash_values(hashes, "bytes") == hashes


def test_what_is_not_ours_is_refused_in_one_line() -> None:
    """A mirror says so when the stream is that of an engine, or no KV events at all."""
    foreign = Batch(0.0, [BlockRemoved([1], "GPU")])
    for payload, said in ((msgspec.msgpack.encode(foreign), "not of a kvstore"), (b"\xc1", "not a batch")):
        mirror = Mirror()
        mirror.wants, mirror.next = Wants.NOTHING, 5
        with pytest.raises(ValueError, match=said):
            mirror.live(5, payload)


def test_numbers_that_are_kept() -> None:
    """A replay begins with the first number that is kept, passes over those left out, and ends with the last."""
    sent: list[Frames] = []
    stream = Stream(Writer("int", lambda: 0.0), "", 1 << 20, 5, sent.append)
    assert (stream.kept_from(0), stream.kept_from(99)) == (5, 5)
    stream.beat()
    stream.publish(journal.Taken(deque(), True))
    stream.beat()
    assert [int.from_bytes(frames[1], "big") for frames in sent] == [5, 7]
    assert [stream.kept_from(n) for n in (0, 5, 6, 7, 8, 1 << 63)] == [5, 5, 7, 7, 8, 8]
    assert not any(isinstance(e, AllBlocksCleared) for frames in sent for e in events_of(frames[2]))
