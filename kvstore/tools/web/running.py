"""The life of `kvstore web`: bind, serve, end."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from kvstore.daemon.listening import Listen
from kvstore.daemon.process import Signals
from kvstore.security.identity import Gate
from kvstore.security.tls import Tls
from kvstore.tools.beside import bound, until_ended
from kvstore.tools.web.asking import Asking
from kvstore.tools.web.nodes import Nodes
from kvstore.tools.web.server import Web
from kvstore.tools.web.strangers import Askers, Names

WEB_CONNECTIONS_MAX = 256  # open at once; beyond it the oldest one is closed
WEB_ENTERING_MAX = 64  # of those that have not shown their certificate yet

log = logging.getLogger("kvstore.web")

_HANDSHAKE_S = 5.0
_CLOSE_S = 1.0  # for requests under way, at the end


async def serve(
    listen: Listen,
    names_for: Names,
    socket_path: Path,
    security: tuple[Tls | None, Gate],
    nodes: Nodes,
    is_child: bool,
    ready: Callable[[str], None],
    signals: Signals,
) -> None:
    """Until SIGTERM, SIGINT, or, of a child, the end of its parent. ready: called with a line.

    Raises StartError where it cannot listen and is no child.
    """
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # a line for each peer that speaks no HTTP
    await until_ended(
        _live(listen, names_for, socket_path, security, nodes, is_child, ready), is_child, signals
    )


async def _live(
    listen: Listen,
    names_for: Names,
    socket_path: Path,
    security: tuple[Tls | None, Gate],
    nodes: Nodes,
    is_child: bool,
    ready: Callable[[str], None],
) -> None:
    tls, gate = security
    if names_for == "all" and tls is None and not listen.is_loopback:
        log.warning(
            "%s: whoever reaches it can read the names of models and tenants, and how much they use", listen
        )
    door = await bound("web", listen, is_child, ready)
    asking = Asking(socket_path)
    served = Web(asking, listen, Askers(names_for, gate), tls, nodes)
    runner = web.AppRunner(served.app(), access_log=None, shutdown_timeout=_CLOSE_S)
    try:
        await runner.setup()
        assert runner.server is not None, "setup makes it"
        url = f"{'https' if tls else 'http'}://{Listen(listen.host, door.getsockname()[1])}/"
        log.info("serving metrics and the live page at %s", url)
        ready(f"ready url={url} socket={socket_path}")
        await _accept(door, runner.server, tls.page_context() if tls is not None else None)
    finally:
        await runner.cleanup()
        door.close()
        asking.close()
        nodes.close()


async def _accept(door: socket.socket, server: web.Server, context: ssl.SSLContext | None) -> None:
    """Of too many peers the oldest one goes: who only opens connections shuts nobody out. One that has shown no certificate
    takes no place of one that has."""
    loop = asyncio.get_running_loop()
    entering: dict[asyncio.Task[None], None] = {}  # the oldest first
    door.setblocking(False)
    try:
        while True:
            try:
                peer, _ = await loop.sock_accept(door)
            except OSError as error:  # no descriptor is left
                log.warning("no connection is accepted for a second: %s", error)
                await asyncio.sleep(1)
                continue
            for oldest in list(entering)[: max(0, 1 + len(entering) - WEB_ENTERING_MAX)]:
                oldest.cancel()
            task = loop.create_task(_enter(peer, server, context))
            entering[task] = None
            task.add_done_callback(entering.pop)
    finally:
        for task in entering:
            task.cancel()


async def _enter(peer: socket.socket, server: web.Server, context: ssl.SSLContext | None) -> None:
    limit_s = _HANDSHAKE_S if context is not None else None
    try:
        await asyncio.get_running_loop().connect_accepted_socket(
            server, peer, ssl=context, ssl_handshake_timeout=limit_s
        )
    except OSError:  # and whatever TLS says
        return
    for oldest in server.connections[: max(0, len(server.connections) - WEB_CONNECTIONS_MAX)]:
        oldest.force_close()
