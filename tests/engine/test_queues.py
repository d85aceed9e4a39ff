"""Queues: every one has a limit, something defined happens there, and the manual says what."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore import io_pool
from kvstore.engine.queues import queues
from kvstore.io_pool import IoPool
from kvstore.movement import loading, waiting, writing
from kvstore.protocol.frames import Acquired
from kvstore.residency import write_queue
from tests.engine.fakes import FaultyDevice, held
from tests.engine.test_room import Node

MANUAL = Path(__file__).parents[2] / "docs" / "operations.md"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Twelve places in DRAM; chains a, b, c lie on NVMe, and the last of them in DRAM, too."""
    made = Node(tmp_path / "arena", 3, FaultyDevice(40))
    for chain in "abcd":
        made.put(*(f"{chain}{depth:02d}" for depth in range(10)))
        made.io.run()
    yield made
    made.io.run()
    assert made.engine.check() == []
    made.arena.close(unlink=True)


def beyond_limits(node: Node) -> list[dict[str, object]]:
    return [row for row in queues(node.engine) if int(str(row["length"])) > int(str(row["limit"]))]


def ask(node: Node, name: str, answers: list[Acquired]) -> None:
    node.engine.acquire(node.session, node.space, name.encode().ljust(8), answers.append)


def test_the_manual_names_every_queue_and_its_limit(node: Node) -> None:
    """The table in docs/operations.md has one line per queue, with the limit that is in force."""
    rows = re.findall(r"^\| `(\w+)` \| ([\d  ]+) \|", MANUAL.read_text(encoding="utf-8"), re.MULTILINE)
    assert {name: int(re.sub(r"\D", "", limit)) for name, limit in rows} == {
        row["name"]: row["limit"] for row in queues(node.engine)
    }


def test_loads_beyond_the_limit_are_misses(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four loads may wait: a fifth block is answered as a miss at once, and counted."""
    monkeypatch.setattr(waiting, "LOADS_WAITING_MAX", 4)
    answers: list[Acquired] = []
    for depth in range(6):
        ask(node, f"a{depth:02d}", answers)
        assert node.engine.loader.underway <= 4
    assert [held(answer) for answer in answers] == [[None], [None]]
    assert node.engine.counters.loads_refused == 2
    node.io.run()
    assert sum(held(answer)[0] is not None for answer in answers) == 4


def test_waiters_beyond_the_limit_are_told_at_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three may wait for one block; the fourth is told that it does not come."""
    monkeypatch.setattr(waiting, "LOAD_WAITERS_MAX", 3)
    answers: list[Acquired] = []
    for _ in range(4):
        ask(node, "a00", answers)
    assert [held(answer) for answer in answers] == [[None]]
    assert node.engine.loader.waiting.count == 3
    node.io.run()
    assert node.engine.loader.waiting.count == 0


def test_the_oldest_demotion_gives_way(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a limit of three the oldest block stays in DRAM only; it may be evicted, and is counted."""
    monkeypatch.setattr(write_queue, "DEMOTING_MAX", 3)
    monkeypatch.setattr(writing, "DEMOTE_BATCH_RECORDS", 1)
    node.put("x00", "x01", "x02", "x03", "x04")
    assert len(node.engine.blocks.writes.waiting) <= 3
    assert node.engine.counters.demotions_dropped == 2
    node.io.run()
    assert node.put(*(f"y{depth:02d}" for depth in range(12))) > 0


def test_a_full_pool_answers_failed_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its thread busy and two jobs waiting, a third one fails at once; an urgent one goes first."""
    monkeypatch.setattr(io_pool, "IO_ORDINARY_MAX", 2)
    posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    pool = IoPool(1, posted.put)
    begun, goes_on = threading.Event(), threading.Event()
    heard: list[str] = []

    def busy() -> str:
        begun.set()
        goes_on.wait(10)
        return "busy"

    pool.submit(busy, heard.append, failed="failed")
    assert begun.wait(10)
    for name in ("one", "two", "three"):
        pool.submit(lambda name=name: name, heard.append, failed=f"no {name}")
    pool.submit(lambda: "urgent", heard.append, failed="failed", urgent=True)
    assert pool.lengths() == (1, 2) and pool.refused == 1
    goes_on.set()
    for _ in range(5):
        posted.get(timeout=10)()
    pool.close()
    assert heard == ["no three", "busy", "urgent", "one", "two"]


def test_no_queue_exceeds_its_limit_under_pressure(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small limits, and stores and loads in any order, every queue stays within its limit."""
    for module, name, limit in (
        (waiting, "LOADS_WAITING_MAX", 5),
        (waiting, "LOAD_WAITERS_MAX", 7),
        (loading, "SUSPECTS_MAX", 3),
        (write_queue, "DEMOTING_MAX", 4),
        (write_queue, "UNDEMOTED_MAX", 4),
    ):
        monkeypatch.setattr(module, name, limit)
        monkeypatch.setattr(f"kvstore.engine.queues.{name}", limit)
    tier = node.device
    assert isinstance(tier, FaultyDevice)
    answers: list[Acquired] = []
    for turn in range(60):
        tier.fault_rate = (0.0, 1.0, 0.3)[turn // 7 % 3]
        ask(node, f"{'abcd'[turn % 4]}{turn % 10:02d}", answers)
        node.put(f"z{turn:03d}")
        assert not beyond_limits(node)
        if turn % 3 == 0:
            node.io.run()
            node.engine.tick()
            assert not beyond_limits(node)
        for answer in answers:
            if answer.lease:
                node.engine.release(node.session, answer.lease)
        answers.clear()
    node.engine.close_session(node.session)
    tier.fault_rate = 0.0


def test_a_block_that_is_offered_again_during_its_write_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropped from the full queue while it is written, offered again behind an open breaker: no second copy."""
    tier = FaultyDevice(40)
    node = Node(tmp_path / "other", 3, tier)
    monkeypatch.setattr(write_queue, "DEMOTING_MAX", 2)
    tier.hangs = True
    node.put("x00")
    block = node.engine.blocks.block_of(b"a" * 16 + b"x00".ljust(8))
    assert block is not None and block in node.engine.writer.writing
    node.put("y00", "y01")
    assert block not in node.engine.blocks.writes.waiting
    node.io.run()
    node.clock_s += 10
    node.engine.look()
    assert not node.engine.blocks.writes.accepting
    node.engine.blocks.writes.offer(block)
    node.put("z00")
    tier.hangs = False
    for _ in range(3):
        node.io.run()
        node.clock_s += 70
        node.engine.tick()
        assert node.engine.check() == []
    assert node.engine.counters.demoted == len(tier.records) == 4
    node.arena.close(unlink=True)
