"""NodeService: the node itself, who asks, and the operations."""

from __future__ import annotations

from typing import Any

from kvstore.errors import BadRequest
from kvstore.protocol import frames
from kvstore.tools.rpc.calls import Call, json_of
from kvstore.tools.rpc.node import Node
from kvstore.tools.rpc.operations import Operations
from kvstore.v1 import nodes_pb2 as pb

KEY_CHARS_MAX = frames.SETTING_CHARS_MAX // 8


class Nodes:
    """See proto/kvstore/v1/nodes.proto."""

    def __init__(self, node: Node, operations: Operations) -> None:
        self._node = node
        self._operations = operations

    async def get_node(self, call: Call, request: pb.GetNodeRequest) -> pb.GetNodeResponse:
        document: Any = await self._node.report(frames.Status(), call.until)
        daemon, region = document["daemon"], document["region"]
        tenant = call.principal.tenant
        if tenant is not None:
            told = await self._node.pages("namespaces", frames.Namespaces, call.until)
            own = [one for one in told["namespaces"] if one["fields"].get("tenant", "") == tenant]
            document = {"namespaces": own}
        return pb.GetNodeResponse(
            instance=daemon["instance"],
            version=daemon["version"],
            region=region["name"] if region is not None else "",
            document_json=json_of(document),
        )

    async def get_principal(self, call: Call, request: pb.GetPrincipalRequest) -> pb.GetPrincipalResponse:
        who = call.principal
        return pb.GetPrincipalResponse(name=str(who), may=sorted(who.may), tenant=who.tenant)

    # -- settings and the check --

    async def list_settings(self, call: Call, request: pb.ListSettingsRequest) -> pb.ListSettingsResponse:
        _require_short("name", request.name, KEY_CHARS_MAX)
        report = await self._node.report(frames.GetSettings(request.name), call.until)
        return pb.ListSettingsResponse(document_json=json_of(report))

    async def change_setting(self, call: Call, request: pb.ChangeSettingRequest) -> pb.ChangeSettingResponse:
        _require_short("key", request.key, KEY_CHARS_MAX)
        _require_short("value", request.value, frames.SETTING_CHARS_MAX)
        report = await self._node.report(frames.SetSetting(request.key, request.value), call.until)
        return pb.ChangeSettingResponse(document_json=json_of(report))

    async def check_node(self, call: Call, request: pb.CheckNodeRequest) -> pb.CheckNodeResponse:
        found = await self._node.ask(frames.Check(), call.until, frames.Problems, slow=True)
        return pb.CheckNodeResponse(problems=found.lines)

    # -- operations --

    async def list_operations(
        self, call: Call, request: pb.ListOperationsRequest
    ) -> pb.ListOperationsResponse:
        return pb.ListOperationsResponse(operations=self._operations.newest(call))

    async def get_operation(self, call: Call, request: pb.GetOperationRequest) -> pb.GetOperationResponse:
        return pb.GetOperationResponse(operation=self._operations.get(call, request.id).told)

    async def watch_operation(self, call: Call, request: pb.WatchOperationRequest) -> None:
        async for state in self._operations.get(call, request.id).states():
            await call.write(pb.WatchOperationResponse(operation=state))

    async def cancel_operation(
        self, call: Call, request: pb.CancelOperationRequest
    ) -> pb.CancelOperationResponse:
        return pb.CancelOperationResponse(operation=self._operations.cancel(call, request.id))


def _require_short(name: str, text: str, most: int) -> None:
    if len(text) > most:
        raise BadRequest(f"{name}: {len(text)} characters: at most {most} are allowed")
