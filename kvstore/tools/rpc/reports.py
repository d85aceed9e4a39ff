"""ReportService: what the cache gave back, made of the daemon's answers as `kvstore report` and `kvstore top` make it."""

from __future__ import annotations

import asyncio
import time

from google.protobuf.timestamp_pb2 import Timestamp

from kvstore.constants import STATUS_TIMEOUT_S
from kvstore.errors import BadRequest
from kvstore.ledger import report
from kvstore.protocol import answers, frames
from kvstore.tools.rpc.calls import Call, json_of
from kvstore.tools.rpc.node import Node
from kvstore.tools.web.figures import MINUTES_BACK_S, figures, is_same_life, tenant_figures
from kvstore.v1 import reports_pb2 as pb

INTERVAL_S_MIN, INTERVAL_S_MAX = 1.0, 60.0


class Reports:
    """See proto/kvstore/v1/reports.proto."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def get_report(self, call: Call, request: pb.GetReportRequest) -> pb.GetReportResponse:
        now, tenant, minutes = Timestamp(), call.principal.tenant, None
        now.GetCurrentTime()
        since_s = 0.0
        if request.HasField("since"):
            since_s = max(0.0, now.seconds - request.since.seconds - request.since.nanos / 1e9)
        answer = await self._node.pages("rows", lambda skip: frames.Report(since_s, skip), call.until)
        if tenant is not None:
            answer = report.of_tenant(answer, tenant)
        elif request.by_minute:
            minutes = (await self._live(call.until, since_s))["minutes"]
        return pb.GetReportResponse(document_json=json_of(report.document(answer, minutes=minutes)))

    async def watch_figures(self, call: Call, request: pb.WatchFiguresRequest) -> None:
        interval_s, tenant = 1.0, call.principal.tenant
        if request.HasField("interval"):
            interval_s = request.interval.seconds + request.interval.nanos / 1e9
        if not INTERVAL_S_MIN <= interval_s <= INTERVAL_S_MAX:
            raise BadRequest(f"interval: {interval_s:g} s: allowed are 1 s to 60 s")
        old = await self._live(_soon(), frames.NO_MINUTES)
        while True:
            await asyncio.sleep(interval_s)
            new = await self._live(_soon(), max(0.0, old["now_s"] - MINUTES_BACK_S))
            if is_same_life(old, new):
                document = figures(old, new) if tenant is None else tenant_figures(old, new, tenant)
                await call.write(pb.WatchFiguresResponse(document_json=json_of(document)))
            old = new

    async def _live(self, until: float, minutes_since_s: float) -> answers.Live:
        found: answers.Live = await self._node.report(frames.Live(minutes_since_s), until)
        return found


def _soon() -> float:
    """Of one question: the call has no end."""
    return time.monotonic() + STATUS_TIMEOUT_S
