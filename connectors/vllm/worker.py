"""The workers' half: what vLLM's worker hooks mean for the loads and saves of one rank.

    engine thread   orders ─▶ Loads, Saves (connectors/transfer, threads of their own)
                    results, errors, report ◀─┘
    arena thread    maps and pins the arena from the start on

What to copy, and from and to which slots, is in the orders. The only calls that a rank makes say which columns it has
filled, and whether the arena is still the current one.

The engine's thread touches only queues and sets, except in three places, all bounded: synchronous loads; loads in
a step that computes nothing, whose engine only waits for them; and the wait for a copy that is just reading a block which
the next step overwrites.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vllm.platforms import current_platform

from connectors import constants as limits
from connectors.constants import MIB
from connectors.device import BlockMover, Blocks, blocks_of
from connectors.device.driver import DriverError
from connectors.device.movers import movers_for
from connectors.device.pinning import Pinning
from connectors.transfer.arena_keeper import ArenaKeeper
from connectors.transfer.copies import Loads, Saves
from connectors.transfer.link import Line, join_all
from connectors.transfer.orders import Column
from connectors.transfer.settings import Settings
from connectors.vllm.geometry import Unsupported, plan_for
from connectors.vllm.guard import Guard
from connectors.vllm.identity.adapters import LiveAdapters
from connectors.vllm.identity.live_weights import Unseen, live_digest, models_of
from connectors.vllm.identity.model_files import elsewhere, foreign_code
from connectors.vllm.identity.namespace import rank_facts
from connectors.vllm.messages import Orders, Rank, Report, Weights
from connectors.vllm.stats import Tally

IDLE_LOAD_BYTES_MAX = 256 * MIB  # copied by the engine's own thread in a step that computes nothing
# vLLM's kernels for CPUs that lay K as the plainest of them do.
PLAIN_ORDERS = frozenset({"", "vec", "vec16"})


class WorkerHalf:
    """Called by one engine thread; see the module's head."""

    def __init__(
        self, settings: Settings, vllm_config: Any, kv_cache_config: Any, guard: Guard, tally: Tally
    ) -> None:
        self.guard, self._settings = guard, settings
        self._config, self._kv = vllm_config, kv_cache_config
        self._number, pp_rank, self._shard, is_writer = _place(vllm_config, kv_cache_config)
        self._stores = is_writer and vllm_config.kv_transfer_config.is_kv_producer
        self._movers: dict[int, BlockMover] = {}
        self._loads_whole = True
        self._pinning: Pinning | None = None
        self._rank = Rank(self._shard, trouble="no KV tensors were registered")
        self._layers: list[str] = []  # that have KV
        self._version = 0
        self._orders = Orders()  # of the latest step
        self._adapters = LiveAdapters((), 0)
        self._adapters_asked = 0
        self._adapters_said = (0, self._adapters.digests())  # at first it is no news
        self._loads = Loads(self._movers, guard.note)
        self._saves = Saves(self._movers, guard.note)
        label = f"vllm worker {pp_rank}.{self._shard}"
        timeout_s = settings.save_timeout_s if self._stores else limits.CALL_TIMEOUT_S
        self._line = Line(settings.kvstore_socket, timeout_s, label, True, self._stores)
        self._threads: list[threading.Thread] = []
        self._keeper: ArenaKeeper | None = None
        self._drained: set[str] = set()
        self._invalid: set[int] = set()
        self._failed: set[str] = set()

    # ---- the start -----------------------------------------------------------------------

    def register(self, kv_caches: dict[str, Any]) -> None:
        """The engine's KV tensors, by layer. A model that cannot be stored is said so in the handshake."""
        try:
            plan = plan_for(self._kv, self._config)
            rank, groups = Rank(self._shard), dict[int, Blocks]()
            for index in (group.index for group in plan.groups):
                spec = self._kv.kv_cache_groups[index]
                layers = {name: kv_caches[name] for name in spec.layer_names}
                if not layers:
                    continue  # a pipeline stage without layers of this group has no column of its records
                groups[index] = blocks = blocks_of(list(layers.values()), self._kv.num_blocks)
                of_group = spec.kv_cache_spec, _record_order(layers), blocks, self._backends(layers)
                rank.groups[index] = rank_facts(self._config, index, *of_group)
            movers, self._pinning = movers_for(groups, self.guard.say_once)
        except (Unsupported, DriverError, ValueError, AttributeError, KeyError) as reason:
            self._rank = Rank(self._shard, trouble=f"{type(reason).__name__}: {reason}")
            return
        self._movers.update(movers)
        self._loads_whole, self._layers = plan.loads_whole, list(kv_caches)
        self._rank = replace(rank, number=self._number, weights=self._weigh())
        self._look_at_models()
        self._start()

    def _look_at_models(self) -> None:
        """What the scheduler cannot know of them: where their weights are from, and code that is not vLLM's."""
        try:
            models = models_of(self._config, self._layers)
        except Unseen as reason:
            self._rank.elsewhere = str(reason)
            return
        self._adapters = LiveAdapters(models, self._rank.number)
        self._adapters_said = (0, self._adapters.digests())
        try:
            self._rank.elsewhere, code = elsewhere(models), foreign_code(models)
        except OSError as error:
            self._rank.trouble = f"its model's code cannot be read: {error}"
            return
        for facts in self._rank.groups.values():
            facts.fields["code"] = code

    def handshake(self, version: int = 0) -> Rank:
        """This rank as it is after so many resets of the cache. Digests the weights when first asked after one."""
        before = self._rank.weights
        if version != before.version:
            now = self._weigh(version) if before.first else replace(before, now="", version=version)
            self._rank = replace(self._rank, weights=replace(now, first=before.first))
        return self._rank

    def _weigh(self, version: int = 0) -> Weights:
        """The weights of now; at the start the first ones. Waits for the device."""
        try:
            digest = live_digest(self._config, self._layers)
        except Unseen as reason:
            return Weights(version=version, unseen=str(reason))
        except Exception as error:  # noqa: BLE001 - not seen either
            self.guard.note("weights", error)
            return Weights(version=version, unseen=f"{type(error).__name__}: {error}")
        return Weights(digest, digest, version)

    def _backends(self, layers: Mapping[str, Any]) -> list[str]:
        """By name; and what of a block's bytes the machine decides: in which order a CPU's kernels lay K, and the format of
        8 bits on AMD's MI300."""
        from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

        names = [backend.get_name() for backend in get_current_attn_backends(self._config, list(layers))]
        modules = self._config.compilation_config.static_forward_context
        orders = {getattr(modules.get(name), "isa", "") for name in layers} - PLAIN_ORDERS
        if current_platform.is_fp8_fnuz() and any(layer.element_size() == 1 for layer in layers.values()):
            orders.add("fnuz")
        return [*names, *orders]

    def _start(self) -> None:
        """The threads that copy, and the one that maps and pins the arena for them."""
        jobs: list[tuple[str, Callable[[Line], None]]] = []
        if self._stores:
            jobs.append(("save", self._saves.serve))
        # With load = "sync" too: where the engine allows none, its scheduler orders asynchronous ones.
        jobs += [(f"load-{n}", self._loads.serve) for n in range(self._settings.load_threads)]
        for name, serve in jobs:
            thread = threading.Thread(target=serve, args=(self._line,), name=f"kvstore-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._keeper = ArenaKeeper(self._line, self._pinning, self.guard.note)
        self._keeper.start()

    def release_blocks(self) -> None:
        """The engine is about to give the memory of its KV away, as sleep does: no copy touches it when this returns."""
        self._saves.hold()
        self._loads.hold()

    def restore_blocks(self) -> None:
        """The memory is there again, at the same addresses; its contents are gone."""
        self._saves.go_on()
        self._loads.go_on()

    # ---- every step, on the engine's thread ------------------------------------------------

    def before_step(self, orders: Orders) -> None:
        """Make sure that no save still reads a block this step may overwrite. Saves of the step before begin now if they have not:
        where it speculates, V1's model runner asks for them on the last pipeline stage only."""
        self.start_saves(self._orders)
        self._orders = orders
        self._version = orders.version
        self._adapters_asked = max(self._adapters_asked, orders.adapters_asked)
        self._saves.cancel(set(orders.cancel))

    def start_loads(self, orders: Orders) -> None:
        at_once = IDLE_LOAD_BYTES_MAX if orders.idle else 0
        for load in orders.loads:
            refused = not self._adapters.agrees(load.adapter)
            column = self._column_of(orders, load.group)
            task = self._loads.begin(load, column, self._version, refused=refused)
            if task is None:
                continue
            size_bytes = len(load.block_ids) * self._movers[load.group].record_bytes
            if load.sync or size_bytes <= at_once:
                at_once -= size_bytes
                self._loads.run(self._line, task)
            else:
                self._loads.submit(task)
        for end in orders.load_ends:
            self._loads.end(end, self._version)

    def start_saves(self, orders: Orders) -> None:
        """Once for each step, however often it is called."""
        saves, orders.saves = orders.saves, []
        draining, orders.draining = orders.draining, []
        self._drained.update(draining)
        for save in saves:
            column = self._column_of(orders, save.group)
            if not self._stores or column is None:
                continue
            task = self._saves.begin(save, column)
            if task is not None:
                task.cancelled = not self._adapters.agrees(save.adapter)
                self._saves.submit(task)

    def _column_of(self, orders: Orders, group: int) -> Column | None:
        """This rank's part of a group's records; None if it has none."""
        return orders.columns.get(group, {}).get(self._shard)

    def results(self) -> tuple[set[str], set[str], set[str]]:
        """Requests whose saves are through, whose loads are through, and whose loads failed as a whole."""
        received, failed = set(), set()
        for loading in self._loads.take_finished():
            name = loading.request_id
            if loading.version != self._version:  # the weights changed while it was under way
                loading.missing |= loading.blocks
            if not loading.sync:
                received.add(name)
            if loading.missing:
                self._failed.add(name)
                if self._loads_whole:
                    failed.add(name)
                else:
                    self._invalid |= loading.missing
        sent, self._drained = self._drained, set()
        return sent, received, failed

    def take_invalid(self) -> set[int]:
        """Blocks that loads promised and did not fill, since the last call."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_report(self) -> Report:
        """What came of loads and saves since the last call."""
        self.guard.look(self._line.client.connected)
        saves = {number: (1, *report) for number, report in self._saves.take_reports().items()}
        loads = {number: (1, valid) for number, valid in self._loads.take_reports().items()}
        failed, self._failed = self._failed, set()
        return Report(saves, loads, failed, adapters=self._take_adapters())

    def _take_adapters(self) -> dict[int, tuple[int, dict[int, str]]]:
        """What is loaded, where that is news or was asked for."""
        now = self._adapters.digests()
        said = self._adapters_asked, now
        if said == self._adapters_said:
            return {}
        self._adapters_said = said
        return {self._rank.number: said}

    def close(self) -> None:
        """Stop the threads, without waiting for a daemon that hangs, and hang up."""
        self._saves.stop()
        for _ in range(self._settings.load_threads):
            self._loads.stop()
        if self._keeper is not None:
            self._keeper.close()
        join_all(self._threads)
        if any(thread.is_alive() for thread in self._threads) or (self._keeper and self._keeper.running):
            return  # the process ends soon, and with it whatever they hold
        if self._pinning is not None:
            self._pinning.close()
        self._line.close()


def _record_order(layers: dict[str, Any]) -> list[str]:
    """Layers in the order their bytes have in a record: see `blocks_of`."""
    storages: dict[int, int] = {}
    places = {}
    for name, layer in layers.items():
        storage = storages.setdefault(layer.untyped_storage().data_ptr(), len(storages))
        places[name] = (storage, layer.storage_offset() * layer.element_size())
    return sorted(layers, key=places.__getitem__)


def _place(vllm_config: Any, kv_cache_config: Any) -> tuple[int, int, int, bool]:
    """(number of this rank within its engine, pipeline rank, shard, whether this rank is the one of its shard that stores)."""
    parallel = vllm_config.parallel_config
    tensor_ranks = parallel.tensor_parallel_size
    number = int(parallel.rank % (tensor_ranks * parallel.pipeline_parallel_size))
    pp_rank, tp_rank = divmod(number, tensor_ranks)
    replicas = max(1, int(kv_cache_config.kv_tp_replicas))
    return number, pp_rank, pp_rank * tensor_ranks + tp_rank // replicas, tp_rank % replicas == 0
