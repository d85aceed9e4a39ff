"""What the doors beside the daemon have in common: `kvstore web`, `kvstore grpc`.

As a child of the daemon (kvstore/daemon/beside/children.py) one ends with its stdin, which the kernel closes however the daemon
ended; a port that is taken is waited for, with one warning, because a node must not lose its cache for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine

from kvstore.daemon.listening import Listen
from kvstore.daemon.process import Signals
from kvstore.errors import StartError

BIND_TRIES, BIND_PAUSE_S = 10, 0.5  # to bind a port that another process may be about to give back
BIND_RETRY_S = 60.0  # between later tries to bind it
DOOR_NICE = 10  # of a process beside the daemon: the engines' requests come first
DOOR_OOM_SCORE = 500  # of a door and the daemon, the kernel kills the door

log = logging.getLogger("kvstore.beside")

_BACKLOG = 128
_PASSES = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)  # somebody may give it back, or an interface comes up


async def until_ended(living: Coroutine[None, None, None], is_child: bool, signals: Signals) -> None:
    """Live until SIGTERM, SIGINT, or, of a child, the end of its parent."""
    logging.getLogger("kvstore.client").setLevel(logging.WARNING)  # a line for each reconnect
    loop = asyncio.get_running_loop()
    work = loop.create_task(living)
    signals.attach({signal.SIGTERM: work.cancel, **({} if is_child else {signal.SIGINT: work.cancel})})
    if is_child:
        for number in (signal.SIGINT, signal.SIGHUP):  # of a terminal: our parent decides
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
        _step_back()
        loop.add_reader(sys.stdin.fileno(), lambda: os.read(sys.stdin.fileno(), 1) or work.cancel())
    with contextlib.suppress(asyncio.CancelledError):
        await work


def _step_back() -> None:
    """The engines' requests come first, and where memory is short we go first."""
    os.nice(DOOR_NICE)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(DOOR_OOM_SCORE))


async def bound(
    door: str, listen: Listen, is_patient: bool, say: Callable[[str], None] = lambda line: None
) -> socket.socket:
    """A socket that listens. door: "web". say: called with a line for the daemon that waits for it, too. Raises StartError."""
    tries = 0
    while True:
        try:
            return bind(listen)
        except OSError as error:
            problem = f"{door}: cannot listen on {listen}: {(error.strerror or str(error)).lower()}"
            if not is_patient:
                raise StartError(f"{problem}; choose another one with --listen") from error
            if error.errno not in _PASSES and tries == 0:
                tries = BIND_TRIES
        tries += 1
        if tries == BIND_TRIES + 1:
            text = f"{problem}: nobody is served there until it is free; {door}.listen chooses another one"
            log.warning("%s", text)
            say(f"problem {text}")
        await asyncio.sleep(BIND_PAUSE_S if tries <= BIND_TRIES else BIND_RETRY_S)


def bind(listen: Listen) -> socket.socket:
    """Raises OSError."""
    host = "127.0.0.1" if listen.host == "localhost" else listen.host
    door = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if ":" in host:
            door.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        door.bind((host, listen.port))
        door.listen(_BACKLOG)
    except BaseException:
        door.close()
        raise
    return door
