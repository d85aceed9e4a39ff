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

# The arena file: header, slot table, slabs.
ARENA_MAGIC: Final = b"KVSARENA"
ARENA_VERSION: Final = 1
ARENA_HEADER_BYTES: Final = 4096
ROW_BYTES: Final = 256  # one row per slot number in the slot table

# Owners are the processes that may write into the arena. Number 0 is the daemon itself.
# Each locks one byte (OFD lock) at LOCK_BASE + owner, far beyond any file's end.
OWNER_DAEMON: Final = 0
OWNER_MAX: Final = 1023
LOCK_BASE: Final = 1 << 62

PREFAULT_PIECE_BYTES: Final = 64 * MIB  # populated per system call, so that a stop is noticed soon
OPEN_ATTEMPTS_MAX: Final = 5  # the arena's file was replaced while we opened it; look again

# An NVMe directory: kvstore.json, lock, rows/, slab-000000.kvs …
NVME_MAGIC: Final = "kvstore nvme directory"
NVME_VERSION: Final = 1
NVME_ROW_BYTES_EST: Final = 256  # disk space set aside per smallest slot for its row
NVME_HEADROOM_BYTES: Final = 64 * MIB  # left free on the file system for rows; no slab takes it
NVME_REOPEN_BYTES: Final = 4 * MIB  # free space without which failed rows are not reopened
NVME_SCAN_ROWS: Final = 4096  # rows read at a time: a few milliseconds
NVME_SLAB_FDS_MAX: Final = 64  # slab files kept open per directory
NVME_RETRY_S: Final = 10.0  # pause before asking a full or failing medium again
NVME_SIDELINED_MAX: Final = 256  # slots set aside for NVME_RETRY_S after a failed write

assert SLAB_BYTES % SLAB_ALIGN_BYTES == 0
assert SLAB_BYTES_MAX < 1 << 32
assert SLAB_ALIGN_BYTES % SLOT_ALIGN_BYTES == 0
assert SLOT_BYTES_MIN % SLOT_ALIGN_BYTES == 0
assert SLAB_BYTES // SLOT_BYTES_MIN <= SLAB_SLOTS_MAX
assert ARENA_HEADER_BYTES % ROW_BYTES == 0
assert 48 + 2 * KEY_BYTES_MAX <= ROW_BYTES and CHECKSUM_BYTES == 16
assert OWNER_MAX < 1 << 16
assert LOCK_BASE + OWNER_MAX < (1 << 63) - 1
assert NVME_SLAB_FDS_MAX > 0 and NVME_SIDELINED_MAX > 0
