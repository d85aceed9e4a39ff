"""Slabs of the arena that models have: what the slot table says of each.

    image of a model   │ slab 0 │ slab 1 │ … │ slab N-1, behind its end zeros │    contiguous in a client's address space
    arena              │ KV │ slab 1 │ KV │ KV │ slab 0 │ …                        whichever slabs were free

A model's slab is one slot, as large as the slab, in a row like any other: WRITING while it is filled, READY with the
checksum of all of its bytes. So whatever holds for records holds for it: adoption, quarantine, generations, owners. Its key
begins with MODELS, which no namespace may have, and says the rest of what must be known: an arena needs no other file to say
which models are in it, and an older program takes such a slab for a record of a namespace that is not used.

    key      │ MODELS, 16 │ content, 16 │ index u32 │ count u32 │ label … │
    parent   │ … label │                                                        name@revision, in both together
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from tiers.base import KEY_BYTES_MAX, NAMESPACE_BYTES, Record

MODELS: Final = b"kvstore/models/1"
CONTENT_BYTES: Final = 16
_HEAD: Final = struct.Struct(f"<{NAMESPACE_BYTES}s{CONTENT_BYTES}sII")
_LABEL_IN_KEY: Final = KEY_BYTES_MAX - _HEAD.size
LABEL_BYTES_MAX: Final = _LABEL_IN_KEY + KEY_BYTES_MAX
SLABS_MAX: Final = (
    1 << 15
)  # of one model: each is a mapping of its own in a client, of which a process may have 65,530

assert len(MODELS) == NAMESPACE_BYTES


@dataclass(slots=True, frozen=True)
class ModelSlab:
    """label: "name@revision", in ASCII. content: the first bytes of its digest. index: of count slabs."""

    label: str
    content: bytes
    index: int
    count: int

    def names(self) -> tuple[bytes, bytes]:
        """Key and parent of its row."""
        label = self.label.encode("ascii")
        assert 0 < len(label) <= LABEL_BYTES_MAX and len(self.content) == CONTENT_BYTES, f"model {label!r}"
        assert 0 <= self.index < self.count <= SLABS_MAX, f"slab {self.index} of {self.count}"
        head = _HEAD.pack(MODELS, self.content, self.index, self.count)
        return head + label[:_LABEL_IN_KEY], label[_LABEL_IN_KEY:]


def is_models(key: bytes) -> bool:
    """Whether a row with this key is that of a model's slab."""
    return key.startswith(MODELS)


def model_slab(record: Record) -> ModelSlab | None:
    """What a row says; None where it cannot be that of a model's slab."""
    if len(record.key) <= _HEAD.size or not is_models(record.key):
        return None
    _, content, index, count = _HEAD.unpack_from(record.key)
    try:
        label = (record.key[_HEAD.size :] + record.parent).decode("ascii")
    except UnicodeDecodeError:
        return None
    return ModelSlab(label, content, index, count) if index < count <= SLABS_MAX else None
