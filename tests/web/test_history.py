"""Samples: what is told of an interval is what was counted in it."""

from __future__ import annotations

import gzip
import math
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvstore.constants import WEB_HISTORY_S
from kvstore.ledger.latencies import BOUNDS_S, Histogram
from kvstore.tools.web.history import SAMPLES_MAX, History
from kvstore.tools.web.samples import Sample, latency
from tests.running import Place
from tests.web.asked import Serve, Watching, get, until
from tests.web.test_metrics import traffic

START_S = 1_800_000_000.0


class Daemon:
    """A made-up one: what it has counted, and its answers."""

    def __init__(self, now_s: float = START_S, pid: int = 7) -> None:
        self.born_s, self.now_s, self.pid = now_s, now_s, pid
        self.lookups, self.tokens = 0, {"dram": 0, "never_seen": 0}
        self.times = Histogram()
        self.minutes: list[dict[str, Any]] = []

    def count(self, hits: int, missed: int) -> None:
        self.lookups += 1
        self.tokens["dram"] += hits
        self.tokens["never_seen"] += missed
        self.times.add(0.0001)

    def minute(self, minute_s: float, hits: int) -> None:
        row = {
            "minute_s": minute_s,
            "lookups": 1,
            "tokens": {"dram": hits},
            "bytes": {},
            "prefill_s_saved": 0.5,
        }
        self.minutes.append(row)

    def live(self) -> dict[str, Any]:
        row = {
            "lookups": self.lookups,
            "tokens_asked": sum(self.tokens.values()),
            "tokens": dict(self.tokens),
            "bytes": {"stored": 10 * self.lookups},
            "prefill_s_saved": 0.25 * self.lookups,
        }
        return {
            "pid": self.pid,
            "now_s": self.now_s,
            "uptime_s": round(self.now_s - self.born_s, 1),
            "tokens": [
                row,
                {**row, "tokens": {}, "lookups": 0, "tokens_asked": 0, "bytes": {}, "prefill_s_saved": 0.0},
            ],
            "tiers": [{"name": "dram", "used_bytes": 5}],
            "latencies": {"request": {"lookup": self.times.as_dict(), "ping": self.times.as_dict()}},
            "latency_bounds_s": BOUNDS_S,
            "minutes": self.minutes,
        }


def told(history: History, since_s: float = 0.0) -> list[Sample]:
    return msgspec.json.decode(history.since(since_s), type=list[Sample])


def test_a_sample_is_what_came_between_two_answers() -> None:
    """Counts are differences, gauges the newest, latencies those of the interval, and only of what engines wait for."""
    daemon, history = Daemon(), History()
    daemon.count(100, 20)
    history.note(daemon.live(), at_s=1.0)
    daemon.count(300, 0)
    daemon.now_s += 5
    history.note(daemon.live(), at_s=6.0)
    sample = told(history)[-1]
    assert (sample.t, sample.s, sample.gap, sample.minute) == (START_S + 5, 5.0, True, False)
    assert (sample.lookups, sample.asked, sample.tokens) == (1, 300, {"dram": 300})
    assert (sample.bytes, sample.saved_s, sample.used) == ({"stored": 10}, 0.25, {"dram": 5})
    assert list(sample.requests) == ["lookup"]
    count, p50_s, p99_s = sample.requests["lookup"]
    assert count == 1 and 64e-6 <= p50_s <= p99_s <= 128e-6


def test_the_minutes_of_a_daemon_come_before_its_samples() -> None:
    """Who looks for the first time shows the minutes since the daemon's start, those in which nothing happened as well."""
    daemon, history = Daemon(), History()
    daemon.now_s = START_S + 200
    daemon.minute(START_S, 100)
    daemon.minute(START_S + 120, 50)
    assert history.is_new(daemon.live(), 0.0)
    history.note(daemon.live(), at_s=0.0)
    samples = told(history)
    assert [(s.t - START_S, s.s) for s in samples] == [(60, 60), (120, 60), (180, 60), (200, 20)]
    assert [s.tokens for s in samples] == [{"dram": 100}, {}, {"dram": 50}, {}]
    assert all(s.minute for s in samples) and [s.gap for s in samples] == [True, False, False, False]
    daemon.now_s += 5
    assert not history.is_new(daemon.live(), 5.0)
    history.note(daemon.live(), at_s=5.0)
    assert not told(history)[-1].gap


def test_another_daemon_begins_anew() -> None:
    """After a restart no count is negative, and nothing is drawn across the time between."""
    history = History()
    old = Daemon()
    history.note(old.live(), at_s=0.0)
    old.count(1000, 1000)
    old.now_s += 5
    history.note(old.live(), at_s=5.0)
    for pid in (7, 8):  # in a container it is the same number
        new = Daemon(START_S + 100 * pid, pid)
        new.now_s += 10
        assert history.is_new(new.live(), at_s=100.0 * pid)
        new.minute(new.now_s // 60 * 60, 3)
        history.note(new.live(), at_s=100.0 * pid)
        first = next(s for s in told(history) if s.t > new.born_s)
        assert first.gap and first.t - first.s >= new.born_s
    assert all(count >= 0 for s in told(history) for count in (s.lookups, s.asked, *s.tokens.values()))


def test_a_daemon_that_did_not_answer_leaves_a_gap() -> None:
    """Nothing is told of the time of a hang, what was counted in it neither; the first sample after it says so."""
    daemon, history = Daemon(), History()
    history.note(daemon.live(), at_s=0.0)
    daemon.now_s += 5
    history.note(daemon.live(), at_s=5.0)
    daemon.count(7, 0)
    daemon.now_s += 60
    history.note(daemon.live(), at_s=65.0)
    daemon.count(3, 0)
    daemon.now_s += 5
    history.note(daemon.live(), at_s=70.0)
    sample = told(history)[-1]
    assert (sample.gap, sample.s, sample.tokens) == (True, 5.0, {"dram": 3})
    assert not any(s.lookups for s in told(history)[:-1])


def test_a_clock_that_is_set_back_stops_nothing() -> None:
    """Who asks for what came since the last sample gets all there is then, in order; and what is newer from there on."""
    daemon, history = Daemon(), History()
    for at_s in range(0, 3600, 5):
        history.note(daemon.live(), at_s=float(at_s))
        daemon.now_s += 5
    known_s = told(history)[-1].t
    back_s = 1800.0
    daemon.now_s, daemon.born_s = daemon.now_s - back_s, daemon.born_s - back_s
    history.note(daemon.live(), at_s=3600.0)
    samples = told(history, known_s)
    times = [sample.t for sample in samples]
    assert times[-1] == START_S + 3600 - back_s and times == sorted(times) and times[0] < times[-1] - 1000
    assert told(history, times[-1]) == []
    daemon.now_s += 5
    history.note(daemon.live(), at_s=3605.0)
    assert [sample.t for sample in told(history, times[-1])] == [daemon.now_s]


def test_history_is_bounded() -> None:
    """Six hours of samples and no more, whose JSON is a few hundred bytes each."""
    daemon, history = Daemon(), History()
    for n in range(SAMPLES_MAX + 100):
        daemon.count(n, 1)
        daemon.now_s += 5
        history.note(daemon.live(), at_s=5.0 * n)
    body = history.since(0.0)
    assert len(msgspec.json.decode(body)) == SAMPLES_MAX == WEB_HISTORY_S / 5
    assert len(body) / SAMPLES_MAX < 500
    assert [s.t for s in told(history, daemon.now_s - 10)] == [daemon.now_s - 5, daemon.now_s]


@given(st.lists(st.floats(1e-7, 60), min_size=1), st.lists(st.floats(1e-7, 60)))
def test_percentiles_are_within_a_factor_of_two(new: list[float], old: list[float]) -> None:
    """Of the durations that came since, whatever came before."""
    histogram = Histogram()
    for seconds in old:
        histogram.add(seconds)
    before = list(histogram.buckets)
    for seconds in new:
        histogram.add(seconds)
    found = latency(BOUNDS_S, before, histogram.buckets)
    assert found is not None
    count, p50_s, p99_s = found
    assert count == len(new)
    for share, value_s in ((0.5, p50_s), (0.99, p99_s)):
        true_s = sorted(new)[math.ceil(share * len(new)) - 1]
        assert true_s / 2.001 <= value_s <= 2.001 * true_s or max(true_s, value_s) <= 1e-6
    assert latency(BOUNDS_S, histogram.buckets, histogram.buckets) is None


def test_the_page_gets_a_daemons_life(place: Place, serve: Serve) -> None:
    """What happened before somebody looked is there as minutes, what happens then as samples; the newest is in /live.json, too."""
    serve(place)
    traffic(place, tenant="before")
    with Watching(place.socket) as web:

        def samples() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = get(web.url, "/history.json").json()["samples"]
            return found

        until(samples, "minutes")
        assert sum(s["tokens"].get("dram", 0) for s in samples() if s["minute"]) == 256
        traffic(place, tenant="later")
        until(lambda: any(s["lookups"] == 1 and not s["minute"] for s in samples()), "a sample has it")
        (sample,) = (s for s in samples() if s["lookups"] and not s["minute"])
        assert sample["tokens"] == {"dram": 256, "never_seen": 384}
        assert sample["requests"]["lookup"][0] == 1
        live = get(web.url, "/live.json").json()
        assert live["up"] and live["live"]["tiers"][0]["name"] == "dram" and "minutes" not in live["live"]
        assert live["sample"] in samples()
        assert (
            live["kinds"]["dram"] == "hit"
            and live["kinds"]["engine"] == "engine"
            and live["kinds"]["slower"] == "miss"
        )
        assert abs(live["now_s"] - live["live"]["now_s"] - live["age_s"]) < 0.1
        newest = samples()[-1]["t"]
        path = f"/history.json?since={newest - 0.001}"
        assert get(web.url, path).json()["samples"][-1]["t"] >= newest
        packed = get(web.url, path, Accept_Encoding="gzip")
        assert packed.headers["content-encoding"] == "gzip" and b'"samples"' in gzip.decompress(packed.body)
