"""Retention against a model: random rules, stores, lookups, late writes, time and kills."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.errors import LimitExceeded, NotFound
from kvstore.protocol.frames import Acquired
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from tests.engine.test_retention import SLOT_BYTES, Node, chain, joined

NAMES = [*chain("a", 8), *chain("b", 5)]


class RetentionMachine(RuleBasedStateMachine):
    """Random rules, stores, lookups, late writes, time, kills: the promises hold after every step."""

    @initialize(nvme_slots=st.sampled_from([0, 6, 20]), policy=st.sampled_from(["lru", "kvstore"]))
    def begin(self, nvme_slots: int, policy: str) -> None:
        self.node = Node(nvme_slots, slabs=1, policy=policy)
        self.stored_s: dict[tuple[int, str], float] = {}  # the latest a block can have been stored
        self.ttls: dict[int, float] = {}
        self.limits: dict[tuple[str, int], int] = {}

    @rule(space=st.integers(0, 2), which=st.sampled_from("ab"), lo=st.integers(0, 5), n=st.integers(1, 4))
    def put(self, space: int, which: str, lo: int, n: int) -> None:
        names = [name for name in NAMES if name.startswith(which)][lo : lo + n]
        if not names:
            return
        parent = f"{which}{lo - 1:02d}" if lo else ""
        self.node.put(*names, parent=parent, space=space)
        self.stored_s.update({(space, name): self.node.clock_s for name in names})

    @rule(space=st.integers(0, 2), which=st.sampled_from("ab"))
    def look(self, space: int, which: str) -> None:
        names = [name for name in NAMES if name.startswith(which)]
        hits = self.node.held(*names, space=space)
        ttl_s = self.ttls.get(space)
        for name in names[:hits]:
            assert ttl_s is None or self.node.clock_s < self.stored_s[space, name] + ttl_s

    @rule(space=st.integers(0, 2), name=st.sampled_from(NAMES), is_set=st.booleans())
    def pin(self, space: int, name: str, is_set: bool) -> None:
        error = self.node.pin(name, space, is_set)
        assert error is None or isinstance(error, (LimitExceeded, NotFound))

    @rule(space=st.integers(0, 2), ttl_s=st.sampled_from([None, 5.0, 30.0]))
    def ttl(self, space: int, ttl_s: float | None) -> None:
        self.node.ttl(ttl_s, space=space)
        self.ttls.pop(space, None)
        if ttl_s is not None:
            self.ttls[space] = ttl_s
        known = {key: self.node.clock_s for key in self.stored_s if key[0] == space}
        self.stored_s.update(known)  # at the latest: its time may not have been noted before

    @rule(
        tenant=st.sampled_from(["acme", "beta"]),
        dram=st.sampled_from([None, 2, 5]),
        nvme=st.sampled_from([None, 3]),
    )
    def quota(self, tenant: str, dram: int | None, nvme: int | None) -> None:
        self.node.quota(tenant, dram, nvme)
        self.allow()

    def allow(self) -> None:
        """What is in use, pinned, or came back with a restart may be above a quota; it never becomes more."""
        for tenant in ("acme", "beta"):
            holder = self.node.engine.blocks.quotas.holder("", tenant)
            for bit in (IN_DRAM, IN_NVME):
                self.limits.pop((tenant, bit), None)
                limit = holder.limits[bit]
                if limit is not None:
                    self.limits[tenant, bit] = max(limit, holder.used[bit])

    @rule(seconds=st.sampled_from([0.0, 1.0, 4.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.node.settle(seconds)

    @rule()
    def one_step(self) -> None:
        if self.node.io.waiting:
            self.node.io.half_step()

    @rule(space=st.integers(0, 2))
    def read(self, space: int) -> None:
        answers: list[Acquired] = []
        asked = joined(*NAMES[:8])
        self.node.engine.acquire(self.node.session, self.node.spaces[space], asked, answers.append).expire()
        if answers[0].lease:
            self.node.engine.release(self.node.session, answers[0].lease)

    @rule(back_s=st.sampled_from([0.0, 1000.0]))
    def daemon_is_killed(self, back_s: float) -> None:
        self.node.wall_s -= back_s
        self.node.kill()
        self.allow()

    @invariant()
    def promises_hold(self) -> None:
        if not hasattr(self, "node"):
            return
        node = self.node
        assert node.engine.check() == []
        for (tenant, bit), limit in self.limits.items():
            used = node.engine.blocks.quotas.holder("", tenant).used[bit]
            assert node.used(tenant, bit) * SLOT_BYTES <= used <= limit
        self.allow()
        guards = node.engine.blocks.guards
        for bit in (IN_DRAM, IN_NVME):
            assert guards.guarded_bytes[bit] <= guards.limits[bit]

    @rule(space=st.integers(0, 2))
    def guarded_blocks_stay(self, space: int) -> None:
        """Whatever others store, what is guarded now is held afterwards."""
        room = self.node.engine.blocks
        blocks = list(self.node.space(space).blocks.values())
        guarded = [b for b in blocks if any(room.guards.guards(b, bit) for bit in (IN_DRAM, IN_NVME))]
        if self.ttls:
            return
        for number in range(12):
            self.node.put(f"x{number}", space=(space + 1) % 3)
            self.stored_s[(space + 1) % 3, f"x{number}"] = self.node.clock_s
        assert all(block.where for block in guarded)

    def teardown(self) -> None:
        if hasattr(self, "node"):
            self.node.settle(60)
            assert self.node.engine.check() == []
            self.node.close()


RetentionMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestRetention = RetentionMachine.TestCase
