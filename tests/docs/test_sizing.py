"""docs/sizing.md: its functions give its tables, and vLLM agrees with them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs/sizing.md").read_text(encoding="utf-8")
GIB = 1 << 30
# From the models' own config.json: (layers with attention, KV heads, head size), MLA: (layers, rank, RoPE).
ATTENTION = {
    "Llama 3.1 8B": (32, 8, 128),
    "Llama 3.1 70B, Llama 3.3 70B": (80, 8, 128),
    "Llama 3.1 405B": (126, 8, 128),
    "Mistral Small 3 24B": (40, 8, 128),
    "Qwen3 8B": (36, 8, 128),
    "Qwen3 32B": (64, 8, 128),
    "Qwen3 30B-A3B": (48, 4, 128),
    "Qwen3 235B-A22B": (94, 4, 128),
    "Qwen3-Next 80B-A3B": (12, 2, 256),
    "gpt-oss 20b": (24, 8, 64),
    "gpt-oss 120b": (36, 8, 64),
    "Gemma 3 27B": (62, 16, 128),
}
MLA = {"DeepSeek-V3, R1; Kimi K2": (61, 512, 64)}
COME_BACK = (
    ("100 users, 8,000 tokens each", 100 * 8_000),
    ("1,000 users, 8,000 tokens each", 1_000 * 8_000),
    ("100 agents, 60,000 tokens each", 100 * 60_000),
    ("1,000 documents of 30,000 tokens", 1_000 * 30_000),
)


def functions() -> dict[str, Any]:
    """What the page's code block defines."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    defined: dict[str, Any] = {}
    exec(block, defined)
    return defined


def bytes_per_token() -> dict[str, tuple[str, int]]:
    """Shape in words, and bytes in fp16, of each model."""
    page = functions()
    found = {
        name: (" × ".join(map(str, shape)), page["kv_bytes_per_token"](*shape))
        for name, shape in ATTENTION.items()
    }
    for name, (layers, rank, rope) in MLA.items():
        found[name] = (f"{layers} × ({rank} + {rope})", page["mla_bytes_per_token"](layers, rank, rope))
    return found


def kib(size_bytes: float) -> str:
    return f"{size_bytes / 1024:.4g}"


def model_rows() -> list[str]:
    return [
        f"| {name} | {shape} | {kib(size)} | {kib(size / 2)} | {GIB // size:,} | {1e6 * size / GIB:.0f} | {5e5 * size / GIB:.0f} |"
        for name, (shape, size) in bytes_per_token().items()
    ]


def user_rows() -> list[str]:
    sizes = bytes_per_token()
    chosen = [sizes[name][1] for name in ("Llama 3.1 8B", "Llama 3.1 70B, Llama 3.3 70B", *MLA)]
    return [
        f"| {who} | {tokens / 1e6:g} M | "
        + " | ".join(f"{tokens * size / GIB:,.0f}" for size in chosen)
        + " |"
        for who, tokens in COME_BACK
    ]


def test_the_tables_are_what_the_formulas_give() -> None:
    """Each row of both tables is in the page as the page's own functions compute it, and there is no other row."""
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    tables = [line for line in rows if line.count("|") in (8, 6) and re.search(r"\d", line)]
    headings = [line for line in tables if line.startswith(("| model ", "| who comes back "))]
    assert [line for line in tables if line not in headings] == model_rows() + user_rows()


@pytest.mark.vllm
def test_vllm_keeps_as_many_bytes() -> None:
    """A block of vLLM's own layer specs has the bytes that the page's formulas say, for attention and for MLA."""
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    import torch

    page, tokens = functions(), 16
    layers, heads, size = ATTENTION["Llama 3.1 8B"]
    full = interface.FullAttentionSpec(
        block_size=tokens, num_kv_heads=heads, head_size=size, dtype=torch.bfloat16
    )
    assert layers * full.page_size_bytes == tokens * page["kv_bytes_per_token"](layers, heads, size)
    ((layers, rank, rope),) = MLA.values()
    mla = interface.MLAAttentionSpec(
        block_size=tokens, num_kv_heads=1, head_size=rank + rope, dtype=torch.float8_e4m3fn
    )
    assert layers * mla.page_size_bytes == tokens * page["mla_bytes_per_token"](layers, rank, rope, 1)
