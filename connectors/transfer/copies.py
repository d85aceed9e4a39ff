"""Copies of one rank between its own blocks and the daemon's arena, behind the engine's back.

    engine thread    submit, end, cancel ─▶ queue ───────────────────────▶ take_reports, take_finished
                                              │                                 ▲
    load threads                              ├─▶ open grant ─▶ copy in ─▶ still valid?
    save thread                               └─▶ open grant ─▶ copy out, hash ─▶ fill

What is to be copied, and from and to which slots, the scheduler has decided (`connectors.transfer.fetching` and
`storing`). The daemon stores a block when the last rank has filled its column. Every load and every save is reported,
whatever came of it: nothing that the engine waits for gets lost. The engine waits in one place, for a memory copy and
never for a call: `Saves.cancel`, while a copy is just reading a block that its next step overwrites.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from connectors import constants as limits
from connectors.device import BlockMover
from connectors.transfer.link import Line, Note
from connectors.transfer.orders import Column, Load, LoadEnd, Save
from kvstore.client import FillsRefused, Refused

FILLS_MAX = 16  # saves that are reported in one call

Order = TypeVar("Order", Load, Save)


@dataclass(slots=True)
class Task(Generic[Order]):
    """One order on its way. mark: what the device must have done first. cancelled: it is not copied any more."""

    order: Order
    column: Column
    mark: Any
    cancelled: bool = False


class Copies(Generic[Order]):
    """What loads and saves have in common. movers: by group; may be filled until the first copy. note: what to do with
    an error."""

    what = ""

    def __init__(self, movers: Mapping[int, BlockMover], note: Note) -> None:
        self._movers, self._note = movers, note
        self._queue: queue.SimpleQueue[Task[Order] | None] = queue.SimpleQueue()
        self._lock = threading.Condition()
        self._held = False
        self._copying: set[int] = set()  # numbers of orders

    def submit(self, task: Task[Order]) -> None:
        """Leave it to the threads that serve."""
        self._queue.put(task)

    def stop(self) -> None:
        """Ends one thread that serves."""
        self._queue.put(None)

    def hold(self) -> None:
        """When this returns no copy touches any block, and none will until `go_on`: they fail."""
        with self._lock:
            self._held = True
            self._lock.wait_for(lambda: not self._copying)

    def go_on(self) -> None:
        """The memory of the blocks is there again."""
        with self._lock:
            self._held = False

    def _task(self, order: Order, column: Column) -> Task[Order] | None:
        """None where the device is in no state for it."""
        try:
            return Task(order, column, self._movers[order.group].mark())
        except Exception as error:  # noqa: BLE001 - reported as a copy that brought nothing
            self._note(self.what, error)
            return None

    @contextmanager
    def _permit(self, task: Task[Order]) -> Iterator[bool]:
        """Whether its blocks may be copied now; `hold` and `cancel` wait until it is done."""
        number = task.order.number
        with self._lock:
            is_allowed = not (task.cancelled or self._held)
            if is_allowed:
                self._copying.add(number)
        try:
            yield is_allowed
        finally:
            with self._lock:
                self._copying.discard(number)
                self._lock.notify_all()


# ---- loads -----------------------------------------------------------------------------


@dataclass(slots=True)
class Loading:
    """A request's loads. version: of the namespaces at the first of them. open: loads that are not through. blocks: all
    of them."""

    request_id: str
    version: int
    sync: bool
    open: int = 0
    ended: bool = False
    blocks: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)


class Loads(Copies[Load]):
    """Every load of a request is handed out as finished, with the blocks that are not there as missing."""

    what = "load"

    def __init__(self, movers: Mapping[int, BlockMover], note: Note) -> None:
        super().__init__(movers, note)
        self._loading: dict[str, Loading] = {}
        self._finished: list[Loading] = []
        self._reports: dict[int, int] = {}

    def begin(
        self, load: Load, column: Column | None, version: int, *, refused: bool = False
    ) -> Task[Load] | None:
        """The load as a task for `submit` or `run`. None, and through, if this rank has no column of it, or if it fails:
        because it is refused, or the device is in no state for it."""
        with self._lock:
            loading = self._loading_of(load.request_id, version, load.sync)
            loading.open += 1
            loading.blocks.update(load.block_ids)
        task = self._task(load, column) if column is not None and not refused else None
        if task is None:
            self._through(load, len(load.block_ids) if column is None and not refused else 0)
        return task

    def end(self, end: LoadEnd, version: int) -> None:
        """No further loads of this request."""
        with self._lock:
            loading = self._loading_of(end.request_id, version, end.sync)
            loading.ended = True
            loading.blocks.update(end.missing)
            loading.missing.update(end.missing)
            self._finish_if_over(loading)

    def take_finished(self) -> list[Loading]:
        """Requests whose loads are all through, since the last call."""
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def take_reports(self) -> dict[int, int]:
        """Loads that are through since the last call: number -> how many leading blocks are there and true."""
        with self._lock:
            reports, self._reports = self._reports, {}
        return reports

    def serve(self, line: Line) -> None:
        """Run loads until `stop`: the body of a thread."""
        while (task := self._queue.get()) is not None:
            self.run(line, task)

    def run(self, line: Line, task: Task[Load]) -> None:
        """Never raises; whatever is not there afterwards is missing."""
        valid = 0
        try:
            valid = self._copy(line, task)
        except Exception as error:  # noqa: BLE001 - all of its blocks count as missing: some may be half written
            self._note(self.what, error)
        self._through(task.order, valid)

    def _copy(self, line: Line, task: Task[Load]) -> int:
        """Returns how many leading blocks are on the device now, and are true."""
        load, mover = task.order, self._movers[task.order.group]
        with line.client.open_grant(load.grant, task.column.start_bytes, mover.record_bytes) as slots:
            slots.touch(len(load.block_ids))
            with self._permit(task) as is_allowed:
                if not is_allowed:
                    return 0
                mover.load(load.block_ids, slots.views[: len(load.block_ids)], task.mark)
            return min(len(load.block_ids), int(slots.valid_count()))

    def _loading_of(self, request_id: str, version: int, sync: bool) -> Loading:
        return self._loading.setdefault(request_id, Loading(request_id, version, sync))

    def _through(self, load: Load, valid: int) -> None:
        with self._lock:
            loading = self._loading[load.request_id]
            self._reports[load.number] = valid
            loading.open -= 1
            loading.missing.update(load.block_ids[valid:])
            self._finish_if_over(loading)

    def _finish_if_over(self, loading: Loading) -> None:
        if loading.ended and not loading.open:
            del self._loading[loading.request_id]
            self._finished.append(loading)


# ---- saves -----------------------------------------------------------------------------


class Saves(Copies[Save]):
    """A save that fails is one that was not made."""

    what = "save"

    def __init__(self, movers: Mapping[int, BlockMover], note: Note) -> None:
        super().__init__(movers, note)
        self._saving: dict[int, Task[Save]] = {}
        self._reports: dict[int, tuple[int, bool]] = {}

    def begin(self, save: Save, column: Column) -> Task[Save] | None:
        """The save as a task for `submit` or `run`; None, and through, if the device is in no state for it."""
        task = self._task(save, column)
        with self._lock:
            if task is not None:
                self._saving[save.number] = task
            else:
                self._reports[save.number] = 0, False
        return task

    def cancel(self, numbers: Set[int]) -> None:
        """When this returns, none of these saves reads its blocks any more."""
        with self._lock:
            for number in numbers & self._saving.keys():
                self._saving[number].cancelled = True
            self._lock.wait_for(lambda: self._copying.isdisjoint(numbers))

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
        super().stop()

    def serve(self, line: Line) -> None:
        """Run saves until `stop`: the body of a thread. What waits goes to the daemon in one call."""
        task = self._queue.get()
        while task is not None:
            tasks, blocks = [task], len(task.order.block_ids)
            while blocks < limits.LEASE_BLOCKS_MAX and len(tasks) < FILLS_MAX and not self._queue.empty():
                task = self._queue.get()
                if task is None:
                    break
                tasks.append(task)
                blocks += len(task.order.block_ids)
            self.run(line, tasks)
            task = task and self._queue.get()

    def run(self, line: Line, tasks: Sequence[Task[Save]]) -> None:
        """Never raises; the saves are through in every case."""
        fills = [(task.order.grant, task.column.number, self._copy(line, task)) for task in tasks]
        committed, is_known = [0] * len(tasks), [False] * len(tasks)
        try:
            committed, is_known = line.client.fill(fills), [True] * len(tasks)
        except FillsRefused as error:
            committed, is_known = error.committed, [at not in error.refused for at in range(len(tasks))]
            self._note(self.what, error)
        except Exception as error:  # noqa: BLE001 - nothing was committed
            self._note(self.what, error)
        with self._lock:
            for task, report in zip(tasks, zip(committed, is_known, strict=True), strict=True):
                del self._saving[task.order.number]
                self._reports[task.order.number] = report

    def _copy(self, line: Line, task: Task[Save]) -> list[bytes] | None:
        """The digests of the column in each slot; None if nothing was copied. Never raises."""
        save, mover, start = task.order, self._movers[task.order.group], task.column.start_bytes
        if task.cancelled:
            return None
        try:
            with line.client.open_grant(save.grant, start, mover.record_bytes, writing=True) as slots:
                slots.touch(len(save.block_ids))
                with self._permit(task) as is_allowed:
                    return mover.save(save.block_ids, slots.views, task.mark) if is_allowed else None
        except Refused as error:
            if error.code != "unknown_lease":  # another rank of ours has given it up before
                self._note(self.what, error)
            return None
        except Exception as error:  # noqa: BLE001 - nothing was copied
            self._note(self.what, error)
            return None
