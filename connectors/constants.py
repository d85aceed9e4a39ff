"""Limits that several modules of the connectors share; those of one module stand in it.

What an operator may choose is a key of `kv_connector_extra_config` (see `connectors/transfer/settings.py`).
"""

from __future__ import annotations

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

LOOKUP_FRESH_S = 1.0  # a request that waits in the engine's queue is not looked up again before
RANKS_WAIT_S = 10.0  # the first requests wait for what the ranks say of their blocks; then they are computed
CALL_TIMEOUT_S = 1.0  # what a load thread waits for an answer, on top of the wait it asked for
SYNC_WAIT_S_MAX = 1.0  # the most that one synchronous load may hold up a step
# A request waits so long for more of what another engine is storing, instead of computing it.
STILL_WRITING_WAIT_S = 0.5
PROMISED_WAIT_S = 0.1  # of that, before anything is stored: a prefill worker begins in its next step
WRITING_PAUSE_S = 0.005  # before the daemon is asked again for such blocks
LEASE_BLOCKS_MAX = 512  # blocks of one reserve or acquire
LOOKUP_HASHES_MAX = 65536  # blocks of one lookup; what lies behind them is computed

THREAD_JOIN_S = 2.0  # at shutdown

if not WRITING_PAUSE_S < PROMISED_WAIT_S <= STILL_WRITING_WAIT_S:
    raise AssertionError("who waits asks several times, and not longer for a promise than for blocks")
