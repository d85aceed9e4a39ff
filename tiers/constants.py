"""Every named limit and layout number that the tiers share.

Relations between them are checked at import: a wrong edit here stops the program at once
instead of corrupting a file later.
"""

from __future__ import annotations

from typing import Final

from tiers.base import CHECKSUM_BYTES, KEY_BYTES_MAX
from tiers.slots import SLAB_SLOTS_MAX, SLOT_ALIGN_BYTES

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

# Space is handed out in slabs; a slab is cut into equal slots.
SLAB_BYTES: Final = 64 * MIB  # default; raise it only for records larger than this
SLAB_ALIGN_BYTES: Final = 2 * MIB  # one huge page: slabs of the arena begin and end on one
SLAB_BYTES_MAX: Final = 4 * GIB - SLAB_ALIGN_BYTES  # a record's size is stored in 32 bits
SLOT_BYTES_MIN: Final = 16 * KIB  # smaller records use a slot of this size; bounds the slot table

# The arena: a file of slabs, and a table file with header, generations and one row per slot.
ARENA_MAGIC: Final = b"KVSARENA"
ARENA_VERSION: Final = 4  # 3 had no columns in its rows
ARENA_HEADER_BYTES: Final = 4096
ROW_BYTES: Final = 256  # one row per slot number in the slot table
ARENA_OPEN_BYTES: Final = 256 * MIB  # has its memory when an open returns; 30 to 50 ms
ARENA_ROWS_AHEAD: Final = 256  # rows of a slab that get their memory with the one that is used
ARENA_RETRY_S: Final = 10.0  # pause before asking for memory again that was not there

# Owners are the clients that may write into the arena. Number 0 is the daemon itself.
# While it writes, each locks one byte (OFD lock) at LOCK_BASE + owner, far beyond any file's end.
OWNER_DAEMON: Final = 0
OWNER_ANY: Final = -1  # slots that any client may write into: their lease names no one
OWNER_MAX: Final = 1023
LIVES_MAX: Final = 64  # bytes behind those: writers share one, and each life of a daemon has another
SWEEP_SLOTS: Final = 1000  # taken out of quarantine at once, about a millisecond
LOCK_BASE: Final = 1 << 62

VERIFY_PIECE_BYTES: Final = 1 * MIB  # read at a time to compare a checksum
MEMORY_HEADROOM_BYTES: Final = 128 * MIB  # left to everybody else; no slab takes it
OPEN_ATTEMPTS_MAX: Final = 5  # the arena's file was replaced while we opened it; look again

# An NVMe device: kvstore.json, lock, slots.table, slab-000000.kvs …
NVME_MAGIC: Final = "kvstore nvme directory"
NVME_HEADROOM_BYTES: Final = 64 * MIB  # left free on the file system for everybody else; no slab takes it
NVME_SLAB_FDS_MAX: Final = 64  # slab files kept open per directory
NVME_RETRY_S: Final = 10.0  # pause before asking a full or failing medium again
DEVICE_VERSION: Final = 3  # 2 had no columns in its rows, 1 had them in RocksDB
DEVICE_PIECE_ROWS: Final = 512  # rows read and checked at a time: what stays in the processor's cache
DEVICE_SPARE_SLABS: Final = 32  # backed ahead of need: more than all writes under way can use up
DEVICE_ASIDE_MAX: Final = 64  # slots left alone because a write failed; then the oldest is tried again

# Stores of objects.
OBJECT_REQUESTS_MAX: Final = 64  # under way at once, of one store; more wait within their deadline
OBJECT_TIMEOUT_S: Final = 20.0  # for one attempt, besides its bytes …
OBJECT_LEAST_BYTES_PER_S: Final = 4e6  # … at this speed, with all that is under way
OBJECT_CLIENT_TIMEOUT_S: Final = (
    24 * 3600
)  # of obstore's own client: ours, which knows of bytes, is over before
OBJECT_DEADLINE_S: Final = 60.0  # for one call, all attempts and pauses included
OBJECT_RETRIES_MAX: Final = 4
OBJECT_BACKOFF_S_MIN: Final = 0.1  # the longest first pause; doubles from one to the next
OBJECT_BACKOFF_S_MAX: Final = 5.0
OBJECT_GAP_BYTES: Final = 64 * KIB  # between two ranges that are read with one request all the same
OBJECT_LIST_NAMES: Final = 1000  # in a page of a list: what S3 answers at a time
OBJECT_DELETE_NAMES: Final = 1000  # in one request: the most that S3 takes
OBJECT_NAME_BYTES_MAX: Final = 1024  # of a name and its prefix: S3's limit
DIRECT_READ_BYTES_MIN: Final = 1 * MIB  # less is not worth a thread
DIRECT_RECORD_BYTES_MIN: Final = 64 * KIB  # shorter ones are copied as fast as they are received one by one
DIRECT_URL_S: Final = 900  # an address is good for
DIRECT_IDLE_S: Final = 4.0  # a connection is kept: servers close theirs after 5 s and more
DIRECT_FAILURES_MAX: Final = 3  # in a row
DIRECT_PAUSE_S: Final = 60.0  # then others read
STAGED_S_MAX: Final = 3600.0  # what a directory has half written for so long is nobody's any more
OBJECT_EXIT_S: Final = 0.1  # the end of the process waits so long for obstore's threads

# Packs.
PACK_FIRST_BYTES: Final = 64 * KIB  # read at first: the headers of about 1,000 records
PACK_INLINE_BYTES_MAX: Final = 256 * KIB  # copied and hashed by the event loop itself, in 30 µs
PACK_PIECE_BYTES: Final = 32 * MIB  # of a pack that is copied, with one request
PACK_TURN_BYTES: Final = 2 * MIB  # moved before other threads have a turn: 0.3 ms
PACK_ROOM_BYTES_MAX: Final = 128 * MIB  # kept to be filled again

assert SLAB_BYTES % SLAB_ALIGN_BYTES == 0
assert SLAB_BYTES_MAX < 1 << 32
assert SLAB_ALIGN_BYTES % SLOT_ALIGN_BYTES == 0
assert SLOT_BYTES_MIN % SLOT_ALIGN_BYTES == 0
assert SLAB_BYTES // SLOT_BYTES_MIN <= SLAB_SLOTS_MAX
assert ARENA_HEADER_BYTES % ROW_BYTES == 0
assert CHECKSUM_BYTES == 16 and KEY_BYTES_MAX < 256
assert OWNER_MAX < 1 << 16
assert LOCK_BASE + OWNER_MAX < (1 << 63) - 1
assert NVME_SLAB_FDS_MAX > 0
assert OBJECT_TIMEOUT_S <= OBJECT_DEADLINE_S and OBJECT_BACKOFF_S_MIN <= OBJECT_BACKOFF_S_MAX
