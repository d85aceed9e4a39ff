"""What an engine of eight ranks costs the daemon: tokens a second through its engine, no bytes moved.

    lookup: missed ─▶ reserve (others are evicted) ─▶ 8 × fill, the last one commits ─▶ lookup ─▶ acquire ─▶ release

Prompts of 8,192 tokens in blocks of 16, each a new one, in a full arena with all of its rows. Times are of the
processor. The eight ranks share one record, so there is one of everything but fill.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from benchmarks.bench.plan import Plan
from kvstore.engine.engine import Engine
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.ledger.accounts import Asking
from kvstore.policies.base import Policies
from kvstore.policies.names import OURS, SELECTABLE
from kvstore.protocol.frames import LEASE_HASHES_MAX, Acquired
from kvstore.tools.bench.dram import HASH_BYTES
from kvstore.tools.bench.figures import Value
from kvstore.tools.replay.cell import NoIo
from tiers.base import CHECKSUM_BYTES
from tiers.checksum import pack_columns
from tiers.constants import OWNER_ANY, SLAB_BYTES, SLOT_BYTES_MIN
from tiers.dram.arena import open_arena
from tiers.namespace_spec import NamespaceSpec

RANKS = 8
BLOCK_TOKENS = 16
PROMPT_BLOCKS = LEASE_HASHES_MAX  # in one lease
COLUMN_BYTES = SLOT_BYTES_MIN // RANKS


def measure(plan: Plan, _home: Path, arena_directory: Path) -> dict[str, Value]:
    """Raises TierError."""
    path = arena_directory / f"kvstore-bench-ranks-{time.time_ns()}.arena"
    arena = open_arena(path, plan.rank_slabs * SLAB_BYTES)
    try:
        policies: Policies = SELECTABLE[OURS]()
        engine = Engine(arena, [], NamespaceRegistry(), NoIo(), policies)
        engine.adopt()
        columns = pack_columns([COLUMN_BYTES] * RANKS)
        space = engine.register(
            NamespaceSpec(bytes(16), RANKS * COLUMN_BYTES, HASH_BYTES, BLOCK_TOKENS, {}, columns)
        )
        ask = _Prompts(engine, space)
        fill = (
            arena.capacity_bytes // SLOT_BYTES_MIN // PROMPT_BLOCKS + 2
        )  # so that each prompt evicts another one
        for number in range(fill):
            ask(number)
        before_s = time.process_time()
        for number in range(fill, fill + plan.rank_prompts):
            ask(number)
        taken_s = time.process_time() - before_s
    finally:
        arena.close(unlink=True)
    return {"tp8_tokens_per_s_block16": round(plan.rank_prompts * PROMPT_BLOCKS * BLOCK_TOKENS / taken_s)}


class _Prompts:
    """Asks for new prompts, as an engine's scheduler and its ranks do."""

    def __init__(self, engine: Engine, space: int) -> None:
        self._engine, self._space = engine, space
        self._session = engine.open_session(OWNER_ANY, "bench")

    def __call__(self, number: int) -> None:
        engine, session, space = self._engine, self._session, self._space
        hashes = hashlib.shake_128(str(number).encode()).digest(PROMPT_BLOCKS * HASH_BYTES)
        asking = Asking(number + 1, tokens=PROMPT_BLOCKS * BLOCK_TOKENS)
        found = engine.find([space], hashes, asking)
        engine.book([space], hashes, found, asking)
        reserved = engine.reserve(session, space, hashes, b"", asking.ticket)
        for rank in range(RANKS):
            engine.fill(session, reserved.lease, rank, bytes(CHECKSUM_BYTES * PROMPT_BLOCKS))
        again = asking._replace(ticket=-number - 1)
        found = engine.find([space], hashes, again)
        engine.book([space], hashes, found, again)
        answers: list[Acquired] = []
        engine.acquire(session, space, hashes, answers.append, ticket=again.ticket)
        engine.release(session, answers[0].lease)
        assert found.usable == PROMPT_BLOCKS, "a prompt that was stored is no hit"
