"""KV groups as the connector sees them: how many tokens a block has, and which blocks a load needs.

vLLM pages each group of layers on its own. Full attention (MLA too) needs every block of a prefix; a sliding window only
those that its last window touches; a recurrent state (Mamba, linear attention, short convolutions) only the one that holds
it:

    tokens    0 ........................ skipped │ window-1 tokens │ next token
    window    [ null ][ null ][ null ][ needed  ][ needed ]
    state     [ null ][ null ][ null ][  null   ][ needed ]

A state is that of the end of its block only where vLLM says so ("align" mode hands such blocks over), or where every block
holds that of its end ("all" mode). vLLM computes the last token of a prompt again that a hit covers whole. That changes a
state once more, and of a window of whole blocks it needs one block that the hit has not: such a hit leaves one token to
compute. What vLLM itself rebuilds after a hit (windows under bounded replay, rings) is not stored. Where vLLM forbids that
a prompt starts in the middle, and for anything else (chunked local attention, host-resident groups), the connector declines
the whole model: vLLM needs all groups of a prefix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from connectors.vllm.identity.contents import Names


@dataclass(slots=True, frozen=True)
class Group:
    """index: vLLM's group id. block_tokens: tokens a block spans, over all context-parallel ranks. window: how many tokens
    before the next one must be there, None for all of them. draft: holds layers of a draft model, whose last block may still
    change. handed: its blocks are saved when vLLM hands them over, wherever they lie in a request's table."""

    index: int
    block_tokens: int
    window: int | None
    draft: bool
    handed: bool = False

    def blocks_in(self, tokens: int) -> int:
        return tokens // self.block_tokens

    def first_needed(self, tokens: int) -> int:
        """The first block that must be there to go on after `tokens` (a multiple of block_tokens)."""
        if self.window is None:
            return 0
        return max(0, tokens - self.window) // self.block_tokens

    @property
    def lets_go_early(self) -> bool:
        """Whether, after a hit that ends on a block, the block is gone that its last token needs: a window of whole blocks
        begins with a block after the hit, and with the last token of the one before it while that token is computed."""
        return self.window is not None and self.window % self.block_tokens == 0


@dataclass(slots=True, frozen=True)
class Plan:
    """All groups of a model that are stored. hash_tokens: tokens that one of vLLM's block hashes stands for.
    align_tokens: a hit is a multiple of it. loads_whole: of a load that lacks a block nothing can be used: vLLM
    cannot distinguish blocks of several groups, and a shorter hit needs other blocks of a window.
    computes_last: a hit must leave one token to compute."""

    groups: tuple[Group, ...]
    hash_tokens: int
    align_tokens: int
    loads_whole: bool
    computes_last: bool

    @property
    def lasting(self) -> bool:
        """Whether a bucket can have its prefixes: it keeps whole chains only, and of handed states there are only some blocks."""
        return not any(group.handed for group in self.groups)

    @property
    def full(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if group.window is None)

    @property
    def windowed(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if group.window is not None)

    def hashes(self, group: Group, names: Names, start: int, stop: int) -> list[bytes]:
        """Of the group's blocks [start, stop): the name at the end of each block."""
        step = group.block_tokens // self.hash_tokens
        return list(names[start * step + step - 1 : stop * step : step])


# Exact types: a subclass may keep its blocks differently (R-SWA drops some, sinks move some).
_FULL = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
_WINDOWED = frozenset({"SlidingWindowSpec", "SlidingWindowMLASpec"})
_STATES = frozenset({"MambaSpec"})


class Unsupported(Exception):
    """This model's KV cannot be stored by block hash; the message says why."""


def forbidden(vllm_config: Any) -> str:
    """Why vLLM lets no prompt of this model start in the middle; empty where it may.

    External hits bypass the switch that vLLM turns off then. Prefix caching alone turned off is a user's wish, and
    no reason.
    """
    cache, scheduler, model = vllm_config.cache_config, vllm_config.scheduler_config, vllm_config.model_config
    if cache.enable_prefix_caching:
        return ""
    if not scheduler.enable_chunked_prefill:
        return "vLLM computes its prompts in one piece here (chunked prefill and prefix caching are off)"
    if not model.is_prefix_caching_supported:
        return "vLLM does not support prefix caching for it"
    from vllm import envs

    if envs.VLLM_BATCH_INVARIANT:
        return "batch invariance without prefix caching"
    return ""


def plan_for(kv_cache_config: Any, vllm_config: Any) -> Plan:
    """Raises Unsupported."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    if reason := forbidden(vllm_config):
        raise Unsupported(reason)
    parallel = vllm_config.parallel_config
    if parallel.prefill_context_parallel_size > 1:
        raise Unsupported("prefill context parallelism")
    align, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    dcp_size = parallel.decode_context_parallel_size
    made = [_group(index, group, dcp_size) for index, group in enumerate(kv_cache_config.kv_cache_groups)]
    groups = tuple(group for group in made if group is not None)
    if not groups:
        raise Unsupported("a model without KV cache")
    if any(group.block_tokens % hash_tokens for group in groups):
        raise Unsupported("KV groups whose blocks are not whole hashes")
    return Plan(
        groups,
        hash_tokens,
        math.lcm(align, *(group.block_tokens for group in groups)),
        loads_whole=len(made) > 1 or groups[0].window is not None,
        computes_last=any(group.lets_go_early for group in groups),
    )


def _kinds(group: Any) -> set[str]:
    from vllm.v1.kv_cache_interface import iter_layer_specs

    return {type(spec).__name__ for spec in iter_layer_specs(group.kv_cache_spec)}


def _group(index: int, group: Any, dcp_size: int) -> Group | None:
    """None for a group that vLLM rebuilds by itself after a hit."""
    from vllm.v1.kv_cache_interface import iter_layer_specs

    name = type(group.kv_cache_spec).__name__
    if group.host_resident or not group.enable_kv_transfer:
        raise Unsupported(f"KV group {index} ({name}) is not kept on the device for good")
    if not group.kv_cache_spec.prefix_cacheable:
        return None
    specs, kinds = list(iter_layer_specs(group.kv_cache_spec)), _kinds(group)
    sharded = dcp_size if group.kv_cache_spec.dcp_sharded else 1
    tokens = group.kv_cache_spec.block_size * sharded
    draft = bool(group.is_eagle_group)
    if kinds <= _FULL:
        return Group(index, tokens, None, draft)
    if kinds <= _WINDOWED:
        window = max(spec.sliding_window - 1 + spec.extra_retained_tokens for spec in specs)
        return Group(index, tokens, window, draft)
    if kinds <= _STATES:
        return _state_group(index, tokens, specs)
    raise Unsupported(f"KV group {index} ({name}) is neither attention to all, nor to a window, nor a state")


def _state_group(index: int, tokens: int, specs: Sequence[Any]) -> Group:
    modes = {spec.mamba_cache_mode for spec in specs}
    if not modes <= {"align", "all"} or len(modes) > 1:
        raise Unsupported(f"KV group {index} keeps no states of block boundaries (prefix caching is off)")
    if any(spec.num_speculative_blocks for spec in specs):
        raise Unsupported(f"KV group {index} keeps states of drafted tokens (speculative decoding)")
    return Group(index, tokens, tokens, draft=False, handed=modes == {"align"})
