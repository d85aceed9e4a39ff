"""ModelService: model weights in the region's bucket, on this node's disk, in its DRAM.

What has to do with the bucket or the disk is done by our own commands (`operations.py`); DRAM is the daemon's.
"""

from __future__ import annotations

import os

from kvstore.constants import DAY_S
from kvstore.errors import BadRequest, Failed, NotFound
from kvstore.protocol import frames
from kvstore.tools.rpc.calls import Call
from kvstore.tools.rpc.node import Node
from kvstore.tools.rpc.operations import JSON, Operations, require_all, span, word
from kvstore.units import printable
from kvstore.v1 import models_pb2 as pb
from replication.formats.manifests import is_model_name

DAYS_MAX = 3650
GRACE_S_MAX = 365 * DAY_S


class Models:
    """See proto/kvstore/v1/models.proto."""

    def __init__(self, node: Node, operations: Operations) -> None:
        self._node = node
        self._operations = operations

    # -- the bucket --

    async def list_models(self, call: Call, request: pb.ListModelsRequest) -> pb.ListModelsResponse:
        require_all(call)
        if request.local and request.model:
            raise BadRequest("model: not together with local")
        words = ["--local"] if request.local else [model_name(request.model)] if request.model else []
        document = await self._operations.ask(call, "model", "ls", *words, JSON, is_local=request.local)
        return pb.ListModelsResponse(document_json=document)

    async def get_model(self, call: Call, request: pb.GetModelRequest) -> pb.GetModelResponse:
        require_all(call)
        document = await self._operations.ask(call, "model", "show", model_name(request.model), JSON)
        return pb.GetModelResponse(document_json=document)

    async def publish_model(self, call: Call, request: pb.PublishModelRequest) -> pb.PublishModelResponse:
        name = request.name + (f"@{request.revision}" if request.revision else "")
        model_name(name)
        settings = await self._operations.settings(call.until)
        directory = publishable(word("directory", request.directory), settings["grpc.publish_from"])
        words = [directory, f"--name={request.name}", f"--by={str(call.principal)[:200]}"]
        words += [f"--revision={request.revision}"] if request.revision else []
        words += ["--again"] if request.again else []
        begun = await self._operations.begin(call, name, "model", "publish", *words, JSON)
        return pb.PublishModelResponse(operation=begun)

    async def remove_model(self, call: Call, request: pb.RemoveModelRequest) -> pb.RemoveModelResponse:
        name = model_name(request.model)
        if ("@" in name) == request.all_revisions:
            raise BadRequest("model: allowed are NAME@REVISION, and NAME with all_revisions")
        words = [name, *(["--all"] if request.all_revisions else []), *days(request.days)]
        begun = await self._operations.begin(call, name, "model", "rm", *words, JSON)
        return pb.RemoveModelResponse(operation=begun)

    async def collect_models(self, call: Call, request: pb.CollectModelsRequest) -> pb.CollectModelsResponse:
        words = ["--dry-run"] if request.dry_run else []
        if request.HasField("grace"):
            words.append(f"--grace={span('grace', request.grace, 0.0, GRACE_S_MAX)}")
        begun = await self._operations.begin(call, "", "model", "gc", *words, JSON)
        return pb.CollectModelsResponse(operation=begun)

    async def verify_model(self, call: Call, request: pb.VerifyModelRequest) -> pb.VerifyModelResponse:
        words = [model_name(request.model)] if request.model else []
        words += ["--deep"] if request.deep else []
        begun = await self._operations.begin(call, request.model, "model", "verify", *words, JSON)
        return pb.VerifyModelResponse(operation=begun)

    # -- this node's disk --

    async def preload_model(self, call: Call, request: pb.PreloadModelRequest) -> pb.PreloadModelResponse:
        name = model_name(request.model)
        words = ["--verify"] if request.verify else []
        begun = await self._operations.begin(call, name, "model", "preload", name, *words, JSON)
        return pb.PreloadModelResponse(operation=begun)

    async def pin_model(self, call: Call, request: pb.PinModelRequest) -> pb.PinModelResponse:
        await self._on_disk(call, "pin", request.model)
        return pb.PinModelResponse()

    async def unpin_model(self, call: Call, request: pb.UnpinModelRequest) -> pb.UnpinModelResponse:
        await self._on_disk(call, "unpin", request.model)
        return pb.UnpinModelResponse()

    async def evict_model(self, call: Call, request: pb.EvictModelRequest) -> pb.EvictModelResponse:
        await self._on_disk(call, "evict", request.model)
        return pb.EvictModelResponse()

    async def _on_disk(self, call: Call, verb: str, name: str) -> None:
        await self._operations.ask(call, "model", verb, model_name(name), is_local=True)

    # -- this node's DRAM --

    async def load_model(self, call: Call, request: pb.LoadModelRequest) -> pb.LoadModelResponse:
        name = model_name(request.model)
        begun = await self._operations.begin(call, name, "model", "load", name, JSON, is_local=True)
        return pb.LoadModelResponse(operation=begun)

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


def model_name(text: str) -> str:
    """NAME or NAME@REVISION. Raises BadRequest."""
    model, at, revision = word("model", text).partition("@")
    if not is_model_name(model) or (at and not is_model_name(revision)):
        allowed = "NAME and NAME@REVISION, each of up to 96 of a-z 0-9 . _ -"
        raise BadRequest(f"model: {printable(text[:100])}: allowed are {allowed}")
    return text


def publishable(directory: str, allowed: list[str]) -> str:
    """The directory as the kernel knows it, where it lies below one of those from which models may be published: who may
    publish may not read this node's files. Raises Failed, BadRequest."""
    if not allowed:
        raise Failed("grpc.publish_from is not set: nothing of this node is published through this door")
    place = os.path.realpath(directory)
    for one in map(os.path.realpath, allowed):
        if os.path.isabs(directory) and os.path.commonpath([one, place]) == one:
            return place
    raise BadRequest("directory: allowed are absolute paths below grpc.publish_from")


def days(number: int) -> list[str]:
    """--days, where it is given. Raises BadRequest."""
    if number > DAYS_MAX:
        raise BadRequest(f"days: {number}: allowed are 1 to {DAYS_MAX}")
    return [f"--days={number}"] if number else []
