"""Limits that several modules of the daemon share, with what they protect.

A limit that one module uses stands in that module; a number that an operator should choose is a key of
`kvstore.daemon.config.config`. Relations between limits are checked when the module that states them is imported, so
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


CONFIG_FILE_BYTES_MAX = 1 * MIB  # a larger one is not a configuration file
CONFIG_SHOWN_CHARS_MAX = 200  # of a wrong value
NVME_CAPACITY_BYTES_MIN, NVME_CAPACITY_BYTES_MAX = 4 * MIB, 1024 * TIB
IO_THREADS_MAX = 256
CONNECTIONS_MAX_MAX = 4096  # attached ones are at most 1023: the arena's owner numbers
SOCKET_PATH_BYTES_MAX = struct.calcsize("108s") - 1  # sun_path of the kernel, with its final zero

DATA_DIR_MARK_BYTES_MAX = 64 * KIB  # kvstore.json is a few hundred bytes
TICK_INTERVAL_S = 1.0  # sweep of quarantined slots, watchdog, progress of the start

STATUS_TIMEOUT_S = 5.0  # a daemon that does not answer for this long counts as unreachable
MEMORIES = ("suspects", "probe_targets", "tickets", "prompts")  # queues of the latest: full is no problem

STEP_BLOCKS = 1000  # blocks looked at between two yields, so that a piece takes about a millisecond
STEP_SLOW_BLOCKS = 100  # looked at between two yields by work that takes ten times as long for each block

NAMESPACES_MAX = 4096  # models × ranks × groups × tenants of one node; each costs a few hundred bytes
# Records that one job reads, so that its end takes the loop less than a millisecond.
LOAD_BATCH_RECORDS = 32
LOADS_WAITING_MAX = 65536  # blocks queued for loading; beyond it an acquire answers a miss
DEMOTE_BATCH_RECORDS = 8
VERIFY_JOBS_MAX = 4  # adopted records whose checksums are compared in the background at once
PROMPTS_REMEMBERED_MAX = 4096  # lookups whose blocks are still to be acquired or stored

LOAD_WAITERS_MAX = 1 << 18  # requests for single blocks that wait for a load; beyond it: a miss
SUSPECTS_MAX = 1024  # blocks whose last read failed; a second failure drops their record
DEMOTING_MAX = 1 << 20  # blocks queued for NVMe; beyond it the oldest is left in DRAM only
UNDEMOTED_MAX = 1 << 20  # blocks that NVMe refused, to be offered again; beyond it the oldest is not
IO_URGENT_MAX = LOADS_WAITING_MAX + 1024  # jobs that a caller waits for, waiting for a thread themselves
IO_CLOSE_S = 5.0  # at a stop, for reads and writes under way; what hangs longer is left behind
IO_ORDINARY_MAX = 4096  # other jobs waiting for a thread; beyond it a job is answered as failed

# A read or write of a tier hangs when it takes longer than this and the time for its bytes.
STALL_S, STALL_S_MIN, STALL_S_MAX = 1.0, 0.01, 600.0
PREFILL_TOKENS_PER_S_MIN, PREFILL_TOKENS_PER_S_MAX = 1.0, 1e9  # slower than that is a mistake
BREAKER_PAUSE_JITTER = 0.2  # of the pause, at random: many nodes may share one sick disk
PROBE_TARGETS_MAX = 16  # records remembered to be read by a probe
PROBE_READS_MAX = 4  # records read at once to measure: about the depth of a real load

TICKETS_OPEN_MAX = 4096  # requests whose account can still change

RULE_BYTES = 200  # of a rule in the file or an answer, without its block hash and the name of its tenant
# Commands that wait for those before them to be on disk; beyond it they are refused.
RULE_COMMANDS_MAX = 2048
AS_IT_IS = -1  # in place of a quota's bytes: those set before
TTL_S_MAX = 100 * 365 * 86_400
TENANT_CHARS_MAX = 1024  # as a namespace's fields
PINNED_SHARE_DEFAULT = 0.5  # of a tier's capacity
EXPIRY_SLICE_S = 0.002  # of sweeping, or of finding times, before others have their turn
EXPIRY_LOOKS = 16  # blocks that a sweep looks at, and drops at most, before it looks at the clock
RETENTION_DELETE_ROWS = 1000  # rows of dropped blocks deleted by one job
QUOTA_LOOKS_MAX = 64  # blocks of a holder that one displacement looks at

REUSE_GHOSTS_MIN = 65_536  # blocks remembered after they left, at least, about 110 bytes each

require(LOAD_BATCH_RECORDS <= LOADS_WAITING_MAX, "a batch of loads fits into the queue")
require(LOADS_WAITING_MAX < IO_URGENT_MAX, "every load finds a place in the pool's queue")
require(IO_THREADS_MAX + VERIFY_JOBS_MAX < IO_ORDINARY_MAX, "every store finds a place in the pool's queue")
require(LOADS_WAITING_MAX <= LOAD_WAITERS_MAX, "every load may be waited for")
require(STALL_S_MIN <= STALL_S <= STALL_S_MAX, "the default stall is allowed")

DOOR_SLOW_S = 0.1  # a request that takes longer is noted, with its reason
DOOR_CONNECTIONS_MAX = 1100  # every owner of the arena (1023) and some tools
DOOR_LEASE_SHARE_MAX = 0.5  # of the arena, per connection
DOOR_PROCESS_LEASE_SHARE_MAX = 0.75  # of the arena, all connections of one process together
DOOR_PIECE_US = 1000.0  # about as long as a piece of sliced work takes

# Connections beyond the maximum, of tools that attach no arena: a full daemon can be asked.
DOOR_TOOLS_MAX = 8
DOOR_RECEIVE_BYTES = 80 * KIB  # one read, as of a lookup of 2,048 blocks; one buffer for all connections

require(DOOR_LEASE_SHARE_MAX <= DOOR_PROCESS_LEASE_SHARE_MAX < 1, "a process leaves room for others")
require(DOOR_CONNECTIONS_MAX <= RULE_COMMANDS_MAX, "each connection may wait for a command")

WEB_SAMPLE_S = 5.0  # between two samples
WEB_HISTORY_S = 6 * HOUR_S  # for which samples are kept

REPLAY_BLOCK_TOKENS = 512  # of the Mooncake traces
REPLAY_HASH_BYTES = 8  # what a hash id becomes

EVENTS_SLICE_PAUSE_S = 0.002  # for others, between two slices of a full state
EVENTS_BEAT_S = 1.0  # without a batch, until an empty one: so late a subscriber learns what it missed

CLEARS_MAX = 64  # under way at a time
JOIN_PAUSE_S = 5.0  # between two tries to join the region
PERSIST_ASKS_BYTES_MAX = 64 * MIB  # of hashes that wait to be counted
PERSIST_CANDIDATES_MAX = 4096  # prefixes that wait to be persisted
PERSIST_JOBS_MAX = 4  # packs being read and put at once
WARM_RECORDS_MAX, WARM_BYTES_MAX = 512, 64 * MIB  # of orders, or of a named prefix, under way at a time
WARM_DRAM_SHARE = 8  # no more than one in so many bytes of DRAM is under way
WARM_NAMESPACES_MAX = 256  # of one named prefix: KV groups and ranks of an engine, and not all tenants
WARM_PAUSE_S = 0.01  # between two steps while there is something to bring
WARM_PACKS_MAX = 16  # handed to the engine at a time, of one order
WARM_ROUND_S = 5.0  # between two looks for more, while mirrors copy or something failed
WARM_TRIES_MAX = 5  # of packs that failed
