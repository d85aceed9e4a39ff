"""Saves: from the engine's blocks to the daemon's arena, behind the engine's back.

    engine thread   submit ─▶ queue ───────────────────────────────▶ take_finished, cancel
                                │                                          ▲
    save thread                 └─▶ reserve ─▶ copy out, hash ─▶ commit ───┘

Best effort: what does not fit into the queue is not saved. Every save is handed out as
finished, whatever came of it. The engine waits in one place, for a memory copy and never for
a call: `cancel`, while a copy is just reading a block that its next step overwrites.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from connectors import constants as limits
from connectors.device import BlockMover
from connectors.transfer.link import Line
from connectors.transfer.loads import Count, Note, blocks_per_lease
from connectors.transfer.orders import Part, Save, Specs


@dataclass(slots=True)
class SaveTask:
    """A save on its way. size_bytes: its share of the queue's bound. not_before: see SAVE_DELAY_S."""

    save: Save
    specs: Specs
    marks: dict[int, Any]
    size_bytes: int
    not_before: float
    cancelled: bool = False
    copying: bool = False


class Saves:
    """movers: by group; may be filled until the first save. count, note: statistics and errors."""

    def __init__(
        self, movers: Mapping[int, BlockMover], queue_bytes_max: int, count: Count, note: Note
    ) -> None:
        self._movers, self._queue_bytes_max = movers, queue_bytes_max
        self._count, self._note = count, note
        self._queue: queue.SimpleQueue[SaveTask | None] = queue.SimpleQueue()
        self._lock = threading.Condition()
        self._saving: dict[int, SaveTask] = {}
        self._queued_bytes = 0
        self._finished: list[int] = []

    # ---- on the engine's thread ----

    def admit(self, save: Save, specs: Specs) -> SaveTask | None:
        """The save as a task for `submit` or `run`; None, and finished, if it cannot be made: too much
        waits already, or the device is in no state for it."""
        size_bytes = sum(
            self._movers[part.group].record_bytes * len(part.block_ids)
            for part in save.parts
            if part.group in self._movers
        )
        if self._queued_bytes and self._queued_bytes + size_bytes > self._queue_bytes_max:
            self._count("skipped_queue_full", sum(len(part.block_ids) for part in save.parts))
            self.skip(save)
            return None
        try:
            marks = {part.group: self._movers[part.group].mark() for part in save.parts}
        except Exception as error:  # noqa: BLE001 - a save that fails is a save that was not made
            self._note("save", error)
            self.skip(save)
            return None
        task = SaveTask(save, specs, marks, size_bytes, time.monotonic() + limits.SAVE_DELAY_S)
        with self._lock:
            self._saving[save.number] = task
            self._queued_bytes += size_bytes
        return task

    def submit(self, task: SaveTask) -> None:
        self._queue.put(task)

    def skip(self, save: Save) -> None:
        """This rank does not store it."""
        with self._lock:
            self._finished.append(save.number)

    def cancel(self, numbers: Collection[int]) -> None:
        """When this returns, none of these saves reads its blocks any more."""
        with self._lock:
            tasks = [self._saving[number] for number in numbers if number in self._saving]
            for task in tasks:
                task.cancelled = True
            while any(task.copying for task in tasks):
                self._lock.wait()

    def take_finished(self) -> list[int]:
        """Numbers of the saves that are through, since the last call."""
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def busy_requests(self) -> set[str]:
        """Requests that have a save which is not through."""
        with self._lock:
            return {task.save.request_id for task in self._saving.values()}

    def stop(self) -> None:
        """Cancel everything, without waiting, and end the thread that serves."""
        with self._lock:
            for task in self._saving.values():
                task.cancelled = True
        self._queue.put(None)

    # ---- on the save thread ----

    def serve(self, line: Line) -> None:
        """Run saves until `stop`: the body of a thread."""
        while (task := self._queue.get()) is not None:
            time.sleep(max(0.0, task.not_before - time.monotonic()))
            self.run(line, task)

    def run(self, line: Line, task: SaveTask) -> None:
        """Never raises; the save is finished in every case."""
        begun = time.monotonic()
        offered = sum(len(part.block_ids) for part in task.save.parts)
        saved = 0
        try:
            for part in task.save.parts:
                saved += self._save_part(line, task, part)
            self._count("skipped_overwritten" if task.cancelled else "held_blocks", offered - saved)
        except Exception as error:  # noqa: BLE001 - a save that fails is a save that was not made
            self._note("save", error)
            self._count("skipped_unavailable", offered - saved)
        self._count("saves", 1)
        self._count("save_seconds", time.monotonic() - begun)
        with self._lock:
            del self._saving[task.save.number]
            self._queued_bytes -= task.size_bytes
            self._finished.append(task.save.number)

    def _save_part(self, line: Line, task: SaveTask, part: Part) -> int:
        mover, spec = self._movers[part.group], task.specs[part.group]
        batch, parent, start, saved = blocks_per_lease(mover), part.parent, 0, 0
        while start < len(part.hashes) and not task.cancelled:
            hashes = part.hashes[start : start + batch]
            with line.reserve(spec, hashes, parent, task.save.ticket) as lease:
                slots = lease.slots
                if (
                    lease.full
                ):  # what a connection may hold at once, or no room: go on behind what was granted
                    hashes = hashes[: slots[-1].index + 1] if slots else []
                if not hashes:
                    break
                block_ids = [part.block_ids[start + slot.index] for slot in slots]
                for position in range(len(slots)):
                    lease.touch(position)
                digests = self._copy_out(task, mover, block_ids, slots, part.group)
                if digests:
                    stored = lease.commit(
                        {slot.index: digest for slot, digest in zip(slots, digests, strict=True)}
                    )
                    saved += stored
                    self._count("saved_blocks", stored)
                    self._count("saved_bytes", stored * mover.record_bytes)
            parent = hashes[-1]
            start += len(hashes)
        return saved

    def _copy_out(
        self, task: SaveTask, mover: BlockMover, block_ids: Sequence[int], slots: Sequence[Any], group: int
    ) -> list[bytes]:
        """Copy and hash, unless the engine wants the blocks back; it waits while `copying` is set."""
        with self._lock:
            if task.cancelled or not slots:
                return []
            task.copying = True
        try:
            return mover.save(block_ids, [slot.view for slot in slots], task.marks[group])
        finally:
            with self._lock:
                task.copying = False
                self._lock.notify_all()
