"""A daemon with its web process, asked over HTTP as a scraper, a probe or a browser would."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.running import TIMEOUT_S, Daemon, Place, environment

Serve = Callable[..., Daemon]
_URL = re.compile(r"the live page at (http://\S+?/)")


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)


def get(url: str, path: str, method: str = "GET", **headers: str) -> Reply:
    """One request on a connection of its own."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    try:
        connection.request(
            method, path, headers={name.replace("_", "-"): text for name, text in headers.items()}
        )
        response = connection.getresponse()
        return Reply(response.status, {n.lower(): v for n, v in response.getheaders()}, response.read())
    finally:
        connection.close()


def until(true: Callable[[], Any], what: str, within_s: float = 30.0) -> Any:
    """Wait for something that takes a while; what it was."""
    give_up_s = time.monotonic() + within_s
    while True:
        found = true()
        if found:
            return found
        assert time.monotonic() < give_up_s, f"it did not happen: {what}"
        time.sleep(0.02)


def url_of(daemon: Daemon) -> str:
    """Where its web process listens, as the log tells."""
    found = until(lambda: _URL.search(daemon.log()), "the web process listens")
    return str(found[1])


def with_web(place: Place, *more: str, listen: str = "127.0.0.1:0") -> list[str]:
    """Arguments of `serve`."""
    return [*place.arguments, f"--set=web.listen={listen}", *more]


def child_of(daemon: Daemon) -> int:
    """The process number of its web process."""
    path = Path(f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children")

    def found() -> list[int]:
        return [pid for pid in map(int, path.read_text().split()) if is_alive(pid)]

    (pid,) = until(found, "there is a web process")
    return int(pid)


def is_alive(pid: int) -> bool:
    """And no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Watching:
    """`kvstore web` as a process of its own, beside a daemon that has none or is not there. Context manager."""

    def __init__(self, socket: Path, *arguments: str, listen: str = "127.0.0.1:0") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvstore", "web", f"--socket={socket}", f"--listen={listen}", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        words = dict(word.split("=", 1) for word in line.split()[1:])
        assert line.startswith("ready ") and words["socket"] == str(socket), line
        self.url = words["url"]

    def __enter__(self) -> Watching:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.errors = self.process.communicate(timeout=TIMEOUT_S)[1]
