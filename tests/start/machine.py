"""A machine of a test's own: its mounts, users and cgroups, without a container.

    a keeper in a mount namespace of its own  ─▶  /run /dev/shm /var/lib /mnt /tmp are empty file systems
    commands enter it, as root or as nobody, in a cgroup with a limit or not

The interpreter is made readable for other users in there, wherever it is installed.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.running import ROOT, TIMEOUT_S, environment
from tiers.dram import memory_limits

NOBODY = 65534
OVERLAID = ("/run", "/dev/shm", "/var/lib", "/mnt", "/tmp")
FILL = """
import sys
from kvstore.client import Client
with Client(sys.argv[1], timeout_s=60, label="test") as client:
    space = client.namespace(bytes(16), 4096, 16, 16, {"model": "m"})
    assert client.put(space, [bytes(16)], b"", [bytes(4096)]) == 1
"""
_KEEPER = """
set -e
umount -l /run/kvstore/huge 2>/dev/null || true
for directory in {overlaid}; do mount -t tmpfs -o mode=755 none $directory; done
chmod 1777 /dev/shm /tmp
mkdir /mnt/inside && mount --bind {prefix} /mnt/inside
{opened}
echo ready
exec cat
"""


def _opened(prefix: Path) -> str:
    """Shell lines that let everybody reach the interpreter: closed directories above it are replaced."""
    closed = next((p for p in reversed(prefix.parents) if p.stat().st_mode & 0o001 == 0), None)
    if closed is None:
        return ":"
    return (
        f"mount -t tmpfs -o mode=755 none {closed} && mkdir -p {prefix} && mount --move /mnt/inside {prefix}"
    )


@dataclass
class Run:
    """One finished command."""

    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The one line that it said: more, or a traceback, is a failure."""
        assert "Traceback" not in self.err, self.err
        said = [line for line in self.err.splitlines() if not line.startswith("{")]  # those are the log's
        assert len(said) == 1 and said[0].startswith("kvstore: "), self.err
        return said[0].removeprefix("kvstore: ")


@dataclass
class Serving:
    """A daemon that said "ready"."""

    process: subprocess.Popen[str]
    ready: dict[str, str]
    errors: Path

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(TIMEOUT_S)

    def log(self) -> str:
        """What it logged; never a traceback."""
        text = self.errors.read_text()
        assert "Traceback" not in text, text
        return text


@dataclass
class Machine:
    """Made by the fixture `machine`. Commands of `root` or `nobody` share its file systems."""

    path: Path
    keeper: subprocess.Popen[str]
    running: list[subprocess.Popen[str]] = field(default_factory=list)
    started: int = 0

    def words(self, command: Sequence[str], uid: int, group: Path | None, extra: dict[str, str]) -> list[str]:
        """How a command is run here."""
        home = {"HOME": "/root" if uid == 0 else "/nonexistent", "XDG_RUNTIME_DIR": "", "XDG_STATE_HOME": ""}
        settings = [f"{name}={value}" for name, value in {**home, **extra}.items()]
        user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"] if uid else []
        inside = [
            f"--mount=/proc/{self.keeper.pid}/ns/mnt",
            "--wd=/",
            "--",
            *user,
            "env",
            *settings,
            *command,
        ]
        enter = ["nsenter", *inside]
        return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *enter] if group else enter

    def run(self, *arguments: str, uid: int = 0, group: Path | None = None, **extra: str) -> Run:
        """One command of ours, to its end."""
        words = self.words([sys.executable, "-m", "kvstore", *arguments], uid, group, extra)
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=environment(KVSTORE_CONFIG="/dev/null"),
        )
        return Run(done.returncode, done.stdout, done.stderr)

    def fill(self, daemon: Serving, uid: int = 0) -> None:
        """One block into its memory: a stop gives an empty one back."""
        where = {"PYTHONPATH": str(ROOT)}
        words = self.words([sys.executable, "-c", FILL, daemon.ready["socket"]], uid, None, where)
        subprocess.run(words, check=True, timeout=TIMEOUT_S)

    def shell(self, script: str) -> str:
        """What a shell in here says."""
        words = self.words(["sh", "-c", script], 0, None, {})
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=TIMEOUT_S).stdout

    def serve(self, *arguments: str, uid: int = 0, group: Path | None = None, **extra: str) -> Serving:
        """A daemon; returns when it serves."""
        self.started += 1
        errors = self.path / f"stderr{self.started}"
        words = self.words([sys.executable, "-m", "kvstore", "serve", *arguments], uid, group, extra)
        with errors.open("w") as stderr:
            process = subprocess.Popen(
                words,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment(KVSTORE_CONFIG="/dev/null"),
            )
        self.running.append(process)
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
        line = process.stdout.readline() if readable else ""
        assert line.startswith("ready "), errors.read_text()
        return Serving(process, dict(word.split("=", 1) for word in line.split()[1:]), errors)

    def close(self) -> None:
        for process in self.running:
            if process.poll() is None:
                process.kill()
            process.wait(TIMEOUT_S)
            assert process.stdout is not None
            process.stdout.close()
        self.keeper.communicate(timeout=TIMEOUT_S)


def make_machine(path: Path) -> Machine:
    """Skips the test where file systems cannot be mounted."""
    for tool in ("unshare", "nsenter", "setpriv"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount file systems of its own")
    prefix = Path(sys.base_prefix).resolve()
    for needed in (ROOT, prefix, Path(sys.prefix)):
        if any(needed.is_relative_to(directory) for directory in OVERLAID):
            pytest.skip(f"{needed} would be hidden")
    script = _KEEPER.format(overlaid=" ".join(OVERLAID), prefix=prefix, opened=_opened(prefix))
    keeper = subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert keeper.stdout is not None
    if keeper.stdout.readline() != "ready\n":
        keeper.communicate()
        pytest.skip("no mount namespace can be had here")
    machine = Machine(path, keeper)
    if machine.run("version", uid=NOBODY).code != 0:
        machine.close()
        pytest.skip("other users cannot read this checkout")
    return machine


def make_group(limit_bytes: int) -> Path:
    """A cgroup below our own with this limit, of memory. Skips the test where none can be made."""
    for hierarchy, _, own in memory_limits._groups(memory_limits.PROC):
        group = own / f"kvstore-test-{os.getpid()}-{time.monotonic_ns()}"
        try:
            group.mkdir()
            name = "memory.max" if "memory.max" in hierarchy.limits else "memory.limit_in_bytes"
            (group / name).write_text(str(limit_bytes))
        except OSError:
            with suppress(OSError):
                group.rmdir()
            continue
        return group
    pytest.skip("no cgroup with a memory limit can be made here")


def remove_group(group: Path) -> None:
    """Once its processes are gone, which takes the kernel a moment."""
    give_up_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < give_up_s:
        with suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.05)
    raise AssertionError(f"{group} is still in use")
