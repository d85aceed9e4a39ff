"""The object level beside its bucket: whatever happens in its thread, every request is answered once, and it begins again."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.durable import region_level as level_module
from kvstore.durable.level import ObjectLevel
from kvstore.durable.loop_thread import LoopThread
from kvstore.durable.persister import Life
from kvstore.index.block import Namespace
from kvstore.movement.shared import SharedLimits, Wanted
from kvstore.steps import Steps
from replication.errors import RegionError
from replication.problems import Problem
from tiers.base import Get
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.packs import PackHeader

SPEC = NamespaceSpec(b"s" * 16, 64, 8, 16)


class Node:
    """A part in a region that fails when it is told to."""

    region, where = "na", "nowhere"

    def __init__(self) -> None:
        self.fails = asyncio.Event()
        self.closed = False

    async def run(self) -> None:
        await self.fails.wait()
        raise ValueError("a bug")

    def clock(self) -> float:
        return time.time()

    def held_steps(self, *asked: Any) -> Steps[int]:
        yield
        return 7

    async def probe(self) -> bool:
        raise ValueError("another bug")

    async def persist(self, *asked: Any) -> bool:
        await asyncio.sleep(3600)
        return True

    def status(self) -> dict[str, object]:
        return {}

    def wrong(self) -> list[Problem]:
        return []

    async def stop(self) -> None:
        assert not self.closed

    def close(self) -> None:
        self.closed = True


def until(true: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + 10
    while not true():
        assert time.monotonic() < give_up_s
        time.sleep(0.005)


def test_every_request_is_answered_and_a_failed_part_is_begun_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before it is joined, while it fails, after it was left and when it closes: one answer each; nothing is held meanwhile."""
    monkeypatch.setattr(level_module, "JOIN_PAUSE_S", 0.05)
    replies: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    nodes: list[Node] = []
    tries = 0

    async def join() -> Any:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise RegionError("it is another region")
        nodes.append(Node())
        return nodes[-1]

    level = ObjectLevel(replies.put, SharedLimits())
    level.start(join)
    space, answers = Namespace(0, SPEC), list[Any]()
    assert level.tried.wait(10)
    if not level.is_open:
        assert "another region" in level.refusal
        level.probe(answers.append)
        level.fetch([Wanted(b"k" * 24, memoryview(bytearray(64)))], answers.append)
        replies.get(timeout=10)()
        replies.get(timeout=10)()
        assert answers == [False, [(Get.FAILED, None)]]
    until(lambda: level.is_open)
    assert level.held(space, b"", 0) == 7 and not level.refusal
    answers.clear()
    level.probe(answers.append)
    replies.get(timeout=10)()
    assert answers == [False]
    level._thread._loop.call_soon_threadsafe(nodes[0].fails.set)
    until(lambda: len(nodes) == 2 and level.is_open)
    assert nodes[0].closed and "a bug" in caplog.text
    answers.clear()
    header = PackHeader(SPEC, b"", b"h" * 8, b"c" * 16)
    level.persist(header, [memoryview(b"r" * 64)], Life(0, 0), answers.append)
    assert level.close()
    replies.get(timeout=10)()
    assert answers == [False] and nodes[1].closed
    assert level.held(space, b"", 3) == 3


def test_nothing_runs_on_when_the_thread_is_closed() -> None:
    """What a request began itself ends before `close` returns, for it may be writing into memory that goes then."""
    thread = LoopThread("test", lambda call: call())
    ended: list[str] = []

    async def child() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.1)  # a copy that cannot be stopped
            ended.append("child")

    async def request() -> bool:
        task = asyncio.get_running_loop().create_task(child())
        began.set()
        await asyncio.shield(task)
        return True

    began, answers = threading.Event(), list[bool]()
    thread.post(request, answers.append, False)
    assert began.wait(10)
    time.sleep(0.05)
    assert thread.close(10)
    assert ended == ["child"] and answers == [False]
