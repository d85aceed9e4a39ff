"""/metrics: names are a contract, figures are those of the daemon, and what is not known is not told."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from kvstore.client import Client
from kvstore.daemon.telling import facts_of
from kvstore.ledger.counters import Counters
from kvstore.security.identity import Gate
from kvstore.tools.web.asking import Answer
from kvstore.tools.web.collector import families
from kvstore.tools.web.names import COUNTER_MEANINGS, COUNTERS_LEFT_OUT, GROUPS, METRICS, document
from kvstore.tools.web.strangers import Askers
from replication.problems import Problem
from tests.coldstart.fake_nvml import fake_nvml
from tests.region.regions import RECORD_BYTES, arguments, chain, init, regions_file, space_of, store
from tests.running import ROOT, Place
from tests.web.asked import Serve, Watching, get, until, url_of, with_web
from tests.web.told import NOW_S, disk, live

HOSTILE = '"} 1\nkvstore_up{x="<script>alert(1)</script>\\'
NEVER_YET = {
    "kvstore_problem",
    "kvstore_problem_seconds",
    "kvstore_refused_total",
    "kvstore_slow_requests_total",
    "kvstore_model_loaded_bytes_total",
}  # rows come with the first refusal, and load
NOT_SAID = {"kvstore_device_numa_node"}  # by the double of a driver


def scrape(url: str) -> dict[str, Metric]:
    """By the name in names.py."""
    reply = get(url, "/metrics")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain; version=")
    families = {family.name: family for family in parse(reply.text)}
    return {
        f"{name}_total" if family.type == "counter" else name: family for name, family in families.items()
    }


def values(url: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in scrape(url).values()
        for sample in family.samples
    }


def traffic(place: Place, *, tenant: str = "a tenant", tokens: int = 640) -> None:
    """A lookup of four known blocks of ten: those of this tenant."""
    with Client(place.socket, 10, label="engine") as client:
        digest = tenant.encode()[:16].ljust(16, b".")
        space = client.namespace(digest, RECORD_BYTES, 32, 64, {"model": "a model", "tenant": tenant})
        hashes = chain(tenant, 10)
        store(client, space, hashes[:4])
        assert client.lookup([space], hashes, ticket=1, tokens=tokens, prefill_tokens_per_s=1000) == 4


def test_the_document_is_made_of_the_table() -> None:
    """docs/metrics.md lists exactly the metrics there are, with their labels and meanings."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    made = text.partition("-->\n\n")[2]
    assert made == "\n".join(document()).rstrip("\n") + "\n", (
        "make it anew: what is below the comment in docs/metrics.md is the output of its command"
    )


def test_each_counter_of_the_engine_has_a_meaning() -> None:
    """A counter that is added to the engine is a metric, or the test says that its meaning is missing."""
    assert set(COUNTER_MEANINGS) == {field.name for field in fields(Counters)} - COUNTERS_LEFT_OUT


def test_a_disk_that_is_left_alone_is_no_trouble_with_the_books() -> None:
    """Each has a metric of its own, so that an alert can tell a disk from a bug; a scraper that may not read names tells
    the same."""
    stranger = Askers("user", Gate(None))
    for of_books in ([], ["slot 1 has two owners"]):
        broken = "nvme1 /mnt/b: is left alone: broken"
        problems = [Problem("books", "books", text) for text in of_books] + [Problem("disk", "nvme1", broken)]
        report = live(
            health={"ok": False, "problems": [*of_books, broken]},
            problems=facts_of(problems, NOW_S),
            disks=[disk(0), disk(1, state="left alone", problem=broken)],
            latencies={},
            latency_bounds_s=[],
        )
        for read in (report, stranger.without_names(report)):
            found = {family.name: family.samples for family in families(Answer(read, "", 0.0, 0.0))}
            assert [sample.value for sample in found["kvstore_healthy"]] == [float(not of_books)]
            told = {s.labels["level"]: s.labels["state"] for s in found["kvstore_disk_state"]}
            assert told == {"nvme0": "ok", "nvme1": "left alone"}


def test_a_daemon_with_everything_has_every_metric(place: Place, serve: Serve, tmp_path: Path) -> None:
    """With NVMe, a write budget, a region, events and accelerators a scrape has each name of the table with its labels and type, and no other."""
    file = regions_file(tmp_path, "na")
    init(file, "na")
    daemon = serve(
        place,
        *arguments(place, file, "na", f"--set=nvme.directories={place.path / 'nvme'}"),
        "--set=nvme.write_bytes_per_day=1GiB",
        f"--set=events.endpoint=ipc://{place.path}/events",
        "--set=web.listen=127.0.0.1:0",
        PYTHONPATH=os.pathsep.join((str(ROOT), str(fake_nvml(tmp_path / "nvml")))),
    )
    url = url_of(daemon)
    traffic(place)
    until(lambda: "kvstore_device_free_bytes" in scrape(url), "the driver has answered")
    until(lambda: values(url).get(("kvstore_region_open", ())) == 1.0, "the region is joined")
    until(lambda: "kvstore_region_feed_age_seconds" in scrape(url), "its feed is read")
    until(lambda: scrape(url)["kvstore_lookups_total"].samples, "the lookup is counted")
    found = scrape(url)
    assert set(found) == {metric.name for group in GROUPS for metric in group.metrics}
    for name, family in found.items():
        metric = METRICS[name]
        assert family.type == ("gauge" if metric.kind == "info" else metric.kind), name
        assert family.documentation == metric.meaning
        assert family.samples or name in NEVER_YET | NOT_SAID, name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels), sample.name


def test_a_plain_daemon_has_what_is_always_there(place: Place, serve: Serve) -> None:
    """Without NVMe, region and events their metrics have no rows; all others have."""
    daemon = serve(place, *with_web(place))
    url = url_of(daemon)
    traffic(place)
    until(lambda: scrape(url)["kvstore_lookups_total"].samples, "the lookup is counted")
    with_rows = {name for name, family in scrape(url).items() if family.samples}
    always = {metric.name for group in GROUPS if not group.only for metric in group.metrics}
    assert with_rows == always - NEVER_YET - {"kvstore_load_seconds", "kvstore_store_seconds"}


def test_figures_are_those_of_the_traffic(place: Place, serve: Serve) -> None:
    """Tokens by outcome sum up to those asked for, and buckets to their count; hits are counted as such."""
    daemon = serve(place, *with_web(place))
    url = url_of(daemon)
    traffic(place)
    who = (("model", "a model"), ("tenant", "a tenant"))
    until(lambda: values(url).get(("kvstore_lookups_total", who)) == 1.0, "the lookup is counted")
    found = values(url)
    assert found["kvstore_tokens_asked_total", who] == 640
    outcomes = {
        dict(labels)["outcome"]: (dict(labels)["kind"], value)
        for (name, labels), value in found.items()
        if name == "kvstore_tokens_total" and value
    }
    assert outcomes == {"dram": ("hit", 256.0), "never_seen": ("miss", 384.0)}
    assert found["kvstore_prefill_seconds_saved_total", who] == 0.256
    assert (
        found["kvstore_moved_bytes_total", (("model", "a model"), ("move", "stored"), ("tenant", "a tenant"))]
        == 4 * 65536
    )
    assert found["kvstore_tier_records", (("tier", "dram"),)] == 4
    assert found["kvstore_requests_total", (("request", "lookup"),)] == 1
    buckets = [
        v
        for (name, labels), v in found.items()
        if name == "kvstore_request_seconds_bucket" and ("request", "lookup") in labels
    ]
    assert buckets == sorted(buckets) and buckets[-1] == 1
    assert found["kvstore_request_seconds_count", (("request", "lookup"),)] == 1


def test_counters_never_go_back(place: Place, serve: Serve) -> None:
    """A load that brings less than its lookup promised takes nothing from a counter that was scraped."""
    daemon = serve(place, *with_web(place))
    url = url_of(daemon)
    before: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    counters = {name for name, metric in METRICS.items() if metric.kind == "counter"}
    with Client(place.socket, 10, label="engine") as client:
        space, hashes = space_of(client), chain("settled", 10)
        store(client, space, hashes)
        for ticket in range(1, 6):
            client.lookup([space], hashes, ticket=ticket, tokens=640, prefill_tokens_per_s=1000)
            until(
                lambda n=ticket: values(url).get(("kvstore_requests_total", (("request", "lookup"),))) == n,
                "it is told",
            )
            client.settle(ticket, 64, space, hashes[1])
            now = values(url)
            told = {
                key for key in now if key[0] in counters or key[0].endswith(("_bucket", "_count", "_sum"))
            }
            assert not {key: (before[key], now[key]) for key in told & set(before) if now[key] < before[key]}
            before = now


def test_hostile_names_are_values_of_labels(place: Place, serve: Serve) -> None:
    """Quotes, line ends and markup in the name of a tenant make no metric of their own, in neither format."""
    daemon = serve(place, *with_web(place))
    url = url_of(daemon)
    traffic(place, tenant=HOSTILE)
    until(lambda: scrape(url)["kvstore_lookups_total"].samples, "the lookup is counted")
    (sample,) = scrape(url)["kvstore_lookups_total"].samples
    assert sample.labels["tenant"] == HOSTILE
    assert set(scrape(url)) <= set(METRICS)
    reply = get(url, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert reply.headers["content-type"].startswith("application/openmetrics-text")
    families = {family.name: family for family in parse_openmetrics(reply.text)}
    (sample,) = families["kvstore_lookups"].samples
    assert sample.labels["tenant"] == HOSTILE


def test_a_scraper_that_asks_for_nonsense_gets_text(place: Place, serve: Serve) -> None:
    """A version that is none is no error."""
    url = url_of(serve(place, *with_web(place)))
    for accept in ("application/openmetrics-text; version=x", "text/plain; version=", "*/*", ";;,", "é"):
        reply = get(url, "/metrics", Accept=accept)
        assert reply.status == 200
        assert b"kvstore_up 1.0" in reply.body, accept


def test_without_a_daemon_nothing_stale_is_told(place: Place, serve: Serve) -> None:
    """While no daemon answers there is kvstore_up 0 and no other figure of it; the next one is found by itself."""
    daemon = serve(place)
    with Watching(place.socket) as web:
        assert values(web.url)["kvstore_up", ()] == 1.0
        daemon.process.kill()
        daemon.process.wait()
        until(lambda: values(web.url)["kvstore_up", ()] == 0.0, "the web process has noticed")
        assert set(scrape(web.url)) == {"kvstore_up", "kvstore_web_scrape_seconds"}
        serve(place)
        until(lambda: values(web.url)["kvstore_up", ()] == 1.0, "the new daemon is found")
