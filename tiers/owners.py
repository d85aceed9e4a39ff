"""Who may be writing into the arena right now, and who may still be although we let go.

    claimed ──abandon──▶ abandoned ──its lock byte is free──▶ free to be claimed again
       │ │                   │                             ▲    its WRITING slots are freed
       │ ╰ WRITING slots     ╰ the same slots, in quarantine
       ╰────abandon, with no WRITING slot──────────────────╯

A client that was cut off but lives could still be copying into a slot. So each client
holds the OFD lock of its owner number for as long as a write may be in flight, and slots
it was writing are not handed out again before that lock is gone. The kernel drops it when
the process dies. Readers are not fenced: they compare generations after their copy.

Invariant: a slot is in exactly one owner's set from reserve until commit or free.
Used from one thread.
"""

from __future__ import annotations

from tiers.constants import OWNER_DAEMON, OWNER_MAX
from tiers.errors import TierError
from tiers.locks import is_locked
from tiers.slots import SLAB_SLOTS_MAX


class Owners:
    """The owner numbers and the slots each is writing. `lock_fd` must hold no client's lock."""

    def __init__(self, lock_fd: int) -> None:
        self._lock_fd = lock_fd
        self._writing: dict[int, set[int]] = {}
        self._claimed: set[int] = {OWNER_DAEMON}
        self._abandoned: set[int] = set()
        self._last = OWNER_DAEMON

    def claim(self) -> int:
        """The next number nobody uses, claims or locks. Raises TierError when all are taken."""
        for step in range(OWNER_MAX):
            owner = (self._last + step) % OWNER_MAX + 1
            if owner in self._claimed or owner in self._abandoned or is_locked(self._lock_fd, owner):
                continue
            self._claimed.add(owner)
            self._last = owner
            return owner
        raise TierError(f"arena: all {OWNER_MAX} owner numbers are in use or in quarantine")

    def begin(self, owner: int, slot: int) -> None:
        """The owner starts to write the slot."""
        slots = self._writing.get(owner)
        if slots is None:
            self._writing[owner] = {slot}
        else:
            slots.add(slot)

    def end(self, owner: int, slot: int) -> None:
        """The owner's write ended, by commit or by abort."""
        self._writing[owner].remove(slot)

    def abandon(self, owner: int) -> None:
        """Nobody speaks for this owner any more; what it was writing is in quarantine. If that is nothing,
        the number is free at once: many short connections would use them up between two sweeps."""
        self._claimed.discard(owner)
        if self._writing.get(owner):
            self._abandoned.add(owner)

    def expired(self) -> list[int]:
        """Slots whose abandoned owner cannot write any more. Their owners become free."""
        gone = [
            owner for owner in self._abandoned if owner == OWNER_DAEMON or not is_locked(self._lock_fd, owner)
        ]
        slots = [slot for owner in gone for slot in self._writing.pop(owner, ())]
        self._abandoned.difference_update(gone)
        return slots

    def slots(self) -> set[int]:
        """Every slot being written or in quarantine."""
        return {slot for slots in self._writing.values() for slot in slots}

    def quarantined(self) -> int:
        """How many slots wait for an abandoned owner to die."""
        return sum(len(self._writing.get(owner, ())) for owner in self._abandoned)

    def slabs(self) -> set[int]:
        """Slabs with a slot that is being written or in quarantine."""
        return {slot // SLAB_SLOTS_MAX for slot in self.slots()}
