"""What `kvstore mirror --metrics` serves: the figures of a mirror for Prometheus, and its health.

    GET /metrics    names.py has every metric
    GET /healthz    200 while it answers, with the first problem; 503 where a part of it failed, which a restart may mend; ?o=json

Only on this machine: an agent of Prometheus on it asks, or a reverse proxy that knows who may.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Final

from aiohttp import hdrs, web
from prometheus_client.core import InfoMetricFamily, Metric

from kvstore import __version__
from kvstore.daemon.beside.mirroring import Figures
from kvstore.daemon.listening import Listen
from kvstore.tools.web.collector import encoded, family, of_problems
from kvstore.tools.web.names import METRICS
from kvstore.tools.web.server import HEADERS, names_of, refusal, told

_OWN: Final = ("task", "bug")  # kinds of problems that are the process's own
_OF_STATE: Final = (
    ("kvstore_mirror_oldest_age_seconds", "oldest_age_s"),
    ("kvstore_mirror_lag_p99_seconds", "lag_p99_s"),
    ("kvstore_mirror_pending", "pending"),
    ("kvstore_mirror_failed", "failed"),
    ("kvstore_mirror_lost_total", "lost"),
    ("kvstore_mirror_copied_packs_total", "copied_packs"),
    ("kvstore_mirror_copied_bytes_total", "copied_bytes"),
    ("kvstore_mirror_copied_models_total", "copied_models"),
    ("kvstore_mirror_copied_model_bytes_total", "copied_model_bytes"),
)


def families(figures: Figures) -> Iterator[Metric]:
    """Each metric of a mirror that it has something of."""
    about = {"version": __version__, "region": figures.region}
    yield InfoMetricFamily("kvstore_mirror", METRICS["kvstore_mirror_info"].meaning, value=about)
    yield family("kvstore_mirror_uptime_seconds", [((), figures.uptime_s)])
    yield from of_problems(figures.problems, figures.now_s)
    for name, field in _OF_STATE:
        found = [((state.source,), getattr(state, field)) for state in figures.states]
        yield family(name, [(labels, float(value)) for labels, value in found if value is not None])
    left = zip(figures.states, figures.left_bytes, strict=True)
    yield family("kvstore_mirror_backlog_bytes", [((state.source,), float(size)) for state, size in left])


async def serve_mirror(listen: Listen, door: socket.socket, figures: Callable[[], Figures]) -> None:
    """Until it is cancelled. door: listens there."""
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # a line for each peer that speaks no HTTP
    names = names_of(listen)

    async def answer(request: web.Request) -> web.Response:
        response = _answered(request, names, figures)
        response.headers.update(HEADERS)
        return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.SockSite(runner, door).start()
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def _answered(
    request: web.Request, names: frozenset[object] | None, figures: Callable[[], Figures]
) -> web.Response:
    if (refused := refusal(request, names)) is not None:
        return refused
    if request.path == "/metrics":
        body, content_type = encoded(lambda: families(figures()), request.headers.get(hdrs.ACCEPT, ""))
        return web.Response(body=body, headers={hdrs.CONTENT_TYPE: content_type})
    if request.path == "/healthz":
        problems = figures().problems
        return told(request, not any(one["kind"] in _OWN for one in problems), problems, _OWN)
    return web.Response(status=404, text="not here: there are /metrics and /healthz\n")
