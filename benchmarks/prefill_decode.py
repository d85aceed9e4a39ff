"""The time to the first token where one server prefills and another decodes, behind vLLM's example of a proxy.

    waiting  asynchronous saves; the decode server waits for what is being stored
    sync     synchronous saves; the prefill server answers when all is stored
    none     no store; the decode server computes the prompt again

Three proxies, asked in turn (waiting sync none none sync waiting …), one prompt at a time, each prompt a new one. The
first two share a daemon and the decode server. A model with random weights, 152 million parameters. found: of the tokens
of whole blocks, what the decode server did not compute. Aim: 99 %.

    python -m benchmarks.prefill_decode [--rounds 10] [--threads 1] [--tokens 500 1000] [-o json]

Needs vLLM, and its source for the proxy (`make vllm-source`).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.command import as_table, parser_of, run
from benchmarks.miss_overhead import ARENA_BYTES, BLOCK_TOKENS, MODEL, connector
from benchmarks.servers import Server, api_server, proxy
from examples.demo.model import make_model
from kvstore.tools.bench.daemon import Daemon, settings
from kvstore.tools.bench.machine import Others, facts
from tiers.dram.pages import choose_arena_path

KINDS = ("waiting", "sync", "none")
WARM_UP_ROUNDS = 2
FOUND_AIM_PERCENT = 99.0
ENGINE_KV_BYTES = 512 << 20
ARENA_SHARE = 2  # of the arena's bytes that its directory must have free


def measure(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The report. Raises ServerError, DaemonError."""
    model = make_model(scratch)
    (model / "model.safetensors").unlink()  # only its tokenizer is wanted
    (model / "config.json").write_text(json.dumps(MODEL))
    arena_directory = choose_arena_path(None, "auto", ARENA_SHARE * ARENA_BYTES, "bench").parent
    others = Others()
    with ExitStack() as running:
        daemon = running.enter_context(Daemon(scratch / "daemon", settings(arena_directory, ARENA_BYTES)))
        daemon.wait_until_prefaulted(ARENA_BYTES)
        fronts, decode = _start(args, scratch, model, daemon, running)
        rounds, found_percent = _ask_in_turn(args, fronts)
        counted = decode.counters("vllm:kvstore_")
    medians = {f"{kind}_ms": round(1e3 * statistics.median(taken)) for kind, taken in rounds.items()}
    ratios = {
        f"waiting_to_{kind}": round(_ratio(rounds["waiting"], rounds[kind]), 3) for kind in ("sync", "none")
    }
    return {
        "rounds": args.rounds,
        **medians,
        **ratios,
        **{f"found_percent_{kind}": found_percent[kind] for kind in KINDS},
        "found_aim_percent": FOUND_AIM_PERCENT,
        "waits": int(counted["waits"]),
        "wait_ms": round(1e3 * counted["wait_seconds"], 1),
        "other_cpu_percent": others.percent(),
        **facts(scratch, arena_directory),
    }


def _start(
    args: argparse.Namespace, scratch: Path, model: Path, daemon: Daemon, running: ExitStack
) -> tuple[dict[str, Server], Server]:
    """The proxies by kind, and the decode server of those with the store. Raises ServerError."""

    def server(name: str, save: str | None) -> Server:
        transfer = None
        if save is not None:
            transfer = connector(daemon.socket_path)
            transfer["kv_connector_extra_config"]["save"] = save
        words = ("--load-format", "dummy", "--no-enable-prefix-caching")
        made = api_server(name, scratch, model, transfer, args.threads, ENGINE_KV_BYTES, words)
        running.callback(made.stop)
        return made

    decode, alone = server("decode", "async"), server("decode-none", None)
    prefills = {
        kind: server(f"prefill-{kind}", save)
        for kind, save in zip(KINDS, ("async", "sync", None), strict=True)
    }
    for each in (decode, alone, *prefills.values()):
        each.wait()
    fronts = {}
    for kind, prefill in prefills.items():
        fronts[kind] = proxy(f"proxy-{kind}", scratch, prefill, alone if kind == "none" else decode)
        running.callback(fronts[kind].stop)
    for front in fronts.values():
        front.wait()
    return fronts, decode


def _ask_in_turn(
    args: argparse.Namespace, fronts: dict[str, Server]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """By kind: seconds to the first token, and how much of whole blocks was found, in per cent."""
    rng = random.Random()  # prompts that nobody asked before
    vocabulary = int(str(MODEL["vocab_size"]))
    taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
    found, whole_tokens = dict.fromkeys(KINDS, 0), 0
    for number in range(-WARM_UP_ROUNDS, args.rounds):
        count = rng.randint(*args.tokens)
        whole_tokens += count // BLOCK_TOKENS * BLOCK_TOKENS if number >= 0 else 0
        for kind in KINDS if number % 2 else reversed(KINDS):
            prompt = [rng.randrange(3, vocabulary) for _ in range(count)]
            answer = fronts[kind].ask(prompt, 1)
            if number >= 0:
                taken[kind].append(answer.first_s)
                found[kind] += answer.cached
    return taken, {kind: round(100 * tokens / whole_tokens, 2) for kind, tokens in found.items()}


def _ratio(measured: list[float], limit: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(measured, limit, strict=True))


def main() -> int:
    """See `benchmarks.command.run`."""
    parser = parser_of("prefill_decode", __doc__)
    parser.add_argument("--rounds", type=int, default=10, help="of three prompts each (default 10)")
    parser.add_argument("--threads", type=int, default=1, help="cores each server computes with (default 1)")
    parser.add_argument(
        "--tokens", type=int, nargs=2, metavar=("LOW", "HIGH"), default=(500, 1000), help="of a prompt"
    )
    return run(parser, measure, as_table("the time to the first token, prefill and decode apart"))


if __name__ == "__main__":
    sys.exit(main())
