"""A policy with a clock around it: what deciding costs by itself, without the index, the slots and the leases.

Every call of the interface is timed, in processor time. Taking the time twice costs about half a
microsecond, which is counted as the policy's, too.
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
    """A family, and how long its calls took so far: `spent_s`."""

    def __init__(self, family: Policies) -> None:
        super().__init__(lambda bit: self._around(family.make(bit)))
        self.spent_s = 0.0
        for name in OF_A_FAMILY:
            setattr(self, name, self._clocked(getattr(family, name)))

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

        clocked = {name: self._clocked(getattr(policy, name)) for name in OF_A_POLICY}
        return cast(Policy, SimpleNamespace(victims=victims, **clocked))
