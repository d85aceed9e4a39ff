"""The life of `kvstore web`: bind, serve, end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from aiohttp import web

from kvstore.daemon.listening import Listen
from kvstore.daemon.process import Signals
from kvstore.security.identity import Gate
from kvstore.tools.beside import bound, until_ended
from kvstore.tools.web.asking import Asking
from kvstore.tools.web.server import Web
from kvstore.tools.web.strangers import Names

WEB_CONNECTIONS_MAX = 256  # open at once; beyond it the oldest one is closed

log = logging.getLogger("kvstore.web")

_BACKLOG = 128
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
    await until_ended(_live(listen, names_for, socket_path, is_child, ready), is_child, signals)


async def _live(
    listen: Listen, names_for: Names, socket_path: Path, is_child: bool, ready: Callable[[str], None]
) -> None:
    if names_for == "all" and not listen.is_loopback:
        log.warning(
            "%s: whoever reaches it can read the names of models and tenants, and how much they use", listen
        )
    door = await bound("web", listen, is_child)
    asking = Asking(socket_path)
    runner = web.AppRunner(
        Web(asking, listen, names_for, Gate(None)).app(), access_log=None, shutdown_timeout=_CLOSE_S
    )
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
