"""The scheduler's half: what to load, what to save, and which blocks must stay alive for it.

A request's blocks, by what the connector knows of them:

    [ held by the daemon: not offered again ][ computed or local: offered when full ][ not full ]
    0                                    offered                                 tokens / block

    lookup ─▶ remember the hit ─▶ blocks are allocated ─▶ Fetching: Load ─▶ reported received (or failed)
    every step: blocks that this step fills ─▶ Storing: Save ─▶ reported by every rank ─▶ committed

All ranks of an engine fill and read columns of one record: what to load and to save is decided here, once, and slots are
leased here. Ranks copy, hash and report.

What keeps the source of a save alive:

* a running request keeps its blocks;
* a finished request with saves under way keeps them until every rank has reported (`draining`);
* a sliding window moves on while its blocks are copied: these are held in vLLM's block pool (one more reference) until
  every rank has reported; so are all blocks where vLLM clears new ones (models with states, or several precisions), as its
  worker does that before it lets us know of the step;
* otherwise a preempted request gives its blocks back at once: before each step the block tables are compared with the saves
  under way, and those that lost a block are cancelled before the step can overwrite it.

What keeps bad KV out of the store: a load that fails leaves blocks that are not what their hash says, until vLLM has
computed them again. It may be a load of ours or, under MultiConnector, of another connector: both arrive as
`invalid_block_ids`. An asynchronous load is over before anything is computed from it. A synchronous one is not, so nothing
that its step computes is saved before the workers have reported that step:

    step with synchronous loads ─▶ saves wait ─▶ its report ─┬─ nothing invalid: saves go on
                                                             └─ `_distrust`: its requests are not saved (`tainted`)

Where only a window is kept, vLLM goes on from a block that failed, and reads the blocks before it, which are not there any
more: such requests stay `wrong`. They are not saved, and what they compute leaves vLLM's own prefix cache in the same step
(`_isolate`).

What keeps old weights out of a namespace of other ones: when the cache is reset (`new_epoch`), what was ordered for the
namespace ends there or is dropped, loads under way fail, and requests of that time stay `tainted` until they start again
from nothing. If vLLM could not empty its own prefix cache, requests that start from it are tainted too (`_stale_local`).
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from connectors import constants as limits
from connectors.transfer.fetching import Fetch, Fetching
from connectors.transfer.link import Line, join_all
from connectors.transfer.orders import Columns, Part
from connectors.transfer.prefill import PrefillSpeed
from connectors.transfer.settings import Settings
from connectors.transfer.storing import Store, Storing
from connectors.vllm.first_token import FirstToken
from connectors.vllm.geometry import Group, Plan
from connectors.vllm.guard import Guard
from connectors.vllm.identity.adapters import Adapters
from connectors.vllm.identity.contents import Contents, Names
from connectors.vllm.lookups import Lookups
from connectors.vllm.messages import Orders, Report
from connectors.vllm.patience import Patience
from connectors.vllm.queue import Queue
from connectors.vllm.spaces import Spaces
from connectors.vllm.stats import Tally
from connectors.vllm.tracked import Tracked
from connectors.vllm.transfer_params import promise, wants_promise

# A request that needs blocks waits so long for saves to give some back, instead of preempting.
FREES_WAIT_S = 0.1
# Saves of one step for which the scheduler leases slots itself: 50 to 100 us each.
RESERVES_AT_ONCE_MAX = 16


class SchedulerHalf:
    """Called by vLLM's scheduler thread only. It asks the daemon for lookups and for what is in DRAM; threads of Fetching and
    Storing do what may take longer."""

    def __init__(
        self, settings: Settings, vllm_config: Any, kv_cache_config: Any, guard: Guard, tally: Tally
    ) -> None:
        self.guard, self._tally, self._settings = guard, tally, settings
        self._config = vllm_config
        self._lines: list[Line] = []
        role = vllm_config.kv_transfer_config
        self._loads, self._saves = role.is_kv_consumer, role.is_kv_producer
        self._line = self._open_line(settings.lookup_timeout_s, "scheduler")
        self._spaces = Spaces(settings, vllm_config, kv_cache_config, self._line, guard)
        self._contents = Contents(vllm_config, guard.say_once)
        self._adapters = Adapters(vllm_config, self._spaces.cache_dir, guard.say_once)
        self._sync = settings.load == "sync" and self._may_load_synchronously()
        self._prefill = PrefillSpeed()
        self._lookups = Lookups(self._line, tally, self._prefill, self._sync)
        self._patience = Patience(settings.still_writing_wait_s, self._prefill, tally)
        self._first_token = FirstToken(tally.add)
        self._pool: Any = None
        self._holds_all = bool(kv_cache_config.needs_kv_cache_zeroing)
        self._requests: dict[str, Tracked] = {}
        self._wrong: set[str] = set()  # requests whose KV is not what its hashes say
        self._world = int(vllm_config.parallel_config.world_size)
        self._fetching = Fetching(self._line, self._world, tally.add, guard.note)
        self._queue = Queue(self._spaces, self._fetching, self._columns_now)
        lines = self._line, self._open_line(settings.save_timeout_s, "saves")
        self._storing = Storing(lines, settings.save_queue_bytes, tally.add, guard.note, self._through)
        self._threads: list[threading.Thread] = []
        self._start_threads()
        self._next_store = 0
        self._new_draining: list[str] = []
        self._draining_s: dict[str, float] = {}  # finished requests that keep their blocks, since when
        self._new_cancels: list[int] = []
        self._stale_local = False  # vLLM's own prefix cache may hold blocks of older weights
        self._unsent: list[Store] = []  # of requests that finished since the last step, and of this step
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
        if self._spaces.plan is not None and self._spaces.plan.loads_whole:
            reason = "a model with one KV group, of full attention"
        elif self._config.max_concurrent_batches > 1:
            reason = "an engine without asynchronous scheduling and pipeline stages"
        if reason:
            self.guard.say_once(f"load = sync needs {reason}; loads are asynchronous")
        return not reason

    # ---- what changes under us -----------------------------------------------------------

    def know_pool(self, block_pool: Any) -> None:
        """vLLM's pool of blocks, where blocks of sliding windows are held while they are saved."""
        self._pool = block_pool

    def new_epoch(self) -> None:
        """The weights may change around now. Running requests keep their KV, which is of the old weights. Workers
        fail the loads that they have under way as soon as they hear of the reset."""
        self._spaces.new_epoch(self._next_store, self._storing.stores)
        for tracked in self._requests.values():
            tracked.tainted, tracked.hit = tracked.started, None
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
        else:
            self._adapters.reset()

    # ---- looking up ----------------------------------------------------------------------

    def queued(self, request: Any) -> None:
        """vLLM has taken in a request."""
        if self._spaces.plan is None:
            return
        if request.lora_request is not None:
            self._adapters.meet(request.lora_request)
        tracked = self._track(request)
        unknown = tracked.names.unknown  # asked of all requests: so it is noted what identifiers stand for
        if self._loads and not unknown and not request.skip_reading_prefix_cache:
            self._queue.add(tracked)

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after `local_tokens` can be loaded, and whether between steps. None: ask again."""
        self._queue.remove(request.request_id)
        self._track(request).started = True
        self._note_start(request, local_tokens)
        if self._spaces.awaits_ranks():
            return None, False  # also where nothing is loaded: what is computed meanwhile would not be saved
        if not self._loads or request.skip_reading_prefix_cache:
            return 0, False
        plan, tracked = self._spaces.plan, self._track(request)
        is_known, columns = True, dict[int, Columns]()
        if plan is not None and self._spaces.ready() and not tracked.failed and not tracked.withheld:
            is_known, columns = self._columns_to_load(request)
        if not is_known:
            return None, False
        if plan is None or not columns:
            self._lookups.count(tracked, "declined")
            return 0, False
        if columns is not tracked.columns:
            tracked.columns, tracked.hit = columns, None
        hit, asked = tracked.hit, (local_tokens, request.num_tokens)
        if hit is None or (hit.local_tokens, hit.prompt_tokens) != asked or time.monotonic() >= hit.stale_s:
            hit = self._lookups.look_up(plan, tracked, local_tokens)
        if self._patience.holds_back(tracked, hit):
            return None, False
        return hit.tokens, self._sync is False and hit.tokens > 0

    def _columns_to_load(self, request: Any) -> tuple[bool, dict[int, Columns]]:
        """Whether it is known what a request will be computed with, and its namespaces; none where it is not to be
        looked up."""
        if request.lora_request is None:
            return True, self._spaces.columns
        is_known, adapter = self._adapters.to_load(request.lora_request, self._spaces.base)
        return is_known, {} if adapter is None else self._spaces.of_adapter(adapter)

    def _columns_now(self, request: Any) -> dict[int, Columns]:
        """The namespaces of what it is computed with, as far as the ranks have said."""
        if request.lora_request is None:
            return self._spaces.columns
        adapter = self._adapters.to_save(request.lora_request)
        return {} if adapter is None else self._spaces.of_adapter(adapter)

    def _may_save(self, tracked: Tracked) -> bool:
        """Whether what is computed of a request has namespaces, which it has then: those in which it was looked up, unless
        it turns out to be computed with something else."""
        if tracked.withheld or not self._spaces.ready():
            return False
        columns = self._columns_now(tracked.request)
        if columns and tracked.columns and columns is not tracked.columns:
            tracked.tainted = True
            return False
        if columns:
            tracked.columns = columns
        return bool(columns)

    def _note_start(self, request: Any, local_tokens: int) -> None:
        """vLLM asks when a request starts, or starts again: its KV is what it finds in vLLM's own cache."""
        plan, tracked = self._spaces.plan, self._requests.get(request.request_id)
        finer = (
            plan is not None and plan.hash_tokens < plan.align_tokens
        )  # hits that vLLM does not report to us
        if self._stale_local and (local_tokens or finer):
            self._track(request).tainted = True
        elif tracked is not None and tracked.tainted and not local_tokens:
            tracked.tainted, tracked.columns = False, {}
            self._wrong.discard(request.request_id)
            tracked.offered = [0] * len(tracked.offered)
            for store in self._drained_by(request.request_id):  # it may get the same blocks, for other bytes
                self._new_cancels += self._storing.cancel(store)

    def _track(self, request: Any) -> Tracked:
        """A request that has ended may have had the same id until now."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.request is not request:
            self._forget(request.request_id)
            plan = self._spaces.plan
            names = Names(request, plan.hash_tokens if plan is not None else 1, self._contents)
            offered = [0] * len(plan.groups) if plan is not None else []
            tracked = self._requests[request.request_id] = Tracked(request, names, offered)
        return tracked

    def _forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._wrong.discard(request_id)
        self._queue.remove(request_id)

    # ---- loading -------------------------------------------------------------------------

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """Blocks are there: order the load. May be called again for the same request with 0."""
        tracked = self._track(request)
        ticket, tracked.ticket = tracked.ticket, 0
        hit, tracked.hit, tracked.wait = tracked.hit, None, None
        tracked.counted = False
        plan = self._spaces.plan
        if external_tokens <= 0 or plan is None:
            if hit is not None and hit.tokens:  # another connector loads them, or none
                self._line.owe(ticket, hit.local_tokens, None, b"")
            return
        if hit is None or not self._loads:
            raise LookupError(f"tokens to load for {request.request_id}, which was not looked up")
        local, tables = hit.local_tokens, blocks.get_block_ids()
        end = local + external_tokens
        parts = [self._load_part(plan, g, tracked, tables[g.index], local, end) for g in plan.groups]
        wait_s = min(self._settings.load_timeout_s, limits.SYNC_WAIT_S_MAX if self._sync else float("inf"))
        wanted = [part for part in parts if part.block_ids]
        fetch = self._fetching.begin(request.request_id, wanted, ticket, self._sync, wait_s)
        tracked.loading = not self._sync
        self._tally.add("hit_tokens", external_tokens)
        tracked.sources = _sources(fetch, external_tokens)

    def lose(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """A promised load cannot be made: order one that fails, so that vLLM computes the tokens."""
        if external_tokens > 0:
            lost = {block for table in blocks.get_block_ids() for block in table}
            self._fetching.fail(request.request_id, lost, self._sync)
            self._track(request).loading = not self._sync

    def _load_part(
        self, plan: Plan, group: Group, tracked: Tracked, table: Sequence[int], local: int, end: int
    ) -> Part:
        first = max(group.blocks_in(local), group.first_needed(end))
        last = group.blocks_in(end)
        hashes = plan.hashes(group, tracked.names, first, last)
        above = plan.hashes(group, tracked.names, first - 1, first) if first else [b""]
        kept = [row for row in zip(table[first:last], hashes, [*above, *hashes], strict=False) if row[0] != 0]
        parent = kept[0][2] if kept else b""  # a table has 0, the null block, where nothing is needed
        columns = tracked.columns[group.index]
        return Part(columns, [block for block, *_ in kept], [digest for _, digest, _ in kept], parent, first)

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
        orders = Orders(cancel=self._new_cancels, introduce=self._spaces.asks_ranks)
        self._new_cancels = []
        try:
            self._first_token.look(tracked.request for tracked in self._requests.values())
            self._plan_step(orders, scheduler_output)
            self._queue.promote()
        except Exception as error:  # noqa: BLE001 - loads and draining requests must reach the workers whatever happens
            self.guard.note("orders", error)
        connected = self._line.client.connected
        self.guard.look(connected)
        self._tally.set("connected", connected)
        is_ready = connected and bool(self._spaces.columns)
        self._tally.set("ready", is_ready)
        if is_ready:
            self._spaces.say_connected()
        orders.adapters_asked = self._adapters.asks
        orders.version, orders.idle = self._spaces.version, not scheduler_output.total_num_scheduled_tokens
        orders.loads, orders.load_ends = self._fetching.take_orders()
        orders.saves = self._storing.take_orders()
        if orders.loads or orders.saves:
            orders.columns = self._spaces.shards
        orders.draining, self._new_draining = self._new_draining, []
        for request_id in scheduler_output.finished_req_ids:
            tracked = self._requests.get(request_id)
            if tracked is None or tracked.request.is_finished():  # or another one has its id already
                self._forget(request_id)
        self._prefill.ordered(
            scheduler_output.total_num_scheduled_tokens,
            len(scheduler_output.num_scheduled_tokens),
            not orders.sync_step,
        )
        return orders

    def _plan_step(self, orders: Orders, scheduler_output: Any) -> None:
        ready = self._spaces.ready()
        all_proven = self._proven_step == self._sync_step
        if scheduler_output.has_sync_kv_loads:
            self._sync_step += 1
            orders.sync_step = self._sync_step
        state = scheduler_output.kv_connector_block_state
        if state is not None:
            self._resolve = state.resolve_block_ids
            orders.cancel += self._overwritten(self._resolve)
            self._isolate()
        if not all_proven:
            return
        if state is not None and ready and self._saves and not orders.sync_step:
            self._note_filled(scheduler_output, state)
        at_once = 0
        for store in self._take_unsent():
            is_urgent = not store.decoding and at_once < RESERVES_AT_ONCE_MAX
            at_once += is_urgent
            self._storing.send(store, is_urgent)

    def _take_unsent(self) -> list[Store]:
        unsent, self._unsent = self._unsent, []
        return unsent

    def _note_filled(self, scheduler_output: Any, state: Any) -> None:
        """Save the blocks that this step fills."""
        plan = self._spaces.plan
        if plan is None:
            return
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            tokens = tracked.request.num_computed_tokens + scheduled
            pairs = zip(plan.groups, tracked.offered, strict=True)
            if all(group.blocks_in(tokens) <= offered for group, offered in pairs):
                continue  # most steps of most requests fill no block
            tables = state.get_block_ids(request_id)
            if tables is None or not self._may_save(tracked):
                continue
            handed = state.boundary_state_offloads.get(request_id, ())
            self._save(tracked, tables, tokens, tokens > tracked.request.num_prompt_tokens, handed)

    def _save(
        self,
        tracked: Tracked,
        tables: Sequence[Sequence[int]],
        tokens: int,
        decoding: bool,
        handed: Sequence[tuple[int, int, int]] = (),
    ) -> None:
        """Save whole blocks among the first `tokens` that were not offered yet. handed: blocks that hold a state,
        each with its group and the tokens it stands for."""
        plan, request, names = self._spaces.plan, tracked.request, tracked.names
        if plan is None:
            return
        known = min(tokens, _publishable(request, plan.hash_tokens))
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
            filled = _filled(group, tables[group.index], range(first, last), handed)
            for run in _runs(filled):
                hashes = plan.hashes(group, names, run.start, run.stop)
                parent = plan.hashes(group, names, run.start - 1, run.start) if run.start else [b""]
                parts.append(Part(tracked.columns[group.index], [filled[p] for p in run], hashes, parent[0]))
                if self._pool is not None and (self._holds_all or group.window is not None):
                    held += [self._pool.blocks[filled[p]] for p in run]
                else:
                    places += [(group.index, p, filled[p]) for p in run]
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
        """The saves under way of blocks that only this request keeps: what they wait for when it is finished."""
        stores = [store for store in self._storing.stores.values() if store.request_id == request_id]
        return [store for store in stores if store.places and not store.cancelled]

    def _overwritten(self, resolve: Any) -> list[int]:
        """Orders of stores under way whose request no longer owns their blocks."""
        lost: list[int] = []
        resolve = functools.cache(resolve)
        for store in self._storing.stores.values():
            if store.draining or store.cancelled:
                continue
            if not _owns(resolve(store.request_id), store.places):
                lost += self._storing.cancel(store)
                self._offer_again(store)
        return lost

    def _offer_again(self, store: Store) -> None:
        tracked = self._requests.get(store.request_id)
        if tracked is not None and self._spaces.plan is not None:
            for at, group in enumerate(self._spaces.plan.groups):
                positions = [position for index, position, _ in store.places if index == group.index]
                tracked.offered[at] = min([tracked.offered[at], *positions])

    # ---- what the workers report -----------------------------------------------------------

    def reported(self, output: Any) -> None:
        self._prefill.ended()
        if output.invalid_block_ids:
            self._distrust(output.invalid_block_ids)
        report = output.kv_connector_worker_meta
        if isinstance(report, Report):
            for number, (shards, committed, reached) in report.saves.items():
                self._storing.reported(number, shards, committed, reached)
            for number, (ranks, valid) in report.loads.items():
                self._fetching.reported(number, ranks, valid)
            self._adapters.reported(report.adapters)
            if not self._spaces.knows_ranks:
                self._spaces.know_ranks(report.ranks)
            for request_id in report.failed:
                self._load_failed(request_id)
            self._note_step(report.sync_step)
            self._spaces.end_old(self._storing.stores)
        for request_id in output.finished_sending or ():
            self._draining_s.pop(request_id, None)
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
        if self._spaces.plan is not None and self._spaces.plan.windowed:
            self._mark_wrong(invalid)
        status = RequestStatus.RUNNING
        running = [tracked for tracked in self._requests.values() if tracked.request.status == status]
        tables = [*self._ended, *(self._resolve(tracked.request.request_id) for tracked in running)]
        spoiled = {block for groups in tables for table in groups for block in _from_first(table, invalid)}
        if not spoiled:
            return  # an asynchronous load: nothing was computed yet
        for tracked in running:
            tracked.tainted = True
        self._drop_unsent()
        if self._pool is not None:
            self._pool.evict_blocks(spoiled)

    def _mark_wrong(self, blocks: set[int]) -> None:
        """Requests that hold one of these blocks are computed from what is not there."""
        for request_id, tracked in self._requests.items():
            if any(not blocks.isdisjoint(table) for table in self._resolve(request_id)):
                tracked.tainted = True
                self._wrong.add(request_id)

    def _isolate(self) -> None:
        """What wrong requests compute leaves vLLM's prefix cache; requests that found it there in this very step are wrong too."""
        if not self._wrong or self._pool is None:
            return
        blocks = {block for name in self._wrong for table in self._resolve(name) for block in table} - {0}
        self._pool.evict_blocks(blocks)
        self._mark_wrong(blocks)

    def _drop_unsent(self) -> None:
        for store in self._take_unsent():
            self._storing.drop(store)
            self._tally.add("skipped_tainted", store.blocks)

    # ---- the end of a request ----------------------------------------------------------------

    def finished(self, request: Any, tables: Sequence[Sequence[int]]) -> bool:
        """Whether the request's blocks must stay until `draining` is reported for it."""
        self._first_token.look([request])
        tracked = self._requests.get(request.request_id)
        if tracked is None or not self._saves:
            return False
        if self._proven_step < self._sync_step:
            self._ended.append(tables)
        if not tracked.loading and not _aborted(request) and self._may_save(tracked):
            self._save(tracked, tables, max(request.num_prompt_tokens, request.num_tokens - 1), False)
        waited_for = self._drained_by(request.request_id)
        if not waited_for or tracked.loading:
            return False
        for store in waited_for:
            store.draining = True
        self._draining_s[request.request_id] = time.monotonic()
        return True

    def promise(self, request: Any) -> dict[str, Any] | None:
        """`kv_transfer_params` for the worker that goes on with a finished request: how much of it is stored, or about to be."""
        plan, tracked = self._spaces.plan, self._requests.get(request.request_id)
        if plan is None or tracked is None or not wants_promise(request.kv_transfer_params):
            return None
        if not self._saves or _aborted(request) or not self._may_save(tracked):
            return None
        offered = zip(plan.groups, tracked.offered, strict=True)
        tokens = min(blocks * group.block_tokens for group, blocks in offered)
        return promise(self._line.client.instance, tokens)

    def frees_soon(self) -> bool:
        """Whether blocks come back when saves are through, in milliseconds: those of finished requests, and those that a
        window has left behind. Not for longer than FREES_WAIT_S: vLLM preempts no request meanwhile."""
        held_s = [store.begun_s for store in self._storing.stores.values() if store.held]
        return any(
            time.monotonic() - since_s < FREES_WAIT_S for since_s in [*self._draining_s.values(), *held_s]
        )

    def has_transfers(self) -> bool:
        """Whether loads or saves are not through on all ranks."""
        return bool(self._storing.stores or self._fetching.fetches)

    def close(self) -> None:
        """Stop the threads and hang up."""
        self._spaces.close()
        self._adapters.close()
        for _ in self._threads:
            self._fetching.stop()
        self._storing.stop()
        join_all(self._threads)
        for line in self._lines:
            line.close()


def _filled(
    group: Group, table: Sequence[int], among: range, handed: Sequence[tuple[int, int, int]]
) -> dict[int, int]:
    """Blocks that hold what their hash says, by position, in ascending order."""
    if not group.handed:
        return {at: table[at] for at in among if table[at] != 0}  # 0: the null block
    whole = sorted(
        (boundary // group.block_tokens - 1, block)
        for index, block, boundary in handed
        if index == group.index and boundary % group.block_tokens == 0
    )
    return {at: block for at, block in whole if at in among}


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


def _sources(fetch: Fetch, tokens: int) -> dict[CacheHitSource, int]:
    """Where the tokens of a load come from, as far as is known: what is in neither tier is in the region's bucket, or gone."""
    wanted = max(1, sum(len(part.block_ids) for part in fetch.parts))
    host = tokens * fetch.in_dram // wanted
    disk = tokens * (fetch.in_dram + fetch.on_disk) // wanted - host
    split = {CacheHitSource.HOST: host, CacheHitSource.DISK: disk}
    split[CacheHitSource.EXTERNAL_UNSPECIFIED] = tokens - host - disk
    return {source: count for source, count in split.items() if count}


def _publishable(request: Any, hash_tokens: int) -> int:
    """Up to how many tokens the request's block hashes say what is in its blocks. Releases after 0.33 hash what a draft model
    will read, too, and count the blocks for which it has. A diffusion model's answer that is only read has no KV."""
    hashes = len(request.block_hashes)
    tokens = hash_tokens * min(hashes, getattr(request, "num_publishable_block_hashes", hashes))
    asked = getattr(request.sampling_params, "extra_args", None) or {}
    return min(tokens, request.num_prompt_tokens) if asked.get("diffusion_read_only") else tokens


def _aborted(request: Any) -> bool:
    return request.status not in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
