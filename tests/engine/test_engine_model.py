"""The engine against a model: random operations, late I/O, faults, restarts, dying clients."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.engine import engine as engine_module
from kvstore.engine.engine import Engine
from kvstore.engine.sessions import Session
from kvstore.index import forest
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.ledger.accounts import Asking
from kvstore.ledger.totals import Totals
from kvstore.movement import adoption
from kvstore.protocol.frames import Acquired, Reserved
from kvstore.protocol.residency_bits import BROKEN_PREFIX, IN_ANY, IN_DRAM, IN_NVME, WRITING
from kvstore.residency.levels import Drive
from kvstore.steps import finish
from kvstore.tools.replay.policies import POLICIES
from tests.engine.fakes import FaultyDevice, SteppedIo, granted, held
from tiers.checksum import digest, pack_columns
from tiers.dram.arena import open_arena
from tiers.namespace_spec import NamespaceSpec

RECORD_BYTES = 100_000  # 20 slots a slab of 2 MiB
CHAINS, DEPTH = 4, 12
BLOCK_TOKENS = 16
COLUMNS = [b"", pack_columns([20_000, 20_000, 29_996, 29_996])]  # of each namespace
MIB = 1 << 20


def block_hash(chain: int, depth: int) -> bytes:
    """Chains share their first four blocks, as prompts share a system prompt."""
    return f"{0 if depth < 4 else chain:04d}-{depth:03d}".encode()


def content(namespace: int, hashed: bytes) -> bytes:
    return digest(memoryview(bytes([namespace]) + hashed)) * (RECORD_BYTES // 16)


adoption.ADOPT_PIECES = 3  # so that requests arrive between the slices of a start


class EngineMachine(RuleBasedStateMachine):
    """What comes back is what was committed, and the books balance after every step."""

    @initialize(
        seed=st.integers(0, 999),
        fault_rate=st.sampled_from([0.0, 0.0, 0.2]),
        nvme_slots=st.integers(5, 60),
        policy=st.sampled_from(["lru", "kvstore"]),
    )
    def start(self, seed: int, fault_rate: float, nvme_slots: int, policy: str) -> None:
        self.small_pieces = [mock.patch.object(each, "STEP_BLOCKS", 1) for each in (forest, engine_module)]
        for (
            patch
        ) in self.small_pieces:  # so that requests arrive between those of what is done in the background
            patch.start()
        self.policy = policy
        self.directory = Path(tempfile.mkdtemp(dir="/dev/shm"))
        self.nvme = FaultyDevice(nvme_slots, seed, fault_rate)
        self.namespaces = NamespaceRegistry(self.directory / "namespaces.json")
        self.fault_rate = fault_rate
        self.clock_s = 0.0
        self.totals = Totals()
        self.asked: dict[int, int] = {}  # tokens by ticket, as far as it can be asked again
        self.asked_before = 0
        self.boot()

    def boot(self) -> None:
        self.arena = open_arena(self.directory / "arena", 2 * MIB, 2 * MIB, 16384)
        self.io = SteppedIo()
        self.nvme.ready = False
        self.engine = Engine(
            self.arena,
            [Drive(self.nvme, self.io)],
            self.namespaces,
            self.io,
            POLICIES[self.policy](),
            clock=self.tick_clock,
            totals=self.totals,
        )
        self.engine.verifier.share = 0.3
        self.asked_before += sum(self.asked.values())
        self.asked.clear()
        self.engine.adopt()
        self.ids = [
            self.engine.register(
                NamespaceSpec(bytes([n]) * 16, RECORD_BYTES - 8 * n, 8, BLOCK_TOKENS, columns=COLUMNS[n])
            )
            for n in range(2)
        ]
        self.sessions: list[Session] = [self.engine.open_session(0, "test") for _ in range(2)]
        self.writes: list[tuple[Session, int, list[bytes], Reserved]] = []
        self.reads: list[tuple[Session, int]] = []
        self.left: list[tuple[Session, int, list[bytes], Reserved]] = []  # writes of clients that died

    def tick_clock(self) -> float:
        self.clock_s += 1.0
        return self.clock_s

    def wanted(self, namespace: int, hashed: bytes) -> bytes:
        return content(namespace, hashed)[: RECORD_BYTES - 8 * namespace]

    @rule(
        who=st.integers(0, 1),
        ns=st.integers(0, 1),
        chain=st.integers(0, CHAINS - 1),
        lo=st.integers(0, 6),
        n=st.integers(1, 8),
    )
    def reserve(self, who: int, ns: int, chain: int, lo: int, n: int) -> None:
        hashes = [block_hash(chain, d) for d in range(lo, min(lo + n, DEPTH))]
        parent = block_hash(chain, lo - 1) if lo else b""
        answer = self.engine.reserve(self.sessions[who], self.ids[ns], b"".join(hashes), parent)
        for slot in granted(answer):
            data = self.wanted(ns, hashes[slot.position])
            self.arena.mapping[slot.offset : slot.offset + len(data)] = data
        if granted(answer):
            self.writes.append((self.sessions[who], ns, hashes, answer))

    @rule(pick=st.integers(0, 99), keep=st.integers(0, 255))
    def commit(self, pick: int, keep: int) -> None:
        if self.writes:
            session, ns, hashes, answer = self.writes.pop(pick % len(self.writes))
            chosen = [slot.position for slot in granted(answer) if keep >> (slot.position % 8) & 1]
            sums = b"".join(digest(self.wanted(ns, hashes[i]), COLUMNS[ns]) for i in chosen)
            assert self.engine.commit(session, answer.lease, chosen, sums) == len(chosen)

    @rule(
        who=st.integers(0, 1),
        ns=st.integers(0, 1),
        chain=st.integers(0, CHAINS - 1),
        n=st.integers(1, DEPTH),
        hurry=st.booleans(),
    )
    def acquire(self, who: int, ns: int, chain: int, n: int, hurry: bool) -> None:
        hashes = [block_hash(chain, d) for d in range(n)]
        answers: list[Acquired] = []
        lease = self.engine.acquire(self.sessions[who], self.ids[ns], b"".join(hashes), answers.append)
        if hurry:
            lease.expire()
        elif not answers:
            self.io.run()
            lease.expire()  # what waits for room that others hold
        assert len(answers) == 1
        for hashed, slot in zip(hashes, held(answers[0]), strict=True):
            if slot is not None:
                data = self.wanted(ns, hashed)
                assert self.arena.mapping[slot.offset : slot.offset + len(data)] == data
        if answers[0].lease:
            self.reads.append((self.sessions[who], answers[0].lease))

    @rule(pick=st.integers(0, 99))
    def release(self, pick: int) -> None:
        if self.reads:
            self.engine.release(*self.reads.pop(pick % len(self.reads)))

    @rule(pick=st.integers(0, 99))
    def step(self, pick: int) -> None:
        if self.io.waiting:
            self.io.step(pick % len(self.io.waiting))

    @rule(pick=st.integers(0, 99))
    def half_step(self, pick: int) -> None:
        """A thread is through with its work, and the engine hears of it later."""
        if self.io.waiting:
            self.io.half_step(pick % len(self.io.waiting))

    @rule()
    def tick(self) -> None:
        self.engine.tick()

    @rule(pieces=st.integers(1, 9))
    def piece(self, pieces: int) -> None:
        """Of what is done in the background."""
        for _ in range(pieces):
            self.engine.background.step()

    @rule(chain=st.integers(0, CHAINS - 1), ns=st.integers(0, 1))
    def look(self, chain: int, ns: int) -> None:
        """The halving search agrees with a walk along the chain; behind an open breaker only DRAM counts."""
        joined = b"".join(block_hash(chain, d) for d in range(DEPTH))
        places = finish(self.engine.residency_steps(self.ids[ns], joined))
        walked = 0
        while walked < DEPTH and places[walked] & IN_ANY:
            walked += 1
        usable = walked
        if not self.engine.nvme.members[0].loads.closed:
            in_dram = [bool(place & IN_DRAM) for place in places[:walked]]
            usable = in_dram.index(False) if False in in_dram else walked
        is_told = not self.namespaces.get(
            self.ids[ns]
        ).is_behind  # else a block may not know yet that it is found again
        patient = Asking(prefill_tokens_per_s=1e-9)  # nothing is slower than to compute
        found = self.engine.find([self.ids[ns]], joined, patient)
        assert found.usable == usable if is_told else found.usable <= usable
        if not is_told:
            return
        assert all(place in (0, WRITING) or place & BROKEN_PREFIX for place in places[walked:])
        if not self.engine.background:
            self.left.clear()  # until then some of them may not be given back
        writing, left = self.written(ns, self.writes), self.written(ns, self.left)
        for place, depth in zip(places, range(DEPTH), strict=True):
            hashed = block_hash(chain, depth)
            if place == WRITING or hashed not in left:
                assert (place == WRITING) == (not place & IN_ANY and hashed in writing | left)
        followed = walked
        while followed < DEPTH and places[followed]:
            followed += 1
        assert found.writing == (followed - walked if usable == walked else 0)

    @staticmethod
    def written(ns: int, writes: list[tuple[Session, int, list[bytes], Reserved]]) -> set[bytes]:
        """The blocks that these clients have reserved in a namespace, and not committed yet."""
        leases = ((hashes, answer) for _, of, hashes, answer in writes if of == ns)
        return {hashes[slot.position] for hashes, answer in leases for slot in granted(answer)}

    @rule(chain=st.integers(0, CHAINS - 1))
    def look_in_both(self, chain: int) -> None:
        """Of several namespaces, what each of them holds or is being given is on its way."""
        joined = b"".join(block_hash(chain, d) for d in range(DEPTH))
        patient = Asking(prefill_tokens_per_s=1e-9)
        both = self.engine.find(self.ids, joined, patient)
        places = [finish(self.engine.residency_steps(number, joined)) for number in self.ids]
        if any(self.namespaces.get(number).is_behind for number in self.ids):
            return
        followed = next((d for d in range(DEPTH) if not all(of[d] for of in places)), DEPTH)
        assert both.writing == (followed - both.held if both.usable == both.held else 0)

    @rule(
        spaces=st.sampled_from([(0,), (1,), (0, 1)]),
        chain=st.integers(0, CHAINS - 1),
        blocks=st.integers(0, DEPTH),
        tokens=st.integers(0, DEPTH * BLOCK_TOKENS + 5),
        local=st.integers(0, DEPTH * BLOCK_TOKENS + 5),
        ticket=st.integers(0, 3),
        more=st.booleans(),
    )
    def ask(
        self,
        spaces: tuple[int, ...],
        chain: int,
        blocks: int,
        tokens: int,
        local: int,
        ticket: int,
        more: bool,
    ) -> None:
        """A lookup with its account: whatever was asked, each token has one outcome."""
        numbers = [self.ids[ns] for ns in spaces]
        hashes = b"".join(block_hash(chain, d) for d in range(blocks))
        asking = Asking(ticket, more, tokens, local, 100.0)
        found = self.engine.find(numbers, hashes, asking)
        self.engine.book(numbers, hashes, found, asking)
        counted = max(tokens, blocks * BLOCK_TOKENS)
        if not ticket:
            self.asked_before += counted
        elif not (more and ticket in self.asked):
            self.asked[ticket] = counted

    @rule(
        ticket=st.integers(0, 4),
        tokens=st.integers(0, DEPTH * BLOCK_TOKENS),
        ns=st.integers(0, 1),
        chain=st.integers(0, CHAINS - 1),
        depth=st.integers(-1, DEPTH - 1),
    )
    def less_arrived(self, ticket: int, tokens: int, ns: int, chain: int, depth: int) -> None:
        missing = block_hash(chain, depth) if depth >= 0 else b""
        self.engine.settle(ticket, tokens, self.ids[ns], missing)

    @invariant()
    def every_token_is_accounted_for(self) -> None:
        if hasattr(self, "engine"):
            told = sum(sum(row.tokens) for row in self.totals.since(0))
            assert told == self.asked_before + sum(self.asked.values())

    @rule(who=st.integers(0, 1))
    def client_dies(self, who: int) -> None:
        gone = self.sessions[who]
        self.engine.close_session(gone)
        self.left += [w for w in self.writes if w[0] is gone]
        self.writes = [w for w in self.writes if w[0] is not gone]
        self.reads = [r for r in self.reads if r[0] is not gone]
        self.sessions[who] = self.engine.open_session(0, "test")

    @rule(how=st.sampled_from(["fails", "hangs", "well", "well"]))
    def disk_changes(self, how: str) -> None:
        """The disk fails, hangs, or is well again; whoever waits when it hangs is told at the trip."""
        self.nvme.fault_rate = 1.0 if how == "fails" else self.fault_rate
        self.nvme.hangs = how == "hangs"

    @rule(chain=st.integers(0, CHAINS - 1), ns=st.integers(0, 1))
    def acquire_while_it_hangs(self, chain: int, ns: int) -> None:
        """A trip answers who waits, at once and with misses; nothing waits behind an open breaker."""
        self.nvme.hangs = True
        hashes = b"".join(block_hash(chain, d) for d in range(DEPTH))
        answers: list[Acquired] = []
        lease = self.engine.acquire(self.sessions[0], self.ids[ns], hashes, answers.append)
        self.io.run()
        self.engine.look()
        if not self.engine.nvme.members[0].loads.closed and not self.engine.blocks.unverified:
            assert answers
        lease.expire()
        if answers[0].lease:
            self.reads.append((self.sessions[0], answers[0].lease))

    @rule()
    def corrupt_one_on_nvme(self) -> None:
        if self.nvme.records:
            self.nvme.flip(min(self.nvme.records))

    @rule(damage=st.booleans())
    def daemon_is_killed(self, damage: bool) -> None:
        """Nothing is closed; the next daemon adopts file and rows, even with a byte flipped."""
        ready = [b for n in self.namespaces for b in n.blocks.values() if b.slot >= 0]
        if damage and ready:
            at = self.arena.offset(ready[0].slot)
            self.arena.mapping[at] ^= 1
        self.arena.close()
        self.namespaces = NamespaceRegistry(self.directory / "namespaces.json")
        self.boot()
        if damage:  # else requests come while rows are read
            self.all_rows_are_known_when_read()

    def all_rows_are_known_when_read(self) -> None:
        while not self.engine.adoption.done:
            self.io.step()
        if self.engine.counters.evicted_nvme or self.engine.counters.corrupt_nvme:
            return
        for ns, number in enumerate(self.ids):
            for chain in range(CHAINS):
                hashes = [block_hash(chain, d) for d in range(DEPTH)]
                places = finish(self.engine.residency_steps(number, b"".join(hashes)))
                held = [bytes([ns]) * 16 + hashed in self.nvme.records for hashed in hashes]
                assert [bool(place & IN_NVME) for place in places] == held

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "engine"):
            assert self.engine.check() == []

    def settle(self) -> None:
        """Run everything that is under way, and what follows from it."""
        quiet = 0  # ticks in a row that found nothing to do; the first may have come before a probe was due
        for _ in range(100):
            self.engine.tick()
            while self.engine.background.step():
                assert self.engine.check() == []
            self.clock_s += 60.0
            quiet = 0 if self.io.waiting else quiet + 1
            if quiet == 2:
                return
            self.io.run()
        assert self.fault_rate, "there is always more to do"

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.nvme.hangs, self.nvme.fault_rate = False, self.fault_rate
            for session in list(self.engine.sessions):
                self.engine.close_session(session)
            while self.engine.background.step():
                assert self.engine.check() == []
            self.io.run()
            self.settle()
            assert self.engine.check() == []
            if not self.fault_rate:
                assert self.engine.nvme.members[0].loads.closed
                assert not self.engine.blocks.writes.refused
            assert all(b.pins == 0 for n in self.namespaces for b in n.blocks.values())
            self.arena.close(unlink=True)
            shutil.rmtree(self.directory)
            for patch in self.small_pieces:
                patch.stop()


EngineMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("SEEDS", "90")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestEngine = EngineMachine.TestCase
