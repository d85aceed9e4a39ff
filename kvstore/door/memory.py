"""Limits the memory that all connections of a door share: for large frames, and for answers that peers do not read.

A frame larger than one read takes its whole size from the budget before its bytes are
collected, and gives it back when it is answered. Who finds the budget spent is not read from
until there is room; the sweep hangs up sooner on half frames while others wait.

Answers that a peer leaves unread are counted as soon as the kernel takes no more. When all
of them together are too many, the connection that has not read for longest is closed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable


class FrameMemory:
    """Bytes for large frames. One owner (a process) has half of them at most, so that others find room."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._of_owner: Counter[object] = Counter()
        self._waiting: dict[Callable[[], None], None] = {}

    @property
    def waiting(self) -> int:
        """How many wait for room."""
        return len(self._waiting)

    def take(self, owner: object, size_bytes: int, wake: Callable[[], None]) -> bool:
        """Have so many bytes; False if there are none: `wake` is called once when it is worth trying again."""
        is_full = self.used_bytes + size_bytes > self.capacity_bytes
        if is_full or self._of_owner[owner] + size_bytes > self.capacity_bytes // 2:
            self._waiting[wake] = None
            return False
        self.used_bytes += size_bytes
        self._of_owner[owner] += size_bytes
        return True

    def forget(self, wake: Callable[[], None]) -> None:
        """This waiter does not wait any more."""
        self._waiting.pop(wake, None)

    def give(self, owner: object, size_bytes: int) -> None:
        """Give bytes back."""
        self.used_bytes -= size_bytes
        self._of_owner[owner] -= size_bytes
        if not self._of_owner[owner]:
            del self._of_owner[owner]
        waiting, self._waiting = self._waiting, {}
        for wake in waiting:
            wake()


class UnreadAnswers:
    """Bytes of answers that peers left unread, and who is to go when they are too many."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._by_hang_up: dict[Callable[[], None], int] = {}  # longest unread first

    def add(self, hang_up: Callable[[], None], size_bytes: int) -> None:
        """A peer left so many bytes unread; `hang_up` closes its connection and calls `remove`."""
        self._by_hang_up[hang_up] = size_bytes
        self.used_bytes += size_bytes
        while self.used_bytes > self._capacity_bytes:
            oldest = next(iter(self._by_hang_up))
            self.remove(oldest)
            oldest()

    def remove(self, hang_up: Callable[[], None]) -> None:
        """The answers were read, or the connection is closed. Idempotent."""
        self.used_bytes -= self._by_hang_up.pop(hang_up, 0)
