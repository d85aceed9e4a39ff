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


def _end_with_parent() -> None:
    threading.Thread(target=_wait_for_the_end, daemon=True).start()


def _wait_for_the_end() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)
