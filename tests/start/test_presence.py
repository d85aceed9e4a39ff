"""What must be there while a daemon runs: the socket is made again whatever became of it, all else is told of."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client
from tests.running import TIMEOUT_S, Daemon, Place, environment, kvstore
from tests.start.machine import Machine

Serve = Callable[..., Daemon]


def until(is_so: Callable[[], bool], what: str) -> None:
    give_up_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < give_up_s, what
        time.sleep(0.02)


def health(client: Client) -> Any:
    return client.status()["health"]


def connected(place: Place) -> Client:
    client = Client(place.socket, TIMEOUT_S, label="inside")
    client.ping()
    return client


def test_state_that_cannot_be_written_is_a_problem(place: Place, serve: Serve) -> None:
    """Of each file what is lost without it, as long as it cannot be written: a disk that is full is told before the next start."""
    serve(place)
    files = [place.data_dir / name for name in ("totals.sqlite", "namespaces.json")]
    with connected(place) as client:

        def told() -> dict[str, str]:
            return {
                one["subject"]: one["text"] for one in client.status()["problems"] if one["kind"] == "unsaved"
            }

        for file in files:
            for one in place.data_dir.glob(f"{file.name}*"):
                one.unlink()
            (file / "full").mkdir(parents=True)
        space = client.namespace(bytes(16), 4096, 32, 16, {"model": "m"})
        client.lookup([space], [bytes(32)], ticket=1, tokens=16)
        until(lambda: set(told()) == {"totals", "names"}, "both are told")
        assert all("cannot be written" in text and "next start" in text for text in told().values())
        for file in files:
            shutil.rmtree(file)
        until(lambda: not told(), "both are written")
        assert all(file.is_file() for file in files)


def _bound(path: Path) -> None:
    """What a daemon leaves that was killed."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))


def _gone(path: Path) -> None:
    path.unlink()


def _replaced_by_a_dead_one(path: Path) -> None:
    path.unlink()
    _bound(path)


def _renamed(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def _directory_removed(path: Path) -> None:
    shutil.rmtree(path.parent)


def _directory_replaced(path: Path) -> None:
    path.parent.rename(path.parent.with_name("aside"))
    path.parent.mkdir(mode=0o700)


@pytest.mark.parametrize(
    "lose", [_gone, _replaced_by_a_dead_one, _renamed, _directory_removed, _directory_replaced]
)
def test_a_lost_socket_is_made_again(place: Place, serve: Serve, lose: Callable[[Path], None]) -> None:
    """Whoever is connected notices nothing, whoever comes finds the daemon, the log says so once."""
    inside = place.path / "run"
    inside.mkdir()
    at = Place(inside)
    daemon = serve(at, *place.arguments, f"--socket={at.socket}")
    with connected(at) as client:
        lose(at.socket)
        until(lambda: kvstore("ping", "--socket", at.socket).returncode == 0, "it answers again")
        assert stat.S_IMODE(at.socket.stat().st_mode) == 0o600
        assert health(client) == {"ok": True}
        assert client.status()["daemon"]["pid"] == daemon.process.pid
    assert daemon.log().count("it was removed or replaced, and made again") == 1
    assert daemon.stop() == 0
    assert not at.socket.exists()


@pytest.mark.parametrize("what", ["a file", "a directory", "another daemon's socket"])
def test_what_is_in_its_place_is_left_alone(place: Place, serve: Serve, what: str) -> None:
    """It cannot be made again: a problem in `kvstore status` until it can be."""
    daemon = serve(place)
    with connected(place) as client, socket.socket(socket.AF_UNIX) as other:
        place.socket.unlink()
        if what == "a file":
            place.socket.write_text("mine")
        elif what == "a directory":
            place.socket.mkdir()
        else:
            other.bind(str(place.socket))
            other.listen(8)
        until(lambda: not health(client)["ok"], "it is noticed")
        (problem,) = [one["text"] for one in client.status()["problems"] if one["kind"] == "missing"]
        assert problem.startswith("the socket is gone, engines that come find no daemon: ")
        assert ("another daemon answers there" if "daemon" in what else "it was left alone") in problem
        if what == "a directory":
            place.socket.rmdir()
        else:
            place.socket.unlink()
        other.close()
        until(lambda: health(client)["ok"], "it is made again")
        assert kvstore("ping", "--socket", place.socket).returncode == 0
    assert daemon.stop() == 0


def test_the_kernel_names_it(place: Place, serve: Serve) -> None:
    """Under the name at which it lies, links on the way followed; in its directory is nothing else."""
    run, link = place.path / "real", place.path / "link"
    run.mkdir()
    link.symlink_to(run)
    at = Place(link)
    serve(at, *place.arguments, f"--socket={at.socket}")
    names = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()]
    assert str(run / "s") in names
    assert [path.name for path in run.iterdir()] == ["s"]


def test_one_daemon_of_many_gets_the_socket(place: Place) -> None:
    """All find a dead one and start at once: one serves, the others are told."""
    _bound(place.socket)
    places = [Place(place.path / f"{n}") for n in range(4)]
    running = []
    for each in places:
        each.path.mkdir()
        words = [*each.arguments, f"--socket={place.socket}"]
        running.append(_started(words))
    until(lambda: sum(process.poll() is not None for process in running) == 3, "three are refused")
    (left,) = [process for process in running if process.poll() is None]
    assert all(process.returncode == 1 for process in running if process is not left)
    until(lambda: kvstore("ping", "--socket", place.socket).returncode == 0, "one serves")
    with connected(place) as client:
        assert client.status()["daemon"]["pid"] == left.pid
    left.terminate()
    assert left.wait(TIMEOUT_S) == 0


def _started(words: list[str]) -> subprocess.Popen[bytes]:
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-m", "kvstore", "serve", *words]
    return subprocess.Popen(command, stdout=quiet, stderr=quiet, env=environment())


def _arena_removed(place: Place) -> None:
    for path in (place.path / "shm").glob("kvstore-*"):
        path.unlink()


def _table_replaced(place: Place) -> None:
    (table,) = (place.path / "shm").glob("kvstore-*.table")
    content = table.read_bytes()
    table.unlink()
    table.write_bytes(content)
    table.chmod(0o600)


def _lock_removed(place: Place) -> None:
    (place.data_dir / "lock").unlink()


def _data_dir_removed(place: Place) -> None:
    shutil.rmtree(place.data_dir)


def _data_dir_replaced(place: Place) -> None:
    shutil.copytree(place.data_dir, place.path / "copy")
    os.rename(place.data_dir, place.path / "aside")
    os.rename(place.path / "copy", place.data_dir)


def _nvme_removed(place: Place) -> None:
    (place.path / "nvme0").rename(place.path / "aside")  # at once: the daemon may be making a file in it
    while (place.path / "aside").exists():  # where it makes one just then
        shutil.rmtree(place.path / "aside", ignore_errors=True)


def _nvme_emptied(place: Place) -> None:
    for path in (place.path / "nvme0").iterdir():
        path.unlink()


def _nvme_table_removed(place: Place) -> None:
    (place.path / "nvme0" / "slots.table").unlink()


def _nvme_replaced(place: Place) -> None:
    (place.path / "nvme0").rename(place.path / "aside")
    (place.path / "nvme0").mkdir(mode=0o700)


@pytest.mark.parametrize(
    ("lose", "says"),
    [
        (_arena_removed, "the next start is cold"),
        (_table_replaced, "the next start is cold"),
        (_lock_removed, "lock is gone"),
        (_data_dir_removed, "data is gone"),
        (_data_dir_replaced, "another one is in its place"),
        (_nvme_removed, "nvme0: it, or a file in it, was removed, unmounted or replaced under the daemon"),
        (_nvme_emptied, "nvme0: it, or a file in it, was removed, unmounted or replaced under the daemon"),
        (_nvme_table_removed, "nvme0: it, or a file in it, was removed"),
        (_nvme_replaced, "nvme0: it, or a file in it, was removed, unmounted or replaced under the daemon"),
    ],
)
def test_what_is_gone_is_told(place: Place, serve: Serve, lose: Callable[[Place], None], says: str) -> None:
    """A line in the log and a problem in `kvstore status`; it goes on serving, and the next start succeeds."""
    daemon = serve(place, *place.with_nvme())
    with connected(place) as client:
        until((place.path / "nvme0" / "slots.table").exists, "devices are there")
        until((place.data_dir / "disks.json").exists, "the disks are remembered")
        until(lambda: (place.data_dir / "disks.json").read_text().count("directory") == 2, "both are")
        assert health(client)["ok"]
        lose(place)
        until(lambda: not health(client)["ok"], "it is noticed")
        assert [one for one in client.status()["problems"] if says in f"{one['subject']}: {one['text']}"]
        client.ping()
    assert daemon.stop() == 0
    assert says in daemon.log() and "Traceback" not in daemon.log()
    again = serve(place, *place.with_nvme())
    assert again.stop() == 0


def test_an_arena_of_fewer_slabs_than_sizes_is_told(place: Place, serve: Serve) -> None:
    """Records of one more size than there are slabs are a warning with what to set, and none when they are gone."""
    serve(place)  # four slabs
    with connected(place) as client:

        def told() -> list[str]:
            return [one["text"] + one["fix"] for one in client.status()["problems"] if one["kind"] == "slabs"]

        with connected(place) as other:
            spaces = [
                other.namespace(bytes([n]) * 16, n * 20_000, 32, 16, {"model": "m"}) for n in range(1, 6)
            ]
            for number, space in enumerate(spaces):
                other.lookup([space], [bytes(32)], ticket=number, tokens=16)
            until(lambda: bool(told()), "it is told")
            [text] = told()
            assert "4 slabs of 4 MiB for records of 5 sizes" in text and 'dram.slab_bytes = "2MiB"' in text
        until(lambda: not told(), "it is over")


def test_a_cleaner_leaves_the_socket_alone(machine: Machine) -> None:
    """`systemd-tmpfiles --clean` keeps what /proc/net/unix names, however old."""
    if shutil.which("systemd-tmpfiles") is None:
        pytest.skip("needs systemd-tmpfiles")
    serving = machine.serve("--set=dram.capacity_bytes=64MiB", "--set=web.listen=")
    path = serving.ready["socket"]
    machine.shell(f"echo 'e {Path(path).parent} - - - 1s' > /tmp/rule.conf; sleep 2")
    machine.shell("systemd-tmpfiles --clean /tmp/rule.conf")
    assert machine.run("ping").code == 0
    assert serving.stop() == 0
