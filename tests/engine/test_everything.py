"""Everything at once, at random: two tiers with faults and hangs, models beside KV, a write budget, rules, restarts.

One `World` is one seed: three hundred random operations on four namespaces of two tenants and
two record sizes. After each of them the books balance; at the end, with all faults and rules
gone, whatever waited is done and there is room again. `python -m tests.engine.test_everything
FIRST LAST` runs more seeds.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections import deque
from pathlib import Path
from unittest import mock

import pytest

from kvstore.commands import retention_commands
from kvstore.constants import DAY_S, HOUR_S
from kvstore.engine import engine as engine_module
from kvstore.engine import lookups
from kvstore.engine.engine import Engine
from kvstore.engine.sessions import Session
from kvstore.errors import InUse, LimitExceeded, NotFound, RequestError
from kvstore.health.write_budget import WriteBudget
from kvstore.index import forest
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.ledger import accounts, totals
from kvstore.ledger.accounts import Asking
from kvstore.ledger.sums import DEMOTED
from kvstore.ledger.totals import Totals
from kvstore.movement import adoption, loading, waiting, writing
from kvstore.policies.learned import Learned
from kvstore.protocol.frames import Acquired, Reserved
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from kvstore.residency import eviction, takeover, write_queue
from kvstore.residency import models as models_module
from kvstore.residency.levels import Drive
from kvstore.retention import expiry, pins, quotas
from kvstore.retention.rules import RuleFile
from kvstore.steps import finish
from kvstore.tools.replay.policies import POLICIES
from tests.engine.fakes import FaultyDevice, SteppedIo, granted, held
from tiers.checksum import digest, pack_columns
from tiers.dram import arena as arena_module
from tiers.dram.arena import open_arena
from tiers.namespace_spec import NamespaceSpec

MIB = 1 << 20
SPACES = (("acme", 100_000), ("acme", 400_000), ("beta", 100_000), ("beta", 400_000))
COLUMNS = (b"", b"", pack_columns([25_000] * 4), pack_columns([150_000, 150_000, 50_000, 50_000]))
CHAINS, DEPTH, BLOCK_TOKENS = 4, 10, 16
MODELS = ("a@1", "a@2", "b@1")
START_S = 1_700_000_000.0
STEPS = 300

# Every limit within reach of a few hundred operations.
TIGHT = {
    (write_queue, "DEMOTING_MAX"): 12,
    (write_queue, "UNDEMOTED_MAX"): 12,
    (eviction, "QUOTA_TRIM_BLOCKS"): 3,
    (eviction, "QUOTA_LOOKS_MAX"): 4,
    (write_queue, "QUOTA_REQUEUE_BLOCKS"): 3,
    (retention_commands, "RETENTION_ROWS_BEHIND_MAX"): 6,
    (writing, "RETENTION_DELETE_ROWS"): 3,
    (loading, "SUSPECTS_MAX"): 2,
    (waiting, "LOADS_WAITING_MAX"): 12,
    (waiting, "LOAD_WAITERS_MAX"): 20,
    (accounts, "TICKETS_OPEN_MAX"): 3,
    (totals, "TOTALS_ROWS_MAX"): 16,
    (expiry, "EXPIRY_LOOKS"): 3,
    (forest, "EXPIRY_LOOKS"): 3,
    (expiry, "EXPIRY_FIND_BLOCKS"): 3,
    (expiry, "EXPIRY_CHILDREN_COMPARED"): 1,
    (expiry, "EXPIRY_SECONDS_SHARED"): 2,
    (engine_module, "STEP_BLOCKS"): 1,
    (forest, "STEP_BLOCKS"): 2,
    (takeover, "TAKEOVER_SLOTS"): 2,
    (models_module, "GIVE_AT_ONCE"): 1,
    (write_queue, "STEP_SLOW_BLOCKS"): 2,
    (loading, "STEP_BLOCKS"): 2 * loading.LOOKS_PER_ANSWER,
    (loading, "LOAD_LOOKS"): 8,
    (pins, "PIN_STEP_BLOCKS"): 2,
    (lookups, "STEP_BLOCKS"): 2,
    (quotas, "STEP_BLOCKS"): 2,
    (arena_module, "SWEEP_SLOTS"): 1,
}


def name_of(chain: int, depth: int) -> bytes:
    """Chains share their first three blocks."""
    return f"{0 if depth < 3 else chain:04d}-{depth:03d}".encode()


class World:
    """One daemon after the other over the same disk, and what must be true of them."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.directory = Path(tempfile.mkdtemp(dir="/dev/shm"))
        self.slots = draw.choice([12, 40, 1000])
        self.tier = FaultyDevice(self.slots, seed)
        self.policy = draw.choice(["lru", "kvstore"])
        self.budget = draw.choice([0, 0, 20_000_000, 200_000_000])
        self.slabs = draw.choice([2, 4])
        self.model_slabs = draw.randrange(self.slabs)
        self.clock_s = 0.0
        self.totals = Totals()
        self.spent: deque[tuple[float, int]] = deque()
        self.stored_s: dict[tuple[int, bytes], float] = {}  # the latest that a block can have been stored
        self.ttls: dict[int, float] = {}
        self.limits: dict[tuple[str, int], int] = {}
        self.adopting = True
        self.leaves_nvme = self.slots < 1000  # for another reason than its time
        self.boot()

    # -- daemons --

    def boot(self) -> None:
        self.arena = open_arena(self.directory / "arena", self.slabs * 2 * MIB, 2 * MIB, 16384)
        self.io = SteppedIo()
        self.tier.ready = False
        self.namespaces = NamespaceRegistry(self.directory / "namespaces.json")
        wall_s = START_S + self.clock_s
        spent = [
            (self.clock_s - max(0.0, wall_s - row.hour_s - HOUR_S), row.bytes_moved[DEMOTED])
            for row in self.totals.since(wall_s - DAY_S)
        ]
        self.family = POLICIES[self.policy]()
        self.engine = Engine(
            self.arena,
            [Drive(self.tier, self.io)],
            self.namespaces,
            self.io,
            self.family,
            clock=lambda: self.clock_s,
            totals=self.totals,
            wall_clock=lambda: START_S + self.clock_s,
            write_budget=WriteBudget(self.budget, lambda: self.clock_s, spent),
            rules=RuleFile(self.directory / "rules.json"),
        )
        for part in (
            self.engine.watches[0].measuring,
            self.engine.nvme.members[0].loads,
            self.engine.nvme.members[0].stores,
        ):
            part._chance = random.Random(self.draw.random())
        self.engine.models.capacity_bytes = self.model_slabs * 2 * MIB
        self.engine.models.pins = lambda: {MODELS[0]} if self.draw.random() < 0.3 else set()
        self.engine.adopt()
        if self.draw.random() < 0.3:
            self.io.run()
        self.ids = [
            self.engine.register(
                NamespaceSpec(bytes([n + 1]) * 16, size, 8, BLOCK_TOKENS, {"tenant": tenant}, COLUMNS[n])
            )
            for n, (tenant, size) in enumerate(SPACES)
        ]
        self.sessions: list[Session] = [self.engine.open_session(0) for _ in range(2)]
        self.users: list[tuple[Session, str]] = []  # of models: what they have stays, and stays true
        self.writes: list[tuple[Session, int, list[bytes], Reserved]] = []
        self.reads: list[tuple[Session, int]] = []
        self.allow()

    def kill(self) -> None:
        self.arena.close()
        self.boot()

    def content(self, space: int, hashed: bytes) -> bytes:
        return digest(memoryview(bytes([space]) + hashed)) * (SPACES[space][1] // 16)

    def prompt(self) -> tuple[int, list[bytes]]:
        chain, count = self.draw.randrange(CHAINS), self.draw.randint(1, DEPTH)
        return self.draw.randrange(len(SPACES)), [name_of(chain, depth) for depth in range(count)]

    # -- clients --

    def reserve(self) -> None:
        space, hashes = self.prompt()
        first = self.draw.choice([0, 0, self.draw.randrange(len(hashes))])
        parent = hashes[first - 1] if first else b""
        session = self.draw.choice(self.sessions)
        answer = self.engine.reserve(session, self.ids[space], b"".join(hashes[first:]), parent)
        for slot in granted(answer):
            data = self.content(space, hashes[first + slot.position])
            self.arena.mapping[slot.offset : slot.offset + len(data)] = data
        now = {(space, hashed): self.clock_s for hashed in hashes}
        self.stored_s.update(now)  # expired ones that are held are offered again
        if granted(answer):
            self.writes.append((session, space, hashes[first:], answer))

    def commit(self) -> None:
        if self.writes:
            session, space, hashes, answer = self.writes.pop(self.draw.randrange(len(self.writes)))
            chosen = [slot.position for slot in granted(answer) if self.draw.random() < 0.9]
            sums = b"".join(digest(self.content(space, hashes[at]), COLUMNS[space]) for at in chosen)
            self.engine.commit(session, answer.lease, chosen, sums)
            self.stored_s.update({(space, hashes[at]): self.clock_s for at in chosen})

    def store(self) -> None:
        self.reserve()
        self.commit()

    def acquire(self) -> None:
        space, hashes = self.prompt()
        session = self.draw.choice(self.sessions)
        answers: list[Acquired] = []
        lease = self.engine.acquire(session, self.ids[space], b"".join(hashes), answers.append)
        if not answers and self.draw.random() < 0.7:
            self.io.run()
        lease.expire()
        assert len(answers) == 1
        for hashed, slot in zip(hashes, held(answers[0]), strict=True):
            if slot is not None:
                data = self.content(space, hashed)
                assert self.arena.mapping[slot.offset : slot.offset + len(data)] == data
        if answers[0].lease:
            self.reads.append((session, answers[0].lease))

    def release(self) -> None:
        if self.reads:
            self.engine.release(*self.reads.pop(self.draw.randrange(len(self.reads))))

    def ask(self) -> None:
        space, hashes = self.prompt()
        spaces = sorted({space, self.draw.choice([space, space ^ 1])})
        rate = self.draw.choice([0.0, 100.0, 1e6])
        asking = Asking(
            self.draw.randrange(6), self.draw.random() < 0.3, 0, self.draw.choice([0, 0, 24]), rate
        )
        numbers = [self.ids[n] for n in spaces]
        found = self.engine.find(numbers, b"".join(hashes), asking)
        self.engine.book(numbers, b"".join(hashes), found, asking)
        for n in spaces:
            ttl_s = self.ttls.get(n)
            for hashed in hashes[: found.held]:
                assert ttl_s is None or self.clock_s < self.stored_s[n, hashed] + ttl_s, "expired, and a hit"
        if self.draw.random() < 0.3:
            self.engine.settle(asking.ticket, 16 * self.draw.randrange(4), self.ids[space], hashes[-1])

    def prefetch(self) -> None:
        space, hashes = self.prompt()
        finish(self.engine.prefetch_steps(self.ids[space], b"".join(hashes)))

    def client_dies(self) -> None:
        at = self.draw.randrange(2)
        gone = self.sessions[at]
        self.engine.close_session(gone)
        self.writes = [write for write in self.writes if write[0] is not gone]
        self.reads = [read for read in self.reads if read[0] is not gone]
        self.users = [user for user in self.users if user[0] is not gone]
        self.sessions[at] = self.engine.open_session(0)

    # -- models --

    def model_slab(self, label: str, index: int) -> bytes:
        return digest(f"{label}/{index}".encode()) * (2 * MIB // 16)

    def model_comes(self) -> None:
        """Somebody fills one, or goes on, as far as there are slabs for it."""
        label, session = self.draw.choice(MODELS), self.draw.choice(self.sessions)
        count = 1 + MODELS.index(label) % 2
        try:
            model = self.engine.models.reserve(session, label, label.encode().ljust(16), count)
        except (InUse, LimitExceeded):
            return
        for index in sorted(model.slots.keys() - model.ready) if model.filler is session else ():
            data = self.model_slab(label, index)
            self.arena.view(model.slots[index])[:] = data
            if self.draw.random() < 0.8:
                self.engine.models.commit(session, label, [index], [digest(data)])

    def model_is_used(self) -> None:
        label, session = self.draw.choice(MODELS), self.draw.choice(self.sessions)
        try:
            if self.engine.models.attach(session, label).state == "whole":
                self.users.append((session, label))
        except NotFound:
            pass

    def model_goes(self) -> None:
        label = self.draw.choice(MODELS)
        try:
            self.engine.models.drop(label)
        except InUse:
            return
        except NotFound:
            pass
        assert label not in {used for _, used in self.users}

    def models_are_true(self) -> None:
        """Those that somebody uses are there, with their bytes; nobody has more than the capacity."""
        for _, label in self.users:
            model = self.engine.models._by_label[label]
            assert model.state == "whole"
            for index, slot in model.slots.items():
                assert self.arena.view(slot)[-64:] == self.model_slab(label, index)[-64:]
        in_models = sum(len(model.slots) for model in self.engine.models._by_label.values())
        assert in_models <= self.model_slabs

    # -- the machine --

    def step(self) -> None:
        for _ in range(self.draw.randint(1, 4)):
            if self.io.waiting:
                work = self.io.half_step if self.draw.random() < 0.5 else self.io.step
                work(self.draw.randrange(len(self.io.waiting)))

    def run(self) -> None:
        self.io.run()

    def pieces(self) -> None:
        """Of what is done in the background: between requests, however many come in between."""
        for _ in range(self.draw.choice([1, 2, 50])):
            self.engine.background.step()

    def tick(self) -> None:
        self.clock_s += self.draw.choice([0.3, 1.0, 1.0, 15.0])
        self.engine.tick()

    def time_passes(self) -> None:
        self.clock_s += self.draw.choice([5.0, 60.0, HOUR_S])

    def load_rows(self) -> None:
        if self.io.waiting:
            self.io.step()

    def disk_changes(self) -> None:
        how = self.draw.choice(["well", "well", "well", "some", "fails", "hangs"])
        self.tier.fault_rate = {"some": 0.2, "fails": 1.0}.get(how, 0.0)
        self.tier.hangs = how == "hangs"

    def corrupt(self) -> None:
        if self.tier.records:
            self.leaves_nvme = True
            self.tier.flip(self.draw.choice(sorted(self.tier.records)))

    # -- rules --

    def command(self, name: str, *arguments: object) -> bool:
        """Whether it took effect, by now or soon."""
        answers: list[RequestError | None] = []
        try:
            getattr(self.engine.retention, name)(*arguments, lambda error, rules: answers.append(error))
        except (LimitExceeded, NotFound):
            return False
        return not answers or answers[0] is None

    def selector(self, space: int) -> str:
        return self.namespaces.get(self.ids[space]).digest.hex()

    def pin(self) -> None:
        space, hashes = self.prompt()
        self.command("pin", self.selector(space), hashes[-1], self.draw.random() < 0.6)

    def ttl(self) -> None:
        space = self.draw.randrange(len(SPACES))
        self.ttls.pop(space, None)
        ttl_s = self.draw.choice([None, 20.0, 300.0])
        is_set = self.command("ttl", self.selector(space), b"", None, ttl_s, True)
        self.io.run()
        if is_set and ttl_s is not None and not self.engine.retention._saving:
            self.ttls[space] = ttl_s
            self.stored_s.update({key: self.clock_s for key in self.stored_s if key[0] == space})

    def prefix_ttl(self) -> None:
        """Shorter than any other, or a removal: what is known of the namespace stays true."""
        space, hashes = self.prompt()
        is_set = self.draw.random() < 0.6
        self.command("ttl", self.selector(space), hashes[-1], None, 10.0 if is_set else None, is_set)
        self.io.run()

    def quota(self) -> None:
        self.leaves_nvme = True
        sizes = [self.draw.choice([None, 0, 500_000, 2_000_000]) for _ in range(2)]
        self.command("quota", "", self.draw.choice(["acme", "beta"]), *sizes)
        self.io.run()
        self.allow()

    def allow(self) -> None:
        """What is in use, pinned, or came with a restart may be above a quota; it never becomes more."""
        for tenant in ("acme", "beta"):
            holder = self.engine.blocks.quotas.holder("", tenant)
            for bit in (IN_DRAM, IN_NVME):
                self.limits.pop((tenant, bit), None)
                limit = holder.limits[bit]
                if limit is not None:
                    self.limits[tenant, bit] = max(limit, holder.used[bit])

    # -- what must be true --

    def check(self) -> None:
        engine = self.engine
        assert engine.check() == []
        self.models_are_true()
        if not self.adopting:  # rows that are found are not refused
            for (tenant, bit), limit in self.limits.items():
                assert engine.blocks.quotas.holder("", tenant).used[bit] <= limit
        self.adopting = not engine.adoption.done
        self.allow()
        blocks = [block for space in self.namespaces for block in space.blocks.values()]
        if isinstance(self.family, Learned):
            assert self.family.reuse.held == sum(block.stretch is not None for block in blocks)
        promised = engine.blocks.writes._promised
        assert all(block.where & IN_DRAM for block in promised)
        assert engine.write_budget._promised_bytes == sum(block.namespace.slot_bytes for block in promised)
        waiting = engine.loader.waiting
        assert waiting.count == sum(map(len, waiting._waiters.values()))
        if self.budget:
            assert engine.write_budget.spent_bytes + engine.write_budget._promised_bytes <= self.budget

    OPERATIONS = (
        *[(store, 12), (reserve, 3), (commit, 4), (acquire, 8), (release, 6), (ask, 6), (prefetch, 2)],
        *[(client_dies, 1), (step, 10), (pieces, 8), (run, 5), (tick, 9), (time_passes, 1), (load_rows, 3)],
        *[(model_comes, 6), (model_is_used, 2), (model_goes, 1)],
        *[(disk_changes, 3), (corrupt, 1), (pin, 2), (ttl, 1), (prefix_ttl, 1), (quota, 2), (kill, 1)],
    )

    def live(self, steps: int) -> None:
        operations, weights = zip(*self.OPERATIONS, strict=True)
        for operation in self.draw.choices(operations, weights, k=steps):
            operation(self)
            self.check()

    # -- the end --

    def calm(self) -> None:
        """Faults end, clients leave, rules are removed."""
        self.tier.fault_rate, self.tier.hangs = 0.0, False
        for session in list(self.engine.sessions):
            self.engine.close_session(session)
        self.users.clear()
        self.io.run()
        for model in self.engine.models.status():
            self.engine.models.drop(f"{model['name']}@{model['revision']}")
        for _ in range(3):
            self.clock_s += 61.0
            self.engine.tick()
            self.io.run()
        book = self.engine.retention.book
        for pin in book.pins:
            assert self.command("pin", pin.namespace, bytes.fromhex(pin.block_hash), False)
        for ttl in book.ttls:
            assert self.command("ttl", ttl.namespace, bytes.fromhex(ttl.block_hash), ttl.tenant, None, False)
        for quota in book.quotas:
            assert self.command("quota", quota.namespace, quota.tenant, None, None)
        for _ in range(60):
            self.clock_s += 61.0
            self.engine.tick()
            self.io.run()
            while self.engine.background.step():
                self.check()
            self.check()
        assert self.engine.retention.book.rules() == []

    def nothing_is_left_behind(self, is_tight: bool) -> None:
        engine = self.engine
        assert engine.nvme.members[0].loads.closed and engine.nvme.members[0].stores.closed
        member = engine.nvme.members[0]  # its slabs are of one class: who has no record there finds no room
        policies = {b: engine.blocks.nvme_policy(member, b.namespace) for b in engine.blocks.writes.refused}
        assert not any(list(policy.victims()) for policy in policies.values())
        assert not engine.blocks.writes.waiting and not engine.blocks.unverified
        assert (
            engine.loader.underway == engine.loader.devices[0].jobs == engine.nvme.members[0].store_jobs == 0
        )
        assert engine.nvme.members[0].speed.waiting_bytes == 0 and not engine.watches[0].pinned()
        blocks = [block for space in self.namespaces for block in space.blocks.values()]
        assert all(block.pins == 0 for block in blocks)
        if not (self.leaves_nvme or self.budget or is_tight):
            assert all(block.where & IN_NVME for block in blocks if block.where), "forgotten"
        session = engine.open_session(0)
        for space, (_, size) in enumerate(SPACES):
            block_hash = f"new-{space:04d}".encode()
            answer = engine.reserve(session, self.ids[space], block_hash, b"")
            if not granted(answer):  # a slab of another class is being taken over
                while engine.background.step():
                    self.check()
                answer = engine.reserve(session, self.ids[space], block_hash, b"")
            assert self.policy == "kvstore" or granted(answer), f"no room for {size} bytes"
            if granted(answer):
                engine.release(session, answer.lease)
        engine.close_session(session)

    def close(self) -> None:
        self.arena.close(unlink=True)
        shutil.rmtree(self.directory)


def run(seed: int, steps: int = STEPS) -> None:
    is_tight = seed % 2 == 1
    with mock.patch.multiple(adoption, ADOPT_PIECES=3):
        patches = [mock.patch.object(module, name, value) for (module, name), value in TIGHT.items()]
        for patch in patches if is_tight else []:
            patch.start()
        try:
            world = World(seed)
            world.live(steps)
            world.calm()
            world.nothing_is_left_behind(is_tight)
            world.close()
        finally:
            for patch in patches if is_tight else []:
                patch.stop()


@pytest.mark.parametrize("seed", range(16))
def test_everything_at_once(seed: int) -> None:
    """Three hundred random operations: the books balance after each, and nothing is stuck at the end."""
    run(seed)


if __name__ == "__main__":
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        try:
            run(number)
        except BaseException:
            print("seed", number, flush=True)
            raise
