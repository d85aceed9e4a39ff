"""Every metric that /metrics has: name, type, labels, meaning. docs/metrics.md is made of this table.

    Live answer ─▶ collector.py ─▶ what stands here, and nothing else

Names end with their unit; counters with `_total`. They are a contract: dashboards and alerts of others use them.
A counter counts from the start of the daemon, and begins at 0 with the next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final, Literal

from kvstore.ledger.counters import Counters

Kind = Literal["counter", "gauge", "histogram", "info"]


@dataclass(frozen=True, slots=True)
class Metric:
    """name: as in a scrape, of a histogram without `_bucket`, `_sum` and `_count`."""

    name: str
    kind: Kind
    unit: str  # "" for a plain number
    labels: tuple[str, ...]
    meaning: str


@dataclass(frozen=True, slots=True)
class Group:
    """title: of its table in docs/metrics.md. only: when these are there, "" for always."""

    title: str
    only: str
    metrics: tuple[Metric, ...]


_SERVICE: Final = (
    Metric("kvstore_up", "gauge", "", (), "1 when the daemon answered this scrape, else 0 and nothing but "
           "`kvstore_web_scrape_seconds` is served"),
    Metric("kvstore_info", "info", "", ("version", "daemon"), "always 1; who answers: the id of its data directory"),
    Metric("kvstore_uptime_seconds", "gauge", "seconds", (), "since the daemon was started"),
    Metric("kvstore_healthy", "gauge", "", (), "0 when the last self-check found problems "
           "(`kvstore status` lists them); disks have their own metrics"),
    Metric("kvstore_problem", "gauge", "", ("kind", "subject", "level"),
           "1 for each problem of now, as `kvstore status` tells it; `level` is `problem` or `warning`"),
    Metric("kvstore_problem_seconds", "gauge", "seconds", ("kind", "subject"), "since that problem began"),
    Metric("kvstore_adopting", "gauge", "", (), "1 while the rows of NVMe are read after a start; requests are answered"),
    Metric("kvstore_web_scrape_seconds", "gauge", "seconds", (), "how long the daemon took to answer this scrape"),
)  # fmt: skip

_TOKENS: Final = (
    Metric("kvstore_lookups_total", "counter", "", ("model", "tenant"), "prompts looked up"),
    Metric("kvstore_tokens_asked_total", "counter", "tokens", ("model", "tenant"), "prompt tokens looked up"),
    Metric("kvstore_tokens_total", "counter", "tokens", ("model", "tenant", "outcome", "kind"),
           "prompt tokens by what became of them; `kind` is `engine` (the engine had them itself), `hit` or `miss`"),
    Metric("kvstore_moved_bytes_total", "counter", "bytes", ("model", "tenant", "move"),
           "bytes of records; `move` is `stored` or `loaded` by engines, `promoted` to DRAM or `demoted` to NVMe"),
    Metric("kvstore_prefill_seconds_saved_total", "counter", "seconds", ("model", "tenant"),
           "prefill that hits saved, at the speed that engines tell"),
)  # fmt: skip

_TIERS: Final = (
    Metric("kvstore_tier_capacity_bytes", "gauge", "bytes", ("tier",), "never exceeded"),
    Metric("kvstore_tier_used_bytes", "gauge", "bytes", ("tier",), "whole slots; a tier in use is full and stays so"),
    Metric("kvstore_tier_model_bytes", "gauge", "bytes", ("tier",), "of the used bytes, slabs that models have"),
    Metric("kvstore_tier_records", "gauge", "", ("tier",), "blocks held"),
)  # fmt: skip

_MODELS: Final = (
    Metric("kvstore_model_loads_total", "counter", "", (),
           "times that a process of an engine loaded a model's weights, or its part of them"),
    Metric("kvstore_model_load_seconds_total", "counter", "seconds", (), "that these took"),
    Metric("kvstore_model_loaded_bytes_total", "counter", "bytes", ("source",),
           "that they read; `source` is `dram`, `disk`, or `bucket` by way of the disk"),
)  # fmt: skip

_TIMES: Final = (
    Metric("kvstore_request_seconds", "histogram", "seconds", ("request",),
           "from the moment that a request is served to its answer, loads that `acquire` waits for included; what it "
           "waited for its turn is not in it"),
    Metric("kvstore_load_seconds", "histogram", "seconds", ("level",), "one load from a disk or a bucket"),
    Metric("kvstore_store_seconds", "histogram", "seconds", ("level",), "one write to a disk"),
    Metric("kvstore_loop_delay_seconds", "histogram", "seconds", (),
           "how late the daemon's event loop came to its turn: all requests wait that long"),
)  # fmt: skip

_LEVELS: Final = (
    Metric("kvstore_disk_info", "gauge", "", ("level", "directory", "device"), "always 1; of each NVMe directory, where it lies"),
    Metric("kvstore_disk_state", "gauge", "", ("level", "directory", "state"),
           "always 1; the state that it is in: `ok`, `reading`, `short`, `full`, `off`, or one in which it is not used, or about to be "
           "lost: docs/cli.md lists them"),
    Metric("kvstore_disk_capacity_bytes", "gauge", "bytes", ("level",), "as asked for; what it holds never exceeds it"),
    Metric("kvstore_disk_room_bytes", "gauge", "bytes", ("level",), "of its capacity, what its file system has room for"),
    Metric("kvstore_disk_used_bytes", "gauge", "bytes", ("level",), "whole slots"),
    Metric("kvstore_disk_records", "gauge", "", ("level",), "blocks held"),
    Metric("kvstore_breaker_open", "gauge", "", ("breaker",), "0 closed, 0.5 probing, 1 open: the level is not used"),
    Metric("kvstore_breaker_trips_total", "counter", "", ("breaker",), "how often it opened"),
    Metric("kvstore_level_bytes_per_second", "gauge", "bytes per second", ("level",),
           "speed as measured from loads; 0 before there was one"),
    Metric("kvstore_level_latency_seconds", "gauge", "seconds", ("level",), "of one load, as measured"),
    Metric("kvstore_level_waiting_bytes", "gauge", "bytes", ("level",), "asked for and not there yet"),
)  # fmt: skip

_LIMITS: Final = (
    Metric("kvstore_queue_length", "gauge", "", ("queue",), "entries now"),
    Metric("kvstore_queue_limit", "gauge", "", ("queue",), "entries at which something is refused, forgotten or waits"),
    Metric("kvstore_sessions", "gauge", "", (), "who holds leases, or may"),
    Metric("kvstore_connections", "gauge", "", (), "processes connected now"),
    Metric("kvstore_namespaces", "gauge", "", (), "namespaces known"),
    Metric("kvstore_requests_total", "counter", "", ("request",), "requests by kind"),
    Metric("kvstore_refused_total", "counter", "", ("reason",), "connections and requests that the door refused"),
    Metric(
        "kvstore_slow_requests_total", "counter", "", ("why",),
        "requests that took longer than door.slow_s, by what they waited for; `kvstore slow` has the last ones",
    ),
)  # fmt: skip

_BUDGET: Final = (
    Metric("kvstore_write_budget_bytes", "gauge", "bytes", (), "what may be written to NVMe in 24 hours"),
    Metric("kvstore_write_budget_spent_bytes", "gauge", "bytes", (), "what was written in the last 24 hours"),
)  # fmt: skip

_REGION: Final = (
    Metric("kvstore_region_open", "gauge", "", (), "1 when the region's bucket is joined"),
    Metric("kvstore_region_feed_age_seconds", "gauge", "seconds", (), "since all of the region's feed was read"),
    Metric("kvstore_region_keeps", "gauge", "", (), "whether this node keeps its region"),
    Metric("kvstore_region_keeper_age_seconds", "gauge", "seconds", (), "since somebody was seen to keep the region"),
    Metric("kvstore_region_clock_off_seconds", "gauge", "seconds", (), "this machine's clock is ahead of the store's; negative: behind"),
    Metric("kvstore_region_packs", "gauge", "", (), "packs in the catalogue"),
    Metric("kvstore_region_blocks", "gauge", "", (), "blocks in them"),
    Metric("kvstore_region_untrusted_total", "counter", "", (), "objects that were read and have no seal of the deployment's key"),
)  # fmt: skip

_EVENTS: Final = (
    Metric("kvstore_events_waiting_blocks", "gauge", "", (), "came or went, and not published yet"),
    Metric("kvstore_events_lost_blocks_total", "counter", "", (),
           "forgotten because too many waited; subscribers see a gap"),
)  # fmt: skip

_DEVICES: Final = (
    Metric("kvstore_device_total_bytes", "gauge", "bytes", ("device", "name"), "memory of an accelerator"),
    Metric("kvstore_device_free_bytes", "gauge", "bytes", ("device", "name"), "of it, free"),
    Metric("kvstore_device_link_bytes_per_second", "gauge", "bytes per second", ("device", "name"),
           "its PCIe link, by generation and lanes"),
    Metric("kvstore_device_numa_node", "gauge", "", ("device", "name"), "the node of the processor that it is attached to"),
)  # fmt: skip

_MIRROR: Final = (
    Metric("kvstore_mirror_info", "info", "", ("version", "region"), "always 1; the region that is copied into"),
    Metric("kvstore_mirror_uptime_seconds", "gauge", "seconds", (), "since the mirror was started"),
    Metric("kvstore_mirror_oldest_age_seconds", "gauge", "seconds", ("source",),
           "what was announced so long ago is here: the RPO, which grows while the source cannot be read, too; none before all was, once"),
    Metric("kvstore_mirror_lag_p99_seconds", "gauge", "seconds", ("source",),
           "from the announcement there to the one here, of the latest 4,096 copies"),
    Metric("kvstore_mirror_pending", "gauge", "", ("source",), "packs and models to copy, failed ones included"),
    Metric("kvstore_mirror_backlog_bytes", "gauge", "bytes", ("source",), "of these"),
    Metric("kvstore_mirror_failed", "gauge", "", ("source",), "of these, failed at their last attempt"),
    Metric("kvstore_mirror_lost_total", "counter", "", ("source",), "announced, and no longer in the source"),
    Metric("kvstore_mirror_copied_packs_total", "counter", "", ("source",), "packs copied, since there is a mirror"),
    Metric("kvstore_mirror_copied_bytes_total", "counter", "bytes", ("source",), "of these"),
    Metric("kvstore_mirror_copied_models_total", "counter", "", ("source",), "models copied, since there is a mirror"),
    Metric("kvstore_mirror_copied_model_bytes_total", "counter", "bytes", ("source",), "of these"),
)  # fmt: skip

# Of kvstore/ledger/counters.py, each as kvstore_<name>_total. Blocks unless it says otherwise.
COUNTER_MEANINGS: Final = {
    "lookup_blocks": "blocks of lookups",
    "lookup_hit_blocks": "of these, found; those that the engine had itself counted too",
    "acquired_dram": "handed out that were in DRAM when asked for",
    "acquired_nvme": "handed out that were on NVMe when asked for",
    "acquired_shared": "handed out, fetched from a shared level",
    "acquire_missed": "asked for and not handed out, for any reason",
    "committed": "stored by engines",
    "reserve_held": "asked to store, and already held or being written",
    "reserve_no_room": "asked to store, and no room",
    "not_admitted": "asked to store, and everything in DRAM is worth more",
    "promoted": "loaded to DRAM",
    "promote_no_room": "loads that found DRAM full; most wait for room",
    "promote_failed": "loads that failed",
    "demoted": "written to NVMe",
    "demote_failed": "writes to NVMe that failed",
    "demote_not_admitted": "not written to NVMe, to spare it",
    "demotions_dropped": "left in DRAM only, beyond the limit of the queue to NVMe",
    "evicted_dram": "left DRAM to make room",
    "evicted_nvme": "left NVMe to make room",
    "evicted_pinned": "of these, pinned ones: a record size that had no room at all took their slab",
    "expired": "dropped: their time to live was over, or they were erased",
    "cleared": "dropped by hand (`kvstore clear`)",
    "displaced": "copies that left a tier for the quota of their own tenant or namespace",
    "lost_before_demote": "left DRAM while no other tier had them",
    "corrupt_dram": "in DRAM, and the checksum did not match any more; dropped",
    "corrupt_nvme": "read from NVMe, and the checksum did not match; dropped",
    "corrupt_shared": "fetched from a bucket, the region's own or another one's, and not what was stored",
    "verified": "in DRAM, adopted or of a sample of what is handed out, and the checksum matched",
    "adopted": "found at the start and kept",
    "reservations_aborted": "reserved and not committed",
    "expired_acquires": "acquires that ran out of time",
    "refused_slower": "lookups cut off where loading is slower than computing",
    "refused_over_quota": "lookups cut off where the rest has no room in a quota of DRAM",
    "refused_unavailable": "lookups cut off at a block of a tier whose breaker is open",
    "nvme_probes": "records read in the background to see how a tier is",
    "loads_refused": "loads, and waits for one, beyond the limit of their queue",
    "packs_persisted": "packs put into the bucket",
    "persisted_bytes": "bytes of records in them",
    "persist_failed": "packs that could not be read or put; most are tried again",
    "persist_given_up": "prefixes that deserved to last and are not durable, after several tries",
}
# `lookups` of the counters are calls: kvstore_requests_total{request="lookup"}. kvstore_lookups_total counts prompts.
COUNTERS_LEFT_OUT: Final = frozenset({"lookups"})


def counter_name(field: str) -> str:
    """The metric of one of the engine's counters."""
    return f"kvstore_{field}_total"


def _counters() -> tuple[Metric, ...]:
    told = [field.name for field in fields(Counters) if field.name not in COUNTERS_LEFT_OUT]
    return tuple(
        Metric(
            counter_name(name),
            "counter",
            "bytes" if name.endswith("_bytes") else "",
            (),
            COUNTER_MEANINGS[name],
        )
        for name in told
    )


GROUPS: Final = (
    Group("The daemon", "", _SERVICE),
    Group("Hits and misses", "", _TOKENS),
    Group("Tiers", "", _TIERS),
    Group("Models", "", _MODELS),
    Group("Times", "", _TIMES),
    Group("Disks and buckets", "with an NVMe directory or a region", _LEVELS),
    Group("Queues and the door", "", _LIMITS),
    Group("The write budget", "with `nvme.write_bytes_per_day`", _BUDGET),
    Group("The region", "with `regions_file`", _REGION),
    Group("KV events", "with `events.endpoint`", _EVENTS),
    Group("Accelerators", "with nvidia-ml-py and a driver", _DEVICES),
    Group("What the engine counts", "", _counters()),
)
MIRROR: Final = Group(
    "Mirrors", "from `kvstore mirror --metrics`, which has `kvstore_problem` of the daemon's, too", _MIRROR
)
METRICS: Final = {metric.name: metric for group in (*GROUPS, MIRROR) for metric in group.metrics}


def document() -> Iterator[str]:
    """The lines of the tables of docs/metrics.md."""
    for group in (*GROUPS, MIRROR):
        yield f"## {group.title}"
        yield ""
        if group.only:
            yield f"Only {group.only}."
            yield ""
        yield "| metric | type | unit | labels | meaning |"
        yield "|---|---|---|---|---|"
        for metric in group.metrics:
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            yield f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {metric.meaning} |"
        yield ""
