"""Saves of one rank: from its blocks to its column in the daemon's arena, behind the engine's back.

    engine thread   submit ─▶ queue ────────────────────────────────────────▶ take_reports, cancel
                                │                                                  ▲
    save thread                 └─▶ open grant ─▶ copy out, hash ─▶ fill ──────────┘

What is to be saved, and into which slots, the scheduler has decided (see `connectors.transfer.storing`). The
daemon stores a block when the last rank has filled its column. Every save is reported, whatever came of
it. The engine waits in one place, for a memory copy and never for a call: `cancel`, while a copy
is just reading a block that its next step overwrites.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from connectors import constants as limits
from connectors.device import BlockMover
from connectors.transfer.link import Line
from connectors.transfer.loads import Note
from connectors.transfer.orders import Column, Save
from kvstore.client import FillsRefused, Refused

FILLS_MAX = 16  # saves that are reported in one call


@dataclass(slots=True)
class SaveTask:
    """One order on its way. mark: what the device must have done first."""

    save: Save
    column: Column
    mark: Any
    cancelled: bool = False
    copying: bool = False


class Saves:
    """movers: by group; may be filled until the first save. note: what to do with an error."""

    def __init__(self, movers: Mapping[int, BlockMover], note: Note) -> None:
        self._movers, self._note = movers, note
        self._queue: queue.SimpleQueue[SaveTask | None] = queue.SimpleQueue()
        self._lock = threading.Condition()
        self._held = False
        self._saving: dict[int, SaveTask] = {}
        self._reports: dict[int, tuple[int, bool]] = {}

    # ---- on the engine's thread ----

    def begin(self, save: Save, column: Column) -> SaveTask | None:
        """The save as a task for `submit` or `run`; None, and through, if the device is in no state for it."""
        try:
            task = SaveTask(save, column, self._movers[save.group].mark())
        except Exception as error:  # noqa: BLE001 - a save that fails is a save that was not made
            self._note("save", error)
            with self._lock:
                self._reports[save.number] = 0, False
            return None
        with self._lock:
            self._saving[save.number] = task
        return task

    def submit(self, task: SaveTask) -> None:
        self._queue.put(task)

    def cancel(self, numbers: Collection[int]) -> None:
        """When this returns, none of these saves reads its blocks any more."""
        with self._lock:
            tasks = [self._saving[number] for number in numbers if number in self._saving]
            for task in tasks:
                task.cancelled = True
            while any(task.copying for task in tasks):
                self._lock.wait()

    def hold(self) -> None:
        """When this returns no save reads any block, and none will until `go_on`: they are not made."""
        with self._lock:
            self._held = True
            while any(task.copying for task in self._saving.values()):
                self._lock.wait()

    def go_on(self) -> None:
        """The blocks are there again."""
        with self._lock:
            self._held = False

    def take_reports(self) -> dict[int, tuple[int, bool]]:
        """Saves that are through since the last call: number -> (blocks committed with our column, whether the daemon
        knows what became of the column)."""
        with self._lock:
            reports, self._reports = self._reports, {}
        return reports

    def stop(self) -> None:
        """Cancel everything, without waiting, and end the thread that serves."""
        with self._lock:
            for task in self._saving.values():
                task.cancelled = True
        self._queue.put(None)

    # ---- on the save thread ----

    def serve(self, line: Line) -> None:
        """Run saves until `stop`: the body of a thread. What waits goes to the daemon in one call."""
        task = self._queue.get()
        while task is not None:
            tasks, blocks = [task], len(task.save.block_ids)
            while blocks < limits.LEASE_BLOCKS_MAX and len(tasks) < FILLS_MAX and not self._queue.empty():
                task = self._queue.get()
                if task is None:
                    break
                tasks.append(task)
                blocks += len(task.save.block_ids)
            self.run(line, tasks)
            task = task and self._queue.get()

    def run(self, line: Line, tasks: Sequence[SaveTask]) -> None:
        """Never raises; the saves are through in every case."""
        fills = [(task.save.grant, task.column.number, self._copy(line, task)) for task in tasks]
        committed, is_told = [0] * len(tasks), [False] * len(tasks)
        try:
            committed, is_told = line.client.fill(fills), [True] * len(tasks)
        except FillsRefused as error:
            committed, is_told = error.committed, [at not in error.refused for at in range(len(tasks))]
            self._note("save", error)
        except Exception as error:  # noqa: BLE001 - a save that fails is a save that was not made
            self._note("save", error)
        with self._lock:
            for task, blocks, is_known in zip(tasks, committed, is_told, strict=True):
                del self._saving[task.save.number]
                self._reports[task.save.number] = blocks, is_known

    def _copy(self, line: Line, task: SaveTask) -> list[bytes] | None:
        """The digests of the column in each slot; None if nothing was copied. Never raises."""
        save, size_bytes = task.save, self._movers[task.save.group].record_bytes
        if task.cancelled:
            return None
        try:
            with line.client.open_grant(
                save.grant, task.column.start_bytes, size_bytes, writing=True
            ) as slots:
                slots.touch(len(save.block_ids))
                return self._copy_out(task, slots.views)
        except Refused as error:
            if error.code != "unknown_lease":  # another rank of ours has given it up before
                self._note("save", error)
            return None
        except Exception as error:  # noqa: BLE001 - as in `run`
            self._note("save", error)
            return None

    def _copy_out(self, task: SaveTask, views: Sequence[memoryview]) -> list[bytes] | None:
        """Copy and hash, unless the engine wants the blocks back; it waits while `copying` is set."""
        with self._lock:
            if task.cancelled or self._held:
                return None
            task.copying = True
        try:
            return self._movers[task.save.group].save(task.save.block_ids, views, task.mark)
        finally:
            with self._lock:
                task.copying = False
                self._lock.notify_all()
