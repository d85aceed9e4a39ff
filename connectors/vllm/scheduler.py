"""The scheduler's half: what to load, what to save, and which blocks must stay alive for it.

A request's blocks, by what the connector knows of them:

    [ held by the daemon: not offered again ][ computed or local: offered when full ][ not full ]
    0                                    offered                                 tokens / block

    lookup ─▶ remember the hit ─▶ blocks are allocated ─▶ Fetching: Load ─▶ reported received (or failed)
    every step: blocks that this step fills ─▶ Storing: Save ─▶ reported by every rank ─▶ committed

All ranks of an engine fill and read columns of one record: what to load and to save is decided here,
once, and slots are leased here. Ranks copy, hash and report; they make no call.

What keeps the source of an asynchronous save alive:

* a running request keeps its blocks;
* a finished request with saves under way keeps them until every rank has reported, and is
  told so (`draining`);
* a sliding window moves on while its blocks are copied: these are held in vLLM's block pool
  (one more reference) until every rank has reported;
* a preempted request gives its blocks back at once: before each step the block tables are
  compared with the saves under way, and those that lost a block are cancelled before the step
  can overwrite it.

What keeps bad KV out of the store: a load that fails leaves blocks that are not what their hash
says, until vLLM has computed them again. It may be a load of ours or, under MultiConnector, of
another connector; all of them arrive as `invalid_block_ids`. An asynchronous load is over before
anything is computed from it. A synchronous one is not, so nothing that a step with synchronous
loads computes is saved before the workers have reported that step:

    step with synchronous loads ─▶ saves wait ─▶ its report ─┬─ nothing invalid: saves go on
                                                             └─ `_distrust`: requests of that time
                                                                are not saved any more (`tainted`)

What keeps old weights out of the new namespace: when the cache is reset (`new_epoch`), what was
ordered for the old namespace ends there or is dropped, loads under way fail, and requests of that
time stay `tainted` until they start again from nothing. If vLLM could not empty its own prefix
cache, requests that start from it are tainted too (`_stale_local`).
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from connectors import constants as limits
from connectors.transfer.fetching import Fetching
from connectors.transfer.link import Line
from connectors.transfer.orders import Column, Columns, Part
from connectors.transfer.prefill import PrefillSpeed
from connectors.transfer.settings import Settings
from connectors.transfer.storing import Store, Storing
from connectors.transfer.weights import DigestInBackground, default_cache_dir, weight_files, weights_digest
from connectors.vllm.geometry import Group, Plan, Unsupported, plan_for
from connectors.vllm.guard import Guard
from connectors.vllm.messages import Orders, Rank, Report, this_node
from connectors.vllm.namespace import identity_fields, joined_facts, space_spec
from connectors.vllm.stats import Tally
from kvstore.client import IN_ANY, ClientError, Namespace


@dataclass(slots=True)
class Hit:
    """The daemon's answer for a prompt: local tokens before the hit, tokens it adds. It is used until
    `stale_s`, for a request that waits: vLLM asks again in every step."""

    local_tokens: int
    tokens: int
    prompt_tokens: int
    stale_s: float


@dataclass(slots=True)
class Tracked:
    """One request. offered: by group, blocks before it were offered or are held. blocks of the
    request are not saved while it is `tainted`, never loaded again once a load `failed`. ticket: what
    the daemon's accounts know the lookup by, until its answer is used. looked_up: the ticket of its latest
    lookup. counted: in our statistics."""

    request: Any
    offered: list[int]
    hit: Hit | None = None
    sources: dict[CacheHitSource, int] = field(default_factory=dict)
    loading: bool = False
    failed: bool = False
    tainted: bool = False
    ticket: int = 0
    looked_up: int = 0
    counted: bool = False


class SchedulerHalf:
    """Called by vLLM's scheduler thread only. It asks the daemon for lookups and for what is in DRAM; threads
    of Fetching and Storing do what may take longer."""

    def __init__(
        self, settings: Settings, vllm_config: Any, kv_cache_config: Any, guard: Guard, tally: Tally
    ) -> None:
        self.guard, self._tally, self._settings = guard, tally, settings
        self._config = vllm_config
        self._lines: list[Line] = []
        role = vllm_config.kv_transfer_config
        self._loads, self._saves = role.is_kv_consumer, role.is_kv_producer
        self._world = int(vllm_config.parallel_config.world_size)
        self._line = self._open_line(settings.lookup_timeout_s, "scheduler")
        self._plan: Plan | None = None
        try:
            self._plan = plan_for(kv_cache_config, vllm_config)
        except Unsupported as reason:
            guard.say_once(f"this model's KV is not stored: {reason}")
        self._sync = settings.load == "sync" and self._may_load_synchronously()
        self._weights = DigestInBackground(self._digest_weights, self._weights_unknown)
        self._weights.wait(limits.WEIGHTS_START_WAIT_S)
        self._ranks: list[Rank] = []
        self._ranks_due_s, self._epoch = 0.0, ""
        self._pool: Any = None
        self._version = 0  # of the namespaces
        self._columns: dict[int, Columns] = {}  # by group; empty while the namespaces are not known
        # To be ended: the number of the first store that is not theirs, and the namespaces of one epoch.
        self._old_spaces: deque[tuple[int, list[Namespace]]] = deque(maxlen=limits.EPOCHS_OWED_MAX)
        self._requests: dict[str, Tracked] = {}
        self._fetching = Fetching(self._line, self._world, tally.add, guard.note)
        is_sync = settings.save == "sync"
        save_timeout_s = min(settings.save_timeout_s, limits.SYNC_WAIT_S_MAX if is_sync else float("inf"))
        line = self._open_line(save_timeout_s, "saves")
        lines = line if is_sync else self._line, line
        self._storing = Storing(lines, settings.save_queue_bytes, tally.add, guard.note, self._through)
        self._threads: list[threading.Thread] = []
        self._start_threads()
        self._next_store = 0
        self._debts = self._line.debts
        self._tickets = itertools.count(int.from_bytes(os.urandom(5), "little") << 20)  # no other engine's
        self._new_draining: list[str] = []
        self._new_cancels: list[int] = []
        self._stale_local = False  # vLLM's own prefix cache may hold blocks of older weights
        self._unsent: list[Store] = []  # of requests that finished since the last step, and of this step
        self._prefill = PrefillSpeed()
        self._sync_step = self._proven_step = 0  # the last step with synchronous loads, and the last reported
        self._resolve: Callable[[str], Sequence[Sequence[int]]] = lambda _: ()  # a request's blocks, by group
        self._ended: list[Sequence[Sequence[int]]] = []  # blocks of requests that ended meanwhile

    def _open_line(self, timeout_s: float, name: str) -> Line:
        line = Line(self._settings.kvstore_socket, timeout_s, f"vllm {name}")
        self._lines.append(line)
        return line

    def _start_threads(self) -> None:
        timeout_s = min(self._settings.load_timeout_s, limits.CALL_TIMEOUT_S)
        if self._loads:
            for number in range(self._settings.load_threads):
                line = self._open_line(timeout_s, f"loads {number}")
                self._threads.append(threading.Thread(target=self._fetching.serve, args=(line,), daemon=True))
        if self._saves:
            self._threads.append(threading.Thread(target=self._storing.serve, daemon=True))
        for thread in self._threads:
            thread.start()

    def _may_load_synchronously(self) -> bool:
        """A synchronous load can fail inside its step. vLLM copes with that for one KV group, and
        only where no later step was planned already: it would deliver what that step sampled."""
        reason = ""
        if self._plan is not None and len(self._plan.groups) > 1:
            reason = "a model with one KV group"
        elif self._config.max_concurrent_batches > 1:
            reason = "an engine without asynchronous scheduling and pipeline stages"
        if reason:
            self.guard.say_once(f"load = sync needs {reason}; loads are asynchronous")
        return not reason

    # ---- becoming ready ------------------------------------------------------------------

    def know_ranks(self, ranks: list[Rank]) -> None:
        """What the workers said of their blocks; nothing is known before all of them have."""
        if len(ranks) < self._world:
            return
        self._ranks = ranks
        troubles = {rank.trouble for rank in ranks if rank.trouble}
        if {rank.node for rank in ranks} - {this_node()}:
            troubles.add("its ranks are on several nodes, which one daemon cannot serve")
        if troubles:
            self._plan = None
            self.guard.say_once(f"this model's KV is not stored: {'; '.join(sorted(troubles))}")

    def _awaits_ranks(self) -> bool:
        """Whether all that is missing is what the workers say with the output of their first step."""
        if self._ranks or self._plan is None or self._weights.result is None:
            return False
        now_s = time.monotonic()
        self._ranks_due_s = self._ranks_due_s or now_s + limits.RANKS_WAIT_S
        return now_s < self._ranks_due_s

    def know_pool(self, block_pool: Any) -> None:
        """vLLM's pool of blocks, where blocks of sliding windows are held while they are saved."""
        self._pool = block_pool

    def new_epoch(self) -> None:
        """The weights may have changed under us: nothing stored until now is ours any more.

        Running requests keep their KV, which is of the old weights. Workers fail the loads that they
        have under way as soon as they hear of the new namespaces. A namespace that a reset made is ours
        alone and is ended; the one before the first reset is that of all engines with these weights.
        """
        if self._epoch and self._columns:  # the first namespaces are not only ours
            self._old_spaces.append((self._next_store, [group.space for group in self._columns.values()]))
            self._end_old_spaces()
        self._epoch = os.urandom(8).hex()
        self._columns = {}
        for tracked in self._requests.values():
            tracked.tainted, tracked.hit = True, None
        self._drop_unsent()
        self._fetching.drop_all()
        self._stale_local = self._pool is None or bool(
            len(self._pool.cached_block_hash_to_block)
            or self._pool.get_num_free_blocks() < self._pool.num_gpu_blocks - 1  # the null block
        )
        if self._stale_local:
            self.guard.say_once(
                "the connector's cache was reset and vLLM's own was not: what requests find there is not stored"
            )

    def _end_old_spaces(self) -> None:
        """Tell the daemon which namespaces nobody will read again, when nothing is saved to them any more."""
        while self._old_spaces:
            next_store, spaces = self._old_spaces[0]
            if any(number < next_store for number in self._storing.stores):
                return
            try:
                for space in spaces:
                    self._line.client.unregister(space, end=True)
            except ClientError as error:
                self.guard.note("end_namespace", error)
                return
            self._old_spaces.popleft()

    def _digest_weights(self, stop: Any) -> str:
        if self._settings.model_digest:
            return self._settings.model_digest
        cache = self._settings.cache_dir
        directory = default_cache_dir() if not cache else type(default_cache_dir())(cache)
        models = [self._config.model_config]
        draft = getattr(getattr(self._config, "speculative_config", None), "draft_model_config", None)
        if draft is not None and draft.model != models[0].model:
            models.append(draft)
        return " ".join(weights_digest(weight_files(m.model, m.revision), directory, stop) for m in models)

    def _weights_unknown(self, error: Exception) -> None:
        self.guard.say_once(
            f"the weights cannot be told from others, so nothing is stored or loaded ({error}); set model_digest"
        )

    def _ready(self) -> bool:
        """Whether namespaces are known; makes them as soon as all that names them is."""
        if self._columns:
            return True
        weights = self._weights.result
        if self._plan is None or weights is None or not self._ranks:
            return False
        from vllm.v1.core import kv_cache_utils

        seed = getattr(kv_cache_utils, "NONE_HASH", None)
        if seed is None:
            return False
        if "xxhash" in str(self._config.cache_config.prefix_caching_hash_algo) and not os.environ.get(
            "PYTHONHASHSEED"
        ):
            self.guard.say_once(
                "block hashes differ from process to process: set PYTHONHASHSEED, or use sha256"
            )
        identity = identity_fields(self._config, self._settings.tenant, weights, bytes(seed), self._epoch)
        try:
            self._columns = self._make_columns(self._plan, identity, len(seed))
        except ClientError as reason:
            self._plan = None
            self.guard.say_once(f"this model's KV is not stored: {reason}")
            return False
        self._version += 1
        return True

    def _make_columns(self, plan: Plan, identity: dict[str, str], hash_bytes: int) -> dict[int, Columns]:
        """One namespace for each group: its records have a column for each shard, in the order of shards. Raises
        Refused where there are more columns than a record may have."""
        made: dict[int, Columns] = {}
        for group in plan.groups:
            facts = {
                rank.shard: rank.groups[group.index] for rank in self._ranks if group.index in rank.groups
            }
            facts = dict(sorted(facts.items()))
            sizes = [shard.record_bytes for shard in facts.values()]
            spec = space_spec({**identity, **joined_facts(facts)}, sizes, group.block_tokens)
            space = self._line.client.namespace(
                spec.digest, spec.record_bytes, hash_bytes, group.block_tokens, spec.fields, columns=sizes
            )
            starts = enumerate(itertools.accumulate(sizes, initial=0))
            of_shard = {shard: Column(*start) for shard, start in zip(facts, starts, strict=False)}
            lease_blocks = max(1, min(limits.LEASE_BLOCKS_MAX, limits.LEASE_BYTES_MAX // max(sizes)))
            made[group.index] = Columns(group.index, space, of_shard, lease_blocks)
        return made

    # ---- looking up ----------------------------------------------------------------------

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after `local_tokens` can be loaded, and whether between steps. None: ask again."""
        self._note_start(request, local_tokens)
        if self._awaits_ranks():
            return None, False  # also where nothing is loaded: what is computed meanwhile would not be saved
        if not self._loads or request.skip_reading_prefix_cache:
            return 0, False
        plan, tracked = self._plan, self._track(request)
        if plan is None or not self._ready() or tracked.failed or tracked.tainted:
            self._count(tracked, "declined")
            return 0, False
        hit = tracked.hit
        if (
            hit is None
            or (hit.local_tokens, hit.prompt_tokens) != (local_tokens, request.num_tokens)
            or time.monotonic() >= hit.stale_s
        ):
            hit = self._look_up(plan, tracked, local_tokens)
        return hit.tokens, self._sync is False and hit.tokens > 0

    def _count(self, tracked: Tracked, outcome: str) -> None:
        """Once for each start of a request, however often vLLM asks while it waits."""
        if not tracked.counted:
            self._tally.add(outcome)
            tracked.counted = True

    def _look_up(self, plan: Plan, tracked: Tracked, local_tokens: int) -> Hit:
        """Ask the daemon. Raises what the client raises; vLLM is told "nothing" then, and for as long."""
        request = tracked.request
        tracked.hit = hit = Hit(local_tokens, 0, request.num_tokens, time.monotonic() + limits.LOOKUP_FRESH_S)
        self._debts.pay()
        if not tracked.counted:
            self._tally.add("lookup_tokens", max(0, request.num_tokens - local_tokens))
        self._count(tracked, "lookups")
        tracked.looked_up = tracked.ticket = tracked.ticket or next(self._tickets)
        asking = {
            "ticket": tracked.ticket,
            "tokens": request.num_tokens,
            "local_tokens": min(local_tokens, request.num_tokens),
            "prefill_tokens_per_s": self._prefill.tokens_per_s,
        }
        usable = request.num_tokens - 1 if self._sync else request.num_tokens
        try:
            held = self._held_tokens(plan, request.block_hashes, usable, asking)
        except Exception:
            self._owe(plan, tracked, request.block_hashes, local_tokens)
            raise
        for position, group in enumerate(plan.groups):
            tracked.offered[position] = group.blocks_in(held)
        hit.tokens = max(0, held - local_tokens)
        return hit

    def _owe(self, plan: Plan, tracked: Tracked, block_hashes: Sequence[bytes], local_tokens: int) -> None:
        """A lookup was not answered in time, and may count in the daemon's accounts as if it had been."""
        ticket, tracked.ticket = tracked.ticket, 0
        if not plan.full:
            return
        group = plan.full[0]
        first = local_tokens // group.block_tokens
        hashes = plan.hashes(group, block_hashes, first, first + 1)
        if hashes:
            self._debts.owe(ticket, local_tokens, self._columns[group.index].space, hashes[0])

    def _note_start(self, request: Any, local_tokens: int) -> None:
        """vLLM asks when a request starts, or starts again: its KV is what it finds in vLLM's own cache."""
        plan, tracked = self._plan, self._requests.get(request.request_id)
        finer = plan is not None and plan.hash_tokens < plan.align_tokens  # hits that we are not told of
        if self._stale_local and (local_tokens or finer):
            self._track(request).tainted = True
        elif tracked is not None and tracked.tainted and not local_tokens:
            tracked.tainted = False
            tracked.offered = [0] * len(tracked.offered)
            for store in self._storing.stores.values():  # it may get the same blocks, for other bytes
                if store.request_id == request.request_id and not store.cancelled:
                    self._new_cancels += self._storing.cancel(store)

    def _held_tokens(
        self, plan: Plan, block_hashes: Sequence[bytes], usable: int, asking: dict[str, Any]
    ) -> int:
        found = tokens = min(usable, len(block_hashes) * plan.hash_tokens)
        if plan.full:
            found = tokens = self._full_tokens(plan, block_hashes, tokens, asking)
        tokens -= tokens % plan.align_tokens
        if tokens and plan.windowed:
            tokens = self._windowed_tokens(plan, block_hashes, tokens)
        if tokens < found and plan.full:
            self._line.client.settle(asking["ticket"], tokens)
        return tokens

    def _full_tokens(
        self, plan: Plan, block_hashes: Sequence[bytes], tokens: int, asking: dict[str, Any]
    ) -> int:
        """Groups of equal block size are asked about in one call: all of them must hold a block."""
        more = False  # the first lookup of a request opens its account, the others can only lower it
        for block_tokens in sorted({group.block_tokens for group in plan.full}):
            groups = [group for group in plan.full if group.block_tokens == block_tokens]
            count = min(tokens // block_tokens, limits.LOOKUP_HASHES_MAX)
            hashes = plan.hashes(groups[0], block_hashes, 0, count)
            spaces = [self._columns[group.index].space for group in groups]
            for start in range(0, len(spaces), limits.LOOKUP_SPACES_MAX):
                if not hashes:
                    return 0
                found = self._line.client.lookup(
                    spaces[start : start + limits.LOOKUP_SPACES_MAX], hashes, **asking, more=more
                )
                hashes, more = hashes[:found], True
            tokens = min(tokens, len(hashes) * block_tokens)
        return tokens

    def _windowed_tokens(self, plan: Plan, block_hashes: Sequence[bytes], tokens: int) -> int:
        """The longest hit whose last window is held by every windowed group; never less than the window."""
        missing: list[tuple[Group, list[bool]]] = []
        for group in plan.windowed:
            count = min(group.blocks_in(tokens), limits.LOOKUP_HASHES_MAX)
            hashes = plan.hashes(group, block_hashes, 0, count)
            places = self._line.client.residency(self._columns[group.index].space, hashes)
            missing.append((group, [not place & IN_ANY for place in places]))
            tokens = min(tokens, count * group.block_tokens)
        tokens -= tokens % plan.align_tokens
        while tokens:
            if not any(any(gone[g.first_needed(tokens) : g.blocks_in(tokens)]) for g, gone in missing):
                return tokens
            tokens -= plan.align_tokens
        return 0

    def _track(self, request: Any) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            groups = len(self._plan.groups) if self._plan is not None else 0
            tracked = self._requests[request.request_id] = Tracked(request, [0] * groups)
        return tracked

    # ---- loading -------------------------------------------------------------------------

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """Blocks are there: order the load. May be called again for the same request with 0."""
        tracked = self._track(request)
        ticket, tracked.ticket = tracked.ticket, 0
        hit, tracked.hit = tracked.hit, None
        tracked.counted = False
        if external_tokens <= 0 or self._plan is None:
            if hit is not None and hit.tokens:  # another connector loads them, or nobody
                self._debts.owe(ticket, hit.local_tokens, None, b"")
            return
        if hit is None or not self._loads:
            raise LookupError(f"tokens to load for {request.request_id}, which was not looked up")
        local = hit.local_tokens
        end = local + external_tokens
        tables = blocks.get_block_ids()
        parts = [
            self._load_part(self._plan, g, request, tables[g.index], local, end) for g in self._plan.groups
        ]
        wait_s = min(self._settings.load_timeout_s, limits.SYNC_WAIT_S_MAX if self._sync else float("inf"))
        wanted = [part for part in parts if part.block_ids]
        fetch = self._fetching.begin(request.request_id, wanted, ticket, self._sync, wait_s)
        tracked.loading = not self._sync
        self._tally.add("hit_tokens", external_tokens)
        blocks_wanted = sum(len(part.block_ids) for part in wanted)
        disk = external_tokens * (blocks_wanted - fetch.in_dram) // max(1, blocks_wanted)
        split = {CacheHitSource.HOST: external_tokens - disk, CacheHitSource.DISK: disk}
        tracked.sources = {source: tokens for source, tokens in split.items() if tokens}

    def lose(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """A promised load cannot be made: order one that fails, so that vLLM computes the tokens."""
        if external_tokens > 0:
            tables = blocks.get_block_ids()
            self._fetching.fail(
                request.request_id, {block for table in tables for block in table}, self._sync
            )
            self._track(request).loading = not self._sync

    def _load_part(
        self, plan: Plan, group: Group, request: Any, table: Sequence[int], local: int, end: int
    ) -> Part:
        first = max(group.blocks_in(local), group.first_needed(end))
        last = group.blocks_in(end)
        hashes = plan.hashes(group, request.block_hashes, first, last)
        pairs = [
            pair for pair in zip(table[first:last], hashes, strict=True) if pair[0] != 0
        ]  # 0: the null block
        columns = self._columns[group.index]
        return Part(columns, [block for block, _ in pairs], [digest for _, digest in pairs], first=first)

    def hit_sources(self, request: Any, external_tokens: int) -> dict[CacheHitSource, int]:
        tracked = self._requests.get(request.request_id)
        if external_tokens <= 0:
            return {}
        if tracked is None or sum(tracked.sources.values()) != external_tokens:
            return {CacheHitSource.EXTERNAL_UNSPECIFIED: external_tokens}
        return tracked.sources

    # ---- every step ----------------------------------------------------------------------

    def orders(self, scheduler_output: Any) -> Orders:
        """This step's work for the workers."""
        orders = Orders(cancel=self._new_cancels, introduce=not self._ranks and self._plan is not None)
        self._new_cancels = []
        try:
            self._plan_step(orders, scheduler_output)
        except Exception as error:  # noqa: BLE001 - loads and draining requests must reach the workers whatever happens
            self.guard.note("orders", error)
        orders.version, orders.idle = self._version, not scheduler_output.total_num_scheduled_tokens
        orders.loads, orders.load_ends = self._fetching.take_orders()
        orders.saves = self._storing.take_orders()
        if orders.loads or orders.saves:
            orders.columns = {index: columns.of_shard for index, columns in self._columns.items()}
        orders.draining, self._new_draining = self._new_draining, []
        for request_id in scheduler_output.finished_req_ids:
            self._requests.pop(request_id, None)
        self._prefill.ordered(
            scheduler_output.total_num_scheduled_tokens,
            len(scheduler_output.num_scheduled_tokens),
            not orders.sync_step,
        )
        return orders

    def _plan_step(self, orders: Orders, scheduler_output: Any) -> None:
        ready = self._ready()
        all_proven = self._proven_step == self._sync_step
        if scheduler_output.has_sync_kv_loads:
            self._sync_step += 1
            orders.sync_step = self._sync_step
        state = scheduler_output.kv_connector_block_state
        if state is not None:
            self._resolve = state.resolve_block_ids
            orders.cancel += self._overwritten(self._resolve)
        if not all_proven:
            return
        if state is not None and ready and self._saves and not orders.sync_step:
            self._note_filled(scheduler_output, state)
        at_once = 0
        for store in self._take_unsent():
            is_urgent = not store.decoding and at_once < limits.RESERVES_AT_ONCE_MAX
            at_once += is_urgent
            self._storing.send(store, is_urgent or self._settings.save == "sync")

    def _take_unsent(self) -> list[Store]:
        unsent, self._unsent = self._unsent, []
        return unsent

    def _note_filled(self, scheduler_output: Any, state: Any) -> None:
        """Save the blocks that this step fills."""
        plan = self._plan
        if plan is None:
            return
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is None or tracked.tainted:
                continue
            tokens = tracked.request.num_computed_tokens + scheduled
            if all(
                group.blocks_in(tokens) <= offered
                for group, offered in zip(plan.groups, tracked.offered, strict=True)
            ):
                continue  # most steps of most requests fill no block
            tables = state.get_block_ids(request_id)
            if tables is None:
                continue
            self._save(tracked, tables, tokens, tokens > tracked.request.num_prompt_tokens)

    def _save(self, tracked: Tracked, tables: Sequence[Sequence[int]], tokens: int, decoding: bool) -> None:
        """Save whole blocks among the first `tokens` that were not offered yet."""
        plan, request = self._plan, tracked.request
        if plan is None:
            return
        known = min(tokens, len(request.block_hashes) * plan.hash_tokens)
        parts: list[Part] = []
        places: list[tuple[int, int, int]] = []
        held: list[Any] = []
        for at, group in enumerate(plan.groups):
            first, last = tracked.offered[at], min(group.blocks_in(known), len(tables[group.index]))
            if group.draft and decoding:
                last -= 1  # rejected drafts may still rewrite it
            if last <= first:
                continue
            tracked.offered[at] = last
            table = tables[group.index]
            for run in _runs(p for p in range(first, last) if table[p] != 0):  # 0: the null block
                hashes = plan.hashes(group, request.block_hashes, run.start, run.stop)
                parent = (
                    plan.hashes(group, request.block_hashes, run.start - 1, run.start) if run.start else [b""]
                )
                parts.append(Part(self._columns[group.index], [table[p] for p in run], hashes, parent[0]))
                if group.window is not None and self._pool is not None:
                    held += [self._pool.blocks[table[p]] for p in run]
                else:
                    places += [(group.index, p, table[p]) for p in run]
        if not parts:
            return
        if held:
            self._pool.touch(held)
        store = Store(self._next_store, request.request_id, parts, tracked.looked_up, decoding, places, held)
        self._next_store += 1
        self._storing.add(store)
        self._unsent.append(store)

    def _through(self, store: Store) -> None:
        """No rank reads the blocks of this store any more."""
        if store.held:
            self._pool.free_blocks(store.held)
        if store.draining and not self._drained_by(store.request_id):
            self._new_draining.append(store.request_id)

    def _drained_by(self, request_id: str) -> list[Store]:
        """What a finished request's blocks wait for."""
        return [
            store
            for store in self._storing.stores.values()
            if store.request_id == request_id and store.places and not store.cancelled
        ]

    def _overwritten(self, resolve: Any) -> list[int]:
        """Orders of stores under way whose request no longer owns their blocks."""
        tables: dict[str, Any] = {}
        lost: list[int] = []
        for store in self._storing.stores.values():
            if store.draining or store.cancelled:
                continue
            if store.request_id not in tables:
                tables[store.request_id] = resolve(store.request_id)
            if not _owns(tables[store.request_id], store.places):
                lost += self._storing.cancel(store)
                self._offer_again(store)
        return lost

    def _offer_again(self, store: Store) -> None:
        tracked = self._requests.get(store.request_id)
        if tracked is not None and self._plan is not None:
            for at, group in enumerate(self._plan.groups):
                positions = [position for index, position, _ in store.places if index == group.index]
                tracked.offered[at] = min([tracked.offered[at], *positions])

    # ---- what the workers report -----------------------------------------------------------

    def reported(self, output: Any) -> None:
        self._prefill.ended()
        if output.invalid_block_ids:
            self._distrust(output.invalid_block_ids)
        report = output.kv_connector_worker_meta
        if isinstance(report, Report):
            for number, (shards, committed, told) in report.saves.items():
                self._storing.reported(number, shards, committed, told)
            for number, (ranks, valid) in report.loads.items():
                self._fetching.reported(number, ranks, valid)
            if not self._ranks:
                self.know_ranks(report.ranks)
            for request_id in report.failed:
                self._load_failed(request_id)
            self._note_step(report.sync_step)
            self._end_old_spaces()
        for request_id in output.finished_recving or ():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                tracked.loading = False

    def _note_step(self, sync_step: int) -> None:
        """The workers are through with this step with synchronous loads, and so with those before it."""
        self._proven_step = max(self._proven_step, sync_step)
        if self._proven_step == self._sync_step:
            self._ended.clear()

    def _load_failed(self, request_id: str) -> None:
        self._tally.add("load_failures")
        tracked = self._requests.get(request_id)
        if tracked is not None:
            tracked.failed = True
            tracked.offered = [0] * len(tracked.offered)  # what was held is offered again: it may be gone
        for other in self._requests.values():
            other.hit = None  # the block that is gone may be part of it

    def _distrust(self, invalid: set[int]) -> None:
        """These blocks do not hold what a connector promised. vLLM computes them again, but what was computed
        from them meanwhile must not be saved; nor may it be found in vLLM's prefix cache, where it would
        stay if its request was aborted now."""
        running = [tracked for tracked in self._requests.values() if _is_running(tracked.request)]
        tables = [*self._ended, *(self._resolve(tracked.request.request_id) for tracked in running)]
        spoiled = {block for groups in tables for table in groups for block in _from_first(table, invalid)}
        if not spoiled:
            return  # an asynchronous load: nothing was computed yet
        for tracked in running:
            tracked.tainted = True
        self._drop_unsent()
        if self._pool is not None:
            self._pool.evict_blocks(spoiled)

    def _drop_unsent(self) -> None:
        for store in self._take_unsent():
            self._storing.drop(store)
            self._tally.add("skipped_tainted", store.blocks)

    # ---- the end of a request ----------------------------------------------------------------

    def finished(self, request: Any, tables: Sequence[Sequence[int]]) -> bool:
        """Whether the request's blocks must stay until `draining` is reported for it."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or not self._saves:
            return False
        if self._proven_step < self._sync_step:
            self._ended.append(tables)
        if not tracked.tainted and not tracked.loading and self._ready() and not _aborted(request):
            self._save(tracked, tables, max(request.num_prompt_tokens, request.num_tokens - 1), False)
        waited_for = self._drained_by(request.request_id)
        if not waited_for or tracked.loading:
            return False
        for store in waited_for:
            store.draining = True
        return True

    def close(self) -> None:
        """Stop reading weights and hang up."""
        self._weights.close()
        for _ in self._threads:
            self._fetching.stop()
        self._storing.stop()
        deadline_s = time.monotonic() + limits.THREAD_JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        for line in self._lines:
            line.close()


def _runs(positions: Iterable[int]) -> list[range]:
    """Consecutive positions, as ranges."""
    runs: list[range] = []
    for position in positions:
        if runs and runs[-1].stop == position:
            runs[-1] = range(runs[-1].start, position + 1)
        else:
            runs.append(range(position, position + 1))
    return runs


def _owns(tables: Sequence[Sequence[int]], places: Iterable[tuple[int, int, int]]) -> bool:
    return all(
        group < len(tables) and at < len(tables[group]) and tables[group][at] == block
        for group, at, block in places
    )


def _from_first(table: Sequence[int], among: set[int]) -> Sequence[int]:
    """The blocks of the table from the first one on that is `among` these."""
    return next((table[at:] for at, block in enumerate(table) if block in among), ())


def _is_running(request: Any) -> bool:
    from vllm.v1.request import RequestStatus

    return bool(request.status == RequestStatus.RUNNING)


def _aborted(request: Any) -> bool:
    from vllm.v1.request import RequestStatus

    ended_well = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
    return request.status not in ended_well
