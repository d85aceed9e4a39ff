"""Every process of ours that runs for long: whoever does not read what it says stops nothing, signals that mean nothing end
nothing, and a system that gives it too little is one line."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvstore.client import Client, Refused
from kvstore.daemon.process import _LEFT_ALONE, _SILENT
from kvstore.output import HandedOver
from tests.region.regions import init, regions_file
from tests.running import ROOT, TIMEOUT_S, Daemon, Place, environment, kvstore

Serve = Callable[..., Daemon]
KINDS = ("serve", "web", "mirror")
ENDED = frozenset(signal.valid_signals()) - _LEFT_ALONE - _SILENT


def until(is_so: Callable[[], bool], what: str) -> None:
    give_up_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < give_up_s, what
        time.sleep(0.01)


def words(kind: str, place: Place) -> list[str]:
    """A process of this kind, with all that it needs."""
    if kind == "serve":
        return ["serve", *place.arguments]
    if kind == "web":
        return ["web", "--listen=127.0.0.1:0", f"--socket={place.socket}"]
    file = regions_file(place.path, "na", "eu", rules='[[rules]]\nfrom = ["na"]\nto = ["eu"]')
    init(file, "na", "eu")
    return ["mirror", f"--regions={file}", "--set=region=eu", f"--data-dir={place.path / 'mirror'}"]


class Process:
    """One of ours, with pipes that nobody reads before somebody asks."""

    def __init__(self, kind: str, place: Place, is_full: bool, nofile: int | None = None) -> None:
        self._ends = {name: os.pipe() for name in ("stdout", "stderr")}
        if is_full:
            for _, end in self._ends.values():
                os.set_blocking(end, False)
                with suppress(BlockingIOError):
                    while True:
                        os.write(end, b"x" * 4096)
                os.set_blocking(end, True)
        limited = [] if nofile is None else ["sh", "-c", f'ulimit -n {nofile} && exec "$@"', "sh"]
        self.process = subprocess.Popen(
            [*limited, sys.executable, "-m", "kvstore", *words(kind, place)],
            stdin=subprocess.DEVNULL,
            stdout=self._ends["stdout"][1],
            stderr=self._ends["stderr"][1],
            env=environment(),
        )
        self.said = dict.fromkeys(self._ends, b"")
        self._readers: list[threading.Thread] = []
        for _, end in self._ends.values():
            os.close(end)

    def read(self, *names: str) -> None:
        """From now on somebody reads."""
        for name in names:
            self._readers.append(threading.Thread(target=self._read, args=(name,)))
            self._readers[-1].start()

    def _read(self, name: str) -> None:
        while data := os.read(self._ends[name][0], 1 << 16):
            self.said[name] += data

    def log(self) -> str:
        """All that it said, once it has ended."""
        for reader in self._readers:
            reader.join()
        return self.said["stderr"].decode()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join()
        for end, _ in self._ends.values():
            os.close(end)


Start = Callable[..., Process]


@pytest.fixture
def start(place: Place) -> Iterator[Start]:
    running: list[Process] = []

    def begin(kind: str, is_full: bool = False, nofile: int | None = None) -> Process:
        running.append(Process(kind, place, is_full, nofile))
        return running[-1]

    yield begin
    for process in running:
        process.close()


def is_up(kind: str, place: Place, process: Process) -> bool:
    """Without a word of it: what a process that is ready has made."""
    assert process.process.poll() is None
    if kind == "mirror":
        return (place.path / "mirror" / "mirror" / "na" / "catalogue").exists()
    if kind == "web":
        with suppress(OSError):
            table = Path(f"/proc/{process.process.pid}/net/tcp").read_text()
            sockets = [os.readlink(fd) for fd in Path(f"/proc/{process.process.pid}/fd").iterdir()]
            inodes = {line.split()[9] for line in table.splitlines()[1:] if line.split()[3] == "0A"}
            return any(f"socket:[{inode}]" in sockets for inode in inodes)
        return False
    with suppress(Exception), Client(place.socket, 1, label="test", attach=False) as client:
        client.ping()
        return True
    return False


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_reads(place: Place, start: Start, kind: str) -> None:
    """Full pipes at stdout and stderr: it serves, says what it has to, and ends when it is asked to."""
    process = start(kind, is_full=True)
    until(lambda: is_up(kind, place, process), "it serves")
    for _ in range(1000):
        process.process.send_signal(signal.SIGUSR1)
    assert is_up(kind, place, process)
    process.process.terminate()
    assert process.process.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_signals_that_mean_nothing(place: Place, start: Start, kind: str) -> None:
    """Each is a line, once, and the process goes on; where its threads are is written at SIGQUIT."""
    meant = {signal.SIGHUP} if kind == "serve" else set()
    process = start(kind)
    process.read("stdout", "stderr")
    until(lambda: b"ready " in process.said["stdout"], "it serves")
    for number in sorted(ENDED - meant - {signal.SIGQUIT}):
        process.process.send_signal(number)
        until(lambda number=number: b"signal %d (" % number in process.said["stderr"], f"of {number}")  # type: ignore[misc]
    process.process.send_signal(signal.SIGQUIT)
    until(lambda: b"most recent call first" in process.said["stderr"], "the stacks")
    for number in sorted(_SILENT | meant):
        process.process.send_signal(number)
    assert is_up(kind, place, process)
    process.process.terminate()
    assert process.process.wait(TIMEOUT_S) == 0
    assert "Traceback" not in process.log()


@pytest.mark.parametrize(("flood", "lines"), [("SIGUSR1", 1), ("SIGQUIT", 0)])
@pytest.mark.parametrize("runner", ["asyncio", "uvloop"])
def test_a_flood_of_signals_hides_no_other(runner: str, flood: str, lines: int) -> None:
    """One that means nothing, or asks for the stacks, comes thousands of times while the loop is busy: SIGTERM behind them
    is heard."""
    script = f"""
import asyncio, os, signal, {runner}
from kvstore.daemon.process import Signals

async def main():
    signals, ended = Signals(), asyncio.Event()
    signals.keep()
    signals.attach({{signal.SIGTERM: ended.set}})
    os.kill(os.getpid(), signal.{flood})
    await asyncio.sleep(0.1)
    for _ in range(5000):
        os.kill(os.getpid(), signal.{flood})
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(ended.wait(), {TIMEOUT_S})

{runner}.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stderr.count("means nothing here")) == (0, lines), done.stderr[-500:]


def test_a_log_that_is_read_late_is_whole_and_in_order(place: Place, start: Start) -> None:
    """What waited comes in its order, each line whole; what was too much is counted in a line."""
    process = start("serve")
    until(lambda: is_up("serve", place, process), "it serves")
    for _ in range(300):
        process.process.send_signal(signal.SIGHUP)
        time.sleep(0.001)
    process.read("stderr")
    process.process.terminate()
    assert process.process.wait(TIMEOUT_S) == 0
    lines = [json.loads(line) for line in process.log().splitlines()]
    assert lines[-1]["event"].startswith("stopped")
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)


def test_what_nobody_takes_is_bounded_and_counted() -> None:
    """The oldest lines go; a line in their place says how many, and the newest are there."""
    reading, writing = os.pipe()
    stream = HandedOver(writing, waiting_bytes_max=100_000)
    for number in range(50_000):
        stream.write(f"line {number}\n")
    data = b""
    while not data.endswith(b"line 49999\n"):
        data += os.read(reading, 1 << 16)
    stream.end(TIMEOUT_S)
    lines = data.decode().splitlines()
    said = [line for line in lines if not line.startswith("line ")]
    numbers = [int(line.split()[1]) for line in lines if line.startswith("line ")]
    lost = sum(int(line.split()[1]) for line in said)
    assert said and numbers == sorted(numbers)
    assert len(numbers) + lost == 50_000
    os.close(reading)


@pytest.mark.parametrize(
    "script",
    [
        "raise ValueError('the end')",
        "import warnings; warnings.warn('the end')",
        "import threading; t = threading.Thread(target=lambda: 1 / 0, name='the end'); t.start(); t.join()",
        "import sys; print('the end', file=sys.stderr)",
        "import logging; logging.getLogger('kvstore').error('the end')",
        "import faulthandler; faulthandler.dump_traceback(); print('the end', file=__import__('sys').stderr)",
    ],
)
def test_all_that_is_said_is_handed_over(script: str) -> None:
    """A log that nobody reads any more ends no process late; one that is read has the last line of it."""
    before = "from kvstore.daemon import process\nfrom kvstore import logs\nprocess.begin()\nlogs.configure('info', 'json')\n"
    command = [sys.executable, "-c", before + script]
    done = subprocess.run(command, stderr=subprocess.PIPE, env=environment(), timeout=TIMEOUT_S)
    assert b"the end" in done.stderr
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    subprocess.run(command, stderr=writing, env=environment(), timeout=TIMEOUT_S)
    os.close(writing)
    os.close(reading)


def test_descriptors_are_as_many_as_may_be_had(place: Place, serve: Serve) -> None:
    """The soft limit is raised to the hard one."""
    daemon = serve(place)
    limits = Path(f"/proc/{daemon.process.pid}/limits").read_text()
    line = next(line for line in limits.splitlines() if line.startswith("Max open files"))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert int(line.split()[3]) == min(hard, 1 << 20)


def fill(place: Place, held: list[Client], count: int) -> None:
    """Attach so many, into this list."""
    for _ in range(count):
        client = Client(place.socket, TIMEOUT_S, label="test")
        client.ping()
        held.append(client)


@pytest.mark.parametrize("nofile", [64, 96])
def test_few_descriptors(place: Place, start: Start, nofile: int) -> None:
    """The maximum of connections is fitted to them, with a line; whoever is one too many is told at once, and tools are not."""
    process = start("serve", nofile=nofile)
    process.read("stdout", "stderr")
    until(lambda: b"ready " in process.said["stdout"], "it serves")
    assert b"door.connections_max is " in process.said["stderr"]
    held: list[Client] = []
    with pytest.raises(Refused, match="too_many_connections"):
        fill(place, held, nofile)
    assert kvstore("ping", "--socket", place.socket).returncode == 0
    for client in held:
        client.ping()
        client.close()


@pytest.mark.parametrize("nofile", [20, 32, 40])
def test_too_few_descriptors(start: Start, nofile: int) -> None:
    """One line, and no supervisor tries again."""
    process = start("serve", nofile=nofile)
    process.read("stdout", "stderr")
    assert process.process.wait(TIMEOUT_S) == 2
    said = [line for line in process.log().splitlines() if not line.startswith("{")]
    assert len(said) == 1 and said[0].startswith(f"kvstore: this process may have {nofile} open files, which")


LOADED = """
import atexit, sys
from kvstore.tools.cli import main
atexit.register(lambda: print("loaded", *sys.modules, flush=True))
sys.exit(main())
"""


@pytest.mark.parametrize("region", ["", "na"])
def test_a_daemon_without_a_region_loads_nothing_of_regions(place: Place, region: str) -> None:
    """Neither RocksDB nor a store of objects, nor what follows feeds: at its start, while it serves and is asked, and at its end. With a region
    it does."""
    words = ["serve", *place.arguments]
    if region:
        file = regions_file(place.path, region)
        init(file, region)
        words += [f"--set=regions_file={file}", f"--set=region={region}"]
    command = [sys.executable, "-c", LOADED, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None and process.stdout.readline().startswith("ready")
        assert kvstore("status", "--socket", place.socket).returncode == 0
        assert kvstore("doctor", "--socket", place.socket).returncode in (0, 1)
        process.terminate()
        (line,) = [line for line in process.stdout if line.startswith("loaded ")]
    loaded = set(line.split())
    heavy = {
        *("rocksdict", "obstore", "kvstore.daemon.regional", "kvstore.durable.region_level"),
        *("replication.catalogue.catalogue", "replication.feed.tail", "replication.region.region_node"),
    }
    assert loaded & heavy == (heavy if region else set())
