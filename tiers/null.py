"""The tier that holds nothing: what the engine uses where a tier is switched off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tiers.base import Get, Put, Record, Tier, TierStats


class NullTier(Tier):
    """Capacity zero: every put finds no room, every get is a miss."""

    name = "null"

    def scan(self, keys: Sequence[bytes] | None = None) -> Iterator[Record]:
        return iter(())

    def put(self, items: Sequence[tuple[Record, memoryview]]) -> list[Put]:
        return [Put.NO_ROOM] * len(items)

    def get(self, items: Sequence[tuple[bytes, memoryview]]) -> list[tuple[Get, bytes]]:
        return [(Get.MISS, b"")] * len(items)

    def delete(self, keys: Sequence[bytes]) -> int:
        return 0

    def reclaim(self, size_bytes: int) -> list[bytes]:
        return []

    def stats(self) -> TierStats:
        return TierStats(self.name, 0, 0, 0)

    def check(self) -> list[str]:
        return []

    def close(self) -> None:
        """Nothing to let go of."""
