"""How fast this engine computes prompts: measured step by step, sent with every lookup.

    order of a step ─▶ … ─▶ its output        tokens / time, if the step was mostly prefill
    order ─▶ order ─▶ output ─▶ output        a step planned ahead begins when the last one ended

The daemon uses blocks of slow tiers only where loading them beats this. Steps that decode, or wait for a load, say nothing
about it. Some steps are held up by something else, and the output of some is only noticed together with the next one's: of
the latest samples the middle half counts. 0 until there are enough of them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

PREFILL_STEP_TOKENS_MIN = 64  # a step with fewer tokens is mostly overhead
PREFILL_SHARE_MIN = 0.9  # of a step's tokens beyond one for each request: then it is prefill
PREFILL_SAMPLES, PREFILL_SAMPLES_MIN = 32, 3  # steps that are remembered, and needed to say anything
STEPS_AHEAD_MAX = 64  # steps planned and not seen to end; pipelines have a few


class PrefillSpeed:
    """Prompt tokens per second of one engine. Called by the scheduler's thread; clock in seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.tokens_per_s = 0.0
        self._clock = clock
        self._steps: deque[tuple[int, float]] = deque()  # tokens (0: not to be measured), when it was ordered
        self._ended_s = 0.0
        self._samples: deque[tuple[float, int, float]] = deque(
            maxlen=PREFILL_SAMPLES
        )  # rate, tokens, seconds

    def ordered(self, tokens: int, requests: int, may_measure: bool = True) -> None:
        """A step was planned: so many tokens of so many requests. Not to be measured if it waits for a load."""
        is_prefill = tokens >= PREFILL_STEP_TOKENS_MIN and tokens - requests >= PREFILL_SHARE_MIN * tokens
        if len(self._steps) >= STEPS_AHEAD_MAX:  # outputs that were never reported to us
            self._steps.clear()
        self._steps.append((tokens if is_prefill and may_measure else 0, self._clock()))

    def ended(self) -> None:
        """The output of the oldest step is there."""
        if not self._steps:
            return
        tokens, ordered_s = self._steps.popleft()
        now_s = self._clock()
        taken_s = now_s - max(ordered_s, self._ended_s)
        self._ended_s = now_s
        if tokens and taken_s > 0:
            self._samples.append((tokens / taken_s, tokens, taken_s))
            if len(self._samples) >= PREFILL_SAMPLES_MIN:
                self.tokens_per_s = self._middle()

    def _middle(self) -> float:
        ranked = sorted(self._samples)
        quarter = len(ranked) // 4
        middle = ranked[quarter : len(ranked) - quarter]
        return sum(tokens for _, tokens, _ in middle) / sum(taken_s for _, _, taken_s in middle)
