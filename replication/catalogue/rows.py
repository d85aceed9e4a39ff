"""Rows: the sorted table of bytes under a catalogue, in RocksDB.

    Catalogue ─▶ Rows (get, keys with a prefix, scan, one atomic write) ─▶ a directory
                   tests/replication/memory_rows.py: the same in memory

A copy of what the region says, so nothing is synced: `kill -9` loses nothing that was written, a power cut some of the
end, in order. A table that cannot be opened or read, or belongs to another region, is moved aside and made anew; one whose disk is
full, or whose files are not for this process, is not: making it anew there helps nobody.

RocksDB through rocksdict: `close` lets go of its lock only when no iterator is alive, so none leaves this module; any
failure is a bare Exception, and an iterator that meets one ends silently unless it is asked for its status. Indexes and bloom filters are cut into pieces that fit a shard of the block cache: whole
ones (a megabyte each) did not, and every read took 150 µs instead of 3.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice, takewhile
from pathlib import Path
from typing import Final, cast

from rocksdict import (
    BlockBasedIndexType,
    BlockBasedOptions,
    Cache,
    DBCompressionType,
    Options,
    Rdict,
    ReadOptions,
    SliceTransform,
    WriteBatch,
)

from replication.constants import KIB, MIB
from replication.errors import CatalogueBusy, CatalogueDamaged, CatalogueUnwritable

# Memory at 100 M blocks, in MiB: the filter 551 (as measured: arrays of 32 bits a block, 1,500 in each of
# 65,536, and what the allocator loses); RocksDB's block cache 96, its indexes and bloom filters included,
# write buffers 4 × 8, the tops of indexes and filters 20: about 700 together.
BLOCK_CACHE_BYTES: Final = 96 * MIB
WRITE_BUFFER_BYTES: Final = 8 * MIB  # larger ones are slower: they do not fit the processor's cache
WRITE_BUFFERS_MAX: Final = 4
BLOOM_BITS: Final = 10  # of a key: one in a hundred is looked for in vain
OPEN_FILES_MAX: Final = 512
LOG_FILES_MAX: Final = 2
LOG_BYTES_MAX: Final = 1 * MIB
BACKGROUND_JOBS_MAX: Final = 2

log = logging.getLogger("replication.rows")

PREFIX_BYTES = 9  # of keys that are looked for by prefix
_IDENTITY = b"!identity"
_ASIDE = ".damaged"
_PROBE, _PROBE_BYTES = "probe", 64 * KIB  # whether a file can be written there
# What is wrong with the disk or this process, not with the catalogue: RocksDB says it in these words.
_UNWRITABLE = tuple(
    os.strerror(code)
    for code in (
        errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE,
        errno.ENOMEM,
    )
)  # fmt: skip
_INDEX_PIECE_BYTES = 16 * KIB
_BLOCK_BYTES = 4 * KIB


class Rows:
    """A directory of RocksDB. identity: of the region whose copy it is. Every method may block for milliseconds and raises CatalogueDamaged.
    One thread at a time."""

    def __init__(self, path: Path, identity: str) -> None:
        """Raises CatalogueBusy, CatalogueUnwritable, and CatalogueDamaged where not even an empty one can be made."""
        self._path = path
        self._identity = identity.encode()
        self._unopened = ""  # why it could not be opened again
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = self._open()
        except OSError as error:
            raise CatalogueUnwritable(f"{path}: {error}") from error
        except CatalogueUnwritable:
            raise
        except CatalogueDamaged as error:
            self._move_aside(str(error))
            self._db = self._open()

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Their values, None where there is none."""
        with _understood(self._path, self._unopened):
            return list(self._db.get(list(keys)) or ()) if keys else []

    def with_prefix(self, prefix: bytes) -> list[bytes]:
        """The keys that begin with these PREFIX_BYTES, ascending."""
        assert len(prefix) == PREFIX_BYTES
        with _understood(self._path, self._unopened):
            return list(takewhile(lambda key: key.startswith(prefix), self._walk(prefix, _same_prefix())))

    def keys(self, start: bytes, end: bytes, limit: int) -> list[bytes]:
        """The first keys from `start` on, up to and without `end`, ascending."""
        with _understood(self._path, self._unopened):
            return list(islice(self._walk(start, _up_to(end)), limit))

    def scan(self, start: bytes, end: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """The same with their values."""
        with _understood(self._path, self._unopened):
            rows = self._db.iter(_up_to(end))
            rows.seek(start)
            found: list[tuple[bytes, bytes]] = []
            while len(found) < limit and rows.valid():
                found.append((cast("bytes", rows.key()), cast("bytes", rows.value())))
                rows.next()
            rows.status()
            return found

    def last(self, start: bytes, end: bytes) -> bytes | None:
        """The last key from `start` on, up to and without `end`."""
        with _understood(self._path, self._unopened):
            rows = self._db.iter(_total_order())
            rows.seek_for_prev(end)
            while rows.valid() and cast("bytes", rows.key()) >= end:
                rows.prev()
            rows.status()
            found = cast("bytes", rows.key()) if rows.valid() else None
        return found if found is not None and found >= start else None

    def _walk(self, start: bytes, options: ReadOptions) -> Iterator[bytes]:
        """Keys from there on. An iterator ends at a row that cannot be read as if there were no more: its status tells."""
        rows = self._db.iter(options)
        rows.seek(start)
        while rows.valid():
            yield cast("bytes", rows.key())
            rows.next()
        rows.status()

    def write(self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = ()) -> None:
        """All of it or nothing, whatever happens."""
        batch = WriteBatch(raw_mode=True)
        for key, value in puts:
            batch.put(key, value)
        for key in deletes:
            batch.delete(key)
        with _understood(self._path, self._unopened):
            self._db.write(batch)

    def renew(self) -> None:
        """Begin again, without a row."""
        self.close()
        self._unopened = ""
        self._move_aside("it was found to be damaged")
        self._db = self._open()

    def reopen(self) -> None:
        """Go on with what was written, behind a CatalogueUnwritable; raises it where that is so still. RocksDB writes nothing behind a
        write that failed until it is opened again. As long as nothing can be written, it stays open: it can be read."""
        probe = self._path / _PROBE
        try:
            probe.write_bytes(bytes(_PROBE_BYTES))
            probe.unlink()
        except OSError as error:
            with suppress(OSError):
                probe.unlink()
            raise CatalogueUnwritable(f"{self._path}: {error}") from error
        self.close()
        try:
            self._db = self._open()
            self._unopened = ""
        except CatalogueUnwritable as error:
            self._unopened = str(error)
            raise

    def close(self) -> None:
        """Nothing else may be called afterwards."""
        with suppress(CatalogueDamaged), _understood(self._path, self._unopened):
            self._db.close()  # what cannot be closed, behind a write that failed, is closed

    def _open(self) -> Rdict:
        with _understood(self._path):
            db = Rdict(str(self._path), _options())
            found = db.get(_IDENTITY)
            if found is None and next(iter(db.keys()), None) is None:
                db.put(_IDENTITY, self._identity)
            elif found != self._identity:
                db.close()
                raise CatalogueDamaged(f"{self._path}: the catalogue of another region ({found!r})")
        return db

    def _move_aside(self, reason: str) -> None:
        """One is kept, for whoever wants to know what happened."""
        aside = self._path.with_name(self._path.name + _ASIDE)
        log.warning(
            "%s: made anew from the region, because %s; the old one is %s", self._path, reason, aside.name
        )
        try:
            shutil.rmtree(aside, ignore_errors=True)
            if self._path.exists():
                self._path.rename(aside)
        except OSError as error:
            raise CatalogueDamaged(f"{self._path}: cannot be moved aside: {error}") from error


@contextmanager
def _understood(path: Path, unopened: str = "") -> Iterator[None]:
    """What RocksDB raises, as what it means. unopened: why it is not open."""
    if unopened:
        raise CatalogueUnwritable(unopened)
    try:
        yield
    except (CatalogueBusy, CatalogueDamaged):
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        if any(words in text for words in _UNWRITABLE):
            raise CatalogueUnwritable(f"{path}: {text}") from error
        if "lock" in text.lower() and "LOCK" in text:
            raise CatalogueBusy(f"{path}: another process has it open: {text}") from error
        raise CatalogueDamaged(f"{path}: {text}") from error


def _options() -> Options:
    """Memory is bounded; see the sum above BLOCK_CACHE_BYTES."""
    table = BlockBasedOptions()
    table.set_block_cache(Cache(BLOCK_CACHE_BYTES))
    table.set_block_size(_BLOCK_BYTES)
    table.set_cache_index_and_filter_blocks(True)
    table.set_bloom_filter(BLOOM_BITS, False)
    table.set_index_type(BlockBasedIndexType.two_level_index_search())
    table.set_partition_filters(True)
    table.set_metadata_block_size(_INDEX_PIECE_BYTES)
    table.set_pin_top_level_index_and_filter(True)
    table.set_format_version(5)
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(table)
    options.set_prefix_extractor(SliceTransform.create_fixed_prefix(PREFIX_BYTES))
    options.set_allow_concurrent_memtable_write(False)
    options.set_write_buffer_size(WRITE_BUFFER_BYTES)
    options.set_max_write_buffer_number(WRITE_BUFFERS_MAX)
    options.set_max_open_files(OPEN_FILES_MAX)
    options.set_max_background_jobs(BACKGROUND_JOBS_MAX)
    options.set_compression_type(DBCompressionType.none())  # hashes and checksums
    options.set_keep_log_file_num(LOG_FILES_MAX)
    options.set_max_log_file_size(LOG_BYTES_MAX)
    return options


def _up_to(end: bytes) -> ReadOptions:
    options = _total_order()
    options.set_iterate_upper_bound(end)
    return options


def _total_order() -> ReadOptions:
    options = ReadOptions()
    options.set_total_order_seek(True)
    return options


def _same_prefix() -> ReadOptions:
    options = ReadOptions()
    options.set_prefix_same_as_start(True)
    return options
