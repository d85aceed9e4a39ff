"""What a miss costs: vLLM with our connector and nothing to find, against vLLM without it.

    A   without the connector                      new prompts of one length, in turn:
    B   with it (kv_both), daemon with NVMe        A B   B A   A B   B A …

Both are one engine in one process, which does without its connector for every other request:
two processes of the same engine differ by some per cent for good, by where their memory
happens to lie, and that is more than what is looked for.

Every prompt is new: B looks up, finds nothing, computes, and saves; its daemon writes down to
NVMe. Before the next request starts the saves of the last one are waited for, or A would pay
for them.

TTFT is the time of a whole request with one output token. Throughput is that of batches: what
B saves in the background of a batch competes with the batch for the cores.

    python -m benchmarks.miss_overhead [--pairs 120] [--threads 1] [--control] [-o json]

Besides the clock the report has the CPU time of the engines' own threads: what the connector does on
them, without what other processes took from the cores meanwhile, and without waiting.

--threads: cores that each engine computes with. With one of two cores the other is left for
the connector's threads and the daemon, as it is where a GPU computes; with all of them the
engine itself is in the way of the saves. --control leaves B without the connector, too: what
is reported then is the noise of the method.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command import parser_of, run, say
from benchmarks.errors import BenchError
from benchmarks.pairs import overhead
from kvstore.protocol.answers import Status
from kvstore.tools.bench.daemon import Daemon, settings
from kvstore.tools.bench.machine import Others, facts
from kvstore.tools.cli.output import print_table
from kvstore.units import exact_bytes
from tiers.dram.pages import choose_arena_path

MIB, GIB = 1 << 20, 1 << 30
AIM_PERCENT = 1.0
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BLOCK_TOKENS = 32
BATCH_PROMPTS = 8  # in one throughput run
CONCURRENCY = 4
BATCH_OUTPUT_TOKENS = 16
WARM_UP_PAIRS = 3
ENGINE_KV_BYTES = 512 * MIB
ARENA_BYTES, NVME_BYTES = 1 * GIB, 8 * GIB
START_S_MAX, ANSWER_S_MAX, STOP_S_MAX = 300.0, 120.0, 60.0

_say = partial(say, "miss_overhead")


class Engine:
    """A child process with one engine."""

    def __init__(
        self,
        name: str,
        model: Path,
        connector: dict[str, Any] | None,
        threads: int,
        *,
        switches: bool = True,
        core_apart: bool = False,
        kv_bytes: int = ENGINE_KV_BYTES,
        python: str = sys.executable,
    ) -> None:
        """Starts it and waits until it can be asked. switches: it can do without its connector for a request.
        core_apart: vLLM's engine core is in a process of its own. kv_bytes: of its own cache. python: of
        the environment that it runs in. Raises BenchError."""
        self._name = name
        self._log = model / f"{name}.log"
        job = {
            "model": str(model),
            "kv_transfer_config": connector,
            "block_tokens": BLOCK_TOKENS,
            "positions_max": json.loads((model / "config.json").read_text())["max_position_embeddings"],
            "kv_bytes": kv_bytes,
            "concurrency": CONCURRENCY,
            "switches": switches and connector is not None,
        }
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.miss_engine", json.dumps(job)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**_environment(threads), "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(core_apart))},
            )
        self._answer(START_S_MAX)

    def run(self, prompts: list[list[int]], output_tokens: int, connected: bool) -> tuple[float, float]:
        """Until all are answered: seconds that passed, and CPU seconds of the engine's thread. Raises BenchError."""
        answer = self.ask({"prompts": prompts, "output_tokens": output_tokens, "connected": connected})
        return answer["seconds"], answer["cpu_seconds"]

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request as `miss_engine` takes it, and its answer. Raises BenchError."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer(ANSWER_S_MAX)

    def stop(self) -> None:
        """End it; its last saves are finished first. Idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if readable else b""
        if not line:
            tail = self._log.read_text(errors="replace").splitlines()[-25:]
            self._process.kill()
            raise BenchError(f"engine {self._name} did not answer:\n" + "\n".join(tail))
        answer: dict[str, Any] = json.loads(line)
        return answer


class Timings:
    """Seconds of A and of B, pair by pair: on the clock, and of CPU on the engines' threads."""

    def __init__(self) -> None:
        self.clock: tuple[list[float], list[float]] = ([], [])
        self.cpu: tuple[list[float], list[float]] = ([], [])


class Pairs:
    """Asks A and B new prompts of the same length, next to each other, in turning order."""

    def __init__(self, engine: Engine, daemon: Daemon, control: bool) -> None:
        """control: neither side uses the connector."""
        self._engine = engine
        self._connects = (False, not control)
        self._daemon = daemon
        self._rng = random.Random()  # from the system: no prompt was ever asked before

    def measure(self, count: int, prompts: int, prompt_tokens: int, output_tokens: int) -> Timings:
        """The warm-up pairs are left out."""
        timings = Timings()
        for pair in range(-WARM_UP_PAIRS, count):
            for which in (0, 1) if pair % 2 else (1, 0):
                asked = [self._prompt(prompt_tokens) for _ in range(prompts)]
                taken_s, cpu_s = self._engine.run(asked, output_tokens, self._connects[which])
                if pair >= 0:
                    timings.clock[which].append(taken_s)
                    timings.cpu[which].append(cpu_s)
                self._settle()
        return timings

    def _prompt(self, tokens: int) -> list[int]:
        return [self._rng.randrange(3, int(str(MODEL["vocab_size"]))) for _ in range(tokens)]

    def _settle(self) -> None:
        """Until nothing is copied or written any more."""
        with self._daemon.client(attach=False) as client:
            committed = -1
            while committed != (now := client.status())["counters"]["committed"] or now["demoting_blocks"]:
                committed = now["counters"]["committed"]
                time.sleep(0.03)


def measure(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The report. Raises BenchError, DaemonError."""
    (scratch / "config.json").write_text(json.dumps(MODEL))
    arena_directory, chosen = with_nvme(scratch, ARENA_BYTES, NVME_BYTES)
    with Daemon(scratch / "daemon", chosen) as daemon:
        daemon.wait_until_prefaulted(ARENA_BYTES)
        _say("starting an engine")
        engine = Engine("connected", scratch, connector(daemon.socket_path), args.threads)
        try:
            others = Others()
            pairs = Pairs(engine, daemon, args.control)
            _say(f"TTFT: {args.pairs} pairs")
            ttft = pairs.measure(args.pairs, 1, args.prompt_tokens, 1)
            _say(f"throughput: {args.batches} pairs of batches")
            batch = pairs.measure(args.batches, BATCH_PROMPTS, args.prompt_tokens, BATCH_OUTPUT_TOKENS)
        finally:
            engine.stop()
        other_cpu_percent = others.percent()
        with daemon.client(attach=False) as client:
            status = client.status()
    if not args.control:
        _require_misses_and_saves(status, args)
    return {
        **_report(args, ttft, batch),
        "committed_blocks": status["counters"]["committed"],
        "nvme_blocks": status["counters"]["demoted"],
        "hit_blocks": status["counters"]["lookup_hit_blocks"],
        "other_cpu_percent": other_cpu_percent,
        **facts(scratch, arena_directory),
    }


def with_nvme(scratch: Path, arena_bytes: int, nvme_bytes: int) -> tuple[Path, dict[str, str | int]]:
    """Where the arena of a daemon goes, and its settings, with NVMe in `scratch`."""
    arena_directory = choose_arena_path(None, "auto", 2 * arena_bytes, "bench").parent
    place = {"nvme__directories": str(scratch / "nvme"), "nvme__capacity_bytes": exact_bytes(nvme_bytes)}
    return arena_directory, settings(arena_directory, arena_bytes, **place)


def _report(args: argparse.Namespace, ttft: Timings, batch: Timings) -> dict[str, Any]:
    tokens = BATCH_PROMPTS * (args.prompt_tokens + BATCH_OUTPUT_TOKENS)
    report: dict[str, Any] = {}
    for name, (plain, connected) in (
        ("ttft_overhead", ttft.clock),
        ("throughput_overhead", batch.clock),
        ("ttft_cpu_overhead", ttft.cpu),
        ("throughput_cpu_overhead", batch.cpu),
    ):
        found = overhead(plain, connected)
        report[f"{name}_percent"] = found.percent
        report[f"{name}_low_percent"], report[f"{name}_high_percent"] = found.low, found.high
    return {
        **report,
        "aim_percent": AIM_PERCENT,
        "ttft_plain_ms": round(1e3 * statistics.median(ttft.clock[0]), 2),
        "ttft_connector_ms": round(1e3 * statistics.median(ttft.clock[1]), 2),
        "throughput_plain_tokens_s": round(tokens / statistics.median(batch.clock[0]), 1),
        "throughput_connector_tokens_s": round(tokens / statistics.median(batch.clock[1]), 1),
        "control": args.control,
        "ttft_pairs": args.pairs,
        "throughput_pairs": args.batches,
        "prompt_tokens": args.prompt_tokens,
        "engine_threads": args.threads,
        "model_parameters": _parameters(),
    }


def _require_misses_and_saves(status: Status, args: argparse.Namespace) -> None:
    """Else the figures would be of a connector that does nothing, or of hits."""
    requests = WARM_UP_PAIRS + args.pairs + BATCH_PROMPTS * (WARM_UP_PAIRS + args.batches)
    wanted = requests * (args.prompt_tokens // BLOCK_TOKENS)
    counters = status["counters"]
    if counters["committed"] < 0.99 * wanted:
        raise BenchError(f"only {counters['committed']} of {wanted} blocks were saved")
    if counters["lookup_hit_blocks"]:
        raise BenchError(f"{counters['lookup_hit_blocks']} blocks were hits: prompts were not unique")


def connector(socket_path: Path) -> dict[str, Any]:
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "kvstore_socket": str(socket_path),
            "model_digest": "random weights of the miss benchmark",  # there are no files to digest
        },
    }


def _parameters() -> int:
    """Of MODEL: embedding and head, and the matrices of every layer."""
    size = {name: value for name, value in MODEL.items() if isinstance(value, int)}
    hidden, kv = size["hidden_size"], size["num_key_value_heads"] * size["head_dim"]
    queries = size["num_attention_heads"] * size["head_dim"]
    layer = hidden * (2 * queries + 2 * kv) + 3 * hidden * size["intermediate_size"]
    return 2 * size["vocab_size"] * hidden + size["num_hidden_layers"] * layer


def _environment(threads: int) -> dict[str, str]:
    return {
        **os.environ,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # an idle engine's threads must not spin on the other's cores
        "KMP_BLOCKTIME": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _print_table(report: dict[str, Any]) -> None:
    lines = []
    for name, plain, connected in (
        ("ttft", "ttft_plain_ms", "ttft_connector_ms"),
        ("throughput", "throughput_plain_tokens_s", "throughput_connector_tokens_s"),
        ("ttft_cpu", None, None),
        ("throughput_cpu", None, None),
    ):
        percent, low, high = (report[f"{name}_overhead{part}_percent"] for part in ("", "_low", "_high"))
        sides = (report[plain], report[connected]) if plain and connected else ("", "")
        verdict = "" if not plain else "met" if percent < AIM_PERCENT else "missed"
        lines.append((plain or name, *sides, f"{percent:+.2f} %", f"{low:+.2f} … {high:+.2f}", verdict))
    columns = ["figure", "vLLM", "with kvstore", "overhead", "95 %", f"aim < {AIM_PERCENT:g} %"]
    print_table("the cost of a miss", columns, lines)
    rest = [
        (name, value) for name, value in report.items() if not name.startswith(("ttft_o", "throughput_o"))
    ]
    print_table("conditions", ["field", "value"], rest)


def main(words: Sequence[str] | None = None) -> int:
    """See `benchmarks.command.run`."""
    parser = parser_of("miss_overhead", __doc__)
    parser.add_argument("--pairs", type=int, default=120, help="pairs of single requests (default 120)")
    parser.add_argument("--batches", type=int, default=20, help="pairs of batches (default 20)")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="per prompt (default 512)")
    parser.add_argument("--threads", type=int, default=1, help="cores each engine computes with (default 1)")
    parser.add_argument(
        "--control", action="store_true", help="no connector on either side: what is left is noise"
    )
    return run(parser, measure, _print_table, words)


if __name__ == "__main__":
    sys.exit(main())
