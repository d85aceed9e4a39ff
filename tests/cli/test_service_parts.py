"""Parts of the daemon's life that a whole process shows only by luck: deadlines, idleness, bad memory."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.daemon.config.config import Config
from kvstore.daemon.config.config_sources import Loaded
from kvstore.daemon.service import STATS_LOG_INTERVAL_S, Figures, Service
from kvstore.daemon.systemd import Notifier
from kvstore.door.later import Later
from kvstore.engine.engine import Engine
from kvstore.protocol.frames import Problems
from kvstore.tools.cli.commands.status import _print_health


def service(**settings: Any) -> Service:
    """A service over nothing; tests give it the parts they are about."""
    return Service(Config(**settings), cast(Any, None), Notifier({}))


def busy_engine() -> Any:
    """An engine whose writes never end."""
    pumped: list[float] = []
    writer = SimpleNamespace(idle=False, pump=lambda: pumped.append(time.monotonic()), pumped=pumped)
    blocks = SimpleNamespace(writes=SimpleNamespace(waiting={1: None}, refused={}))
    names = SimpleNamespace(keep=lambda io, now_s: None)
    adoption = SimpleNamespace(is_reading=False)
    return SimpleNamespace(writer=writer, blocks=blocks, adoption=adoption, namespaces=names, io=None)


def test_the_flush_ends_at_its_deadline() -> None:
    """A disk that does not keep up delays a stop by stop_timeout_s and no longer."""
    stopping = service(stop_timeout_s=1.0)
    stopping.engine = busy_engine()
    started = time.monotonic()
    asyncio.run(stopping._flush())
    assert 1.0 <= time.monotonic() - started < 10
    assert len(cast(Any, stopping.engine).writer.pumped) > 1


def test_the_flush_waits_for_disks_that_are_read() -> None:
    """What came before a disk could be written to is refused until then: it goes there once its rows are read."""
    stopping = service(stop_timeout_s=600.0)
    stopping.engine = engine = busy_engine()
    engine.writer.idle, engine.blocks.writes = True, SimpleNamespace(waiting={}, refused={1: None})
    asyncio.run(stopping._flush())
    assert not engine.writer.pumped, "no disk is read: what was refused stays so"
    engine.adoption.is_reading = True

    async def read_later() -> None:
        flush = asyncio.create_task(stopping._flush())
        while len(engine.writer.pumped) < 3 and not flush.done():
            await asyncio.sleep(0)
        engine.blocks.writes.refused.clear()
        await flush

    asyncio.run(read_later())


def test_a_second_sigterm_skips_the_flush() -> None:
    """Who asks twice does not wait."""

    async def stop_twice() -> float:
        stopping = service(stop_timeout_s=600.0)
        stopping.engine = busy_engine()
        stopping._asked_to_stop()
        asyncio.get_running_loop().call_later(0.1, stopping._asked_to_stop)
        started = time.monotonic()
        await stopping._flush()
        return time.monotonic() - started

    assert 0.1 <= asyncio.run(stop_twice()) < 60


def test_a_hangup_while_the_file_is_read_has_it_read_again() -> None:
    """What was read may be older than the file that the second one is about; three of them are no more than two."""
    read, goes_on = list[int](), threading.Event()

    def load() -> Loaded:
        read.append(1)
        assert goes_on.wait(10)
        return Loaded(Config(), {}, None)

    async def ask() -> None:
        serving = Service(Config(), cast(Any, None), Notifier({}), reread=load)
        for _ in range(4):
            serving._asked_to_reload()
            while not read:
                await asyncio.sleep(0.01)
        goes_on.set()
        assert serving._reloading is not None
        await serving._reloading

    asyncio.run(ask())
    assert len(read) == 2


def test_no_hangup_is_looked_after_once_it_stops() -> None:
    """However many came before SIGTERM: what is read then would change parts that are closed."""
    read: list[int] = []

    def load() -> Loaded:
        read.append(1)
        return Loaded(Config(), {}, None)

    async def stop() -> None:
        stopping = Service(Config(), cast(Any, None), Notifier({}), reread=load)
        for asked in (stopping._asked_to_reload, stopping._asked_to_reload, stopping._asked_to_stop):
            asked()
        await asyncio.sleep(0.1)

    asyncio.run(stop())
    assert not read


def test_idleness_is_time_without_change() -> None:
    """Counters that move end idleness, and let the books be proven again."""
    counters = {"lookups": 0}
    engine = cast(Engine, SimpleNamespace(counters=SimpleNamespace(as_dict=lambda: dict(counters))))
    figures = Figures(0.0)
    figures.look(engine, 10.0)
    figures.proven = True
    figures.look(engine, 30.0)
    assert (figures.idle_s(30.0), figures.proven) == (20.0, True)
    counters["lookups"] = 1
    figures.look(engine, 40.0)
    assert (figures.idle_s(40.0), figures.proven) == (0.0, False)


def test_a_minute_is_one_line_and_only_when_something_happened(caplog: Any) -> None:
    """Figures are logged as differences, once per STATS_LOG_INTERVAL_S."""
    counters = {"lookups": 5, "promoted": 0}
    engine = cast(Engine, SimpleNamespace(counters=SimpleNamespace(as_dict=lambda: dict(counters))))
    figures = Figures(0.0)
    with caplog.at_level("INFO", logger="kvstore.service"):
        for minute in range(1, 4):
            figures.look(engine, minute * STATS_LOG_INTERVAL_S - 1)
            figures.look(engine, minute * STATS_LOG_INTERVAL_S + 1)
            if minute == 2:
                counters["lookups"] = 7
    assert [record.lookups for record in caplog.records] == [5, 2]
    assert not any(hasattr(record, "promoted") for record in caplog.records)


def test_problems_of_the_books_reach_the_report(caplog: Any) -> None:
    """What a check finds while idle is logged as an error and shown as bad health, once."""
    checking = service()
    checks: list[int] = []

    def check() -> Later:
        checks.append(1)
        later = Later()
        later.set(Problems(["arena: 1 slots in use, 2 in the table"]))
        return later

    checking.api = cast(Any, SimpleNamespace(check=check))
    figures = Figures(0.0)
    for _ in range(2):
        checking._prove(figures)
    assert len(checks) == 1
    assert checking._problems == ["arena: 1 slots in use, 2 in the table"]
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_status_tells_of_a_sick_disk(capsys: pytest.CaptureFixture[str]) -> None:
    """A breaker that tripped, how often and why; measured speeds."""
    report = {
        "speeds": [
            {"name": "nvme", "latency_s": 0.0004, "bytes_per_s": 3 << 30, "waiting_bytes": 0, "samples": 9}
        ],
        "breakers": [
            {
                "name": "nvme loads",
                "directory": "/mnt/b/kvstore",
                "state": "open",
                "trips": 2,
                "reason": "hangs",
                "retry_in_s": 4.2,
            },
            {
                "name": "nvme stores",
                "directory": "/mnt/b/kvstore",
                "state": "closed",
                "trips": 0,
                "reason": "",
                "retry_in_s": 0.0,
            },
        ],
    }
    _print_health(report)
    told = capsys.readouterr().out
    assert "loads take 0.40 ms, then 3 GiB/s" in told
    assert (
        "nvme loads (/mnt/b/kvstore): open; 2 trips, the last one: hangs" in told
        and "nvme stores" not in told
    )


@pytest.mark.parametrize(
    ("said", "watchdog_s"),
    [("300000", 0.3), ("", None), ("-1", None), ("9" * 400, None), ("9" * 5000, None), ("\u00b2", None)],
)
def test_a_watchdog_is_a_number(said: str, watchdog_s: float | None) -> None:
    """Whatever else is in the environment is no watchdog, and ends no start."""
    assert Notifier({"WATCHDOG_USEC": said}).watchdog_s == watchdog_s
