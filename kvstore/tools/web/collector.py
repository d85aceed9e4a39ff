"""An answer of the daemon, as metrics. names.py has every name, with its labels and its meaning.

    Answer ─▶ families ─▶ prometheus_client ─▶ text, or OpenMetrics, as the scraper asks for it

Nothing is remembered between two scrapes: while the daemon is away there is `kvstore_up 0` and nothing that is stale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from coldstart.fleet.devices import Watch
from kvstore.protocol import outcomes
from kvstore.tools.web.asking import Answer
from kvstore.tools.web.names import COUNTERS_LEFT_OUT, METRICS, counter_name

Rows = Iterable[tuple[tuple[str, ...], float]]
_BREAKER = {"closed": 0.0, "probing": 0.5, "open": 1.0}
_HISTOGRAMS = {
    "request": "kvstore_request_seconds",
    "load": "kvstore_load_seconds",
    "store": "kvstore_store_seconds",
}
_OF_DEVICES = {
    "kvstore_device_total_bytes": "total_bytes",
    "kvstore_device_free_bytes": "free_bytes",
    "kvstore_device_link_bytes_per_second": "link_bytes_per_s",
    "kvstore_device_numa_node": "numa_node",
}
_WATCH = Watch()


def exposition(answer: Answer, accept: str) -> tuple[bytes, str]:
    """The scrape of a daemon, and its content type. accept: the header of who asks."""
    return encoded(lambda: families(answer), accept)


def encoded(made: Callable[[], Iterator[Metric]], accept: str) -> tuple[bytes, str]:
    try:
        encode, content_type = choose_encoder(accept)
        return encode(_Scrape(made)), content_type
    except (TypeError, ValueError):  # a version that is none
        encode, content_type = choose_encoder("")
        return encode(_Scrape(made)), content_type


class _Scrape(Collector):
    def __init__(self, made: Callable[[], Iterator[Metric]]) -> None:
        self._made = made

    def collect(self) -> Iterator[Metric]:
        return self._made()


def families(answer: Answer) -> Iterator[Metric]:
    """Each metric that this answer has something of."""
    live = answer.report
    yield _one("kvstore_up", float(live is not None))
    yield _one("kvstore_web_scrape_seconds", answer.took_s)
    if live is None:
        return
    about = {"version": str(live["version"]), "daemon": str(live["instance"])}
    yield InfoMetricFamily("kvstore", METRICS["kvstore_info"].meaning, value=about)
    yield _one("kvstore_uptime_seconds", live["uptime_s"])
    # By its kind, which everybody may read: whoever scrapes is mostly a stranger.
    yield _one("kvstore_healthy", float(all(one["kind"] != "books" for one in live["problems"])))
    yield from of_problems(live["problems"], live["now_s"])
    yield _one("kvstore_adopting", float(live["adopting"]))
    yield from _tokens(live["tokens"])
    for field in ("capacity_bytes", "used_bytes", "model_bytes", "records"):
        rows = [((tier["name"],), tier[field]) for tier in live["tiers"]]
        yield family(f"kvstore_tier_{field}", rows)
    loads = live["model_loads"]
    yield _one("kvstore_model_loads_total", loads["count"])
    yield _one("kvstore_model_load_seconds_total", loads["seconds"])
    by_source = [((source,), size) for source, size in loads["by_source"].items()]
    yield family("kvstore_model_loaded_bytes_total", by_source)
    yield from _times(live)
    yield from _levels(live)
    yield from _limits(live)
    yield from _optional(live)
    yield from _devices()
    for name, count in live["counters"].items():
        if counter_name(name) in METRICS and name not in COUNTERS_LEFT_OUT:
            yield _one(counter_name(name), count)


def of_problems(problems: Sequence[Mapping[str, Any]], now_s: float) -> Iterator[Metric]:
    """A row for each that can be told apart: whoever may not read names sees kinds only."""
    levels = dict.fromkeys((one["kind"], one["subject"], one["level"]) for one in reversed(problems))
    ages_s: dict[tuple[str, ...], float] = {}
    for one in problems:
        labels = (one["kind"], one["subject"])
        ages_s[labels] = max(ages_s.get(labels, 0.0), now_s - one["since_s"])
    yield family("kvstore_problem", [(labels, 1.0) for labels in levels])
    yield family("kvstore_problem_seconds", ages_s.items())


def kind_of(outcome: str) -> str:
    """engine, hit or miss."""
    if outcome == outcomes.NAMES[outcomes.ENGINE]:
        return "engine"
    return "hit" if outcome in _HITS else "miss"


_HITS = frozenset(outcomes.NAMES[number] for number in outcomes.HITS)


def _tokens(rows: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    def by_model(name: str, field: str) -> Metric:
        return family(name, [((row["model"], row["tenant"]), row[field]) for row in rows])

    yield by_model("kvstore_lookups_total", "lookups")
    yield by_model("kvstore_tokens_asked_total", "tokens_asked")
    yield family(
        "kvstore_tokens_total",
        [
            ((row["model"], row["tenant"], outcome, kind_of(outcome)), count)
            for row in rows
            for outcome, count in row["tokens"].items()
        ],
    )
    moved = [((row["model"], row["tenant"], move), n) for row in rows for move, n in row["bytes"].items()]
    yield family("kvstore_moved_bytes_total", moved)
    yield by_model("kvstore_prefill_seconds_saved_total", "prefill_s_saved")


def _times(live: Mapping[str, Any]) -> Iterator[Metric]:
    bounds_s: list[float] = live["latency_bounds_s"]
    for kind, name in _HISTOGRAMS.items():
        times = HistogramMetricFamily(name, METRICS[name].meaning, labels=METRICS[name].labels)
        for label, histogram in live["latencies"].get(kind, {}).items():
            times.add_metric([label], _buckets(bounds_s, histogram), histogram["sum_s"])
        yield times
    name = "kvstore_loop_delay_seconds"
    delays = HistogramMetricFamily(name, METRICS[name].meaning)
    for histogram in live["latencies"].get("loop_delay", {}).values():
        delays.add_metric([], _buckets(bounds_s, histogram), histogram["sum_s"])
    yield delays


def _buckets(bounds_s: Sequence[float], histogram: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Cumulative, as Prometheus wants them."""
    names = [*map(str, bounds_s), "+Inf"]
    return list(zip(names, map(float, accumulate(histogram["buckets"])), strict=True))


def _levels(live: Mapping[str, Any]) -> Iterator[Metric]:
    breakers, speeds = live["breakers"], live["speeds"]
    disks = live["disks"]
    yield family("kvstore_disk_info", [((d["level"], d["directory"], d["device"]), 1.0) for d in disks])
    yield family("kvstore_disk_state", [((d["level"], d["directory"], d["state"]), 1.0) for d in disks])
    for field in ("capacity_bytes", "room_bytes", "used_bytes", "records"):
        yield family(f"kvstore_disk_{field}", [((d["level"],), d[field]) for d in disks])
    open_ones = [((breaker["name"],), _BREAKER.get(breaker["state"], 1.0)) for breaker in breakers]
    yield family("kvstore_breaker_open", open_ones)
    yield family("kvstore_breaker_trips_total", [((b["name"],), b["trips"]) for b in breakers])
    for name, field in (
        ("kvstore_level_bytes_per_second", "bytes_per_s"),
        ("kvstore_level_latency_seconds", "latency_s"),
        ("kvstore_level_waiting_bytes", "waiting_bytes"),
    ):
        yield family(name, [((speed["name"],), speed[field]) for speed in speeds])


def _limits(live: Mapping[str, Any]) -> Iterator[Metric]:
    door = live["door"]
    yield family("kvstore_queue_length", [((queue["name"],), queue["length"]) for queue in live["queues"]])
    yield family("kvstore_queue_limit", [((queue["name"],), queue["limit"]) for queue in live["queues"]])
    yield _one("kvstore_sessions", live["sessions_total"])
    yield _one("kvstore_connections", door["connections"])
    yield _one("kvstore_namespaces", live["namespaces_total"])
    yield family("kvstore_requests_total", [((name.lower(),), n) for name, n in door["frames"].items()])
    yield family("kvstore_refused_total", [((reason,), n) for reason, n in door["refused"].items()])
    yield family("kvstore_slow_requests_total", [((why,), n) for why, n in door["slow"].items()])


def _optional(live: Mapping[str, Any]) -> Iterator[Metric]:
    """Of what a daemon may do without."""
    budget, region, events = live["write_budget"], live["region"], live["events"]
    if budget is not None:
        yield _one("kvstore_write_budget_bytes", budget["write_bytes_per_day"])
        yield _one("kvstore_write_budget_spent_bytes", budget["spent_bytes"])
    if region is not None:
        yield _one("kvstore_region_open", float(region["open"]))
        for name, field in (
            ("kvstore_region_feed_age_seconds", "feed_age_s"),
            ("kvstore_region_keeps", "keeps"),
            ("kvstore_region_keeper_age_seconds", "keeper_age_s"),
            ("kvstore_region_clock_off_seconds", "clock_off_s"),
            ("kvstore_region_packs", "packs"),
            ("kvstore_region_blocks", "blocks"),
            ("kvstore_region_untrusted_total", "untrusted_objects"),
        ):
            if region.get(field) is not None:  # not known before it is joined
                yield _one(name, float(region[field]))
    if events is not None:
        yield _one("kvstore_events_waiting_blocks", events["waiting_blocks"])
        yield _one("kvstore_events_lost_blocks_total", events["lost_blocks"])


def _devices() -> Iterator[Metric]:
    """What their driver says; without one nothing."""
    found = _WATCH.newest()
    for name, field in _OF_DEVICES.items() if found else ():
        said = [(device, getattr(device, field)) for device in found]
        yield family(name, [((str(one.number), one.name), float(n)) for one, n in said if n is not None])


def _one(name: str, value: float) -> Metric:
    return family(name, [((), value)])


def family(name: str, rows: Rows) -> Metric:
    metric = METRICS[name]
    make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    made = make(name, metric.meaning, labels=metric.labels)
    for labels, value in rows:
        made.add_metric(labels, value)
    return made
