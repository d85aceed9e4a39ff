"""Every number of the demo, and what it is for."""

from __future__ import annotations

from typing import NamedTuple

from kvstore.constants import GIB, MIB

# ---- what is asked -----------------------------------------------------------------------
PROMPT_REPEATS = 4  # times the text of model.py, about 450 tokens of the tiny model's each
OUTPUT_TOKENS = 24  # one alone would say too little about the KV behind it
BLOCK_TOKENS = 32  # vLLM on CPU takes multiples of 32
POSITIONS_MAX = 4096


# ---- where it is kept --------------------------------------------------------------------
class Sizes(NamedTuple):
    """What the daemon's tiers and a slab of them may take, and the engine's own KV cache; in bytes."""

    dram: int
    nvme: int
    slab: int
    engine: int


TINY = Sizes(48 * MIB, 256 * MIB, 4 * MIB, 128 * MIB)  # the arena fits a container's 64 MiB of shared memory
REAL = Sizes(8 * GIB, 16 * GIB, 64 * MIB, 4 * GIB)

# ---- how long anything may take ----------------------------------------------------------
ENGINE_START_S_MAX = 600.0  # a large model is read from disk
ENGINE_RUN_S_MAX = 300.0
ENGINE_STOP_S_MAX = 60.0
ENGINE_FINISH_S_MAX = 30.0  # for saves that are still under way after the last token
ENGINE_YIELD_S = 0.001  # as vLLM's engine process sleeps after a step that computed nothing

CORRUPT_BYTES = 64  # flipped in the middle of one record
