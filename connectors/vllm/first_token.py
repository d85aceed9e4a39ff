"""How long an engine took from its start to its first token: one line, and two counters of the connector."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from connectors.vllm.guard import logger

_START = 19  # of what follows the name in /proc/<pid>/stat: when the process was started, in ticks after boot


class FirstToken:
    """Looks at requests until one of them has a token."""

    def __init__(self, add: Callable[[str, float], None]) -> None:
        self._add = add
        self._is_over = False

    def look(self, requests: Iterable[Any]) -> None:
        """requests: of vLLM's scheduler."""
        if self._is_over or not any(request.num_output_tokens for request in requests):
            return
        self._is_over = True
        seconds = running_s()
        self._add("first_tokens", 1)
        self._add("first_token_seconds", seconds)
        logger.info("kvstore: first token after %.1f s", seconds)


def running_s() -> float:
    """Since the process was started that the user started: where vLLM runs its engine in a process of its own, that one's parent."""
    parent = multiprocessing.parent_process()
    words = Path(f"/proc/{parent.pid if parent is not None else 'self'}/stat").read_text(
        encoding="ascii", errors="replace"
    )
    ticks = int(words.rpartition(")")[2].split()[_START])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
