"""One fresh engine process, seen from the demo: start it, let it answer prompts, end it.

    Engine()  ─ spawn ─▶ python -m kvstore.demo.engine_process      ◀─ "imported"
    send(job) ─────────▶ makes the engine, answers a warm-up prompt  ◀─ "ready"
    run(prompts) ──────▶ one request after another                   ◀─ "answered": tokens, time to first
                                                                        token, the engine's own counters

Messages are JSON lines over the child's stdin and stdout; its logs go to a file.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvstore.bench.daemon import DaemonError, log_tail
from kvstore.demo import constants as c


@dataclass(slots=True, frozen=True)
class Job:
    """What kind of engine. role: vLLM's kv_role. extra: the connector's settings. warm_up: a prompt of its own."""

    model: str
    extra: dict[str, str]
    role: str
    dtype: str
    kv_bytes: int
    warm_up: str


@dataclass(slots=True, frozen=True)
class Reply:
    """One request. cached_tokens: as vLLM reports them for the request. ttft_ms: arrival to first token."""

    prompt_tokens: int
    cached_tokens: int
    ttft_ms: float
    tokens: list[int]


@dataclass(slots=True, frozen=True)
class Run:
    """Replies in the order of the prompts, and how much each vLLM counter grew meanwhile."""

    replies: list[Reply]
    counters: dict[str, float]


class Engine:
    """A child process that serves one engine and ends with it."""

    def __init__(self, log_path: Path) -> None:
        """Starts the process, which begins to import vLLM at once."""
        self._log_path = log_path
        self._unread = b""
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvstore.demo.engine_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(),
            )
        self._input, self._output = self._process.stdin, self._process.stdout

    def run(self, prompts: list[str], output_tokens: int = c.OUTPUT_TOKENS) -> Run:
        """Ask one prompt after another, greedily. Raises DaemonError."""
        self.send({"prompts": prompts, "output_tokens": output_tokens})
        answer = self.expect("answered", c.ENGINE_RUN_S_MAX)
        return Run([Reply(**reply) for reply in answer["replies"]], answer["counters"])

    def end(self) -> None:
        """Let it finish what it stores, shut down and exit. Raises DaemonError when it does not."""
        if self._input is not None:
            self._input.close()
        try:
            code = self._process.wait(c.ENGINE_STOP_S_MAX)
        except subprocess.TimeoutExpired:
            code = 1
        self.kill()
        if code != 0:
            raise DaemonError(f"the engine ended with exit code {code}:\n{log_tail(self._log_path)}")

    def kill(self) -> int:
        """End it now; its exit code. Idempotent."""
        self._process.kill()
        if self._output is not None:
            self._output.close()
        return self._process.wait()

    def send(self, message: dict[str, Any]) -> None:
        """Raises DaemonError when it is not there any more."""
        try:
            if self._input is not None:
                self._input.write(json.dumps(message).encode() + b"\n")
                self._input.flush()
        except OSError as error:
            raise self._failed("died") from error

    def expect(self, event: str, timeout_s: float) -> dict[str, Any]:
        """Its next message, which must be this one. Raises DaemonError."""
        while b"\n" not in self._unread and self._output is not None:
            # Unbuffered reads, so that select sees everything that is not read yet.
            if not select.select([self._output], [], [], timeout_s)[0]:
                raise self._failed(f"said nothing for {timeout_s:.0f} s")
            chunk = os.read(self._output.fileno(), 1 << 16)
            if not chunk:
                raise self._failed("died")
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        if message.get("event") != event:
            raise DaemonError(f"the engine answered {message.get('event')} instead of {event}")
        return message

    def _failed(self, how: str) -> DaemonError:
        return DaemonError(f"the engine {how} (exit code {self.kill()}):\n{log_tail(self._log_path)}")


class Engines:
    """Hands out fresh engine processes, each imported while the one before it is being made.

    Importing vLLM takes as long as making the tiny engine and keeps one core busy. The next
    process is spawned early and waited for before anything is measured.
    """

    def __init__(self, directory: Path, count: int) -> None:
        """count: how many will be asked for in all. Starts the first."""
        self._directory = directory
        self._count = count
        self._started: list[Engine] = []
        self._next = self._spawn()

    def take(self, job: Job) -> Engine:
        """A ready engine, in a process nobody used before. Raises DaemonError."""
        engine = self._next
        if len(self._started) == 1:
            engine.expect("imported", c.ENGINE_START_S_MAX)
        engine.send(asdict(job))
        is_last = len(self._started) == self._count
        if not is_last:
            self._next = self._spawn()
        engine.expect("ready", c.ENGINE_START_S_MAX)
        if not is_last:
            self._next.expect("imported", c.ENGINE_START_S_MAX)
        return engine

    def close(self) -> None:
        """End those that still run. Idempotent."""
        for engine in self._started:
            engine.kill()

    def _spawn(self) -> Engine:
        engine = Engine(self._directory / f"engine-{len(self._started) + 1}.log")
        self._started.append(engine)
        return engine


def _environment() -> dict[str, str]:
    """Ours, with vLLM offline, quiet and in one process."""
    return {
        "VLLM_LOGGING_LEVEL": "INFO",
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
