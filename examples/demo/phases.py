"""What the demo does, in order. Each phase is a fresh engine process that answers the same prompts.

    cold             nothing is stored: everything is computed, and its outputs are the measure
    engine restart   a new engine: from DRAM
    daemon kill -9   the daemon was killed and started again: from the arena it adopted
    arena lost       the arena's file is gone, as after a reboot: from NVMe
    corrupt block    a stored record was damaged on disk: that block is a miss, is counted, and
                     the output is still right
    prefill, decode  an empty daemon; one engine only computes and stores, another only loads

Cached tokens are counted, not computed: vLLM's metrics say from where and how many, the
connector how many blocks really came, and where the daemon's counters disagree the demo fails.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

from examples.demo.corrupt import CORRUPT_BYTES, corrupt_one_record
from examples.demo.engine import Engines
from examples.demo.engine_process import BLOCK_TOKENS, Job, Run
from examples.demo.model import TRAINING_TEXT, make_model
from examples.demo.report import TIERS, Expected, Shown
from kvstore.client import ClientError
from kvstore.constants import GIB, MIB
from kvstore.tools.bench.daemon import Daemon, DaemonError, settings

SOURCES = {"dram": "host", "nvme": "disk"}  # what vLLM calls them
PROMPT_REPEATS = 4  # times the text of model.py, about 450 tokens of the tiny model's each
PROMPTS = [f"{name} asks. {TRAINING_TEXT * PROMPT_REPEATS}" for name in ("Ada", "Blaise", "Carl")]
BUSY = ("adopting", "demoting_blocks", "loading_blocks", "unverified_blocks")  # fields of the status
ENGINES = 7  # fresh processes that the phases below use in all


class Sizes(NamedTuple):
    """What the daemon's tiers and a slab of them may take, and the engine's own KV cache; in bytes."""

    dram: int
    nvme: int
    slab: int
    engine: int


TINY = Sizes(48 * MIB, 256 * MIB, 4 * MIB, 128 * MIB)  # the arena fits a container's 64 MiB of shared memory
REAL = Sizes(8 * GIB, 16 * GIB, 64 * MIB, 4 * GIB)


class Show:
    """The phases, in an empty directory; results in `shown`, in order, as they come.

    report: what the first daemon has to report when its phases are over. Leaves logs and data in the directory.
    """

    def __init__(self, directory: Path, model: Path | None, say: Callable[[str], None]) -> None:
        """model: a model's directory, or None for a tiny one. say: takes progress, a line each. Raises OSError."""
        self.shown: list[Shown] = []
        self.report: Mapping[str, Any] | None = None
        self._is_tiny = model is None
        self._model = make_model(directory) if model is None else model
        self._directory = directory
        self._say = say
        self._cold: Run | None = None
        self._sizes = TINY if self._is_tiny else REAL
        self._home = directory / "daemon-0"

    def carry_out(self) -> str:
        """All phases; why it stopped early, or "". Processes and shared memory are gone then. Raises OSError."""
        name = f"{self._directory.name}-"
        try:
            with (
                tempfile.TemporaryDirectory(
                    prefix=name, dir="/dev/shm", ignore_cleanup_errors=True
                ) as arenas,
                ExitStack() as self._daemons,
                closing(Engines(self._directory, ENGINES)) as self._engines,
            ):
                self._arenas = Path(arenas)
                self._run()
        except (DaemonError, ClientError) as error:
            return str(error)
        return ""

    def _run(self) -> None:
        """Raises DaemonError, ClientError when a phase cannot be carried out at all."""
        self._start()
        self._phase("cold", Expected())
        self._phase("engine restart", Expected("dram"))
        self._daemon.kill()
        self._start()
        self._phase("daemon kill -9", Expected("dram"))
        self._stop()
        self._start()
        self._phase("arena lost", Expected("nvme"))
        self._stop()
        row = corrupt_one_record(self._home / "nvme", self._sizes.nvme, self._sizes.slab)
        self._say(f"flipped {CORRUPT_BYTES} bytes of {row.key.hex()[:12]}… on disk")
        self._start()
        self._phase("corrupt block", Expected("nvme", corrupt_blocks=1))
        with self._daemon.client(attach=False) as client:
            self.report = client.report(0)
        self._stop()
        self._home = self._directory / "daemon-1"  # which has nothing
        self._start()
        self._prefill_and_decode()
        self._stop()

    def _start(self) -> None:
        """A daemon over what the one before it left."""
        chosen = settings(
            self._arenas,
            self._sizes.dram,
            dram__slab_bytes=self._sizes.slab,
            dram__keep_on_stop="true",
            nvme__directories=str(self._home / "nvme"),
            nvme__capacity_bytes=self._sizes.nvme,
            nvme__slab_bytes=self._sizes.slab,
            stop_timeout_s=10,
            log__level="info",
        )
        self._daemon = self._daemons.enter_context(Daemon(self._home, chosen))

    def _stop(self) -> None:
        """SIGTERM, wait for the end, and take its arena away, as a reboot does. Raises DaemonError."""
        code = self._daemon.stop()
        if code != 0:
            raise DaemonError(f"the daemon ended with exit code {code}")

    def _status(self) -> Mapping[str, Any]:
        with self._daemon.client(attach=False) as client:
            return client.status()

    def _settle(self) -> None:
        """Wait until what was stored is on NVMe too and what was adopted is verified."""
        self._daemon.wait(lambda: not any(map(self._status().get, BUSY)), "what it still had to do", 0.05)

    def _phase(self, name: str, expected: Expected) -> None:
        self._say(f"{name}: starting a fresh engine")
        engine = self._engines.take(self._job("kv_both", name))
        self._settle()
        before = self._status()["counters"]
        run = engine.run(PROMPTS)
        engine.end()
        self._settle()
        self._show(name, expected, run, before)

    def _prefill_and_decode(self) -> None:
        """Two engines at once: what the first computes, the second loads and continues."""
        name = "prefill, decode"
        self._say(f"{name}: an empty daemon, and two fresh engines")
        prefill = self._engines.take(self._job("kv_producer", "prefill"))
        decode = self._engines.take(self._job("kv_consumer", "decode"))
        prefill.run(PROMPTS, output_tokens=1)
        prefill.end()
        self._settle()
        before = self._status()["counters"]
        run = decode.run(PROMPTS)
        decode.end()
        self._show(name, Expected("dram"), run, before)

    def _show(self, name: str, expected: Expected, run: Run, before: dict[str, int]) -> None:
        after = self._status()["counters"]
        if self._cold is None:
            self._cold = run
        shown = Shown(
            name=name,
            prompt_tokens=sum(reply.prompt_tokens for reply in run.replies),
            cached_tokens=cached_tokens(run, {key: after[key] - before[key] for key in after}),
            ttft_ms=statistics.median(reply.ttft_ms for reply in run.replies),
            outputs_equal=[r.tokens for r in run.replies] == [r.tokens for r in self._cold.replies],
            corrupt_blocks=sum(after[f"corrupt_{tier}"] - before[f"corrupt_{tier}"] for tier in TIERS),
            expected=expected,
        )
        self.shown.append(shown)
        self._say(f"{name}: {sum(shown.cached_tokens.values())} of {shown.prompt_tokens} tokens from cache")

    def _job(self, role: str, phase: str) -> Job:
        extra = {"kvstore_socket": str(self._daemon.socket_path), "cache_dir": str(self._directory)}
        if not self._is_tiny:
            # Hashing many GB of weights takes longer than the demo, whose daemon is its own.
            extra["model_digest"] = "the model of this demo"
        return Job(
            model=str(self._model),
            extra=extra,
            role=role,
            dtype="float32" if self._is_tiny else "auto",
            kv_bytes=self._sizes.engine,
            warm_up=f"The phase is called {phase}. {TRAINING_TEXT}",
        )


def cached_tokens(run: Run, daemon: dict[str, int]) -> dict[str, int]:
    """Tokens not computed, by tier. daemon: how much its counters grew meanwhile.

    vLLM counts by source what it was promised for a request when it admitted it. What was promised
    and did not come (a damaged block, and what lies behind it) is taken off again, from the slower
    tier first. Raises DaemonError where the daemon's counters do not agree with what the engine says.
    """
    by_source = "vllm:prompt_tokens_cached_by_source:"
    tokens = {tier: round(run.counters.get(by_source + SOURCES[tier], 0)) for tier in TIERS}
    loaded = round(run.counters.get("vllm:kvstore_loaded_blocks", 0)) * BLOCK_TOKENS
    missing = sum(tokens.values()) - loaded
    handed_out = sum(daemon[f"acquired_{tier}"] for tier in TIERS) * BLOCK_TOKENS
    if missing < 0 or loaded > handed_out:
        raise DaemonError(
            f"the engine was promised {tokens} tokens and loaded {loaded}, the daemon handed out {handed_out}"
        )
    for tier in reversed(TIERS):
        taken_back = min(missing, tokens[tier])
        tokens[tier] -= taken_back
        missing -= taken_back
    if tokens["nvme"] > daemon["promoted"] * BLOCK_TOKENS:
        raise DaemonError(
            f"{tokens['nvme']} tokens from NVMe, but {daemon['promoted']} blocks were read from there"
        )
    return tokens
