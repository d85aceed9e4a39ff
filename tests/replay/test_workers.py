"""Worker processes die: nobody waits for them for ever, and none outlives who asked for it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.traffic import SHAPES, as_line
from kvstore.errors import WorkerError
from kvstore.tools.cli import FAILED, INTERRUPTED, main
from kvstore.tools.replay.workers import workers
from tests.running import environment

ASKS = """
import os, sys, time
from kvstore.tools.replay.workers import workers
if __name__ == "__main__":
    with workers(1) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 600).result()
"""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_dead_worker_is_an_error() -> None:
    """Its answer never comes, and this is said."""

    def ask() -> None:
        with workers(1) as pool:
            assert pool.submit(os.getpid).result() != os.getpid()
            pool.submit(die).result()

    with pytest.raises(WorkerError, match="killed"):
        ask()


def test_an_error_of_the_block_does_not_wait_for_work() -> None:
    """What is under way when the block is left by an exception is given up."""

    def ask() -> None:
        with workers(1) as pool:
            pool.submit(os.getpid).result()
            pool.submit(time.sleep, 600)
            raise ZeroDivisionError

    started_s = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        ask()
    assert time.monotonic() - started_s < 60
    assert not multiprocessing.active_children()


def test_no_worker_outlives_who_asked(tmp_path: Path) -> None:
    """`kill -9` of a replay or a benchmark leaves no process that computes for nobody."""
    script = tmp_path / "asks.py"
    script.write_text(ASKS)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        worker = int(asking.stdout.readline())
        assert is_running(worker)
        asking.kill()
    deadline_s = time.monotonic() + 30
    while is_running(worker):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core computes without workers")
def test_a_replay_says_that_its_worker_was_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line and exit code 1, as when memory runs out; before, it waited for ever."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(as_line, SHAPES["chat"](1, 60_000))))

    def kill_one() -> None:
        while not (children := multiprocessing.active_children()):
            time.sleep(0.01)
        children[0].kill()

    killer = threading.Thread(target=kill_one)
    killer.start()
    assert main(["replay", str(trace), "--policy", "lru", "--capacity", "5%,10%,25%"]) == FAILED
    killer.join()
    assert capsys.readouterr().err.splitlines()[-1].startswith("kvstore: replay: a worker process was killed")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core computes without workers")
def test_a_replay_that_is_told_to_end_leaves_nothing_behind(tmp_path: Path) -> None:
    """SIGTERM is as Control-C: its exit code, and no word of Python's about semaphores that nobody gave back."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(as_line, SHAPES["chat"](1, 60_000))))
    words = [sys.executable, "-m", "kvstore", "replay", str(trace)]  # all cells: they take seconds
    replay = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    assert replay.stderr is not None
    while " of " not in (line := replay.stderr.readline()):
        assert line, replay.wait(60)
    replay.terminate()
    _, said = replay.communicate(timeout=60)
    assert replay.returncode == INTERRUPTED and "semaphore" not in said, said


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core computes without workers")
def test_workers_that_are_just_starting_say_nothing_of_an_end(tmp_path: Path) -> None:
    """SIGTERM comes at the same instant as a worker is there: it waits until all are started, and none prints a traceback."""
    script = (
        "import multiprocessing, os, signal, threading\n"
        "from kvstore.tools.replay.workers import workers\n"
        "def end():\n"
        "    while not multiprocessing.active_children(): pass\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "threading.Thread(target=end).start()\n"
        "try:\n"
        "    with workers(4) as pool: [pool.submit(abs, 1).result() for _ in iter(int, 1)]\n"
        "except KeyboardInterrupt: print('ended')\n"
    )
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment()
        )
        assert (done.stdout, done.stderr) == ("ended\n", "")
