"""What stands beside us under MultiConnector: a connector that knows the KV of every prompt and fails as told.

The true KV of a block follows from its tokens (`world.kv_of`), so this connector needs no store.
It promises the first blocks of each prompt. Of those that it was told to fail it writes nothing,
and reports them in the output of the same step, as vLLM asks of synchronous loads.

Its handshake metadata is refused by everybody but itself, like that of NIXL.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)

BLOCK_TOKENS = 16


@dataclass
class Facts(KVConnectorHandshakeMetadata):
    """Of the kind that NIXL exchanges."""


@dataclass
class Fill(KVConnectorMetadata):
    """(request, tokens up to the block's end, block id, whether it fails), for each block to load."""

    blocks: list[tuple[str, list[int], int, bool]] = field(default_factory=list)


class TruthConnector(KVConnectorBase_V1, SupportsHMA):
    """Extra settings: load ("sync" or "async"), blocks (how many it promises at most), fail (positions
    in the prompt that fail) or fail_chance with seed, only (the requests it serves; empty: all)."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._rank = vllm_config.parallel_config.rank
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._sync = extra["load"] == "sync"
        self._blocks = extra.get("blocks", 1 << 30)
        self._fail, self._chance = set(extra.get("fail", ())), extra.get("fail_chance", 0.0)
        self._only = set(extra.get("only", ()))
        self._draw = random.Random(extra.get("seed", 0))
        self._served: set[str] = set()
        self._ordered = Fill()
        self._layers: dict[str, Any] = {}
        self._received: set[str] = set()
        self._invalid: set[int] = set()

    # ---- scheduler ----

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        for facts in metadata.values():
            if not isinstance(facts, Facts):
                raise TypeError(f"not metadata of mine: {facts}")

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if request.request_id in self._served or (self._only and request.request_id not in self._only):
            return 0, False
        blocks = min((request.num_tokens - 1) // BLOCK_TOKENS, self._blocks)
        tokens = max(0, blocks * BLOCK_TOKENS - num_computed_tokens)
        return tokens, tokens > 0 and not self._sync

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        self._served.add(request.request_id)
        (table,) = blocks.get_block_ids()
        last = min((request.num_tokens - 1) // BLOCK_TOKENS, self._blocks)
        for at in range(last - num_external_tokens // BLOCK_TOKENS, last):
            if table[at] == 0:
                continue  # a window has left it behind
            tokens = list(request.all_token_ids)[: (at + 1) * BLOCK_TOKENS]
            fails = at in self._fail or self._draw.random() < self._chance
            self._ordered.blocks.append((request.request_id, tokens, table[at], fails))

    def build_connector_meta(self, scheduler_output: Any) -> Fill:
        ordered, self._ordered = self._ordered, Fill()
        return ordered

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    # ---- worker ----

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._layers = kv_caches

    def get_handshake_metadata(self) -> Facts:
        return Facts()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        from tests.vllm.world import kv_of

        assert isinstance(self._connector_metadata, Fill)
        for request_id, tokens, block, fails in self._connector_metadata.blocks:
            if fails:
                self._invalid.add(block)
            for offset, value in enumerate(() if fails else kv_of(tokens, self._rank, 0)[-BLOCK_TOKENS:]):
                for layer in self._layers.values():
                    layer[block, 0, offset, 0] = value
            if not self._sync:
                self._received.add(request_id)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_finished(self, finished_req_ids: Iterable[str]) -> tuple[None, set[str] | None]:
        received, self._received = self._received, set()
        return None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid
