"""A policy with a clock around it: what deciding costs by itself, without the index, the slots and the leases.

Every call of the interface is timed, in processor time, while the clock runs. Taking the time twice costs
about half a microsecond, which is counted as the policy's, too; while the clock is stopped nothing is in
between, so that what is measured around the policy does not pay for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import process_time
from types import SimpleNamespace
from typing import ParamSpec, TypeVar, cast

from kvstore.index.block import Block
from kvstore.policies.base import Policies, Policy

P = ParamSpec("P")
T = TypeVar("T")
OF_A_FAMILY = ("observe", "refused", "worth", "forgotten")
OF_A_POLICY = ("touched", "may_leave", "left", "admits", "is_choosy", "together", "coldest_s")


class Timed(Policies):
    """A family, and how long its calls took so far: `spent_s`. The clock is stopped at first."""

    def __init__(self, family: Policies) -> None:
        super().__init__(lambda bit: self._around(family.make(bit)))
        self.spent_s = 0.0
        self._is_running = False
        self._calls: list[tuple[object, str, Callable[..., object], Callable[..., object]]] = []
        for name in OF_A_FAMILY:
            call = getattr(family, name)
            self._add(self, name, call, self._clocked(call))

    def run_clock(self, is_running: bool) -> None:
        """Start the clock, or stop it."""
        self._is_running = is_running
        for owner, name, plain, clocked in self._calls:
            setattr(owner, name, clocked if is_running else plain)

    def _add(
        self, owner: object, name: str, plain: Callable[..., object], clocked: Callable[..., object]
    ) -> None:
        self._calls.append((owner, name, plain, clocked))
        setattr(owner, name, clocked if self._is_running else plain)

    def _clocked(self, call: Callable[P, T]) -> Callable[P, T]:
        def timed(*args: P.args, **named: P.kwargs) -> T:
            before_s = process_time()
            try:
                return call(*args, **named)
            finally:
                self.spent_s += process_time() - before_s

        return timed

    def _around(self, policy: Policy) -> Policy:
        def victims(incoming: bytes = b"") -> Iterator[Block]:
            found = policy.victims(incoming)
            step = self._clocked(lambda: next(found, None))
            while (victim := step()) is not None:
                yield victim

        around = SimpleNamespace()
        self._add(around, "victims", policy.victims, victims)
        for name in OF_A_POLICY:
            call = getattr(policy, name)
            self._add(around, name, call, self._clocked(call))
        return cast(Policy, around)
