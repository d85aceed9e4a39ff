"""CacheService: the KV cache of the node."""

from __future__ import annotations

from kvstore.protocol import frames
from kvstore.tools.rpc.calls import Call, json_of
from kvstore.tools.rpc.node import Node
from kvstore.v1 import cache_pb2


class Cache:
    """See proto/kvstore/v1/cache.proto."""

    def __init__(self, node: Node, streams_max: int) -> None:
        self._node = node
        self._streams_max = streams_max

    async def list_rules(
        self, call: Call, request: cache_pb2.ListRulesRequest
    ) -> cache_pb2.ListRulesResponse:
        report = await self._node.report(frames.Retention(), call.until)
        return cache_pb2.ListRulesResponse(document_json=json_of(report))
