"""Accounts: the right reason for every missed token, and totals that outlive the daemon."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvstore.engine.engine import Engine
from kvstore.engine.lookups import Lookup
from kvstore.errors import BadRequest
from kvstore.index.block import Namespace
from kvstore.index.evicted import Evicted
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.ledger import totals as totals_module
from kvstore.ledger.accounts import Asking, Found
from kvstore.ledger.totals import HOUR_S, Totals
from kvstore.protocol import outcomes
from kvstore.protocol.frames import FRAME_BYTES_MAX, Acquired
from kvstore.protocol.residency_bits import IN_ANY, IN_DRAM, IN_NVME
from kvstore.residency.levels import Drive
from kvstore.steps import finish
from tests.engine.fakes import FaultyDevice, SteppedIo, granted, held
from tiers.checksum import digest
from tiers.dram.arena import open_arena
from tiers.namespace_spec import NamespaceSpec

MIB = 1 << 20
RECORD_BYTES = MIB // 2  # four slots in an arena of one slab
BLOCK_TOKENS = 16
FIELDS = {"model": "tiny", "tenant": "acme"}


class Node:
    """An engine with four slots of DRAM, perhaps `nvme`, and a client that asks with tickets."""

    def __init__(
        self,
        path: Path,
        nvme: FaultyDevice | None = None,
        totals: Totals | None = None,
        prefill_tokens_per_s: float = 0.0,
    ) -> None:
        self.arena = open_arena(path, 2 * MIB, 2 * MIB, 16384)
        self.io = SteppedIo()
        self.now_s = 1000.0 * HOUR_S
        self.totals = totals or Totals("na")
        self.engine = Engine(
            self.arena,
            [Drive(nvme, self.io)] if nvme is not None else [],
            NamespaceRegistry(),
            self.io,
            clock=lambda: self.now_s,
            totals=self.totals,
            wall_clock=lambda: self.now_s,
        )
        self.engine.lookups.break_even.configured = prefill_tokens_per_s
        self.engine.adopt()
        self.io.run()
        self.device = nvme
        self.session = self.engine.open_session(0)
        self.space = self.register(b"a")

    def register(self, name: bytes) -> int:
        return self.engine.register(NamespaceSpec(name * 16, RECORD_BYTES, 8, BLOCK_TOKENS, FIELDS))

    def put(self, *names: str, space: int | None = None, commit: bool = True) -> int:
        number = self.space if space is None else space
        self.now_s += 1
        answer = self.engine.reserve(self.session, number, hashes(*names), b"")
        views = [self.arena.mapping[s.offset : s.offset + RECORD_BYTES] for s in granted(answer)]
        if granted(answer) and commit:
            sums = b"".join(map(digest, views))
            self.engine.commit(self.session, answer.lease, [s.position for s in granted(answer)], sums)
        return len(granted(answer))

    def ask(self, *names: str, spaces: tuple[int, ...] = (), **asking: float) -> int:
        numbers = list(spaces) or [self.space]
        what = Asking(**asking)  # type: ignore[arg-type]
        found = self.engine.find(numbers, hashes(*names), what)
        self.engine.book(numbers, hashes(*names), found, what)
        return found.usable

    def tokens(self) -> dict[str, int]:
        """All tokens so far by outcome, without the zeros; the books balance."""
        assert self.engine.check() == []
        rows = self.totals.since(0)
        sums = {name: sum(row.tokens[n] for row in rows) for n, name in enumerate(outcomes.NAMES)}
        return {name: count for name, count in sums.items() if count}


def hashes(*names: str) -> bytes:
    return b"".join(name.encode().ljust(8) for name in names)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "arena")
    yield made
    made.arena.close(unlink=True)


@pytest.fixture
def two_tiers(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "arena", FaultyDevice(4))
    yield made
    made.io.run()
    made.arena.close(unlink=True)


def test_hits_the_engines_own_and_the_tail(node: Node) -> None:
    """A prompt of three blocks and five tokens: one block local, one held, one new, and the rest."""
    node.put("a0", "a1")
    assert node.ask("a0", "a1", "a2", tokens=53, local_tokens=16) == 2
    assert node.tokens() == {"engine": 16, "dram": 16, "never_seen": 16, "partial_block": 5}


def test_local_tokens_that_end_inside_a_block(node: Node) -> None:
    """Tokens are counted, not blocks: eight of the second block are the engine's own."""
    node.put("a0", "a1", "a2")
    node.ask("a0", "a1", "a2", tokens=48, local_tokens=24)
    assert node.tokens() == {"engine": 24, "dram": 24}


def test_a_last_block_alone_is_computed(node: Node) -> None:
    """vLLM computes one token of every prompt; a load of its block would cost a step that computes it anyway."""
    node.put("a0", "a1", "a2")
    assert node.ask("a0", "a1", "a2", tokens=48, local_tokens=32) == 2
    assert node.tokens() == {"engine": 32, "slower": 16}
    assert node.ask("a0", "a1", "a2", tokens=49, local_tokens=32) == 3
    assert node.ask("a0", tokens=16) == 1  # of an engine that has nothing


def test_local_tokens_beyond_the_prompt_are_the_prompt(node: Node) -> None:
    """A client that claims more than there is gets no more than the prompt."""
    node.ask("a0", tokens=16, local_tokens=1 << 30)
    assert node.tokens() == {"engine": 16}


def test_evicted_from_dram(node: Node) -> None:
    """Without a second tier, what made room was evicted from DRAM; what was never there was not."""
    node.put("a0", "a1", "a2", "a3")
    node.put("b0", "b1")
    assert node.ask("a0", "a1", "a2", "a3", "a4") == 2
    assert node.tokens() == {"dram": 32, "evicted_dram": 32, "never_seen": 16}


def test_evicted_from_nvme(two_tiers: Node) -> None:
    """With one, the last tier that held it is the one it was evicted from."""
    for name in "abc":
        two_tiers.put(*(f"{name}{depth}" for depth in range(4)))
        two_tiers.io.run()
    two_tiers.ask("a0", "a1", "a2", "a3")
    assert two_tiers.tokens() == {"evicted_nvme": 64}


def test_hits_are_counted_by_the_tier_they_are_in(two_tiers: Node) -> None:
    """Two blocks left DRAM and are on NVMe, two are in DRAM."""
    two_tiers.put("a0", "a1", "a2", "a3")
    two_tiers.io.run()
    two_tiers.put("b0", "b1", commit=False)
    two_tiers.ask("a0", "a1", "a2", "a3")
    assert two_tiers.tokens() == {"dram": 32, "nvme": 32}


def test_being_written(node: Node) -> None:
    """Blocks that another client has reserved and not committed are on their way."""
    node.put("a0", "a1", commit=False)
    node.ask("a0", "a1", "a2")
    assert node.tokens() == {"writing": 32, "never_seen": 16}


def test_no_room_is_not_admitted(node: Node) -> None:
    """Everything is leased: new blocks are refused, and a later miss on them says so."""
    node.put("a0", "a1", "a2", "a3")
    answers: list[Acquired] = []
    node.engine.acquire(node.session, node.space, hashes("a0", "a1", "a2", "a3"), answers.append)
    assert node.put("b0", "b1") == 0
    node.ask("b0", "b1")
    assert node.tokens() == {"not_admitted": 32}
    node.engine.release(node.session, answers[0].lease)


def test_behind_a_gap_the_gap_is_the_reason(node: Node) -> None:
    """Held blocks whose parent was evicted are missed because of the parent."""
    node.put("a0", "a1", "a2", "a3")
    space = node.engine.namespaces.get(node.space)
    node.engine.blocks.left_dram(space.blocks[b"a1".ljust(8)], why=outcomes.CORRUPT)
    assert node.ask("a0", "a1", "a2", "a3") == 1
    assert node.tokens() == {"dram": 16, "corrupt": 48}


def test_a_corrupt_record_turns_hits_into_misses(two_tiers: Node) -> None:
    """A lookup promises what is on NVMe; the load finds one byte flipped; the client settles."""
    two_tiers.put("a0", "a1", "a2", "a3")
    two_tiers.io.run()
    two_tiers.put("b0", "b1", "b2", "b3", commit=False)
    two_tiers.engine.close_session(two_tiers.session)
    two_tiers.session = two_tiers.engine.open_session(0)
    nvme = two_tiers.device
    assert isinstance(nvme, FaultyDevice)
    nvme.flip(b"a" * 16 + hashes("a2"))
    assert two_tiers.ask("a0", "a1", "a2", "a3", ticket=7) == 4
    two_tiers.engine.arena.sweep()
    answers: list[Acquired] = []
    two_tiers.engine.acquire(
        two_tiers.session, two_tiers.space, hashes("a0", "a1", "a2", "a3"), answers.append
    )
    two_tiers.io.run()
    assert [slot is not None for slot in held(answers[0])] == [True, True, False, True]
    two_tiers.engine.settle(7, 32, two_tiers.space, hashes("a2"))
    assert two_tiers.tokens() == {"nvme": 32, "corrupt": 32}
    two_tiers.engine.settle(7, 48, two_tiers.space, hashes("a3"))  # another rank, that got further
    assert two_tiers.tokens() == {"nvme": 32, "corrupt": 32}
    two_tiers.engine.release(two_tiers.session, answers[0].lease)


def test_a_block_that_came_too_late_is_unavailable(node: Node) -> None:
    """It is still held, so its tier did not deliver it in time."""
    node.put("a0", "a1")
    node.ask("a0", "a1", ticket=1)
    node.engine.settle(1, 16, node.space, hashes("a1"))
    assert node.tokens() == {"dram": 16, "unavailable": 16}


def test_what_the_engine_cannot_start_behind(node: Node) -> None:
    """Settled without a missing block: what was found is of no use there."""
    node.put("a0", "a1", "a2")
    node.ask("a0", "a1", "a2", ticket=1)
    node.engine.settle(1, 32, node.space, b"")
    assert node.tokens() == {"dram": 32, "unusable": 16}


def test_a_request_that_asks_again_counts_once(node: Node) -> None:
    """An engine asks at every step until it has memory for the request; the last answer counts."""
    for _ in range(5):
        node.ask("a0", "a1", ticket=9)
    node.put("a0", "a1")
    node.ask("a0", "a1", ticket=9)
    assert node.tokens() == {"dram": 32}
    assert sum(row.lookups for row in node.totals.since(0)) == 1


def test_a_prefix_saved_only_what_came(node: Node) -> None:
    """What a settled load did not bring, and what asking again did not find, is not saved by a prefix."""
    node.ask("a0", "a1", ticket=1)
    assert node.totals.heaviest(9) == []
    node.put("a0", "a1", "a2")
    for _ in range(3):
        node.ask("a0", "a1", "a2", ticket=1)
    node.ask("a0", "a1", "a2", ticket=2)
    assert [(p.uses, p.tokens_saved) for p in node.totals.heaviest(9)] == [(2, 96)]
    node.engine.settle(1, 16, node.space, b"")
    node.engine.settle(1, 32, node.space, b"")
    node.ask("a0", "a1", "a2", ticket=2, local_tokens=32)
    assert [(p.uses, p.tokens_saved) for p in node.totals.heaviest(9)] == [(2, 32)]
    assert node.tokens() == {"engine": 32, "dram": 32, "unusable": 32}


def test_further_namespaces_only_take_away(node: Node) -> None:
    """A second KV group holds one block less: that one is a miss, for the second group's reason."""
    other = node.register(b"b")
    node.put("a0", "a1")
    node.put("a0", space=other)
    node.ask("a0", "a1", "a2", ticket=3)
    node.ask("a0", "a1", spaces=(other,), ticket=3, more=True)
    assert node.tokens() == {"dram": 16, "never_seen": 32}
    assert sum(row.lookups for row in node.totals.since(0)) == 1


def test_all_namespaces_of_one_lookup_must_hold_a_block(node: Node) -> None:
    """The reason is that of the namespace that lacks it."""
    other = node.register(b"b")
    node.put("a0", "a1")
    node.put("a0", space=other)
    node.put("a1", space=other, commit=False)
    assert node.ask("a0", "a1", spaces=(node.space, other)) == 1
    assert node.tokens() == {"dram": 16, "writing": 16}


def test_explain_tells_what_a_lookup_would_count(node: Node) -> None:
    """The outcome of each block and where it is; no lookup is counted."""
    node.put("a0", "a1", "a2", "a3")
    node.put("b0")
    places, judged, _ = finish(node.engine.explain_steps([node.space], hashes("a0", "a1", "a2", "a3", "x")))
    assert [outcomes.NAMES[n] for n in judged] == ["dram", "dram", "dram", "evicted_dram", "never_seen"]
    assert list(places[0]) == [1, 1, 1, 0, 0]
    assert node.tokens() == {}


def test_prefill_seconds_saved_follow_the_hits(node: Node) -> None:
    """At 100 tokens a second, 32 tokens hit save 0.32 s; settled to 16, half of it."""
    node.put("a0", "a1")
    node.ask("a0", "a1", ticket=1, prefill_tokens_per_s=100.0)
    assert node.totals.since(0)[0].prefill_s_saved == pytest.approx(0.32)
    node.engine.settle(1, 16, node.space, b"")
    assert node.totals.since(0)[0].prefill_s_saved == pytest.approx(0.16)


def test_a_prefill_speed_that_cannot_be_is_none(node: Node) -> None:
    """One absurd figure of one engine would stand in every sum of its hour."""
    node.put("a0")
    node.ask("a0", prefill_tokens_per_s=1e-300)
    assert [row.prefill_s_saved for row in node.totals.since(0)] == [0.0]


def test_a_prompt_without_a_whole_block_is_counted(node: Node) -> None:
    """Nothing is asked for by name, and its tokens are in the account."""
    assert node.ask(tokens=7, local_tokens=2) == 0
    assert node.tokens() == {"engine": 2, "partial_block": 5}


def test_bytes_are_counted_where_they_move(tmp_path: Path) -> None:
    """Four blocks stored and written down; one that left DRAM is promoted and read."""
    two_tiers = Node(tmp_path / "arena", FaultyDevice(8))
    two_tiers.put("a0", "a1", "a2", "a3")
    two_tiers.io.run()
    two_tiers.put("b0")
    two_tiers.io.run()
    answers: list[Acquired] = []
    two_tiers.engine.acquire(two_tiers.session, two_tiers.space, hashes("a3"), answers.append)
    two_tiers.io.run()
    row = two_tiers.totals.since(0)[0].as_dict()
    assert row["bytes"] == {
        "stored": 5 * RECORD_BYTES,
        "loaded": RECORD_BYTES,
        "promoted": RECORD_BYTES,
        "demoted": 5 * RECORD_BYTES,
    }
    two_tiers.engine.release(two_tiers.session, answers[0].lease)
    two_tiers.arena.close(unlink=True)


def test_totals_survive_a_restart(tmp_path: Path) -> None:
    """Rows of two hours and the heaviest prefix are there again, and go on counting."""
    path = tmp_path / "totals.sqlite"
    node = Node(tmp_path / "arena", totals=Totals("na", path))
    node.put("a0", "a1")
    node.ask("a0", "a1")
    node.engine.tick()
    node.io.run()
    node.now_s += HOUR_S
    node.ask("a0", "a1", "a2")
    node.engine.tick()
    node.io.run()
    again = Totals("na", path)
    assert [row.as_dict() for row in again.since(0)] == [row.as_dict() for row in node.totals.since(0)]
    assert [row.tokens[outcomes.HIT_DRAM] for row in again.since(node.now_s)] == [32]
    assert [(p.tokens, p.uses, p.tokens_saved) for p in again.heaviest(9)] == [(32, 2, 64)]
    node.arena.close(unlink=True)


def test_old_prefixes_hide_none_that_was_hit_since(tmp_path: Path) -> None:
    """However much prefixes saved last week: a report tells of those that were hit in its time."""
    node = Node(tmp_path / "arena")
    totals, space = node.totals, node.engine.namespaces.get(node.space)
    for number in range(60):
        totals.used(space, number.to_bytes(8, "big"), 100, 10_000, node.now_s)
    later_s = node.now_s + 100 * HOUR_S
    totals.used(space, b"new one!", 100, 1, later_s)
    told = finish(node.engine.report_steps(later_s - 24 * HOUR_S))["prefixes"]
    assert isinstance(told, list)
    assert [prefix["block_hash"] for prefix in told] == [b"new one!".hex()]
    assert [prefix.tokens_saved for prefix in totals.heaviest(2)] == [10_000, 10_000]
    node.arena.close(unlink=True)


def test_a_configured_prefill_speed_counts_where_engines_tell_none(tmp_path: Path) -> None:
    """What a hit saved is worked out at the speed that decides about loading, told, learned or configured."""
    node = Node(tmp_path / "arena", prefill_tokens_per_s=100.0)
    node.put("a0", "a1")
    node.ask("a0", "a1")
    (row,) = node.totals.since(0)
    assert row.prefill_s_saved == pytest.approx(32 / 100.0)
    node.ask("a0", "a1", prefill_tokens_per_s=1000.0)
    assert row.prefill_s_saved == pytest.approx(32 / 100.0 + 32 / 1000.0)
    node.arena.close(unlink=True)


def test_a_damaged_file_of_totals_is_put_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is renamed, told in the log, and a new file begins."""
    path = tmp_path / "totals.sqlite"
    path.write_bytes(b"not a database, whatever its name says" * 200)
    totals = Totals("na", path)
    assert totals.since(0) == [] and path.with_suffix(".unreadable").exists()
    assert "totals of earlier days are lost" in caplog.text
    node = Node(tmp_path / "arena", totals=totals)
    node.ask("a0")
    node.engine.tick()
    node.io.run()
    assert len(Totals("na", path).since(0)) == 1
    node.arena.close(unlink=True)


def test_totals_that_cannot_be_saved_are_saved_later(tmp_path: Path) -> None:
    """The disk refuses once; nothing is lost when it takes writes again."""
    path = tmp_path / "there" / "totals.sqlite"
    path.parent.mkdir()
    totals = Totals("na", path)
    path.parent.rename(tmp_path / "away")
    node = Node(tmp_path / "arena", totals=totals)
    node.ask("a0")
    node.engine.tick()
    node.io.run()
    (tmp_path / "away").rename(path.parent)
    node.now_s += 60
    node.engine.tick()
    node.io.run()
    assert [row.tokens_asked for row in Totals("na", path).since(0)] == [16]
    node.arena.close(unlink=True)


def test_rows_that_are_too_old_are_forgotten(tmp_path: Path) -> None:
    """After 91 days a row is gone, from memory and from disk, when there are two newer hours."""
    path = tmp_path / "totals.sqlite"
    node = Node(tmp_path / "arena", totals=Totals("na", path))
    for passed_s in (0, 91 * 24 * HOUR_S, HOUR_S):
        node.now_s += passed_s
        node.ask("a0")
        node.engine.tick()
        node.io.run()
    assert len(node.totals.since(0)) == 2 and len(Totals("na", path).since(0)) == 2
    node.arena.close(unlink=True)


def test_the_heaviest_prefixes_are_found_among_many() -> None:
    """Ten prefixes of many uses stand out of ten thousand that are used once."""
    totals, draw = Totals(), random.Random(4)
    namespace = Namespace(0, NamespaceSpec(bytes(16), 1, 8))
    uses = [n for n in range(10) for _ in range(300)] + list(range(1000, 11_000))
    draw.shuffle(uses)
    for step, name in enumerate(uses):
        totals.used(namespace, name.to_bytes(8, "big"), 100, 100, float(step))
    heaviest = totals.heaviest(10)
    assert sorted(int(prefix.block_hash, 16) for prefix in heaviest) == list(range(10))
    assert all(p.tokens_saved - p.error_tokens <= 30_000 <= p.tokens_saved for p in heaviest)


def test_departed_keys_are_remembered_compactly() -> None:
    """The latest keys are known, two namespaces are kept apart, and memory does not grow."""
    first = Namespace(0, NamespaceSpec(b"a" * 16, 1, 8))
    second = Namespace(1, NamespaceSpec(b"b" * 16, 1, 8))
    evicted = Evicted(4096)
    numbers = [number.to_bytes(8, "big") for number in range(100_000)]
    evicted.note(first.names_of(numbers), outcomes.EVICTED_DRAM)
    evicted.note(first.names_of(numbers[-1:]), outcomes.CORRUPT)
    for why in (outcomes.EVICTED_DRAM, outcomes.CORRUPT):  # again, so that it is there already
        evicted.note(first.names_of(numbers[-1:]), why)
    assert evicted.whys(first, [(99_999).to_bytes(8, "big")]) == [outcomes.CORRUPT]
    latest = evicted.whys(first, [n.to_bytes(8, "big") for n in range(98_500, 99_999)])
    assert sum(why == outcomes.EVICTED_DRAM for why in latest) > 1200
    assert evicted.whys(first, [(5).to_bytes(8, "big")]) == [0]
    assert evicted.whys(second, [(99_999).to_bytes(8, "big")]) == [0]
    assert len(evicted._words) == 4096


def test_namespaces_with_other_hashes_are_not_looked_up_together(node: Node) -> None:
    """One run of bytes is no chain of both: the question is refused, and nothing is booked."""
    longer = node.engine.register(NamespaceSpec(b"c" * 16, RECORD_BYTES, 16, BLOCK_TOKENS, FIELDS))
    node.put("a0", "a1")
    node.put("a0", "a1", space=longer)
    with pytest.raises(BadRequest, match="different sizes"):
        node.ask("a0", "a1", spaces=(node.space, longer))
    with pytest.raises(BadRequest, match="different sizes"):
        finish(node.engine.explain_steps([node.space, longer], hashes("a0", "a1")))
    assert node.tokens() == {}


def test_a_page_behind_the_last_row_is_empty(node: Node) -> None:
    """However many rows are skipped, none are left, and not less than none."""
    node.ask("a0")
    report = finish(node.engine.report_steps(0.0, skip=1 << 62))
    assert (report["rows"], report["rows_left"]) == ([], 0)


def test_new_hours_are_told_apart_however_many_rows_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the limit the oldest hours become one row each; sums stay, also in the file."""
    monkeypatch.setattr(totals_module, "TOTALS_ROWS_MAX", 16)
    path = tmp_path / "totals.sqlite"
    node = Node(tmp_path / "arena", totals=Totals("na", path))
    tenants = [
        node.engine.register(
            NamespaceSpec(bytes([n]) * 16, RECORD_BYTES, 8, BLOCK_TOKENS, {"tenant": f"t{n}"})
        )
        for n in range(4)
    ]
    for _ in range(10):
        for number in tenants:
            node.ask("a0", spaces=(number,))
        node.engine.tick()
        node.io.run()
        node.now_s += HOUR_S
    for totals in (node.totals, Totals("na", path)):
        rows = totals.since(0)
        assert len(rows) <= 16 and not any(totals.check_slices())
        assert sum(row.tokens_asked for row in rows) == 10 * 4 * BLOCK_TOKENS
        newest = [row.tenant for row in rows if row.hour_s == rows[-1].hour_s]
        assert newest == ["t0", "t1", "t2", "t3"]
    node.arena.close(unlink=True)


def test_more_tenants_than_rows_cost_one_look_at_all_rows_an_hour(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all rows are of this hour nothing can be put together; it is not tried for each tenant of each minute."""
    looks = []
    monkeypatch.setattr(totals_module, "TOTALS_ROWS_MAX", 16)
    put_together = Totals._put_together
    monkeypatch.setattr(
        Totals, "_put_together", lambda totals, hour_s: looks.append(1) or put_together(totals, hour_s)
    )
    spaces = [
        node.engine.register(
            NamespaceSpec(bytes([n]) * 16, RECORD_BYTES, 8, BLOCK_TOKENS, {"tenant": f"t{n}"})
        )
        for n in range(30)
    ]
    for hours in (1, 2):
        node.now_s = hours * HOUR_S
        for _ in range(3):
            looks.clear()
            for number in spaces:
                node.ask("a0", spaces=(number,))
            node.now_s += 60
        assert not looks, "what was old was put together in the first minute"


def test_a_report_with_the_longest_names_fits_a_frame(node: Node) -> None:
    """Fewer rows are told at once then; all of them in several answers."""
    for number in range(700):
        name = f"{number:04d}".ljust(1024, "\N{EURO SIGN}")
        spec = NamespaceSpec(number.to_bytes(16, "big"), RECORD_BYTES, 8, 16, {"model": name, "tenant": name})
        node.ask("a0", spaces=(node.engine.register(spec),))
    told: list[str] = []
    while True:
        report = finish(node.engine.report_steps(0.0, len(told)))
        assert len(msgspec.msgpack.encode(report)) < FRAME_BYTES_MAX
        told += [row["tenant"][:4] for row in report["rows"]]  # type: ignore[attr-defined]
        if not report["rows_left"]:
            break
    assert told == [f"{number:04d}" for number in range(700)]


def test_what_is_measured_is_what_a_lookup_was_refused_for(two_tiers: Node) -> None:
    """Of two namespaces only the second needs NVMe: its record is the one to probe with."""
    other = two_tiers.register(b"b")
    two_tiers.put("a0", space=other)
    two_tiers.io.run()
    two_tiers.put("b0", "b1", "b2", space=other)
    two_tiers.io.run()
    assert isinstance(two_tiers.device, FaultyDevice)
    two_tiers.engine.nvme.members[0].stores._trip("test")  # nothing is written, so nothing leaves
    two_tiers.put("a0")
    found = Found(0, 1, outcomes.SLOWER)
    spaces = [two_tiers.engine.namespaces.get(number) for number in (two_tiers.space, other)]
    assert [space.blocks[hashes("a0")].where & IN_ANY for space in spaces] == [IN_DRAM, IN_NVME]
    two_tiers.engine.lookups.note(Lookup(spaces, hashes("a0"), Asking()), found)
    two_tiers.engine.look()
    assert two_tiers.engine.counters.nvme_probes == 1
