"""Models in DRAM beside KV: capacities, who gives way and who stays, uses, fillers that die, restarts, damage."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.engine.engine import Engine
from kvstore.engine.sessions import Session
from kvstore.errors import BadRequest, InUse, LimitExceeded, NotFound
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.protocol.frames import Acquired, Reserved
from kvstore.residency import models as models_module
from kvstore.residency.models import RESUME_S, Resident
from tests.engine.fakes import SteppedIo, granted, held
from tiers.checksum import digest
from tiers.dram.arena import open_arena
from tiers.dram.model_slabs import MODELS
from tiers.dram.owners import USERS_BASE
from tiers.locks import try_lock
from tiers.namespace_spec import NamespaceSpec

MIB = 1 << 20
SLAB_BYTES, SLABS = 2 * MIB, 6
RECORD_BYTES = 500_000  # 4 of a slab
CONTENT = b"content-of-16-by"


def bytes_of(name: str, index: int = 0, size_bytes: int = SLAB_BYTES) -> bytes:
    unit = digest(f"{name}/{index}".encode())
    return (unit * (size_bytes // len(unit) + 1))[:size_bytes]


class World:
    """An engine over six slabs; nothing is written to disk."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock_s = 0.0
        self.boot()

    def boot(self, capacity_slabs: int = 4) -> None:
        self.arena = open_arena(self.directory / "arena", SLABS * SLAB_BYTES, SLAB_BYTES, 16384)
        self.io = SteppedIo()
        self.engine = Engine(self.arena, [], NamespaceRegistry(), self.io, clock=lambda: self.clock_s)
        self.models = self.engine.models
        self.models.capacity_bytes = capacity_slabs * SLAB_BYTES
        self.engine.adopt()
        self.space = self.engine.register(NamespaceSpec(b"n" * 16, RECORD_BYTES, 8, 16))
        self.session = self.engine.open_session(0, "engine")

    def restart(self) -> None:
        """Nothing is closed in order."""
        self.arena.close()
        self.boot()

    def settle(self) -> None:
        while self.engine.background.step():
            assert self.engine.check() == []

    def begin(self, label: str, count: int, content: bytes = CONTENT) -> tuple[Session, Resident]:
        filler = self.engine.open_session(0, f"fills {label}")
        model = self.models.reserve(filler, label, content, count)
        if model.state == "verifying" and not model.slots:  # it is looked for pins
            self.io.step(-1)
            model = self.models.reserve(filler, label, content, count)
        self.settle()
        return filler, model

    def write(self, model: Resident, filler: Session, *indexes: int) -> None:
        for index in indexes:
            data = bytes_of(model.label, index)
            self.arena.view(model.slots[index])[:] = data
            self.models.commit(filler, model.label, [index], [digest(data)])

    def bring(self, label: str, count: int) -> Resident:
        """A whole model, whose filler is gone."""
        filler, model = self.begin(label, count)
        self.write(model, filler, *range(count))
        self.engine.close_session(filler)
        self.clock_s += 1
        return model

    def is_true(self, model: Resident) -> bool:
        return all(bytes(self.arena.view(s)) == bytes_of(model.label, i) for i, s in model.slots.items())

    def labels(self) -> list[str]:
        return [f"{model['name']}@{model['revision']}" for model in self.models.status()]

    # -- KV --

    def reserve(self, *names: str) -> Reserved:
        return self.engine.reserve(self.session, self.space, b"".join(name.encode() for name in names), b"")

    def store(self, *names: str) -> int:
        """Chains of one block each; how many found room."""
        stored = 0
        for name in names:
            answer = self.reserve(name)
            for slot in granted(answer):
                data = bytes_of(name, size_bytes=RECORD_BYTES)
                self.arena.mapping[slot.offset : slot.offset + RECORD_BYTES] = data
                stored += self.engine.commit(self.session, answer.lease, [0], digest(data))
        return stored

    def acquire(self, name: str) -> Acquired:
        answers: list[Acquired] = []
        self.engine.acquire(self.session, self.space, name.encode(), answers.append)
        self.io.run()
        return answers[0]

    def has(self, name: str) -> bool:
        """Whether it is hit, with the bytes that were stored."""
        answer = self.acquire(name)
        (slot,) = held(answer)
        if slot is None:
            return False
        data = self.arena.mapping[slot.offset : slot.offset + RECORD_BYTES]
        self.engine.release(self.session, answer.lease)
        assert data == bytes_of(name, size_bytes=RECORD_BYTES)
        return True


def named(first: int, last: int) -> list[str]:
    return [f"kv-{number:05d}" for number in range(first, last)]


@pytest.fixture
def world() -> Iterator[World]:
    directory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    made = World(directory)
    yield made
    assert made.engine.check() == []
    made.arena.close()
    shutil.rmtree(directory)


def test_kv_gives_way_and_comes_back(world: World) -> None:
    """A model takes slabs that are full of KV; what is left of KV is true, and has the slabs again when the model is gone."""
    names = named(0, SLABS * 4)
    assert world.store(*names) == len(names)
    model = world.bring("qwen3-8b@1", 3)
    assert model.state == "whole" and world.is_true(model)
    stats = world.arena.stats()
    assert stats.model_bytes == 3 * SLAB_BYTES and stats.used_bytes + stats.free_bytes == stats.capacity_bytes
    assert sum(map(world.has, names)) == (SLABS - 3) * 4
    assert world.store(*named(100, 130)) == 30 and world.is_true(model)
    world.models.drop("qwen3-8b@1")
    assert world.arena.stats().model_bytes == 0 and world.labels() == []
    assert world.store(*named(200, 200 + SLABS * 4)) == SLABS * 4
    assert all(map(world.has, named(200, 200 + SLABS * 4)))


def test_what_is_read_stays(world: World) -> None:
    """A slab of which a block is leased is passed over; when the lease ends, who asks again gets it."""
    world.store(*named(0, SLABS * 4))
    leases = [world.acquire(name) for name in named(0, SLABS * 4)[::4]]  # one of each slab
    filler, model = world.begin("m@1", 2)
    assert not model.slots and all(map(world.has, named(0, SLABS * 4)))
    world.engine.release(world.session, leases[2].lease)
    world.engine.release(world.session, leases[3].lease)
    world.models.reserve(filler, "m@1", CONTENT, 2)
    world.settle()
    assert len(model.slots) == 2
    world.write(model, filler, 0, 1)
    for lease in (*leases[:2], *leases[4:]):
        (slot,) = held(lease)
        assert slot is not None


def test_what_is_written_stays(world: World) -> None:
    """A slab into which an engine writes is not taken: what it commits is hit."""
    answer = world.reserve("writing0")
    world.store(*named(0, SLABS * 4 - 4))
    world.bring("m@1", 4)
    (slot,) = granted(answer)
    data = bytes_of("writing0", size_bytes=RECORD_BYTES)
    world.arena.mapping[slot.offset : slot.offset + RECORD_BYTES] = data
    assert world.engine.commit(world.session, answer.lease, [0], digest(data)) == 1
    assert world.has("writing0")


def test_what_a_user_pinned_stays(world: World) -> None:
    """Pins of users hold slabs against models, whatever is beside them."""
    world.store(*named(0, SLABS * 4))
    pinned = named(0, SLABS * 4)[::4][:4]
    for name in pinned:
        world.engine.retention.pin("", name.encode(), True, lambda error, rules: None)
    world.io.run()
    _, model = world.begin("m@1", 4)
    assert len(model.slots) == 2 and all(map(world.has, pinned))


def test_models_never_have_more_than_their_capacity(world: World) -> None:
    """What does not fit is refused with the setting's name, and nothing was changed; used least lately leaves first."""
    first, second = world.bring("a@1", 2), world.bring("b@1", 2)
    with pytest.raises(LimitExceeded, match=r"models\.dram_bytes is [0-9.]+ [KMG]iB$"):
        world.begin("c@1", 5)
    assert world.labels() == ["a@1", "b@1"]
    user = world.engine.open_session(0, "user")
    world.models.attach(user, "a@1")
    world.engine.close_session(user)
    world.clock_s += 1
    third = world.bring("c@1", 1)
    assert world.labels() == ["a@1", "c@1"] and world.is_true(first) and world.is_true(third)
    assert not second.slots


def test_a_model_larger_than_the_arena_costs_nobody_anything(world: World) -> None:
    """Whatever share models may have: it is refused before KV, or another model, leaves for it."""
    world.models.capacity_bytes = 100 * SLAB_BYTES
    model = world.bring("a@1", 2)
    names = [f"block-{number:02}" for number in range(16)]
    assert world.store(*names) == 16
    with pytest.raises(LimitExceeded, match="the arena is 12 MiB"):
        world.begin("b@1", SLABS + 1)
    world.settle()
    assert world.labels() == ["a@1"] and world.is_true(model)
    assert all(map(world.has, names))


def test_a_lowered_share_is_reached(world: World) -> None:
    """The model used longest ago leaves first; one that is in use or pinned stays, also after a restart."""
    for label in ("pinned@1", "a@1", "used@1", "b@1"):
        world.bring(label, 1)
    world.models.pins = lambda: {"pinned@1"}
    user = world.engine.open_session(0)
    world.models.attach(user, "used@1")

    def settle() -> list[str]:
        for _ in range(3):
            world.clock_s += models_module.PINS_EVERY_S
            world.engine.tick()
            world.io.run()
            world.settle()
        return world.labels()

    assert settle() == ["pinned@1", "a@1", "used@1", "b@1"]
    world.models.capacity_bytes = 3 * SLAB_BYTES
    assert settle() == ["pinned@1", "used@1", "b@1"]
    world.models.capacity_bytes = 0
    assert settle() == ["pinned@1", "used@1"]
    world.arena.close()
    world.boot(capacity_slabs=1)
    world.models.pins = lambda: {"pinned@1"}
    assert settle() == ["pinned@1"]


def test_a_used_model_stays_as_long_as_its_connection(world: World) -> None:
    """Neither another model nor a command takes it away, for hours; when the connection ends, it may go."""
    world.bring("a@1", 3)
    user = world.engine.open_session(0, "user")
    assert world.models.attach(user, "a@1").state == "whole"
    world.clock_s += 24 * 3600
    world.engine.tick()
    with pytest.raises(LimitExceeded):
        world.begin("b@1", 2)
    with pytest.raises(InUse):
        world.models.drop("a@1")
    world.engine.close_session(user)
    world.bring("b@1", 2)
    assert world.labels() == ["b@1"]


def test_a_pinned_model_stays(world: World) -> None:
    """A label that the pins name never leaves for another model, however short a time ago it was pinned; nor is it taken for pinned
    when it is not any more."""
    world.bring("a@1", 3)
    world.engine.tick()
    world.io.run()
    world.models.pins = lambda: {"a@1"}
    with pytest.raises(LimitExceeded, match=r"of which models that must stay take [0-9.]+ [KMG]iB$"):
        world.begin("b@1", 2)
    assert world.models.status()[0]["pinned"]
    world.models.capacity_bytes = 0
    with pytest.raises(LimitExceeded, match=r"models\.dram_bytes is 0: no models are kept in DRAM$"):
        world.begin("c@1", 1)
    world.models.capacity_bytes = 4 * SLAB_BYTES
    world.models.pins = frozenset
    world.bring("b@1", 2)
    assert world.labels() == ["b@1"]


def test_a_disk_with_pins_that_hangs_is_not_waited_for(world: World) -> None:
    """For long: who is known to be pinned stays. What is asked for again meanwhile is read once, and not when nobody has to leave."""
    world.bring("a@1", 3)
    filler = world.engine.open_session(0)
    for _ in range(2):
        assert world.models.reserve(filler, "b@1", CONTENT, 2).state == "verifying"
        assert len(world.io.waiting) == 1 and world.labels() == ["a@1"]
    world.clock_s += models_module.PINS_WAIT_S
    assert world.models.reserve(filler, "b@1", CONTENT, 2).state == "filling"
    assert world.labels() == ["b@1"]
    assert world.models.reserve(world.engine.open_session(0), "c@1", CONTENT, 1).state == "filling"
    assert len(world.io.waiting) == 1


def test_one_process_fills(world: World) -> None:
    """Whoever else wants to is refused; who does not fill commits nothing; a slab is committed once."""
    filler, model = world.begin("m@1", 2)
    other = world.engine.open_session(0, "other")
    with pytest.raises(InUse):
        world.models.reserve(other, "m@1", CONTENT, 2)
    with pytest.raises(InUse):
        world.models.drop("m@1")
    sums = [digest(bytes_of("m@1", 0))]
    with pytest.raises(BadRequest):
        world.models.commit(other, "m@1", [0], sums)
    world.write(model, filler, 0)
    for indexes in ([0], [2], [1, 1]):
        with pytest.raises(BadRequest):
            world.models.commit(filler, "m@1", indexes, sums * len(indexes))
    assert world.models.attach(other, "m@1").state == "filling" and not model.users
    with pytest.raises(NotFound):
        world.models.attach(other, "m@2")


def test_a_filler_that_dies_leaves_what_is_true(world: World) -> None:
    """What it committed waits for the next one, what it was writing is free at once; after ten minutes all of it is."""
    filler, model = world.begin("m@1", 3)
    world.write(model, filler, 1)
    world.engine.close_session(filler)
    assert model.state == "partial" and list(model.slots) == [1]
    again, same = world.begin("m@1", 3)
    assert same is model and model.ready == {1} and len(model.slots) == 3
    world.engine.close_session(again)
    world.clock_s += RESUME_S + 1
    world.engine.tick()
    assert world.labels() == [] and world.arena.stats().model_bytes == 0


def test_a_filler_that_left_while_kv_gives_way(world: World) -> None:
    """Slabs that were emptied for a model that nobody fills any more are KV's again."""
    world.store(*named(0, SLABS * 4))
    filler = world.engine.open_session(0, "fills")
    world.models.reserve(filler, "m@1", CONTENT, 4)
    world.engine.close_session(filler)
    world.settle()
    assert world.arena.stats().model_bytes == 0 and world.labels() == []
    assert world.store(*named(100, 100 + SLABS * 4)) == SLABS * 4


def test_other_bytes_of_a_name_replace_those_that_nobody_uses(world: World) -> None:
    """One name has one content in DRAM: the new one, unless somebody uses the old one."""
    world.bring("m@1", 2)
    user = world.engine.open_session(0, "user")
    world.models.attach(user, "m@1")
    with pytest.raises(InUse):
        world.begin("m@1", 2, b"another 16 bytes")
    world.engine.close_session(user)
    _, model = world.begin("m@1", 2, b"another 16 bytes")
    assert model.content == b"another 16 bytes" and not model.ready and len(world.labels()) == 1


def test_other_bytes_of_a_name_that_are_refused_replace_nothing(world: World) -> None:
    """Those that do not fit, and those of a name that is pinned; and of what fits without others no other one leaves."""
    old = world.bring("m@1", 2)
    other = world.bring("a@1", 1)
    with pytest.raises(LimitExceeded):
        world.begin("m@1", 5, b"another 16 bytes")
    world.models.pins = lambda: {"m@1"}
    with pytest.raises(InUse, match="m@1: other bytes of this name are in DRAM, and pinned"):
        world.begin("m@1", 2, b"another 16 bytes")
    assert world.labels() == ["m@1", "a@1"] and old.state == other.state == "whole"
    assert world.is_true(old) and world.is_true(other)
    world.models.pins = frozenset
    _, model = world.begin("m@1", 3, b"another 16 bytes")
    assert len(model.slots) == 3 and sorted(world.labels()) == ["a@1", "m@1"] and world.is_true(other)


def test_a_restart_keeps_models(world: World) -> None:
    """The next daemon has it, verifies every slab before it is served, and KV keeps its place beside it."""
    world.store(*named(0, 4))
    world.bring("qwen3-8b@1f", 3)
    world.restart()
    user = world.engine.open_session(0, "user")
    assert world.models.attach(user, "qwen3-8b@1f").state == "verifying"
    with pytest.raises(LimitExceeded):
        world.begin("b@1", 2)  # what is being read does not leave
    world.io.run()
    model = world.models.attach(user, "qwen3-8b@1f")
    assert model.state == "whole" and world.is_true(model) and model.content == CONTENT
    assert all(map(world.has, named(0, 4)))


def test_a_model_that_is_dropped_while_it_is_verified(world: World) -> None:
    """What a thread reads is no other one's before it is through; the rest is free at once."""
    world.bring("m@1", 4)
    world.restart()
    world.models.drop("m@1")
    being_read = len(world.io.waiting)
    assert 0 < being_read < 4 and world.arena.stats().model_bytes == being_read * SLAB_BYTES
    assert world.engine.check() == []
    world.io.run()
    assert world.arena.stats().model_bytes == 0 and world.labels() == []


def test_half_a_model_is_kept_over_a_restart(world: World) -> None:
    """Committed slabs are adopted and gone on with; those that were being written are free."""
    filler, model = world.begin("m@1", 3)
    world.write(model, filler, 2)
    world.restart()
    assert world.arena.stats().model_bytes == SLAB_BYTES
    world.io.run()
    assert world.models.status()[0]["state"] == "partial"
    filler, model = world.begin("m@1", 3)
    world.write(model, filler, 0, 1)
    assert model.state == "whole" and world.is_true(model)


@pytest.mark.parametrize("index", [0, 2])
def test_a_flipped_byte_is_found_at_adoption(world: World, index: int) -> None:
    """The slab that it is in is not served, and free; the rest waits for it to be filled again."""
    model = world.bring("m@1", 3)
    world.arena.view(model.slots[index])[12345] ^= 1
    world.restart()
    world.io.run()
    user = world.engine.open_session(0, "user")
    model = world.models.attach(user, "m@1")
    assert model.state == "partial" and index not in model.slots and len(model.ready) == 2
    assert world.engine.counters.corrupt_dram == 1
    filler, model = world.begin("m@1", 3)
    world.write(model, filler, index)
    assert world.models.attach(user, "m@1").state == "whole" and world.is_true(model)


def test_a_damaged_model_that_a_process_uses_is_refused(world: World) -> None:
    """Nobody waits for it: its slabs stay the process's, and when that has ended the damaged one is dropped and filled again."""
    model = world.bring("m@1", 3)
    world.arena.view(model.slots[1])[12345] ^= 1
    uses = os.open(f"/proc/self/fd/{world.arena.read_only_fd}", os.O_RDONLY)
    try:
        assert try_lock(uses, USERS_BASE + (model.slots[0] >> 16), fcntl.F_RDLCK)
        world.restart()
        world.io.run()
        for _ in range(2):
            with pytest.raises(InUse, match="m@1: damaged, and a process uses it"):
                world.begin("m@1", 3)
            assert world.models.status()[0]["state"] == "damaged"
            world.engine.tick()
            world.io.run()
    finally:
        os.close(uses)
    filler = world.engine.open_session(0, "filler")
    assert world.models.reserve(filler, "m@1", CONTENT, 3).state == "verifying"
    world.engine.tick()
    world.io.run()
    filler, model = world.begin("m@1", 3)
    world.write(model, filler, 1)
    assert model.state == "whole" and world.is_true(model)


def test_slabs_are_given_back_in_steps(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many a model has: requests come in between, KV is not driven out for what is on its way, all is given back."""
    monkeypatch.setattr(models_module, "GIVE_AT_ONCE", 1)
    world.store(*named(0, 8))
    world.bring("a@1", 4)
    filler, model = world.begin("b@1", 3)
    assert len(model.slots) == 3 and world.labels() == ["b@1"] and all(map(world.has, named(0, 8)))
    world.write(model, filler, 1)
    world.engine.close_session(filler)
    assert world.engine.check() == [] and world.arena.stats().model_bytes > SLAB_BYTES
    world.settle()
    assert world.arena.stats().model_bytes == SLAB_BYTES and filler not in world.engine.sessions


def test_a_namespace_cannot_pass_for_models(world: World) -> None:
    """The digest that marks slabs of models is refused, so that no record is taken for one."""
    with pytest.raises(BadRequest):
        world.engine.register(NamespaceSpec(MODELS, RECORD_BYTES, 8, 16))


def test_records_as_large_as_a_slab_give_way_too(world: World) -> None:
    """A slab of one record is a slab of one slot, as a model's: it is taken all the same, and only if nobody reads it."""
    space = world.engine.register(NamespaceSpec(b"w" * 16, SLAB_BYTES, 8, 16))
    for number in range(SLABS):
        answer = world.engine.reserve(world.session, space, b"%08d" % number, b"")
        world.engine.commit(world.session, answer.lease, [0], bytes(16))
    answers: list[Acquired] = []
    world.engine.acquire(world.session, space, b"%08d" % 1, answers.append)
    _, model = world.begin("m@1", 4)
    assert len(model.slots) == 4 and world.arena.stats().records == 2
    (slot,) = held(answers[0])
    assert slot is not None and slot.offset // SLAB_BYTES not in {s >> 16 for s in model.slots.values()}
