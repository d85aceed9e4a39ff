"""Owners: which clients may be writing into the arena now, or may still be after their lease was taken back.

    begin ──▶ being written ──▶ committed, or given back by its writer
                    │ the writer is lost
                    ▼
              abandoned: its generation is raised ──▶ the lock is not held  ──▶ handed out again
                                    │ one is held                                  ▲
                                    ╰──────▶ quarantine ──── he let go ────────────╯

Each client has a file without a name, of which no other process has a descriptor, and holds its OFD lock for as long as it
writes:

    client   lock ──▶ is the generation still the one of my lease? ──▶ write ──▶ unlock
    daemon   raise the generation ──▶ is the lock held? ──▶ hand the slot out

Slots of OWNER_ANY are reserved by one process for others to fill: once they are given up, every
client that holds its lock is waited for.

Those files end with the daemon. For the next one a writer locks, besides, a byte of the arena itself, together with all
others (a shared lock; another byte in each life): what an adopted arena says is being written waits for the bytes that
were locked when it was opened. A process that locks such bytes keeps no other from writing; only those slots wait for it.

Whichever of the two comes first, the other one sees it: a client that was cut off and wakes
up later writes nothing, and one that is in the middle of a copy is waited for. The kernel
drops the lock of a process that dies. Readers hold no lock: they compare generations after
their copy.

Invariant: a slot has a writer from begin until it is committed, given back or expired.
Used from one thread.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Final

from tiers.constants import OWNER_ANY, OWNER_DAEMON
from tiers.errors import TierError
from tiers.locks import LOCK_BASE, is_locked
from tiers.slots import SLAB_SLOTS_MAX

LIVES_MAX: Final = 64
# Bytes of the arena. Writers share one, and each life of a daemon has another.
_LIVES = range(OWNER_DAEMON + 1, OWNER_DAEMON + 1 + LIVES_MAX)
# Behind those a byte for each slab: a user of a model locks (shared) that of its first one.
USERS_BASE: Final = 1 << 20
assert _LIVES.stop < USERS_BASE and LOCK_BASE + USERS_BASE < (1 << 63) - 1


class Owners:
    """The owner numbers and the slots each is writing. `lock_fd` must hold no client's lock.

    writers_byte: of the arena, that all writers of this life lock together.
    """

    def __init__(self, lock_fd: int) -> None:
        self._lock_fd = lock_fd
        self._writers: dict[int, int] = {}  # slot -> the owner that may write into it
        self._slabs: Counter[int] = Counter()  # how many of these are in each slab
        # Owners that may be in the middle of a copy -> slots; slots without any are free when it is their turn.
        self._quarantine: dict[frozenset[int], list[int]] = {}
        self._numbers = itertools.count(_LIVES.stop)  # none is used twice
        self._files: dict[int, int] = {}  # owner -> descriptor of its file
        self._lost: set[int] = set()  # owners that are gone, and may be writing still
        self.writers_byte = next((byte for byte in _LIVES if not is_locked(lock_fd, byte)), _LIVES.start)

    def claim_file(self) -> tuple[int, int]:
        """A number, and the descriptor of a file to lock. Raises TierError."""
        owner = next(self._numbers)
        try:
            self._files[owner] = os.memfd_create(f"kvstore-writer-{owner}", os.MFD_CLOEXEC)
        except OSError as error:
            raise TierError(f"arena: no lock for a writer: {error.strerror}") from error
        return owner, self._files[owner]

    def claim_reader(self) -> int:
        """A number for a client that never writes."""
        return next(self._numbers)

    def let_go(self, owner: int) -> None:
        """The client with this number is gone; the number is forgotten once its lock is free."""
        self._lost.add(owner)
        self._forget_lost({owner})

    def close(self) -> None:
        """Let go of all files."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _forget_lost(self, owners: Set[int]) -> None:
        """Those that do not write any more, and that no slot waits for."""
        waited_for = frozenset[int]().union(*self._quarantine)
        for owner in owners - waited_for:
            if not self._is_locked(owner):
                self._lost.discard(owner)
                if owner in self._files:
                    os.close(self._files.pop(owner))

    def _is_locked(self, owner: int) -> bool:
        fd = self._files.get(owner)
        if fd is not None:
            return is_locked(fd, 0)
        return owner < _LIVES.stop and is_locked(self._lock_fd, owner)

    def begin(self, owner: int, slots: Sequence[int]) -> None:
        """This owner starts to write these slots."""
        self._writers.update(dict.fromkeys(slots, owner))
        self._slabs.update([slot // SLAB_SLOTS_MAX for slot in slots])

    def writing(self, slots: Sequence[int]) -> list[int]:
        """Those of these slots that have a writer."""
        return [slot for slot in slots if slot in self._writers]

    def end(self, slots: Sequence[int]) -> None:
        """These slots are not written any more."""
        for slot in slots:
            del self._writers[slot]
        for slab, count in Counter([slot // SLAB_SLOTS_MAX for slot in slots]).items():
            self._slabs[slab] -= count
            if not self._slabs[slab]:
                del self._slabs[slab]

    def abandon(self, slots: Sequence[int]) -> list[int]:
        """The writer of these slots is lost, and their generations were raised. Returns those that are
        not written; the others are in quarantine."""
        suspects: dict[frozenset[int], list[int]] = {}
        all_owners = frozenset(self._lost.union(self._files))
        for slot in slots:
            owner = self._writers[slot]
            among = all_owners if owner == OWNER_ANY else frozenset((owner,))
            suspects.setdefault(among, []).append(slot)
        return self._free_of(suspects, len(slots))

    def adopt(self, slots: Sequence[int]) -> list[int]:
        """The same for slots that an earlier daemon left being written; it does not say by whom."""
        self.begin(OWNER_ANY, slots)
        return self._free_of({frozenset(_LIVES): list(slots)}, len(slots)) if slots else []

    def expired(self, count: int) -> list[int]:
        """Takes up to so many slots out of quarantine that cannot be written any more, and returns them."""
        suspects, self._quarantine = self._quarantine, {}
        free = self._free_of(suspects, count)
        self._forget_lost(frozenset(self._lost))
        return free

    def _free_of(self, suspects: Mapping[frozenset[int], list[int]], count: int) -> list[int]:
        """Of these slots those whose suspects let go of their locks, up to so many; the others are in quarantine."""
        names = frozenset[int]().union(*suspects) - {OWNER_DAEMON}
        locked = frozenset(owner for owner in names if self._is_locked(owner))
        free: list[int] = []
        for among, slots in suspects.items():
            left = among & locked
            if not left and (more := count - len(free)) > 0:
                free += slots[-more:]
                del slots[-more:]
            if slots and self._quarantine.setdefault(left, slots) is not slots:
                self._quarantine[left] += slots
        self.end(free)
        return free

    def quarantined(self) -> int:
        """The number of slots that wait until their writers cannot write any more."""
        return sum(map(len, self._quarantine.values()))

    def slots(self) -> set[int]:
        """Every slot being written or in quarantine."""
        return set(self._writers)

    def slabs(self) -> Set[int]:
        """Slabs with a slot that is being written or in quarantine."""
        return self._slabs.keys()
