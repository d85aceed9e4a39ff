"""Limits and layout numbers that several modules of the tiers share; those of one module stand in it.

Relations between them are checked at import: a wrong edit stops the program at once instead of
corrupting a file later.
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
SLOT_BYTES_MIN: Final = 16 * KIB  # smaller records use a slot of this size; bounds the slot table
ARENA_HEADER_BYTES: Final = 4096
ROW_BYTES: Final = 256  # of one slot, in the slot tables of the arena and of NVMe

# Owners are the clients that may write into the arena.
OWNER_DAEMON: Final = 0  # the daemon itself
OWNER_ANY: Final = -1  # slots that any client may write into: their lease names no one

MEMORY_HEADROOM_BYTES: Final = 128 * MIB  # left free on the machine; no slab takes it
NVME_HEADROOM_BYTES: Final = 64 * MIB  # left free on the file system; no slab takes it

OBJECT_REQUESTS_MAX: Final = 64  # under way at once, of one store; more wait within their deadline
OBJECT_TIMEOUT_S: Final = 20.0  # for one attempt, besides the time for its bytes

# Of what is sealed with a key of the deployment.
KEY_ID_BYTES: Final = 4
TAG_BYTES: Final = 16

assert SLAB_BYTES % SLAB_ALIGN_BYTES == 0
assert SLAB_ALIGN_BYTES % SLOT_ALIGN_BYTES == 0
assert SLOT_BYTES_MIN % SLOT_ALIGN_BYTES == 0
assert SLAB_BYTES // SLOT_BYTES_MIN <= SLAB_SLOTS_MAX
assert ARENA_HEADER_BYTES % ROW_BYTES == 0
assert CHECKSUM_BYTES == 16 and KEY_BYTES_MAX < 256
