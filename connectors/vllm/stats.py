"""What the connector counts, as vLLM passes it from workers to its log and to Prometheus.

Counters are sums, so aggregating over ranks and steps is adding; the Prometheus name of each is
`vllm:kvstore_<name>_total`. Gauges come from the scheduler alone, and the latest counts: `vllm:kvstore_<name>`.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

MEANINGS = {
    "lookups": "Requests looked up at the daemon, once for each time they start",
    "lookup_tokens": "Prompt tokens of these requests beyond the local prefix cache",
    "hit_tokens": "Prompt tokens that the daemon could load",
    "declined": "Requests not looked up because the connector is not ready or does not serve this model",
    "waits": "Requests that waited for blocks that another engine was storing, once for each time they start",
    "wait_seconds": "Seconds that these waits took",
    "loaded_blocks": "Blocks copied from the daemon to the device",
    "loaded_bytes": "Bytes copied from the daemon to the device",
    "load_seconds": "Seconds that loads took, waiting included",
    "loads": "Loads finished, failed ones included",
    "load_failures": "Loads that came back incomplete; the rest was computed",
    "failed_blocks": "Blocks that a load promised and did not bring",
    "saved_blocks": "Blocks committed to the daemon",
    "saved_bytes": "Bytes committed to the daemon",
    "save_seconds": "Seconds that saves took",
    "saves": "Saves finished, whatever came of them",
    "held_blocks": "Blocks offered that the daemon held already, or had no room for",
    "skipped_queue_full": "Blocks not saved because too many bytes wait for their copy",
    "skipped_overwritten": "Blocks not saved because the engine needed their memory",
    "skipped_tainted": "Blocks not saved because a load failed, or weights changed, while they were computed",
    "skipped_unavailable": "Blocks not saved because the daemon was away or refused",
    "unavailable": "Calls that the daemon did not answer in time",
    "refused": "Calls that the daemon refused",
    "first_tokens": "Engines that have had a first token since they were started",
    "first_token_seconds": "Seconds from the start of their process to it",
    "hook_errors": "Failures inside the connector that were kept away from the engine",
}
GAUGES = {
    "connected": "1 while the engine's scheduler has a connection to the daemon",
    "ready": "1 while it has, and requests are looked up and blocks saved",
}


class KVStoreStats(KVConnectorStats):
    """Sums by name since the last reset, and gauges; `data` is what travels between processes."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, amount in other.data.items():
            self.data[name] = amount if name in GAUGES else self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line for vLLM's log: what moved, how fast, and what did not."""
        data = self.data
        summary: dict[str, int | float] = {
            "hit tokens": data.get("hit_tokens", 0),
            "loaded blocks": data.get("loaded_blocks", 0),
            "load MB/s": _rate(data.get("loaded_bytes", 0), data.get("load_seconds", 0.0)),
            "saved blocks": data.get("saved_blocks", 0),
            "save MB/s": _rate(data.get("saved_bytes", 0), data.get("save_seconds", 0.0)),
        }
        if not data.get("connected", 1):
            summary["connected"] = 0
        troubles = ["load_failures", "declined", "unavailable", "refused", "hook_errors"]
        troubles += [name for name in MEANINGS if name.startswith("skipped_")]
        return summary | {name.replace("_", " "): data[name] for name in troubles if data.get(name)}

    def is_empty(self) -> bool:
        return not any(amount or name in GAUGES for name, amount in self.data.items())


def _rate(amount_bytes: float, seconds: float) -> float:
    return round(amount_bytes / seconds / 1e6, 1) if seconds > 0 else 0.0


class Tally:
    """Counts from any thread; `take` hands out what came together since the last time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()
        self._reported: dict[str, int] = {}
        self._news = False

    def set(self, name: str, value: int) -> None:
        """A gauge."""
        if self._reported.get(name) != value:
            with self._lock:
                self._reported[name], self._news = int(value), True

    def add(self, name: str, amount: float = 1) -> None:
        if amount:
            with self._lock:
                self._sums[name] += amount  # type: ignore[assignment]  # seconds are not whole

    def take(self) -> KVStoreStats | None:
        """The sums so far, which start again at nothing, and the gauges; None without news."""
        with self._lock:
            if not self._sums and not self._news:
                return None
            sums, self._sums, self._news = self._sums, Counter(), False
            return KVStoreStats(data={**sums, **self._reported})


class KVStorePromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter for each name in MEANINGS, and one gauge for each in GAUGES, with vLLM's own labels."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._series: dict[tuple[str, int], Any] = {}
        for name, meaning in (MEANINGS | GAUGES).items():
            kind = self._gauge_cls if name in GAUGES else self._counter_cls
            family = kind(name=f"vllm:kvstore_{name}", documentation=meaning, labelnames=labelnames)
            for engine, values in per_engine_labelvalues.items():
                self._series[name, engine] = family.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data.items():
            series = self._series.get((name, engine_idx))
            if series is None:
                continue
            if name in GAUGES:
                series.set(amount)
            elif amount > 0:
                series.inc(amount)
