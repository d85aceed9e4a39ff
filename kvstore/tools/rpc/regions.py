"""RegionService: the regions of the deployment, by our own commands (`operations.py`), which talk to their buckets."""

from __future__ import annotations

import re

from kvstore.constants import DAY_S
from kvstore.errors import BadRequest
from kvstore.tools.rpc.calls import Call
from kvstore.tools.rpc.models import days, model_name
from kvstore.tools.rpc.operations import JSON, Operations, require_all, span, word
from kvstore.v1 import regions_pb2 as pb
from kvstore.v1.types_pb2 import Tier

LIFE_S_MIN, LIFE_S_MAX = 60.0, 30 * DAY_S
TIERS = {Tier.TIER_UNSPECIFIED: "", Tier.TIER_DRAM: "dram", Tier.TIER_NVME: "nvme"}


class Regions:
    """See proto/kvstore/v1/regions.proto."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    async def list_regions(self, call: Call, request: pb.ListRegionsRequest) -> pb.ListRegionsResponse:
        require_all(call)
        return pb.ListRegionsResponse(document_json=await self._operations.ask(call, "region", "ls", JSON))

    async def get_regions(self, call: Call, request: pb.GetRegionsRequest) -> pb.GetRegionsResponse:
        require_all(call)
        words = ["lag" if request.live else "status"]
        words += [word("region", request.region)] if request.region else []
        document = await self._operations.ask(call, "region", *words, JSON)
        return pb.GetRegionsResponse(document_json=document)

    async def plan_warming(self, call: Call, request: pb.PlanWarmingRequest) -> pb.PlanWarmingResponse:
        document = await self._operations.ask(call, *warming(request.warming), "--dry-run", JSON)
        return pb.PlanWarmingResponse(document_json=document)

    async def warm_region(self, call: Call, request: pb.WarmRegionRequest) -> pb.WarmRegionResponse:
        words = warming(request.warming)
        if request.HasField("wait"):
            words.append(f"--wait={span('wait', request.wait, 0.0, DAY_S)}")
        begun = await self._operations.begin(call, request.warming.region, *words, JSON)
        return pb.WarmRegionResponse(operation=begun)

    async def cancel_warming(self, call: Call, request: pb.CancelWarmingRequest) -> pb.CancelWarmingResponse:
        document = await self._operations.ask(call, *warming(request.warming), "--cancel", JSON)
        return pb.CancelWarmingResponse(document_json=document)

    async def verify_region(self, call: Call, request: pb.VerifyRegionRequest) -> pb.VerifyRegionResponse:
        if (request.share or request.bytes_per_s) and not request.deep:
            raise BadRequest("share, bytes_per_s: only with deep")
        if not 0.0 <= request.share <= 1.0:
            raise BadRequest(f"share: {request.share:g}: allowed are more than 0 up to 1")
        words = ["region", "verify", word("region", request.region)]
        words += ["--deep"] if request.deep else []
        words += [f"--sample={request.share:f}"] if request.share else []
        words += [f"--bytes-per-s={request.bytes_per_s}"] if request.bytes_per_s else []
        words += [f"--against={word('against', request.against)}"] if request.against else []
        return pb.VerifyRegionResponse(
            operation=await self._operations.begin(call, request.region, *words, JSON)
        )

    async def erase_regions(self, call: Call, request: pb.EraseRegionsRequest) -> pb.EraseRegionsResponse:
        for digest in request.namespaces:
            if not re.fullmatch("[0-9a-f]{32}", digest):
                raise BadRequest("namespaces: a whole digest is required, 32 hex digits")
        if not request.tenant and not request.namespaces:
            raise BadRequest("tenant, namespaces: one of them is required")
        if request.prefix and not re.fullmatch("[0-9a-fA-F]{4,128}", request.prefix):
            raise BadRequest(
                "prefix: a block hash in hex is required, or the beginning of one (4 to 128 digits)"
            )
        words = [f"--namespace={digest}" for digest in request.namespaces]
        words += [f"--tenant={word('tenant', request.tenant)}"] if request.tenant else []
        words += [f"--prefix={request.prefix}"] if request.prefix else []
        words += [f"--region={word('regions', name)}" for name in request.regions]
        subject = request.tenant or ", ".join(request.namespaces[:2])
        begun = await self._operations.begin(call, subject, "erase", *words, *days(request.days), JSON)
        return pb.EraseRegionsResponse(operation=begun)


def warming(asked: pb.Warming) -> list[str]:
    """As words of `kvstore warm`. Raises BadRequest."""
    if asked.to not in TIERS:
        raise BadRequest("to: allowed are TIER_DRAM and TIER_NVME")
    words = ["warm", word("region", asked.region)]
    words += [f"--model={word('models', name)}" for name in asked.models]
    words += [f"--tenant={word('tenants', name)}" for name in asked.tenants]
    words += [f"--weights={model_name(name)}" for name in asked.weights]
    words += [f"--budget={asked.budget_bytes}"] if asked.budget_bytes else []
    words += [f"--to={TIERS[asked.to]}"] if TIERS[asked.to] else []
    if asked.HasField("in_force"):
        words.append(f"--for={span('in_force', asked.in_force, LIFE_S_MIN, LIFE_S_MAX)}")
    return words
