"""Every named limit of regions. Relations between them are checked at import."""

from __future__ import annotations

from typing import Final

from tiers.packs import PACK_HEADER_BYTES_MAX, PACK_RECORDS_MAX

KIB: Final = 1 << 10
MIB: Final = 1 << 20

REGION_FORMAT: Final = 1  # of everything below the root of a region

# A segment is applied to a catalogue in one batch, which holds the interpreter for 1 to 2 µs a block.
SEGMENT_ENTRIES_MAX: Final = 1024
SEGMENT_BLOCKS_MAX: Final = 1024  # a pack that has more has a segment of its own
SEGMENT_CUT_BYTES: Final = 1 * MIB  # a segment that has so much takes no further pack
SEGMENT_BYTES_MAX: Final = 4 * MIB  # more is no segment
SEGMENT_STORE_ATTEMPTS_MAX: Final = 4  # of one announcement: put, read back, repair what was stored damaged
WRITER_IDS_MAX: Final = 3  # tried in one announcement, if others write under the same id

# A head is as long as this and its number modulo HEAD_NUMBERS: whoever lists heads knows how much is new.
HEAD_BYTES_MIN: Final = 128
HEAD_NUMBERS: Final = 4096
HEAD_BYTES_MAX: Final = HEAD_BYTES_MIN + HEAD_NUMBERS
HEAD_TRUST_S: Final = 300.0  # since the last look; by then a writer may have gone round once

FEED_PAGE_SEGMENTS: Final = 64  # read ahead of the catalogue at most: of all writers together, and of one
FEED_REQUESTS_MAX: Final = 32  # under way at a time
FULL_LOOK_EVERY: Final = 64  # looks; heads alone are not trusted

ANNOUNCE_INTERVAL_S: Final = 1.0  # between two announcements of one writer, which everybody reads
ANNOUNCE_INTERVAL_PER_WRITER_S: Final = 0.1
ANNOUNCE_RETRY_S: Final = 5.0  # after one that failed

# How often a daemon looks: a region of many writers must not cost a fortune in requests.
POLL_INTERVAL_S: Final = 5.0
POLL_INTERVAL_PER_WRITER_S: Final = 0.1
POLL_JITTER: Final = 0.2  # share of the interval, up and down
UP_TO_DATE_PAUSE_S: Final = 0.5  # between two looks whether a pass that was asked for is over
BACKOFF_S_MIN: Final = 1.0  # after a failed pass; doubles
BACKOFF_S_MAX: Final = 300.0

# Snapshots: the whole catalogue in parts, and a manifest.
SNAPSHOT_PART_BYTES: Final = 1 * MIB  # a part that has so much takes no further pack; read in 2 ms
SNAPSHOT_PART_BYTES_MAX: Final = 4 * MIB
SNAPSHOT_PART_ENTRIES_MAX: Final = 1 << 14  # each counts for 96 bytes at least
SNAPSHOT_PARTS_MAX: Final = 1 << 16
SNAPSHOT_REQUESTS_MAX: Final = 4  # parts in memory at a time
SNAPSHOT_STORE_ATTEMPTS_MAX: Final = 3  # of a part that does not read back as it was put
SNAPSHOT_MANIFEST_BYTES_MAX: Final = 16 * MIB  # of 65,536 parts and 100,000 writers
SNAPSHOTS_KEPT: Final = 3
SNAPSHOT_SEGMENTS_MIN: Final = 1024  # in the tail, before a new one is worth it
SNAPSHOT_TRY_PASSES: Final = 8  # in a row that could not read all, before a snapshot is tried
SEGMENT_COST_BYTES: Final = 64 * KIB  # of a snapshot: reading so much takes as long as getting a segment
RETENTION_S: Final = 24 * 3600.0  # of segments that snapshots cover, by the clock of the store
DELETE_NAMES_MAX: Final = 1000  # in one call

CLOCK_SKEW_S: Final = 300.0  # by which the clocks of a deployment differ at most, if nothing else is said
UPKEEP_INTERVAL_S: Final = 60.0  # between two looks for packs whose life is over
UPKEEP_SURE_S: Final = 1.0  # between two looks whether all writers were asked
UPKEEP_PACKS: Final = 256  # in one step
UPKEEP_DELETERS: Final = 3  # of all writers, on average

SOURCE_TOMBSTONES_S: Final = (
    60.0  # between two looks for tombstones of another region, which is copied or read from
)
TOMBSTONE_BYTES_MAX: Final = 1 * MIB
BEHIND_BLOCKS_MAX: Final = 8192  # in one object: of 64 bytes at most, and less than TOMBSTONE_BYTES_MAX
ERASE_INTERVAL_S: Final = 1.0  # between two looks whether what became known is erased
TOMBSTONES_INTERVAL_S: Final = 15.0  # between two looks for new ones

PROBLEMS_MAX: Final = 256  # known of one place
PROBLEMS_TOLD: Final = 8  # in its status
MEMBERS_FAILED_MAX: Final = (
    3  # of a folder, in a row that the store failed for: then the others wait for the next look
)
TASK_PAUSE_S_MIN: Final = 1.0  # before a task that ended is begun again; doubles
TASK_PAUSE_S_MAX: Final = 300.0
TASK_SETTLED_S: Final = 60.0  # a task that goes on for so long is right again
SWEEP_STAGED_S: Final = 3600.0  # between two looks for what killed processes left half written in a directory
REGION_BYTES_MAX: Final = 64 * KIB  # of a marker

# Orders to warm, and what daemons tell of themselves.
ORDERS_INTERVAL_S: Final = 15.0  # between two looks for new ones
ORDERS_MAX: Final = 64  # in force at a time; of more, the latest
ORDER_BYTES_MAX: Final = 64 * KIB  # of an order, and of progress
ORDER_PATTERNS_MAX: Final = 256  # of models, and of tenants
ORDER_TELL_S: Final = 5.0  # between two writings of progress, where there is news
ORDER_HEARTBEAT_S: Final = 20.0  # written even without
ORDER_RETRY_S: Final = 10.0  # after a bucket or a catalogue that failed
ORDER_PRIORITY: Final = 1001  # of copies that are ordered: above all rules
ORDER_JOBS_MAX: Final = 64  # of one order, waiting or under way: what is cancelled leaves no more behind
ORDER_JOBS_PAUSE_S: Final = 0.5  # between two looks whether some have ended
ORDER_ATTEMPTS_MAX: Final = 3  # then a pack counts as failed; it is tried on by its rule
NODE_INTERVAL_S: Final = 600.0  # between two tellings of one daemon
NODE_BYTES_MAX: Final = 1 * MIB
NODE_ROWS_MAX: Final = 256  # models and tenants told, those most asked for
NODE_READS_MAX: Final = 32  # at a time
TRAFFIC_TOKENS_MIN: Final = 10_000  # asked for: of less no share is told
TRAFFIC_HALF_LIFE_S: Final = 24 * 3600.0  # after which a token that was asked for counts half

FETCH_RANGE_BYTES: Final = 8 * MIB  # of a pack, read with one request
CHAIN_HASHES_MAX: Final = 1 << 20  # of a prefix that somebody names: no prompt has more blocks
DOUBTED_PACKS_MAX: Final = 1024  # remembered to have failed once

# Audits: what a bucket has, held against what was announced.
AUDIT_INTERVAL_S: Final = 24 * 3600.0  # of one auditor, on average
AUDITORS: Final = 3  # of all writers, on average; a mirror, where there is one, is the only one
AUDIT_MIRROR_S: Final = 3600.0  # a mirror that wrote its state so long ago is there
AUDIT_LOOK_S: Final = 10.0  # between two looks whether one is due
AUDIT_RETRY_S: Final = 300.0  # after one that failed
AUDIT_AGAIN_S: Final = 60.0  # before what is not there is asked for again
AUDIT_GAP_S: Final = (
    20.0  # after a gap, each writer waits for a share of so long × writers, so that few audit
)
AUDIT_GAP_PER_PACK_S: Final = 1e-4  # … or of so long for each pack: what listing it takes
AUDIT_REQUESTS_MAX: Final = 16  # under way at a time
AUDIT_SLICE_PACKS: Final = 128  # held against the catalogue at a time: 1 to 2 ms
AUDIT_DOUBTED_MAX: Final = 4096  # packs that were not there once
ORPHAN_GRACE_S: Final = 3600.0  # a pack that was put so long ago should have been announced
ORPHANS_WAITING_MAX: Final = 1 << 16  # for their parents; 300 bytes each
PARENTLESS_S: Final = 24 * 3600.0  # … so long, before they are deleted
RESTORED_KEPT_S: Final = 7 * 24 * 3600.0  # life of a pack whose announcement was lost
DEEP_PACKS: Final = 4  # read whole at a time, by whoever verifies every byte
VERIFY_LOOK_S: Final = 0.2  # of a region that is verified from outside: between two looks at its feed
VERIFY_AGAIN_S: Final = 2.0  # before what is not there is asked for again
LACKING_AGAIN_S: Final = 10.0  # … before what was not copied yet is
ROTTEN_LOOKS: Final = 8  # in a row that find a segment damaged, until it counts as gone

# Mirrors: limits of one pair of regions.
COPIES_MAX: Final = 16  # under way at a time
COPY_BYTES_MAX: Final = 256 * MIB  # of packs in memory; one that is larger is copied alone
# If all were got at once, all would be put at once, and each side would wait for the other.
COPY_GETS_MAX: Final = 8  # being got
COPY_GET_BYTES_MAX: Final = 128 * MIB
UNANNOUNCED_MAX: Final = 4096  # put, and being announced
JOBS_MAX: Final = 1 << 18  # waiting, 510 bytes each; what is more is found by a sweep
SWEEP_INTERVAL_S: Final = 3600.0
SWEEP_ROOM_PAUSE_S: Final = 1.0  # between two looks whether there is room for more jobs
SPECS_CHOSEN_MAX: Final = 4096  # whose rule is remembered
OUTLIVED_S: Final = (
    2 * 24 * 3600.0
)  # a pack whose life is over for so long is forgotten: more than clocks may differ, twice
SETTLE_S_MAX: Final = 60.0  # a start waits so long for feeds to be read to their end
MIRROR_JOIN_PAUSE_S: Final = 10.0
COPY_PAUSE_S_MIN: Final = 0.001  # of waiting for a time to come
COPY_BACKOFF_S_MIN: Final = 2.0  # after a copy that failed; doubles
COPY_BACKOFF_S_MAX: Final = 300.0
DAMAGED_BACKOFF_S_MAX: Final = 3600.0
LOST_AFTER_S: Final = 3600.0  # that the source does not have a pack it announced
# Copying in bulk, by juicefs.
BULK_PACKS_MIN: Final = 128  # waiting, before it is worth a process
BULK_PACKS_MAX: Final = 1024  # in one run; their names are one argument, of 128 KiB at most
BULK_BYTES_MAX: Final = 2048 * MIB  # in one run; twice that on disk
BULK_LOOK_S: Final = 1.0  # between two looks, where nobody wakes it
BULK_START_S_MAX: Final = 120.0  # of a run, and what its bytes take at this rate:
BULK_BYTES_PER_S_MIN: Final = 4 * MIB  # then it is ended, and what it brought is used
BULK_PAUSE_S: Final = 600.0  # after one that failed
BULK_DISK_FREE_BYTES_MIN: Final = 1024 * MIB  # left on the disk
BULK_SAID_BYTES_MAX: Final = 64 * KIB  # of its messages, kept
COMPLAINT_CHARS_MAX: Final = 300
JUICEFS_THREADS: Final = 32  # each has up to 10 MiB of memory
JUICEFS_ASK_S_MAX: Final = 20.0  # for its version
STATE_INTERVAL_S: Final = 5.0  # between two looks whether there is news to write down
STATE_READS_MAX: Final = 3  # of one that is damaged, before a start does without
HEARTBEAT_S: Final = 60.0  # written down even without news
HEARTBEAT_LATE_S: Final = 180.0  # then a mirror is taken for stopped
LAGS_KEPT: Final = 4096  # of the latest copies
IN_TIME_S: Final = 900.0  # how soon a copy should be there
FAILURES_TOLD: Final = 8  # in the state of a mirror, and lost packs
MIRROR_STATE_BYTES_MAX: Final = 16 * MIB  # of 100,000 writers

# A catalogue. Memory at 100 M blocks, in MiB: the filter 551 (as measured: arrays of 32 bits a block, 1,500 in each of
# 65,536, and what the allocator loses); RocksDB's block cache 96, its indexes and bloom filters included, write buffers
# 4 × 8, the tops of indexes and filters 20: about 700 together.
FILTER_PARTITION_BITS: Final = 16
FILTER_PRINT_BITS: Final = 32
BLOCK_CACHE_BYTES: Final = 96 * MIB
WRITE_BUFFER_BYTES: Final = 8 * MIB  # larger ones are slower: they do not fit the processor's cache
WRITE_BUFFERS_MAX: Final = 4
BLOOM_BITS: Final = 10  # of a key: one in a hundred is looked for in vain
OPEN_FILES_MAX: Final = 512
LOG_FILES_MAX: Final = 2
LOG_BYTES_MAX: Final = 1 * MIB
BACKGROUND_JOBS_MAX: Final = 2
LOAD_KEYS: Final = 2048  # of the filter, in one slice: about 2 ms
CATALOGUE_CHUNK_PACKS: Final = 256  # read at a time where all are walked through

assert SEGMENT_CUT_BYTES + PACK_HEADER_BYTES_MAX < SEGMENT_BYTES_MAX
assert SNAPSHOT_PART_BYTES + PACK_HEADER_BYTES_MAX < SNAPSHOT_PART_BYTES_MAX
assert SNAPSHOT_PART_ENTRIES_MAX > SNAPSHOT_PART_BYTES // 96
assert PACK_RECORDS_MAX <= 1 << 16
assert FEED_PAGE_SEGMENTS < HEAD_NUMBERS
assert FILTER_PARTITION_BITS + FILTER_PRINT_BITS <= 64
assert POLL_INTERVAL_S < HEAD_TRUST_S
assert CATALOGUE_CHUNK_PACKS + SEGMENT_ENTRIES_MAX < JOBS_MAX // 2
assert COPY_GETS_MAX < COPIES_MAX and COPY_GET_BYTES_MAX < COPY_BYTES_MAX
assert BULK_PACKS_MIN <= BULK_PACKS_MAX < 3000  # of 41 bytes each
assert STATE_INTERVAL_S < HEARTBEAT_S < HEARTBEAT_LATE_S < IN_TIME_S
assert AUDIT_AGAIN_S < AUDIT_RETRY_S < ORPHAN_GRACE_S < PARENTLESS_S < RESTORED_KEPT_S
assert HEARTBEAT_LATE_S < AUDIT_MIRROR_S
