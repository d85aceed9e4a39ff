"""Faults of the machine and of processes: its clock, its memory, a daemon or a mirror that is no more, a port, certificates."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from benchmarks.drill.fault import Cause, Fault
from benchmarks.drill.node import Node
from kvstore.security.tls import TlsFiles
from tests.security import certificates

HOUR_S = 3600
GROUP_BYTES = 700 << 20
_HOG = "import sys; held = bytearray(int(sys.argv[1])); held[::4096] = bytes(len(held[::4096])).replace(b'0', b'1'); print('held', flush=True); sys.stdin.read()"


class ClockWrong(Fault):
    name = "clock wrong"
    causes = (Cause("clock", "system clock", "it was set .* forward"),)

    def break_(self, node: Node) -> None:
        node.clock.write_text(str(HOUR_S))

    def mend(self, node: Node) -> None:
        node.clock.unlink(missing_ok=True)


class DaemonStopped(Fault):
    name = "daemon stopped"
    causes = ()
    silent = True

    def break_(self, node: Node) -> None:
        node.signal(signal.SIGSTOP)

    def mend(self, node: Node) -> None:
        node.signal(signal.SIGCONT)


class MirrorDead(Fault):
    name = "mirror dead"
    causes = (Cause("mirror", "eu", "no mirror has been heard of"),)
    regions = ("na", "eu")

    def prepare(self, node: Node) -> None:
        self._mirror = node.mirror()

    def break_(self, node: Node) -> None:
        self._mirror.kill()
        self._mirror.wait()

    def mend(self, node: Node) -> None:
        if self._mirror.poll() is not None:
            self._mirror = node.mirror()


class PortTaken(Fault):
    """Somebody else has the port when its process is started again."""

    name = "port taken"
    causes = (Cause("grpc", r"127\.0\.0\.1:\d+", "(in use|taken|bind)"),)

    def prepare(self, node: Node) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        node.settings["grpc.listen"] = f"127.0.0.1:{self._port}"
        self._taken: socket.socket | None = None
        node.callback(lambda: self.mend(node))

    def break_(self, node: Node) -> None:
        os.kill(node.child("grpc"), signal.SIGKILL)
        while self._taken is None:
            with suppress(OSError):
                self._taken = socket.create_server(("127.0.0.1", self._port))

    def mend(self, node: Node) -> None:
        if self._taken is not None:
            self._taken.close()
            self._taken = None


class MemoryShort(Fault):
    name = "memory short"
    causes = (Cause("memory", "cgroup .*", "are free"),)
    group_bytes = GROUP_BYTES

    def prepare(self, node: Node) -> None:
        self._hog: subprocess.Popen[bytes] | None = None
        node.callback(lambda: self.mend(node))

    def break_(self, node: Node) -> None:
        group = node.group
        assert group is not None
        used = next(
            file for name in ("memory.current", "memory.usage_in_bytes") if (file := group / name).exists()
        )
        take = GROUP_BYTES - int(used.read_text()) - (40 << 20)
        line = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        words = ["sh", "-c", line, "sh", sys.executable, "-c", _HOG, str(take)]
        self._hog = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def mend(self, node: Node) -> None:
        if self._hog is not None:
            self._hog.kill()
            self._hog.wait()


class CertificateExpired(Fault):
    name = "certificate expired"
    causes = (Cause("certificate", ".*tls.crt", "clients refuse it: certificate has expired"),)

    def prepare(self, node: Node) -> None:
        self._authority = certificates.Authority()
        files = self._write(node.home, timedelta(days=1))
        node.settings |= {
            "grpc.listen": "127.0.0.1:0",
            "security.plain": "web",
            "security.certificate_file": str(files.certificate),
            "security.key_file": str(files.key),
            "security.ca_file": str(files.ca),
        }

    def _write(self, home: Path, ends: timedelta) -> TlsFiles:
        begins = min(-timedelta(days=1), ends - timedelta(days=1))
        return certificates.write(
            home, *self._authority.signed(begins=begins, ends=ends), self._authority.pem
        )

    def break_(self, node: Node) -> None:
        self._write(node.home, -timedelta(hours=1))

    def mend(self, node: Node) -> None:
        self._write(node.home, timedelta(days=1))
