"""One fresh engine process, seen from the demo: start it, let it answer prompts, end it.

    Engine() ─ spawn ─▶ python -m kvstore.demo.engine_process
    build(job) ───────▶ makes the engine, answers a warm-up request of its own
    ready() ◀────────── when it can be asked
    run(prompts) ─────▶ one request after another
            ◀────────── tokens, time to first token, and the engine's own counters

Messages are JSON lines over the child's stdin and stdout; its logs go to a file.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.demo import constants as c
from kvstore.demo.daemon import DemoError, log_tail


@dataclass(slots=True, frozen=True)
class Job:
    """What kind of engine. role: vLLM's kv_role. extra: the connector's own settings.

    warm_up: a text that no phase asks about.
    """

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
    tokens: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class Run:
    """Replies in the order of the prompts, and how much each vLLM counter grew meanwhile."""

    replies: tuple[Reply, ...]
    counters: dict[str, float]


class Engine:
    """A child process that serves one engine and ends with it."""

    def __init__(self, log_path: Path) -> None:
        """Starts the process, which begins to import vLLM at once."""
        self._log_path = log_path
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvstore.demo.engine_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=engine_environment(),
            )
        self._unread = b""
        self._imported = False

    def imported(self) -> None:
        """Wait until vLLM is imported. Raises DemoError."""
        if not self._imported:
            self._expect("imported", c.ENGINE_START_S_MAX)
            self._imported = True

    def build(self, job: Job) -> None:
        """Have it make the engine; returns at once. `ready` waits for it."""
        self._send({slot: getattr(job, slot) for slot in Job.__slots__})

    def ready(self) -> None:
        """Wait until the engine has answered its warm-up request. Raises DemoError."""
        self._expect("ready", c.ENGINE_START_S_MAX)

    def run(self, prompts: list[str], output_tokens: int = c.OUTPUT_TOKENS) -> Run:
        """Ask one prompt after another, greedily. Raises DemoError."""
        self._send({"prompts": prompts, "output_tokens": output_tokens})
        answer = self._expect("answered", c.ENGINE_RUN_S_MAX)
        replies = (Reply(**{**reply, "tokens": tuple(reply["tokens"])}) for reply in answer["replies"])
        return Run(tuple(replies), answer["counters"])

    def end(self) -> None:
        """Let it finish what it stores, shut down and exit. Raises DemoError when it does not."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            code = self._process.wait(c.ENGINE_STOP_S_MAX)
        except subprocess.TimeoutExpired:
            code = self.kill()
        if code != 0:
            raise DemoError(f"the engine ended with exit code {code}:\n{log_tail(self._log_path)}")
        self._close_output()

    def kill(self) -> int:
        """End it now; its exit code. Idempotent."""
        self._process.kill()
        code = self._process.wait()
        self._close_output()
        return code

    def _close_output(self) -> None:
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _send(self, message: dict[str, Any]) -> None:
        if self._process.stdin is None:
            raise DemoError("the engine has no stdin")
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._died() from error

    def _expect(self, event: str, timeout_s: float) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._line(timeout_s))
        if message.get("event") != event:
            raise DemoError(f"the engine answered {message.get('event')} instead of {event}")
        return message

    def _line(self, timeout_s: float) -> bytes:
        """One line of its stdout; unbuffered, so that select tells the truth."""
        if self._process.stdout is None:
            raise DemoError("the engine has no stdout")
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            if not select.select([descriptor], [], [], timeout_s)[0]:
                self.kill()
                raise DemoError(f"the engine said nothing for {timeout_s:.0f} s:\n{log_tail(self._log_path)}")
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                raise self._died()
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _died(self) -> DemoError:
        return DemoError(f"the engine died (exit code {self.kill()}):\n{log_tail(self._log_path)}")


class Engines:
    """Hands out fresh engine processes, each imported while the one before it is being made.

    Importing vLLM takes as long as making the tiny engine and keeps one core busy. The next
    process is spawned early and waited for before anything is measured.
    """

    def __init__(self, directory: Path, count: int) -> None:
        """count: how many will be asked for in all. Starts the first."""
        self._directory = directory
        self._left = count
        self._started = 0
        self._alive: list[Engine] = []
        self._spare: Engine | None = self._spawn()

    def take(self, job: Job) -> Engine:
        """A ready engine, in a process nobody used before. Raises DemoError."""
        engine = self._spare or self._spawn()
        engine.imported()
        engine.build(job)
        self._spare = self._spawn() if self._left > 0 else None
        engine.ready()
        if self._spare is not None:
            self._spare.imported()
        return engine

    def close(self) -> None:
        """End those that still run. Idempotent."""
        for engine in self._alive:
            engine.kill()
        self._alive.clear()

    def _spawn(self) -> Engine:
        self._left -= 1
        self._started += 1
        engine = Engine(self._directory / f"engine-{self._started}.log")
        self._alive.append(engine)
        return engine


def engine_environment() -> dict[str, str]:
    """Ours, with vLLM offline, quiet and in one process."""
    return {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
