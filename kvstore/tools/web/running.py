"""The life of `kvstore web`: bind, serve, end.

As a child of the daemon (kvstore/daemon/beside/webbing.py) it ends with its stdin, which the kernel closes however the daemon
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
from collections.abc import Callable
from functools import partial
from pathlib import Path

from aiohttp import web

from kvstore.daemon.listening import Listen
from kvstore.daemon.process import Signals
from kvstore.errors import StartError
from kvstore.tools.web.asking import Asking
from kvstore.tools.web.server import Web
from kvstore.tools.web.strangers import Names

WEB_CONNECTIONS_MAX = 256  # open at once; beyond it the oldest one is closed
WEB_BIND_TRIES, WEB_BIND_PAUSE_S = 10, 0.5  # to bind a port that another process may be about to give back
WEB_BIND_RETRY_S = 60.0  # between later tries to bind it
WEB_NICE = 10  # of the process beside the daemon: the engines' requests come first
WEB_OOM_SCORE = 500  # of the page and the daemon, the kernel kills the page

log = logging.getLogger("kvstore.web")

_BACKLOG = 128
_PASSES = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)  # somebody may give it back, or an interface comes up
_CLOSE_S = 1.0  # for requests under way, at the end


async def serve(
    listen: Listen,
    names_for: Names,
    socket_path: Path,
    is_child: bool,
    ready: Callable[[str], None],
    signals: Signals,
) -> None:
    """Until SIGTERM, SIGINT, or, of a child, the end of its parent. ready: called with a line.

    Raises StartError where it cannot listen and is no child.
    """
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # a line for each peer that speaks no HTTP
    logging.getLogger("kvstore.client").setLevel(logging.WARNING)  # a line for each reconnect
    loop = asyncio.get_running_loop()
    work = loop.create_task(_live(listen, names_for, socket_path, is_child, ready))
    signals.attach({signal.SIGTERM: work.cancel, **({} if is_child else {signal.SIGINT: work.cancel})})
    if is_child:
        for number in (signal.SIGINT, signal.SIGHUP):  # of a terminal: our parent decides
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
        _step_back()
        loop.add_reader(sys.stdin.fileno(), lambda: os.read(sys.stdin.fileno(), 1) or work.cancel())
    try:
        await work
    except asyncio.CancelledError:
        return


def _step_back() -> None:
    """The engines' requests come first, and where memory is short we go first."""
    os.nice(WEB_NICE)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(WEB_OOM_SCORE))


async def _live(
    listen: Listen, names_for: Names, socket_path: Path, is_child: bool, ready: Callable[[str], None]
) -> None:
    if names_for == "all" and not listen.is_loopback:
        log.warning(
            "%s: whoever reaches it can read the names of models and tenants, and how much they use", listen
        )
    door = await _bound(listen, is_child)
    asking = Asking(socket_path)
    runner = web.AppRunner(Web(asking, listen, names_for).app(), access_log=None, shutdown_timeout=_CLOSE_S)
    try:
        await runner.setup()
        assert runner.server is not None, "setup makes it"
        accept = partial(_accepted, runner.server)
        server = await asyncio.get_running_loop().create_server(accept, sock=door, backlog=_BACKLOG)
        where = Listen(listen.host, door.getsockname()[1])
        log.info("serving metrics and the live page at http://%s/", where)
        ready(f"ready url=http://{where}/ socket={socket_path}")
        try:
            await asyncio.Event().wait()
        finally:
            server.close()
    finally:
        await runner.cleanup()
        door.close()
        asking.close()


def _accepted(server: web.Server) -> asyncio.Protocol:
    """For a new peer. One too many takes the place of the oldest: who only opens connections shuts nobody out."""
    for oldest in server.connections[: max(0, 1 + len(server.connections) - WEB_CONNECTIONS_MAX)]:
        oldest.force_close()
    return server()


async def _bound(listen: Listen, is_patient: bool) -> socket.socket:
    """Raises StartError."""
    tries = 0
    while True:
        try:
            return _bind(listen)
        except OSError as error:
            problem = f"web: cannot listen on {listen}: {(error.strerror or str(error)).lower()}"
            if not is_patient:
                raise StartError(f"{problem}; choose another one with --listen") from error
            if error.errno not in _PASSES and tries == 0:
                tries = WEB_BIND_TRIES
        tries += 1
        if tries == WEB_BIND_TRIES + 1:
            log.warning(
                "%s: no metrics and no page until it is free; web.listen chooses another one", problem
            )
        await asyncio.sleep(WEB_BIND_PAUSE_S if tries <= WEB_BIND_TRIES else WEB_BIND_RETRY_S)


def _bind(listen: Listen) -> socket.socket:
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
