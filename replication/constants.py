"""Limits of regions that several modules share; those of one module stand in it."""

from __future__ import annotations

from typing import Final

from tiers.packs.packs import PACK_RECORDS_MAX

MARKER_NAME: Final = "region.json"  # of the object that makes a place a region

KIB: Final = 1 << 10
MIB: Final = 1 << 20
MARKER_BYTES_MAX: Final = 64 * KIB

# A segment is applied to a catalogue in one batch, which holds the interpreter for 1 to 2 µs a block.
SEGMENT_ENTRIES_MAX: Final = 1024
SEGMENT_BLOCKS_MAX: Final = 1024  # a pack that has more has a segment of its own
SEGMENT_MODELS_MAX: Final = 256  # each has less than a kilobyte
SEGMENT_REMOVED_MAX: Final = 1024
SEGMENT_BYTES_MAX: Final = 4 * MIB  # of a segment; what is larger is not read

# Segments of a writer, and snapshots: whoever puts a number that is higher is none of us.
NUMBERS_MAX: Final = 1 << 62
# A head is HEAD_BYTES_MIN long and its number modulo this: a list of heads says how much is new.
HEAD_NUMBERS: Final = 4096

RETENTION_S: Final = (
    24 * 3600.0
)  # of segments that snapshots cover, and of silent writers, by the clock of the store
CLOCK_SKEW_S: Final = 300.0  # by which the clocks of a deployment differ at most, if nothing else is said
UPKEEP_INTERVAL_S: Final = 60.0  # between two looks for packs whose life is over

# Between two looks for tombstones of another region, which is copied or read from.
SOURCE_TOMBSTONES_S: Final = 60.0
TOMBSTONES_INTERVAL_S: Final = 15.0  # between two looks for new ones

PROBLEMS_TOLD: Final = 8  # in a place's status
PROBLEM_LASTS_S: Final = (
    300.0  # of one that nobody can see to end: over when it was not met again for so long
)

ORDERS_MAX: Final = 64  # in force at a time; of more, the latest
NODE_INTERVAL_S: Final = 600.0  # between two reports of one daemon …
NODE_LOOK_S: Final = 60.0  # … or so soon where it has other problems than it told
NODE_SILENT_S: Final = (
    2.5 * NODE_INTERVAL_S
)  # of which nothing is heard for so long has stopped, or cannot write
NODE_FORGOTTEN_S: Final = (
    7 * 24 * 3600.0
)  # … and for so long is not shown any more, and what it said last is deleted
NODE_PROBLEMS_MAX: Final = 16  # told of one daemon
NODE_ROWS_MAX: Final = 256  # models and tenants reported, those most asked for

AUDIT_REQUESTS_MAX: Final = 16  # under way at a time
ORPHAN_GRACE_S: Final = 3600.0  # a pack that was put so long ago should have been announced
ROTTEN_LOOKS: Final = 8  # in a row that find a segment damaged, until it counts as gone

SPECS_CHOSEN_MAX: Final = 4096  # whose rule is remembered
HEARTBEAT_LATE_S: Final = 180.0  # then a mirror is taken for stopped
FAILURES_TOLD: Final = 8  # in the state of a mirror, and lost packs

CATALOGUE_CHUNK_PACKS: Final = 256  # read at a time where all are walked through

assert PACK_RECORDS_MAX <= 1 << 16
