"""Digests of the adapters of LoRA that a rank computes with now: what vLLM has loaded, wherever it came from.

vLLM's block hash has an adapter's name and path, which say nothing of its weights: files are replaced, an adapter is
loaded again in place, or was never a file. So each adapter is digested as it lies in memory, once for each time it was
loaded: every tensor, and every number beside them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import xxhash

from connectors.transfer.orders import Adapter


class LiveAdapters:
    """Of one rank."""

    def __init__(self, models: Iterable[Any], rank: int) -> None:
        found = (getattr(model, "lora_manager", None) for model in models)
        self._manager = next((manager for manager in found if manager is not None), None)
        self._rank = rank
        self._known: dict[int, tuple[Any, str]] = {}

    def digests(self) -> dict[int, str]:
        """By the number that the adapter has in the engine; "" for one that holds what we cannot digest, and for the
        number 0, which no adapter has, where we cannot see any."""
        if self._manager is None:
            return {0: ""}
        now: dict[int, tuple[Any, str]] = {}
        for number, adapter in self._manager.list_adapters().items():
            known = self._known.get(number)
            now[number] = known if known is not None and known[0] is adapter else (adapter, _digest(adapter))
        self._known = now
        return {number: digest for number, (_, digest) in now.items()}

    def agrees(self, adapter: Adapter | None) -> bool:
        """Whether nothing else is loaded under its number."""
        if adapter is None:
            return True
        expected = adapter.digests[self._rank]
        return self.digests().get(adapter.number, expected) == expected


class _Opaque(Exception):
    """There is something that is neither a tensor nor plain."""


def _digest(adapter: Any) -> str:
    digest = xxhash.xxh3_128()
    try:
        _add(digest, {name: value for name, value in vars(adapter).items() if name != "id"})
    except _Opaque:
        return ""
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"tensor {value.dtype} {tuple(value.shape)} ".encode())
        if value.numel():
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(flat.numpy())
    elif isinstance(value, dict):
        digest.update(f"dict {len(value)} ".encode())
        for key in sorted(value, key=str):
            digest.update(f"{key!r} ".encode())
            _add(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"list {len(value)} ".encode())
        for item in value:
            _add(digest, item)
    elif value is None or isinstance(value, str | int | float):
        digest.update(f"{value!r} ".encode())
    elif type(value).__module__.startswith("vllm.lora."):
        digest.update(f"{type(value).__name__} ".encode())
        _add(digest, vars(value))
    else:
        raise _Opaque
