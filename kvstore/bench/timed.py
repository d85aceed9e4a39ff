"""A policy whose time is taken: what deciding costs by itself, without the index, the slots and the leases.

Every call of the interface is timed, of the processor. Taking the time twice costs about half a
microsecond, which is counted as the policy's, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import process_time
from typing import ParamSpec, TypeVar

from kvstore.blocks import Block
from kvstore.namespaces import Namespace
from kvstore.policies.base import Policies, Policy
from kvstore.prompts import Prompt

P = ParamSpec("P")
T = TypeVar("T")


class Timed(Policies):
    """A family, and how long its calls took so far: `spent_s`."""

    def __init__(self, family: Policies) -> None:
        super().__init__(lambda bit: TimedPolicy(family.make(bit), self))
        self.spent_s = 0.0
        self._family = family

    def time(self, call: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> T:
        before_s = process_time()
        try:
            return call(*args, **named)
        finally:
            self.spent_s += process_time() - before_s

    def observe(self, run: Sequence[Block], prompt: Prompt, now_s: float) -> None:
        self.time(self._family.observe, run, prompt, now_s)

    def refused(self, namespace: Namespace, hashes: Sequence[bytes], prompt: Prompt, now_s: float) -> None:
        self.time(self._family.refused, namespace, hashes, prompt, now_s)

    def worth(self, block: Block) -> float:
        return self.time(self._family.worth, block)

    def forgotten(self, run: Sequence[Block], names: Sequence[int]) -> None:
        self.time(self._family.forgotten, run, names)


class TimedPolicy(Policy):
    """One policy of the family."""

    def __init__(self, policy: Policy, family: Timed) -> None:
        self._policy = policy
        self._time = family.time

    def touched(self, run: Sequence[Block]) -> None:
        self._time(self._policy.touched, run)

    def may_leave(self, block: Block) -> None:
        self._time(self._policy.may_leave, block)

    def left(self, run: Sequence[Block]) -> None:
        self._time(self._policy.left, run)

    def admits(self, namespace: Namespace, block_hash: bytes, prompt: Prompt) -> bool:
        return self._time(self._policy.admits, namespace, block_hash, prompt)

    def is_choosy(self) -> bool:
        return self._time(self._policy.is_choosy)

    def victims(self, incoming: bytes = b"") -> Iterator[Block]:
        victims = self._policy.victims(incoming)
        while (victim := self._time(next, victims, None)) is not None:
            yield victim

    def together(self, victim: Block, count: int) -> Sequence[Block]:
        return self._time(self._policy.together, victim, count)

    def coldest_s(self) -> float | None:
        return self._time(self._policy.coldest_s)
