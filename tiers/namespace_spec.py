"""What is said of a namespace: whose bytes can be reused for whom, and how large they are."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

FIELDS_MAX = 64


class NamespaceSpec(msgspec.Struct, frozen=True):
    """What a client says of a namespace. digest: 16 bytes; fields: readable identity; columns: of its records, as
    tiers/checksum.py describes them."""

    digest: bytes
    record_bytes: int
    hash_bytes: int
    block_tokens: int = 0
    fields: Annotated[dict[str, str], Meta(max_length=FIELDS_MAX)] = {}
    columns: bytes = b""
