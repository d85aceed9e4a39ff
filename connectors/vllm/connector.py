"""`KVStoreConnector`: vLLM's KV connector on top of the daemon of this node.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "connectors.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute"}'

    scheduler process                         worker process, one per rank
    ┌──────────────────────────────┐  Orders  ┌─────────────────────────────┐
    │ KVStoreConnector (SCHEDULER) │ ───────▶ │ KVStoreConnector (WORKER)   │
    │  └ SchedulerHalf: lookups    │ ◀─────── │  └ WorkerHalf: copies       │
    └──────────────┬───────────────┘  Report  └──────────────┬──────────────┘
                   └───────────── kvstore daemon ────────────┘  (arena in shared memory)

A thin shell: it maps vLLM's hooks to one of the two halves and keeps every failure away from
the engine (`connectors/vllm/guard.py`). Only the constructor raises, and only for a wrong
setting. For one step the order is: scheduler `matched_tokens`, `allocated`, `orders`; worker
`before_step`, `start_loads`, `start_saves`, `results`; scheduler `reported`, `finished`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.platforms import current_platform
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from connectors.transfer.settings import read_settings
from connectors.vllm.guard import Guard, guarded, logger, nothing
from connectors.vllm.messages import Orders, Report
from connectors.vllm.scheduler import SchedulerHalf
from connectors.vllm.stats import KVStorePromMetrics, KVStoreStats, Tally
from connectors.vllm.worker import WorkerHalf

BLOCK_OUTERMOST_LAYOUT = "BLHNC"  # a block of all layers is one contiguous run


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module's head. Raises SettingError at construction for a wrong setting."""

    _scheduler: SchedulerHalf  # vLLM makes a connector for each role, and calls the hooks of that role only
    _worker: WorkerHalf
    _half: SchedulerHalf | WorkerHalf  # the one of them that there is

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = read_settings(self._kv_transfer_config.kv_connector_extra_config or {})
        self._tally = Tally()
        self.guard = Guard(self._tally.add)
        self._trouble = ""  # why this rank stores nothing, whatever its blocks look like
        given = settings, vllm_config, kv_cache_config, self.guard, self._tally
        if role is KVConnectorRole.SCHEDULER:
            self._want_recompute()
            self._half = self._scheduler = SchedulerHalf(*given)
        else:
            self._trouble = self._policy_trouble()
            self._half = self._worker = WorkerHalf(*given)

    def _want_recompute(self) -> None:
        """A block that is gone is a miss, never a failed request: vLLM's default policy says otherwise."""
        transfer = self._kv_transfer_config
        if transfer.is_kv_consumer and transfer.kv_load_failure_policy != "recompute":
            logger.info("kvstore: asks for kv_load_failure_policy=recompute, so that a miss fails no request")
            transfer.kv_load_failure_policy = "recompute"

    def _policy_trouble(self) -> str:
        """Why we cannot serve under MultiConnector, or empty. It hands us a copy of its configuration, so that
        `_want_recompute` changes nothing. The policy in force can be seen only where workers are made."""
        ours, outer = self._kv_transfer_config, get_current_vllm_config_or_none()
        transfer = None if outer is None else outer.kv_transfer_config
        if transfer is None or transfer is ours or not ours.is_kv_consumer:
            return ""
        if transfer.kv_load_failure_policy == "recompute":
            return ""
        return f'set "kv_load_failure_policy": "recompute" beside "kv_connector": "{transfer.kv_connector}"'

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # best effort: what was not stored is computed

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:  # noqa: ARG003 - vLLM passes it
        """A wish, which vLLM drops where a backend cannot have it; any layout will do. None where MultiConnector
        asks: two children with different wishes end the engine's start. It passes nothing that says so, so the caller
        is looked at. None on CPU either: no backend there keeps blocks outermost, and MLA's does not say so and fails
        at its first request."""
        alone = sys._getframe(1).f_code is get_kv_connector_cache_layout.__code__
        return BLOCK_OUTERMOST_LAYOUT if alone and not current_platform.is_cpu() else None

    @guarded(nothing)
    def shutdown(self) -> None:
        self._half.close()

    # ---- scheduler ---------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Does nothing: this is of other connectors. Ours travels in `Report`."""

    @guarded(nothing)
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler.know_pool(gpu_block_pool)

    @guarded(nothing)
    def on_new_request(self, request: Any) -> None:
        self._scheduler.queued(request)

    @guarded(lambda *_: False)
    def has_pending_block_frees(self) -> bool:
        return self._scheduler.frees_soon()

    @guarded(lambda *_: False)
    def has_pending_push_work(self) -> bool:
        """vLLM steps on until this is False, also while it is paused: before it sleeps no copy is under way."""
        return self._scheduler.has_transfers()

    @guarded(lambda *_: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    # Where this fails vLLM waits for a load all the same: it must come, and fail.
    @guarded(lambda self, *args, **kwargs: self._lose(*args, **kwargs))
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    @guarded(nothing)
    def _lose(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.lose(request, blocks, num_external_tokens)

    @guarded(lambda _, __, tokens: {CacheHitSource.EXTERNAL_UNSPECIFIED: tokens} if tokens else {})
    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        return self._scheduler.hit_sources(request, num_external_tokens)

    @guarded(lambda *_: Orders())
    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        return self._scheduler.orders(scheduler_output)

    @guarded(nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.reported(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @guarded(lambda *_: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, block_ids), self._promise(request)

    @guarded(nothing)
    def _promise(self, request: Any) -> dict[str, Any] | None:
        return self._scheduler.promise(request)

    @guarded(lambda *_: False)
    def reset_cache(self) -> bool | None:
        self._scheduler.new_epoch()
        return True

    # ---- worker ------------------------------------------------------------------------------

    @property
    def _orders(self) -> Orders:
        """Of this step; none where the scheduler's half failed, or vLLM has given us none."""
        orders = self._connector_metadata
        return orders if isinstance(orders, Orders) else Orders()

    @guarded(nothing)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._worker.register(kv_caches)

    @guarded(nothing)
    def unregister_kv_caches(self) -> None:
        self._worker.release_blocks()

    @guarded(nothing)
    def restore_kv_caches(self) -> None:
        self._worker.restore_blocks()

    @guarded(nothing)
    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        if self.role is KVConnectorRole.WORKER:  # vLLM's own tests call it on a scheduler's connector, too
            self._worker.before_step(kv_connector_metadata)

    @guarded(nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start_loads(self._orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: loads are whole before a step that needs them."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: blocks are saved whole, when the step is done."""

    @guarded(nothing)
    def wait_for_save(self) -> None:
        self._worker.start_saves(self._orders)

    @guarded(lambda *_: KVConnectorTransferResults())
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return KVConnectorTransferResults(*self._worker.results())

    @guarded(lambda *_: set())
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_invalid()

    @guarded(nothing)
    def build_connector_worker_meta(self) -> Report | None:
        report, orders = self._worker.take_report(), self._orders
        report.sync_step = orders.sync_step
        if orders.introduce:
            rank = self._worker.handshake(orders.version)
            report.ranks.append(replace(rank, trouble=self._trouble) if self._trouble else rank)
        return None if report.is_empty() else report

    # ---- statistics --------------------------------------------------------------------------

    @guarded(nothing)
    def get_kv_connector_stats(self) -> KVStoreStats | None:
        return self._tally.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVStoreStats | None:
        return KVStoreStats(data=data if data is not None else {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVStorePromMetrics:
        return KVStorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
