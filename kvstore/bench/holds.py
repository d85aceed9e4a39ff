"""How long the event loop is held: the slowest turn of each kind of work of a node that is full.

    request ─▶ steps of the engine ─▶ next() │ next() │ next() …      each is a turn; the slowest one counts

The engine is driven as the door drives it, without a socket: counted slots, our policy, no NVMe. Times
are of the processor; what a hypervisor takes away counts as well, so measure on a quiet machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvstore.steps import Steps

if TYPE_CHECKING:
    from kvstore.replay.cell import Node

PREFETCH_BLOCKS = 8192


def slowest_turns(node: Node, unknown: bytes) -> dict[str, float]:
    """The slowest turn of each kind of work, in ms. unknown: as many hashes as may be asked for, all missing."""
    return {name: round(1e3 * max(map(_took_s, turns)), 2) for name, turns in _work(node, unknown)}


def _work(node: Node, unknown: bytes) -> Iterator[tuple[str, Iterator[Callable[[], object]]]]:
    engine, space = node.engine, node.space
    found = engine.find([space], unknown)
    yield "lookup", iter([lambda: engine.find([space], unknown)])
    yield "booking", iter([lambda: engine.book([space], unknown, found)])
    yield "explain", _turns(engine.explain_steps([space], unknown))
    yield "residency", _turns(engine.residency_steps(space, unknown))
    yield "prefetch", _turns(engine.prefetch_steps(space, unknown[: PREFETCH_BLOCKS * node.hash_bytes]))
    yield "check", _turns(engine.check_steps())
    yield "status", iter([engine.status, lambda: engine.report(0.0), engine.retention.report])
    yield "tick", iter([engine.tick] * 10)


def _turns(steps: Steps[object]) -> Iterator[Callable[[], object]]:
    """The pieces of a generator, each to be called once, until it ends."""
    ended: list[bool] = []

    def turn() -> None:
        try:
            next(steps)
        except StopIteration:
            ended.append(True)

    while not ended:
        yield turn


def _took_s(turn: Callable[[], object]) -> float:
    before_s = time.process_time()
    turn()
    return time.process_time() - before_s
