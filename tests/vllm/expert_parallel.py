"""What vLLM's CPU build lacks for experts in data parallel engines, filled in a test's workers (`worker_extension_cls`).

The ranks of such an engine compute each layer of experts together, in lockstep:

    rank 0: tokens a b c ─┐ gather ┌─ a b c d: experts 0 1 ─┐ sum, scatter ┌─▶ a b c
    rank 1: tokens d     ─┴────────┴─ a b c d: experts 2 3 ─┴──────────────┴─▶ d      (or a dummy batch)

gather, scatter   Accelerators have both for ranks with unlike numbers of tokens. On CPU neither
                  is there, with or without a connector. Here gloo does it, with padding.

the map           tells which experts of all are on this rank, and where. The CPU kernel does not read it.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


class ExpertWorker:
    """Mixed into vLLM's workers: vLLM imports this module in each, before the model is made."""


def all_gatherv(
    ranks: Any, tensors: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
) -> Any:
    """The rows of all ranks, in the order of ranks. sizes: how many each has."""
    assert dim == 0
    if isinstance(tensors, list):
        return [all_gatherv(ranks, tensor, dim, sizes) for tensor in tensors]
    sizes = sizes or [len(tensors)] * ranks.world_size
    padded = tensors.new_zeros((max(sizes), *tensors.shape[1:]))
    padded[: len(tensors)] = tensors
    gathered = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(gathered, padded, group=ranks.device_group)
    return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])


def reduce_scatterv(
    ranks: Any, rows: torch.Tensor, dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor:
    """This rank's own rows of the sum over all ranks."""
    assert dim == 0
    sizes = sizes or [len(rows) // ranks.world_size] * ranks.world_size
    total = rows.clone()
    torch.distributed.all_reduce(total, group=ranks.device_group)
    return total.split(sizes)[ranks.rank_in_group].clone()


_compute = CPUUnquantizedExperts.apply


def apply(experts: Any, **given: Any) -> None:
    """An expert of another rank counts nothing here."""
    if (places := given["expert_map"]) is not None:
        local = places[given["topk_ids"].long()]
        given["topk_weights"] = given["topk_weights"].masked_fill(local < 0, 0)
        given["topk_ids"] = local.clamp(min=0).to(given["topk_ids"].dtype)
    _compute(experts, **given)


CpuCommunicator.all_gatherv = all_gatherv
CpuCommunicator.reduce_scatterv = reduce_scatterv
CPUUnquantizedExperts.apply = apply
