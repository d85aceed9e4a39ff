"""Every limit of the daemon that is not a setting, by room, with what it protects.

A number that an operator should choose is a key of `kvstore.daemon.config`; a number that only
has to be sane is here. The relations between them are checked when this is imported, so
a bad edit stops the first test and not the first user.
"""

from __future__ import annotations

import struct

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
HOUR_S, DAY_S = 3600.0, 86_400.0


def require(truth: bool, relation: str) -> None:
    """Stop at import when a relation between limits does not hold (our bug, not the user's)."""
    if not truth:
        raise AssertionError(f"constants: {relation}")


# ---- configuration (kvstore/daemon/config.py): the ranges that settings must lie in -----------
CONFIG_FILE_BYTES_MAX = 1 * MIB  # a larger one is not a configuration file
CONFIG_SHOWN_CHARS_MAX = 200  # of a wrong value
DRAM_CAPACITY_BYTES_MIN, DRAM_CAPACITY_BYTES_MAX = 4 * MIB, 64 * TIB
DRAM_SHARE = 4  # with dram.capacity_bytes = "auto": one part in so many of the memory that is free
NVME_CAPACITY_BYTES_MIN, NVME_CAPACITY_BYTES_MAX = 4 * MIB, 1024 * TIB
SLAB_ALIGN_BYTES = 2 * MIB  # slabs start on huge pages
SLAB_BYTES_MAX = 256 * MIB  # what one slab's slot numbers can address at 4 KiB a slot
SLOT_BYTES_MIN_MIN, SLOT_BYTES_MIN_MAX = 4 * KIB, 16 * MIB
NVME_DIRECTORIES_MAX = 64
IO_THREADS_MAX = 256
STOP_TIMEOUT_S_MAX = 3600
GPU_HOUR_PRICE_MAX = 1_000_000.0
NVME_WRITE_BYTES_MIN = 1 * GIB  # a day; less would not pay for a handful of records
CONNECTIONS_MAX_MAX = 4096  # attached ones are at most 1023: the arena's owner numbers
LEASES_MAX_MAX = 65536
SOCKET_PATH_BYTES_MAX = struct.calcsize("108s") - 1  # sun_path of the kernel, with its final zero
NEAREST_NAME_CUTOFF = 0.6  # difflib similarity from which a mistyped key gets a suggestion

# ---- process (kvstore/daemon/service.py, data_dir.py, process.py, kvstore/output.py) ------------------
OUTPUT_WAITING_BYTES_MAX = 4 * MIB  # of log lines that nobody takes; beyond it the oldest go
OUTPUT_END_S = 1.0  # at the end of a process, for what was not written yet
DESCRIPTORS_MAX = 1 << 20  # that a process asks for; some systems give a thousand times as many
DESCRIPTORS_LEAST = 32  # with fewer, libraries end the process without a word
DESCRIPTORS_KEPT = 128  # besides connections: for files, for sockets of buckets, …
DESCRIPTORS_KEPT_PER_REGION = 128  # … for each region that is read, …
DESCRIPTORS_KEPT_PER_DEVICE = 64  # … and for the slabs of each NVMe directory
THREADS_SPARE = 32  # that libraries start, besides those of ours
DATA_DIR_FORMAT = 1  # bumped when the layout of the data dir changes
DATA_DIR_MARK_BYTES_MAX = 64 * KIB  # kvstore.json is a few hundred bytes
SERVING_BYTES_MAX = 64 * KIB  # serving.json is a hundred bytes
TICK_INTERVAL_S = 1.0  # sweep of quarantined slots, watchdog, progress of the start
CHECK_IDLE_S = 300.0  # the books are proven when nothing was asked for this long
FLUSH_POLL_S = 0.02  # between two looks at whether everything is on NVMe, while stopping
HEAP_INTERVAL_S = 60.0  # memory that is not used goes back to the system
GC_YOUNG_OBJECTS = 2000  # made and not yet gone, before Python looks for circles among the youngest, …
GC_MIDDLE_ROUNDS = 5  # … so many times, before it looks among those that stayed, …
GC_FULL_ROUNDS = 1_000_000  # … so many times, before it looks at everything: never
STATS_LOG_INTERVAL_S = 60.0  # one line of figures a minute, when anything happened

# ---- command line (kvstore/cli) --------------------------------------------------------
STATUS_TIMEOUT_S = 5.0  # a daemon that does not answer for this long counts as unreachable
CHECK_TIMEOUT_S = 120.0  # check() reads every row of every tier
WATCH_INTERVAL_S_MIN, WATCH_INTERVAL_S_MAX = 0.1, 3600.0
VERIFY_BATCH_RECORDS = 8  # records in flight while fsck --verify reads
MEMORIES = ("suspects", "probe_targets", "tickets", "prompts")  # queues of the latest: full is no problem

require(
    SLAB_ALIGN_BYTES <= SLAB_BYTES_MAX and SLAB_BYTES_MAX % SLAB_ALIGN_BYTES == 0,
    "slabs are whole huge pages",
)
require(SLAB_BYTES_MAX <= DRAM_CAPACITY_BYTES_MAX, "a slab fits into the largest arena")
require(DRAM_CAPACITY_BYTES_MIN >= SLAB_ALIGN_BYTES, "the smallest arena holds a slab")
require(NVME_CAPACITY_BYTES_MIN >= SLAB_ALIGN_BYTES, "the smallest NVMe directory holds a slab")
require(SLOT_BYTES_MIN_MIN <= SLOT_BYTES_MIN_MAX <= SLAB_BYTES_MAX, "the smallest slot fits into a slab")
require(STATUS_TIMEOUT_S < CHECK_TIMEOUT_S, "a check may take longer than a status")
require(TICK_INTERVAL_S < CHECK_IDLE_S, "idleness is seen by ticks")

# ---- the event loop (kvstore/steps.py) ---------------------------------------------------
STEP_BLOCKS = 1000  # blocks looked at between two yields, so that a piece takes about a millisecond
STEP_SLOW_BLOCKS = 100  # … of work that takes ten times as long for each
AUDIT_TRIES_MAX = 3  # times that sums are counted while something changes, before they are left alone

# ---- engine (kvstore/engine/engine.py, room.py, promotion.py, demotion.py) ---------------------
NAMESPACES_FILE_BYTES_MAX = 512 * MIB  # as many with as long names as may be registered: never so much
NAMESPACES_MAX = 4096  # models × ranks × groups × tenants of one node; each costs a few hundred bytes
NAMESPACE_DROP_BLOCKS = 100  # of an ended namespace, dropped in one go: about a millisecond
NAMESPACE_DROP_LOOKS = 2000  # steps down to leaves in one go, when blocks are in use
NAMESPACES_ENDED_MAX = 1024  # of the last that were ended: a start does not adopt what is left of them
NAMESPACES_UNUSED_MAX = 64  # without a block, that nobody has registered any more: the last ones stay known
STATUS_NAMESPACES_MAX = 256  # namespaces a status lists, those with most blocks first, …
STATUS_BYTES = 1 * MIB  # … as far as they fit; likewise its sessions
NAMESPACE_TOLD_BYTES, SESSION_TOLD_BYTES = 256, 64  # of one in an answer, without its words
SLAB_TAKEOVER_EVERY = 64  # evictions between two looks at whether another size class is colder
TAKEOVER_SLOTS = 100  # slots of a slab that is taken over, looked at or emptied between two yields
EVICTED_IN_VAIN_MAX = 1024  # blocks that leave for one request beyond those that made room for it
LOAD_LOOKS = 600  # blocks that wait for a load, looked at between two yields: a whole lease at once, …
LOAD_LOOKS_EVICTING = 5  # … or a fifth of them, where others have to leave for each
LOAD_BATCH_RECORDS = 32  # records that one job reads, so that its end takes less than a millisecond …
LOAD_BATCH_BYTES = 8 * MIB  # … and of bytes so many …
LOAD_BATCH_SHARE = 0.25  # … or this much of what may be under way …
FLIGHT_S = 1.0  # … which is what comes in so long, and in the time of the quickest job, …
FLIGHT_STALL_SHARE = 0.25  # … neither of which counts for more than this share of the stall …
WINDOW_GROWTH_MAX = 8.0  # times of what came back: so fast it grows while jobs are much quicker
QUICKEST_SHARE = 0.01  # of a slower job in what the quickest one takes: an old one does not count for ever
LOADS_UNDER_WAY_BYTES_MAX = 1 * GIB  # … and never more than this
PREFETCH_SHARE = 0.75  # of that may be what nobody waits for yet
LOADS_WAITING_MAX = 65536  # blocks queued for loading; beyond it an acquire answers a miss
DEMOTE_BATCH_RECORDS = 8
DEMOTE_BATCH_BYTES = 16 * MIB  # one ordinary job must not keep an I/O thread from urgent ones
PUMP_IN_VAIN_MAX = 16  # batches that NVMe has no room for, tried before the next commit or tick
DEMOTE_RETRY_S = 12.0  # before blocks that NVMe refused are offered again; it rests for 10 s itself
ADOPT_PIECES = 1  # of 512 rows, read at a time while starting …
ADOPT_ROWS = (
    128  # … and so many indexed between two looks at requests: less than a millisecond, but parts may split
)
VERIFY_JOBS_MAX = 4  # adopted records being proven in the background at once
CHILDREN_FEW_MAX = 500  # children of one block; more are in a table, whose growth stops nobody
TABLE_PART_ENTRIES = (341, 682, 1365)  # blocks that a dict of the index takes before it grows: 2/3 of 512 …
TABLE_SPLIT_BITS = 2  # a part that is too full becomes four: a third of the moves that two would take
LEASE_BYTES = 8  # of randomness in the number of a lease
PROMPTS_REMEMBERED_MAX = 4096  # lookups whose blocks are still to be acquired or stored

LOAD_WAITERS_MAX = 1 << 18  # requests for single blocks that wait for a load; beyond it: a miss
SUSPECTS_MAX = 1024  # blocks whose last read failed; a second failure drops their record
DEMOTING_MAX = 1 << 20  # blocks queued for NVMe; beyond it the oldest is left in DRAM only
UNDEMOTED_MAX = 1 << 20  # blocks that NVMe refused, to be offered again; beyond it the oldest is not
PLACE_CHECK_S = (
    1.0  # for NVMe directories to show at a start that they are ours; one that hangs is left alone
)
FILE_THREADS = 3  # for files of our own, and for comparing checksums of adopted records
IO_URGENT_MAX = LOADS_WAITING_MAX + 1024  # jobs waiting for a thread: loads and what somebody waits for …
IO_CLOSE_S = 5.0  # at a stop, for reads and writes under way; what hangs longer is left behind
IO_ORDINARY_MAX = 4096  # … and the others; beyond it a job is answered as failed

# ---- speeds and breakers (kvstore/health/speed.py, breakeven.py, breaker.py, nvme_watch.py) -----
SPEED_KEPT = 0.8  # weight of earlier stretches with each new one
SPEED_SUDDEN = 2.0  # times longer or shorter than predicted: the tier has changed, so much of …
SPEED_SHARE = 0.5  # … the change (in its logarithm) is believed at once …
SPEED_SHARE_PROBE = 0.8  # … and so much where it was measured on purpose
SPEED_SIMILAR = 1e-3  # stretches whose sizes differ less than this do not tell latency from flow
SPEED_FLOW_LEAST = 0.05  # of the time per byte of a typical stretch: bytes never flow for nothing
SPEED_STRETCH_JOBS_MAX = 16  # jobs after which a busy stretch counts, even if it goes on …
SPEED_STRETCH_S_MIN = 0.05  # … after so long: what came in one go came in all of the time before
PREFILL_SHARE = 0.3  # of one more statement of an engine in what is known of its prefill rate
PREFILL_RATES_MAX = NAMESPACES_MAX  # namespaces whose rate is remembered
STALL_S, STALL_S_MIN, STALL_S_MAX = 1.0, 0.01, 600.0  # one read or write of a tier hangs, that …
NVME_LEAST_BYTES_PER_S = 32e6  # … had besides the time for its bytes, at this speed, of a disk …
BUCKET_LEAST_BYTES_PER_S = 4e6  # … or a bucket
LATE_SHARE = 0.5  # of the stall: nothing is begun behind what takes so long
PREFILL_TOKENS_PER_S_MIN, PREFILL_TOKENS_PER_S_MAX = 1.0, 1e9  # slower than that is a mistake
BREAKER_FAILURES_MAX = 3  # in a row: then it trips
BREAKER_PAUSE_S_MIN = 1.0  # before the first probe; doubles with each trip or failed probe …
BREAKER_PAUSE_S_MAX = 60.0  # … up to this
BREAKER_PAUSE_JITTER = 0.2  # of the pause, at random: many nodes may share one sick disk
BREAKER_CALM_S = 60.0  # closed for so long: the next pause is the shortest one again
WATCH_SHARE = 0.25  # of nvme.stall_s between two looks at what hangs …
WATCH_INTERVAL_S_LEAST = 0.02  # … and no less
PROBE_TARGETS_MAX = 16  # records remembered to be read by a probe
PROBE_PAUSE_S_MIN = 1.0  # between two measurements of a tier that was refused; doubles with each …
PROBE_PAUSE_S_MAX = 60.0  # … up to this, until the tier is used again
PROBE_GAIN = 1.2  # times as fast as before: a tier recovers, and is measured again soon
PROBE_READS_MAX = 4  # records read at once to measure: about the depth of a real load

# ---- accounts (kvstore/ledger/accounts.py, totals.py, departed.py) ------------------------------
DEPARTED_KEYS_MAX = 1 << 21  # keys whose end is remembered, 4 bytes each
BOOK_LOOKS_MAX = 1024  # blocks that booking a lookup looks at; of longer prompts, every second, third, …
LOOKUP_WRITING_MAX = 4096  # blocks behind those held of which a lookup says that they are being written
TICKETS_OPEN_MAX = 4096  # requests whose account can still change
TOTALS_ROWS_MAX = 20_000  # hours × models × tenants; beyond it the oldest hours become one row each …
TOTALS_PUT_TOGETHER = 8  # … until one in so many of all rows is free
TOTALS_TOLD = 500  # rows of one answer: a client asks for page after page …
TOTALS_TOLD_BYTES = 2 * MIB  # … with the longest of names, too
TOTALS_ROW_BYTES = 500  # of a row without its names
TOTALS_KEPT_DAYS = 90
TOTALS_SAVE_INTERVAL_S = 5.0  # what a kill may lose
TOTALS_BUSY_TIMEOUT_S = 2.0  # somebody else reads the file
PREFIXES_KEPT = 256  # heaviest prefixes that are counted
PREFIXES_TOLD = 50  # … and told in a report
LIVE_ROWS_MAX = 64  # models × tenants of a Live answer, which does not grow with anything else
LIVE_MINUTES_MAX = 360  # kept in memory, and told
LIVE_MINUTES_TOGETHER = 120  # of an answer, between two yields
LIVE_PREFIXES = 10
LIVE_SESSIONS_MAX = 64
LOOP_DELAY_INTERVAL_S = 0.1  # between two looks at how late the event loop is

# ---- admission to NVMe (kvstore/health/write_budget.py) ---------------------------------------------
ENDURANCE_FILE_BYTES_MAX = 1 * MIB  # of a day, by the hour: a few KB
ENDURANCE_BURST_S = 3600.0  # an unused allowance is saved up this long
ENDURANCE_STRETCH_SHARE = 0.5  # of that: so much is on disk as spent before it is
ENDURANCE_LINE_POWER = (
    4  # of the used share of the allowance: half of it used, a sixteenth of a hit is enough
)

# ---- retention (kvstore/retention, kvstore/engine/retention_commands.py) ------------
RULES_OF_A_KIND_MAX = 4096  # pins, TTLs, quotas
RULE_BYTES = 200  # of a rule in the file or an answer, without its block hash and the name of its tenant
RULES_BYTES_MAX = 3 * MIB  # of all rules, so counted: more could not be told in one answer
RULES_FILE_BYTES_MAX = 16 * MIB  # a larger retention.json was not written by us
RULE_COMMANDS_MAX = 2048  # commands that wait for those before them to be on disk; beyond it: refused
AS_IT_IS = -1  # in place of a quota's bytes: those set before
TTL_S_MAX = 100 * 365 * 86_400
TENANT_CHARS_MAX = 1024  # as a namespace's fields
TENANTS_TOLD = 256  # those that hold most …
TENANTS_TOLD_BYTES = 512 * KIB  # … as far as their names are no longer than this in all
RETENTION_TOLD_BYTES = 4 * MIB - 64 * KIB  # of one answer, without the little that is in each
PINNED_BLOCKS_TOLD = 200_000  # blocks of pinned prefixes that one report looks at
PIN_PARTS = 64  # dicts that the pinned blocks of a namespace are in
PIN_STEP_BLOCKS = 200  # of a pinned prefix, marked, guarded or given up between two yields
PINNED_SHARE_DEFAULT = 0.5  # of a tier's capacity
EXPIRY_SLICE_S = 0.003  # of sweeping, or of finding times: so long does nobody get an answer …
EXPIRY_PAUSE_S = 0.006  # … and so long everybody, until the next slice
EXPIRY_LOOKS = 16  # blocks that a sweep looks at, and drops at most, before it looks at the clock
EXPIRY_FIND_BLOCKS = 512  # blocks whose rows are asked for their times at once
EXPIRY_SWEEP_SHARE = 0.1  # of the shortest TTL of a namespace: the pause between two sweeps, but …
EXPIRY_SWEEP_S_MIN = 10.0  # … so long at least …
EXPIRY_SWEEP_S_MAX = 600.0  # … and at most …
EXPIRY_REST_S_PER_LOOK = 2e-5  # … or this for each block: 20 times of what a look takes
EXPIRY_CHILDREN_COMPARED = 16  # beyond it a block counts as newer than one of its children
EXPIRY_SECONDS_SHARED = 4096  # seconds of which all blocks share one object
RETENTION_DELETE_ROWS = 1000  # rows of dropped blocks deleted by one job
RETENTION_ROWS_BEHIND_MAX = 32_768  # rows still to be deleted: beyond it nothing more is dropped
QUOTA_LOOKS_MAX = 64  # blocks of a holder that one displacement looks at
QUOTA_REQUEUE_BLOCKS = 1000  # blocks of namespaces under a quota that are offered to NVMe again at once
QUOTA_TRIM_BLOCKS = 64  # blocks that leave between two yields after a quota was lowered

# ---- what our policy learns (kvstore/policies/learned/hazard.py, leaves.py) ----------------
REUSE_AGE_MIN = 16  # blocks asked for since the last use; ages below are one; from here on there are …
REUSE_AGES_PER_DOUBLING = 2  # … so many, up to …
REUSE_AGE_MAX = 1 << 30  # … this, and one for everything older
REUSE_GHOSTS_MIN = 65_536  # blocks remembered after they left, at least, about 110 bytes each …
REUSE_GHOSTS_SHARE = 16  # … and one for this many that are held
REUSE_GHOSTS_PARTS = 256  # dicts that they are in, so that none is large; a power of two
REUSE_USES_FADE = 24.0  # uses count half when the whole cache was asked for so many times since …
REUSE_USES_HELD_MIN = 20  # … or as if so many blocks were held, if that is more
REUSE_PRIOR_STRETCHES = 30.0  # a kind's own experience outweighs that of its relatives from here on
REUSE_PRIOR_CHANCE = 0.03  # before anything is known: of reuse within one age
REUSE_PRIOR_FIRST_AGE = 5  # … and so many times that within the first age, which is so much wider
REUSE_EVIDENCE_BLOCKS_MAX = 65_536.0  # a kind's counts are halved here, so that new habits replace old ones
REUSE_COUNT_ALL_MAX = 131_072  # blocks held; while it is more, one request of two, four, … is counted
REUSE_COUNTED_MAX = 1e6  # relatives are compared when all counts have doubled, or grew by so many
REUSE_SHARED_USES = 6  # a block used so often belongs to everybody: what follows it is a first turn
REUSE_GROWN_SHARE = 4  # a kind's counts are looked at when they grew by one in so many
REUSE_AGE_EVERY = 4  # requests between two looks at what grew older
REUSE_PICK_EVERY = 32  # victims taken from one kind before others are compared again, at least
REUSE_STALE_ENTRIES_MIN = 256  # outdated entries of a queue that are not worth a clean-up
REUSE_SWEEP_LOOKS = 4  # entries looked at with each that comes, while there is a clean-up
REUSE_SWEEP_SEEN_MAX = 4096  # items of one use that are told apart meanwhile
REUSE_FRONT_MAX = 64  # entries at the front of a queue that are older than all others
REUSE_STALE_LOOKS = 256  # outdated entries thrown away at the front of a queue before the next one is asked …
REUSE_STALE_ROUNDS = 16  # … and how often all queues are asked when none has an answer

# ---- which judge decides (kvstore/policies/learned/selection.py) ---------------------------------
POLICY_LEARNS_AFTER_S = 0.001  # what nobody waits for, while the client copies
CONTEST_SAMPLE_MAX = 4608  # blocks in a shadow, about 300 bytes each; beyond it the sample shrinks …
CONTEST_THINNED = 32  # … by what is too much, but by one in so many at least …
CONTEST_THINNED_MOST = 4  # … and by one in so many at most, at a time
CONTEST_THINNED_AT_ONCE = (
    512  # blocks of a shadow, looked at in one go: half a millisecond where none is in the cache
)
CONTEST_DUE_MAX = 16  # requests that wait to be played; beyond it no shadow learns of one
CONTEST_USES_MAX = 512  # sampled blocks at the beginning of a prompt that take part
CONTEST_WINDOW_CAPACITIES = 3.0  # hits count half when a shadow was asked for so many times its blocks …
CONTEST_WINDOW_REQUESTS = 300  # … or by so many requests, if that takes longer: neighbours share one fate
CONTEST_DOUBTS = 0.25  # a lead counts beyond so many standard deviations

require(
    RULES_BYTES_MAX + TENANTS_TOLD_BYTES + TENANTS_TOLD * RULE_BYTES <= RETENTION_TOLD_BYTES,
    "all rules and the tenants that hold most fit one answer",
)
require(2 * RULES_BYTES_MAX <= RULES_FILE_BYTES_MAX, "what is written can be read back")
require(EXPIRY_SLICE_S < EXPIRY_PAUSE_S < TICK_INTERVAL_S, "dropping leaves most of the time to others")
require(LOAD_BATCH_RECORDS <= LOADS_WAITING_MAX, "a batch of loads fits into the queue")
require(
    2 * FLIGHT_STALL_SHARE <= LATE_SHARE < 1,
    "what is under way is over before anything is late, let alone hangs",
)
require(0 < LOAD_BATCH_SHARE < PREFETCH_SHARE < 1, "prefetches leave room for a load that somebody waits for")
require(LOADS_WAITING_MAX < IO_URGENT_MAX, "every load finds a place in the pool's queue")
require(IO_THREADS_MAX + VERIFY_JOBS_MAX < IO_ORDINARY_MAX, "every store finds a place in the pool's queue")
require(LOADS_WAITING_MAX <= LOAD_WAITERS_MAX, "every load may be waited for")
require(0 < SPEED_SHARE <= SPEED_SHARE_PROBE <= 1, "a probe counts at least as much as a load")
require(BREAKER_PAUSE_S_MIN <= BREAKER_PAUSE_S_MAX, "pauses grow")
require(STALL_S_MIN <= STALL_S <= STALL_S_MAX, "the default stall is allowed")
require(
    PROBE_PAUSE_S_MIN <= PROBE_PAUSE_S_MAX and PROBE_READS_MAX <= PROBE_TARGETS_MAX, "probes are possible"
)
require(REUSE_AGE_MIN < REUSE_AGE_MAX and REUSE_AGES_PER_DOUBLING >= 1, "there are ages to tell apart")
require(REUSE_PRIOR_CHANCE * REUSE_PRIOR_FIRST_AGE < 1, "a chance is at most one")

# ---- doors: who may ask what (kvstore/door/api.py) -----------------------------------------
DOOR_CONNECTIONS_MAX = 1100  # every owner of the arena (1023) and some tools
DOOR_PROCESS_CONNECTIONS_MAX = 128  # of one process: an engine that leaks them must not lock others out
DOOR_LEASES_MAX = 1024  # per connection
DOOR_LEASE_SHARE_MAX = 0.5  # of the arena, per connection …
DOOR_PROCESS_LEASE_SHARE_MAX = 0.75  # … and over all connections of one process
DOOR_LEASE_S_MAX = 600.0  # whoever holds a lease for longer hangs: its connection is closed
DOOR_NAMESPACES_MAX = 1024  # per process, …
DOOR_NAMESPACE_BYTES_MAX = 4 * MIB  # … and of what it says of them
DOOR_PROBLEMS_MAX = 1000  # lines of one check's answer
DOOR_PIECE_US = 1000.0  # about as long as a piece of sliced work takes

# ---- local door (kvstore/door/unix.py, connection.py, turns.py, memory.py) ----------------------
DOOR_BACKLOG = 512  # clients that may wait to be accepted
DOOR_HELLO_TIMEOUT_S = 5.0  # a peer that connects and says nothing
DOOR_STALLED_S_MAX = 10.0  # half a frame, or answers nobody reads …
DOOR_STALLED_S_PRESSED = 1.0  # … and half a frame while others wait for its memory
DOOR_ACCEPTED_AT_ONCE = 16  # in one turn of the loop, a fraction of a millisecond
DOOR_REFUSAL_LOG_S = 1.0  # between two lines about connections that are refused for the same reason
DOOR_ACCEPT_RETRY_S = 0.1  # after running out of descriptors
DOOR_TOOLS_MAX = (
    8  # connections beyond the maximum, of tools that attach no arena: a full daemon can be asked
)
DOOR_CONNECTIONS_LEAST = 4  # with descriptors for fewer, no daemon starts
DOOR_PROBE_TIMEOUT_S = 1.0  # how long a daemon that owns the socket file has to answer
DOOR_LOCK_S, DOOR_LOCK_POLL_S = (
    5.0,
    0.01,
)  # for the directory of the socket, while another daemon opens its own
DOOR_TURN_S = 0.001  # of work between two looks at the sockets
DOOR_RECEIVE_BYTES = 64 * KIB  # one read; one buffer for all connections
DOOR_SKIPPED_BYTES_MAX = 64 * MIB  # of a frame that is too large; one that claims more is none of ours
DOOR_FRAMES_BYTES_MAX = 32 * MIB  # frames larger than one read, all connections together
DOOR_UNREAD_BYTES_MAX = 16 * MIB  # answers that nobody reads, all connections together

require(DOOR_STALLED_S_MAX > DOOR_HELLO_TIMEOUT_S > 0, "a greeting is the shortest thing to wait for")
require(DOOR_STALLED_S_MAX >= DOOR_STALLED_S_PRESSED, "pressed is shorter")
require(DOOR_NAMESPACES_MAX <= NAMESPACES_MAX, "one process cannot register more than there may be")
require(DOOR_LEASE_SHARE_MAX <= DOOR_PROCESS_LEASE_SHARE_MAX < 1, "a process leaves room for others")
require(DOOR_CONNECTIONS_MAX <= RULE_COMMANDS_MAX, "each connection may wait for a command")
require(DOOR_TURN_S + DOOR_PIECE_US / 1e6 < 0.005, "nobody holds the loop for longer than 5 ms")
require(DOOR_FRAMES_BYTES_MAX >= 8 * MIB, "a frame of 4 MiB fits beside another")
require(
    DOOR_CONNECTIONS_MAX <= CONNECTIONS_MAX_MAX and DOOR_LEASES_MAX <= LEASES_MAX_MAX, "defaults are allowed"
)

# ---- recording requests (kvstore/ledger/recording.py, kvstore/replay/recorder.py) --------------
RECORDINGS_MAX = 8  # under way at a time
RECORD_WAITING_MAX = 16_384  # requests that were not fetched yet; freeing as many takes 3 ms
RECORD_WAITING_BYTES_MAX = 16 * MIB  # of their hashes; as long for these
RECORD_ANSWER_BYTES = 512 * KIB  # of one answer, about a millisecond; more only for a single request
RECORD_REQUEST_BYTES = 100  # of an answer, besides its hashes
RECORD_POLL_S, RECORD_S_MIN, RECORD_S_MAX = 0.25, 1e-3, 365 * DAY_S
RECORD_QUIET_S, RECORD_HOLD_S = (
    10.0,
    60.0,
)  # no news of a request, or so long since it came: its line is written
require(RECORD_ANSWER_BYTES <= RECORD_WAITING_BYTES_MAX, "an answer can be filled")

# ---- kvstore web (kvstore/web, kvstore/daemon/webbing.py) ------------------------------------
WEB_ANSWER_S = 2.0  # a daemon that takes longer for a Live answer is not well
WEB_SHARED_S = 0.5  # an answer this old is good for others who ask
WEB_SAMPLE_S = 5.0  # between two samples …
WEB_HISTORY_S = 6 * HOUR_S  # … which are kept so long
WEB_STEP_S_MAX = 3600  # of samples that are put together
WEB_CONNECTIONS_MAX = 256  # open at once; beyond it the oldest one is closed
WEB_BIND_TRIES, WEB_BIND_PAUSE_S = 10, 0.5  # of a port that another process may be about to give back …
WEB_BIND_RETRY_S = 60.0  # … and between later tries
WEB_NICE = 10  # of the process beside the daemon: the engines' requests come first
WEB_OOM_SCORE = 500  # … and of the two the kernel kills that one
WEB_LOOK_S = 0.5  # between two looks whether that process lives
WEB_RESTART_S_MIN, WEB_RESTART_S_MAX = (
    0.5,
    60.0,
)  # pause before it is started again; doubles while it ends at once
WEB_STEADY_S = 30.0  # it did not end at once
WEB_END_S = 0.3  # at a stop, until it is killed: it has nothing to lose
require(WEB_SHARED_S < WEB_SAMPLE_S and WEB_ANSWER_S < WEB_SAMPLE_S, "each sample has an answer of its own")

# ---- replay (kvstore/replay, kvstore/cli/replay.py) --------------------------------------
REPLAY_BLOCK_TOKENS = 512  # of the Mooncake traces
REPLAY_BLOCK_TOKENS_MAX = 1 << 20
REPLAY_HASH_BYTES = 8  # what a hash id becomes
REPLAY_LINE_BYTES_MAX = 64 * MIB  # a prompt of ten million blocks
REPLAY_PROCESSES_MAX = 16  # each has the trace in memory

# ---- the doctor (kvstore/doctor) ---------------------------------------------------------------------
DOCTOR_SWAP_USED_BYTES = 256 * MIB  # less in use may be anything
DOCTOR_ANSWER_S = 3.0  # for the port of the web, and for each question to a bucket
DOCTOR_BUCKET_S = 15.0  # for all that is asked of buckets
DOCTOR_SPARE_FILES = 256  # descriptors that a daemon needs besides its connections
DOCTOR_DISK_BYTES = 256 * MIB  # written and read by --disks, in each directory …
DOCTOR_DISK_PIECE_BYTES, DOCTOR_DISK_THREADS = 2 * MIB, 4  # … in pieces of that, by so many threads, …
DOCTOR_DISK_SMALL_READS = 64  # … and 4 KiB reads for the latency
DOCTOR_DISK_READ_BYTES_PER_S = 500_000_000  # slower than that is no local NVMe
DOCTOR_FUTURE_S = 60.0  # a file that is so much newer than now: the clock went back
BUNDLE_LOG_LINES = 2000
BUNDLE_MEMBER_BYTES_MAX = 8 * MIB  # of one file in it
BUNDLE_COMMAND_S = 10.0  # for journalctl

# ---- KV events (kvstore/events) ----------------------------------------------------------------------
EVENTS_WAITING_MAX = (
    1 << 20
)  # blocks that came or went and are not published; beyond it subscribers see a gap
EVENTS_BATCH_BLOCKS = (
    1024  # of one message, from which on it is closed: about 10 KB, or 36 KB of whole hashes
)
EVENTS_SLICE_BLOCKS = 2000  # of everything that is held, read in one go: half a millisecond …
EVENTS_SLICE_PAUSE_S = 0.002  # … and how long others have the loop before the next ones
EVENTS_INTERVAL_S_MIN, EVENTS_INTERVAL_S_MAX = 0.001, 60.0
EVENTS_REPLAY_BYTES_MIN = 64 * KIB
EVENTS_TOPIC_CHARS_MAX = 256
EVENTS_BEAT_S = 1.0  # without a batch, until an empty one: so late a subscriber learns what it missed
EVENTS_MESSAGE_BYTES = 128  # of memory for each batch that is kept, besides its own
EVENTS_QUEUED_MAX = 1000  # messages that wait for one subscriber that does not read
EVENTS_ANSWERS_MAX = 64  # under way; further requests are not read before there is room
EVENTS_STALLED_S = 10.0  # in which a peer takes nothing of its answer: the rest of it is dropped
EVENTS_TURN_MESSAGES = 64  # of an answer, before others get their turn
EVENTS_REQUEST_BYTES_MAX = 1024
EVENTS_CLOSE_S = 2.0  # at a stop, for what is not sent yet
require(EVENTS_SLICE_PAUSE_S < EVENTS_BEAT_S < EVENTS_STALLED_S, "a slow answer is not a stalled one")
require(EVENTS_BATCH_BLOCKS <= EVENTS_WAITING_MAX, "a full batch may wait")

# ---- traces (kvstore/ledger/tracing.py, kvstore/daemon/exporting.py) --------------------------------------
TRACES_REQUESTS_MAX = 4096  # traced requests that are remembered: what a later one does is not told any more
TRACES_SAVES_MAX = 32  # spans for what one request stores: a long answer would have one for every block
TRACES_WAITING_MAX = 8192  # spans that wait for the collector; beyond it they are lost
TRACES_BATCH_SPANS = 32  # sent at once: putting them together takes the interpreter for about a millisecond
TRACES_INTERVAL_S = 1.0  # between two looks at what waits
TRACES_TIMEOUT_S = 5.0  # of one request to the collector, tries included
TRACES_CLOSE_S = 1.0  # at a stop, for what is not sent yet

# ---- the durable set (kvstore/durable) ---------------------------------------------------------------
GRANULE_TOKENS = 256  # of a prompt, counted and persisted together; one block, if that is more
DEMAND_PLACES, DEMAND_SET_PLACES = (
    1 << 20,
    8,
)  # prefixes that are counted, 16 bytes each, and how many share a set
SEEN_TIMES_MAX, DEMAND_S_MAX = 1_000_000, 365 * DAY_S
PERSIST_BYTES_PER_S_MIN, PACK_BYTES_MIN, PACK_BYTES_MAX = 64 * KIB, 64 * KIB, 512 * MIB
CLOCK_SKEW_S, CLOCK_SKEW_S_MIN = (
    300.0,
    8.0,
)  # by which clocks differ at most; no less than news takes to be read
ERASE_STEP_BLOCKS = 100  # dropped between two yields
ERASE_TRIES_MAX = 600  # steps in a row in which everything left was in use; about ten minutes
CLEARS_MAX = 64  # under way at a time
CLEAR_PAUSE_S = 0.1  # between two passes of one, when something was in use …
CLEAR_USED_S = 3.0  # … and how long it is tried again
CLEAR_ROWS_S = 10.0  # for rows of NVMe to be cleared; a device that hangs does not hold up the answer longer
CLEAR_TIMEOUT_S = 600.0  # of one request: dropping takes turns with everything else
FOUND_PREFIXES_MAX = 5  # blocks that are named where a beginning of a hash is not unique
BUCKET_STALL_S = 5.0  # one request of a bucket hangs
REGIONS_MAX, COPY_RULES_MAX = 64, 1000  # of one deployment
COPY_BYTES_PER_S_MIN = 64 * KIB
DEMAND_SAVE_INTERVAL_S = 300.0  # what a kill may lose of them
OBJECT_JOBS_MAX, OBJECT_BATCH_RECORDS = 64, 64  # loads from the bucket under way, and records of each
JOIN_PAUSE_S = 5.0  # between two tries to join the region
JOIN_WAIT_S = 3.0  # of a start, for a bucket that refuses: one that does not answer does not delay it longer
REGION_CLOSE_S = 2.0  # at a stop, for requests under way
KEEP_TOLD_SHARE = 0.5  # of its life: a durable prefix that gains more is told to be kept longer
PERSIST_STEP_GRANULES = 400  # counted between two yields: about a millisecond
PERSIST_PAUSE_S = 0.1  # between two looks where there is nothing to count
PERSIST_ASKS_BYTES_MAX = 64 * MIB  # of hashes that wait to be counted
PERSIST_TICKETS_MAX = 65_536  # requests remembered, so that each counts once
PERSIST_CANDIDATES_MAX = 4096  # prefixes that wait to be persisted
PERSIST_DELAY_S = 2.0  # from a lookup until its blocks are looked for; doubles with each try
PERSIST_TRIES_MAX = 5  # of the same part of a prefix
PERSIST_JOBS_MAX = 4  # packs being read and put at once
PERSIST_LOOKS_MAX = 16  # candidates looked at in one step
TRAFFIC_KINDS_MAX = 4096  # models and tenants whose traffic is counted, those asked for latest
WARM_RECORDS_MAX, WARM_BYTES_MAX = 256, 32 * MIB  # under way at a time, because somebody ordered it
WARM_DRAM_SHARE = 8  # … and no more than one in so many bytes of DRAM
WARM_STEP_BLOCKS = 512  # looked at between two yields: less than a millisecond
WARM_NAMESPACES_MAX = 256  # of one named prefix: KV groups and ranks of an engine, and not all tenants
WARM_PAUSE_S = 0.01  # between two steps while there is something to bring
WARM_PACKS_MAX = 16  # handed to the engine at a time, of one order
WARM_ROUND_S = 5.0  # between two looks for more, while mirrors copy or something failed
WARM_TRIES_MAX = 5  # of packs that failed
