"""CacheService: the KV cache of the node (proto/kvstore/v1/cache.proto)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final

from google.protobuf.message import DecodeError

from kvstore.errors import BadRequest, NotFound, Refused
from kvstore.ledger import prompts
from kvstore.ledger.explain import Space, Unclear
from kvstore.ledger.prompts import Prompt, Question
from kvstore.protocol import frames, outcomes
from kvstore.tools.rpc.calls import Call, json_of
from kvstore.tools.rpc.node import Node
from kvstore.tools.rpc.spaces import Spaces, column_sizes
from kvstore.tools.rpc.streams import START_BYTES_MAX, Get, Put, Run, Streams, read_piece
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import types_pb2
from kvstore.v1.types_pb2 import NamespaceSelector
from tiers.checksum import COLUMNS_MAX

TOKENS_MAX = 1 << 20
TOKENS_IN_LOOP_MAX = 2048  # more are hashed in a thread
NAMESPACES_IN_PAGE = 64
FIELDS_MAX = 64  # of a namespace, as the daemon's socket has it

_TIERS: Final = {
    outcomes.HIT_DRAM: types_pb2.TIER_DRAM,
    outcomes.HIT_NVME: types_pb2.TIER_NVME,
    outcomes.HIT_SHARED: types_pb2.TIER_BUCKET,
    outcomes.READ_THROUGH: types_pb2.TIER_BUCKET,
}


class Cache:
    """Every method answers one of the service's; docs/grpc.md says what each promises."""

    RAW = ("Put",)

    def __init__(self, node: Node, streams: Streams) -> None:
        self._node = node
        self._spaces = Spaces(node)
        self._streams = streams
        self._registering = asyncio.Lock()

    # -- what is held --

    async def lookup(self, call: Call, request: pb.LookupRequest) -> pb.LookupResponse:
        prompt, asked, found = await self._explained(call, request, leading=True)
        by_block = prompts.judged(asked, [answer.outcomes for answer in found])
        held = sum(outcome in _TIERS for outcome in by_block)
        each_bytes = sum(
            space["record_bytes"] * (prompt.block_tokens // (space["block_tokens"] or prompt.step))
            for space in prompt.full
        )
        return pb.LookupResponse(
            blocks=prompt.blocks,
            held_blocks=held,
            held_tokens=held * prompt.block_tokens,
            held_bytes=held * each_bytes,
            runs=_runs(by_block),
            predicted_load_s=sum(answer.load_s for answer in found),
            hashes=prompt.fine if request.HasField("tokens") else b"",
        )

    async def explain(self, call: Call, request: pb.ExplainRequest) -> pb.ExplainResponse:
        prompt, asked, found = await self._explained(call, request, leading=False)
        answers = [(answer.residency, answer.outcomes) for answer in found]
        document = await asyncio.to_thread(prompts.document, prompt, asked, answers)
        by_block = prompts.judged(asked, [answer.outcomes for answer in found])
        return pb.ExplainResponse(runs=_runs(by_block), document_json=json_of(document))

    async def prefetch(self, call: Call, request: pb.PrefetchRequest) -> pb.PrefetchResponse:
        space = await self._spaces.one(call, request.namespace)
        run = _run(space, request.hashes, request.parent, frames.HASHES_MAX)
        async with self._streams.open(call) as client:
            prefetch = client.prefetch, self._streams.handle(client, space), run.hashes, run.parent
            blocks = await self._streams.begin(*prefetch)
        return pb.PrefetchResponse(blocks=blocks)

    async def _explained(
        self, call: Call, request: pb.LookupRequest | pb.ExplainRequest, leading: bool
    ) -> tuple[Prompt, list[Question], list[frames.Explained]]:
        """What the daemon says of a prompt. Raises KvstoreError."""
        for is_last in (False, True):
            prompt = await self._prompt(call, request)
            asked = prompts.questions(prompt) if prompt.blocks else []
            try:
                return prompt, asked, [await self._ask(call, question, leading) for question in asked]
            except Refused as error:
                if error.code != "unknown_namespace" or is_last:
                    raise
                self._spaces.forget()  # it was ended since
        raise NotFound("no such namespace")

    async def _ask(self, call: Call, question: Question, leading: bool) -> frames.Explained:
        asked = frames.Explain(question.digests, question.hashes, leading)
        return await self._node.ask(asked, call.until, frames.Explained)

    async def _prompt(self, call: Call, request: pb.LookupRequest | pb.ExplainRequest) -> Prompt:
        """Raises KvstoreError."""
        if isinstance(request, pb.ExplainRequest) and request.HasField("hash"):
            return await self._prefix(call, request)
        spaces = await self._spaces.chosen(call, request.namespace)
        try:
            if not request.HasField("tokens"):
                return prompts.of_hashes(spaces, request.blocks.hashes)
            asked = request.tokens
            if len(asked.ids) > TOKENS_MAX:
                raise BadRequest(f"{len(asked.ids)} tokens: at most {TOKENS_MAX} are allowed")
            seeds = (asked.hash_seed,) if asked.hash_seed else prompts.SEEDS
            arguments = spaces, list(asked.ids), asked.cache_salt, seeds
            if len(asked.ids) <= TOKENS_IN_LOOP_MAX:
                return prompts.of_tokens(*arguments)
            return await asyncio.to_thread(prompts.of_tokens, *arguments)
        except prompts.SeedUnknown as error:
            raise BadRequest(
                f"tokens: the PYTHONHASHSEED of the engine is required as hash_seed{error}"
            ) from error
        except Unclear as error:
            raise BadRequest(str(error)) from error

    async def _prefix(self, call: Call, request: pb.ExplainRequest) -> Prompt:
        """By its last block. Raises KvstoreError."""
        seen = {space["digest"] for space in await self._spaces.of(call)}
        chains: dict[str, bytes] = {}
        # A tenant's question touches none of another's: how long that takes would tell, too.
        for about in [""] if call.principal.tenant is None else sorted(seen):
            report = await self._node.report(_checked(frames.Chain(about, request.hash)), call.until)
            chains.update(
                (digest.hex(), hashes) for digest, hashes in report["chains"] if digest.hex() in seen
            )
        if not chains:
            raise NotFound("no tier of this node knows such a prefix (a bucket may have it all the same)")
        return prompts.of_chains(await self._spaces.chosen(call, request.namespace, chains), chains)

    # -- records --

    async def get(self, call: Call, request: pb.GetRequest) -> None:
        space = await self._spaces.one(call, request.namespace)
        run = _run(space, request.hashes, request.parent, frames.HASHES_MAX)
        if request.wait_ms > frames.WAIT_MS_MAX:
            raise BadRequest(f"wait_ms {request.wait_ms}: allowed are 0 to {frames.WAIT_MS_MAX}")
        wait_s = min(request.wait_ms / 1000 or call.left_s, frames.WAIT_MS_MAX / 1000)
        async with self._streams.open(call) as client:
            asked = Question([bytes.fromhex(space["digest"])], request.hashes, 1)
            found = (await self._ask(call, asked, leading=True)).outcomes
            held = [outcome for outcome in found if outcome in _TIERS]
            await call.write(pb.GetResponse(held=len(held)))
            is_slow = any(outcome != outcomes.HIT_DRAM for outcome in found)
            await Get(self._streams, client, run, wait_s, is_slow).send(call)

    async def put(self, call: Call) -> None:
        async with self._streams.open(call) as client:  # before a message comes: it may be a large one
            run = await self._begun(call)
            await Put(self._streams, client, run).receive(call)

    async def _begun(self, call: Call) -> Run:
        """What the first message of a Put says. Raises KvstoreError."""
        message = await call.next() or b""
        if len(message) > START_BYTES_MAX:
            raise BadRequest(f"start: {len(message)} bytes; at most {START_BYTES_MAX} are allowed")
        piece = read_piece(message)
        if piece.data:
            raise BadRequest("data: begins with the second message")
        try:
            start = pb.PutRequest.Start.FromString(piece.start)
        except DecodeError as error:
            raise BadRequest("start: not a PutRequest.Start") from error
        if not start.hashes:
            raise BadRequest(
                "start: with the hashes of at least one block, it is required of the first message"
            )
        space = await self._spaces.one(call, start.namespace)
        return _run(space, start.hashes, start.parent, frames.LEASE_HASHES_MAX)

    # -- rules --

    async def pin(self, call: Call, request: pb.PinRequest) -> pb.PinResponse:
        return pb.PinResponse(namespaces=await self._pin(call, request.namespace, request.hash, is_set=True))

    async def unpin(self, call: Call, request: pb.UnpinRequest) -> pb.UnpinResponse:
        return pb.UnpinResponse(
            namespaces=await self._pin(call, request.namespace, request.hash, is_set=False)
        )

    async def _pin(
        self, call: Call, selector: NamespaceSelector, block_hash: bytes, is_set: bool
    ) -> list[str]:
        digests = await self._digests(call, selector)
        return await self._rules(call, [frames.SetPin(digest, block_hash, is_set) for digest in digests])

    async def set_ttl(self, call: Call, request: pb.SetTtlRequest) -> pb.SetTtlResponse:
        scope = request.scope
        is_set = request.HasField("ttl_s")
        ttl_s = request.ttl_s or None
        tenant = scope.tenant if scope.HasField("tenant") else None
        digests = await self._digests(call, scope.namespace)
        rules = [frames.SetTtl(digest, scope.hash, tenant, ttl_s, is_set) for digest in digests]
        return pb.SetTtlResponse(namespaces=await self._rules(call, rules))

    async def set_quota(self, call: Call, request: pb.SetQuotaRequest) -> pb.SetQuotaResponse:
        sizes = [
            (None if getattr(request, name) == -1 else getattr(request, name))
            if request.HasField(name)
            else -1
            for name in ("dram_bytes", "nvme_bytes")
        ]
        tenant = request.tenant if request.HasField("tenant") else None
        digests = await self._digests(call, request.namespace)
        rules = [frames.SetQuota(digest, tenant, *sizes) for digest in digests]
        return pb.SetQuotaResponse(namespaces=await self._rules(call, rules))

    async def list_rules(self, call: Call, request: pb.ListRulesRequest) -> pb.ListRulesResponse:
        return pb.ListRulesResponse(
            document_json=json_of(await self._node.report(frames.Retention(), call.until))
        )

    async def erase(self, call: Call, request: pb.EraseRequest) -> pb.EraseResponse:
        scope = request.scope
        tenant = scope.tenant if scope.HasField("tenant") else None
        digests = await self._digests(call, scope.namespace)
        if len(digests) > 1:
            raise BadRequest(
                f"which KV group of the engine? choose one by its namespace's digest: {', '.join(digests)}"
            )
        asked = frames.Clear(digests[0], scope.hash, tenant, request.everything, request.dry_run)
        document = await self._node.report(_checked(asked), call.until, slow=True)
        return pb.EraseResponse(
            blocks=document["blocks"],
            bytes=document["dram_bytes"] + document["nvme_bytes"],
            pinned_blocks=document["pinned_blocks"],
            document_json=json_of(document),
        )

    async def find_prefixes(self, call: Call, request: pb.FindPrefixesRequest) -> pb.FindPrefixesResponse:
        digests = await self._digests(call, request.namespace)
        found: dict[str, None] = {}
        for digest in digests:
            asked = frames.FindPrefixes(digest, request.beginning.lower())
            found.update(dict.fromkeys((await self._node.report(_checked(asked), call.until))["hashes"]))
        return pb.FindPrefixesResponse(hashes=map(bytes.fromhex, found))

    async def _digests(self, call: Call, selector: NamespaceSelector) -> Sequence[str]:
        """Of the namespaces that a rule is about; "" where the daemon is to find them by what else is said."""
        if not (selector.digest or selector.model or selector.HasField("tenant")):
            return [""]
        if selector.digest:
            return [(await self._spaces.one(call, selector))["digest"]]
        return [space["digest"] for space in await self._spaces.chosen(call, selector)]

    async def _rules(self, call: Call, rules: Iterable[frames.Request]) -> list[str]:
        """Put them into force, one after the other; the digests that they are about. Raises KvstoreError."""
        about: dict[str, None] = {}
        for rule in rules:
            report = await self._node.report(_checked(rule), call.until, slow=True)
            about.update(dict.fromkeys(report["namespaces"]))
        return list(about)

    # -- namespaces --

    async def list_namespaces(
        self, call: Call, request: pb.ListNamespacesRequest
    ) -> pb.ListNamespacesResponse:
        spaces = await self._spaces.of(call, age_s=0.0)
        page = spaces[request.skip : request.skip + NAMESPACES_IN_PAGE]
        more = request.skip + len(page) < len(spaces)
        return pb.ListNamespacesResponse(namespaces=map(_namespace, page), more=more)

    async def register_namespace(
        self, call: Call, request: pb.RegisterNamespaceRequest
    ) -> pb.RegisterNamespaceResponse:
        n = request.namespace
        for name, count, most in (
            ("fields", len(n.fields), FIELDS_MAX),
            ("columns", len(n.columns), COLUMNS_MAX),
        ):
            if count > most:  # looked at before they are copied
                raise BadRequest(f"namespace.{name}: {count} of them: at most {most} are allowed")
        register = frames.Register(
            n.digest, n.record_bytes, n.hash_bytes, n.block_tokens, dict(n.fields), list(n.columns)
        )
        # By a connection that uses nothing else, and ends: it stays known without us, among the last ones that nobody uses, and
        # for good once it holds something. One at a time: connections are few.
        async with self._registering:
            await self._node.ask(_checked(register), call.until, frames.Registered, slow=True)
        self._spaces.forget()
        return pb.RegisterNamespaceResponse()


def _runs(by_block: Sequence[int]) -> list[types_pb2.Run]:
    return [
        types_pb2.Run(
            blocks=len(list(run)),
            tier=_TIERS.get(outcome, types_pb2.TIER_UNSPECIFIED),
            outcome=outcomes.NAMES[outcome],
        )
        for outcome, run in groupby(by_block)
    ]


def _run(space: Space, hashes: bytes, parent: bytes, most: int) -> Run:
    """Raises BadRequest."""
    size = space["hash_bytes"]
    if not hashes or len(hashes) % size:
        raise BadRequest(f"hashes: {len(hashes)} bytes; a multiple of {size}, and more than 0, is required")
    if len(hashes) > most * size:
        raise BadRequest(f"hashes: {len(hashes) // size} blocks; at most {most} are allowed")
    split = [hashes[at : at + size] for at in range(0, len(hashes), size)]
    if len(parent) not in (0, size):
        raise BadRequest(f"parent: {len(parent)} bytes; 0 or {size} are required")
    if len({*split, parent}) <= len(split):
        raise BadRequest("hashes: one is repeated; a prompt has it once")
    return Run(space, split, parent)


def _checked(request: frames.Request) -> frames.Request:
    """What the daemon would not understand is refused here. Raises BadRequest."""
    from kvstore.client.sendable import require_sendable

    try:
        require_sendable(request)
    except Refused as error:
        raise BadRequest(error.message) from error
    return request


def _namespace(space: Space) -> types_pb2.Namespace:
    return types_pb2.Namespace(
        digest=bytes.fromhex(space["digest"]),
        record_bytes=space["record_bytes"],
        hash_bytes=space["hash_bytes"],
        block_tokens=space["block_tokens"],
        fields=space["fields"],
        columns=column_sizes(space) if space["column_runs"] else (),
    )
