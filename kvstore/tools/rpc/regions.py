"""RegionService: the regions of the deployment, by our own commands, which talk to their buckets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from kvstore.constants import DAY_S
from kvstore.errors import BadRequest
from kvstore.tools.rpc.commands import Words, days, given, model_name, span, word, words_of
from kvstore.v1 import regions_pb2 as pb
from kvstore.v1.types_pb2 import Tier

LIFE_S_MIN, LIFE_S_MAX = 60.0, 30 * DAY_S
TIERS: Final = {Tier.TIER_UNSPECIFIED: "", Tier.TIER_DRAM: "dram", Tier.TIER_NVME: "nvme"}


def _warming(asked: pb.Warming) -> list[str]:
    if asked.to not in TIERS:
        raise BadRequest("to: allowed are TIER_DRAM and TIER_NVME")
    return [
        *("warm", word("region", asked.region)),
        *given("--model", *words_of("models", asked.models)),
        *given("--tenant", *words_of("tenants", asked.tenants)),
        *given("--weights", *map(model_name, words_of("weights", asked.weights))),
        *given("--budget", asked.budget_bytes),
        *given("--to", TIERS[asked.to]),
        *given("--for", span(asked, "in_force", LIFE_S_MIN, LIFE_S_MAX)),
    ]


def _verify(request: pb.VerifyRegionRequest) -> list[str]:
    if (request.share or request.bytes_per_s) and not request.deep:
        raise BadRequest("share, bytes_per_s: only with deep")
    if not 0.0 <= request.share <= 1.0:
        raise BadRequest(f"share: {request.share:g}: allowed are more than 0 up to 1")
    return [
        *("region", "verify", word("region", request.region)),
        *given("--deep", request.deep),
        *given("--sample", request.share and f"{request.share:f}"),
        *given("--bytes-per-s", request.bytes_per_s),
        *given("--against", *words_of("against", [request.against])),
    ]


def _erasure(asked: pb.EraseRegionsRequest) -> list[str]:
    if not all(map(_is_digest, asked.namespaces)):
        raise BadRequest("namespaces: whole digests are required, 32 hex digits each")
    if not asked.tenant and not asked.namespaces:
        raise BadRequest("tenant, namespaces: one of them is required")
    if not re.fullmatch("([0-9a-fA-F]{4,128})?", asked.prefix):
        raise BadRequest("prefix: allowed are 4 to 128 hex digits, a block hash or its beginning")
    return [
        *("region", "erase", "--yes"),
        *given("--namespace", *words_of("namespaces", asked.namespaces)),
        *given("--tenant", *words_of("tenant", [asked.tenant])),
        *given("--prefix", asked.prefix),
        *_regions(asked),
        *days(asked.days),
        *given("--force", not asked.only_known),
    ]


def _cancel(request: pb.CancelErasureRequest) -> list[str]:
    if not _is_digest(request.tombstone):
        raise BadRequest("tombstone: 32 hex digits are required, as ListErasures has them")
    return ["region", "erase", f"--cancel={request.tombstone}", *_regions(request)]


def _regions(request: pb.EraseRegionsRequest | pb.ListErasuresRequest | pb.CancelErasureRequest) -> list[str]:
    return given("--region", *words_of("regions", request.regions))


def _is_digest(text: str) -> bool:
    return re.fullmatch("[0-9a-f]{32}", text) is not None


SERVICE: Final = pb.DESCRIPTOR.services_by_name["RegionService"]
WORDS: Final[Mapping[str, Words]] = {
    "ListRegions": lambda _: ["region", "ls"],
    "GetRegions": lambda r: ["region", "status", *words_of("region", [r.region]), *given("--now", r.live)],
    "PlanWarming": lambda r: [*_warming(r.warming), "--dry-run"],
    "WarmRegion": lambda r: [*_warming(r.warming), *given("--wait", span(r, "wait", 0.0, DAY_S))],
    "CancelWarming": lambda r: [*_warming(r.warming), "--cancel"],
    "VerifyRegion": _verify,
    "PlanErasure": lambda r: [*_erasure(r.erasure), "--dry-run"],
    "EraseRegions": lambda r: [*_erasure(r), *given("--wait", span(r, "wait", 1.0, DAY_S))],
    "ListErasures": lambda r: ["region", "erase", "--ls", *_regions(r)],
    "CancelErasure": _cancel,
}
