"""How much is measured: sizes, rounds and bounds of one run of the benchmark.

FULL takes about two minutes, QUICK about twenty seconds, on two slow cores.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tiers.bucket.object_options import ObjectOptions

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(slots=True, frozen=True)
class Plan:
    """One run. Rounds are what the medians are over; warm-up rounds come before them."""

    block_bytes: int = 2 * MIB
    blocks: int = 64  # moved in one round of put, get and memcpy
    small_block_bytes: int = 64 * KIB
    small_blocks: int = 512
    arena_blocks: int = 256  # what the DRAM arena holds; puts and memcpy rotate through it
    dram_rounds: int = 41
    view_calls: int = 500
    lookup_blocks: int = 2048
    lookup_record_bytes: int = 4 * KIB
    lookup_calls: int = 4000
    disk_bytes: int = 1 * GIB  # in each of: raw write, put, raw read, get; less where the disk is small
    disk_rounds: int = 7
    disk_buffer_blocks: int = 64  # memory that disk transfers go from and to
    promote_groups: int = 6  # of `blocks` each, on NVMe; the arena holds `arena_blocks`
    promote_rounds: int = 9
    io_threads: int = 4  # as engine.io_threads is by default
    region_url: str = ""  # "": a directory of its own
    region_options: ObjectOptions = field(default_factory=ObjectOptions)
    region_pack_bytes: int = 16 * MIB
    region_record_bytes: int = 1 * MIB
    region_packs: int = 16  # in one round
    region_at_once: int = 4
    region_rounds: int = 7
    warm_up_rounds: int = 2

    @property
    def round_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def arena_bytes(self) -> int:
        return self.arena_blocks * self.block_bytes


FULL = Plan()
QUICK = Plan(
    dram_rounds=11,
    view_calls=200,
    lookup_calls=1000,
    disk_bytes=256 * MIB,
    disk_rounds=5,
    promote_rounds=5,
    region_rounds=3,
    warm_up_rounds=1,
)

# Bounds, whatever the plan.
DISK_FREE_SHARE_MAX = 0.5  # of the free bytes of --dir, for everything that is written there
DISK_BYTES_MIN = 16 * MIB  # less per round is not worth a figure
START_TIMEOUT_S = 60.0  # a daemon that is not ready by then counts as failed
STOP_TIMEOUT_S = 20.0
CALL_TIMEOUT_S = 30.0  # deadline of a client call; generous, for it is not what is measured
SETTLE_TIMEOUT_S = 60.0  # prefault and demotions are waited for this long
