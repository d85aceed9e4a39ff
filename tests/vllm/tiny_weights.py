"""A model small enough to replace its weights in a test: found, and changed, like those of vLLM's own loaders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

VALUES = 300  # of the one weight that a layer computes with


class TinyModel(nn.Module):
    """One attention layer, which has no weights, and one layer that has; a buffer beside it."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.attention = nn.Module()
        self.projection = nn.Linear(VALUES, 2, bias=False)
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.fill(value)

    @torch.no_grad()
    def fill(self, value: int) -> None:
        """Replace the weights, in place."""
        self.projection.weight.copy_(torch.arange(2 * VALUES).view(2, VALUES) + value)


def give_model(vllm_config: Any, value: int, layers: Sequence[str] = ("attention",)) -> TinyModel:
    """A model of this engine, made known as vLLM makes its own known. layers: names of those that have KV."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model = TinyModel(value)
    record_metadata_for_reloading(model)
    vllm_config.compilation_config.static_forward_context = dict.fromkeys(layers, model.attention)
    return model
