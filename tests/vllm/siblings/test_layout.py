"""The layout of KV blocks: a wish of ours where we are alone, and never a reason for an engine not to start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

import connectors.vllm.connector

pytestmark = pytest.mark.vllm

EVERY = [
    "LBNHC",
    "LBHNC",
    "BLNHC",
    "BLHNC",
    "BHLNC",
    "LHBNC",
]  # what a backend that declares nothing can have
OURS = {
    "kv_connector": "KVStoreConnector",
    "kv_connector_module_path": "connectors.vllm",
    "kv_role": "kv_both",
}


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the CPU, as far as our connector can see."""
    monkeypatch.setattr(connectors.vllm.connector, "current_platform", SimpleNamespace(is_cpu=lambda: False))


def resolved(model: Path, supported: list[str], *children: dict[str, Any]) -> str:
    """The layout that vLLM chooses for one connector, or for several under MultiConnector."""
    transfer = children[0]
    if len(children) > 1:
        extra = {"connectors": list(children)}
        transfer = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    config = VllmConfig(
        model_config=ModelConfig(model=str(model), dtype="float32"),
        cache_config=CacheConfig(block_size=16),
        device_config=DeviceConfig("cpu"),
    )
    config.kv_transfer_config = KVTransferConfig(**transfer)
    return str(resolve_kv_cache_layout(config, [supported]).name)


@pytest.mark.usefixtures("accelerator")
def test_alone_blocks_are_outermost_where_the_backend_can(model: Path) -> None:
    """A block of all layers is one piece if the backend declares such a layout; else the backend has its own."""
    assert resolved(model, EVERY, OURS) == "BLHNC"
    assert resolved(model, ["LBHNC", "BLHNC"], OURS) == "BLHNC"
    assert resolved(model, ["LHBNC", "LBHNC"], OURS) == "LHBNC"


def test_on_cpu_nothing_is_asked_for(model: Path) -> None:
    """The MLA backend of CPUs declares that it can have any layout, and fails with blocks outermost."""
    assert resolved(model, EVERY, OURS) == EVERY[0]


@pytest.mark.usefixtures("accelerator")
def test_siblings_get_the_layout_that_they_get_without_us(model: Path) -> None:
    """Beside each connector of vLLM that can be imported here, first or second, the layout is the sibling's own."""
    own: dict[str, str] = {}
    for name, load in KVConnectorFactory._registry.items():
        if name in ("MultiConnector", "KVStoreConnector"):
            continue
        try:
            load()
        except ImportError:
            continue  # it needs what is not installed
        sibling = {"kv_connector": name, "kv_role": "kv_both"}
        own[name] = resolved(model, EVERY, sibling)
        for pair in ((OURS, sibling), (sibling, OURS)):
            assert resolved(model, EVERY, *pair) == own[name], name
    assert own["NixlConnector"] == own["OffloadingConnector"] == "LBHNC"
    assert own["HiSparseConnector"] == "BLHNC" and own["ExampleConnector"] == EVERY[0]


@pytest.mark.usefixtures("accelerator")
def test_the_environment_has_the_last_word(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside siblings that ask for nothing, VLLM_KV_CACHE_LAYOUT puts blocks outermost."""
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
    assert resolved(model, EVERY, OURS, {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}) == "BLHNC"
