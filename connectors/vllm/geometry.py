"""KV groups as the connector sees them: how many tokens a block has, and which blocks a load needs.

vLLM pages each group of layers on its own. Full attention (MLA too) needs every block of a
prefix; a sliding window needs only the blocks that its last window touches:

    tokens    0 ........................ skipped │ window-1 tokens │ next token
    blocks    [ null ][ null ][ null ][ needed  ][ needed ]

Anything else (Mamba states, chunked local attention, rings, host-resident groups) has no
blocks that a prefix hash names for good. The connector then declines the whole model: vLLM
needs all groups of a prefix or none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, frozen=True)
class Group:
    """index: vLLM's group id. block_tokens: tokens a block spans, over all context-parallel
    ranks. window: how many tokens before the next one must be there, None for all of them.
    draft: holds layers of a draft model, whose last block may still change."""

    index: int
    block_tokens: int
    window: int | None
    draft: bool

    def blocks_in(self, tokens: int) -> int:
        return tokens // self.block_tokens

    def first_needed(self, tokens: int) -> int:
        """The first block that must be there to go on after `tokens` (a multiple of block_tokens)."""
        if self.window is None:
            return 0
        return max(0, tokens - self.window) // self.block_tokens


@dataclass(slots=True, frozen=True)
class Plan:
    """All groups of a model. hash_tokens: tokens that one of vLLM's block hashes stands for.
    align_tokens: a hit is a multiple of it."""

    groups: tuple[Group, ...]
    hash_tokens: int
    align_tokens: int

    @property
    def full(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if group.window is None)

    @property
    def windowed(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if group.window is not None)

    def hashes(self, group: Group, block_hashes: Sequence[bytes], start: int, stop: int) -> list[bytes]:
        """Hashes of the group's blocks [start, stop): the hash at the end of each block."""
        step = group.block_tokens // self.hash_tokens
        return list(block_hashes[start * step + step - 1 : stop * step : step])


# Exact types: a subclass may keep its blocks differently (R-SWA drops some, sinks move some).
_FULL = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
_WINDOWED = frozenset({"SlidingWindowSpec", "SlidingWindowMLASpec"})


class Unsupported(Exception):
    """This model's KV cannot be stored by block hash; the message says why."""


def plan_for(kv_cache_config: Any, vllm_config: Any) -> Plan:
    """Raises Unsupported."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    parallel = vllm_config.parallel_config
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise Unsupported("prefill context parallelism")
    align, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    groups = tuple(
        _group(index, group, parallel.decode_context_parallel_size)
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
    )
    if not groups:
        raise Unsupported("a model without KV cache")
    if any(group.block_tokens % hash_tokens for group in groups):
        raise Unsupported("KV groups whose blocks are not whole hashes")
    return Plan(groups, hash_tokens, math.lcm(align, *(group.block_tokens for group in groups)))


def _group(index: int, group: Any, dcp_size: int) -> Group:
    from vllm.v1.kv_cache_interface import iter_layer_specs

    name = type(group.kv_cache_spec).__name__
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        raise Unsupported(f"KV group {index} ({name}) is not kept on the device for good")
    specs = list(iter_layer_specs(group.kv_cache_spec))
    if not group.kv_cache_spec.prefix_cacheable:
        raise Unsupported(f"KV group {index} ({name}) has no prefix blocks")
    sharded = dcp_size if group.kv_cache_spec.dcp_sharded else 1
    tokens = group.kv_cache_spec.block_size * sharded
    draft = bool(getattr(group, "is_eagle_group", False))
    kinds = {type(spec).__name__ for spec in specs}
    if kinds <= _FULL:
        return Group(index, tokens, None, draft)
    if kinds <= _WINDOWED:
        window = max(spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0) for spec in specs)
        return Group(index, tokens, window, draft)
    raise Unsupported(f"KV group {index} ({name}) is neither full attention nor a sliding window")
