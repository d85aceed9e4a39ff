"""The daemon's life, as a process: start, ready, serve, stop, crash, start again warm."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.client import Client, Namespace
from kvstore.ledger.sums import DEMOTED, LOADED
from kvstore.ledger.totals import Totals
from tests.running import ROOT, TIMEOUT_S, Daemon, Place, kvstore

Serve = Callable[..., Daemon]
RECORD_BYTES = 100_000
COLUMNS = [30_000, 30_000, 40_000]
HASHES = [bytes([n]) * 32 for n in range(1, 21)]


def records(count: int = len(HASHES)) -> list[bytes]:
    return [bytes([n]) * RECORD_BYTES for n in range(count)]


def namespace(client: Client) -> Namespace:
    return client.namespace(b"n" * 16, RECORD_BYTES, 32, 16, {"model": "test"}, COLUMNS)


def put(path: Path) -> None:
    with Client(path, timeout_s=10, label="writer") as client:
        assert client.put(namespace(client), HASHES, b"", records()) == len(HASHES)


def hits(path: Path) -> int:
    """How many records come back with the bytes that were put, in order."""
    with Client(path, timeout_s=10, label="reader") as client:
        into = [bytearray(RECORD_BYTES) for _ in HASHES]
        deadline = time.monotonic() + 10
        count = 0
        while count < len(HASHES) and time.monotonic() < deadline:
            count = client.get(namespace(client), HASHES, into, wait_s=5)
        assert [bytes(got) for got in into[:count]] == records()[:count]
        return count


def status(path: Path) -> dict[str, object]:
    done = kvstore("status", "-o", "json", "--socket", path)
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_one_line_tells_that_it_serves(place: Place, serve: Serve) -> None:
    """stdout is exactly the ready line: socket, arena, pages; the socket answers by then."""
    daemon = serve(place)
    assert daemon.ready == {"socket": str(place.socket), "arena": str(place.arena()), "pages": "4-KiB"}
    assert status(place.socket)["health"] == {"ok": True}
    assert daemon.stop() == 0
    assert daemon.process.stdout is not None
    assert daemon.process.stdout.read() == ""


def test_a_clean_stop_leaves_a_warm_arena_and_no_socket(place: Place, serve: Serve) -> None:
    """After SIGTERM and a new start everything is hit again from DRAM."""
    daemon = serve(place)
    put(place.socket)
    assert daemon.stop() == 0
    assert not place.socket.exists()
    assert serve(place).process.pid != daemon.process.pid
    assert hits(place.socket) == len(HASHES)


def test_a_stop_right_behind_a_start_writes_what_came(place: Place, serve: Serve) -> None:
    """Also what was put before the rows of the disks were read: it waits for that, and so does the stop."""
    for number in range(5):
        fresh = Place(place.path / str(number))
        fresh.path.mkdir()
        words = [*fresh.with_nvme(), "--set=dram.keep_on_stop=false"]
        daemon = serve(fresh, *words)
        put(fresh.socket)
        assert daemon.stop() == 0 and "Traceback" not in daemon.log()
        daemon = serve(fresh, *words)
        assert hits(fresh.socket) == len(HASHES)
        assert daemon.stop() == 0


def test_kill_9_leaves_a_warm_arena(place: Place, serve: Serve) -> None:
    """After kill -9 the next daemon takes over data dir, socket and arena, and hits."""
    daemon = serve(place)
    put(place.socket)
    daemon.stop(signal.SIGKILL)
    serve(place)
    assert hits(place.socket) == len(HASHES)
    assert kvstore("fsck", "--socket", place.socket).returncode == 0


def test_a_stop_flushes_to_nvme(place: Place, serve: Serve) -> None:
    """What was only in DRAM when SIGTERM came is on NVMe: it survives the loss of the arena."""
    daemon = serve(place, *place.with_nvme())
    put(place.socket)
    assert daemon.stop() == 0
    assert '"blocks_not_on_nvme": 0' in daemon.log()
    told = Totals("", place.data_dir / "totals.sqlite").since(0)
    assert sum(row.bytes_moved[DEMOTED] for row in told) == len(HASHES) * RECORD_BYTES  # part of the budget
    place.arena().unlink()
    serve(place, *place.with_nvme())
    assert hits(place.socket) == len(HASHES)


LATE_SAVE = """
import asyncio, threading
from kvstore.daemon.service import Service
from kvstore.ledger.totals import Totals

save, flush, is_stopping = Totals.save, Service._flush, threading.Event()

def saved_late(totals, snapshot):
    if threading.current_thread() is not threading.main_thread():
        print("held", flush=True)
        is_stopping.wait()
    return save(totals, snapshot)

async def flushed_late(service):
    is_stopping.set()
    while service.engine.accounts._saving is not None:
        await asyncio.sleep(0.01)
    await flush(service)

Totals.save, Service._flush = saved_late, flushed_late
"""


def test_a_late_save_of_totals_does_not_take_back_what_came_behind_it(
    place: Place, serve: Serve, tmp_path: Path
) -> None:
    """An I/O thread that is slow has older rows in its hands when the daemon stops, and writes them while it flushes."""
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "sitecustomize.py").write_text(LATE_SAVE)
    daemon = serve(place, PYTHONPATH=f"{tmp_path / 'late'}:{ROOT}")
    put(place.socket)
    assert daemon.process.stdout is not None and daemon.process.stdout.readline() == "held\n"
    assert hits(place.socket) == len(HASHES)
    assert daemon.stop() == 0
    told = Totals("", place.data_dir / "totals.sqlite").since(0)
    assert sum(row.bytes_moved[LOADED] for row in told) == len(HASHES) * RECORD_BYTES


def test_the_arena_can_be_given_back(place: Place, serve: Serve) -> None:
    """dram.keep_on_stop = false: a clean stop frees the shared memory; so does one with nothing in it."""
    for keep in ("false", "true"):
        daemon = serve(place, *place.arguments, f"--set=dram.keep_on_stop={keep}")
        arena = place.arena()
        if keep == "false":
            put(place.socket)
        assert daemon.stop() == 0
        assert not arena.exists()


def test_a_second_daemon_names_the_first(place: Place, serve: Serve) -> None:
    """One daemon a data dir: the other says which pid holds it, and exits with 1."""
    daemon = serve(place)
    done = kvstore("serve", *place.arguments, f"--socket={place.path / 's2'}")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"data_dir {place.data_dir}: in use by pid {daemon.process.pid};" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert status(place.socket)["health"] == {"ok": True}


def test_a_socket_in_use_is_not_taken(place: Place, serve: Serve) -> None:
    """Another data dir with the same socket: refused, before memory is taken; the first daemon goes on."""
    serve(place)
    done = kvstore("serve", *place.arguments, f"--data-dir={place.path / 'other'}")
    assert done.returncode == 1
    assert done.stderr == f"kvstore: socket {place.socket}: another daemon answers there\n"
    assert status(place.socket)["health"] == {"ok": True}


def test_a_foreign_data_dir_is_untouched(place: Place) -> None:
    """A directory with somebody else's files is refused and stays as it was."""
    place.data_dir.mkdir()
    (place.data_dir / "thesis.tex").write_text("precious")
    done = kvstore("serve", *place.arguments)
    assert done.returncode == 2
    assert "not empty and not ours (it holds 'thesis.tex')" in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path.name for path in place.data_dir.iterdir()] == ["thesis.tex"]


def test_another_format_of_the_data_dir_is_untouched(place: Place) -> None:
    """A data dir of a later version is refused and stays as it was."""
    place.data_dir.mkdir()
    mark = place.data_dir / "kvstore-data.json"
    text = json.dumps({"magic": "kvstore data dir", "format": 99, "instance": "0" * 32})
    mark.write_text(text)
    done = kvstore("serve", *place.arguments)
    assert done.returncode == 2
    assert "format 99, allowed is 1" in done.stderr
    assert (mark.read_text(), len(list(place.data_dir.iterdir()))) == (text, 1)


@pytest.mark.parametrize(
    ("setting", "code", "says"),
    [
        (
            "data_dir=/nowhere/below/kvstore",
            3,
            "data_dir /nowhere/below/kvstore: /nowhere/below is not there",
        ),
        ("socket_path=/nowhere/below/s", 2, "socket_path /nowhere/below/s: cannot make /nowhere/below"),
        ("dram.directory=/nowhere", 2, "dram.directory /nowhere: not a directory"),
        ("nvme.directories=/proc/kvstore", 2, "nvme directory /proc/kvstore: "),
        ("nvme.directories=/etc", 2, "nvme directory /etc: holds "),
    ],
)
def test_a_place_that_cannot_be_had_is_one_line(place: Place, setting: str, code: int, says: str) -> None:
    """What cannot be opened is named, and the daemon does not start."""
    key, _, value = setting.partition("=")
    flag = {"data_dir": "--data-dir", "socket_path": "--socket"}.get(key)
    done = kvstore("serve", *place.arguments, f"{flag}={value}" if flag else f"--set={setting}")
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_bad_nvme_directory_costs_no_warm_arena(place: Place, serve: Serve) -> None:
    """A start that fails leaves the arena as it was, even with other DRAM settings."""
    daemon = serve(place)
    put(place.socket)
    daemon.stop()
    bad = [*place.arguments, "--set=dram.capacity_bytes=32MiB", "--set=nvme.directories=/etc"]
    assert kvstore("serve", *bad).returncode == 2
    serve(place)
    assert hits(place.socket) == len(HASHES)


def test_the_report_is_what_the_manual_says(place: Place, serve: Serve) -> None:
    """docs/cli.md lists every field of `status -o json`, and no other."""
    serve(place)
    text = (ROOT / "docs" / "cli.md").read_text()
    block = text.partition("## kvstore status -o json")[2].partition("```json")[2].partition("```")[0]
    manual, report = json.loads(block), status(place.socket)
    assert set(manual) == set(report)
    for name in ("daemon", "health", "arena", "door"):
        assert set(manual[name]) == set(report[name]), name  # type: ignore[call-overload]
    assert set(manual["tiers"][0]) == set(report["tiers"][0])  # type: ignore[index]


def test_a_capacity_that_memory_cannot_hold_is_one_line(place: Place) -> None:
    """Asking for more than the file system has is refused before anything is made."""
    done = kvstore(
        "serve", *place.arguments, "--set=dram.capacity_bytes=64TiB", "--set=dram.slab_bytes=256MiB"
    )
    assert done.returncode == 2
    assert "dram.capacity_bytes = 64TiB: of the " in done.stderr and "; at most " in done.stderr
    assert "Traceback" not in done.stderr


def test_the_service_manager_is_told(place: Place, serve: Serve, tmp_path: Path) -> None:
    """sd_notify: READY when serving, WATCHDOG from the loop, STOPPING when leaving."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(TIMEOUT_S)
        daemon = serve(place, NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="300000")
        assert manager.recv(4096).startswith(b"READY=1\n")
        assert manager.recv(4096) == b"WATCHDOG=1"
        daemon.stop()
        manager.settimeout(0.1)
        told: list[bytes] = []
        while not told or told[-1] != b"STOPPING=1":
            told.append(manager.recv(4096))
        assert set(told) <= {b"WATCHDOG=1", b"STOPPING=1"}


def test_the_log_is_json_when_asked(place: Place, serve: Serve) -> None:
    """log.format=json: every line of stderr is one object with event, level, logger and time."""
    daemon = serve(place, *place.arguments, "--set=log.format=json", "--set=log.level=debug")
    put(place.socket)
    daemon.stop()
    events = [json.loads(line) for line in daemon.log().splitlines()]
    assert all({"event", "level", "logger", "time"} <= set(event) for event in events)
    serving = next(event for event in events if event["event"] == "serving")
    assert serving["socket"] == str(place.socket)


def test_status_counts_what_happened(place: Place, serve: Serve) -> None:
    """The report has tiers, counters, sessions and namespaces, and they tell of our put and get."""
    serve(place, *place.with_nvme())
    put(place.socket)
    assert hits(place.socket) == len(HASHES)
    with Client(place.socket, timeout_s=10, label="watcher") as client:
        assert client.lookup([namespace(client)], HASHES) == len(HASHES)  # attaches, too
        report = status(place.socket)
    tiers = {tier["name"]: tier for tier in report["tiers"]}  # type: ignore[attr-defined]
    assert tiers["dram"]["records"] == len(HASHES)
    assert tiers["dram"]["capacity_bytes"] == 16 << 20
    assert tiers["dram"]["capacity_bytes"] == tiers["dram"]["used_bytes"] + tiers["dram"]["free_bytes"]
    assert set(tiers) == {"dram", "nvme"}
    assert report["counters"]["committed"] == len(HASHES)  # type: ignore[index]
    assert "watcher" in [session["label"] for session in report["sessions"]]  # type: ignore[attr-defined]
    assert report["namespaces"][0]["fields"] == {"model": "test"}  # type: ignore[index]
    table = kvstore("status", "--socket", place.socket)
    assert table.returncode == 0
    assert " test " in table.stdout and "\n  dram " in table.stdout and "\033" not in table.stdout
    assert "handed out" in table.stdout and " hits" not in table.stdout  # those are tokens, of reports
    assert f"1: {len(HASHES)} of {len(HASHES)} blocks found (100.0 %), " in table.stdout


def test_the_instance_decides_what_is_adopted(place: Place, serve: Serve) -> None:
    """With another data dir the arena of the first is left alone, and the start is cold."""
    daemon = serve(place)
    put(place.socket)
    daemon.stop()
    shutil.move(place.data_dir, place.path / "kept")
    other = serve(place)
    assert len(list((place.path / "shm").glob("*.arena"))) == 2
    other.stop()
    shutil.rmtree(place.data_dir)
    shutil.move(place.path / "kept", place.data_dir)
    serve(place)
    assert hits(place.socket) == len(HASHES)
