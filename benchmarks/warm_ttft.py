"""What a warm prompt costs: loaded from the daemon, against a hit in vLLM's own prefix cache.

    compute and save P   then, in turning order    A   ask P: its blocks are in vLLM's own cache
                                                   B   empty that cache, ask P: its blocks are loaded

A model with random weights (152 million parameters, or what --model says), prompts of 1,500 to 3,000 tokens, one
output token, so the time of a request is that to its first token. Both kinds of engine are measured, in one run: the
engine's core in a process of its own, as `vllm serve` has it, and in the caller's.

    python -m benchmarks.warm_ttft [--pairs 30] [--threads 1] [--load async|sync] [-o json]
                                   [--model config.json --tokens 8192 8192 --kv-gib 24 --arena-gib 40] [--offload]

--offload measures vLLM's own OffloadingConnector, with as much memory, in the place of ours (accelerators only).

The run fails if a request was not a hit of all its whole blocks.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command import parser_of, run, say
from benchmarks.errors import BenchError
from benchmarks.miss_overhead import BLOCK_TOKENS, MODEL, Engine, connector
from benchmarks.pairs import overhead
from kvstore.tools.bench.daemon import Daemon, settings
from kvstore.tools.bench.machine import Others, facts
from kvstore.tools.cli.output import print_table
from tiers.dram.pages import choose_arena_path

GIB = 1 << 30
AIM_PERCENT = 10.0
WARM_UP_PAIRS = 3
SETTLE_S_PER_TOKEN = 5e-5
_say = partial(say, "warm_ttft")
KINDS = {"core_apart": True, "core_in_process": False}


def measure(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The report. Raises BenchError, DaemonError."""
    (scratch / "config.json").write_text(json.dumps(args.model))
    arena_bytes = args.arena_gib * GIB
    arena_directory = choose_arena_path(None, "auto", 2 * arena_bytes, "bench").parent
    report: dict[str, Any] = {"aim_percent": AIM_PERCENT, "pairs": args.pairs, "load": args.load}
    others = Others()
    with Daemon(scratch / "daemon", settings(arena_directory, arena_bytes)) as daemon:
        daemon.wait_until_prefaulted(arena_bytes)
        chosen = offloading(arena_bytes) if args.offload else connector(daemon.socket_path)
        if not args.offload:
            chosen["kv_connector_extra_config"]["load"] = args.load
        for kind, core_apart in KINDS.items():
            kv_bytes = int(args.kv_gib * GIB)
            engine = Engine(
                kind, scratch, chosen, args.threads, switches=False, core_apart=core_apart, kv_bytes=kv_bytes
            )
            try:
                _say(f"{kind}: {args.pairs} pairs")
                computed, own, loaded = _pairs(engine, args, args.model["vocab_size"])
            finally:
                engine.stop()
            found = overhead(own, loaded)
            report |= {
                f"{kind}_overhead_percent": found.percent,
                f"{kind}_overhead_low_percent": found.low,
                f"{kind}_overhead_high_percent": found.high,
                f"{kind}_computed_ms": round(1e3 * statistics.median(computed), 2),
                f"{kind}_own_cache_ms": round(1e3 * statistics.median(own), 2),
                f"{kind}_loaded_ms": round(1e3 * statistics.median(loaded), 2),
            }
    return {**report, "other_cpu_percent": others.percent(), **facts(scratch, arena_directory)}


def offloading(capacity_bytes: int) -> dict[str, Any]:
    """vLLM's own cache in host memory."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": capacity_bytes},
    }


def _pairs(
    engine: Engine, args: argparse.Namespace, vocabulary: int
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of prompts computed, of hits in vLLM's own cache, and of loads. Raises BenchError."""
    rng = random.Random()  # prompts that nobody asked before
    taken: tuple[list[float], list[float], list[float]] = ([], [], [])
    for pair in range(-WARM_UP_PAIRS, args.pairs):
        prompt = [rng.randrange(3, vocabulary) for _ in range(rng.randint(*args.tokens))]
        asked = {"prompts": [prompt], "output_tokens": 1}
        computed_s = engine.ask(asked)["seconds"]
        _let_saves_through(engine, prompt)
        times = [computed_s, 0.0, 0.0]
        for which in (1, 2) if pair % 2 else (2, 1):
            answer = engine.ask({**asked, "reset": which == 2})
            if answer["cached"][0] < (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS:
                raise BenchError(
                    f"{answer['cached'][0]} of {len(prompt)} tokens were hits: not all whole blocks"
                )
            times[which] = answer["seconds"]
        if pair >= 0:
            for seconds, one in zip(taken, times, strict=True):
                seconds.append(one)
    return taken


def _let_saves_through(engine: Engine, prompt: list[int]) -> None:
    """Steps in which the last saves are reported: so long as they take, blocks are in use."""
    started = time.monotonic()
    while True:
        engine.ask({"prompts": [prompt[:8]], "output_tokens": 4})
        if time.monotonic() - started > len(prompt) * SETTLE_S_PER_TOKEN:
            return


def _print_table(report: dict[str, Any]) -> None:
    lines = []
    for kind in KINDS:
        percent, low, high = (report[f"{kind}_overhead{part}_percent"] for part in ("", "_low", "_high"))
        verdict = "met" if percent < AIM_PERCENT else "missed"
        times = tuple(report[f"{kind}_{what}_ms"] for what in ("computed", "own_cache", "loaded"))
        lines.append((kind, *times, f"{percent:+.2f} %", f"{low:+.2f} … {high:+.2f}", verdict))
    columns = [
        "engine",
        "computed, ms",
        "own cache, ms",
        "loaded, ms",
        "overhead",
        "95 %",
        f"aim < {AIM_PERCENT:g} %",
    ]
    print_table("the time to the first token of a warm prompt", columns, lines)
    print_table("conditions", ["field", "value"], [(k, v) for k, v in report.items() if "core_" not in k])


def _model(path: str) -> dict[str, Any]:
    """What a config.json says. Raises ArgumentTypeError."""
    try:
        model: dict[str, Any] = json.loads(Path(path).read_text())
        if min(model["vocab_size"], model["max_position_embeddings"]) > 3:
            return model
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{path} is no config.json of a model: {error}") from error
    raise argparse.ArgumentTypeError(f"{path}: vocab_size and max_position_embeddings are above 3")


def main() -> int:
    """See `benchmarks.command.run`."""
    parser = parser_of("warm_ttft", __doc__)
    parser.add_argument("--pairs", type=int, default=30, help="for each kind of engine (default 30)")
    parser.add_argument("--threads", type=int, default=1, help="cores each engine computes with (default 1)")
    parser.add_argument("--load", choices=("async", "sync"), default="async", help="(default async)")
    parser.add_argument(
        "--model", type=_model, default=MODEL, help="a config.json (default: 152 million parameters)"
    )
    parser.add_argument(
        "--tokens", type=int, nargs=2, metavar=("LOW", "HIGH"), default=(1500, 3000), help="of a prompt"
    )
    parser.add_argument("--kv-gib", type=float, default=0.5, help="of the engine's own cache (default 0.5)")
    parser.add_argument("--arena-gib", type=int, default=4, help="of the daemon's DRAM (default 4)")
    parser.add_argument("--offload", action="store_true", help="vLLM's OffloadingConnector in place of ours")
    return run(parser, measure, _print_table)


if __name__ == "__main__":
    sys.exit(main())
