"""The workers' half: moves blocks between the device and the daemon's arena, behind the engine's back.

    engine thread   orders ─▶ queue ─────────────────────────▶ results, errors, report
                               │                                   ▲
    load threads               ├─▶ acquire ─▶ copy in ─▶ valid? ───┤
    save thread                └─▶ reserve ─▶ copy out ─▶ commit ──┘

Each thread has a connection of its own. The engine's thread touches only queues and sets,
except in two places, both bounded: synchronous loads and saves, and the wait for a copy that
is just reading a block which the next step overwrites (a memory copy, no call).

Every load is reported as received, with the blocks that are not there as failed; every save
is reported as done, whatever came of it: nothing that the scheduler's half waits for gets lost.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from connectors import constants as limits
from connectors import vllm_link
from connectors.device import BlockMover, blocks_of, mover_for
from connectors.vllm_debts import Debts
from connectors.vllm_geometry import Unsupported, plan_for
from connectors.vllm_guard import Guard
from connectors.vllm_messages import Load, Orders, Part, Rank, Report, Save, SpaceSpec
from connectors.vllm_namespace import rank_facts
from connectors.vllm_settings import Settings
from connectors.vllm_stats import Tally

Specs = dict[int, SpaceSpec]  # group -> this rank's namespace


class Line:
    """One connection to the daemon, with its handles of namespaces and its pinned mapping."""

    def __init__(self, settings: Settings, timeout_s: float, label: str, pin: bool) -> None:
        self._client = vllm_link.open_client(settings.kvstore_socket, timeout_s, label)
        self._debts = Debts(self._client)
        self._handles: dict[bytes, Any] = {}
        self._pin = pin
        self._pinned: Any = None
        self._epoch: int | None = None

    def acquire(self, spec: SpaceSpec, hashes: Sequence[bytes], wait_s: float) -> Any:
        self._debts.pay()
        return self._pinned_for(self._client.acquire(self._handle(spec), hashes, wait_s))

    def reserve(self, spec: SpaceSpec, hashes: Sequence[bytes], parent: bytes) -> Any:
        return self._pinned_for(self._client.reserve(self._handle(spec), hashes, parent))

    def settle(self, ticket: int, tokens: int, spec: SpaceSpec, missing: bytes) -> None:
        self._debts.owe(ticket, tokens, self._handle(spec), missing)
        self._debts.pay()

    def close(self) -> None:
        if self._pinned is not None:
            self._pinned.close()
        self._client.close()

    def _handle(self, spec: SpaceSpec) -> Any:
        handle = self._handles.get(spec.digest)
        if handle is None:
            handle = self._client.namespace(
                spec.digest, spec.record_bytes, spec.hash_bytes, spec.block_tokens, spec.fields
            )
            self._handles[spec.digest] = handle
        return handle

    def _pinned_for(self, lease: Any) -> Any:
        """The lease, with its arena pinned: the call may have mapped a new one. Closed where that fails."""
        try:
            self._pin_arena()
        except Exception:
            with lease:
                raise
        return lease

    def _pin_arena(self) -> None:
        """Register a new mapping with the device driver, once; without it copies are only slower."""
        if not self._pin or self._client.arena_epoch == self._epoch:
            return
        from connectors.device_cuda import PinnedArena

        arena, epoch = self._client.arena, self._client.arena_epoch
        if self._pinned is not None:
            self._pinned.close()
        self._pinned, self._epoch = None, epoch  # tried once: without it copies are slower
        self._pinned = PinnedArena(arena.address, arena.size_bytes) if arena is not None else None


@dataclass(slots=True)
class LoadTask:
    """A load on its way, and what came of it. version: of the namespaces it reads from."""

    load: Load
    specs: Specs
    version: int
    marks: dict[int, Any]
    deadline: float
    missing: set[int] = field(default_factory=set)
    ok: bool = False


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


class WorkerHalf:
    """Called by one engine thread; see the module's head."""

    def __init__(
        self, settings: Settings, vllm_config: Any, kv_cache_config: Any, guard: Guard, tally: Tally
    ) -> None:
        self.guard, self._tally, self._settings = guard, tally, settings
        self._config, self._kv = vllm_config, kv_cache_config
        self._pp_rank, self._shard, self._writer = _place(vllm_config, kv_cache_config)
        self._movers: dict[int, BlockMover] = {}
        self._rank = Rank(self._shard, trouble="no KV tensors were registered")
        self._specs: Specs = {}
        self._version = 0
        self._lock = threading.Condition()
        self._load_queue: queue.SimpleQueue[LoadTask | None] = queue.SimpleQueue()
        self._save_queue: queue.SimpleQueue[SaveTask | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lines: list[Line] = []
        self._inline: Line | None = None
        self._finished_loads: list[LoadTask] = []
        self._saving: dict[int, SaveTask] = {}
        self._queued_bytes = 0
        self._draining: set[str] = set()
        self._invalid: set[int] = set()
        self._report = Report()

    # ---- the start -----------------------------------------------------------------------

    def register(self, kv_caches: dict[str, Any]) -> None:
        """The engine's KV tensors, by layer. A model that cannot be stored is said so in the handshake."""
        try:
            plan = plan_for(self._kv, self._config)
            rank = Rank(self._shard)
            for group in plan.groups:
                spec = self._kv.kv_cache_groups[group.index]
                layers = {name: kv_caches[name] for name in spec.layer_names}
                blocks = blocks_of(list(layers.values()), self._kv.num_blocks)
                ordered = _record_order(layers)
                backends = self._backends(spec.layer_names)
                rank.groups[group.index] = rank_facts(
                    self._config,
                    group.index,
                    spec.kv_cache_spec,
                    ordered,
                    blocks,
                    (self._pp_rank, self._shard),
                    backends,
                )
                self._movers[group.index] = mover_for(blocks)
            self._rank = rank
        except (Unsupported, ValueError, AttributeError, KeyError) as reason:
            self._rank = Rank(self._shard, trouble=f"{type(reason).__name__}: {reason}")

    def handshake(self) -> Rank:
        return self._rank

    def _backends(self, layer_names: Sequence[str]) -> list[str]:
        from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

        return [backend.get_name() for backend in get_current_attn_backends(self._config, list(layer_names))]

    def _start_threads(self) -> None:
        if self._threads:
            return
        jobs: list[tuple[str, Callable[[Line], None], float]] = [
            ("save", self._save_loop, self._settings.save_timeout_s)
        ]
        load_timeout_s = min(self._settings.load_timeout_s, limits.CALL_TIMEOUT_S)
        jobs += [(f"load-{n}", self._load_loop, load_timeout_s) for n in range(self._settings.load_threads)]
        for name, loop, timeout_s in jobs:
            line = self._line(timeout_s, name)
            thread = threading.Thread(target=loop, args=(line,), name=f"kvstore-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _line(self, timeout_s: float, name: str) -> Line:
        pin = any(mover.blocks.storages[0].device.type == "cuda" for mover in self._movers.values())
        line = Line(self._settings, timeout_s, f"vllm worker {self._pp_rank}.{self._shard} {name}", pin)
        self._lines.append(line)
        return line

    def _inline_line(self) -> Line:
        if self._inline is None:
            self._inline = self._line(min(self._settings.save_timeout_s, limits.SYNC_WAIT_S_MAX), "sync")
        return self._inline

    # ---- every step, on the engine's thread ------------------------------------------------

    def before_step(self, orders: Orders) -> None:
        """Learn namespaces; make sure that no save still reads a block this step may overwrite."""
        if orders.spaces is not None and orders.spaces_version != self._version:
            self._specs = {
                group: spec for (shard, group), spec in orders.spaces.items() if shard == self._shard
            }
            self._version = orders.spaces_version
            self._report.versions[self._version] += 1
        with self._lock:
            tasks = [self._saving[number] for number in orders.cancel if number in self._saving]
            for task in tasks:
                task.cancelled = True
            while any(task.copying for task in tasks):
                self._lock.wait()

    def start_loads(self, orders: Orders) -> None:
        for load in orders.loads:
            marks = {
                part.group: self._movers[part.group].mark()
                for part in load.parts
                if part.group in self._movers
            }
            wait_s = self._settings.load_timeout_s
            if load.sync:
                wait_s = min(wait_s, limits.SYNC_WAIT_S_MAX)
            task = LoadTask(load, self._specs, self._version, marks, time.monotonic() + wait_s)
            if load.sync:
                self._run_load(self._inline_line(), task)
            else:
                self._start_threads()
                self._load_queue.put(task)

    def start_saves(self, orders: Orders) -> None:
        self._draining.update(orders.draining)
        for save in orders.saves:
            size_bytes = self._size_of(save)
            if not self._writer or not self._specs or not self._admit(save, size_bytes):
                self._report.saves[save.number] += 1
                continue
            marks = {part.group: self._movers[part.group].mark() for part in save.parts}
            task = SaveTask(save, self._specs, marks, size_bytes, time.monotonic() + limits.SAVE_DELAY_S)
            with self._lock:
                self._saving[save.number] = task
                self._queued_bytes += size_bytes
            if self._settings.save == "sync":
                self._run_save(self._inline_line(), task)
            else:
                self._start_threads()
                self._save_queue.put(task)

    def results(self) -> tuple[set[str], set[str], set[str]]:
        """Requests whose saves are through, whose loads are through, and whose loads failed as a whole."""
        with self._lock:
            loads, self._finished_loads = self._finished_loads, []
            busy = {task.save.request_id for task in self._saving.values()} if self._draining else set()
        received, failed = set(), set()
        for task in loads:
            name = task.load.request_id
            if task.version != self._version:  # the weights changed while it was under way
                task.ok = False
                task.missing.update(block for part in task.load.parts for block in part.block_ids)
            if task.load.sync:
                self._report.sync_loads[name] += 1
            else:
                received.add(name)
            if not task.ok:
                self._report.failed.add(name)
                if len(self._kv.kv_cache_groups) > 1:
                    failed.add(name)
                else:
                    self._invalid |= task.missing
        sent = self._draining - busy
        self._draining &= busy
        return sent, received, failed

    def take_invalid(self) -> set[int]:
        """Blocks that loads promised and did not fill, since the last call."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_report(self) -> Report | None:
        with self._lock:
            report, self._report = self._report, Report()
        return None if report.is_empty() else report

    def close(self) -> None:
        """Stop the threads, without waiting for a daemon that hangs, and hang up."""
        with self._lock:
            for task in self._saving.values():
                task.cancelled = True
        self._save_queue.put(None)
        for _ in range(self._settings.load_threads):
            self._load_queue.put(None)
        deadline = time.monotonic() + limits.THREAD_JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            for line in self._lines:
                line.close()
            for mover in self._movers.values():
                mover.close()

    # ---- loads -----------------------------------------------------------------------------

    def _load_loop(self, line: Line) -> None:
        while (task := self._load_queue.get()) is not None:
            self._run_load(line, task)

    def _run_load(self, line: Line, task: LoadTask) -> None:
        """Never raises; whatever is not there afterwards is in `task.missing`."""
        begun = time.monotonic()
        blocks = 0
        try:
            for part in task.load.parts:
                copied = self._load_part(line, task, part)
                blocks += copied
                task.missing.update(part.block_ids[copied:])
                if copied < len(part.block_ids):
                    self._settle(line, task, part, copied)
                self._tally.add("loaded_bytes", copied * self._movers[part.group].record_bytes)
            task.ok = not task.missing
        except Exception as error:  # noqa: BLE001 - the blocks of all parts count as missing: some may be half written
            self.guard.note("load", error)
            task.missing.update(block for part in task.load.parts for block in part.block_ids)
        self._tally.add("loads")
        self._tally.add("loaded_blocks", blocks)
        self._tally.add("failed_blocks", len(task.missing))
        self._tally.add("load_seconds", time.monotonic() - begun)
        with self._lock:
            self._finished_loads.append(task)

    def _settle(self, line: Line, task: LoadTask, part: Part, copied: int) -> None:
        """Tell the daemon's accounts that a promised block did not come."""
        spec = task.specs[part.group]
        missing = part.hashes[copied] if copied < len(part.hashes) else b""
        try:
            line.settle(task.load.ticket, (part.first + copied) * spec.block_tokens, spec, missing)
        except Exception as error:  # noqa: BLE001 - the load has failed already; this is told with the next one
            self.guard.note("settle", error)

    def _load_part(self, line: Line, task: LoadTask, part: Part) -> int:
        """How many leading blocks of the part are on the device now."""
        if len(part.hashes) != len(part.block_ids):
            return 0
        batch, done, barren = _batch(self._movers[part.group]), 0, False
        while done < len(part.hashes):
            left = task.deadline - time.monotonic()
            if left <= 0:
                break
            hashes = part.hashes[done : done + (1 if barren else batch)]
            try:
                copied, pending = self._load_batch(line, task, part, done, hashes, left)
            except Exception as error:  # noqa: BLE001 - what is missing is reported
                self.guard.note("load", error)
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
        """Blocks copied and still valid afterwards, and whether more may come by asking again."""
        with line.acquire(task.specs[part.group], hashes, wait_s) as lease:
            slots = lease.leading()
            if slots:
                block_ids = part.block_ids[start : start + len(slots)]
                self._movers[part.group].load(
                    block_ids, [slot.view for slot in slots], task.marks[part.group]
                )
            valid = min(len(slots), lease.valid_count())
            return valid, bool(lease.pending) and valid == len(slots)

    # ---- saves -----------------------------------------------------------------------------

    def _size_of(self, save: Save) -> int:
        return sum(
            self._movers[p.group].record_bytes * len(p.block_ids)
            for p in save.parts
            if p.group in self._movers
        )

    def _admit(self, save: Save, size_bytes: int) -> bool:
        with self._lock:
            fits = (
                not self._queued_bytes or self._queued_bytes + size_bytes <= self._settings.save_queue_bytes
            )
        if not fits:
            self._tally.add("skipped_queue_full", sum(len(part.block_ids) for part in save.parts))
        return fits

    def _save_loop(self, line: Line) -> None:
        while (task := self._save_queue.get()) is not None:
            time.sleep(max(0.0, task.not_before - time.monotonic()))
            self._run_save(line, task)

    def _run_save(self, line: Line, task: SaveTask) -> None:
        """Never raises; the save is reported as done in every case."""
        begun = time.monotonic()
        offered = sum(len(part.block_ids) for part in task.save.parts)
        saved = 0
        try:
            for part in task.save.parts:
                saved += self._save_part(line, task, part)
            self._tally.add("skipped_overwritten" if task.cancelled else "held_blocks", offered - saved)
        except Exception as error:  # noqa: BLE001 - a save that fails is a save that was not made
            self.guard.note("save", error)
            self._tally.add("skipped_unavailable", offered - saved)
        self._tally.add("saves")
        self._tally.add("save_seconds", time.monotonic() - begun)
        with self._lock:
            del self._saving[task.save.number]
            self._queued_bytes -= task.size_bytes
            self._report.saves[task.save.number] += 1

    def _save_part(self, line: Line, task: SaveTask, part: Part) -> int:
        mover, spec = self._movers[part.group], task.specs[part.group]
        batch, parent, start, saved = _batch(mover), part.parent, 0, 0
        while start < len(part.hashes) and not task.cancelled:
            hashes = part.hashes[start : start + batch]
            with line.reserve(spec, hashes, parent) as lease:
                slots = lease.slots
                if (
                    lease.full
                ):  # what a connection may hold at once, or no room: go on behind what was granted
                    hashes = hashes[: slots[-1].index + 1] if slots else []
                if not hashes:
                    break
                block_ids = [part.block_ids[start + slot.index] for slot in slots]
                if slots and self._copy_out(
                    task, mover, block_ids, [slot.view for slot in slots], part.group
                ):
                    stored = lease.commit()
                    saved += stored
                    self._tally.add("saved_blocks", stored)
                    self._tally.add("saved_bytes", stored * mover.record_bytes)
            parent = hashes[-1]
            start += len(hashes)
        return saved

    def _copy_out(
        self, task: SaveTask, mover: BlockMover, block_ids: Sequence[int], records: Sequence[Any], group: int
    ) -> bool:
        """Copy, unless the engine wants the blocks back; it waits while `copying` is set."""
        with self._lock:
            if task.cancelled:
                return False
            task.copying = True
        try:
            mover.save(block_ids, records, task.marks[group])
        finally:
            with self._lock:
                task.copying = False
                self._lock.notify_all()
        return True


def _record_order(layers: dict[str, Any]) -> list[str]:
    """Layers in the order their bytes have in a record: see `blocks_of`."""
    storages: dict[int, int] = {}
    places = {}
    for name, layer in layers.items():
        storage = storages.setdefault(layer.untyped_storage().data_ptr(), len(storages))
        places[name] = (storage, layer.storage_offset() * layer.element_size())
    return sorted(layers, key=places.__getitem__)


def _batch(mover: BlockMover) -> int:
    """Blocks of one lease."""
    return max(1, min(limits.LEASE_BLOCKS_MAX, limits.LEASE_BYTES_MAX // mover.record_bytes))


def _place(vllm_config: Any, kv_cache_config: Any) -> tuple[int, int, bool]:
    """(pipeline rank, shard, whether this rank is the one of its shard that stores)."""
    parallel = vllm_config.parallel_config
    tensor_ranks = parallel.tensor_parallel_size
    pp_rank, tp_rank = divmod(parallel.rank % (tensor_ranks * parallel.pipeline_parallel_size), tensor_ranks)
    replicas = max(1, int(getattr(kv_cache_config, "kv_tp_replicas", 1)))
    return pp_rank, pp_rank * tensor_ranks + tp_rank // replicas, tp_rank % replicas == 0
