"""A daemon and an engine in containers of their own: what they must share, and what not."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.running import TIMEOUT_S, Daemon, Place, environment, kvstore

UNSHARE = [
    "unshare",
    *([] if os.geteuid() == 0 else ["--map-root-user"]),
    *("--mount", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"),
]
OWN_MEMORY = 'mount -t tmpfs -o size="$1" shm /dev/shm && shift && exec "$@"'

# What an engine's container runs: it sees its own /dev/shm, which is empty, and has pid 1 or close to it.
CLIENT = """
import json, os, sys
from kvstore.client import Client
hashes = [bytes([n]) * 32 for n in range(1, 9)]
records = [bytes([n]) * 100_000 for n in range(8)]
with Client(sys.argv[1], timeout_s=10, label="engine") as client:
    space = client.namespace(b"n" * 16, 100_000, 32, 16, {"model": "test"})
    put = client.put(space, hashes, b"", records)
    into = [bytearray(100_000) for _ in hashes]
    got = client.get(space, hashes, into, wait_s=5)
    json.dump({"put": put, "got": got, "equal": into == records, "pid": os.getpid(), "shm": os.listdir("/dev/shm")}, sys.stdout)
"""


def can_unshare() -> bool:
    """Whether this machine lets us make namespaces; some containers do not."""
    if shutil.which("unshare") is None:
        return False
    tried = [*UNSHARE, "sh", "-c", OWN_MEMORY, "sh", "1m", "true"]
    return subprocess.run(tried, capture_output=True, timeout=TIMEOUT_S).returncode == 0


needs_namespaces = pytest.mark.skipif(not can_unshare(), reason="no namespaces can be made here")


def contained(shm: str, *words: str) -> list[str]:
    """A command in its own mount, pid and IPC namespaces, with a /dev/shm of its own."""
    return [*UNSHARE, "sh", "-c", OWN_MEMORY, "sh", shm, *words]


def serving(*arguments: str) -> list[str]:
    """A daemon without what these tests are not about."""
    return [sys.executable, "-m", "kvstore", "serve", *arguments, "--set=web.listen="]


@contextmanager
def started(command: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A daemon that serves, and its first line; killed at the end, and with it, by --kill-child, whatever is in there."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        try:
            assert process.stdout is not None
            readable, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
            line = process.stdout.readline() if readable else ""
            assert line.startswith("ready "), line
            yield process, line
        finally:
            process.kill()


def in_own_memory(place: Place) -> list[str]:
    """A daemon whose arena is in the /dev/shm of its container."""
    arguments = [word for word in place.arguments if "dram.directory" not in word]
    return contained("128m", *serving(*arguments, "--set=dram.huge_pages=off"))


@needs_namespaces
def test_only_the_directory_of_the_socket_is_shared(place: Place) -> None:
    """Daemon and engine in namespaces of their own: blocks are put and got, and the engine never sees the arena's file."""
    with started(in_own_memory(place)) as (_, line):
        assert "arena=/dev/shm/" in line, line
        arena = Path(line.partition("arena=")[2].split()[0])
        assert not arena.exists()  # here: it is in the daemon's /dev/shm only
        done = subprocess.run(
            contained("1m", sys.executable, "-c", CLIENT, str(place.socket)),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=environment(),
        )
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert (said["put"], said["got"], said["equal"]) == (8, 8, True)
        assert said["pid"] <= 2 and said["shm"] == []
        assert json.loads(kvstore("ping", "-o", "json", "--socket", place.socket).stdout)["pid"] == 1


@needs_namespaces
def test_as_the_first_process_of_a_container_it_stops_when_told(place: Place) -> None:
    """Pid 1 gets no signal that it does not handle: SIGTERM, as of `docker stop`, is handled, and the exit code is 0."""
    # The shell in front is pid 1 only until it is replaced; a second one outside tells it to stop.
    with started(in_own_memory(place)) as (process, _):
        (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(first), 15)
        assert process.wait(TIMEOUT_S) == 0
        assert not place.socket.exists()


@needs_namespaces
def test_the_64_mib_of_a_container_are_refused_with_what_to_pass(place: Place) -> None:
    """Where /dev/shm has what Docker gives it, the start ends with one line that names --shm-size, and is not tried again."""
    serve = serving(f"--data-dir={place.data_dir}", f"--socket={place.socket}", "--set=dram.huge_pages=off")
    done = subprocess.run(
        contained("64m", *serve), capture_output=True, text=True, timeout=TIMEOUT_S, env=environment()
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "64 MiB of /dev/shm" in line and "--shm-size" in line and "volume of memory at /dev/shm" in line


# As under ProtectSystem=strict, without a word about the directory in ReadWritePaths.
READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'


def read_only(directory: Path, *words: str) -> list[str]:
    """A command that may only read a directory."""
    return [*UNSHARE, "sh", "-c", READ_ONLY, "sh", str(directory), *words]


@needs_namespaces
def test_a_new_directory_that_may_only_be_read_is_refused(place: Place) -> None:
    """NVMe in a place that the unit or the container has not opened for writing is a wrong setting: one line, exit code 2."""
    disk = place.path / "nvme0"
    disk.mkdir(mode=0o700)
    serve = serving(*place.arguments, f"--set=nvme.directories={disk}")
    done = subprocess.run(
        read_only(disk, *serve), capture_output=True, text=True, timeout=TIMEOUT_S, env=environment()
    )
    (line,) = done.stderr.splitlines()
    assert (done.returncode, str(disk) in line, "read-only" in line) == (2, True, True), line


@needs_namespaces
def test_a_disk_of_ours_that_became_read_only_is_told(place: Place, serve: Callable[..., Daemon]) -> None:
    """The daemon serves without it, as without a disk that has failed, and its health says which one and why: no traceback."""
    disk = place.path / "nvme0"
    words = [*place.arguments, f"--set=nvme.directories={disk}"]
    assert serve(place, *words).stop() == 0
    with started(read_only(disk, *serving(*words))) as (process, _):
        assert process.stderr is not None
        log = next(line for line in process.stderr if "left alone" in line)
        assert "Read-only file system" in log and "Traceback" not in log
        give_up_s, status = time.monotonic() + TIMEOUT_S, {"health": {"ok": True}}
        while status["health"]["ok"]:
            assert time.monotonic() < give_up_s, status
            status = json.loads(kvstore("status", "-o", "json", "--socket", place.socket).stdout)
        (problem,) = [one["text"] for one in status["problems"] if one["kind"] == "disk"]
        assert "is left alone" in problem and "Read-only file system" in problem
