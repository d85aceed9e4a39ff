"""What is said of a namespace: whose bytes can be reused for whom, and how large they are."""

from __future__ import annotations

import msgspec


class NamespaceSpec(msgspec.Struct, frozen=True):
    """What a client says of a namespace. digest: 16 bytes; fields: readable identity; columns: of its records, as
    tiers/checksum.py describes them."""

    digest: bytes
    record_bytes: int
    hash_bytes: int
    block_tokens: int = 0
    fields: dict[str, str] = {}
    columns: bytes = b""
