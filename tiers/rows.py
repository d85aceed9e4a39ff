"""Rows: which key lies in which slot, in RocksDB beside the slabs.

    default    key  ──▶ slot u64 · size u32 · checksum 16 · parent (the rest)
    "slots"    slot ──▶ key      a hint: it may be stale, the row of the key decides

Every change is one batch in the write-ahead log before the call returns. Nothing is
synced: the log survives kill -9, and after a power cut a row that lies is caught by the
checksum of the record it points to.

The hints exist so that a slab can be emptied without reading every row. They are written
in the batch of their row and never deleted, so there is at most one per slot.

RocksDB through rocksdict has four habits that are hidden here: every failure is a bare
`Exception`; iteration stops silently at a damaged block, so the end of a scan is checked, and an open
iterator keeps the database locked, so none outlives a call;
and after one failed append to its log a database never writes again until it is reopened.

Not thread-safe: the directory locks.
"""

from __future__ import annotations

import logging
import shutil
import struct
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from rocksdict import BlockBasedOptions, Cache, ColumnFamily, DBCompressionType, Options, Rdict, WriteBatch

from tiers.base import CHECKSUM_BYTES, KEY_BYTES_MAX
from tiers.constants import KIB, MIB
from tiers.errors import OpenError, TierError

_log = logging.getLogger(__name__)

HEAD = struct.Struct("<QI")  # slot, size_bytes
PARENT_AT = HEAD.size + CHECKSUM_BYTES
ROW_BYTES_MAX = PARENT_AT + KEY_BYTES_MAX
_HINT = struct.Struct(">Q")
_HINTS = "slots"
_ROWS = "default"


class RowsError(TierError):
    """A row could not be read or written: RocksDB failed."""


class Row(NamedTuple):
    """Where a record lies, and what it must hash to."""

    slot: int
    size_bytes: int
    checksum: bytes
    parent: bytes

    def pack(self) -> bytes:
        return HEAD.pack(self.slot, self.size_bytes) + self.checksum + self.parent


def unpack(raw: bytes) -> Row | None:
    """The row, or None for bytes that are no row."""
    if not PARENT_AT <= len(raw) <= ROW_BYTES_MAX:
        return None
    slot, size_bytes = HEAD.unpack_from(raw)
    return Row(slot, size_bytes, raw[HEAD.size : PARENT_AT], raw[PARENT_AT:])


def is_sound(key: bytes, raw: bytes) -> bool:
    """Whether key and row have lengths that a row of ours can have."""
    return PARENT_AT <= len(raw) <= ROW_BYTES_MAX and 0 < len(key) <= KEY_BYTES_MAX


class Rows:
    """The open database. Raises OpenError when it cannot be opened, RowsError afterwards."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._db = Rdict(str(path), options=_options(), column_families={_HINTS: _options()})
            self._hints: ColumnFamily | None = self._db.get_column_family_handle(_HINTS)
        except Exception as error:  # rocksdict raises nothing narrower
            raise OpenError(
                f"rows {path}: {_one_line(error)}; `kvstore fsck --repair` can salvage them"
            ) from error

    def get(self, key: bytes) -> bytes | None:
        """The packed row of a key. 2 to 8 µs, holds the GIL."""
        try:
            raw: bytes | None = self._db.get(key)
        except Exception as error:
            raise RowsError(f"rows {self.path}: {_one_line(error)}") from error
        return raw

    def key_in(self, slot: int) -> bytes | None:
        """The key that lay in a slot last. Compare its row before believing."""
        try:
            key: bytes | None = self._db.get_column_family(_HINTS).get(_HINT.pack(slot))
        except Exception as error:
            raise RowsError(f"rows {self.path}: {_one_line(error)}") from error
        return key

    def apply(self, puts: Iterable[tuple[bytes, Row]] = (), deletes: Iterable[bytes] = ()) -> None:
        """Deletes, then puts, all or nothing; in the log when this returns. Not synced."""
        batch = WriteBatch(raw_mode=True)
        for key in deletes:
            batch.delete(key)
        for key, row in puts:
            batch.put(key, row.pack())
            batch.put(_HINT.pack(row.slot), key, self._hints)
        try:
            self._db.write(batch)
        except Exception as error:
            raise RowsError(f"rows {self.path}: {_one_line(error)}") from error

    def chunk(self, after: bytes | None, count: int) -> list[tuple[bytes, bytes]]:
        """The next `count` keys with their packed rows, in key order; fewer only at the end.

        Raises OpenError at a damaged block. 0.3 to 0.9 µs a row, holds the GIL.
        """
        start = None if after is None else after + b"\0"
        try:
            found: list[tuple[bytes, bytes]] = list(islice(self._db.items(from_key=start), count))
        except Exception as error:
            raise self._damaged(error) from error
        if len(found) < count:
            self._check_end(found[-1][0] if found else start)
        return found

    def estimate(self) -> int:
        """About how many rows there are; costs nothing."""
        return int(self._db.property_int_value("rocksdb.estimate-num-keys") or 0)

    def salvage(self) -> Iterator[tuple[bytes, bytes]]:
        """What can be read from both ends of a damaged database; the middle is lost."""
        last = b""
        for key, raw in self._db.items():
            last = key
            yield key, raw
        for key, raw in self._db.items(backwards=True):
            if key <= last:
                return
            yield key, raw

    def close(self) -> None:
        """Flush and let go of the lock. Never raises: what matters is in the log already."""
        self._hints = None
        for step in (self._db.flush, self._db.close):
            try:
                step()
            except Exception as error:  # noqa: BLE001 - rocksdict raises nothing narrower
                # A full disk, or "Writer has previous error": the lock is let go all the same.
                _log.warning("rows %s: closing: %s", self.path, _one_line(error))

    def _check_end(self, last: bytes | None) -> None:
        """Prove that a scan which ended at `last` ended because there is no more."""
        cursor = self._db.iter()
        try:
            if last is None:
                cursor.seek_to_first()
            else:
                cursor.seek(last)
                if cursor.valid() and cursor.key() == last:
                    cursor.next()
            ended_early = cursor.valid()
            cursor.status()
        except Exception as error:
            raise self._damaged(error) from error
        finally:
            del cursor  # a traceback would keep it, and with it the lock of the database
        if ended_early:
            raise self._damaged("the scan ended early")

    def _damaged(self, why: object) -> OpenError:
        return OpenError(f"rows {self.path}: {_one_line(why)}; `kvstore fsck --repair` can salvage them")


def rebuild(path: Path, aside: Path) -> int:
    """Make damaged rows readable again; answers how many rows were salvaged.

    The old database is kept at `aside`, so nothing is lost; `path` then holds a sound one,
    empty where nothing could be read. Rows that are stale point to bytes whose checksum
    differs, or to a slot that another row claims: the tier drops both. Raises OSError.
    """
    work = path.with_name(path.name + ".work")
    fresh = path.with_name(path.name + ".new")
    for leftover in (work, fresh):
        shutil.rmtree(leftover, ignore_errors=True)
    shutil.copytree(path, work)
    fresh.mkdir(mode=0o700)
    count = 0
    target = Rows(fresh)
    try:
        _rocksdb_repair(work)
        source = Rows(work)
        try:
            for key, raw in source.salvage():
                row = unpack(raw)
                if row is not None and is_sound(key, raw):
                    target.apply(puts=[(key, row)])
                    count += 1
        finally:
            source.close()
    except (OpenError, RowsError):
        pass  # keep what was read until here; the rest is in `aside`
    finally:
        target.close()
    path.rename(aside)
    fresh.rename(path)
    shutil.rmtree(work)
    return count


def _rocksdb_repair(path: Path) -> None:
    try:
        Rdict.repair(str(path), _options())
    except Exception as error:
        raise RowsError(f"rows {path}: {_one_line(error)}") from error


def _options() -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_compression_type(DBCompressionType.none())  # hashes do not compress
    options.set_write_buffer_size(16 * MIB)
    options.set_max_total_wal_size(32 * MIB)
    options.set_max_open_files(256)
    options.set_keep_log_file_num(2)
    options.set_max_log_file_size(1 * MIB)
    table = BlockBasedOptions()
    table.set_block_size(16 * KIB)
    table.set_bloom_filter(10, False)
    table.set_block_cache(Cache(32 * MIB))
    options.set_block_based_table_factory(table)
    return options


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
