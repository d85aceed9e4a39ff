"""Limits of regions that several modules share; those of one module stand in it."""

from __future__ import annotations

from typing import Final

from tiers.packs import PACK_RECORDS_MAX

KIB: Final = 1 << 10
MIB: Final = 1 << 20

# A segment is applied to a catalogue in one batch, which holds the interpreter for 1 to 2 µs a block.
SEGMENT_ENTRIES_MAX: Final = 1024
SEGMENT_BLOCKS_MAX: Final = 1024  # a pack that has more has a segment of its own
SEGMENT_BYTES_MAX: Final = 4 * MIB  # of a segment; what is larger is not read

# A head is HEAD_BYTES_MIN long and its number modulo this: a list of heads says how much is new.
HEAD_NUMBERS: Final = 4096

CLOCK_SKEW_S: Final = 300.0  # by which the clocks of a deployment differ at most, if nothing else is said
UPKEEP_INTERVAL_S: Final = 60.0  # between two looks for packs whose life is over

# Between two looks for tombstones of another region, which is copied or read from.
SOURCE_TOMBSTONES_S: Final = 60.0
TOMBSTONES_INTERVAL_S: Final = 15.0  # between two looks for new ones

PROBLEMS_TOLD: Final = 8  # in a place's status

ORDERS_MAX: Final = 64  # in force at a time; of more, the latest
NODE_INTERVAL_S: Final = 600.0  # between two reports of one daemon
NODE_ROWS_MAX: Final = 256  # models and tenants reported, those most asked for

AUDIT_REQUESTS_MAX: Final = 16  # under way at a time
ORPHAN_GRACE_S: Final = 3600.0  # a pack that was put so long ago should have been announced
ROTTEN_LOOKS: Final = 8  # in a row that find a segment damaged, until it counts as gone

SPECS_CHOSEN_MAX: Final = 4096  # whose rule is remembered
# Copying in bulk, by juicefs.
BULK_PACKS_MIN: Final = 128  # waiting, before it is worth a process
BULK_PACKS_MAX: Final = 1024  # in one run; their names are one argument, of 128 KiB at most
BULK_BYTES_MAX: Final = 2048 * MIB  # in one run; twice that on disk
BULK_LOOK_S: Final = 1.0  # between two looks, where nobody wakes it
BULK_START_S_MAX: Final = 120.0  # of a run, besides the time for its bytes
BULK_BYTES_PER_S_MIN: Final = 4 * MIB  # of a run: one that is slower is ended, and what it brought is used
BULK_PAUSE_S: Final = 600.0  # after one that failed
BULK_DISK_FREE_BYTES_MIN: Final = 1024 * MIB  # left on the disk
BULK_SAID_BYTES_MAX: Final = 64 * KIB  # of its messages, kept
COMPLAINT_CHARS_MAX: Final = 300
JUICEFS_THREADS: Final = 32  # each has up to 10 MiB of memory
JUICEFS_ASK_S_MAX: Final = 20.0  # for its version
HEARTBEAT_LATE_S: Final = 180.0  # then a mirror is taken for stopped
FAILURES_TOLD: Final = 8  # in the state of a mirror, and lost packs

CATALOGUE_CHUNK_PACKS: Final = 256  # read at a time where all are walked through

assert PACK_RECORDS_MAX <= 1 << 16
assert BULK_PACKS_MIN <= BULK_PACKS_MAX < 3000  # of 41 bytes each
