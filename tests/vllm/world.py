"""vLLM's own scheduler, our connector, and a model of attention small enough to check every number.

    real      Scheduler, KVCacheManager, KVOutputAggregator, KVStoreConnector (one per rank, threads and all),
              MultiConnector
    replaced  the forward pass, the daemon (FakeStore), and what stands beside us under MultiConnector
              (siblings.truth.TruthConnector)

The KV of a token is a number that depends on every token before it, on the rank and on the
group. The forward pass reads what attention would read (the window, for a window group; the block
before, for a recurrent state); if any of it is not what it must be, then what it writes and samples is
garbage, on every rank, as in a real engine. At the end nothing garbage may have reached a user or the store.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    get_mamba_prefill_checkpoint_position,
    is_mamba_prefill_checkpoint_valid,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from connectors.vllm import KVStoreConnector
from tests.vllm.tiny_weights import TinyModel, give_model

BLOCK_TOKENS = 16
VOCABULARY = 500
GARBAGE = -1
STATES = (
    "state",
    "states",
    "checkpoint",
)  # kinds of groups whose block holds one value, that of its last token


@dataclass
class Shape:
    """What kind of engine. ranks: all of them, of `stages` pipeline stages, each with one layer more than the one
    before it. replicas: ranks that hold the same bytes, as those of MLA do. window: tokens of a second, sliding-window group; None for one group.
    kinds: of all groups: "full", "latent" (MLA), "window", "state" (recurrent), "states" (of every block), "checkpoint" (a state
    that its kernel also keeps inside of a chunk), "replay"
    (a window that vLLM rebuilds); empty: full attention, and a window where one is asked for. hash_tokens: of one block hash.
    replica: which of how many data parallel engines.
    ahead: the scheduler plans a step before it has seen what the last one sampled, as it does on accelerators.
    sibling: settings of a TruthConnector beside us under MultiConnector; None: we are alone. ours: our place
    there, 0 or 1. introduced: what the ranks' blocks look like is known before the first step. weights: of which the
    KV of every rank depends; None: there is no model whose weights could be seen."""

    ranks: int = 1
    stages: int = 1
    replicas: int = 1
    window: int | None = None
    kinds: tuple[str, ...] = ()
    hash_tokens: int = BLOCK_TOKENS
    blocks: int = 64
    budget: int = 64
    sequences: int = 8
    replica: tuple[int, int] = (0, 1)
    role: str = "kv_both"
    prefix_caching: bool = True
    ahead: bool = False
    sibling: dict[str, Any] | None = None
    ours: int = 0
    policy: str = "recompute"
    introduced: bool = True
    weights: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kinds = self.kinds or (("full",) if self.window is None else ("full", "window"))


class World:
    """One engine. `run` steps it until nothing is left to do."""

    def __init__(self, model: Path, shape: Shape, seed: int = 0) -> None:
        self.shape, self._draw = shape, random.Random(seed)
        init_none_hash(sha256)
        self.kv = _kv_config(shape)
        self.config = config_of(model, shape)
        self.scheduler = (AsyncScheduler if shape.ahead else Scheduler)(
            vllm_config=self.config,
            kv_cache_config=self.kv,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK_TOKENS,
            hash_block_size=shape.hash_tokens,
        )
        self.tensors: list[dict[str, torch.Tensor]] = []
        self.workers: list[Any] = []
        self.weights = [shape.weights or 0] * shape.ranks
        self.models: list[TinyModel] = []
        for rank in range(shape.ranks):
            config = copy.deepcopy(self.config)
            config.parallel_config.rank = rank
            if shape.weights is not None:
                groups = self._kv_of(rank).kv_cache_groups
                layers = [name for group in groups for name in group.layer_names]
                self.models.append(give_model(config, shape.weights, layers))
            with set_current_vllm_config(config):
                worker = KVConnectorFactory.create_connector(
                    config, KVConnectorRole.WORKER, self._kv_of(rank)
                )
            self._ours(worker)._worker._backends = lambda names: ["WORLD"]  # type: ignore[union-attr]
            caches = {
                name: torch.full((shape.blocks, 1, 1 if kind in STATES else BLOCK_TOKENS, 1), GARBAGE)
                for kind, group in zip(shape.kinds, self._kv_of(rank).kv_cache_groups, strict=True)
                for name in group.layer_names
            }
            worker.register_kv_caches(caches)
            self.tensors.append(caches)
            self.workers.append(worker)
        self.connector = self._ours(self.scheduler.connector)
        half = self.connector._scheduler
        assert half is not None
        if shape.introduced:
            half._spaces.know_ranks([self._ours(worker)._worker.handshake() for worker in self.workers])  # type: ignore[union-attr]
        self._aggregator = KVOutputAggregator(shape.ranks)
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self._asked_of: dict[str, int] = {}  # the weights at that time
        self._sums: dict[str, float] = {}
        self._take = self.connector._tally.take
        self.connector._tally.take = self._counted  # type: ignore[method-assign]  # vLLM's scheduler asks for it too
        self.steps = 0
        self.abort_chance = 0.0
        self.idle = False
        self._texts: dict[str, list[int]] = {}  # what the workers know of each request
        self._flying: deque[tuple[Any, Any]] = deque()  # steps done, whose results the scheduler has not seen

    @property
    def sums(self) -> dict[str, float]:
        """What scheduler and workers have counted until now."""
        self._counted()
        return self._sums

    def _counted(self) -> Any:
        stats = self._take()
        self._add_up(stats)
        return stats

    def _add_up(self, stats: Any) -> None:
        for name, amount in (stats.data if stats else {}).items():
            self._sums[name] = self._sums.get(name, 0) + amount

    def _ours(self, connector: Any) -> KVStoreConnector:
        alone = self.shape.sibling is None
        ours: KVStoreConnector = connector if alone else connector.sub_connectors[self.shape.ours]
        return ours

    # ---- asking ----

    def ask(
        self,
        name: str,
        tokens: Sequence[int],
        max_tokens: int = 4,
        salt: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Request:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        sampling.update_from_generation_config({}, VOCABULARY + 1)
        request = Request(
            request_id=name,
            prompt_token_ids=list(tokens),
            sampling_params=sampling,
            pooling_params=None,
            cache_salt=salt,
            trace_headers=headers,
            block_hasher=get_request_block_hasher(self.shape.hash_tokens, sha256),
        )
        self.requests[name] = request
        self._asked_of[name] = self._seat(0)
        self.outputs[name] = []
        self.scheduler.add_request(request)
        return request

    def replace_weights(self, *values: int) -> None:
        """One value for all ranks, or one for each."""
        self.weights = list(values) * (self.shape.ranks // len(values))
        for model, value in zip(self.models, self.weights, strict=True):
            model.fill(value)

    def _seat(self, rank: int) -> int:
        """What the KV of a rank depends on, beside its tokens: the same for ranks that hold the same."""
        return rank // self.shape.replicas + 1000 * self.weights[rank]

    def run(self, steps_max: int = 5000) -> None:
        """Step until every request is finished and every block given back."""
        for _ in range(steps_max):
            if not self.scheduler.has_requests():
                return
            self.step()
            if self.idle:
                time.sleep(0.001)  # waiting for copies
        raise AssertionError(f"not done after {steps_max} steps: {self.scheduler.requests}")

    def step(self) -> None:
        self.steps += 1
        output = self.scheduler.schedule()
        orders = output.kv_connector_metadata
        self.idle = not output.num_scheduled_tokens
        sampled: list[list[int]] = []
        results = []
        self._prepare_blocks(output)
        for worker in self.workers:
            mine = pickle.loads(pickle.dumps(orders))
            worker.handle_preemptions(mine)
            worker.bind_connector_metadata(mine)
            if output.has_sync_kv_loads:
                worker.start_load_kv(None)
        sampled = self._forward(output)
        names = list(output.num_scheduled_tokens)
        for worker in self.workers:
            results.append(
                ModelRunnerOutput(
                    req_ids=names,
                    req_id_to_index={name: index for index, name in enumerate(names)},
                    sampled_token_ids=sampled,
                    kv_connector_output=self._after(worker, output),
                )
            )
        self._flying.append((output, self._aggregator.aggregate(results)))
        self.catch_up(1 if self.shape.ahead and not self.idle else 0)
        if self.abort_chance and self._draw.random() < self.abort_chance and self.scheduler.running:
            victim = self._draw.choice(self.scheduler.running).request_id
            self.scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)

    def catch_up(self, ahead: int = 0) -> None:
        """Let the scheduler see the results of all steps but the last `ahead`."""
        while len(self._flying) > ahead:
            for engine_outputs in self.scheduler.update_from_output(*self._flying.popleft()).values():
                for one in engine_outputs.outputs:
                    self.outputs[one.request_id] += one.new_token_ids

    def _after(self, worker: Any, output: Any) -> KVConnectorOutput:
        if not output.has_sync_kv_loads:
            worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        self._add_up(self._ours(worker).get_kv_connector_stats())
        answer = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=pickle.loads(pickle.dumps(worker.build_connector_worker_meta())),
        )
        worker.clear_connector_metadata()
        return answer

    # ---- the forward pass ----

    def _prepare_blocks(self, output: Any) -> None:
        """What vLLM has its workers do to blocks before a step: new ones are cleared, shared ones copied on write."""
        for cache in (cache for caches in self.tensors for cache in caches.values()):
            cache[output.new_block_ids_to_zero or []] = GARBAGE
            for source, target in output.kv_cache_block_copies or ():
                cache[target] = cache[source].clone()

    def _forward(self, output: Any) -> list[list[int]]:
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in output.scheduled_new_reqs:
            self._texts[new.req_id] = list(new.prompt_token_ids)
        for name, told in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            prompt_tokens = self.requests[name].num_prompt_tokens
            if name in cached.resumed_req_ids:
                self._texts[name] = list(self.requests[name].all_token_ids)
            del self._texts[name][prompt_tokens + told :]
        sampled = []
        for name, count in output.num_scheduled_tokens.items():
            start, tokens = starts[name], self._texts[name]
            tables = self.scheduler.kv_cache_manager.get_block_ids(name)
            replayed = self.requests[name].replay_start
            sound = all(
                self._reads_true(rank, group, tokens, tables[group], start, replayed)
                for rank in range(self.shape.ranks)
                for group in range(len(self.kv.kv_cache_groups))
            )
            for rank in range(self.shape.ranks):
                for group, kind in enumerate(self.shape.kinds):
                    kept = replayed + (self.shape.window or 0) if replayed and kind != "replay" else 0
                    positions = range(max(start, kept), start + count)
                    self._write(rank, group, tokens, tables[group], positions, sound)
            done = start + count >= len(tokens)
            sampled.append(([next_token(tokens, self._seat(0))] if sound else [VOCABULARY]) if done else [])
            tokens += sampled[-1]
        return sampled

    def _reads_true(
        self, rank: int, group: int, tokens: list[int], table: list[int], start: int, replayed: int
    ) -> bool:
        kind, window = self.shape.kinds[group], self.shape.window or 0
        first = {"window": start - window + 1, "replay": max(start - window + 1, replayed)}.get(kind, 0)
        first = start - 1 if kind in STATES else first
        truth = kv_of(tokens[:start], self._seat(rank), group)
        for layer in self._kv_of(rank).kv_cache_groups[group].layer_names:
            cache = self.tensors[rank][layer]
            for position in range(max(0, first), start):
                block, offset = _place(kind, position)
                if int(cache[table[block], 0, offset, 0]) != truth[position]:
                    return False
        return True

    def _write(
        self, rank: int, group: int, tokens: list[int], table: list[int], positions: range, sound: bool
    ) -> None:
        truth = kv_of(tokens[: positions.stop], self._seat(rank), group)
        kind = self.shape.kinds[group]
        for layer in self._kv_of(rank).kv_cache_groups[group].layer_names:
            for position in positions[-1:] if kind in ("state", "checkpoint") else positions:
                block, offset = _place(kind, position)
                value = truth[position] if sound else GARBAGE - 1 - self._draw.randrange(1 << 30)
                self.tensors[rank][layer][table[block], 0, offset, 0] = value

            if kind == "checkpoint" and sound and (at := self._checkpoint(positions)):
                self.tensors[rank][layer][table[(positions.stop - 1) // BLOCK_TOKENS - 1], 0, 0, 0] = truth[
                    at - 1
                ]

    def _checkpoint(self, chunk: range) -> int:
        """Where inside a chunk the kernel keeps a state too, in the block before the last; 0 for nowhere."""
        unit = self.shape.hash_tokens
        at = get_mamba_prefill_checkpoint_position(chunk.stop, unit, False)
        return at * is_mamba_prefill_checkpoint_valid(chunk.start, chunk.stop, at, unit, BLOCK_TOKENS, unit)

    def _kv_of(self, rank: int) -> KVCacheConfig:
        return _kv_config(self.shape, rank * self.shape.stages // self.shape.ranks)

    # ---- what must hold ----

    def check_answers(self) -> None:
        """Every finished request got the tokens that the model would say with no cache at all."""
        for name, request in self.requests.items():
            tokens = list(request.prompt_token_ids or [])
            for token in self.outputs[name]:
                assert token == next_token(tokens, self._asked_of[name]), (
                    f"{name}: wrong token after {len(tokens)}"
                )
                tokens.append(token)

    def check_records(self, store: Any) -> int:
        """Every record in the store is the KV of the tokens its hash names; answers how many there are."""
        groups = {
            group.space.digest: index for index, group in self.connector._scheduler._spaces.columns.items()
        }
        tokens_of = {
            bytes(digest): list(request.all_token_ids)[: (index + 1) * self.shape.hash_tokens]
            for request in self.requests.values()
            for index, digest in enumerate(request.block_hashes)
        }
        checked = 0
        for (digest, name), record in store.records.copy().items():
            if name not in tokens_of or digest not in groups:
                continue
            group = groups[digest]
            column: list[int] = []
            values = 1 if self.shape.kinds[group] in STATES else BLOCK_TOKENS
            for rank in range(0, self.shape.ranks, self.shape.replicas):
                layers = self._kv_of(rank).kv_cache_groups[group].layer_names
                column += kv_of(tokens_of[name], self._seat(rank), group)[-values:] * len(layers)
            assert record == torch.tensor(column, dtype=torch.int64).numpy().tobytes(), (
                "a bad block was stored"
            )
            checked += 1
        return checked

    def check_empty(self) -> None:
        """No request is remembered, and every block is free."""
        assert not self.scheduler.requests
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        half = self.connector._scheduler
        assert (
            not half._requests
            and not half._storing.stores
            and not half._fetching.fetches
            and not half._ended
            and not half._new_draining
        )

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()


def _place(kind: str, position: int) -> tuple[int, int]:
    """Where a token's value is: its block's place in the table, and its place in the block."""
    block, offset = divmod(position, BLOCK_TOKENS)
    return block, 0 if kind in STATES else offset


_known: dict[tuple[bytes, int, int], list[int]] = {}


def kv_of(tokens: Sequence[int], rank: int, group: int) -> list[int]:
    """The KV of each token: a number that depends on all tokens up to it, on the rank and on the group."""
    key = (repr(list(tokens)).encode(), rank, group)
    if key not in _known:
        state = hashlib.blake2b(f"{rank} {group}".encode(), digest_size=8)
        values = []
        for token in tokens:
            state.update(token.to_bytes(4, "little"))
            values.append(int.from_bytes(state.copy().digest()[:7], "little"))
        _known[key] = values
    return _known[key]


def settle(world: World) -> None:
    """Run, and check what must hold afterwards."""
    world.run()
    world.check_answers()
    world.check_empty()


def next_token(tokens: Sequence[int], seat: int = 0) -> int:
    """What the model says next."""
    return kv_of(tokens, seat, 0)[-1] % VOCABULARY


def _kv_config(shape: Shape, stage: int = 0) -> KVCacheConfig:
    groups = []
    for at, kind in enumerate(shape.kinds):
        layers = 0 if at and stage else 2 + stage  # later stages have layers of the first group only
        names = [f"{kind}.{stage}.{layer}" for layer in range(layers)]
        groups.append(KVCacheGroupSpec(names, _spec(kind, shape.window)))
    config = KVCacheConfig(num_blocks=shape.blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    config.kv_tp_replicas = shape.replicas
    return config


def _spec(kind: str, window: int | None) -> KVCacheSpec:
    sizes: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    sizes["block_size"] = BLOCK_TOKENS
    if kind in STATES:
        mode = "all" if kind == "states" else "align"
        kept: dict[str, Any] = {}
        if kind == "checkpoint":
            kept = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1}
        return MambaSpec(BLOCK_TOKENS, shapes=((1,),), dtypes=(torch.int64,), mamba_cache_mode=mode, **kept)
    if kind == "window":
        return SlidingWindowSpec(**sizes, sliding_window=window)
    if kind == "replay":
        return SlidingWindowMLASpec(**sizes, sliding_window=window, bounded_replay=True)
    return {"full": FullAttentionSpec, "latent": MLAAttentionSpec}[kind](**sizes)


def _transfer(shape: Shape) -> dict[str, Any]:
    ours = {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "connectors.vllm",
        "kv_role": shape.role,
        "kv_connector_extra_config": {"model_digest": "world", "load_timeout_s": 2, **shape.extra},
    }
    if shape.sibling is None:
        return {**ours, "kv_load_failure_policy": shape.policy}
    both = [{
        "kv_connector": "TruthConnector",
        "kv_connector_module_path": "tests.vllm.siblings.truth",
        "kv_role": "kv_both",
        "kv_connector_extra_config": shape.sibling,
    }]  # fmt: skip
    both.insert(shape.ours, ours)
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": shape.policy,
        "kv_connector_extra_config": {"connectors": both},
    }


def config_of(model: Path, shape: Shape) -> VllmConfig:
    cache = CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=shape.prefix_caching)
    cache.kv_cache_layout = "LBNHC"
    cache.mamba_cache_mode = {"state": "align", "states": "all", "checkpoint": "align"}.get(
        shape.kinds[-1], "none"
    )
    if shape.hash_tokens != BLOCK_TOKENS:
        cache.prefix_match_unit = shape.hash_tokens
    cache.num_gpu_blocks = shape.blocks
    config = VllmConfig(
        model_config=ModelConfig(model=str(model), dtype="float32", seed=0),
        scheduler_config=SchedulerConfig(
            max_num_seqs=shape.sequences,
            max_num_batched_tokens=shape.budget,
            max_model_len=1024,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        cache_config=cache,
        kv_transfer_config=KVTransferConfig(**_transfer(shape)),
        device_config=DeviceConfig("cpu"),
    )
    config.scheduler_config.async_scheduling = shape.ahead
    config.parallel_config.tensor_parallel_size = shape.ranks // shape.stages
    config.parallel_config.pipeline_parallel_size = shape.stages
    config.parallel_config.world_size = shape.ranks
    config.parallel_config.data_parallel_rank, config.parallel_config.data_parallel_size = shape.replica
    return config
