"""Outcomes: what became of a looked-up token. Each token has exactly one.

    prompt  │ in the engine's own cache │ hit in a tier      │ missed, for one reason │
            │ engine                    │ dram, nvme, shared │ never_seen … unusable  │
            │                           │ read_through       │                        │

The names are those of reports, metrics and JSON; the numbers index compact counts and travel
on the local door. New outcomes are added at the end.
"""

from __future__ import annotations

from kvstore.protocol.residency_bits import IN_DRAM

ENGINE = 0
HIT_DRAM = 1
HIT_NVME = 2
NEVER_SEEN = 3
EVICTED_DRAM = 4
EVICTED_NVME = 5
EXPIRED = 6
OVER_QUOTA = 7
NOT_ADMITTED = 8
CORRUPT = 9
UNAVAILABLE = 10
SLOWER = 11
WRITING = 12
PARTIAL_BLOCK = 13
UNUSABLE = 14
HIT_SHARED = 15
READ_THROUGH = 16
CLEARED = 17

NAMES = (
    "engine",
    "dram",
    "nvme",
    "never_seen",
    "evicted_dram",
    "evicted_nvme",
    "expired",
    "over_quota",
    "not_admitted",
    "corrupt",
    "unavailable",
    "slower",
    "writing",
    "partial_block",
    "unusable",
    "shared",
    "read_through",
    "cleared",
)
OUTCOMES = len(NAMES)
HITS = (HIT_DRAM, HIT_NVME, HIT_SHARED, READ_THROUGH)

MEANINGS = {
    "engine": "already in the engine's own cache",
    "dram": "hit in DRAM",
    "nvme": "hit on NVMe",
    "shared": "hit in a level that several nodes share",
    "read_through": "hit in the bucket of another region",
    "never_seen": "not seen before, or longer ago than is remembered",
    "evicted_dram": "was held in DRAM only, and made room for others",
    "evicted_nvme": "was held on NVMe at last, and made room for others",
    "expired": "its time to live was over, or it was erased",
    "over_quota": "its tenant or namespace had used up its quota",
    "cleared": "was dropped by hand (kvstore clear)",
    "not_admitted": "was offered, and there was no room for it or others were worth more",
    "corrupt": "its checksum did not match; it was dropped",
    "unavailable": "the tier that holds it failed or did not answer in time",
    "slower": "held, but loading it would take longer than computing it",
    "writing": "is being stored right now",
    "partial_block": "behind the last whole block of the prompt; only whole blocks are stored",
    "unusable": "held, but the engine cannot start there (alignment, a gap in a sliding window)",
}


def hit_in(where: int) -> int:
    """The outcome of a hit on a block that is in these tiers: the fastest one counts."""
    return HIT_DRAM if where & IN_DRAM else HIT_NVME
