"""What travels: vLLM's batches of KV events, field by field as its own publisher writes them.

    [topic, sequence (8 bytes, big-endian), msgpack [ts, events, data_parallel_rank]]
                                                         │
       {"type": "BlockStored",  "block_hashes": […], "medium": "CPU", "ownership": "kvstore/dram/…", …}
       {"type": "BlockRemoved", "block_hashes": […], "medium": "STORAGE", …}
       {"type": "AllBlocksCleared"}

Both ends import this, so it knows nothing of the daemon. Fields of vLLM's that we never set are left
out; a reader ignores those that it does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME

HashForm = Literal["int", "bytes"]
BlockHash = int | bytes
Frames = list[bytes]  # topic, sequence, batch

SEQUENCE_BYTES = 8
END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)  # of an answer; as a request: everything that is held
MEDIUMS = {IN_DRAM: "CPU", IN_NVME: "STORAGE"}
TIERS = {IN_DRAM: "dram", IN_NVME: "nvme"}
OWNER = "kvstore"
LOCALITY = "LOCAL"
_INT_BYTES = 8


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """A tier has these blocks now; they need not follow one another. block_size: tokens of each, 0 where the
    daemon does not know."""

    block_hashes: Sequence[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """A tier has these blocks no more."""

    block_hashes: Sequence[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """Nothing that was published before holds any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True, gc=False):
    """One message. ts: seconds since 1970, when it was written."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


def hash_values(hashes: Sequence[bytes], form: HashForm) -> Sequence[BlockHash]:
    """Block hashes as they travel: themselves, or their last 8 bytes as a number, as vLLM does."""
    if form == "bytes":
        return hashes
    return [int.from_bytes(block_hash[-_INT_BYTES:], "big") for block_hash in hashes]


def owner_name(bit: int, digest: bytes, model: str) -> str:
    """The `ownership` of events of one tier and namespace."""
    return f"{OWNER}/{TIERS[bit]}/{digest.hex()}/{model}"


def sequence_bytes(sequence: int) -> bytes:
    """As it stands in a frame."""
    return sequence.to_bytes(SEQUENCE_BYTES, "big")
