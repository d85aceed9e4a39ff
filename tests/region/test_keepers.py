"""Real daemons of one region: the one that keeps it is stopped, or killed with -9, and another one does within a minute.

Takes two minutes, so `make soak` runs it (KEEPERS=1).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.client import Client
from tests.region.regions import arguments, init, regions_file, status, until
from tests.running import Daemon, Place

Serve = Callable[..., Daemon]
pytestmark = pytest.mark.skipif("KEEPERS" not in os.environ, reason="takes two minutes: make soak")


def keeps(daemon: Daemon) -> bool:
    with Client(str(daemon.socket), timeout_s=5.0) as client:
        return bool(status(client).get("keeps"))


def test_a_daemon_that_is_stopped_or_killed_is_followed_by_another(tmp_path: Path, serve: Serve) -> None:
    """SIGSTOP: another one keeps within a minute, and the first one, when it goes on, leaves the region to it. SIGKILL: the one that
    is left keeps within a minute."""
    file = regions_file(tmp_path, "na")
    init(file, "na")
    daemons = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        place = Place(tmp_path / name)
        daemons.append(serve(place, *arguments(place, file, "na")))
        until(lambda: any(map(keeps, daemons)))
    first, second = daemons if keeps(daemons[0]) else daemons[::-1]
    os.kill(first.process.pid, signal.SIGSTOP)
    began_s = time.monotonic()
    until(lambda: keeps(second), 60.0)
    print(f"after SIGSTOP kept again in {time.monotonic() - began_s:.1f} s")
    os.kill(first.process.pid, signal.SIGCONT)
    end_s = time.monotonic() + 20.0
    while time.monotonic() < end_s:
        assert not keeps(first), "two keep"
        assert keeps(second)
        time.sleep(0.2)
    second.process.kill()
    began_s = time.monotonic()
    until(lambda: keeps(first), 60.0)
    print(f"after SIGKILL kept again in {time.monotonic() - began_s:.1f} s")
