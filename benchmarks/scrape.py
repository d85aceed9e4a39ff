"""What being watched costs: lookups with /metrics scraped every second, against lookups without.

    A   /metrics is not scraped                        windows of some seconds, in turn:
    B   /metrics is scraped every second               A B   B A   A B …

One client asks for a prompt of 512 blocks that DRAM holds, again and again, as an engine's scheduler asks: with a ticket
and the length of its prompt. The scraper is a process of its own, as Prometheus is. The daemon's web process runs in
both, with its look at the daemon every five seconds: that is how a node is deployed; --control scrapes in neither.

    python -m benchmarks.scrape [--pairs 20] [--window 4] [--per-s 0] [--control] [-o json]

The quotient of each pair's p99 counts, and of them the median: `p99_percent` more with the scraper, aim 5. Needs no GPU and no
vLLM; three minutes. On a machine whose cores are all busy it measures the others.
"""

from __future__ import annotations

import argparse
import os
import select
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.command import as_table, free_port, parser_of, run
from benchmarks.pairs import overhead
from kvstore.client import Client, Namespace
from kvstore.tools.bench.daemon import Daemon, DaemonError, settings
from kvstore.tools.bench.machine import Others, facts
from kvstore.tools.bench.rounds import percentile_us
from tiers.dram.pages import choose_arena_path

AIM_PERCENT = 5.0
BLOCKS = 512
BLOCK_TOKENS = 16
HASH_BYTES = 32
RECORD_BYTES = 64 << 10
ARENA_BYTES = 128 << 20
SCRAPE_S = 1.0
WARM_UP_S = 2.0
START_S = 30.0


class Scraper:
    """Another process that scrapes while it is switched on. Context manager."""

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.scrape", "--scrape", url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def set(self, is_on: bool) -> int:
        """Begin, or stop; how many scrapes it has made. Raises DaemonError."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("on\n" if is_on else "off\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise DaemonError("the scraper ended")
        return int(line)

    def __enter__(self) -> Scraper:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def scrape(url: str) -> None:
    """The scraper's process: until stdin ends, every second while the last line was "on"."""
    is_on, scrapes, next_s = False, 0, 0.0
    while True:
        wait_s = max(0.0, next_s - time.monotonic()) if is_on else None
        if select.select([sys.stdin], [], [], wait_s)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            is_on, next_s = line == "on\n", time.monotonic()
            print(scrapes, flush=True)
        else:
            with urllib.request.urlopen(url, timeout=10) as reply:
                if b"\nkvstore_up 1.0\n" not in reply.read():
                    raise DaemonError(f"{url} shows no daemon")
            scrapes, next_s = scrapes + 1, next_s + SCRAPE_S


class Asker:
    """Looks its prompt up, and times it."""

    def __init__(self, client: Client, per_s: float) -> None:
        """per_s: lookups a second, 0: as many as one after the other can be. Raises DaemonError."""
        self._client, self._pause_s = client, 1 / per_s if per_s else 0.0
        self._space: Namespace = client.namespace(
            os.urandom(16), RECORD_BYTES, HASH_BYTES, BLOCK_TOKENS, {"model": "bench", "tenant": "bench"}
        )
        self._hashes = [os.urandom(HASH_BYTES) for _ in range(BLOCKS)]
        record = memoryview(os.urandom(RECORD_BYTES))
        if client.put(self._space, self._hashes, b"", [record] * BLOCKS) != BLOCKS:
            raise DaemonError("the arena does not hold the blocks to look up")
        self._ticket = 0

    def run(self, window_s: float) -> list[float]:
        """Seconds of each lookup in a window. Raises DaemonError, ClientError."""
        seconds: list[float] = []
        now = time.perf_counter()
        end, due = now + window_s, now
        while now < end:
            if self._pause_s:
                due += self._pause_s
                time.sleep(max(0.0, due - time.perf_counter()))
            self._ticket += 1
            started = time.perf_counter()
            found = self._client.lookup(
                [self._space], self._hashes, ticket=self._ticket, tokens=BLOCKS * BLOCK_TOKENS + 1
            )
            now = time.perf_counter()
            seconds.append(now - started)
            if found != BLOCKS:
                raise DaemonError(f"lookup found {found} of {BLOCKS} blocks")
        return seconds


def measure(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The report. Raises DaemonError, ClientError."""
    arena_directory = choose_arena_path(None, "auto", 2 * ARENA_BYTES, "bench").parent
    listen = f"127.0.0.1:{free_port()}"
    url = f"http://{listen}/metrics"
    with Daemon(scratch / "daemon", settings(arena_directory, ARENA_BYTES, web__listen=listen)) as daemon:
        daemon.wait_until_prefaulted(ARENA_BYTES)
        _wait_for(url)
        with Scraper(url) as scraper, daemon.client() as client:
            asker = Asker(client, args.per_s)
            asker.run(WARM_UP_S)
            load = Others()
            found = _measure(args, asker, scraper)
            return {**found, "other_cpu_percent": load.percent(), **facts(scratch, arena_directory)}


def _measure(args: argparse.Namespace, asker: Asker, scraper: Scraper) -> dict[str, Any]:
    quiet: list[list[float]] = []
    scraped: list[list[float]] = []
    scrapes = 0
    for number in range(args.pairs):
        turns = [(quiet, False), (scraped, not args.control)]
        for windows, is_on in turns if number % 2 == 0 else reversed(turns):
            before = scraper.set(is_on)
            windows.append(asker.run(args.window))
            scrapes += scraper.set(False) - before
    if not args.control and scrapes < args.pairs * int(args.window / SCRAPE_S):
        raise DaemonError(f"only {scrapes} scrapes in {args.pairs} windows of {args.window} s")
    report: dict[str, Any] = {}
    for name, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999)):
        a, b = ([percentile_us(window, share) for window in windows] for windows in (quiet, scraped))
        extra = overhead(a, b)
        report |= {
            f"{name}_quiet_us": round(statistics.median(a), 1),
            f"{name}_scraped_us": round(statistics.median(b), 1),
            f"{name}_percent": extra.percent,
            f"{name}_low_percent": extra.low,
            f"{name}_high_percent": extra.high,
        }
    return {
        **report,
        "aim_percent": AIM_PERCENT,
        "lookups_quiet": sum(map(len, quiet)),
        "lookups_scraped": sum(map(len, scraped)),
        "scrapes": scrapes,
        "control": args.control,
        "pairs": args.pairs,
        "window_s": args.window,
        "lookups_per_s": args.per_s or None,
        "prompt_blocks": BLOCKS,
    }


def _wait_for(url: str) -> None:
    """Until the daemon's web process listens. Raises DaemonError."""
    give_up_s = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10):
                return
        except OSError as error:
            if time.monotonic() > give_up_s:
                raise DaemonError(f"{url} does not answer: {error}") from error
        time.sleep(0.05)


def main() -> int:
    """See `benchmarks.command.run`."""
    parser = parser_of("scrape", __doc__)
    parser.add_argument("--pairs", type=int, default=20, help="pairs of windows (default 20)")
    parser.add_argument("--window", type=float, default=4.0, help="seconds of one window (default 4)")
    parser.add_argument(
        "--per-s", type=float, default=0.0, help="lookups a second; 0: without a pause (default)"
    )
    parser.add_argument("--control", action="store_true", help="scrape in neither: the noise")
    if sys.argv[1:2] == ["--scrape"]:  # the process of a Scraper
        scrape(sys.argv[2])
        return 0
    return run(parser, measure, as_table("the cost of being scraped"))


if __name__ == "__main__":
    sys.exit(main())
