"""The workers' half: what vLLM's worker hooks mean for the loads and saves of one rank.

    engine thread   orders ─▶ Loads, Saves (connectors/transfer, threads of their own)
                    results, errors, report ◀─┘
    arena thread    maps and pins the arena from the start on

The engine's thread touches only queues and sets, except in two places, both bounded:
synchronous loads and saves, and the wait for a copy that is just reading a block which the
next step overwrites (a memory copy, no call).

Every load is reported as received, with the blocks that are not there as failed; every save
is reported as done, whatever came of it: nothing that the scheduler's half waits for gets lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from connectors import constants as limits
from connectors.device import BlockMover, Blocks, blocks_of
from connectors.device.driver import DriverError
from connectors.device.movers import movers_for
from connectors.device.pinning import Pinning
from connectors.transfer.arena_keeper import ArenaKeeper
from connectors.transfer.link import Line
from connectors.transfer.loads import Loads
from connectors.transfer.orders import Specs
from connectors.transfer.saves import Saves
from connectors.transfer.settings import Settings
from connectors.vllm.geometry import Unsupported, plan_for
from connectors.vllm.guard import Guard
from connectors.vllm.messages import Orders, Rank, Report
from connectors.vllm.namespace import rank_facts
from connectors.vllm.stats import Tally


class WorkerHalf:
    """Called by one engine thread; see the module's head."""

    def __init__(
        self, settings: Settings, vllm_config: Any, kv_cache_config: Any, guard: Guard, tally: Tally
    ) -> None:
        self.guard, self._settings = guard, settings
        self._config, self._kv = vllm_config, kv_cache_config
        self._pp_rank, self._shard, self._writer = _place(vllm_config, kv_cache_config)
        self._stores = self._writer and vllm_config.kv_transfer_config.is_kv_producer
        self._movers: dict[int, BlockMover] = {}
        self._pinning: Pinning | None = None
        self._rank = Rank(self._shard, trouble="no KV tensors were registered")
        self._specs: Specs = {}
        self._version = 0
        self._loads = Loads(self._movers, tally.add, guard.note)
        self._saves = Saves(self._movers, settings.save_queue_bytes, tally.add, guard.note)
        self._lines: list[Line] = []
        self._threads: list[threading.Thread] = []
        self._inline: Line | None = None
        self._keeper: ArenaKeeper | None = None
        self._draining: set[str] = set()
        self._invalid: set[int] = set()
        self._report = Report()

    # ---- the start -----------------------------------------------------------------------

    def register(self, kv_caches: dict[str, Any]) -> None:
        """The engine's KV tensors, by layer. A model that cannot be stored is said so in the handshake."""
        try:
            plan = plan_for(self._kv, self._config)
            rank, groups = Rank(self._shard), dict[int, Blocks]()
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
                groups[group.index] = blocks
            movers, self._pinning = movers_for(groups, self.guard.say_once)
        except (Unsupported, DriverError, ValueError, AttributeError, KeyError) as reason:
            self._rank = Rank(self._shard, trouble=f"{type(reason).__name__}: {reason}")
            return
        self._movers.update(movers)
        self._rank = rank
        self._start()

    def handshake(self) -> Rank:
        return self._rank

    def _backends(self, layer_names: Sequence[str]) -> list[str]:
        from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

        return [backend.get_name() for backend in get_current_attn_backends(self._config, list(layer_names))]

    def _start(self) -> None:
        """Lines, the threads that use them, and the thread that maps and pins the arena for all of them."""
        settings = self._settings
        load_timeout_s = min(settings.load_timeout_s, limits.CALL_TIMEOUT_S)
        jobs: list[tuple[str, Callable[[Line], None], float]] = []
        if self._stores and settings.save == "async":
            jobs.append(("save", self._saves.serve, settings.save_timeout_s))
        # With load = "sync" too: where the engine allows none, its scheduler orders asynchronous ones.
        jobs += [(f"load-{n}", self._loads.serve, load_timeout_s) for n in range(settings.load_threads)]
        for name, serve, timeout_s in jobs:
            thread = threading.Thread(
                target=serve, args=(self._line(timeout_s, name),), name=f"kvstore-{name}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        if "sync" in (settings.load, settings.save):
            self._inline_line()
        self._keeper = ArenaKeeper(self._lines, self._pinning, self.guard.note)
        self._keeper.start()

    def _line(self, timeout_s: float, name: str) -> Line:
        label = f"vllm worker {self._pp_rank}.{self._shard} {name}"
        line = Line(self._settings.kvstore_socket, timeout_s, label, self._stores)
        self._lines.append(line)
        return line

    def _inline_line(self) -> Line:
        """The line of the engine's own thread."""
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
        self._saves.cancel(orders.cancel)

    def start_loads(self, orders: Orders) -> None:
        for load in orders.loads:
            wait_s = self._settings.load_timeout_s
            if load.sync:
                wait_s = min(wait_s, limits.SYNC_WAIT_S_MAX)
            task = self._loads.task(load, self._specs, self._version, wait_s)
            if task is None:
                continue
            if load.sync:
                self._loads.run(self._inline_line(), task)
            else:
                self._loads.submit(task)

    def start_saves(self, orders: Orders) -> None:
        self._draining.update(orders.draining)
        for save in orders.saves:
            if not self._stores or not self._specs:
                self._saves.skip(save)
                continue
            task = self._saves.admit(save, self._specs)
            if task is None:
                continue
            if self._settings.save == "sync":
                self._saves.run(self._inline_line(), task)
            else:
                self._saves.submit(task)

    def results(self) -> tuple[set[str], set[str], set[str]]:
        """Requests whose saves are through, whose loads are through, and whose loads failed as a whole."""
        received, failed = set(), set()
        for task in self._loads.take_finished():
            name = task.load.request_id
            if task.version != self._version:  # the weights changed while it was under way
                task.ok = False
                task.missing.update(block for part in task.load.parts for block in part.block_ids)
            if not task.load.sync:
                received.add(name)
            if not task.ok:
                self._report.failed.add(name)
                if len(self._kv.kv_cache_groups) > 1:
                    failed.add(name)
                else:
                    self._invalid |= task.missing
        busy = self._saves.busy_requests() if self._draining else set()
        sent = self._draining - busy
        self._draining &= busy
        return sent, received, failed

    def take_invalid(self) -> set[int]:
        """Blocks that loads promised and did not fill, since the last call."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_report(self) -> Report | None:
        self._report.saves.update(self._saves.take_finished())
        report, self._report = self._report, Report()
        return None if report.is_empty() else report

    def close(self) -> None:
        """Stop the threads, without waiting for a daemon that hangs, and hang up."""
        self._saves.stop()
        for _ in range(self._settings.load_threads):
            self._loads.stop()
        if self._keeper is not None:
            self._keeper.close()
        deadline = time.monotonic() + limits.THREAD_JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads) or (self._keeper and self._keeper.running):
            return  # the process ends soon, and with it whatever they hold
        if self._pinning is not None:
            self._pinning.close()
        for line in self._lines:
            line.close()
        for mover in self._movers.values():
            mover.close()


def _record_order(layers: dict[str, Any]) -> list[str]:
    """Layers in the order their bytes have in a record: see `blocks_of`."""
    storages: dict[int, int] = {}
    places = {}
    for name, layer in layers.items():
        storage = storages.setdefault(layer.untyped_storage().data_ptr(), len(storages))
        places[name] = (storage, layer.storage_offset() * layer.element_size())
    return sorted(layers, key=places.__getitem__)


def _place(vllm_config: Any, kv_cache_config: Any) -> tuple[int, int, bool]:
    """(pipeline rank, shard, whether this rank is the one of its shard that stores)."""
    parallel = vllm_config.parallel_config
    tensor_ranks = parallel.tensor_parallel_size
    pp_rank, tp_rank = divmod(parallel.rank % (tensor_ranks * parallel.pipeline_parallel_size), tensor_ranks)
    replicas = max(1, int(getattr(kv_cache_config, "kv_tp_replicas", 1)))
    return pp_rank, pp_rank * tensor_ranks + tp_rank // replicas, tp_rank % replicas == 0
