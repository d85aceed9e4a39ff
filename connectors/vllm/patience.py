"""Patience: how long a request waits for blocks that somebody is storing right now, instead of computing them.

    tokens  │ engine's own │ hit │ being written │ promised │ computed in any case │
                                 ╰── asked about again, every WRITING_PAUSE_S ──╯

A decode worker hears of a request as soon as its prefill worker has answered, and that is before the last block is
stored. The daemon tells what is being written. What the prefill worker has not even begun to store is told by
what it returned for the request (`transfer_params`), and is waited for a moment only: it begins in its next step.

Waiting ends when all of it is there, when nobody writes any more, or at a deadline for each start of a request: the
operator's, or what computing these tokens would take, where that is known and shorter.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from connectors import constants as limits
from connectors.transfer.prefill import PrefillSpeed
from connectors.vllm.stats import Tally
from connectors.vllm.tracked import Hit, Tracked, Wait


class Patience:
    """Of one engine. wait_s: the longest wait; 0: none. clock: seconds, that of `Hit.stale_s`."""

    def __init__(
        self,
        wait_s: float,
        prefill: PrefillSpeed,
        tally: Tally,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wait_s, self._prefill, self._tally, self._clock = wait_s, prefill, tally, clock

    def holds_back(self, tracked: Tracked, hit: Hit) -> bool:
        """Whether the request is not to start yet. Sets when its hit is asked about again."""
        wait, coming, now_s = tracked.wait, max(hit.writing, hit.promised), self._clock()
        if wait is None:
            if not coming or not self._wait_s:
                return False
            wait = tracked.wait = Wait(now_s, hit.local_tokens + hit.tokens)
            self._tally.add("waits")
        if wait.over:
            return False
        if coming and now_s - wait.begun_s < self._longest_s(wait, hit, coming):
            hit.stale_s = min(hit.stale_s, now_s + limits.WRITING_PAUSE_S)
            return True
        wait.over = True
        hit.stale_s = now_s + limits.LOOKUP_FRESH_S
        self._tally.add("wait_seconds", now_s - wait.begun_s)
        return False

    def _longest_s(self, wait: Wait, hit: Hit, coming: int) -> float:
        longest_s = self._wait_s if hit.writing else min(self._wait_s, limits.PROMISED_WAIT_S)
        if not self._prefill.tokens_per_s:
            return longest_s
        gained = hit.local_tokens + hit.tokens + coming - wait.tokens
        return min(longest_s, gained / self._prefill.tokens_per_s)
