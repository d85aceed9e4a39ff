"""What a dead NVMe costs: vLLM with our connector over a disk that hangs, against vLLM without a cache.

    A   without the connector                                       new prompts, in turn:
    B   with it; every prompt is held by NVMe only, which hangs     A B   B A   A B …

The prompts of B were computed and stored before, and others took their place in DRAM and in the
engine's own cache. Then every read and write of the disk hangs. The first request waits for a
stall and trips the breaker; it is reported by itself. After that each request of B is looked up,
refused as unavailable, and computed, as if there were no cache.

    python -m benchmarks.hanging_tier [--pairs 60] [--control] [-o json]

One engine in one process, which does without its connector for every other request, as in
`miss_overhead`. The disk is made to hang by a preloaded library (tests/kill/sick_disk.c), in an
unmodified daemon. Needs vLLM on CPU, a C compiler, and ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command import as_table, parser_of, run, say
from benchmarks.errors import BenchError
from benchmarks.miss_overhead import BLOCK_TOKENS, MODEL, Engine, Pairs, connector, with_nvme
from benchmarks.pairs import overhead
from kvstore.tools.bench.daemon import Daemon
from kvstore.tools.bench.machine import Others, facts

AIM_PERCENT = 5.0
PROMPT_TOKENS = 256
ARENA_BYTES = 128 << 20
ENGINE_KV_BYTES = 128 << 20
NVME_BYTES = 8 << 30
WARM_UP_PAIRS = 3
OTHERS_SHARE = 1.5  # of what DRAM, and the engine, hold: so many other prompts push the first ones out
_say = partial(say, "hanging_tier")
SHIM = Path(__file__).resolve().parents[1] / "tests" / "kill" / "sick_disk.c"


def measure(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The report. Raises BenchError, DaemonError."""
    (scratch / "config.json").write_text(json.dumps(MODEL))
    arena_directory, chosen = with_nvme(scratch, ARENA_BYTES, NVME_BYTES)
    switch = scratch / "sick"
    with _preloaded(scratch, switch):
        daemon = Daemon(scratch / "daemon", chosen)
    engine: Engine | None = None
    try:
        with daemon:
            try:
                _say("starting an engine")
                engine = Engine(
                    "connected",
                    scratch,
                    connector(daemon.socket_path),
                    args.threads,
                    kv_bytes=ENGINE_KV_BYTES,
                )
                found = _measure(args, engine, daemon, switch)
            finally:
                switch.unlink(missing_ok=True)  # what hangs comes back, so that all can stop
                if engine is not None:
                    engine.stop()
    finally:
        switch.unlink(missing_ok=True)
    return {**found, **facts(scratch, arena_directory)}


def _measure(args: argparse.Namespace, engine: Engine, daemon: Daemon, switch: Path) -> dict[str, Any]:
    pairs = Pairs(engine, daemon, args.control)
    stored = [pairs._prompt(PROMPT_TOKENS) for _ in range(1 + WARM_UP_PAIRS + args.pairs)]
    others = int(OTHERS_SHARE * max(ARENA_BYTES, ENGINE_KV_BYTES) / (PROMPT_TOKENS * _token_bytes()))
    _say(f"storing {len(stored)} prompts, and {others} others over them")
    for prompt in [*stored, *(pairs._prompt(PROMPT_TOKENS) for _ in range(others))]:
        engine.run([prompt], 1, connected=True)
        pairs._settle()
    switch.write_text("d")
    first_s, _ = engine.run([stored.pop()], 1, connected=not args.control)
    plain: list[float] = []
    hanging: list[float] = []
    load = Others()
    _say(f"TTFT: {args.pairs} pairs")
    for number, prompt in enumerate(stored):
        fresh = pairs._prompt(PROMPT_TOKENS)
        turns = [(plain, fresh, False), (hanging, prompt, not args.control)]
        for seconds, tokens, connected in turns if number % 2 else reversed(turns):
            seconds.append(engine.run([tokens], 1, connected)[0])
            time.sleep(0.02)
    other_cpu_percent = load.percent()
    with daemon.client(attach=False) as client:
        status = client.status()
    loads = next(b for b in status["breakers"] if b["name"] == "nvme loads")
    refused = status["counters"]["refused_unavailable"]
    if not args.control and (loads["trips"], refused) != (1, len(stored)):
        raise BenchError(f"{loads['trips']} trips and {refused} refusals, for {len(stored)} requests")
    extra = overhead(plain[WARM_UP_PAIRS:], hanging[WARM_UP_PAIRS:])
    return {
        "ttft_overhead_percent": extra.percent,
        "ttft_overhead_low_percent": extra.low,
        "ttft_overhead_high_percent": extra.high,
        "aim_percent": AIM_PERCENT,
        "ttft_plain_ms": round(1e3 * statistics.median(plain[WARM_UP_PAIRS:]), 2),
        "ttft_hanging_ms": round(1e3 * statistics.median(hanging[WARM_UP_PAIRS:]), 2),
        "first_request_s": round(first_s, 3),
        "breaker_trips": loads["trips"],
        "refused_lookups": refused,
        "control": args.control,
        "ttft_pairs": args.pairs,
        "prompt_tokens": PROMPT_TOKENS,
        "prompt_blocks": PROMPT_TOKENS // BLOCK_TOKENS,
        "engine_threads": args.threads,
        "other_cpu_percent": other_cpu_percent,
    }


@contextmanager
def _preloaded(scratch: Path, switch: Path) -> Iterator[None]:
    """What is started inside has a disk that hangs while the switch is there."""
    library = scratch / "sick_disk.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(SHIM), "-ldl"], check=True)
    before = os.environ.get("LD_PRELOAD")
    os.environ.update(LD_PRELOAD=str(library), SICK_DISK=str(switch))
    try:
        yield
    finally:
        del os.environ["LD_PRELOAD"], os.environ["SICK_DISK"]
        if before is not None:
            os.environ["LD_PRELOAD"] = before


def _token_bytes() -> int:
    """KV bytes of a token of MODEL, in bfloat16."""
    size = {name: value for name, value in MODEL.items() if isinstance(value, int)}
    return 2 * 2 * size["num_hidden_layers"] * size["num_key_value_heads"] * size["head_dim"]


def main() -> int:
    """See `benchmarks.command.run`."""
    parser = parser_of("hanging_tier", __doc__)
    parser.add_argument("--pairs", type=int, default=60, help="pairs of requests (default 60)")
    parser.add_argument("--threads", type=int, default=1, help="cores the engine computes with (default 1)")
    parser.add_argument("--control", action="store_true", help="no connector on either side: the noise")
    return run(parser, measure, as_table("the cost of a dead disk"))


if __name__ == "__main__":
    sys.exit(main())
