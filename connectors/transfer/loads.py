"""Loads of one rank: from the daemon's arena to its own blocks, behind the engine's back.

    engine thread   submit, end ─▶ queue ──────────────────────────▶ take_finished, take_reports
                                     │                                    ▲
    load threads                     └─▶ open grant ─▶ copy in ─▶ still valid?

What is to be loaded, and from which slots, the scheduler has decided (see `connectors.transfer.fetching`).
Every load of a request is handed out as finished, with the blocks that are not there as missing:
nothing that the engine waits for gets lost.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from connectors.device import BlockMover
from connectors.transfer.link import Line
from connectors.transfer.orders import Column, Load, LoadEnd

Count = Callable[[str, float], None]
Note = Callable[[str, BaseException], None]


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


@dataclass(slots=True)
class LoadTask:
    """One order on its way. mark: what the device must have done first."""

    load: Load
    loading: Loading
    column: Column
    mark: Any


class Loads:
    """movers: by group; may be filled until the first load. note: what to do with an error."""

    def __init__(self, movers: Mapping[int, BlockMover], note: Note) -> None:
        self._movers, self._note = movers, note
        self._queue: queue.SimpleQueue[LoadTask | None] = queue.SimpleQueue()
        self._lock = threading.Condition()
        self._held, self._copying = False, 0
        self._loading: dict[str, Loading] = {}
        self._finished: list[Loading] = []
        self._reports: dict[int, int] = {}

    # ---- on the engine's thread ----

    def begin(
        self, load: Load, column: Column | None, version: int, *, refused: bool = False
    ) -> LoadTask | None:
        """The load as a task for `submit` or `run`; None, and through, if this rank has no column of it, or its
        device is in no state for it. refused: it fails."""
        with self._lock:
            loading = self._loading_of(load.request_id, version, load.sync)
            loading.open += 1
            loading.blocks.update(load.block_ids)
        if column is None or refused:
            self._through(load, loading, 0 if refused else len(load.block_ids))
            return None
        try:
            return LoadTask(load, loading, column, self._movers[load.group].mark())
        except Exception as error:  # noqa: BLE001 - the engine waits for this load: it must come, and fail
            self._note("load", error)
            self._through(load, loading, 0)
            return None

    def end(self, end: LoadEnd, version: int) -> None:
        with self._lock:
            loading = self._loading_of(end.request_id, version, end.sync)
            loading.ended = True
            loading.blocks.update(end.missing)
            loading.missing.update(end.missing)
            self._finish_if_over(loading)

    def submit(self, task: LoadTask) -> None:
        self._queue.put(task)

    def stop(self) -> None:
        """Ends one thread that serves."""
        self._queue.put(None)

    def hold(self) -> None:
        """When this returns no load writes any block, and none will until `go_on`: they fail."""
        with self._lock:
            self._held = True
            while self._copying:
                self._lock.wait()

    def go_on(self) -> None:
        """The blocks are there again."""
        with self._lock:
            self._held = False

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

    # ---- on the load threads ----

    def serve(self, line: Line) -> None:
        """Run loads until `stop`: the body of a thread."""
        while (task := self._queue.get()) is not None:
            self.run(line, task)

    def run(self, line: Line, task: LoadTask) -> None:
        """Never raises; whatever is not there afterwards is missing."""
        valid = 0
        try:
            valid = self._copy(line, task)
        except Exception as error:  # noqa: BLE001 - all of its blocks count as missing: some may be half written
            self._note("load", error)
        self._through(task.load, task.loading, valid)

    def _copy(self, line: Line, task: LoadTask) -> int:
        """Returns how many leading blocks are on the device now, and are true."""
        block_ids, mover = task.load.block_ids, self._movers[task.load.group]
        with line.client.open_grant(task.load.grant, task.column.start_bytes, mover.record_bytes) as slots:
            slots.touch(len(block_ids))
            with self._lock:
                if self._held:
                    return 0
                self._copying += 1
            try:
                mover.load(block_ids, slots.views[: len(block_ids)], task.mark)
            finally:
                with self._lock:
                    self._copying -= 1
                    self._lock.notify_all()
            return min(len(block_ids), int(slots.valid_count()))

    def _loading_of(self, request_id: str, version: int, sync: bool) -> Loading:
        return self._loading.setdefault(request_id, Loading(request_id, version, sync))

    def _through(self, load: Load, loading: Loading, valid: int) -> None:
        with self._lock:
            self._reports[load.number] = valid
            loading.open -= 1
            loading.missing.update(load.block_ids[valid:])
            self._finish_if_over(loading)

    def _finish_if_over(self, loading: Loading) -> None:
        if loading.ended and not loading.open:
            del self._loading[loading.request_id]
            self._finished.append(loading)
