"""A real daemon, told every second what it does: the answer to Live, and the report by the minute."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from kvstore.client import Client
from kvstore.ledger.latencies import BOUNDS_S
from kvstore.ledger.minutes import LIVE_MINUTES_MAX
from tests.cli.test_service import HASHES, RECORD_BYTES, namespace, put
from tests.running import TIMEOUT_S, Daemon, Place, kvstore

Serve = Callable[..., Daemon]
FIELDS = {
    "now_s", "uptime_s", "version", "instance", "pid", "socket_path", "data_dir", "host", "region_name", "holdings", "health", "problems", "adopting", "tokens", "tiers",
    "counters", "sessions", "sessions_total", "namespaces_total", "breakers", "speeds", "queues", "write_budget", "region",
    "events", "door", "latencies", "latency_bounds_s", "prefixes", "minutes", "disks", "models", "model_loads", "loading_blocks", "demoting_blocks", "unverified_blocks",
}  # fmt: skip


def test_live_tells_what_an_engine_did(place: Place, serve: Serve) -> None:
    """After an engine stored blocks, found them and loaded them: tokens, bytes, latencies of all levels, the prefix and
    the minute, under the documented names; a scraper that asks again gets nothing less."""
    daemon = serve(place, *place.with_nvme())
    began_s = int(time.time()) // 60 * 60
    put(place.socket)
    with Client(place.socket, timeout_s=10, label="engine") as client:
        space = namespace(client)
        assert client.lookup([space], HASHES, ticket=1, tokens=330, prefill_tokens_per_s=1000.0) == len(
            HASHES
        )
        into = [bytearray(RECORD_BYTES) for _ in HASHES]
        assert client.get(space, HASHES, into, wait_s=5) == len(HASHES)
        give_up_s = time.monotonic() + TIMEOUT_S
        while (told := client.live())["counters"]["demoted"] < len(HASHES) and time.monotonic() < give_up_s:
            pass
    assert set(told) == FIELDS
    (tokens,) = told["tokens"]
    assert (tokens["model"], tokens["tenant"], tokens["lookups"], tokens["tokens_asked"]) == (
        "test",
        "",
        1,
        330,
    )
    assert {name: count for name, count in tokens["tokens"].items() if count} == {
        "dram": 320,
        "partial_block": 10,
    }
    assert tokens["prefill_s_saved"] == 0.32
    moved = {"stored": 1, "loaded": 1, "promoted": 0, "demoted": 1}
    assert tokens["bytes"] == {name: times * len(HASHES) * RECORD_BYTES for name, times in moved.items()}
    assert [tier["name"] for tier in told["tiers"]] == ["dram", "nvme"]
    assert all(tier["records"] == len(HASHES) and tier["used_bytes"] > 0 for tier in told["tiers"])
    latencies = told["latencies"]
    assert set(latencies) == {"request", "load", "store", "loop_delay"}
    assert {"register", "lookup", "reserve", "commit", "acquire", "release"} <= set(latencies["request"])
    assert set(latencies["load"]) == set(latencies["store"]) == {"nvme0", "nvme1"}
    assert sum(histogram["count"] for histogram in latencies["store"].values()) > 0
    assert tuple(told["latency_bounds_s"]) == BOUNDS_S
    for histogram in (h for kind in latencies.values() for h in kind.values()):
        assert (
            sum(histogram["buckets"]) == histogram["count"] and len(histogram["buckets"]) == len(BOUNDS_S) + 1
        )
    (prefix,) = told["prefixes"]
    assert (prefix["tokens"], prefix["uses"], prefix["tokens_saved"]) == (320, 1, 320)
    assert "dram" in prefix["tiers"]
    assert {minute["minute_s"] for minute in told["minutes"]} <= set(range(began_s, began_s + 3600, 60))
    assert sum(minute["tokens"]["dram"] for minute in told["minutes"]) == 320
    assert (told["health"], told["region"], told["events"]) == ({"ok": True}, None, None)
    assert ("engine", 0) in {(session["label"], session["leases"]) for session in told["sessions"]}
    assert daemon.stop() == 0
    said = daemon.log()
    assert said.count("an engine is here") == said.count("an engine is gone") == 2, (
        "the writer and the reader"
    )


def test_a_loop_that_runs_is_measured(place: Place, serve: Serve) -> None:
    """Without a single engine the delay of the event loop is counted ten times a second."""
    serve(place)
    with Client(place.socket, timeout_s=10, attach=False) as client:
        give_up_s = time.monotonic() + TIMEOUT_S
        while client.live()["latencies"]["loop_delay"][""]["count"] < 3:
            assert time.monotonic() < give_up_s
            time.sleep(0.05)


def test_a_report_by_the_minute(place: Place, serve: Serve) -> None:
    """Rows of minutes with the fields of hours, in JSON and as a table; a restart keeps them."""
    daemon = serve(place)
    put(place.socket)
    with Client(place.socket, timeout_s=10) as client:
        client.lookup([namespace(client)], HASHES)
    done = kvstore("report", "--by", "minute,hour", "-o", "json", "--socket", place.socket)
    assert done.returncode == 0, done.stderr
    by = json.loads(done.stdout)["by"]
    assert list(by) == ["hour", "minute"]
    assert set(by["minute"][0]) == set(by["hour"][0]) - {"hour_s"} | {"minute_s"}
    assert sum(row["hit_tokens"] for row in by["minute"]) == 320 and len(by["minute"]) <= LIVE_MINUTES_MAX
    assert all(row["minute_s"] % 60 == 0 for row in by["minute"])
    done = kvstore("report", "--by", "minute", "--socket", place.socket)
    assert "by minute" in done.stdout and "minute (UTC)" in done.stdout and "320" in done.stdout
    done = kvstore("report", "-o", "json", "--socket", place.socket)
    assert "minute" not in json.loads(done.stdout)["by"], "hundreds of rows are told to who asks for them"
    assert daemon.stop() == 0
    serve(place)
    done = kvstore("report", "--by", "minute", "--socket", place.socket)
    assert (done.returncode, done.stderr) == (0, "") and "320" in done.stdout
