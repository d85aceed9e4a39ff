"""The systemd units: valid, hardened, and the daemon still can do in them what it must."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from kvstore.client import Client
from tests.running import ROOT, TIMEOUT_S, Place, environment, kvstore

UNITS = ("kvstore.service", "kvstore-mirror.service")
EXPOSURE_MAX = 3.0
FAMILIES = ("AF_UNIX", "AF_INET", "AF_INET6")
# SQLite gives its files to the owner of the directory where it runs as root, as tests may and the unit does not.
AS_ROOT_ONLY = {"fchown"}

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)
needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


def settings(unit: str) -> dict[str, list[str]]:
    """What a unit sets, in order."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "deploy" / unit).read_text(encoding="utf-8").splitlines():
        if match := re.match(r"(\w+)=(.*)", line):
            found.setdefault(match[1], []).append(match[2])
    return found


def families(unit: str) -> set[str]:
    return set(settings(unit)["RestrictAddressFamilies"][0].split())


def systemd_analyze(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *words], capture_output=True, text=True, timeout=TIMEOUT_S)


@needs_systemd
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_knows_all_that_a_unit_says(unit: str) -> None:
    """`systemd-analyze verify` finds nothing to say, but that /opt/kvstore is not on this machine."""
    done = systemd_analyze("verify", "--man=no", str(ROOT / "deploy" / unit))
    said = [line for line in done.stderr.splitlines() if "is not executable: No such file" not in line]
    assert not [line for line in said if line.startswith(unit)], said


@needs_systemd
@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_is_hardly_exposed(unit: str) -> None:
    """`systemd-analyze security` gives at most 3.0 of 10."""
    done = systemd_analyze("security", "--offline=true", "--no-pager", str(ROOT / "deploy" / unit))
    level = re.search(r"Overall exposure level.*: ([\d.]+) ", done.stdout)
    assert level is not None, done.stderr
    assert float(level[1]) <= EXPOSURE_MAX


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_leaves_the_cache_and_the_network_alone(unit: str) -> None:
    """A stop deletes no shared memory, wrong settings are not tried again, and buckets, events and the page have their sockets."""
    said = settings(unit)
    assert said.get("RemoveIPC", ["no"]) == ["no"]
    assert said["RestartPreventExitStatus"] == ["2 3"]
    assert {"AF_UNIX", "AF_INET", "AF_INET6"} <= families(unit) <= {*FAMILIES, "AF_NETLINK"}
    assert "PrivateNetwork" not in said and "PrivateIPC" not in said
    if unit == "kvstore.service":
        assert said["RuntimeDirectoryPreserve"] == ["yes"]
        assert said["LimitMEMLOCK"] == ["infinity"]
        assert "PrivateUsers" not in said  # who is at the socket would be "nobody"


def allowed(unit: str) -> set[str]:
    """The system calls that a unit's filter lets through, by systemd's own lists."""
    lists: dict[str, list[str]] = {}
    for line in systemd_analyze("syscall-filter", "--no-pager").stdout.splitlines():
        word = line.strip()
        if line.startswith("@"):
            current = lists.setdefault(word, [])
        elif word and not word.startswith("#"):
            current.append(word)

    def flat(name: str) -> set[str]:
        return set().union(*(flat(word) if word[0] == "@" else {word} for word in lists[name]))

    first, *others = settings(unit)["SystemCallFilter"]
    left = set().union(*map(flat, first.split()))
    for line in others:
        left -= set().union(*map(flat, line.removeprefix("~").split()))
    return left


@needs_systemd
@needs_strace
def test_the_daemon_makes_no_system_call_that_its_unit_forbids(place: Place) -> None:
    """Start, memory, disks, engines, the web page, events and the stop are all within the filter, and no memory is both
    written and executed."""
    trace = place.path / "trace"
    command = [sys.executable, "-m", "kvstore", "serve", *place.with_nvme(), "--set=web.listen=127.0.0.1:0"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    events = [f"--set=events.endpoint={endpoint}", "--set=stop_timeout_s=5"]
    strace = ["strace", "-f", "-qq", "-e", "signal=none", "-o", str(trace)]
    process = subprocess.Popen(
        [*strace, *command, *events],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("ready ")
        page = next(found[0] for line in process.stderr if (found := re.search(r"http://[\d.]+:\d+/", line)))
        with Client(place.socket, timeout_s=30, label="engine") as client:
            space = client.namespace(b"n" * 16, 100_000, 32, 16, {"model": "test"})
            hashes = [bytes([n]) * 32 for n in range(1, 9)]
            assert client.put(space, hashes, b"", [bytes(100_000)] * 8) == 8
            assert client.get(space, hashes, [bytearray(100_000) for _ in hashes], wait_s=10) == 8
        with urllib.request.urlopen(f"{page}metrics", timeout=30) as answer:
            assert b"kvstore_up 1" in answer.read()
        pid = json.loads(kvstore("ping", "-o", "json", "--socket", place.socket).stdout)["pid"]
        subprocess.run(["kill", f"-{signal.SIGTERM:d}", str(pid)], check=True)
        process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait(TIMEOUT_S)
    lines = trace.read_text(errors="replace").splitlines()
    called = {match[1] for line in lines if (match := re.match(r"\d+ +(\w+)\(", line))}
    assert {"sendmsg", "pwrite64", "madvise"} <= called, "the trace shows what a daemon does"
    assert called - allowed("kvstore.service") <= AS_ROOT_ONLY
    asked = {match[1] for line in lines if (match := re.search(r" socket\((AF_\w+)", line))}
    assert asked <= families("kvstore.service")
    assert not [line for line in lines if "PROT_WRITE|PROT_EXEC" in line and "= -1" not in line]


def test_paths_of_the_unit_are_those_of_the_configuration() -> None:
    """State, socket and huge pages lie where the defaults look for them, and the installation is outside of /home."""
    from kvstore.daemon.config.config import DEFAULT_FILE, Config
    from tiers.dram.pages import HUGE_TMPFS

    said = settings("kvstore.service")
    sample = Path("/var/lib") / said["StateDirectory"][0]
    assert str(sample) in (ROOT / "deploy/kvstore.toml").read_text(encoding="utf-8")
    assert f"--config {DEFAULT_FILE}" in said["ExecStart"][0]
    assert str(HUGE_TMPFS) in said["ExecStartPre"][0]
    assert HUGE_TMPFS.parent == Path("/run") / said["RuntimeDirectory"][0]
    assert float(said["TimeoutStopSec"][0]) > Config().stop_timeout_s
