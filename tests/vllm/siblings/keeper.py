"""What stands beside us under MultiConnector in real engines: a connector with a store of its own, whose loads fail by chance.

    producer   keeps the whole blocks of every prompt that finishes, as the engine computed them
    consumer   promises what it keeps; each load fails with `fail_chance`: then some of its blocks are
               filled with noise, and reported in the output of the same step

The store is a dict in the engine's process: scheduler and worker are one there, and it outlives the engine.
An asynchronous load fills its blocks with noise when it begins, and with what is true (or not) steps later.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from tests.vllm.siblings.truth import Facts

KEPT: dict[bytes, list[torch.Tensor]] = {}  # by block hash: the block of each layer
COUNTS: Counter[str] = Counter()  # brought and failed blocks, handshakes: of the engine that runs
STEPS_MAX = 3  # an asynchronous load takes up to so many


@dataclass
class Load:
    """One request's blocks: (id, hash, whether it fails), and steps until they are there."""

    request_id: str
    blocks: list[tuple[int, bytes, bool]]
    steps: int


@dataclass
class Work(KVConnectorMetadata):
    """A step's loads, and blocks to keep before it: (hash, id)."""

    loads: list[Load] = field(default_factory=list)
    keep: list[tuple[bytes, int]] = field(default_factory=list)


class KeeperConnector(KVConnectorBase_V1, SupportsHMA):
    """Extra settings: load ("sync" or "async"), fail_chance, seed."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._sync = extra.get("load", "sync") == "sync"
        self._chance, self._draw = extra.get("fail_chance", 0.0), random.Random(extra.get("seed", 0))
        self._noise = torch.Generator().manual_seed(extra.get("seed", 0))
        self._block_tokens = vllm_config.cache_config.block_size
        self._local: dict[str, int] = {}  # blocks of vLLM's own cache, by request
        self._ordered = Work()
        self._layers: list[torch.Tensor] = []
        self._flying: list[Load] = []
        self._received: set[str] = set()
        self._invalid: set[int] = set()
        COUNTS.clear()

    # ---- scheduler ----

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if not self._kv_transfer_config.is_kv_consumer:
            return 0, False
        self._local[request.request_id] = first = num_computed_tokens // self._block_tokens
        last = first
        whole = (request.num_tokens - 1) // self._block_tokens  # one token at least is left to compute
        while last < whole and bytes(request.block_hashes[last]) in KEPT:
            last += 1
        return (last - first) * self._block_tokens, last > first and not self._sync

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        (table,) = blocks.get_block_ids()
        first = self._local[request.request_id]
        places = range(first, first + num_external_tokens // self._block_tokens)
        fails = self._draw.random() < self._chance
        bad = set(self._draw.sample(places, self._draw.randrange(1, len(places) + 1))) if fails else set()
        wanted = [(table[at], bytes(request.block_hashes[at]), at in bad) for at in places]
        steps = 0 if self._sync else self._draw.randrange(1, STEPS_MAX + 1)
        self._ordered.loads.append(Load(request.request_id, wanted, steps))

    def build_connector_meta(self, scheduler_output: Any) -> Work:
        ordered, self._ordered = self._ordered, Work()
        return ordered

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        if self._kv_transfer_config.is_kv_producer:
            whole = request.num_prompt_tokens // self._block_tokens
            self._ordered.keep += zip(map(bytes, request.block_hashes[:whole]), block_ids[0], strict=False)
        return False, None

    # ---- worker ----

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._layers = list(kv_caches.values())

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """The first hook of a step: blocks that were given back are not overwritten yet."""
        for digest, block in kv_connector_metadata.keep:
            KEPT[digest] = [layer[block].clone() for layer in self._layers]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert isinstance(self._connector_metadata, Work)
        for load in self._connector_metadata.loads:
            if self._sync:
                self._bring(load)
                continue
            self._flying.append(load)
            for block, _, _ in load.blocks:
                self._fill_with_noise(block)

    def _bring(self, load: Load) -> None:
        for block, digest, fails in load.blocks:
            COUNTS["failed" if fails else "brought"] += 1
            if fails:
                self._fill_with_noise(block)
                self._invalid.add(block)
                continue
            for layer, kept in zip(self._layers, KEPT[digest], strict=True):
                layer[block] = kept

    def _fill_with_noise(self, block: int) -> None:
        for layer in self._layers:
            layer[block] = 10 * torch.randn(layer[block].shape, generator=self._noise)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_finished(self, finished_req_ids: Iterable[str]) -> tuple[None, set[str] | None]:
        for load in self._flying:
            load.steps -= 1
            if load.steps < 0:
                self._bring(load)
                self._received.add(load.request_id)
        self._flying = [load for load in self._flying if load.steps >= 0]
        received, self._received = self._received, set()
        return None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid


class ForeignConnector(KeeperConnector):
    """Its workers tell its scheduler something, and it takes nobody else's word, as NIXL does."""

    def get_handshake_metadata(self) -> Facts:
        return Facts()

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        for facts in metadata.values():
            if not isinstance(facts, Facts):
                raise TypeError(f"not metadata of mine: {facts}")
            COUNTS["handshakes"] += 1
