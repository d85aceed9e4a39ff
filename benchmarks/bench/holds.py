"""How long the event loop is held: the slowest turn of each kind of work of a node that is full.

    request ─▶ steps of the engine ─▶ next() │ next() │ next() …      each is a turn; the slowest one counts

The engine is driven as the door drives it, without a socket: counted slots, our policy, no NVMe. What NVMe, pins,
quotas and dying clients cause is measured by `benchmarks.bench.crowded`. Times are of the processor; what a hypervisor takes away counts as well, so measure on a quiet machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvstore.engine.live import live_steps

if TYPE_CHECKING:
    from kvstore.tools.replay.cell import Node

PREFETCH_BLOCKS = 8192


def slowest_turns(node: Node, unknown: bytes) -> dict[str, float]:
    """The slowest turn of each kind of work, in ms. unknown: as many hashes as may be asked for, all missing."""
    engine, space = node.engine, node.space
    found = engine.find([space], unknown)
    work: dict[str, Iterator[object]] = {
        "lookup": _calls(lambda: engine.find([space], unknown)),
        "booking": _calls(lambda: engine.book([space], unknown, found)),
        "explain": engine.explain_steps([space], unknown),
        "residency": engine.residency_steps(space, unknown),
        "prefetch": engine.prefetch_steps(space, unknown[: PREFETCH_BLOCKS * node.hash_bytes]),
        "check": engine.check_steps(),
        "status": _calls(engine.status),
        "report": engine.report_steps(0.0),
        "retention": engine.retention.report_steps(),
        "live": live_steps(engine, 0.0, node.now_s),
        "tick": _calls(*[engine.tick] * 10),
    }
    return {name: round(1e3 * _slowest_s(turns), 2) for name, turns in work.items()}


def _calls(*calls: Callable[[], object]) -> Iterator[object]:
    """Each is one turn."""
    return (call() for call in calls)


def _slowest_s(turns: Iterator[object]) -> float:
    """The longest that it took to the next turn, or from the last one to the end."""
    slowest_s, turn, ended = 0.0, None, object()
    while turn is not ended:
        before_s = time.process_time()
        turn = next(turns, ended)
        slowest_s = max(slowest_s, time.process_time() - before_s)
    return slowest_s
