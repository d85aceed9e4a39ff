"""A real S3 server on this machine: Ceph's radosgw, over one monitor and one OSD that keeps everything in memory.

    monitor ◀── OSD (memstore) ◀── radosgw ── http://127.0.0.1:port      each a child process, in the foreground

What is put costs memory until the server is stopped. Nothing is installed here; `is_installed` says whether it is there
(Debian: radosgw ceph-mon ceph-osd ceph-common).
"""

from __future__ import annotations

import configparser
import http.client
import os
import secrets
import shutil
import socket
import subprocess
import time
import uuid
from pathlib import Path
from typing import IO

from benchmarks.errors import BenchError

PROGRAMS = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
START_S_MAX = 60.0
STORE_BYTES = 6 << 30  # the OSD refuses more
_RIGHTS = {"client.admin": ("mon", "osd", "mgr"), "client.rgw.a": ("mon", "osd")}


class ServerError(BenchError):
    """The S3 server did not start; the message says why."""


def is_installed() -> bool:
    return all(shutil.which(program) for program in PROGRAMS)


class Radosgw:
    """A running server with one user. key, secret: its own, made anew each time."""

    def __init__(self, home: Path, keys: tuple[str, str] | None = None) -> None:
        """home: an empty directory. keys: of its user, if they are not to be new. Raises ServerError; then nothing is left running."""
        self.key, self.secret = keys or (secrets.token_hex(10), secrets.token_hex(20))
        self.requests_path = home / "client.rgw.a.log"  # with a line for each request
        self._home = home
        self._monitor_port, self._port = _free_ports(2)
        self.endpoint = f"http://127.0.0.1:{self._port}"
        self._running: list[subprocess.Popen[bytes]] = []
        self._log: IO[bytes] = open(home / "log", "wb")  # noqa: SIM115 closed by stop
        try:
            self._start()
        except (OSError, ServerError) as error:
            self.stop()
            raise ServerError(f"radosgw: {error}; see {home / 'log'}") from error
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Idempotent."""
        for process in reversed(self._running):
            process.kill()
            process.wait()
        self._running.clear()
        self._log.close()

    def _start(self) -> None:
        self._write_settings()
        ring, map_path = str(self._home / "keyring"), str(self._home / "monmap")
        self._do(
            "ceph-authtool", ring, "--create-keyring", "--gen-key", "-n", "mon.", "--cap", "mon", "allow *"
        )
        for name, parts in _RIGHTS.items():
            caps = [word for part in parts for word in ("--cap", part, "allow *")]
            self._do("ceph-authtool", ring, "--gen-key", "-n", name, *caps)
        where = f"[v1:127.0.0.1:{self._monitor_port}]"
        self._do("monmaptool", "--create", "--addv", "a", where, map_path)
        for part in ("mon.a", "osd.0"):
            (self._home / part).mkdir()
        self._do("ceph-mon", "--mkfs", "-i", "a", "--monmap", map_path, "--keyring", ring)
        self._run("ceph-mon", "-i", "a")
        disk = str(uuid.uuid4())
        self._do("ceph", "osd", "create", disk)
        self._do("ceph", "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=here")
        self._do("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", disk)
        self._run("ceph-osd", "-i", "0")
        self._run("radosgw", "-n", "client.rgw.a")
        self._wait_until_it_answers()
        self._do(
            "radosgw-admin", "user", "create", "--uid=demo", "--display-name=demo",
            f"--access-key={self.key}", f"--secret-key={self.secret}",
        )  # fmt: skip

    def _write_settings(self) -> None:
        home = str(self._home)
        settings = configparser.ConfigParser(interpolation=None)
        settings["global"] = {
            "fsid": str(uuid.uuid4()),
            "monmap": f"{home}/monmap",
            "public_addr": "127.0.0.1",
            "ms_bind_ipv4": "true",
            "ms_bind_msgr2": "false",
            "run_dir": home,
            "admin_socket": f"{home}/$name.asok",
            "log_file": f"{home}/$name.log",
            "keyring": f"{home}/keyring",
            # One machine, and nobody else on it: no login between the parts, one copy of everything.
            **dict.fromkeys(
                ("auth_cluster_required", "auth_service_required", "auth_client_required"), "none"
            ),
            "osd_pool_default_size": "1",
            "osd_pool_default_min_size": "1",
            "osd_pool_default_pg_num": "8",
            "mon_allow_pool_size_one": "true",
            "osd_crush_chooseleaf_type": "0",
            "mon_data_avail_crit": "1",  # of the disk that its few MB lie on
        }
        settings["mon.a"] = {"mon_data": f"{home}/mon.a"}
        settings["osd.0"] = {
            "osd_data": f"{home}/osd.0",
            "osd_objectstore": "memstore",
            "memstore_device_bytes": str(STORE_BYTES),
            "osd_class_load_list": "*",
            "osd_class_default_list": "*",
            # It would do so before it has heard the monitor, now and then, be refused, and end.
            "osd_crush_update_on_start": "false",
            "osd_class_update_on_start": "false",
        }
        settings["client.rgw.a"] = {"rgw_frontends": f"beast endpoint=127.0.0.1:{self._port} tcp_nodelay=1"}
        with open(self._home / "ceph.conf", "w", encoding="utf-8") as file:
            settings.write(file)

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "CEPH_CONF": str(self._home / "ceph.conf")}

    def _run(self, *command: str) -> None:
        self._running.append(
            subprocess.Popen([*command, "-f"], stdout=self._log, stderr=self._log, env=self._environment())
        )

    def _do(self, *command: str) -> None:
        try:
            done = subprocess.run(
                command,
                check=False,
                stdout=self._log,
                stderr=self._log,
                env=self._environment(),
                timeout=START_S_MAX,
            )
        except subprocess.TimeoutExpired as error:
            raise ServerError(f"{command[0]} did not end") from error
        if done.returncode:
            raise ServerError(f"{command[0]} ended with exit code {done.returncode}")

    def _wait_until_it_answers(self) -> None:
        give_up_s = time.monotonic() + START_S_MAX
        while time.monotonic() < give_up_s:
            for process in self._running:
                if process.poll() is not None:
                    raise ServerError(f"a part of it ended with exit code {process.returncode}")
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=START_S_MAX)
            try:
                connection.request("GET", "/")
                connection.getresponse()
                return
            except OSError:
                time.sleep(0.2)
            finally:
                connection.close()
        raise ServerError("it did not answer")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
