"""Loads: from the daemon's arena to the engine's blocks, behind the engine's back.

    engine thread   submit ─▶ queue ─────────────────────────────▶ take_finished
                                │                                       ▲
    load threads                └─▶ acquire ─▶ copy in ─▶ still valid? ─┘

Every load is handed out as finished, with the blocks that are not there as missing: nothing
that the engine waits for gets lost.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from connectors import constants as limits
from connectors.device import BlockMover
from connectors.transfer.link import Line
from connectors.transfer.orders import Load, Part, Specs

Count = Callable[[str, float], None]
Note = Callable[[str, BaseException], None]


@dataclass(slots=True)
class LoadTask:
    """A load on its way, and what came of it. version: of the namespaces it reads from. marks: what
    each group's device must have done first."""

    load: Load
    specs: Specs
    version: int
    marks: dict[int, Any]
    deadline: float
    missing: set[int] = field(default_factory=set)
    ok: bool = False


class Loads:
    """movers: by group; may be filled until the first load. count, note: statistics and errors."""

    def __init__(self, movers: Mapping[int, BlockMover], count: Count, note: Note) -> None:
        self._movers, self._count, self._note = movers, count, note
        self._queue: queue.SimpleQueue[LoadTask | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._finished: list[LoadTask] = []

    def task(self, load: Load, specs: Specs, version: int, wait_s: float) -> LoadTask | None:
        """The load as a task for `submit` or `run`; None, and finished, if the device is in no state for it."""
        task = LoadTask(load, specs, version, {}, time.monotonic() + wait_s)
        try:
            for part in load.parts:
                if part.group in self._movers:
                    task.marks[part.group] = self._movers[part.group].mark()
        except Exception as error:  # noqa: BLE001 - the engine waits for this load: it must come, and fail
            self._fail(task, error)
            return None
        return task

    def submit(self, task: LoadTask) -> None:
        self._queue.put(task)

    def stop(self) -> None:
        """Ends one thread that serves."""
        self._queue.put(None)

    def take_finished(self) -> list[LoadTask]:
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def serve(self, line: Line) -> None:
        """Run loads until `stop`: the body of a thread."""
        while (task := self._queue.get()) is not None:
            self.run(line, task)

    def run(self, line: Line, task: LoadTask) -> None:
        """Never raises; whatever is not there afterwards is in `task.missing`."""
        begun = time.monotonic()
        blocks = 0
        try:
            self._prefetch(line, task)
            for part in task.load.parts:
                copied = self._load_part(line, task, part)
                blocks += copied
                task.missing.update(part.block_ids[copied:])
                if copied < len(part.block_ids):
                    self._settle(line, task, part, copied)
                self._count("loaded_bytes", copied * self._movers[part.group].record_bytes)
            task.ok = not task.missing
        except Exception as error:  # noqa: BLE001 - the blocks of all parts count as missing: some may be half written
            self._fail(task, error)
        else:
            self._finish(task)
        self._count("loaded_blocks", blocks)
        self._count("load_seconds", time.monotonic() - begun)

    def _fail(self, task: LoadTask, error: Exception) -> None:
        self._note("load", error)
        task.missing.update(block for part in task.load.parts for block in part.block_ids)
        self._finish(task)

    def _finish(self, task: LoadTask) -> None:
        self._count("loads", 1)
        self._count("failed_blocks", len(task.missing))
        with self._lock:
            self._finished.append(task)

    def _prefetch(self, line: Line, task: LoadTask) -> None:
        """Promotion of all that is on NVMe starts now: an acquire asks for one batch at a time. Only a hint."""
        try:
            for part in task.load.parts if task.load.on_disk else ():
                line.prefetch(task.specs[part.group], part.hashes)
        except Exception as error:  # noqa: BLE001 - the load goes on without it
            self._note("prefetch", error)

    def _settle(self, line: Line, task: LoadTask, part: Part, copied: int) -> None:
        """Tell the daemon's accounts that a promised block did not come."""
        spec = task.specs[part.group]
        missing = part.hashes[copied] if copied < len(part.hashes) else b""
        try:
            line.settle(task.load.ticket, (part.first + copied) * spec.block_tokens, spec, missing)
        except Exception as error:  # noqa: BLE001 - the load has failed already; this is told with the next one
            self._note("settle", error)

    def _load_part(self, line: Line, task: LoadTask, part: Part) -> int:
        """Returns how many leading blocks of the part are on the device now."""
        if len(part.hashes) != len(part.block_ids):
            return 0
        batch, done, barren = blocks_per_lease(self._movers[part.group]), 0, False
        while done < len(part.hashes):
            left_s = task.deadline - time.monotonic()
            if left_s <= 0:
                break
            hashes = part.hashes[done : done + (1 if barren else batch)]
            try:
                copied, pending = self._load_batch(line, task, part, done, hashes, left_s)
            except Exception as error:  # noqa: BLE001 - what is missing is reported
                self._note("load", error)
                break
            done += copied
            if copied < len(hashes) and not pending:
                break
            if barren and not copied:  # the daemon may have had no reason to wait
                time.sleep(min(limits.LOAD_RETRY_S, max(0.0, task.deadline - time.monotonic())))
            barren = not copied  # then the first block alone tells whether it is missing or on its way
        return done

    def _load_batch(
        self, line: Line, task: LoadTask, part: Part, start: int, hashes: Sequence[bytes], wait_s: float
    ) -> tuple[int, bool]:
        """Returns the number of blocks that are there and true, and whether more may come by asking again."""
        with line.acquire(task.specs[part.group], hashes, wait_s, task.load.ticket) as lease:
            slots = lease.leading()
            if slots:
                for position in range(len(slots)):
                    lease.touch(position)
                block_ids = part.block_ids[start : start + len(slots)]
                self._movers[part.group].load(
                    block_ids, [slot.view for slot in slots], task.marks[part.group]
                )
            valid = min(len(slots), lease.valid_count())
            return valid, bool(lease.pending) and valid == len(slots)


def blocks_per_lease(mover: BlockMover) -> int:
    return max(1, min(limits.LEASE_BLOCKS_MAX, limits.LEASE_BYTES_MAX // mover.record_bytes))
