"""Models resident in DRAM: which have which slabs of the arena, who uses them, and who leaves for another one.

    reserve ─▶ room in `capacity_bytes`? others leave ─▶ KV gives way, slab by slab ─▶ a filler writes ─▶ commit ─▶ … whole
                    │ no: LimitExceeded                        │ what is in use stays: asked again, it goes on
    adopted ─▶ each slab is verified ─▶ true: as it was; not: that slab is free, and is filled again ─▶ whole

An engine attaches to a model that is whole, every byte of it verified in this life or committed in it. What a process has of
one is not taken away: a use ends with its connection, or, where the daemon was another one then, with the lock that its
process holds on the arena (`Slabs.is_locked`). Who was used least lately leaves first; pinned and used ones never do.

One process fills a model. When it dies, what it has committed stays for RESUME_S, so that another process can go on. Slabs
that no model has are for KV.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Final, Protocol

from kvstore.errors import BadRequest, InUse, LimitExceeded, NotFound
from kvstore.index.slots import Slabs
from kvstore.io_pool import Io
from kvstore.protocol import answers
from kvstore.residency.residency import Residency
from kvstore.residency.takeover import Takeovers
from kvstore.steps import Steps
from kvstore.units import format_bytes
from tiers.dram.model_slabs import ModelSlab

RESUME_S: Final = 600.0  # a model that is not whole is kept for so long, so that another process can go on
LEND_AT_ONCE: Final = 16  # free slabs taken between two yields
GIVE_AT_ONCE: Final = 256  # slabs given back between two yields
VERIFY_AT_ONCE: Final = 2  # slabs of adopted models that are read at a time
PINS_EVERY_S: Final = 2.0  # looked at
PINS_WAIT_S: Final = 10.0  # for them, before others leave: a disk may hang

log = logging.getLogger("kvstore.residency.models")


class User(Protocol):
    """A connection that fills a model, or uses it. owner: its number in the arena."""

    @property
    def owner(self) -> int: ...


@dataclass(slots=True, eq=False)
class Resident:
    """One model. slots: of its slabs, by index; ready: those whose bytes are true; unverified: those that an earlier daemon
    left. used_s: of the last attach, commit or reserve."""

    label: str
    content: bytes
    count: int
    used_s: float
    slots: dict[int, int] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    unverified: set[int] = field(default_factory=set)
    filler: User | None = None
    users: set[User] = field(default_factory=set)
    is_growing: bool = False
    has_failed: bool = False  # a slab of it is not true, and it is used: nothing goes on before that ends

    @property
    def state(self) -> str:
        """whole, filling, damaged, verifying, partial."""
        if len(self.ready) == self.count:
            return "whole"
        if self.filler is not None:
            return "filling"
        return "partial" if not self.unverified else "damaged" if self.has_failed else "verifying"

    def missing(self) -> Iterator[int]:
        """Indexes without a slab."""
        return (index for index in range(self.count) if index not in self.slots)


@dataclass(slots=True)
class Loads:
    """What processes of this node said of the weights that they loaded, since the daemon started. by_source: bytes."""

    count: int = 0
    seconds: float = 0.0
    by_source: Counter[str] = field(default_factory=Counter)

    def add(self, by_source: Iterable[tuple[str, int]], seconds: float) -> None:
        self.count += 1
        self.seconds += seconds
        for source, size_bytes in by_source:
            self.by_source[source] += size_bytes

    def as_dict(self) -> answers.ModelLoads:
        return {"count": self.count, "seconds": self.seconds, "by_source": dict(self.by_source)}


class Models:
    """Those of one arena. Called from the engine's thread only. slabs: None where models can have none.

    capacity_bytes, and pins, which reads the labels of those that must stay, in a thread: settings. A capacity that is less than
    models have is reached within seconds, but for those that are pinned or in use."""

    def __init__(
        self, residency: Residency, takeovers: Takeovers, io: Io, clock: Callable[[], float]
    ) -> None:
        self.capacity_bytes = 0
        self.loads = Loads()
        self.pins: Callable[[], Set[str]] = frozenset
        self._slabs: Slabs | None = residency.arena.slabs
        self._arena_bytes = residency.arena.stats().capacity_bytes
        self._background = residency.background
        self._counters = residency.counters
        self._expiry = residency.expiry
        self._takeovers, self._io, self._clock = takeovers, io, clock
        self._by_label: dict[str, Resident] = {}
        self._pinned: Set[str] = frozenset()
        self._pins_due_s = 0.0
        self._looks: dict[User, float] = {}  # who waits for pins to be read; until when
        self._verifying: set[int] = set()  # slots
        self._leaving: set[int] = set()  # slots that no model has any more, and that are being given back

    # -- filling --

    def reserve(self, filler: User, label: str, content: bytes, count: int) -> Resident:
        """Have slabs for a model, which its filler alone writes; asked again, it goes on where there was no room. Its state is
        "verifying", too, while it is looked which of the others, that would have to leave, are pinned.

        Raises LimitExceeded (it does not fit, even if others leave), InUse (others fill it, or another content of this name is used, or
        pinned): nothing leaves then.
        """
        model = self._by_label.get(label)
        if model is not None and (model.content, model.count) != (content, count):
            if model.filler is not None or self._is_used(model):
                raise InUse(f"model {label}: other bytes of this name are in DRAM, and in use")
            model = None
        if model is None:
            if not self._make_place(filler, label, count):
                return Resident(label, content, count, self._clock(), unverified={0})
            model = self._by_label[label] = Resident(label, content, count, self._clock())
        if model.filler not in (None, filler):
            raise InUse(f"model {label}: another process brings it into DRAM")
        model.has_failed = model.has_failed and self._is_used(model)
        if model.state == "damaged":
            raise InUse(
                f"model {label}: damaged, and a process uses it since an earlier daemon: end that first"
            )
        if model.state != "whole" and not model.unverified:
            model.filler = filler
            self._grow(model)
        model.used_s = self._clock()
        return model

    def commit(
        self, filler: User, label: str, indexes: Sequence[int], checksums: Sequence[bytes]
    ) -> Resident:
        """The bytes of these slabs are there, with these checksums. Raises NotFound, BadRequest."""
        model, slabs = self._known(label), self._slabs
        is_fillers = model.filler is filler and slabs is not None
        is_new = len(set(indexes)) == len(indexes) and not model.ready & set(indexes)
        if not is_fillers or not is_new or not model.slots.keys() >= set(indexes):
            raise BadRequest(f"model {label}: slabs that this connection does not fill")
        if slabs is not None and indexes:
            slots = [model.slots[index] for index in indexes]
            slabs.commit_run(slots, b"".join(checksums), int(self._expiry.now_s()))
        model.ready.update(indexes)
        model.used_s = self._clock()
        if model.state == "whole":
            model.filler = None
            size = format_bytes(model.count * self._slab_bytes)
            log.info("a model is in DRAM", extra={"model": label, "size": size})
        return model

    def _grow(self, model: Resident) -> None:
        if not model.is_growing and len(model.slots) < model.count:
            model.is_growing = True
            self._background.begin(self._grow_steps(model, model.filler))

    def _grow_steps(self, model: Resident, filler: User | None) -> Steps[None]:
        """What other models leave, and free slabs first; then KV leaves others."""

        def wanted() -> bool:
            return self._by_label.get(model.label) is model and model.filler is filler and self._take(model)

        try:
            while wanted() and (self._leaving or self._has_free()):
                yield
            yield from self._takeovers.for_models(wanted)
        finally:
            model.is_growing = False

    def _has_free(self) -> bool:
        return self._slabs is not None and self._slabs.has_room(self._slab_bytes)

    def _take(self, model: Resident) -> bool:
        """Some of the free slabs; whether it needs more."""
        indexes = list(islice(model.missing(), LEND_AT_ONCE))
        if indexes and self._slabs is not None and model.filler is not None:
            slabs = [ModelSlab(model.label, model.content, index, model.count) for index in indexes]
            slots = self._slabs.lend(slabs, model.filler.owner)
            model.slots.update(zip(indexes, slots, strict=False))
        return len(model.slots) < model.count

    def _make_place(self, filler: User, label: str, count: int) -> bool:
        """Models leave for this one, before all others that which has its name. False while it is not known who may. Raises
        LimitExceeded, InUse, with nothing changed."""
        replaced = self._by_label.get(label)
        others = [model for model in self._by_label.values() if model is not replaced]
        leaving, over = self._surplus(others, count)
        if (replaced is not None or leaving or over > 0) and not self._has_looked(filler):
            return False
        if replaced is not None and label in self._pinned:
            raise InUse(f"model {label}: other bytes of this name are in DRAM, and pinned: unpin it first")
        if over > 0:
            stay = sum(model.count for model in others if model not in leaving) * self._slab_bytes
            limit = f"models.dram_bytes is {format_bytes(self.capacity_bytes)}"
            if self._arena_bytes < self.capacity_bytes:
                limit = f"the arena is {format_bytes(self._arena_bytes)}"
            limit += f", of which models that must stay take {format_bytes(stay)}" if stay else ""
            if not self.capacity_bytes:
                limit = "models.dram_bytes is 0: no models are kept in DRAM"
            raise LimitExceeded(f"model {label}: {format_bytes(count * self._slab_bytes)} of slabs; {limit}")
        for model in [replaced, *leaving] if replaced is not None else leaving:
            log.info("a model leaves DRAM for another one", extra={"model": model.label, "comes": label})
            self._drop(model)
        return True

    def _has_looked(self, filler: User) -> bool:
        """Whether pins were read since it asked: one may be a moment old, and what it stands for must stay."""
        if filler not in self._looks:
            self._looks[filler] = self._clock() + PINS_WAIT_S
            self._io.submit(self.pins, partial(self._pins_read, filler), failed=None)
        has_looked = self._clock() >= self._looks[filler]
        if has_looked:
            del self._looks[filler]
        return has_looked

    def _surplus(self, models: Sequence[Resident], more: int = 0) -> tuple[list[Resident], int]:
        """Of these, with so many slabs more, those that leave so that all fit into their share; and the slabs that do not fit then."""
        limit = min(self.capacity_bytes, self._arena_bytes) // self._slab_bytes if self._slab_bytes else 0
        leaving, over = [], sum(model.count for model in models) + more - limit
        for model in sorted(models, key=lambda model: model.used_s):
            if over > 0 and not self._must_stay(model):
                leaving.append(model)
                over -= model.count
        return leaving, over

    def _trim(self) -> None:
        """Their share was lowered: what is not in use leaves."""
        for model in self._surplus(list(self._by_label.values()))[0]:
            log.info("a model leaves DRAM: models.dram_bytes is less now", extra={"model": model.label})
            self._drop(model)

    # -- using --

    def attach(self, user: User, label: str) -> Resident:
        """It is used, where it is whole, until `release` or `left`. Raises NotFound."""
        model = self._known(label)
        model.used_s = self._clock()
        if model.state == "whole":
            model.users.add(user)
        return model

    def drop(self, label: str) -> None:
        """It is not in DRAM any more. Raises NotFound, InUse."""
        model = self._known(label)
        if model.filler is not None or self._is_used(model):
            raise InUse(
                f"model {label}: a process {'fills' if model.filler is not None else 'uses'} it: end that first"
            )
        self._drop(model)

    def left(self, user: User) -> Sequence[int]:
        """A connection has ended: its uses, and what it was filling. Committed slabs stay; those that it may still be
        writing are given back by `lost_steps`, before its number is another one's."""
        lost: list[int] = []
        self._looks.pop(user, None)
        for model in list(self._by_label.values()):
            model.users.discard(user)
            if model.filler is user:
                model.filler = None
                lost += self._taken_from(model, [index for index in model.slots if index not in model.ready])
                model.used_s = self._clock()
                if not model.slots:
                    self._by_label.pop(model.label, None)
        self._leaving.update(lost)
        return lost

    def lost_steps(self, slots: Sequence[int]) -> Steps[None]:
        """Give back what a filler left."""
        return self._give_steps(slots, is_lost=True)

    def _drop(self, model: Resident) -> None:
        del self._by_label[model.label]
        self._free(model, list(model.slots))

    def _free(self, model: Resident, indexes: Sequence[int]) -> None:
        slots = self._taken_from(model, indexes)
        self._leaving.update(slots)
        self._background.begin(self._give_steps([slot for slot in slots if slot not in self._verifying]))

    def _taken_from(self, model: Resident, indexes: Sequence[int]) -> list[int]:
        model.ready.difference_update(indexes)
        model.unverified.difference_update(indexes)
        return [model.slots.pop(index) for index in indexes]

    def _give_steps(self, slots: Sequence[int], is_lost: bool = False) -> Steps[None]:
        for start in range(0, len(slots), GIVE_AT_ONCE):
            if start:
                yield
            some = slots[start : start + GIVE_AT_ONCE]
            if self._slabs is not None:
                (self._slabs.abandon_run if is_lost else self._slabs.free_run)(some)
            self._leaving.difference_update(some)

    def _is_used(self, model: Resident) -> bool:
        slot = model.slots.get(0)
        return bool(model.users) or (
            slot is not None and self._slabs is not None and self._slabs.is_locked(slot)
        )

    def _must_stay(self, model: Resident) -> bool:
        is_read = any(slot in self._verifying for slot in model.slots.values())
        return model.filler is not None or is_read or model.label in self._pinned or self._is_used(model)

    def _known(self, label: str) -> Resident:
        model = self._by_label.get(label)
        if model is None:
            raise NotFound(f"model {label}: not in DRAM; kvstore model load {label}")
        return model

    @property
    def _slab_bytes(self) -> int:
        return self._slabs.layout.slab_bytes if self._slabs is not None else 0

    # -- adoption --

    def adopt(self) -> None:
        """What an earlier daemon left; of two contents of one name the first one that is found."""
        if self._slabs is None:
            return
        for slot, slab in self._slabs.adopted_slabs():
            fresh = Resident(slab.label, slab.content, slab.count, self._clock())
            model = self._by_label.setdefault(slab.label, fresh)
            is_its = (model.content, model.count) == (slab.content, slab.count)
            if not is_its or slab.index in model.slots:
                self._slabs.free_run([slot])
                continue
            model.slots[slab.index] = slot
            model.unverified.add(slab.index)
        self._verify()

    def _verify(self) -> None:
        """Keep threads busy with what is not verified yet, the model used last first."""
        slabs = self._slabs
        if slabs is None:
            return
        for model in sorted(self._by_label.values(), key=lambda model: -model.used_s):
            model.has_failed = model.has_failed and self._is_used(model)
            if model.has_failed:
                continue
            for index in list(islice(model.unverified, 2 * VERIFY_AT_ONCE)):
                slot = model.slots[index]
                if len(self._verifying) >= VERIFY_AT_ONCE:
                    return
                if slot not in self._verifying:
                    self._verifying.add(slot)
                    done = partial(self._verified, model, index, slot)
                    self._io.submit(partial(slabs.verify, slot), done, failed=False)

    def _verified(self, model: Resident, index: int, slot: int, is_true: bool) -> None:
        self._verifying.discard(slot)
        if slot in self._leaving:  # its model was dropped while a thread read it
            self._background.begin(self._give_steps([slot]))
        is_still_its = index in model.unverified and model.slots[index] == slot
        if is_still_its and is_true:
            model.unverified.discard(index)
            model.ready.add(index)
        elif is_still_its:
            self._counters.corrupt_dram += 1
            log.error(
                "a model in DRAM has not the bytes that were committed",
                extra={"model": model.label, "slab": index},
            )
            model.has_failed = self._is_used(model)
            if not model.has_failed:
                self._free(model, [index])
                if not model.slots:
                    self._by_label.pop(model.label, None)
        self._verify()

    # -- upkeep --

    def tick(self) -> None:
        """Once a second or so."""
        now_s = self._clock()
        for model in list(self._by_label.values()):
            if model.state == "partial" and now_s - model.used_s > RESUME_S and not self._must_stay(model):
                self._drop(model)
        self._verify()
        if self._by_label and now_s >= self._pins_due_s:
            self._pins_due_s = now_s + PINS_EVERY_S
            self._io.submit(self.pins, partial(self._pins_read, None), failed=None)

    def _pins_read(self, filler: User | None, labels: Set[str] | None) -> None:
        if filler in self._looks:
            self._looks[filler] = self._clock()
        if labels is not None:
            self._pinned = labels
            self._trim()

    def status(self) -> list[answers.Model]:
        return [
            {
                "name": model.label.partition("@")[0],
                "revision": model.label.partition("@")[2],
                "state": model.state,
                "bytes": model.count * self._slab_bytes,
                "ready_bytes": len(model.ready) * self._slab_bytes,
                "users": len(model.users) or int(self._is_used(model)),
                "pinned": model.label in self._pinned,
                "idle_s": round(max(0.0, self._clock() - model.used_s), 1),
            }
            for model in self._by_label.values()
        ]

    def changes(self) -> object:
        """Something that differs after any change of who has which slab."""
        return [(m.label, sorted(m.slots.items()), len(m.ready)) for m in self._by_label.values()]

    def check(self) -> list[str]:
        """One line per violated invariant."""
        problems, slots = [], [slot for model in self._by_label.values() for slot in model.slots.values()]
        for model in self._by_label.values():
            true = model.ready | model.unverified
            if model.ready & model.unverified or not true <= model.slots.keys() <= set(range(model.count)):
                problems.append(f"models: {model.label}: its slabs are miscounted")
            if model.filler is None and true != model.slots.keys():
                problems.append(f"models: {model.label}: slabs to be written, without a writer")
        if len(set(slots)) != len(slots):
            problems.append("models: a slab of two models")
        if self._slabs is not None and (strange := self._slabs.wrong_of_slabs({*slots, *self._leaving})):
            problems.append(strange)
        return problems
