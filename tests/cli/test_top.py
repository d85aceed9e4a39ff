"""kvstore top: figures between two answers, lines that fit, and a terminal that is as it was at the end."""

from __future__ import annotations

import copy
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.screen import Screen

from kvstore.client import Client
from kvstore.ledger.latencies import BOUNDS_S
from kvstore.ledger.sums import Sums
from kvstore.tools.cli.commands.top import Before
from kvstore.tools.cli.commands.top_screen import screen
from kvstore.tools.cli.commands.top_several import _cells
from kvstore.tools.cli.commands.top_watched import Watched
from kvstore.tools.web.figures import attention, figures, is_same_life
from tests.cli.terminal import STYLE
from tests.cli.test_service import HASHES, namespace, put
from tests.running import TIMEOUT_S, Daemon, Place, environment, kvstore
from tests.web.told import disk

Serve = Callable[..., Daemon]
NOW_S = 1_800_000_030.0
HOSTILE = "m\x1b[2J\x1b]0;owned\x07\n<script>"
OURS = re.compile(r"\x1b(\[(\?1049[hl]|\?25[hl]|H|0m|1m|1;31m))")


def histogram(**counts: int) -> dict[str, Any]:
    """counts: how many in the bucket with that number, as b10=3."""
    buckets = [0] * (len(BOUNDS_S) + 1)
    for name, count in counts.items():
        buckets[int(name[1:])] = count
    return {"count": sum(buckets), "sum_s": 1.0, "buckets": buckets}


def row(model: str, tenant: str, **tokens: int) -> dict[str, Any]:
    sums = Sums().sums_as_dict()
    return {
        "model": model,
        "tenant": tenant,
        "region": "",
        "lookups": 10,
        "prefill_s_saved": 0.0,
        "tokens_asked": sum(tokens.values()),
        "tokens": {**dict.fromkeys(sums["tokens"], 0), **tokens},  # type: ignore[call-overload]
        "bytes": dict.fromkeys(("stored", "loaded", "promoted", "demoted"), 0),
    }


def drawn(
    found: dict[str, Any], columns: int, rows: int, away: str = "", styled: bool = False, keys: str = ""
) -> list[str]:
    """The lines of a terminal of that size."""
    console = Console(
        width=columns,
        height=rows,
        force_terminal=styled,
        color_system="standard" if styled else None,
        _environ={},
    )
    with console.capture() as page:
        console.print(Screen(screen(console, found, away, [HOSTILE] * bool(away), keys)))
    return [line if styled else line.rstrip() for line in page.get().splitlines()]


def session(label: str, number: int, requests: int = 0) -> dict[str, Any]:
    return {
        "id": number, "label": label, "pid": 40 + number, "uid": 0, "model": "llama", "tenant": "acme", "namespaces": 1,
        "connected_s": 9.0, "requests": requests, "asked_blocks": 10, "hit_blocks": 9, "stored_bytes": 0, "loaded_bytes": 4096 * requests,
        "leases": 0,
    }  # fmt: skip


def live(uptime_s: float = 100.0, **other: Any) -> dict[str, Any]:
    """An answer to Live, small."""
    return {
        "now_s": NOW_S + uptime_s - 100.0, "uptime_s": uptime_s, "version": "1", "instance": "i" * 32, "pid": 7,
        "health": {"ok": True}, "adopting": False, "sessions_total": 2, "namespaces_total": 3,
        "host": "gpu-7", "region_name": "eu", "sessions": [session("vllm", 1)], "holdings": [], "prefixes": [
            {"block_hash": "ab" * 32, "model": "llama", "tenant": "acme", "tokens": 640, "uses": 3, "tokens_saved": 1920,
             "last_s": NOW_S - 60, "tiers": ["dram"]}],
        "tokens": [row("llama", "acme", dram=600, never_seen=300, engine=100)], "breakers": [], "queues": [],
        "tiers": [{"name": "dram", "capacity_bytes": 1 << 30, "used_bytes": 1 << 29, "records": 5}],
        "latencies": {"request": {"lookup": histogram(b8=10)}, "load": {}, "store": {}, "loop_delay": {}},
        "latency_bounds_s": BOUNDS_S, "region": None, "events": None, "minutes": [], "disks": [disk(0), disk(1)], "problems": [],
        **other,
    }  # fmt: skip


def test_rates_are_those_of_the_interval() -> None:
    """Differences of two answers by the seconds between them; shares are of what engines asked for, their own caches aside."""
    old = live()
    grown = row("llama", "acme", dram=600 + 60, nvme=20, never_seen=300 + 20, engine=100 + 50)
    grown.update(lookups=14, prefill_s_saved=5.0, bytes={**grown["bytes"], "loaded": 2048})
    new = live(102.0, tokens=[row("quiet", "", dram=5), grown])
    new["latencies"]["request"] = {"lookup": histogram(b8=12, b10=2), "acquire": histogram(b12=1)}
    found = figures(old, new)
    assert (found["lookups_per_s"], found["tokens_per_s"]) == (7.0, 77.5), (
        "a row that is new counts from nothing"
    )
    assert found["loaded_bytes_per_s"] == 1024 and found["prefill_s_saved_per_s"] == 2.5
    now = {hit["tier"]: hit["now"] for hit in found["hits"]}
    assert now == {"all": round(85 / 105, 4), "dram": round(65 / 105, 4), "nvme": round(20 / 105, 4)}
    assert [(miss["reason"], miss["now"]) for miss in found["misses"]] == [("never_seen", round(20 / 105, 4))]
    assert [(one["what"], one["per_s"]) for one in found["latencies"]] == [("lookup", 2.0), ("acquire", 0.5)]
    assert found["latencies"][0]["p99_s"] <= BOUNDS_S[10]
    models = [(one["model"], one["tokens_per_s"], one["hit_ratio"]) for one in found["models"]]
    assert models == [("llama", 75.0, 0.8), ("quiet", 2.5, 1.0)]


def test_minutes_are_those_that_were_asked_for() -> None:
    """1, 5 and 15 minutes: whole ones by the clock and the one under way, and nothing older."""
    start_s = NOW_S // 60 * 60
    minutes = [
        {"minute_s": start_s - 60 * ago, "tokens": {"dram": hits, "never_seen": 100 - hits}}
        for ago, hits in ((16, 100), (15, 0), (5, 40), (1, 60), (0, 100))
    ]
    (total, _) = figures(live(98.0), live(minutes=minutes))["hits"]
    assert (total["now"], total["1_min"], total["5_min"], total["15_min"]) == (None, 0.8, 0.6667, 0.5)


def test_clients_have_rates_of_the_interval() -> None:
    """What each asked for and was given in the interval; one that came meanwhile counts from nothing, who asks most is first."""
    old = live(sessions=[session("a", 1, 100), session("b", 2, 50)])
    found = figures(
        old, live(102.0, sessions=[session("a", 1, 102), session("b", 2, 60), session("c", 3, 2)])
    )
    rates = [(one["label"], one["requests_per_s"], one["loaded_bytes_per_s"]) for one in found["sessions"]]
    assert rates == [("b", 5.0, 20_480.0), ("a", 1.0, 4096.0), ("c", 1.0, 4096.0)]


def test_what_needed_attention_before_is_kept() -> None:
    """A line that is over is shown with its times, once, whatever its numbers were; one that is there still is not."""
    before = Before()
    before.note(["nvme0: open, tried again in 3 s", "queue loads: 51 of 100"], NOW_S)
    before.note(["nvme0: open, tried again in 2 s", "queue loads: 60 of 100"], NOW_S + 1)
    assert before.lines() == []
    before.note(["queue loads: 70 of 100"], NOW_S + 2)
    (line,) = before.lines()
    assert line == "08:00:30 to 08:00:31  nvme0: open, tried again in 2 s"


def test_a_restart_is_no_difference() -> None:
    """Another life, or the same answer twice, is nothing to subtract; a clock that was set back meanwhile is no reason not to."""
    assert is_same_life(live(1), live(2)) and is_same_life(live(1), live(5, now_s=1.0))
    for other in (live(1), live(5, pid=8), live(5, instance="x")):
        assert not is_same_life(live(1), other)


def test_an_account_that_was_mended_is_no_negative_rate() -> None:
    """Hits that became misses after they were told: no rate below 0, no share above 1."""
    new = live(101.0, tokens=[row("llama", "acme", dram=500, never_seen=405, engine=100)])
    found = figures(live(), new)
    assert found["hits"][0]["now"] == 0.0 and found["models"][0]["hit_ratio"] == 0.0
    assert all(0 <= miss["now"] <= 1 for miss in found["misses"])


def test_what_needs_attention_is_told() -> None:
    """Each problem that the daemon knows, with since when and how often; a start that goes on."""
    assert attention(live()) == []
    problem = {"kind": "credentials", "subject": "na", "level": "problem", "text": "403", "fix": "new ones"}
    told = attention(live(problems=[{**problem, "since_s": NOW_S - 90, "count": 129}], adopting=True))
    assert told[0] == "credentials na: 403 (for 90 s, 129 times)"
    assert told[1].startswith("start: ")


@pytest.mark.parametrize("columns", [1, 7, 20, 40, 59, 60, 80, 120, 300])
@pytest.mark.parametrize("rows", [1, 3, 10, 24, 100])
def test_lines_fit_any_terminal(columns: int, rows: int) -> None:
    """Never more lines than rows nor wider ones than columns, with wide characters, hostile and endless names."""
    tokens = [row(name, HOSTILE * 9, dram=5) for name in ("模型" * 40, HOSTILE, "x" * 400, "", "b")]
    sessions = [session(HOSTILE * n, n) for n in range(70)]
    found = figures(live(), live(101.0, tokens=tokens, sessions=sessions, host=HOSTILE, region_name=HOSTILE))
    found["attention"] = [f"{HOSTILE} {n}" for n in range(9)]
    for styled in (False, True):
        lines = drawn(found, columns, rows, HOSTILE, styled)
        assert 1 <= len(lines) <= rows
        plain = [OURS.sub("", line) for line in lines]
        assert all(cell_len(line) <= columns for line in plain), plain
        assert not any(char in line for line in plain for char in "\x1b\x07\n\r")


def test_what_a_terminal_of_80_by_24_shows() -> None:
    """Who it is, rates, hits beside reasons, tiers beside latencies, attention, and models as far as there is room."""
    tokens = [row(f"model {n}", "acme", dram=100 + n) for n in range(30)]
    found = figures(live(), live(101.0, tokens=tokens))
    found["attention"] = [f"line {n}" for n in range(20)]
    lines = drawn(found, 80, 24)
    assert (
        len(lines) == 24 and lines[0].startswith("kvstore gpu-7 in eu  ok  up ") and lines[0].endswith(" UTC")
    )
    page = "\n".join(lines)
    assert re.search(r"^hit rate +now +1 min +5 min +15 min$", page, re.MULTILINE)
    assert re.search(r"^! and 1\d more: kvstore status$", page, re.MULTILINE)
    assert re.search(r"^model +tenant +hits +tokens/s +lookups/s +loaded +stored$", page, re.MULTILINE)
    assert "… and " in page and re.search(r"^client +pid +since", page, re.MULTILINE)
    found["attention"] = found["attention"][:3]
    roomy = [*drawn(found, 120, 40, keys="q ends it")]
    assert roomy[-1] == "q ends it" and sum(not line for line in roomy) <= 8
    page = "\n".join(roomy)
    assert re.search(
        r"^client +pid +model +since +requests/s +loaded +stored +hits +leases$", page, re.MULTILINE
    )
    assert re.search(r"^prefix +model +saved +tokens +hits +last hit +lives in$", page, re.MULTILINE)
    narrow = "\n".join(drawn(found, 50, 60))
    assert re.search(r"^hit rate +now +1 min +15 min$", narrow, re.MULTILINE) and "lookups/s   " not in narrow


# -- with a daemon --


def test_once_is_for_programs_and_pipes(place: Place, serve: Serve) -> None:
    """Two looks, one interval apart: a document with the documented fields, or the same as text without a single style."""
    serve(place)
    put(place.socket)
    with Client(place.socket, timeout_s=10) as client:
        client.lookup([namespace(client)], HASHES, ticket=1)
    done = kvstore("top", "--once", "-o", "json", "--interval", "0.2s", "--socket", place.socket)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert set(document) == {
        "now_s", "instance", "host", "region_name", "version", "uptime_s", "sessions", "prefixes", "holdings", "health", "problems", "adopting", "span_s", "sessions_total", "namespaces_total",
        "lookups_per_s", "tokens_per_s", "prefill_s_saved_per_s", "loaded_bytes_per_s", "stored_bytes_per_s",
        "promoted_bytes_per_s", "demoted_bytes_per_s", "hits", "misses", "tiers", "latencies", "attention", "models",
    }  # fmt: skip
    assert document["hits"][0] == {"tier": "all", "now": None, "1_min": 1.0, "5_min": 1.0, "15_min": 1.0}
    (model,) = document["models"]
    assert (model["model"], model["tokens_per_s"], model["hit_ratio_since_start"]) == ("test", 0.0, 1.0)
    assert 0.2 <= document["span_s"] < TIMEOUT_S
    done = kvstore("top", "--interval", "0.2s", "--socket", place.socket)
    assert done.returncode == 0 and "hit rate" in done.stdout and "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--interval", "0"], 2, "top: --interval 0: allowed are 0.1 s to 1 h"),
        (["--interval", "soon"], 2, "top: --interval soon: not a time"),
        ([], 4, "No such file or directory"),
    ],
)
def test_what_is_wrong_is_one_line(place: Place, words: list[str], code: int, says: str) -> None:
    """Wrong intervals are 2, no daemon is 4."""
    done = kvstore("top", "--socket", place.socket, *words)
    assert (
        (done.returncode, done.stdout) == (code, "") and says in done.stderr and done.stderr.count("\n") == 1
    )


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self.ours, self.theirs = pty.openpty()
        self.resize(80, 24)
        self.before = termios.tcgetattr(self.theirs)
        environ = environment(TERM="xterm")
        environ.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvstore", *words],
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            env=environ,
        )
        self.shown = ""

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, pattern: str) -> str:
        """Read on until it is shown, from here on, in whatever style."""
        start, give_up_s = len(self.shown), time.monotonic() + TIMEOUT_S
        while not re.search(pattern, STYLE.sub("", self.shown[start:])):
            assert time.monotonic() < give_up_s, self.shown[-2000:]
            if select.select([self.ours], [], [], 0.1)[0]:
                self.shown += os.read(self.ours, 65536).decode(errors="replace")
        return self.shown[start:]


@contextmanager
def terminal(*words: str) -> Iterator[Terminal]:
    opened = Terminal(*words)
    try:
        yield opened
    finally:
        if opened.process.poll() is None:
            opened.process.kill()
        opened.process.wait(TIMEOUT_S)
        os.close(opened.ours)
        os.close(opened.theirs)


@pytest.mark.parametrize("end", ["q", signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_the_terminal_is_as_it_was(place: Place, serve: Serve, end: str | signal.Signals) -> None:
    """However it ends: the screen is left, the cursor is back, keys are echoed again; a hostile name never got through."""
    serve(place)
    with Client(place.socket, timeout_s=10, label=HOSTILE) as client:
        client.lookup([client.namespace(b"h" * 16, 4096, 32, 16, {"model": HOSTILE})], HASHES, ticket=1)
    with terminal("top", "--interval", "0.2s", "--socket", str(place.socket)) as top:
        top.until("owned")
        assert termios.tcgetattr(top.theirs) != top.before, "keys are read as they are typed"
        top.resize(40, 30)
        top.process.send_signal(signal.SIGWINCH)
        top.until(r"hits +tokens/s *\r?\n")  # at 80 columns others stand behind
        if isinstance(end, str):
            os.write(top.ours, end.encode())
        else:
            top.process.send_signal(end)
        top.until(re.escape("\x1b[?1049l"))
        assert top.process.wait(TIMEOUT_S) == 0
        assert termios.tcgetattr(top.theirs) == top.before
        assert "\x1b" not in OURS.sub("", top.shown) and "\x07" not in top.shown


def test_several_daemons_are_a_line_each(place: Place, serve: Serve, tmp_path: Path) -> None:
    """--socket a,b: each with its figures, one that is away says why and hides nobody; none of them there is exit code 4."""
    serve(place)
    both, none = f"{place.socket},{tmp_path / 'none'}", f"{tmp_path / 'none'},{tmp_path / 'other'}"
    done = kvstore("top", "--socket", both, "--interval", "0.2s", "-o", "json")
    there, away = json.loads(done.stdout)["nodes"]
    assert done.returncode == 4 and (there["away"], away["figures"]) == ("", None)
    assert there["figures"]["tiers"][0]["name"] == "dram" and "No such file" in away["away"]
    told = kvstore("top", "--socket", both, "--interval", "0.2s").stdout
    assert re.search(rf"{str(place.socket)[-20:]} +ok ", told), told
    assert re.search(rf"{str(tmp_path / 'none')[-20:]} +AWAY", told)
    one = Watched(str(place.socket))
    one.document = {**there["figures"], "problems": [{"level": "warning"}], "attention": ["a warning"]}
    assert _cells(one)[1] == "1 warning"  # as a single one says it
    done = kvstore("top", "--socket", none)
    assert done.returncode == 4 and done.stderr.count("\n") == 2
    with terminal("top", "--interval", "0.2s", "--socket", both) as top:
        top.until("AWAY")
        os.write(top.ours, b"q")
        assert top.process.wait(TIMEOUT_S) == 0


def test_a_daemon_that_goes_away_is_waited_for(place: Place, serve: Serve) -> None:
    """After kill -9 the old figures are shown as old; the next daemon is found without a key being touched."""
    daemon = serve(place)
    with terminal("top", "--interval", "0.2s", "--socket", str(place.socket)) as top:
        top.until("  ok  ")
        daemon.stop(signal.SIGKILL)
        top.until("AWAY")
        assert "the figures are old" in top.until("the figures are old")
        serve(place)
        top.until("  ok  ")
        os.write(top.ours, b"q")
        assert top.process.wait(TIMEOUT_S) == 0


def test_looking_changes_nothing() -> None:
    """Neither answer is touched by being looked at."""
    old, new = live(), live(101.0)
    before = copy.deepcopy((old, new))
    drawn(figures(old, new), 80, 24)
    assert (old, new) == before
