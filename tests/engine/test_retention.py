"""Retention: pins hold, time is up, quotas are never exceeded; and all of it after a restart."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.engine.engine import Engine
from kvstore.errors import LimitExceeded, NotFound, RequestError
from kvstore.index.block import Namespace
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.movement import adoption
from kvstore.protocol import outcomes
from kvstore.protocol.frames import Acquired
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from kvstore.residency import write_queue
from kvstore.residency.levels import Drive
from kvstore.retention.expiry import EXPIRY_SWEEP_S_MIN
from kvstore.retention.rules import Pin, RuleFile
from kvstore.steps import finish
from kvstore.tools.replay.policies import POLICIES
from tests.engine.fakes import FaultyDevice, SteppedIo, granted, held
from tiers.checksum import digest
from tiers.dram.arena import open_arena
from tiers.namespace_spec import NamespaceSpec

MIB = 1 << 20
RECORD_BYTES = 250_000
SLOT_BYTES = 253_952  # eight slots a slab of 2 MiB
TENANTS = ("acme", "acme", "beta")


class Node:
    """A daemon's engine with three namespaces of two tenants, which can be killed and started again."""

    def __init__(self, nvme_slots: int = 0, share: float = 0.5, slabs: int = 2, policy: str = "lru") -> None:
        self.directory = Path(tempfile.mkdtemp(dir="/dev/shm"))
        self.nvme = FaultyDevice(nvme_slots, slot_bytes=SLOT_BYTES) if nvme_slots else None
        self.share, self.slabs, self.policy = share, slabs, policy
        self.clock_s = self.asleep_s = 0.0
        self.wall_s = 1_700_000_000.0
        self.start()

    def start(self, wait: bool = True) -> None:
        self.arena = open_arena(self.directory / "arena", self.slabs * 2 * MIB, 2 * MIB, 16384)
        self.io = SteppedIo()
        if self.nvme is not None:
            self.nvme.ready = False
        self.namespaces = NamespaceRegistry(self.directory / "namespaces.json")
        self.engine = Engine(
            self.arena,
            [Drive(self.nvme, self.io)] if self.nvme is not None else [],
            self.namespaces,
            self.io,
            POLICIES[self.policy](),
            clock=lambda: self.clock_s,
            boot_clock=lambda: self.clock_s + self.asleep_s,
            wall_clock=lambda: self.wall_s + self.clock_s,
            rules=RuleFile(self.directory / "retention.json"),
        )
        self.engine.retention.set_share(self.share)
        self.engine.adopt()
        if wait:
            self.io.run()
        self.session = self.engine.open_session(0)
        self.spaces = [
            self.engine.register(NamespaceSpec(bytes([n + 1]) * 16, RECORD_BYTES, 8, 1, {"tenant": tenant}))
            for n, tenant in enumerate(TENANTS)
        ]

    def space(self, number: int) -> Namespace:
        return self.namespaces.get(self.spaces[number])

    def selector(self, number: int) -> str:
        return self.space(number).digest.hex()

    def kill(self, wait: bool = True) -> None:
        """Nothing is told: what lies on disk and in the arena is all that is left."""
        self.arena.close()
        self.start(wait)

    def close(self) -> None:
        self.arena.close(unlink=True)
        shutil.rmtree(self.directory)

    def put(self, *names: str, parent: str = "", space: int = 0) -> int:
        asked = joined(*names)
        answer = self.engine.reserve(
            self.session, self.spaces[space], asked, joined(parent) if parent else b""
        )
        sums = b"".join(
            digest(self.arena.mapping[s.offset : s.offset + RECORD_BYTES]) for s in granted(answer)
        )
        if granted(answer):
            self.engine.commit(self.session, answer.lease, [s.position for s in granted(answer)], sums)
        return len(granted(answer))

    def settle(self, seconds: float = 0.0) -> None:
        """Let time pass, and everything that is under way end."""
        self.clock_s += seconds
        for _ in range(3):
            self.engine.tick()
            self.io.run()

    def held(self, *names: str, space: int = 0) -> int:
        return self.engine.find([self.spaces[space]], joined(*names)).usable

    def why(self, *names: str, space: int = 0) -> list[int]:
        return finish(self.engine.explain_steps([self.spaces[space]], joined(*names)))[1]

    def command(self, name: str, *arguments: object) -> RequestError | None:
        """One command, until it is answered; what it was refused with."""
        answers: list[RequestError | None] = []
        try:
            getattr(self.engine.retention, name)(*arguments, lambda error, rules: answers.append(error))
        except RequestError as error:
            return error
        while not answers:
            self.engine.blocks.background.step()
            self.io.run()
        return answers[0]

    def pin(self, name: str, space: int = 0, is_set: bool = True) -> RequestError | None:
        return self.command("pin", self.selector(space), joined(name), is_set)

    def ttl(
        self, ttl_s: float | None, name: str = "", space: int = 0, is_set: bool = True
    ) -> RequestError | None:
        return self.command("ttl", self.selector(space), joined(name) if name else b"", None, ttl_s, is_set)

    def tenant_ttl(self, ttl_s: float | None, tenant: str, is_set: bool = True) -> RequestError | None:
        return self.command("ttl", "", b"", tenant, ttl_s, is_set)

    def quota(self, tenant: str, dram: int | None, nvme: int | None = None) -> RequestError | None:
        """In records."""
        sizes = [None if n is None else n * SLOT_BYTES for n in (dram, nvme)]
        return self.command("quota", "", tenant, *sizes)

    def used(self, tenant: str, bit: int = IN_DRAM) -> int:
        """Records that a tenant has in a tier, counted anew: held, being written, being loaded."""
        return sum(
            sum(bool(block.where & bit) for block in namespace.blocks.values())
            for namespace in self.namespaces
            if namespace.spec.fields.get("tenant") == tenant
        )


def joined(*names: str) -> bytes:
    return b"".join(name.encode().ljust(8) for name in names)


def chain(name: str, length: int, first: int = 0) -> list[str]:
    return [f"{name}{depth:02d}" for depth in range(first, length)]


@pytest.fixture
def node() -> Iterator[Node]:
    """16 slots of DRAM, no NVMe."""
    node = Node()
    yield node
    node.settle()
    assert node.engine.check() == []
    node.close()


@pytest.fixture
def two_tiers() -> Iterator[Node]:
    """16 slots of DRAM, 24 on NVMe."""
    node = Node(nvme_slots=24)
    yield node
    node.settle()
    assert node.engine.check() == []
    node.close()


def flood(node: Node, count: int = 40, space: int = 1) -> None:
    """Other people's prompts, more than fit anywhere."""
    for number in range(count):
        node.put(f"f{number}", space=space)
        node.settle(1.0)


# -- pins --


def test_the_quota_of_the_unnamed_tenant_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of which only a tier is left, whoever's they are, are not under it; and of those of another tenant it displaces none
    when that is known."""
    node = Node()
    names = ["a0", "a1", "a2", "a3", "a4"]
    assert node.quota("", 2) is None
    node.put(*names)
    node.settle()
    node.arena.close()
    (node.directory / "namespaces.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "register", lambda *_: 0)  # no engine has come yet
        node.start()
    node.settle(10.0)
    assert [len(namespace.blocks) for namespace in node.namespaces] == [5]
    specs = [
        NamespaceSpec(bytes([n + 1]) * 16, RECORD_BYTES, 8, 1, fields)
        for n, fields in enumerate(({"tenant": "acme"}, {"model": "m"}))
    ]
    node.spaces = [node.engine.register(spec) for spec in specs]
    node.put("x0", "x1", "x2", "x3", space=1)
    node.settle(10.0)
    assert (node.held(*names), node.held("x0", "x1", "x2", "x3", space=1)) == (5, 2)
    assert node.engine.check() == []
    node.close()


def test_what_is_promoted_is_as_old_as_before() -> None:
    """A TTL that is set after a block came back from NVMe, and lost its place there, counts from when it was stored."""
    node = Node(nvme_slots=64, slabs=1)
    node.put("a0")
    node.settle(1.0)
    node.put(*(f"x{number}" for number in range(8)))  # takes all of DRAM
    node.settle(1000.0)
    answers: list[Acquired] = []
    node.engine.acquire(node.session, node.spaces[0], joined("a0"), answers.append)
    node.settle()
    block = node.space(0).blocks.get(joined("a0"))
    assert block is not None and block.where & IN_DRAM and block.where & IN_NVME
    node.engine.blocks.left_nvme(block)
    node.engine.release(node.session, answers[0].lease)
    assert node.ttl(500.0) is None
    node.settle()
    assert node.held("a0") == 0
    node.close()


def test_a_pinned_prefix_outlives_a_flood(node: Node) -> None:
    """Its last block is named, and all before it stay, too."""
    node.put(*chain("a", 6))
    assert node.pin("a05") is None
    flood(node)
    assert node.held(*chain("a", 6)) == 6


def test_on_nvme_the_copy_there_stays(two_tiers: Node) -> None:
    """A pin holds the lowest tier's copy; the DRAM copy may go."""
    two_tiers.put(*chain("a", 6))
    two_tiers.settle()
    assert two_tiers.pin("a05") is None
    flood(two_tiers)
    assert two_tiers.held(*chain("a", 6)) == 6
    places = finish(two_tiers.engine.residency_steps(two_tiers.spaces[0], joined(*chain("a", 6))))
    assert set(places) == {IN_NVME}


def test_what_is_unpinned_leaves(node: Node) -> None:
    """Without the pin it is evicted as any other; what another pin covers stays."""
    node.put(*chain("a", 6))
    node.pin("a05")
    node.pin("a02")
    assert node.pin("a05", is_set=False) is None
    flood(node)
    assert node.held(*chain("a", 6)) == 3
    assert isinstance(node.pin("a05", is_set=False), NotFound)


def test_a_prefix_may_be_pinned_before_it_comes(node: Node) -> None:
    """A pin of a prefix that nobody has stored takes effect when its blocks come."""
    assert node.pin("a05") is None
    node.put(*chain("a", 6))
    flood(node)
    assert node.held(*chain("a", 6)) == 6


def test_a_gap_that_closes_extends_the_pin_upwards(node: Node) -> None:
    """Stored back to front, the ancestors are found when they come."""
    node.pin("a05")
    node.put("a04", "a05", parent="a03")
    node.put("a02", "a03", parent="a01")
    node.put("a00", "a01")
    flood(node)
    assert node.held(*chain("a", 6)) == 6


@pytest.mark.parametrize("nvme_slots", [0, 24])
def test_pins_survive_a_kill(nvme_slots: int) -> None:
    """A daemon that was killed and started again holds what was pinned."""
    node = Node(nvme_slots)
    node.put(*chain("a", 6))
    node.settle()
    node.pin("a05")
    node.kill()
    flood(node)
    assert node.held(*chain("a", 6)) == 6
    assert node.engine.check() == []
    node.close()


@pytest.mark.parametrize("pieces", [1, 2000])
def test_after_a_restart_copies_in_dram_may_leave(
    two_tiers: Node, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pinned prefix that NVMe holds does not block DRAM, whatever was evicted while its rows were read."""
    monkeypatch.setattr(adoption, "ADOPT_PIECES", pieces)
    two_tiers.put(*chain("a", 8))
    two_tiers.settle()
    two_tiers.pin("a07")
    two_tiers.kill(wait=False)
    two_tiers.io.step()
    two_tiers.settle()
    flood(two_tiers, 12)
    two_tiers.io.run()
    flood(two_tiers, 30)
    assert two_tiers.used("acme", IN_DRAM) == 16
    assert set(finish(two_tiers.engine.residency_steps(two_tiers.spaces[0], joined(*chain("a", 8))))) == {
        IN_NVME
    }


def test_a_pin_beyond_the_share_is_refused(node: Node) -> None:
    """Half of 16 slots may be pinned: a ninth is refused in one line, and nothing is changed."""
    node.put(*chain("a", 8))
    node.put(*chain("b", 3))
    assert node.pin("a06") is None
    refusal = node.pin("b01")
    assert isinstance(refusal, LimitExceeded)
    assert "of dram" in str(refusal) and "retention.pinned_share_max = 0.5" in str(refusal)
    assert node.pin("b00") is None
    assert [pin.block_hash for pin in node.engine.retention.book.pins] == [
        joined(name).hex() for name in ("a06", "b00")
    ]


def test_pins_stop_no_new_blocks(node: Node) -> None:
    """A pinned prefix that grows beyond the share: the rest of it is as evictable as any other block."""
    node.pin("a15")
    assert node.put(*chain("a", 16)) == 16
    assert node.engine.blocks.guards.guarded_bytes[IN_DRAM] == 8 * SLOT_BYTES
    assert node.put(*chain("b", 8)) == 8
    assert node.engine.counters.evicted_pinned == 0


def test_another_record_size_finds_room(node: Node) -> None:
    """Pins in every slab do not shut out a record size that has no slab yet."""
    node.put(*chain("a", 8))
    node.put(*chain("b", 8))
    node.pin("a03")
    node.pin("b03")
    other = node.engine.register(NamespaceSpec(b"o" * 16, MIB, 8))
    assert len(granted(node.engine.reserve(node.session, other, joined("x"), b""))) == 1
    assert node.engine.counters.evicted_pinned > 0


# -- TTLs --


def test_an_expired_block_is_a_miss_at_once(node: Node) -> None:
    """From the moment on, before any tick, with its reason; it is dropped with the next ticks."""
    assert node.ttl(60) is None
    node.put(*chain("a", 3))
    node.clock_s += 59
    assert node.held(*chain("a", 3)) == 3
    node.clock_s += 1
    assert node.held(*chain("a", 3)) == 0
    assert node.why(*chain("a", 3)) == [outcomes.EXPIRED] * 3
    node.settle()
    assert node.used("acme") == 0
    assert node.why(*chain("a", 3)) == [outcomes.EXPIRED] * 3
    assert node.engine.counters.expired == 3


def test_use_does_not_prolong_and_storing_again_does(node: Node) -> None:
    """A lookup does not make a block younger; offering its bytes again does, without a copy."""
    node.ttl(60)
    node.put(*chain("a", 3))
    node.clock_s += 50
    assert node.held(*chain("a", 3)) == 3
    node.clock_s += 10
    assert node.held(*chain("a", 3)) == 0
    assert node.put(*chain("a", 3)) == 0
    assert node.held(*chain("a", 3)) == 3
    node.settle(59)
    assert node.held(*chain("a", 3)) == 3


def test_only_what_is_over_is_a_miss(node: Node) -> None:
    """A continuation that was stored later lives on, and is found again when its beginning is stored anew."""
    node.ttl(60)
    node.put(*chain("a", 3))
    node.settle(30)
    node.put(*chain("a", 6, 3), parent="a02")
    node.settle(30)
    assert node.held(*chain("a", 6)) == 0
    assert node.put(*chain("a", 6)) == 3
    assert node.held(*chain("a", 6)) == 6


def test_the_nearest_ttl_counts(node: Node) -> None:
    """Prefix before namespace before tenant; `never` exempts."""
    node.tenant_ttl(10, "acme")
    node.ttl(20, space=1)
    node.ttl(5, "a02", space=0)
    node.ttl(None, "b00", space=0)
    node.put(*chain("a", 5))
    node.put(*chain("b", 2))
    node.put(*chain("c", 2), space=1)
    node.put(*chain("d", 2), space=2)
    node.settle(5)
    assert node.held(*chain("a", 5)) == 2
    node.settle(5)
    assert node.held(*chain("a", 5)) == 0
    assert node.held(*chain("b", 2)) == 2
    assert node.held(*chain("c", 2), space=1) == 2
    node.settle(10)
    assert node.held(*chain("c", 2), space=1) == 0
    assert node.held(*chain("d", 2), space=2) == 2
    assert node.tenant_ttl(None, "acme", is_set=False) is None
    node.put(*chain("e", 2))
    node.settle(1000)
    assert node.held(*chain("e", 2)) == 2


def test_what_is_held_when_a_ttl_is_set_counts_from_its_storing(node: Node) -> None:
    """When that was is read from the rows."""
    node.put(*chain("a", 3))
    node.settle(40)
    node.ttl(60)
    node.settle(19)
    assert node.held(*chain("a", 3)) == 3
    node.settle(1)
    assert node.held(*chain("a", 3)) == 0


@pytest.mark.parametrize("nvme_slots", [0, 24])
@pytest.mark.parametrize("jump_s", [0.0, -5000.0])
def test_a_restart_makes_nothing_younger(nvme_slots: int, jump_s: float) -> None:
    """Times survive a kill, even when the wall clock was set back meanwhile."""
    node = Node(nvme_slots)
    node.ttl(60)
    node.put(*chain("a", 3))
    node.settle(40)
    node.settle()
    node.wall_s += jump_s
    node.kill()
    assert node.held(*chain("a", 3)) == 3
    node.settle(19)
    assert node.held(*chain("a", 3)) == 3
    node.settle(1)
    assert node.held(*chain("a", 3)) == 0
    node.settle(30)
    assert node.engine.check() == []
    assert not (node.nvme.records if node.nvme is not None else {})
    node.close()


def test_rows_of_expired_blocks_are_deleted(two_tiers: Node) -> None:
    """What is over goes from NVMe, too, though nobody needs the room."""
    two_tiers.ttl(60)
    two_tiers.put(*chain("a", 5))
    two_tiers.settle()
    assert two_tiers.nvme is not None and len(two_tiers.nvme.records) == 5
    two_tiers.settle(60)
    assert not two_tiers.nvme.records


def test_a_block_in_use_expires_too(node: Node) -> None:
    """It is a miss for others at once, and dropped by the next sweep after it is given back."""
    node.ttl(60)
    node.put("a00")
    answers: list[Acquired] = []
    node.engine.acquire(node.session, node.spaces[0], joined("a00"), answers.append)
    node.settle(60)
    assert node.held("a00") == 0
    assert node.used("acme") == 1
    late: list[Acquired] = []
    node.engine.acquire(node.session, node.spaces[0], joined("a00"), late.append)
    assert held(late[0]) == [None]
    node.engine.release(node.session, answers[0].lease)
    node.settle(EXPIRY_SWEEP_S_MIN)
    assert node.used("acme") == 0


def test_a_ttl_drops_what_is_pinned(node: Node) -> None:
    """Time over is time over; the pin holds what is stored afterwards."""
    node.put(*chain("a", 3))
    node.pin("a02")
    node.ttl(60)
    node.settle(60)
    assert node.held(*chain("a", 3)) == 0
    node.put(*chain("a", 3))
    flood(node, 20)
    assert node.held(*chain("a", 3)) == 3


# -- quotas --


def test_at_its_quota_a_tenant_displaces_its_own(node: Node) -> None:
    """The coldest of its blocks leave, nobody else's, and the misses say why."""
    assert node.quota("acme", 4) is None
    node.put(*chain("b", 6), space=2)
    for number in range(8):
        assert node.put(f"a{number}", space=number % 2) == 1
        node.settle(1)
        assert node.used("acme") <= 4
    assert node.used("beta") == 6
    assert [node.held(f"a{number}", space=number % 2) for number in range(8)] == [0] * 4 + [1] * 4
    assert node.why("a1", space=1) == [outcomes.OVER_QUOTA]


def test_what_cannot_displace_is_refused(node: Node) -> None:
    """Everything it has is in use or pinned: the new block is refused, and the miss says why."""
    node.quota("acme", 3)
    node.put(*chain("a", 3))
    node.pin("a02")
    assert node.put("c0") == 0
    assert node.why("c0") == [outcomes.OVER_QUOTA]
    node.pin("a02", is_set=False)
    assert node.put("c0") == 1


def test_a_long_prompt_keeps_its_beginning(node: Node) -> None:
    """A prompt larger than the quota does not displace what it hangs on."""
    node.quota("acme", 4)
    assert node.put(*chain("a", 3)) == 3
    node.settle(1)
    assert node.put(*chain("a", 8, 3), parent="a02") == 1
    assert node.held(*chain("a", 8)) == 4


def test_a_lowered_quota_is_reached(two_tiers: Node) -> None:
    """In both tiers."""
    two_tiers.put(*chain("a", 10))
    two_tiers.settle()
    assert two_tiers.quota("acme", 3, 5) is None
    two_tiers.settle(1)
    assert (two_tiers.used("acme"), two_tiers.used("acme", IN_NVME)) == (3, 5)


def test_a_quota_on_nvme_displaces_there(two_tiers: Node) -> None:
    """Writing down never takes more than the quota; a tier that has room for others keeps it."""
    two_tiers.quota("acme", None, 4)
    two_tiers.put(*chain("b", 6), space=2)
    for number in range(12):
        two_tiers.put(f"a{number}")
        two_tiers.settle(1)
        assert two_tiers.used("acme", IN_NVME) <= 4
    assert two_tiers.used("beta", IN_NVME) == 6
    assert two_tiers.used("acme", IN_NVME) == 4


def test_what_its_quota_kept_from_nvme_says_so(two_tiers: Node) -> None:
    """Evicted from DRAM, not on NVMe because the quota had no room there: the quota is the reason."""
    two_tiers.put(*chain("a", 3))
    two_tiers.settle()
    two_tiers.pin("a02")
    two_tiers.quota("acme", None, 3)
    two_tiers.put("c0")
    two_tiers.settle()
    assert finish(two_tiers.engine.residency_steps(two_tiers.spaces[0], joined("c0"))) == bytes([IN_DRAM])
    flood(two_tiers, 20, space=2)
    assert two_tiers.why("c0") == [outcomes.OVER_QUOTA]


def test_loads_of_others_do_not_wait_behind_a_quota(two_tiers: Node) -> None:
    """One tenant's loads that its quota holds up leave the others' alone."""
    two_tiers.put(*chain("a", 3))
    two_tiers.put(*chain("b", 3), space=2)
    two_tiers.settle()
    two_tiers.quota("acme", 1)
    two_tiers.settle(1)
    flood(two_tiers, 16, space=2)
    answers: list[Acquired] = []
    engine, spaces = two_tiers.engine, two_tiers.spaces
    first = engine.acquire(two_tiers.session, spaces[0], joined(*chain("a", 3)), answers.append)
    engine.acquire(two_tiers.session, spaces[2], joined(*chain("b", 3)), answers.append)
    two_tiers.io.run()
    assert len(answers) == 1 and None not in held(answers[0])
    first.expire()
    for answer in answers:
        engine.release(two_tiers.session, answer.lease)


def test_quotas_survive_a_kill(two_tiers: Node) -> None:
    """Usage is counted anew from what is adopted, and the quota holds at once."""
    two_tiers.quota("acme", 3, 6)
    two_tiers.put(*chain("a", 3))
    two_tiers.settle()
    two_tiers.kill()
    assert two_tiers.engine.check() == []
    for number in range(8):
        two_tiers.put(f"c{number}")
        two_tiers.settle(1)
        assert two_tiers.used("acme") <= 3 and two_tiers.used("acme", IN_NVME) <= 6


def test_a_tenant_that_is_named_late_is_counted(node: Node) -> None:
    """The names of namespaces were lost: usage moves to the tenant when an engine names it."""
    node.put(*chain("a", 3))
    (node.directory / "namespaces.json").unlink(missing_ok=True)
    node.kill()
    used = dict(node.engine.blocks.quotas.tenants(9))
    assert used["acme"][IN_DRAM] == 3 * SLOT_BYTES
    assert node.engine.check() == []


def test_a_tenant_that_is_named_late_pays_for_nobody(node: Node) -> None:
    """The quota of those without a tenant, whose blocks they were until then, displaces none of them any more."""
    node.put(*chain("a", 3))
    node.quota("", 4)
    (node.directory / "namespaces.json").unlink(missing_ok=True)
    node.kill()
    node.spaces.append(node.engine.register(NamespaceSpec(bytes([9]) * 16, RECORD_BYTES, 8, 1, {})))
    for number in range(8):
        assert node.put(f"n{number}", space=3) == 1
    assert (node.used("acme"), node.held(*chain("a", 3))) == (3, 3)
    assert node.engine.blocks.quotas.holder("", "").used[IN_DRAM] == 4 * SLOT_BYTES
    assert node.engine.check() == []


# -- the file --


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b'{"format": 9}',
        b'{"clock_ahead_s": 1e300}',
        b'{"pins": [{"namespace": "zz", "block_hash": "", "since_s": 0}]}',
    ],
)
def test_a_damaged_file_is_put_aside(node: Node, damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """The daemon starts without rules, says so, and keeps the file for whoever wants to look."""
    node.put("a00")
    node.pin("a00")
    (node.directory / "retention.json").write_bytes(damage)
    node.kill()
    assert node.engine.retention.book.rules() == []
    assert "pins, TTLs and quotas are lost" in caplog.text
    assert (node.directory / "retention.unreadable").read_bytes() == damage
    assert node.pin("a00") is None


def test_what_cannot_be_saved_changes_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: the command is refused, and the rule is not in effect."""
    monkeypatch.setattr(RuleFile, "write", lambda self, book: "no space left")
    node.put("a00")
    error = node.pin("a00")
    assert error is not None and error.code == "not_saved"
    assert not node.engine.blocks.guards
    assert node.engine.retention.book.rules() == []


def test_nothing_is_in_effect_before_it_is_on_disk(node: Node) -> None:
    """A command is answered after the write, and commands of one moment all count."""
    answers: list[RequestError | None] = []
    for name in ("a00", "b00"):
        node.engine.retention.pin(
            node.selector(0), joined(name), True, lambda error, rules: answers.append(error)
        )
    assert not answers and not node.engine.blocks.guards
    node.io.run()
    assert answers == [None, None]
    pins = RuleFile(node.directory / "retention.json").read().pins
    assert [type(pin) for pin in pins] == [Pin, Pin]


def test_a_kill_before_rows_are_deleted_does_not_make_them_young(two_tiers: Node) -> None:
    """What was dropped, and lies on NVMe still when the daemon is killed, is expired after the start, too."""
    two_tiers.ttl(60)
    two_tiers.put(*chain("a", 6))
    two_tiers.settle(10)
    two_tiers.clock_s += 60
    two_tiers.engine.tick()
    assert two_tiers.nvme is not None and len(two_tiers.nvme.records) == 6
    rows = dict(two_tiers.nvme.records)
    two_tiers.kill()
    assert two_tiers.nvme.records == rows
    assert two_tiers.held(*chain("a", 6)) == 0
    assert two_tiers.why("a00") == [outcomes.EXPIRED]
    two_tiers.settle(1)
    two_tiers.settle(1)
    assert not two_tiers.nvme.records


@pytest.mark.parametrize("dropped", [False, True])
def test_a_kill_does_not_bring_back_an_ended_namespace(two_tiers: Node, dropped: bool) -> None:
    """Killed before its blocks are dropped, or before their rows are: the next start drops them, and nothing else."""
    two_tiers.put(*chain("a", 6))
    two_tiers.put("b", space=2)
    two_tiers.settle(1)
    assert two_tiers.nvme is not None and len(two_tiers.nvme.records) == 7
    two_tiers.engine.end_namespace(two_tiers.spaces[0])
    two_tiers.engine.tick()
    two_tiers.io.run()
    if dropped:
        assert two_tiers.engine.drop_ended()
    assert len(two_tiers.nvme.records) == 7
    two_tiers.kill()
    assert two_tiers.held(*chain("a", 6)) == 0
    assert two_tiers.held("b", space=2) == 1
    two_tiers.settle(1)
    assert len(two_tiers.nvme.records) == 1
    assert two_tiers.engine.check() == []


def test_blocks_that_a_quota_keeps_from_nvme_do_not_keep_a_probe_away(two_tiers: Node) -> None:
    """Stores fail for a while; the only block that may be written is behind many that may not, and is found."""
    assert two_tiers.nvme is not None
    two_tiers.quota("acme", None, 0)
    two_tiers.nvme.fault_rate = 1.0
    for number in range(4):
        two_tiers.put(f"b{number}", space=2)
        two_tiers.io.run()
    two_tiers.put(*chain("a", 8))
    assert not two_tiers.engine.nvme.members[0].stores.closed
    two_tiers.nvme.fault_rate = 0.0
    for number in range(4):
        two_tiers.command("ttl", two_tiers.selector(2), joined(f"b{number}"), None, 0.5, True)
    two_tiers.settle(5.0)  # those that could have been tried are gone
    two_tiers.put("c0", space=2)
    for _ in range(2):
        two_tiers.settle(3.0)
    assert two_tiers.engine.nvme.members[0].stores.closed
    assert len(two_tiers.nvme.records) == 1


def test_few_blocks_under_a_quota_are_offered_again_at_once(
    two_tiers: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota may refuse all of them, every time: the others are not held up."""
    monkeypatch.setattr(write_queue, "QUOTA_REQUEUE_BLOCKS", 3)
    two_tiers.quota("acme", None, 0)
    two_tiers.put(*chain("a", 8))
    two_tiers.io.run()
    undemoted = two_tiers.engine.blocks.writes.refused
    assert len(undemoted) == 8
    first = list(undemoted)[:3]
    two_tiers.settle(60.0)
    assert list(undemoted)[-3:] == first
    two_tiers.quota("acme", None, None)
    two_tiers.settle(60.0)
    assert not undemoted and two_tiers.nvme is not None and len(two_tiers.nvme.records) == 8


def test_a_ttl_holds_while_rows_are_read_at_a_start(two_tiers: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block whose time was not saved before the kill expires in time, however long the start takes."""
    monkeypatch.setattr(adoption, "ADOPT_PIECES", 1)
    two_tiers.ttl(60)
    two_tiers.put(*chain("a", 4))
    two_tiers.io.run()
    two_tiers.kill(wait=False)
    assert two_tiers.held(*chain("a", 4)) == 4
    two_tiers.clock_s += 60
    assert not two_tiers.engine.adoption.done
    assert two_tiers.held(*chain("a", 4)) == 0
    two_tiers.io.run()
    assert two_tiers.held(*chain("a", 4)) == 0


def test_what_leaves_dram_while_rows_are_read_does_not_become_young(
    two_tiers: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row is found later, and has the time at which it was stored."""
    monkeypatch.setattr(adoption, "ADOPT_PIECES", 1)
    two_tiers.ttl(60)
    two_tiers.put(*chain("a", 4))
    for _ in range(4):
        two_tiers.settle(10)  # the times are saved, and until when
    two_tiers.kill(wait=False)
    flood(two_tiers, 20)
    two_tiers.clock_s += 1
    two_tiers.engine.tick()
    two_tiers.io.run()
    assert two_tiers.held(*chain("a", 4)) == 0


def test_a_start_that_is_cut_short_makes_nothing_young(
    two_tiers: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two kills, the second while rows are read: a block that had no time has the one of the rule still."""
    monkeypatch.setattr(adoption, "ADOPT_PIECES", 1)
    two_tiers.put(*chain("a", 4))
    two_tiers.io.run()
    two_tiers.kill(wait=False)
    two_tiers.ttl(60)
    for _ in range(4):
        two_tiers.settle(10)
    two_tiers.kill(wait=False)
    assert two_tiers.held(*chain("a", 4)) == 4
    two_tiers.clock_s = 60
    assert two_tiers.held(*chain("a", 4)) == 0
