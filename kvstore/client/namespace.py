"""A namespace as a client names it: whose blocks, and how large they are."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.client.refusing import refused, refusing, wrong
from tiers.checksum import column_sizes, pack_columns

TYPE_CHECKING = False  # not from typing: importing that costs more than all of this
if TYPE_CHECKING:
    from typing import Any

    from kvstore.protocol import frames


@refusing
class Namespace:
    """A handle: whose blocks. Sizes in bytes; made by `Client.namespace`."""

    __slots__ = ("__weakref__", "block_tokens", "columns", "digest", "fields", "hash_bytes", "record_bytes")

    @refused
    def __init__(
        self,
        digest: bytes,
        record_bytes: int,
        hash_bytes: int,
        block_tokens: int,
        fields: dict[str, str],
        columns: Sequence[int] = (),
    ) -> None:
        """digest: 16 bytes over everything that must be equal for bytes to be reusable. record_bytes: size of every
        block's KV. hash_bytes: length of a block hash, 8 to 64. fields: the identity in words (at most 64, of at
        most 1024 characters each and 16 KiB together). columns: bytes of each column of a record, in order; see tiers/checksum.py for what
        is allowed, how they are kept, and for the checksum of such a record. Raises Refused.
        """
        from kvstore.client.sendable import require_sendable
        from kvstore.protocol import frames

        self.columns = pack_columns(columns, record_bytes)
        self.digest = digest
        self.record_bytes = record_bytes
        self.hash_bytes = hash_bytes
        self.block_tokens = block_tokens
        self.fields = dict(fields)
        require_sendable(self.register(frames))
        if (size := frames.fields_bytes(self.fields)) > frames.FIELDS_BYTES_MAX:
            raise wrong(f"fields of {size} bytes: at most {frames.FIELDS_BYTES_MAX} are allowed")

    def joined(self, hashes: Sequence[bytes]) -> bytes:
        """One behind the other, as they travel. Raises Refused for a hash of another length."""
        import msgspec

        joined, size, count = b"".join(hashes), self.hash_bytes, len(hashes)
        # Each has its length before it here: looking at these takes a third of the time of asking each for it.
        encoded = bytearray(5 + count * (size + 2))
        msgspec.msgpack.Encoder().encode_into(hashes if type(hashes) is list else [*hashes], encoded)
        lengths = encoded[1 - count * (size + 2) :: size + 2]
        if len(joined) != count * size or lengths != bytes([size]) * count:
            raise wrong(f"every hash must have {size} bytes")
        return joined

    def register(self, w: Any) -> frames.Request:
        """What registers it; w: the module of frames."""
        columns = column_sizes(self.columns, self.record_bytes)
        return w.Register(  # type: ignore[no-any-return]
            self.digest, self.record_bytes, self.hash_bytes, self.block_tokens, self.fields, columns
        )
