"""How much is measured by `python -m benchmarks`: what `kvstore bench` measures, and the parts for developers.

FULL takes about five minutes, QUICK about forty seconds, on two slow cores.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from kvstore.tools.bench import plan
from tiers.bucket.object_options import ObjectOptions

KIB = 1 << 10


@dataclass(slots=True, frozen=True)
class Plan(plan.Plan):
    """One run."""

    restart_blocks: int = 1_000_000
    restart_chain_blocks: int = 100
    restart_record_bytes: int = 4 * KIB
    restart_rounds: int = 3
    policy_blocks: int = 1_000_000
    policy_10m_blocks: int = 10_000_000
    policy_operations: int = 300_000
    rank_slabs: int = 16  # of the arena that eight ranks share
    rank_prompts: int = 200
    mirror_url: str = ""  # where the mirror copies to; "": into the same bucket
    mirror_options: ObjectOptions = field(default_factory=ObjectOptions)
    region_entries: int = 100_000  # of a feed, each a pack of 16 blocks
    region_segment_entries: int = 64
    region_known_blocks: int = 10_000_000  # of a catalogue
    region_misses: int = 2000
    mirror_packs: int = 64  # in one round
    mirror_rounds: int = 3


FULL = Plan()
QUICK = Plan(
    **{part.name: getattr(plan.QUICK, part.name) for part in fields(plan.QUICK)},
    restart_rounds=1,
    policy_10m_blocks=0,
    mirror_packs=32,
    mirror_rounds=2,
)

POLICY_BYTES_PER_BLOCK_EST = 900  # while it is measured: the counted slots and its limit included
