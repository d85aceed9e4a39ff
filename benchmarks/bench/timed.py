"""A policy with a clock around it: what deciding costs by itself, without the index, the slots and the leases.

Every call of the interface is timed, in processor time, while the clock runs. Taking the time twice costs about half
a microsecond, which counts as the policy's, too. While the clock stands still nothing is in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import process_time
from types import SimpleNamespace
from typing import Any

from kvstore.policies.base import Policies

OF_POLICIES = ("observe", "refused", "worth", "forgotten")
OF_A_POLICY = ("touched", "may_leave", "left", "admits", "is_choosy", "victims", "together", "coldest_s")


class Timed(Policies):
    """Policies, and how long their calls took so far: `spent_s`."""

    def __init__(self, policies: Policies) -> None:
        super().__init__(lambda bit: self._around(SimpleNamespace(), policies.make(bit), OF_A_POLICY))
        self.spent_s = 0.0
        self._is_running = False
        self._timed: list[tuple[Any, object, Sequence[str]]] = []
        self._around(self, policies, OF_POLICIES)

    def run_clock(self, is_running: bool) -> None:
        """Start the clock, or stop it."""
        self._is_running = is_running
        timed, self._timed = self._timed, []
        for outer, inner, names in timed:
            self._around(outer, inner, names)

    def _around(self, outer: Any, inner: object, names: Sequence[str]) -> Any:
        """Have the calls of `outer` be those of `inner`, timed while the clock runs."""
        self._timed.append((outer, inner, names))
        for name in names:
            call = getattr(inner, name)
            if self._is_running:
                call = self._each(call) if name == "victims" else partial(self._clocked, call)
            setattr(outer, name, call)
        return outer

    def _clocked(self, call: Callable[..., Any], *args: Any) -> Any:
        before_s = process_time()
        try:
            return call(*args)
        finally:
            self.spent_s += process_time() - before_s

    def _each(self, victims: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: iter(partial(self._clocked, next, victims(*args), None), None)
