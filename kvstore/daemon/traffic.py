"""What traffic says is wrong now: bytes that come back wrong, quotas that keep out what is asked for, engines that are cold beside warm ones.

    sums that only grow ── every few seconds ──▶ Lately ─▶ grown in the last two minutes ─▶ problems

So each is over two minutes after it was met last, at the latest. Sums since the start say nothing of now: they stay in counters,
and in `kvstore doctor` as notes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Final, Generic, TypeVar

from kvstore.engine.engine import Engine
from kvstore.engine.holdings import Kind
from kvstore.protocol import outcomes
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from kvstore.units import format_bytes, percent, plural
from replication.problems import Problem

LATELY_S: Final = 120.0
LOOK_S: Final = 5.0  # between two looks at the sums
QUOTA_TOKENS_MIN: Final = 5000  # asked for lately; of less nothing is said
QUOTA_SHARE: Final = 0.1  # of what a tenant asks for, missed for its quota
KIND_BLOCKS_MIN: Final = 500  # asked for lately; of less nothing is said
WARM_SHARE: Final = 0.2  # of what is asked for; beside less nobody is cold
COLD_SHARE: Final = 0.25  # of what the warmest kind finds
SPAN: Final = "in the last 2 min"
_QUOTA_FIX: Final = (
    "kvstore retention lists quotas; kvstore quota --tenant NAME --dram none --nvme none lifts one"
)
_KIND_FIXES: Final = (
    ({"hash", "hash seed"}, "give all of them one PYTHONHASHSEED and one --prefix-caching-hash-algo"),
    ({"format"}, "install one version of kvstore for all engines"),
)
_KIND_FIX: Final = "give all of them the same settings, if that is not as wanted; kvstore explain --engines has all that differs"

K = TypeVar("K", bound=Hashable)
Sum = tuple[int, ...]


class Lately(Generic[K]):
    """How much sums have grown in the last LATELY_S."""

    def __init__(self, sums: Callable[[], Mapping[K, Sum]]) -> None:
        self._sums = sums
        self._seen: deque[tuple[float, Mapping[K, Sum]]] = deque()
        self.look(float("-inf"))

    def look(self, now_s: float) -> None:
        """At the sums. What is new in them counts from now on."""
        self._seen.append((now_s, self._sums()))
        while len(self._seen) > 1 and self._seen[1][0] <= now_s - LATELY_S:
            self._seen.popleft()

    def grown(self) -> Iterator[tuple[K, Sum]]:
        for key, sums in self._seen[-1][1].items():
            first = next(seen[key] for _, seen in self._seen if key in seen)
            yield key, tuple(now - then for now, then in zip(sums, first, strict=True))


class Traffic:
    """Of one daemon. Asked on the engine's thread."""

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        """clock: never jumps."""
        self._engine = engine
        self._clock = clock
        self._look_at_s = float("-inf")
        self._damage = Lately(self._corrupt)
        self._quotas = Lately(self._tokens)
        self._kinds = Lately(self._blocks)

    def look(self) -> None:
        """Once a tick."""
        now_s = self._clock()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
            for lately in (self._damage, self._quotas, self._kinds):
                lately.look(now_s)

    def wrong(self) -> Iterator[Problem]:
        yield from self._damaged()
        yield from self._kept_out()
        yield from self._cold()

    # -- sums --

    def _corrupt(self) -> dict[str, Sum]:
        engine = self._engine
        devices = {member.name: (member.device.counters.corrupt,) for member in engine.nvme.members}
        return {"dram": (engine.counters.corrupt_dram,), **devices}

    def _tokens(self) -> dict[str, Sum]:
        """Of each tenant: asked for, and of these missed for a quota."""
        found: dict[str, Sum] = {}
        for (_, tenant), sums in self._engine.accounts.totals.since_start.publish():
            asked, missed = found.get(tenant, (0, 0))
            wanted = sum(sums.tokens) - sums.tokens[outcomes.ENGINE]
            found[tenant] = asked + wanted, missed + sums.tokens[outcomes.OVER_QUOTA]
        return found

    def _blocks(self) -> dict[Kind, Sum]:
        """Of kinds of engines of one model and tenant: asked for, and found."""
        return {
            kind: (sum(space.asked_blocks for space in spaces), sum(space.hit_blocks for space in spaces))
            for kind, spaces in self._engine.holdings.kinds.items()
        }

    # -- what is wrong --

    def _damaged(self) -> Iterator[Problem]:
        directories = {member.name: f"{member.device.path}: " for member in self._engine.nvme.members}
        for level, (blocks,) in self._damage.grown():
            if blocks > 0:
                where = directories.get(level, "")
                text = f"{where}{plural(blocks, 'block')} came back with other bytes {SPAN}; each was a miss"
                fix = "memtest of the machine; the log names the blocks"
                if where:
                    fix = "smartctl -a of the disk, memtest of the machine; does somebody else write there?"
                yield Problem("damage", level, text, fix, count=blocks)

    def _kept_out(self) -> Iterator[Problem]:
        for tenant, (asked, missed) in self._quotas.grown():
            if asked >= QUOTA_TOKENS_MIN and missed >= QUOTA_SHARE * asked:
                text = f"its quota{self._limits(tenant)} keeps out {percent(missed / asked)} of what it asked for {SPAN}"
                yield Problem("quota", tenant or "(no tenant)", text, _QUOTA_FIX, "warning")

    def _limits(self, tenant: str) -> str:
        """Of a tenant as a whole; "" where its namespaces have them."""
        limits = self._engine.blocks.quotas.holder("", tenant).limits
        named = (("DRAM", limits[IN_DRAM]), ("NVMe", limits[IN_NVME]))
        said = ", ".join(f"{format_bytes(limit)} of {name}" for name, limit in named if limit is not None)
        return f" ({said})" if said else ""

    def _cold(self) -> Iterator[Problem]:
        groups: dict[tuple[str, str], list[tuple[Kind, int, int]]] = {}
        for kind, (asked, hit) in self._kinds.grown():
            if asked >= KIND_BLOCKS_MIN:
                groups.setdefault((kind.model, kind.tenant), []).append((kind, asked, hit))
        for (model, tenant), kinds in groups.items():
            warm, warm_share = max(
                ((kind, hit / asked) for kind, asked, hit in kinds), key=lambda one: one[1]
            )
            for kind, asked, hit in kinds:
                if warm_share >= WARM_SHARE and hit / asked < COLD_SHARE * warm_share:
                    text = (
                        f"engines with {kind.said} found {percent(hit / asked)} of {plural(asked, 'block')} asked for {SPAN}, "
                        f"those with {warm.said} {percent(warm_share)}: they share nothing"
                    )
                    subject = f"{model or '(no model)'}, tenant {tenant or '(none)'}, {kind.said}"
                    yield Problem("engines", subject, text, _fix(kind), "warning")


def _fix(kind: Kind) -> str:
    return next((fix for fields, fix in _KIND_FIXES if set(kind.fields) <= fields), _KIND_FIX)
