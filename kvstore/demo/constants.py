"""Every number of the demo, and what it is for."""

from __future__ import annotations

from kvstore.constants import GIB, MIB, require

# ---- what is asked -----------------------------------------------------------------------
PROMPTS = 3
PROMPT_REPEATS = 4  # times the text of model.py, about 450 tokens of the tiny model's each
OUTPUT_TOKENS = 24
BLOCK_TOKENS = 32  # vLLM on CPU takes multiples of 32
POSITIONS_MAX = 4096

# ---- where it is kept --------------------------------------------------------------------
TINY_DRAM_BYTES, TINY_NVME_BYTES, TINY_SLAB_BYTES = (
    48 * MIB,
    256 * MIB,
    4 * MIB,
)  # fits a container's 64 MiB shm
REAL_DRAM_BYTES, REAL_NVME_BYTES, REAL_SLAB_BYTES = 8 * GIB, 16 * GIB, 64 * MIB
TINY_ENGINE_KV_BYTES, REAL_ENGINE_KV_BYTES = 128 * MIB, 4 * GIB

# ---- how long anything may take ----------------------------------------------------------
DAEMON_START_S_MAX = 60.0
DAEMON_STOP_S_MAX = 60.0
SETTLE_S_MAX = 60.0  # until everything that was stored is on NVMe, and everything adopted is proven
POLL_INTERVAL_S = 0.05
STATUS_TIMEOUT_S = 5.0
ENGINE_START_S_MAX = 600.0  # a large model is read from disk
ENGINE_RUN_S_MAX = 300.0
ENGINE_STOP_S_MAX = 60.0
ENGINE_FINISH_S_MAX = 30.0  # for saves that are still under way after the last token
ENGINE_YIELD_S = 0.001  # as vLLM's engine process sleeps after a step that computed nothing

LOG_TAIL_LINES = 30  # of a process that died, shown to the user
CORRUPT_BYTES = 64  # flipped in the middle of one record

require(TINY_SLAB_BYTES <= TINY_DRAM_BYTES and REAL_SLAB_BYTES <= REAL_DRAM_BYTES, "a slab fits the arena")
require(ENGINE_FINISH_S_MAX < ENGINE_RUN_S_MAX, "finishing is a part of a run")
require(OUTPUT_TOKENS > 1, "one token alone says too little about the KV behind it")
