"""How much is measured: sizes, rounds and bounds of one run of the benchmark.

FULL takes about five minutes, QUICK about forty seconds, on two slow cores. Both have
at least five rounds of everything that is given as a median, but for the restart in QUICK.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tiers.object_options import ObjectOptions

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
    restart_blocks: int = 1_000_000
    restart_chain_blocks: int = 100
    restart_record_bytes: int = 4 * KIB
    restart_rounds: int = 3
    policy_blocks: int = 1_000_000
    policy_10m_blocks: int = 10_000_000
    policy_operations: int = 300_000
    rank_slabs: int = 16  # of the arena that eight ranks share
    rank_prompts: int = 200
    region_url: str = ""  # "": a directory of its own
    region_options: ObjectOptions = field(default_factory=ObjectOptions)
    mirror_url: str = ""  # where the mirror copies to; "": into the same bucket
    mirror_options: ObjectOptions = field(default_factory=ObjectOptions)
    region_pack_bytes: int = 16 * MIB
    region_record_bytes: int = 1 * MIB
    region_packs: int = 16  # in one round
    region_at_once: int = 4
    region_rounds: int = 7
    region_entries: int = 100_000  # of a feed, each a pack of 16 blocks
    region_segment_entries: int = 64
    region_known_blocks: int = 10_000_000  # of a catalogue
    region_misses: int = 2000
    mirror_packs: int = 64  # in one round
    mirror_rounds: int = 3
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
    restart_rounds=1,
    policy_10m_blocks=0,
    region_rounds=3,
    mirror_packs=32,
    mirror_rounds=2,
    warm_up_rounds=1,
)

# Bounds, whatever the plan.
POLICY_BYTES_PER_BLOCK_EST = 900  # while it is measured: the counted slots and its limit included
DISK_FREE_SHARE_MAX = 0.5  # of the free bytes of --dir, for everything that is written there
DISK_BYTES_MIN = 16 * MIB  # less per round is not worth a figure
START_TIMEOUT_S = 60.0  # a daemon that is not ready by then counts as failed
STOP_TIMEOUT_S = 20.0
CALL_TIMEOUT_S = 30.0  # deadline of a client call; generous, for it is not what is measured
SETTLE_TIMEOUT_S = 60.0  # prefault and demotions are waited for this long
