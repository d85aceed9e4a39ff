"""Limits of the connectors, in one place; relations between them are checked at import.

What an operator may choose is a key of `kv_connector_extra_config` (see
`connectors/transfer/settings.py`); what is here only has to be sane.
"""

from __future__ import annotations

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

CONNECTOR_FORMAT = 3  # part of every namespace: raise it when the bytes of a record change their meaning

VLLM_FIRST, VLLM_LAST = (0, 32), (0, 33)  # releases of vLLM that the connector is made for, and tested with

# ---- calls to the daemon ---------------------------------------------------------------
LOOKUP_TIMEOUT_S = 0.1  # the scheduler waits inside a step: what a missing daemon may cost, once
LOOKUP_FRESH_S = 1.0  # a request that waits in the engine's queue is not looked up again before
RANKS_WAIT_S = 10.0  # the first requests wait for what the ranks say of their blocks; then they are computed
EPOCHS_OWED_MAX = 64  # resets whose namespaces are not ended yet; beyond it the daemon drops them in time
LOAD_TIMEOUT_S = 3.0  # from the step that asks for a load to its last byte, slower tiers included
SAVE_TIMEOUT_S = 1.0  # one call of the save thread: what a hanging daemon keeps finished blocks occupied
CALL_TIMEOUT_S = 1.0  # what a load thread waits for an answer, on top of the wait it asked for
SYNC_WAIT_S_MAX = 1.0  # the most that one synchronous load or save may hold up a step
TIMEOUT_S_MIN, TIMEOUT_S_MAX = 0.001, 60.0
QUEUED_PROMOTIONS_MAX = 32  # requests that wait in the engine's queue and whose blocks are promoted meanwhile
STILL_WRITING_WAIT_S = 0.5  # for which a request waits until more of what another engine is storing comes, instead of computing it
WAITS_MAX = 20  # of these at most one behind the other, for blocks that keep coming
PROMISED_WAIT_S = 0.1  # of that, while nobody has begun to store them: a prefill worker does in its next step
WRITING_PAUSE_S = 0.005  # before the daemon is asked again for such blocks
FREES_WAIT_S = (
    0.1  # for which a request that needs blocks waits for saves to give some back, instead of preempting
)
LOAD_RETRY_S = 0.005  # before asking again for a block that is on its way, and was not there in time
LEASE_BLOCKS_MAX = 512  # blocks of one reserve or acquire
ACQUIRE_AT_ONCE_S = 0.005  # for which the scheduler leases slots of a load itself; threads go on then
LEASE_BYTES_MAX = 64 * MIB  # of one reserve or acquire, that one rank copies (at least one block)
RESERVES_AT_ONCE_MAX = 16  # saves of one step for which the scheduler leases slots itself: 50 to 100 us each
FILLS_MAX = 16  # saves that are told in one call
LOOKUP_HASHES_MAX = 65536  # blocks of one lookup; what lies behind them is computed
LOOKUP_SPACES_MAX = 64  # namespaces of one lookup
TICKETS_OWED_MAX = 64  # lookups that were not answered in time, and not yet settled

# ---- prefill speed ---------------------------------------------------------------------
PREFILL_STEP_TOKENS_MIN = 64  # a step with fewer tokens is mostly overhead
PREFILL_SHARE_MIN = 0.9  # of a step's tokens beyond one for each request: then it is prefill
PREFILL_SAMPLES, PREFILL_SAMPLES_MIN = 32, 3  # steps that are remembered, and needed to say anything
STEPS_AHEAD_MAX = 64  # steps planned and not seen to end; pipelines have a few

# ---- background work -------------------------------------------------------------------
LOAD_THREADS = 2
LOAD_THREADS_MAX = 16
SAVE_QUEUE_BYTES = 1 * GIB  # saves waiting for their copy; beyond it blocks are skipped and counted
SAVE_QUEUE_BYTES_MIN = 1 * MIB
THREAD_JOIN_S = 2.0  # at shutdown

IDLE_LOAD_BYTES_MAX = 256 * MIB  # copied by the engine's own thread in a step that computes nothing

# ---- device copies ---------------------------------------------------------------------
COPY_SHARES = 4  # of a load: the thread that copies it and its helper take one after the other
HASH_GROUP_BYTES = 8 * MIB  # what is hashed while the next group is copied from the device
PIN_PIECE_BYTES = 64 * GIB  # registered in one call: drivers limit it, and a stop waits for one
ARENA_REFRESH_S = 5.0  # an idle connection sees within this time that the arena was replaced
RUNS_MAX = 1 << 16  # contiguous pieces of one block; more is not a KV cache layout we know

# ---- weights ---------------------------------------------------------------------------
WEIGHTS_START_WAIT_S = (
    10.0  # the engine's start waits this long for the digest; then it goes on in the background
)
WEIGHTS_CHUNK_BYTES = 1 * MIB
WEIGHTS_THREADS = 8
WEIGHTS_READS_MAX = 3  # of a file that changes while it is read
WEIGHTS_HEADER_BYTES_MAX = 100 * MIB  # of a safetensors file; its own library reads no longer one
WEIGHTS_SAMPLE_HEAD_BYTES = 256 * KIB  # of a file whose digest is remembered, read at each start
WEIGHTS_SAMPLE_PAGES, WEIGHTS_SAMPLE_PAGE_BYTES = 32, 4 * KIB
WEIGHTS_SETTLED_S = 0.05  # after which a further change of a file gets another change time
WEIGHTS_SUM_WORDS = 1 << 20  # of one sum over live weights: three times 8 MiB on the device meanwhile
WEIGHTS_SHRINK_MAX = (
    8  # times smaller than it was made may a layer's weights be packed (16 to 4 bits, and room)
)

ADAPTERS_MAX = 256  # of LoRA, that are stored by one engine: each has namespaces of its own
ADAPTERS_KNOWN_MAX = 1 << 16  # of which it is remembered what they stand for
CONTENTS_KNOWN_MAX = (
    1 << 16
)  # identifiers of images and the like, of which it is remembered what they stand for

NEAREST_NAME_CUTOFF = 0.6

if not LOOKUP_TIMEOUT_S < SYNC_WAIT_S_MAX <= LOAD_TIMEOUT_S <= TIMEOUT_S_MAX:
    raise AssertionError(
        "constants: a lookup is shorter than a synchronous load, and that shorter than any load"
    )
if not WEIGHTS_SUM_WORDS <= 1 << 23:
    raise AssertionError("constants: places in a sum over weights have 23 bits")
if not WRITING_PAUSE_S < PROMISED_WAIT_S <= STILL_WRITING_WAIT_S:
    raise AssertionError(
        "constants: who waits asks several times, and not longer for a promise than for blocks"
    )
if not TIMEOUT_S_MIN < LOOKUP_TIMEOUT_S:
    raise AssertionError("constants: the default timeouts are allowed")
if SAVE_QUEUE_BYTES_MIN > SAVE_QUEUE_BYTES:
    raise AssertionError("constants: the default save queue is allowed")
