"""Compares ours with vLLM's own offloading and LMCache: the same model, the same prompts, the same bytes, in one run.

    a prompt P, new    A   each engine computes P and stores it
                       B   the engine forgets it and is asked again: from its store, in turning order
                       C   it is asked once more: from vLLM's own prefix cache, which is the limit
    64 blocks of 2 MiB      put and get by processes of the same machine, against one thread's memcpy

All engines are there all the while, each with its core in a process of its own; figures are medians. Prompts are whole
chunks of 256 tokens (LMCache's) and a few tokens more. LMCache runs as its multiprocess server with shared memory. Its bench
copies each block out of 32 layers, `Client.put` copies it from one buffer; ours checksums every byte, LMCache none.

    python -m benchmarks.peers [--rounds 12] [--threads 1] [--lmcache ENVIRONMENT] [--offload] [-o json]

--lmcache names a virtual environment with LMCache in it, and vLLM for the first part (benchmarks/README.md says how to make one).
--offload adds vLLM's OffloadingConnector, which needs an accelerator. The run fails if a prompt was not loaded whole.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command import free_port, parser_of, run, say
from benchmarks.errors import BenchError
from benchmarks.miss_overhead import MODEL, Engine, connector
from benchmarks.warm_ttft import offloading
from kvstore.tools.bench.daemon import Daemon, settings
from kvstore.tools.bench.machine import Others, facts
from kvstore.tools.cli.output import print_table
from tiers.dram.pages import choose_arena_path

GIB, MIB = 1 << 30, 1 << 20
CHUNK_TOKENS, EXTRA_TOKENS = 256, 8
CHUNKS = (4, 10)  # of a prompt
WARM_UP_ROUNDS = 2
STORE_BYTES = 2 * GIB  # what each store may hold
BLOCKS, BLOCK_BYTES = 64, 2 * MIB  # of a put
BATCHES = 3  # of puts and gets, in turn with LMCache's
START_S_MAX, BENCH_S_MAX = 120.0, 300.0
_say = partial(say, "peers")
OURS, THEIRS, OFFLOAD = "kvstore", "LMCache", "OffloadingConnector"


class LMCache:
    """Its server, out of an environment of its own. Context manager."""

    def __init__(self, environment: Path, scratch: Path) -> None:
        """Starts it. Raises BenchError."""
        self.python = str(environment / "bin/python")
        self._command = str(environment / "bin/lmcache")
        self.port, self._http = free_port(), free_port()
        self._variables = {**os.environ, "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}
        self._log = scratch / "lmcache.log"
        words = ["server", "--host", "127.0.0.1", "--port", str(self.port), "--http-host", "127.0.0.1"]
        words += [
            "--http-port",
            str(self._http),
            "--l1-size-gb",
            str(STORE_BYTES / GIB),
            "--eviction-policy",
            "LRU",
            "--disable-observability",
        ]
        with self._log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    [self._command, *words], stdout=log, stderr=subprocess.STDOUT, env=self._variables
                )
            except OSError as error:
                raise BenchError(f"{self._command}: {error.strerror}") from error

    def __enter__(self) -> LMCache:
        deadline_s = time.monotonic() + START_S_MAX
        while time.monotonic() < deadline_s and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self._http}/healthcheck", timeout=1).close()
                return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        self.__exit__()
        raise BenchError("LMCache's server did not start:\n" + self._log.read_text(errors="replace")[-2000:])

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def connector(self) -> dict[str, Any]:
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self.port,
                "lmcache.mp.mp_transfer_mode": "lmcache_driven",  # shared memory, as its own bench
            },
        }

    def bench(self, first: int, count: int) -> tuple[list[float], list[float]]:
        """GB/s of stores and of retrieves, from its own benchmark. Raises BenchError."""
        words = ["bench", "server", "--mode", "cpu", "--transfer-mode", "lmcache_driven", "--interval", "0"]
        words += ["--rpc-url", f"tcp://127.0.0.1:{self.port}", "--url", f"http://127.0.0.1:{self._http}"]
        words += ["--num-tokens", str(BLOCKS * 16), "--num-blocks", str(4 * BLOCKS), "--format", "json"]
        words += ["--kvcache-shape-spec", f"(2,{4 * BLOCKS},16,8,128):float16:32"]
        words += ["--start", str(first), "--end", str(first + count)]
        done = subprocess.run(
            [self._command, *words],
            capture_output=True,
            text=True,
            timeout=BENCH_S_MAX,
            env=self._variables,
            check=False,
        )
        try:
            metrics = json.loads(done.stdout[done.stdout.index("\n{") :].rpartition("}")[0] + "}")["metrics"]
            medians = [metrics[part][f"{part}_p50"] for part in ("cold_store", "warm_retrieve")]
        except (ValueError, KeyError) as error:
            raise BenchError(f"lmcache bench server: {done.stderr[-2000:]}") from error
        put, get = ([BLOCKS * BLOCK_BYTES / 1e6 / median_ms] for median_ms in medians)
        return put, get


def measure(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The report. Raises BenchError, DaemonError."""
    (scratch / "config.json").write_text(json.dumps(MODEL))
    arena_directory = choose_arena_path(None, "auto", 2 * STORE_BYTES, "bench").parent
    others = Others()
    with ExitStack() as running:
        daemon = running.enter_context(Daemon(scratch / "daemon", settings(arena_directory, STORE_BYTES)))
        daemon.wait_until_prefaulted(STORE_BYTES)
        lmcache = running.enter_context(LMCache(args.lmcache, scratch)) if args.lmcache else None
        copies = _copies(args, daemon, lmcache)
        ttft = _ttft(args, scratch, daemon, lmcache)
    return {
        "rounds": args.rounds,
        "ttft_ms": {name: round(1e3 * statistics.median(taken), 1) for name, taken in ttft.items()},
        "gb_per_s": {name: round(statistics.median(seen), 2) for name, seen in copies.items()},
        "other_cpu_percent": others.percent(),
        **facts(scratch, arena_directory),
    }


def _ttft(
    args: argparse.Namespace, scratch: Path, daemon: Daemon, lmcache: LMCache | None
) -> dict[str, list[float]]:
    """Seconds to the first token: computed, from vLLM's own cache, from each store. Raises BenchError."""
    engines: dict[str, Engine] = {}
    try:
        _say("starting an engine for each")
        engines[OURS] = _engine(args, scratch, OURS, connector(daemon.socket_path), sys.executable)
        if lmcache is not None:
            engines[THEIRS] = _engine(args, scratch, THEIRS, lmcache.connector(), lmcache.python)
        if args.offload:
            engines[OFFLOAD] = _engine(args, scratch, OFFLOAD, offloading(STORE_BYTES), sys.executable)
        return _ask_in_turn(args, engines)
    finally:
        for engine in engines.values():
            engine.stop()


def _engine(
    args: argparse.Namespace, scratch: Path, name: str, chosen: dict[str, Any], python: str
) -> Engine:
    return Engine(name, scratch, chosen, args.threads, switches=False, core_apart=True, python=python)


def _ask_in_turn(args: argparse.Namespace, engines: dict[str, Engine]) -> dict[str, list[float]]:
    rng = random.Random()  # prompts that nobody asked before
    taken: dict[str, list[float]] = {name: [] for name in ("computed", "own cache", *engines)}
    for number in range(-WARM_UP_ROUNDS, args.rounds):
        whole = CHUNK_TOKENS * rng.randint(*CHUNKS)
        prompt = [rng.randrange(3, int(str(MODEL["vocab_size"]))) for _ in range(whole + EXTRA_TOKENS)]
        asked = {"prompts": [prompt], "output_tokens": 1}
        for name in engines if number % 2 else reversed(engines):
            computed = engines[name].ask(asked)["seconds"]
            loaded = _from_its_store(engines[name], asked, prompt, whole, name)
            own = engines[name].ask(asked)
            if number >= 0:
                taken[name].append(loaded)
                taken["computed"].append(computed)
                taken["own cache"].append(own["seconds"])
    return taken


def _from_its_store(engine: Engine, asked: dict[str, Any], prompt: list[int], whole: int, name: str) -> float:
    """Seconds of the request when vLLM has forgotten the prompt. Raises BenchError when the store has not all of it."""
    settled_s = time.monotonic() + len(prompt) * 1e-4
    while time.monotonic() < settled_s:  # steps, in which the last saves are reported
        engine.ask({"prompts": [prompt[:EXTRA_TOKENS]], "output_tokens": 4})
    answer = engine.ask({**asked, "reset": True})
    if answer["cached"][0] < whole:
        raise BenchError(f"{name}: {answer['cached'][0]} of {len(prompt)} tokens came from its store")
    seconds: float = answer["seconds"]
    return seconds


def _copies(args: argparse.Namespace, daemon: Daemon, lmcache: LMCache | None) -> dict[str, list[float]]:
    """GB/s of 64 blocks of 2 MiB: memcpy, put and get of ours, of LMCache. Raises BenchError."""
    seen: dict[str, list[float]] = {}
    per_batch = max(2, args.rounds // BATCHES)
    from_buffers = [bytearray(random.randbytes(BLOCK_BYTES)) for _ in range(BLOCKS)]
    into = [bytearray(BLOCK_BYTES) for _ in range(BLOCKS)]
    with daemon.client() as client:
        space = client.namespace(os.urandom(16), BLOCK_BYTES, 32, 16, {"model": "peers"})
        for batch in range(BATCHES):
            _say(f"put and get: batch {batch + 1} of {BATCHES}")
            for _ in range(per_batch):
                hashes = [os.urandom(32) for _ in range(BLOCKS)]
                _time(seen, "memcpy", lambda: _memcpy(from_buffers, into))
                stored = _time(seen, f"put {OURS}", lambda h=hashes: client.put(space, h, b"", from_buffers))
                got = _time(seen, f"get {OURS}", lambda h=hashes: client.get(space, h, into))
                if (stored, got) != (BLOCKS, BLOCKS):
                    raise BenchError(f"{stored} of {BLOCKS} blocks were stored, {got} came back")
            if lmcache is not None:
                put, get = lmcache.bench(batch * per_batch, per_batch)
                seen.setdefault(f"put {THEIRS}", []).extend(put)
                seen.setdefault(f"get {THEIRS}", []).extend(get)
    return seen


def _time(seen: dict[str, list[float]], name: str, work: Any) -> Any:
    begun_s = time.perf_counter()
    result = work()
    seen.setdefault(name, []).append(BLOCKS * BLOCK_BYTES / 1e9 / (time.perf_counter() - begun_s))
    return result


def _memcpy(source: list[bytearray], target: list[bytearray]) -> None:
    for one, other in zip(source, target, strict=True):
        memoryview(other)[:] = one


def _print(report: dict[str, Any]) -> None:
    print_table("the time to the first token of a prompt", ["from", "ms"], list(report["ttft_ms"].items()))
    print_table("64 blocks of 2 MiB", ["what", "GB/s"], list(report["gb_per_s"].items()))
    rest = [(name, value) for name, value in report.items() if not isinstance(value, dict)]
    print_table("conditions", ["field", "value"], rest)


def main() -> int:
    """See `benchmarks.command.run`."""
    parser = parser_of("peers", __doc__)
    parser.add_argument("--rounds", type=int, default=12, help="prompts of each engine (default 12)")
    parser.add_argument("--threads", type=int, default=1, help="cores each engine computes with (default 1)")
    parser.add_argument(
        "--lmcache", type=Path, metavar="ENVIRONMENT", help="a virtual environment with LMCache"
    )
    parser.add_argument("--offload", action="store_true", help="vLLM's OffloadingConnector, too")
    return run(parser, measure, _print)


if __name__ == "__main__":
    sys.exit(main())
