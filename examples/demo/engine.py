"""Fresh engine processes, seen from the demo: started, asked through a pipe, ended.

What goes through the pipe is in `engine_process.py`; a process's logs go to a file.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

from examples.demo.engine_process import OUTPUT_TOKENS, Job, Run, serve
from kvstore.tools.bench.daemon import DaemonError, log_tail

START_S_MAX = 600.0  # a large model is read from disk
RUN_S_MAX = 300.0
STOP_S_MAX = 60.0


class Engine:
    """A child process that serves one engine and ends with it."""

    def __init__(self, log_path: Path) -> None:
        """Starts the process, which begins to import vLLM at once."""
        spawn = multiprocessing.get_context("spawn")
        self._log_path = log_path
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(theirs, log_path))
        self._process.start()
        theirs.close()

    def run(self, prompts: list[str], output_tokens: int = OUTPUT_TOKENS) -> Run:
        """Ask one prompt after another, greedily. Raises DaemonError."""
        self.send((prompts, output_tokens))
        run: Run = self.receive(RUN_S_MAX)
        return run

    def end(self) -> None:
        """Let it finish what it stores, shut down and exit. Raises DaemonError when it does not."""
        self._pipe.close()
        self._process.join(STOP_S_MAX)
        if self._process.exitcode != 0:
            raise self._failed("did not end well")

    def kill(self) -> None:
        """End it now. Idempotent."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def send(self, message: object) -> None:
        """Raises DaemonError when it is not there any more."""
        try:
            self._pipe.send(message)
        except OSError as error:
            raise self._failed("died") from error

    def wait(self, timeout_s: float) -> None:
        """Until it has said something. Raises DaemonError."""
        if not self._pipe.poll(timeout_s):
            raise self._failed(f"said nothing for {timeout_s:.0f} s")

    def receive(self, timeout_s: float) -> Any:
        """The next that it says. Raises DaemonError."""
        self.wait(timeout_s)
        try:
            return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._failed("died") from error

    def _failed(self, how: str) -> DaemonError:
        self.kill()
        return DaemonError(
            f"the engine {how} (exit code {self._process.exitcode}):\n{log_tail(self._log_path)}"
        )


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
        self._spawn()

    def take(self, job: Job) -> Engine:
        """A ready engine, in a process nobody used before. Raises DaemonError."""
        engine = self._started[-1]
        engine.receive(START_S_MAX)  # it has imported vLLM
        engine.send(job)
        if len(self._started) == self._count:
            engine.receive(START_S_MAX)
        else:
            self._spawn()
            engine.receive(START_S_MAX)
            self._started[-1].wait(START_S_MAX)
        return engine

    def close(self) -> None:
        """End those that still run. Idempotent."""
        for engine in self._started:
            engine.kill()

    def _spawn(self) -> None:
        self._started.append(Engine(self._directory / f"engine-{len(self._started) + 1}.log"))
