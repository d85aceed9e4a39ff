"""A digest of the weights that a rank computes with now: two moments with equal digests give the same KV.

    layers that have KV ─▶ the models they are part of ─▶ every parameter and buffer, once
    its memory, in chunks of words ── sum(word * multiplier of its place) mod 2^64 ──┐
    its name, dtype and shape ───────────────────────────────────────────────────────┴─▶ SHA-256

One pass at the speed of the memory, on the device that holds the weights; only the sums leave it. It is no digest
against an attacker. One changed word changes its chunk's sum, whatever the change, and so do two that change places:
multipliers are odd, and differ by less than a power of two that words could make up for (`_multipliers`).

Models are found where vLLM itself remembers them for reloading weights. What a layer computes with must lie in its tensors:
some backends pack it into objects of their own and leave an empty tensor behind (oneDNN on CPU). Such weights are Unseen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

WEIGHTS_SUM_WORDS = 1 << 20  # of one sum over live weights: three times 8 MiB on the device meanwhile
# Times smaller than it was made may a layer's weights be packed (16 to 4 bits, and room).
WEIGHTS_SHRINK_MAX = 8
if not WEIGHTS_SUM_WORDS <= 1 << 23:
    raise AssertionError("places in a sum over weights have 23 bits")


class Unseen(Exception):
    """There is no digest of these weights; the message says why."""


def live_digest(vllm_config: Any, layers: Collection[str]) -> str:
    """32 hex digits over all weights of this rank, those of a draft model included. layers: names of those that have KV.
    Waits for the device. Raises Unseen, and what the device raises."""
    if vllm_config.offload_config.prefetch.offload_group_size > 0:
        raise Unseen("weights are fetched from host memory layer by layer")
    models = models_of(vllm_config, layers)
    for model in models:
        _check_seen(model)
    named = (
        (f"{number}.{name}", tensor)
        for number, model in enumerate(models)
        for name, tensor in _tensors(model)
    )
    with torch.no_grad():
        return tensors_digest(named)


def models_of(vllm_config: Any, layers: Collection[str]) -> list[Any]:
    """The models that these layers are part of, in the order in which they were made. Raises Unseen."""
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    context: Mapping[str, Any] = vllm_config.compilation_config.static_forward_context
    ours = {id(context.get(name)) for name in layers}
    modules = list(LAYERWISE_INFO)
    parts = {id(child) for module in modules for child in module.children()}
    models, found = [], set[int]()
    for model in modules:
        inside = set() if id(model) in parts else ours & {id(module) for module in model.modules()}
        if inside:
            models.append(model)
            found |= inside
    if not ours or found != ours:
        raise Unseen("its models are not found")
    return models


def _check_seen(model: Any) -> None:
    """Raises Unseen where a layer has lost most of the bytes that it was made with: it keeps its weights elsewhere."""
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    for name, module in model.named_modules():
        info = LAYERWISE_INFO.get(module)
        if info is None:
            continue
        made = sum(tensor.nbytes for tensor in info.restore_metadata[0].values())
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        left = sum(tensor.nbytes for pair in own for _, tensor in _inner(*pair))
        if left * WEIGHTS_SHRINK_MAX < made:
            raise Unseen(f"{name} does not keep them in its tensors")


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for pair in (*model.named_parameters(), *model.named_buffers()):
        yield from _inner(*pair)


def _inner(name: str, tensor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that hold the bytes: some parameters are made of others."""
    if isinstance(partitions := getattr(tensor, "partitions", None), dict):
        for index, part in partitions.items():
            yield from _inner(f"{name}.{index}", part)
    elif is_traceable_wrapper_subclass(tensor):
        for attribute in tensor.__tensor_flatten__()[0]:
            yield from _inner(f"{name}.{attribute}", getattr(tensor, attribute))
    else:
        yield name, tensor


# ---- sums ------------------------------------------------------------------------------


def tensors_digest(named: Iterator[tuple[str, torch.Tensor]]) -> str:
    """Over names, dtypes, shapes and contents, in this order. Raises Unseen for a tensor without memory."""
    total = hashlib.sha256()
    multipliers: dict[torch.device, torch.Tensor] = {}
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for name, tensor in named:
        total.update(
            json.dumps([name, str(tensor.dtype), list(tensor.shape), list(tensor.stride())]).encode()
        )
        if tensor.device.type == "meta":
            raise Unseen(f"{name} has no memory")
        for words in _words(tensor.detach()):
            known = multipliers.get(words.device)
            if known is None or len(known) < len(words):
                known = multipliers[words.device] = _multipliers(len(words), words.device)
            sums.setdefault(words.device, []).append((words * known[: len(words)]).sum())
    for on_device in sums.values():
        total.update(torch.stack(on_device).cpu().numpy().tobytes())
    return total.hexdigest()[:32]


def _words(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """What the tensor holds as vectors of 32-bit words (of bytes, where it is not whole words), in the order in
    which it lies in memory; copied, a chunk at a time, only where it has gaps."""
    if not tensor.numel():
        return
    ordered = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim)))
    pieces: Iterator[torch.Tensor] | list[torch.Tensor] = [ordered]
    if not ordered.is_contiguous():
        row_bytes = tensor.nbytes // ordered.shape[0]
        pieces = iter(ordered.split(max(1, WEIGHTS_SUM_WORDS * 4 // row_bytes)))
    for piece in pieces:
        flat = piece.contiguous().view(-1).view(torch.uint8)
        if flat.numel() % 4 == 0 and flat.storage_offset() % 4 == 0:
            flat = flat.view(torch.int32)
        yield from flat.split(WEIGHTS_SUM_WORDS)


def _multipliers(count: int, device: torch.device) -> torch.Tensor:
    """One for each place in a chunk: (40 scrambled bits, 2 * place + 1).

    A word changes by a multiple of 2^32 at most, and two multipliers differ by a multiple of 2^23 at most. So neither
    one word that changed (multipliers are odd) nor two that changed places give a sum of 0 mod 2^64. The scrambled
    bits are for every other change: one in 2^31 of them or fewer is not seen, in each chunk that it touches.
    """
    place = torch.arange(count, dtype=torch.int64, device=device)
    mixed = (place + 1) * 0x1E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0x3F58476D1CE4E5B9
    mixed = mixed ^ (mixed >> 27)
    return (mixed << 24) | (2 * place + 1)
