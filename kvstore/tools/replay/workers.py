"""Worker processes, for what computes for minutes: cells of a replay, a part of a benchmark.

They end with the process that asked for them, however it ended, and one that is killed is an
error: `multiprocessing.Pool` would start another one and wait for the lost answer for ever.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from kvstore.errors import WorkerError

_STOPS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def workers(count: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of `count` fresh processes. When the block is left by an exception they are killed, whatever they do. SIGTERM is one
    meanwhile, as Control-C is, so that nothing of the pool stays behind. For the main thread.

    Raises WorkerError if one died.
    """
    others = set(multiprocessing.active_children())
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _end_with_parent)
    # All are started with the first work, before the pool watches them: one that is killed while another
    # starts would end the pool's own thread with "dictionary changed size during iteration".
    vars(pool)["_safe_to_dynamically_spawn_children"] = False
    try:
        _start(pool)
        yield pool
    except BaseException as error:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        if isinstance(error, BrokenProcessPool):
            raise WorkerError("a worker process was killed: is there too little memory?") from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        signal.signal(signal.SIGTERM, before)


def _start(pool: ProcessPoolExecutor) -> None:
    """Start all of its processes. One that is half started when the end comes would print a traceback, so the end waits: for this
    process by a handler, as the signal may come to any of its threads, and for them by a mask, which they inherit."""
    came: list[int] = []
    before = {stop: signal.signal(stop, lambda number, _: came.append(number)) for stop in _STOPS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        pool.submit(int)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for stop, handler in before.items():
            signal.signal(stop, handler)
    if came:
        raise KeyboardInterrupt


def _end_with_parent() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)  # blocked while it was started
    threading.Thread(target=_wait_for_the_end, daemon=True).start()


def _wait_for_the_end() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)
