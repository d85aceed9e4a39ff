"""Telling systemd how we are (the sd_notify protocol): one datagram, no library.

    READY=1 when serving, STOPPING=1 when leaving, WATCHDOG=1 from the event loop

The watchdog ping comes from the loop that serves engines: a loop that hangs stops pinging
and systemd restarts the daemon. Without $NOTIFY_SOCKET all of this does nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Mapping


class Notifier:
    """Sends states to the service manager named by the environment, if there is one."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        watchdog = re.fullmatch(r"[0-9]{1,18}", environment.get("WATCHDOG_USEC", ""))
        self.watchdog_s = int(watchdog[0]) / 1e6 if watchdog else None

    def send(self, state: str) -> None:
        """Send lines such as "READY=1"; a manager that does not listen is no failure of ours."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as door:
            door.setblocking(False)
            door.sendto(state.encode(), address)
