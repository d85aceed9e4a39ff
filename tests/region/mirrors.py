"""`kvstore mirror` in processes of their own."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.running import TIMEOUT_S, environment

StartMirror = Callable[..., "subprocess.Popen[str]"]


@contextmanager
def mirrors(path: Path) -> Iterator[StartMirror]:
    """A function that starts a mirror of a file of regions into eu, with its directory in `path`, and returns when it
    has joined. What still runs at the end is killed."""
    running: list[subprocess.Popen[str]] = []

    def start(file: Path, *more: str) -> subprocess.Popen[str]:
        words = ["mirror", f"--regions={file}", "--set=region=eu", f"--data-dir={path / 'mirror'}", *more]
        with open(path / "mirror.log", "a") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "kvstore", *words],
                stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment(),
            )  # fmt: skip
        running.append(process)
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
        line = process.stdout.readline() if readable else ""
        assert line.startswith("ready region=eu sources=na bucket="), (path / "mirror.log").read_text()
        return process

    try:
        yield start
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
            process.wait(TIMEOUT_S)
            assert process.stdout is not None
            process.stdout.close()
