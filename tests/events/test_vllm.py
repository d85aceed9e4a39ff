"""vLLM's own types and subscribers understand what we publish, and its hashes are ours."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from kvstore.events.journal import Journal
from kvstore.events.stream import Writer
from kvstore.events.wire import Batch, BlockRemoved, BlockStored, HashForm, hash_values
from kvstore.index import forest
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from tests.events.simulated import name, space

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def theirs() -> Any:
    return pytest.importorskip("vllm.distributed.kv_events")


@pytest.mark.parametrize("form", ["int", "bytes"])
def test_vllm_reads_our_batches(theirs: Any, form: HashForm) -> None:
    """Decoded by vLLM's types every field is what we meant; mediums are vLLM's own words."""
    one = space(0, model="org/m", group="3")
    hashes = [name(number) for number in range(3)]
    blocks = [forest.arrived(one, block_hash, b"", IN_DRAM) for block_hash in hashes]
    kept = Journal()
    kept.came(IN_DRAM, blocks)
    kept.came(IN_NVME, blocks[:1])
    kept.left(IN_DRAM, blocks[1:])
    taken = kept.take()
    assert taken is not None
    writer = Writer(form, lambda: 12.5)
    (payload,) = writer.batches(taken.changes)
    batch = msgspec.msgpack.decode(payload, type=theirs.KVEventBatch)
    values = [int.from_bytes(h, "big") if form == "int" else h for h in hashes]
    owners = {tier: f"kvstore/{tier}/{'01' * 16}/org/m" for tier in ("dram", "nvme")}
    common: dict[str, Any] = {"group_idx": 3, "locality": "LOCAL"}

    def stored(block_hashes: list[Any], medium: str, tier: str) -> Any:
        return theirs.BlockStored(
            block_hashes=block_hashes, parent_block_hash=None, token_ids=[], block_size=16, lora_id=None,
            medium=medium, lora_name=None, ownership=owners[tier], **common,
        )  # fmt: skip

    assert (batch.ts, batch.data_parallel_rank) == (12.5, None)
    assert batch.events == [
        stored(values, theirs.MEDIUM_CPU, "dram"),
        stored(values[:1], theirs.MEDIUM_STORAGE, "nvme"),
        theirs.BlockRemoved(values[1:], theirs.MEDIUM_CPU, ownership=owners["dram"], **common),
    ]
    cleared = msgspec.msgpack.decode(writer.cleared(), type=theirs.KVEventBatch)
    assert cleared.events == [theirs.AllBlocksCleared()]
    assert msgspec.msgpack.decode(writer.batch([]), type=theirs.KVEventBatch).events == []


def test_we_read_vllms_batches(theirs: Any) -> None:
    """What vLLM's publisher writes has the shape of ours: a reader of one reads the other."""
    batch = theirs.KVEventBatch(
        ts=1.0,
        events=[
            theirs.BlockStored([1], None, [5, 6], 2, None, "GPU", None, group_idx=0, session_id="s"),
            theirs.BlockRemoved([2], "GPU"),
        ],
        data_parallel_rank=0,
    )
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=Batch)
    assert read.events == [BlockStored([1], None, [5, 6], 2, None, "GPU", None, 0), BlockRemoved([2], "GPU")]


@pytest.mark.parametrize("form", ["int", "bytes"])
def test_hashes_are_vllms(form: HashForm, monkeypatch: pytest.MonkeyPatch) -> None:
    """In both forms a block has the name that vLLM's own events give it, so that a router knows it again."""
    utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", str(int(form == "int")))
    hashes = [random.Random(number).randbytes(32) for number in range(20)]
    assert list(hash_values(hashes, form)) == [utils.maybe_convert_block_hash(h) for h in hashes]
    assert HashForm.__args__[0] == "int"  # type: ignore[attr-defined]  # of a Literal: the default, as vLLM's
    monkeypatch.delenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES")
    assert isinstance(utils.maybe_convert_block_hash(hashes[0]), int)
