"""What a dead bucket costs: vLLM over a daemon whose region's bucket hangs, against one that has no region.

    engine 1   A without the connector   B with it, daemon without a region       new prompts          A B   B A …
    engine 2   A without the connector   B with it, daemon in a region            every prompt of B is durable in the
                                                                                  bucket, nowhere else, and it hangs

Two engines differ for good, by where their memory lies; so each is compared with itself, and `cost_percent` is what
B is further from A in the second one. The first requests of the second one wait for the bucket until the
breaker opens (`waits_s`). After that each is looked up, refused as unavailable, computed and saved.

    python -m benchmarks.dead_bucket [--pairs 60] [-o json]

The bucket is an S3 emulator behind a proxy that hangs on demand (tests/region/proxy.py). Needs vLLM on CPU,
and eight minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from json import dumps
from pathlib import Path
from typing import Any

from benchmarks.command import BenchError, as_table, parser_of, run, say
from benchmarks.hanging_tier import ARENA_BYTES, PROMPT_TOKENS
from benchmarks.miss_overhead import BLOCK_TOKENS, MODEL, WARM_UP_PAIRS, Engine, Pairs, connector
from benchmarks.pairs import Overhead, overhead
from kvstore.protocol.answers import Status
from kvstore.tools.bench.daemon import Daemon, settings
from kvstore.tools.bench.machine import Others, facts
from tests.objects import S3Server
from tests.region.proxy import Proxy
from tests.region.regions import S3_KEYS, init, regions_file
from tiers.dram.pages import choose_arena_path

AIM_PERCENT = 2.0
WAITS_MAX = 8  # requests until the breaker is open
PAUSE_S = 0.02  # between two requests
WAIT_S_MAX = 120.0
_say = partial(say, "dead_bucket")
Prompt = list[int]


class Run:
    """One daemon and one engine over it; `name` names their files. Context manager."""

    def __init__(self, args: argparse.Namespace, scratch: Path, name: str, **others: str | int) -> None:
        arena_directory = choose_arena_path(None, "auto", 4 * ARENA_BYTES, "bench").parent
        self.daemon = Daemon(scratch / name, settings(arena_directory, ARENA_BYTES, **others))
        try:
            self.engine = Engine(name, scratch, connector(self.daemon.socket_path), args.threads)
        except BaseException:
            self.daemon.stop()
            raise
        self.pairs = Pairs(self.engine, self.engine, self.daemon, False)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.stop()
        self.daemon.stop()

    def ask(self, prompt: Prompt, connected: bool = True) -> float:
        """Seconds until its one output token is there."""
        taken_s, _ = self.engine.run([prompt], 1, connected)
        time.sleep(PAUSE_S)
        return taken_s

    def compare(self, prompts: list[Prompt]) -> tuple[Overhead, float]:
        """How much longer these take with the connector than new ones without; and the median of those, in ms."""
        plain: list[float] = []
        connected: list[float] = []
        for number, prompt in enumerate(prompts):
            turns = [(plain, self.new_prompt(), False), (connected, prompt, True)]
            for seconds, tokens, connects in turns if number % 2 else reversed(turns):
                seconds.append(self.ask(tokens, connects))
                self.pairs._settle()
        plain, connected = plain[WARM_UP_PAIRS:], connected[WARM_UP_PAIRS:]
        return overhead(plain, connected), round(1e3 * statistics.median(plain), 2)

    def new_prompt(self) -> Prompt:
        return self.pairs._prompt(PROMPT_TOKENS)

    def status(self) -> Status:
        with self.daemon.client(attach=False) as client:
            return client.status()

    def durable_blocks(self) -> int | None:
        return (self.status()["region"] or {}).get("blocks")

    def is_refused(self) -> bool:
        """Whether no request is sent to the bucket any more."""
        (loads,) = [each for each in self.status()["breakers"] if each["name"] == "object loads"]
        return bool(loads["state"] != "closed")

    def hits(self) -> int:
        found: int = self.status()["counters"]["lookup_hit_blocks"]
        return found

    def until(self, true: Callable[[], bool], what: str) -> None:
        give_up_s = time.monotonic() + WAIT_S_MAX
        while not true():
            if time.monotonic() > give_up_s:
                raise BenchError(f"{what}: not within {WAIT_S_MAX:g} s")
            time.sleep(0.1)


def measure(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The report. Raises BenchError, DaemonError."""
    (scratch / "config.json").write_text(dumps(MODEL))
    count = WARM_UP_PAIRS + args.pairs
    os.environ.update(S3_KEYS)
    load = Others()
    with _server() as server, closing(Proxy(server.port)) as proxy:
        file = regions_file(scratch, "na", s3=server)
        init(file, "na")
        file.write_text(file.read_text().replace(server.endpoint, proxy.endpoint))
        region: dict[str, str | int] = {"regions_file": str(file), "region": "na", "durable__seen_times": 1}
        _say("without a region")
        with Run(args, scratch, "alone") as run:
            alone, alone_ms = run.compare([run.new_prompt() for _ in range(count)])
        _say("making prompts durable")
        with Run(args, scratch, "writer", **region) as run:
            prompts = [run.new_prompt() for _ in range(WAITS_MAX + count)]
            for prompt in prompts:
                run.ask(prompt)
                run.pairs._settle()
            blocks = len(prompts) * (PROMPT_TOKENS // BLOCK_TOKENS)
            run.until(lambda: run.durable_blocks() == blocks, f"{blocks} durable blocks")
        _say("with a bucket that hangs")
        with Run(args, scratch, "dead", **region) as run:
            run.until(lambda: run.durable_blocks() == blocks, "reading the feed")
            proxy.mode = "hang"
            waits_s = [run.ask(prompts.pop())]
            while not run.is_refused() and len(prompts) > count:
                waits_s.append(run.ask(prompts.pop()))
            hits = run.hits()
            dead, dead_ms = run.compare(prompts)
            if not run.is_refused() or run.hits() != hits:
                raise BenchError("the breaker of the bucket was not open all the time")
    return {
        "cost_percent": round(dead.percent - alone.percent, 2),
        "aim_percent": AIM_PERCENT,
        "alone_overhead_percent": alone.percent,
        "alone_overhead_low_percent": alone.low,
        "alone_overhead_high_percent": alone.high,
        "dead_overhead_percent": dead.percent,
        "dead_overhead_low_percent": dead.low,
        "dead_overhead_high_percent": dead.high,
        "alone_plain_ms": alone_ms,
        "dead_plain_ms": dead_ms,
        "waits_s": [round(wait_s, 2) for wait_s in waits_s],
        "ttft_pairs": args.pairs,
        "prompt_tokens": PROMPT_TOKENS,
        "engine_threads": args.threads,
        "other_cpu_percent": load.percent(),
        **facts(scratch, scratch),
    }


@contextmanager
def _server() -> Iterator[S3Server]:
    server = S3Server()
    try:
        yield server
    finally:
        server.stop()


def main() -> int:
    """See `benchmarks.command.run`."""
    parser = parser_of("dead_bucket", __doc__)
    parser.add_argument("--pairs", type=int, default=60, help="pairs of requests (default 60)")
    parser.add_argument("--threads", type=int, default=1, help="cores the engine computes with (default 1)")
    return run(parser, measure, as_table("the cost of a dead bucket"))


if __name__ == "__main__":
    sys.exit(main())
