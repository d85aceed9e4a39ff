"""ModelService: model weights in the region's bucket and on this node's disk, by our own commands; in DRAM, by the daemon."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from kvstore.constants import DAY_S
from kvstore.errors import BadRequest, Failed, NotFound
from kvstore.protocol import frames
from kvstore.tools.rpc.calls import Call
from kvstore.tools.rpc.commands import Commands, Words, days, given, model_name, span, word
from kvstore.tools.rpc.node import Node
from kvstore.tools.rpc.operations import Operations
from kvstore.v1 import models_pb2 as pb

GRACE_S_MAX = 365 * DAY_S
SERVICE: Final = pb.DESCRIPTOR.services_by_name["ModelService"]


def _list(request: pb.ListModelsRequest) -> list[str]:
    if request.local and request.model:
        raise BadRequest("model: not together with local")
    return ["model", "ls", *given("--local", request.local), *_some(request.model)]


def _remove(request: pb.RemoveModelRequest) -> list[str]:
    name = model_name(request.model)
    if ("@" in name) == request.all_revisions:
        raise BadRequest("model: allowed are NAME@REVISION, and NAME with all_revisions")
    return ["model", "rm", name, *given("--all", request.all_revisions), *days(request.days)]


def _collect(request: pb.CollectModelsRequest) -> list[str]:
    grace = span(request, "grace", 0.0, GRACE_S_MAX)
    return ["model", "gc", *given("--dry-run", request.dry_run), *given("--grace", grace)]


def _some(name: str) -> list[str]:
    return [model_name(name)] if name else []


WORDS: Final[Mapping[str, Words]] = {
    "ListModels": _list,
    "GetModel": lambda r: ["model", "show", model_name(r.model)],
    "RemoveModel": _remove,
    "CollectModels": _collect,
    "VerifyModel": lambda r: ["model", "verify", *given("--deep", r.deep), *_some(r.model)],
    "PreloadModel": lambda r: ["model", "preload", model_name(r.model), *given("--verify", r.verify)],
    "LoadModel": lambda r: ["model", "load", model_name(r.model)],
    "PinModel": lambda r: ["model", "pin", model_name(r.model)],
    "UnpinModel": lambda r: ["model", "unpin", model_name(r.model)],
    "EvictModel": lambda r: ["model", "evict", model_name(r.model)],
}


class Models(Commands):
    """See proto/kvstore/v1/models.proto."""

    def __init__(self, node: Node, operations: Operations) -> None:
        super().__init__(SERVICE, operations, WORDS)
        self._node = node

    async def publish_model(self, call: Call, request: pb.PublishModelRequest) -> object:
        model_name(request.name + (f"@{request.revision}" if request.revision else ""))
        settings = await self.operations.settings(call.until)
        directory, below = publishable(word("directory", request.directory), settings["grpc.publish_from"])
        words = [
            *("model", "publish", directory, f"--below={below}"),
            *given("--name", request.name),
            *given("--revision", request.revision),
            *given("--by", str(call.principal)[:200]),
            *given("--again", request.again),
        ]
        return await self.answer(SERVICE.methods_by_name["PublishModel"], call, request, words)

    async def unload_model(self, call: Call, request: pb.UnloadModelRequest) -> pb.UnloadModelResponse:
        model, _, revision = model_name(request.model).partition("@")
        if not revision:
            found = (await self._node.report(frames.ListModels(), call.until))["models"]
            there = [one["revision"] for one in found if one["name"] == model]
            if not there:
                raise NotFound(f"model {model}: not in DRAM")
            if len(there) > 1:
                raise BadRequest(f"model {model}: which revision? In DRAM are {', '.join(there)}")
            (revision,) = there
        await self._node.ask(frames.DropModel(f"{model}@{revision}"), call.until, frames.Done)
        return pb.UnloadModelResponse()


def publishable(directory: str, allowed: list[str]) -> tuple[str, str]:
    """The directory as the kernel knows it, and the one of those allowed that it lies below: who may publish may not read this
    node's other files. The command looks again: it may be a link by then. Raises Failed, BadRequest."""
    if not allowed:
        raise Failed("grpc.publish_from is not set: nothing of this node is published through this door")
    place = os.path.realpath(directory)
    for below in map(os.path.realpath, allowed if os.path.isabs(directory) else ()):
        if os.path.commonpath([below, place]) == below:
            return place, below
    raise BadRequest("directory: allowed are absolute paths below grpc.publish_from")
