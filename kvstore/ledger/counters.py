"""What the engine counts. Plain integers, read by status, metrics and tests.

Names are those of `kvstore status -o json` (docs/cli.md): one word per thing everywhere.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """Counts since the daemon started. Blocks unless the name says otherwise."""

    lookups: int = 0
    lookup_blocks: int = 0
    lookup_hit_blocks: int = 0
    acquired_dram: int = 0  # handed out, by the tier they were in when asked for
    acquired_nvme: int = 0
    acquire_missed: int = 0  # asked for and not handed out, for any reason
    committed: int = 0
    reserve_held: int = 0  # asked to store and already held or being written
    reserve_no_room: int = 0
    not_admitted: int = 0  # stopped a reserve because everything in DRAM is worth more
    promoted: int = 0
    promote_no_room: int = 0  # loads that found DRAM full; most wait for room
    promote_failed: int = 0  # I/O error while loading
    demoted: int = 0
    demote_failed: int = 0
    demote_not_admitted: int = 0  # not written to NVMe, to spare it (nvme.write_bytes_per_day)
    evicted_dram: int = 0
    evicted_nvme: int = 0
    evicted_pinned: int = 0  # of these, pinned ones: a record size that had no room at all took their slab
    expired: int = 0  # dropped, their time to live was over, or they were erased
    cleared: int = 0  # dropped by hand (kvstore clear)
    displaced: int = 0  # copies that left a tier for the quota of their own tenant or namespace
    lost_before_demote: int = 0  # evicted from DRAM while no other tier had it
    corrupt_dram: int = 0  # checksum did not match after adoption, or of a sample
    corrupt_nvme: int = 0  # … after a read from a device …
    corrupt_shared: int = 0  # … and of what a shared level brought
    verified: int = 0  # the same that matched
    adopted: int = 0
    reservations_aborted: int = 0
    expired_acquires: int = 0
    refused_slower: int = 0  # lookups that were cut off where loading is slower than computing
    refused_over_quota: int = 0  # lookups that were cut off where the rest has no room in a quota of DRAM
    refused_unavailable: int = 0  # lookups that were cut off at a block of a tier whose breaker is open
    nvme_probes: int = 0  # records read in the background to see how a tier is
    loads_refused: int = 0  # loads, and waits for one, beyond the limit of their queue
    packs_persisted: int = 0
    persisted_bytes: int = 0  # of records in them
    persist_failed: int = 0  # packs that could not be read or put; most are tried again
    persist_given_up: int = 0  # prefixes that deserved to last and are not durable, after several tries
    acquired_shared: int = 0  # handed out, fetched from a shared level
    demotions_dropped: int = 0  # blocks left in DRAM only, beyond the limit of the queue to NVMe

    def as_dict(self) -> dict[str, int]:
        return asdict(self)
