"""The life of one daemon: open, serve, tick, flush, close.

    storage ─▶ engine adopts ─▶ door listens ─▶ "ready …" ─▶ ticks … SIGTERM
                                                                  │
    closed ◀─ arena left warm ◀─ demotions flushed ◀─ door closed ◀┘

Everything but byte moving happens on one event loop. A clean stop is bounded by
`stop_timeout_s` and loses nothing that was in shared memory; a crash loses no more than
the writes that were under way. A second SIGTERM skips the flush. SIGHUP: see kvstore/daemon/config/reloading.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING

from coldstart.disk.home import Home
from kvstore import __version__
from kvstore.commands.erased_file import ErasedFile
from kvstore.commands.uncleared import Uncleared
from kvstore.constants import (
    EXPIRY_SLICE_S,
    IO_CLOSE_S,
    PROBE_READS_MAX,
    TICK_INTERVAL_S,
    WARM_PAUSE_S,
    require,
)
from kvstore.daemon import heap
from kvstore.daemon.attention import Attention, Parts
from kvstore.daemon.beside.children import Lasting
from kvstore.daemon.beside.doors import grpc_process, web_process
from kvstore.daemon.beside.exporting import Exporter
from kvstore.daemon.beside.preloading import Preloads
from kvstore.daemon.condition import condition
from kvstore.daemon.config.config import Config, Events, binds
from kvstore.daemon.config.config_sources import Loaded
from kvstore.daemon.config.reloading import InForce, tune
from kvstore.daemon.config.settings import Settings
from kvstore.daemon.disks.watch import Disks
from kvstore.daemon.presence import Presence
from kvstore.daemon.process import Signals, connections_room
from kvstore.daemon.storage import Storage
from kvstore.daemon.surroundings import Surroundings
from kvstore.daemon.systemd import Notifier
from kvstore.door.api import Api
from kvstore.door.holders import Limits
from kvstore.door.turns import Turns
from kvstore.door.unix import Door
from kvstore.durable.demand_file import DemandFile
from kvstore.engine.engine import Engine
from kvstore.engine.live import live_steps
from kvstore.errors import SocketPathError, StartError
from kvstore.events.journal import Journal, held
from kvstore.health.write_budget_file import WriteBudgetFile
from kvstore.io_pool import IoPool
from kvstore.ledger.latencies import Histogram
from kvstore.ledger.totals import Totals
from kvstore.ledger.tracing import Tracing
from kvstore.policies.names import SELECTABLE
from kvstore.protocol import answers, places
from kvstore.protocol.frames import Answer, Problems
from kvstore.residency.levels import Drive
from kvstore.retention.rules import RuleFile
from kvstore.steps import Steps
from kvstore.units import format_bytes
from replication.formats.nodes import Condition
from replication.waits import boot_s
from tiers.dram.arenas_left import held_bytes

if TYPE_CHECKING:
    from kvstore.daemon.regional import Levels
    from kvstore.durable.warmer import Warmer
    from kvstore.events.publisher import Publisher

DESCRIPTORS_KEPT = 128  # besides connections: for files, for sockets of buckets and the like
DESCRIPTORS_KEPT_PER_REGION = 128  # for the requests to each region that is read
DESCRIPTORS_KEPT_PER_DEVICE = 64  # for the slab files of each NVMe directory
THREADS_SPARE = 32  # that libraries start, besides those of ours
CHECK_IDLE_S = 300.0  # check() runs when no client has asked anything for this long
FLUSH_POLL_S = 0.02  # between two looks at whether everything is on NVMe, while stopping
HEAP_INTERVAL_S = 60.0  # memory that is not used goes back to the system
STATS_LOG_INTERVAL_S = 60.0  # one line of figures a minute, when anything happened
FILE_THREADS = 3  # for files of our own, and for comparing checksums of adopted records
WATCH_SHARE = 0.25  # of nvme.stall_s between two looks at what hangs
WATCH_INTERVAL_S_LEAST = 0.02  # between two looks at what hangs, however short the stall
LOOP_DELAY_INTERVAL_S = heap.AGE_INTERVAL_S  # between two looks at how late the event loop is
EXPIRY_PAUSE_S = 0.006  # for everybody else, between two slices of sweeping
POLICY_LEARNS_AFTER_S = 0.001  # what nobody waits for, while the client copies
# Of a start, for a bucket that refuses: one that does not answer does not delay it longer.
JOIN_WAIT_S = 3.0
PERSIST_PAUSE_S = 0.1  # between two looks where there is nothing to count
require(TICK_INTERVAL_S < CHECK_IDLE_S, "idleness is seen by ticks")
require(EXPIRY_SLICE_S < EXPIRY_PAUSE_S < TICK_INTERVAL_S, "dropping leaves most of the time to others")

log = logging.getLogger("kvstore.service")


class Service:
    """One running daemon over storage that is already open. `run` returns when it has stopped."""

    def __init__(
        self,
        config: Config,
        storage: Storage,
        notifier: Notifier | None = None,
        reread: Callable[[], Loaded] | None = None,
        loaded: Loaded | None = None,
        signals: Signals | None = None,
    ) -> None:
        """reread: the configuration as it is now, for SIGHUP. loaded: `config`, with where its values come from."""
        self.settings = Settings(loaded or Loaded(config, {}, None))
        self._reread = reread
        self.storage = storage
        self.failure: str | None = None  # why it stopped, when nobody asked it to
        self._notifier = notifier or Notifier()
        self._signals = signals or Signals()
        self._started_s = time.monotonic()
        self._problems: list[str] = []
        self._prefaulted_bytes = 0
        self._has_served = self._is_looking = False
        self._region: Levels | None = None
        self._warmer: Warmer | None = None
        self._reloading: asyncio.Task[None] | None = None
        self._journal = Journal() if config.events.endpoint else None
        self._publisher = self._make_publisher(config.events)
        self._exporter: Exporter | None = None
        self._loop_delay = Histogram()
        self._preloads = Preloads(config)
        self._web, self._grpc = web_process(config), grpc_process(config)
        self._children: tuple[Lasting | Preloads, ...] = (self._web, self._grpc, self._preloads)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    @property
    def config(self) -> Config:
        """The settings in force."""
        return self.settings.config

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises StartError when the socket cannot be had."""
        loop = asyncio.get_running_loop()
        # Of each device: loads and writes take io_threads each at most, probes a few more.
        threads = 2 * self.config.engine.io_threads + PROBE_READS_MAX
        pools = [IoPool(threads, loop.call_soon_threadsafe) for _ in self.storage.devices]
        io = IoPool(FILE_THREADS, loop.call_soon_threadsafe)
        self._open_region(loop.call_soon_threadsafe)
        self._turns = Turns(loop.call_soon, time.monotonic)  # uvloop's loop.time counts in milliseconds
        try:
            self._make_engine(io, pools)
            await self._require_region()
            await self._open_door()
            self._begin_looking(io)
            self._signals.attach(
                {
                    signal.SIGTERM: self._asked_to_stop,
                    signal.SIGINT: self._asked_to_stop,
                    signal.SIGHUP: self._asked_to_reload,
                }
            )
            with self._prefaulting():
                self._announce()
                background = [
                    self._in_background(work())
                    for work in (
                        self._drop,
                        self._watch,
                        self._persist,
                        self._warm,
                        self._publish,
                        self._look_at_loop,
                        *(child.run for child in self._children),
                    )
                ]
                await self._tick_until_stopped()
                self._notifier.send("STOPPING=1")
                log.info("stopping", extra={"sessions": len(self.engine.sessions)})
                self._end_children()
                await self.door.stop()
            await self._flush()
            if self.engine.persister is not None:
                for _ in self.engine.persister.count_all():
                    await asyncio.sleep(0)
            for task in background:
                task.cancel()
        finally:
            self._end_children(for_good=True)
            if self._publisher is not None:
                self._publisher.close()
            if self._exporter is not None:
                self._exporter.close()
            give_up_s = time.monotonic() + IO_CLOSE_S  # for all of them together
            closed = [pool.close(max(0.1, give_up_s - time.monotonic())) for pool in (io, *pools)]
            if self._region is not None:
                closed.append(self._region.close())
            await asyncio.sleep(0)  # what the pools have posted is heard while it has what it is about
            if self._has_served:
                self._save_last()
            if all(closed):
                keep = self._keeps_arena()
                self.storage.close(keep_arena=keep)
                self._tell_what_stays(keep)
            else:  # a thread may write into the arena as long as this process lives
                log.error("a read or write of NVMe, or of the bucket, hangs; stopping as after a crash")

    def _keeps_arena(self) -> bool:
        """A start that failed is no clean stop: what an earlier daemon left stays, a new arena goes. An empty one is worth nothing."""
        arena = self.storage.arena
        if not self._has_served:
            return arena.adopted
        return self.config.dram.keep_on_stop and arena.stats().used_bytes > 0

    def _end_children(self, for_good: bool = False) -> None:
        """for_good: wait for their end."""
        for child in self._children:
            child.reap() if for_good else child.end()

    def _in_background(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run something beside the door. If it fails, so does the daemon: half of one must not serve."""
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(
            lambda done: (
                None if done.cancelled() or done.exception() is None else self._fail(done.exception())
            )
        )
        return task

    def _fail(self, error: BaseException | None) -> None:
        """Stop, and say why."""
        log.error("stopping: a part of the daemon failed", exc_info=error)
        self.failure = f"a part of the daemon failed: {type(error).__name__}: {error}; its log has more"
        self._stop.set()

    def report(self) -> answers.Status:
        """The answer to `kvstore status`; docs/cli.md says what each field means."""
        arena = self.storage.arena
        return {
            "daemon": self._identity(),
            "health": {"ok": self._attention.is_well},
            "problems": self._attention.told(),
            "disks": self.disks.known_rows(),
            "arena": {
                "path": str(arena.path),
                "pages": arena.page_kind,
                "adopted": arena.adopted,
                "prefaulted_bytes": self._prefaulted_bytes,
                "backed_bytes": arena.backed_bytes,
                "quarantined_slots": arena.owners.quarantined(),
            },
            **self.engine.status(),
            "region": self._region.status() if self._region is not None else None,
            "events": self._publisher.status() if self._publisher is not None else None,
            "preloads": self._preloads.status(),
            "door": self.door.counters,
        }

    def _identity(self) -> answers.Identity:
        return {
            "version": __version__,
            "pid": os.getpid(),
            "instance": self.storage.data_dir.instance,
            "uptime_s": round(time.monotonic() - self._started_s, 1),
            "now_s": round(time.time(), 3),
            "data_dir": str(self.config.data_dir),
            "socket_path": str(self.config.socket_path),
            "host": socket.gethostname(),
            "region_name": self.config.region,
        }

    def _condition(self) -> Condition:
        """As it is told to all of its region; before it serves no problem is known."""
        problems = self._attention.told() if self._is_looking else ()
        return condition(self.engine, self._identity(), problems)

    def _begin_looking(self, io: IoPool) -> None:
        """At what may be wrong with this daemon."""
        self._presence = Presence(self.door, self._make_socket_directory, self.storage, io)
        self.disks.look()
        self._surroundings = Surroundings(self.config, self.storage.arena, io)
        region = self._region
        parts = Parts(
            self.engine,
            self.settings,
            lambda: self._problems,
            lambda: self._presence.missing,
            self.disks.wrong,
            self._surroundings.wrong,
            self._beside,
            self._preloads.status,
            region.wrong if region is not None else lambda: (),
        )
        self._attention = Attention(parts, self._loop_delay, time.time)
        self._is_looking = True

    def _beside(self) -> Iterator[tuple[str, str, str]]:
        """Of what goes on beside the loop the kind, the subject, and what is wrong with it."""
        yield "web", self.config.web.listen, self._web.problem
        yield "grpc", self.config.grpc.listen, self._grpc.problem
        if self._publisher is not None:
            yield "events", self.config.events.endpoint, self._publisher.failure
        if self._exporter is not None:
            yield "traces", self.config.traces.endpoint, self._exporter.problem
        for name, problem, costs in (
            (
                "totals",
                self.engine.accounts.totals.problem,
                "what reports count now is lost with the next start",
            ),
            ("names", self.engine.namespaces.problem, "names of new models are lost with the next start"),
            (
                "erased",
                self._erased_file.problem,
                "a start that finds the bucket away does not know all that is",
            ),
            ("write budget", self._write_budget_file.problem, "nothing more is written to NVMe"),
        ):
            yield "unsaved", name, f"its file cannot be written ({problem}): {costs}" if problem else ""

    def live_steps(self, minutes_since_s: float) -> Steps[answers.Live]:
        """What is going on, in steps; docs/cli.md says what each field means."""
        told = yield from live_steps(self.engine, minutes_since_s, time.time())
        told["latencies"] |= {
            "request": self.api.times_by_name(),
            "loop_delay": {"": self._loop_delay.as_dict()},
        }
        return {
            **self._identity(),
            "health": {"ok": self._attention.is_well},
            "problems": self._attention.told(),
            "disks": self.disks.rows(),
            **told,
            "region": self._region.small_status(self.config.region) if self._region is not None else None,
            "events": self._publisher.status() if self._publisher is not None else None,
            "door": self.door.counters,
        }

    def totals_steps(self, since_s: float, skip: int, until_s: float) -> Steps[answers.Report]:
        """The answer to `kvstore report`."""
        prices = self.config.report
        return {
            **(yield from self.engine.report_steps(since_s, skip, until_s)),
            "now_s": time.time(),
            "gpu_hour_price": prices.gpu_hour_price,
            "currency": prices.currency,
        }

    # -- start --

    def _make_publisher(self, e: Events) -> Publisher | None:
        """Not open yet. A daemon without one imports nothing of ZeroMQ."""
        if self._journal is None:
            return None
        from kvstore.events.publisher import Publisher, Settings

        return Publisher(
            Settings(e.endpoint, not binds(e.endpoint), e.replay_endpoint, e.topic, e.hash, e.replay_bytes),
            self._journal,
            lambda: held(self.engine.namespaces),
            time.time,
        )

    def _open_region(self, reply: Callable[[Callable[[], None]], object]) -> None:
        """A daemon without a region imports nothing of regions."""
        if self.config.regions_file:
            from kvstore.daemon.regional import region_levels

            self._region = region_levels(self.config, reply)

    def _make_engine(self, io: IoPool, pools: Sequence[IoPool]) -> None:
        storage, config, region = self.storage, self.config, self._region
        later, turns = asyncio.get_running_loop().call_later, self._turns
        totals = Totals(self.config.region, storage.data_dir.totals_path)
        self._write_budget_file = WriteBudgetFile(storage.data_dir.write_budget_path)
        persisted = region.persisting(config) if region is not None else None
        self._demand_file = DemandFile(storage.data_dir.demand_path, persisted.demand) if persisted else None
        if self._demand_file is not None:
            self._demand_file.open()
        self.engine = Engine(
            storage.arena,
            [
                Drive(device, pool, config.engine.io_threads, config.nvme.stall_s, str(device.path))
                for device, pool in zip(storage.devices, pools, strict=True)
            ],
            storage.namespaces,
            io,
            SELECTABLE[config.engine.policy](lambda steps: later(POLICY_LEARNS_AFTER_S, turns.run, steps)),
            totals=totals,
            write_budget=self._write_budget_file.open(
                config.nvme.write_bytes_per_day, config.nvme.slab_bytes
            ),
            rules=RuleFile(storage.data_dir.rules_path),
            shared=(region.home, *region.far.values()) if region is not None else (),
            persisting=persisted,
            boot_clock=boot_s,
        )
        tune(self.engine, config)
        self.engine.models.pins = Home(config.models_dir).pins
        self.engine.background.serve(turns.run)
        self.engine.blocks.journal = self._journal
        if self._publisher is not None:
            self._publisher.open(asyncio.get_running_loop().call_soon_threadsafe)
        known = storage.known
        self.engine.clearing.keep(
            Uncleared(storage.data_dir.uncleared_path, lambda: [row.disk for row in known.rows()])
        )
        erased = self._erased_file = ErasedFile(storage.data_dir.erased_path)
        if region is not None:
            reply, is_new = asyncio.get_running_loop().call_soon_threadsafe, not storage.arena.adopted
            self._warmer = region.join(
                self.config,
                storage.data_dir,
                self.engine,
                reply,
                is_new,
                self._preloads.order,
                self._condition,
                erased,
            )
        directories = [device.path for device in storage.devices]
        self.disks = Disks(self.engine.nvme.members, directories, known, self.engine.adoption, io)
        heap.freeze()  # what was imported is not searched for garbage again and again while rows come in
        self.engine.adopt()
        for tombstone in erased.known.values():  # what is adopted now is looked at, what comes later as well
            self.engine.erasing.erase(tombstone)

    async def _require_region(self) -> None:
        """A bucket that is not ours stops the start; one that does not answer is waited for while serving."""
        if self._region is None:
            return
        home = self._region.home
        await asyncio.get_running_loop().run_in_executor(None, home.tried.wait, JOIN_WAIT_S)
        if home.refusal:
            raise StartError(home.refusal)

    def _save_last(self) -> None:
        """Once nothing else writes any more. Not in an I/O thread: what waited for one never got it, and those that are left hang."""
        namespaces, accounts = self.engine.namespaces, self.engine.accounts
        namespaces.changed = True
        if (names := namespaces.snapshot()) is not None:
            namespaces.save(names)
        accounts.save_again()
        if (totals := accounts.totals.snapshot(time.time())) is not None:
            accounts.totals.save(totals)
        self._write_budget_file.close(self.engine.write_budget)
        if self._demand_file is not None:
            self._demand_file.save()

    async def _open_door(self) -> None:
        arena = self.storage.arena
        self._make_socket_directory()
        self.api = self._make_api()
        self.door = Door(
            self.api,
            arena,
            self.config.socket_path,
            instance=self.storage.data_dir.instance,
            connections_max=self.config.door.connections_max,
            connections_room=self._connections_room(),
            on_failure=self._fail,
        )
        self.settings.parts = InForce(self.engine, self.api, self.door)
        await self.door.start()

    def _make_api(self) -> Api:
        config, turns, later = self.config, self._turns, asyncio.get_running_loop().call_later
        tracing = None
        if config.traces.endpoint:
            self._exporter = Exporter(config, self.storage.data_dir.instance, time.time)
            tracing = Tracing(config.traces.sample, turns.clock, self._exporter.take)
        limits = Limits.of(
            self.storage.arena.capacity_bytes,
            config.door.leases_max,
            config.door.lease_share_max,
            config.door.slow_s,
        )
        return Api(self.engine, self, limits, turns, later, tracing)

    def _connections_room(self) -> int:
        """For how many connections there are descriptors. Raises StartError."""
        kept = DESCRIPTORS_KEPT + DESCRIPTORS_KEPT_PER_DEVICE * len(self.storage.devices)
        if self._region is not None:
            kept += DESCRIPTORS_KEPT_PER_REGION * (1 + len(self._region.far))
        return connections_room(kept)

    def _make_socket_directory(self) -> None:
        """/run is empty after a boot: make the last directory of the socket's path, private to us."""
        directory = self.config.socket_path.parent
        try:
            if str(directory) == places.run_directory():
                places.make_directory(str(directory))
            else:
                directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise SocketPathError(
                f"socket_path {self.config.socket_path}: cannot make {directory} ({error.strerror}); "
                "make it, or set another socket_path"
            ) from error

    def _announce(self) -> None:
        """Tell everybody who waits for it that engines can attach now."""
        self._has_served = True
        arena, path = self.storage.arena, self.config.socket_path
        log.info(
            "serving",
            extra={
                "socket": str(path),
                "arena": str(arena.path),
                "pages": arena.page_kind,
                "instance": self.storage.data_dir.instance,
                "records": arena.stats().records,
                "start_s": round(time.monotonic() - self._started_s, 3),
            },
        )
        print(f"ready socket={path} arena={arena.path} pages={arena.page_kind.replace(' ', '-')}", flush=True)
        self._notifier.send(f"READY=1\nSTATUS=serving at {path}")

    @contextlib.contextmanager
    def _prefaulting(self) -> Iterator[None]:
        """Give the arena its memory in the background, until the block ends."""
        stop = threading.Event()
        thread = threading.Thread(
            target=self.storage.arena.back,
            args=(stop, self.config.dram.prefault, self._prefaulted),
            name="kvstore-prefault",
            daemon=True,
        )
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _prefaulted(self, done_bytes: int, _total_bytes: int) -> None:
        self._prefaulted_bytes = done_bytes

    # -- running --

    async def _tick_until_stopped(self) -> None:
        """Upkeep, at TICK_INTERVAL_S or as often as systemd's watchdog wants to hear of us."""
        watchdog_s = self._notifier.watchdog_s
        interval_s = min(TICK_INTERVAL_S, watchdog_s / 3) if watchdog_s else TICK_INTERVAL_S
        figures = Figures(time.monotonic())
        give_back_at_s, is_frozen = 0.0, False
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), interval_s)
            self.engine.tick()
            self._write_budget_file.keep(self.engine.write_budget, self.engine.io)
            self._erased_file.keep(self.engine.io, time.monotonic())
            self._presence.look()
            self.disks.look()
            self._surroundings.look()
            self._attention.look()
            if not self.storage.arena.is_whole():
                self.failure = (
                    f"arena {self.storage.arena.path}: somebody cut it off; its records are lost, start again"
                )
                self._stop.set()
            now_s = time.monotonic()
            figures.look(self.engine, now_s)
            if figures.idle_s(now_s) >= CHECK_IDLE_S and not self.engine.sessions:
                self._prove(figures)
            if not is_frozen and self.engine.adoption.done:
                heap.freeze()
                is_frozen = True
            if now_s >= give_back_at_s:
                self.engine.io.submit(heap.give_back, lambda _: None, None)
                give_back_at_s = now_s + HEAP_INTERVAL_S
            if watchdog_s:
                self._notifier.send("WATCHDOG=1")

    async def _watch(self) -> None:
        """Look for I/O that hangs, often enough that nobody waits much longer than a stall."""
        interval_s = max(WATCH_INTERVAL_S_LEAST, WATCH_SHARE * self.config.nvme.stall_s)
        while True:
            await asyncio.sleep(min(TICK_INTERVAL_S, interval_s))
            self.engine.look()

    async def _drop(self) -> None:
        """Where much is over at once, by a TTL or with its namespace, drop it between requests."""
        while True:
            engine, is_late = self.engine, False
            for step in (engine.drop_ended, engine.erasing.step, engine.retention.step, engine.clearing.step):
                is_late |= step()
                await asyncio.sleep(0)  # each takes a turn of its own
            await asyncio.sleep(EXPIRY_PAUSE_S if is_late else TICK_INTERVAL_S)

    async def _persist(self) -> None:
        """Count what is asked for, and persist what deserves it, between requests."""
        persister = self.engine.persister
        while persister is not None and self._demand_file is not None:
            for _ in persister.steps():
                await asyncio.sleep(0)
            self._demand_file.keep(self.engine.io, time.monotonic())
            await asyncio.sleep(0 if persister.is_late else PERSIST_PAUSE_S)

    async def _warm(self) -> None:
        """Bring in what somebody ordered, between requests."""
        while self._warmer is not None and not self._stop.is_set():
            for _ in self._warmer.steps():
                await asyncio.sleep(0)
            await asyncio.sleep(TICK_INTERVAL_S if self._warmer.is_idle else WARM_PAUSE_S)

    async def _publish(self) -> None:
        """Tell routers what came and went."""
        while self._publisher is not None:
            self._publisher.pass_on()
            await asyncio.sleep(self.config.events.interval_s)

    async def _look_at_loop(self) -> None:
        """How late the event loop is: so late may whoever asks for something be served. And what stays is aged while there
        is little of it."""
        while True:
            due_s = time.monotonic() + LOOP_DELAY_INTERVAL_S
            await asyncio.sleep(LOOP_DELAY_INTERVAL_S)
            self._loop_delay.add(max(0.0, time.monotonic() - due_s))
            heap.age()

    def _prove(self, figures: Figures) -> None:
        """Nobody is attached and nothing happens: a good moment to prove the books."""
        if figures.proven:
            return
        figures.proven = True
        heap.freeze()
        self.api.check().then(self._checked)

    def _checked(self, answer: Answer) -> None:
        self._problems = answer.lines if isinstance(answer, Problems) else []
        for problem in self._problems:
            log.error("the books do not balance: %s", problem)

    # -- reload --

    def _asked_to_reload(self) -> None:
        if self._reread is None or self._stop.is_set():
            return
        if self._reloading is None or self._reloading.done():
            self._reloading = self._in_background(self.settings.reload(self._reread))
        else:
            self.settings.is_asked_again = True

    # -- stop --

    def _asked_to_stop(self) -> None:
        (self._hurry if self._stop.is_set() else self._stop).set()
        if self._reloading is not None:
            self._reloading.cancel()

    def _tell_what_stays(self, is_kept: bool) -> None:
        """What the end of this process does not free."""
        arena = self.storage.arena
        facts = {"arena": str(arena.path), "in_memory": format_bytes(held_bytes(arena.path))}
        if is_kept:
            name = self.storage.data_dir.instance
            log.info(
                "stopped; the arena stays for the next start",
                extra={**facts, "to_free_it": f"kvstore arena rm {name}"},
            )
        else:
            log.info("stopped; no memory is held")

    async def _flush(self) -> None:
        """Give blocks that only DRAM holds their time to reach NVMe, also those that came before its rows were read."""
        writer, writes, adoption = self.engine.writer, self.engine.blocks.writes, self.engine.adoption

        def is_done() -> bool:
            return writer.idle and not (writes.refused and adoption.is_reading)

        deadline_s = time.monotonic() + self.config.stop_timeout_s
        while not is_done() and time.monotonic() < deadline_s and not self._hurry.is_set():
            writer.pump()
            self.engine.namespaces.keep(self.engine.io, time.monotonic())  # of blocks that came last
            await asyncio.sleep(FLUSH_POLL_S)
        left = len(writes.waiting) + len(writes.refused)
        level = logging.INFO if is_done() else logging.WARNING  # what quotas keep out is no surprise
        log.log(level, "flushed", extra={"blocks_not_on_nvme": left})


def threads_needed(config: Config) -> int:
    """By a daemon with these settings, libraries included."""
    of_devices = len(config.nvme.directories) * (2 * config.engine.io_threads + PROBE_READS_MAX)
    of_region = 3 * (os.cpu_count() or 1) if config.regions_file else 0
    return of_devices + of_region + FILE_THREADS + THREADS_SPARE


class Figures:
    """What changed in the counters since the last look: one log line a minute, and idleness."""

    def __init__(self, now_s: float) -> None:
        self.proven = False
        self._counters: dict[str, int] = {}
        self._logged: dict[str, int] = {}
        self._changed_s = self._logged_s = now_s

    def look(self, engine: Engine, now_s: float) -> None:
        """Note what happened; log it when a minute of it is together."""
        counters = engine.counters.as_dict()
        if counters != self._counters:
            self._counters, self._changed_s, self.proven = counters, now_s, False
        if now_s - self._logged_s < STATS_LOG_INTERVAL_S:
            return
        changed = {name: count - self._logged.get(name, 0) for name, count in counters.items()}
        self._logged, self._logged_s = counters, now_s
        if any(changed.values()):
            log.info("figures", extra={name: count for name, count in changed.items() if count})

    def idle_s(self, now_s: float) -> float:
        return now_s - self._changed_s
