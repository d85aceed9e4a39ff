"""Patience: how long a request waits for blocks that another engine is storing right now, instead of computing them.

    tokens  │ engine's own │ hit │ being written │ promised │ computed in any case │
                                 ╰── asked about again, every WRITING_PAUSE_S ──╯

A decode worker gets a request as soon as its prefill worker has answered, and that is before the last block is stored. The
daemon says what is being written. What the prefill worker has not begun to store is in what it returned for the request
(`transfer_params`), and is waited for a moment only: it begins in its next step.

Waiting ends when all of it is there, when no engine writes any more, when no more of it has come for as long as the
operator allows, or after as long as computing these tokens would take, where that is known.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from connectors import constants as limits
from connectors.transfer.prefill import PrefillSpeed
from connectors.vllm.stats import Tally
from connectors.vllm.tracked import Hit, Tracked, Wait

WAITS_MAX = 20  # waits for blocks that keep coming, one behind the other


class Patience:
    """Of one engine. wait_s: the longest wait in which nothing comes; 0: none. clock: seconds, that of `Hit.stale_s`."""

    def __init__(
        self, wait_s: float, prefill: PrefillSpeed, tally: Tally, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._wait_s, self._prefill, self._tally, self._clock = wait_s, prefill, tally, clock

    def holds_back(self, tracked: Tracked, hit: Hit) -> bool:
        """Whether the request is not to start yet. Sets when its hit is asked about again."""
        wait, coming, now_s = tracked.wait, max(hit.writing, hit.promised), self._clock()
        here = hit.local_tokens + hit.tokens
        if wait is None:
            if not coming or not self._wait_s:
                return False
            wait = tracked.wait = Wait(now_s, here, now_s, here)
            self._tally.add("waits")
        if wait.over:
            return False
        if here > wait.here:
            wait.here, wait.grown_s = here, now_s
        if coming and self._is_worth_it(wait, hit, coming, now_s):
            hit.stale_s = min(hit.stale_s, now_s + limits.WRITING_PAUSE_S)
            return True
        wait.over = True
        hit.stale_s = now_s + limits.LOOKUP_FRESH_S
        self._tally.add("wait_seconds", now_s - wait.begun_s)
        return False

    def _is_worth_it(self, wait: Wait, hit: Hit, coming: int, now_s: float) -> bool:
        still_s = self._wait_s if hit.writing else min(self._wait_s, limits.PROMISED_WAIT_S)
        longest_s = WAITS_MAX * self._wait_s
        if self._prefill.tokens_per_s:
            longest_s = min(longest_s, (wait.here + coming - wait.tokens) / self._prefill.tokens_per_s)
        return now_s - wait.grown_s < still_s and now_s - wait.begun_s < longest_s
