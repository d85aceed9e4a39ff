"""Rows in memory: what a process that is killed leaves behind is what was written."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

import pytest

from replication.catalogue.rows import PREFIX_BYTES, Rows


class MemoryRows(Rows):
    """`content` outlives the catalogue that uses it, as a directory does."""

    def __init__(self, content: dict[bytes, bytes] | None = None) -> None:
        self.content = {} if content is None else content
        self._order = sorted(self.content)

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return list(map(self.content.get, keys))

    def with_prefix(self, prefix: bytes) -> list[bytes]:
        assert len(prefix) == PREFIX_BYTES
        at = bisect_left(self._order, prefix)
        found = []
        while at < len(self._order) and self._order[at].startswith(prefix):
            found.append(self._order[at])
            at += 1
        return found

    def keys(self, start: bytes, end: bytes, limit: int) -> list[bytes]:
        low = bisect_left(self._order, start)
        return self._order[low : min(bisect_left(self._order, end), low + limit)]

    def scan(self, start: bytes, end: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        return [(key, self.content[key]) for key in self.keys(start, end, limit)]

    def last(self, start: bytes, end: bytes) -> bytes | None:
        at = bisect_left(self._order, end)
        return self._order[at - 1] if at and self._order[at - 1] >= start else None

    def write(self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = ()) -> None:
        for key, value in puts:
            if key not in self.content:
                insort(self._order, key)
            self.content[key] = value
        for key in deletes:
            if self.content.pop(key, None) is not None:
                del self._order[bisect_left(self._order, key)]

    def renew(self) -> None:
        self.content.clear()
        self._order.clear()

    def reopen(self) -> None:
        pass

    def close(self) -> None:
        pass


def small_catalogues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters of 256 partitions: one of 65,536 takes longer to make than some worlds live."""
    for module in ("filter", "catalogue"):
        monkeypatch.setattr(f"replication.catalogue.{module}.PARTITIONS", 256)
        monkeypatch.setattr(f"replication.catalogue.{module}.PARTITION_BYTES", 1)
        monkeypatch.setattr(f"replication.catalogue.{module}.KEPT_BYTES", 5)
    monkeypatch.setattr("replication.catalogue.filter._PARTITION_SHIFT", 56)
    monkeypatch.setattr("replication.catalogue.filter._UNUSED_BITS", 24)
