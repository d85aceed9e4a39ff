"""CacheService, by a client that knows the reflection service only: what it stores is what it gets."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict

from kvstore.client import Client
from kvstore.errors import BadRequest
from kvstore.ledger.vllm_hash import ALGORITHMS, DEFAULT_SEED, block_hashes, none_hash
from kvstore.remote import Node, Selector
from kvstore.remote.pieces import FIELDS_MAX
from kvstore.tools.rpc.streams import read_piece
from kvstore.v1 import cache_pb2
from tests.rpc.reflecting import Reflecting, reason
from tests.rpc.serving import Serving, until
from tests.rpc.spaces import BLOCK_TOKENS, HASH_BYTES, Space, named
from tests.running import TIMEOUT_S


def test_records_come_back_as_they_went(client: Reflecting) -> None:
    """Put, then Get: every byte and every checksum; the same ones are not wanted a second time."""
    space = Space(client, "bytes")
    hashes = named(9, "bytes")
    records = [os.urandom(space.record_bytes) for _ in hashes]
    wanted, stored = space.put(hashes, records)
    assert (list(wanted.indexes), wanted.full, stored.blocks) == (list(range(9)), False, 9)
    assert space.get(hashes) == (9, records)
    assert space.get(hashes[4:], parent=hashes[3]) == (5, records[4:])
    assert list(space.put(hashes, records)[0].indexes) == []
    assert space.get([*hashes, b"x" * 32]) == (9, records)
    assert space.get([b"y" * 32]) == (0, [])


def test_columns_have_a_checksum_each(client: Reflecting) -> None:
    """A record of several columns is stored with the checksums of its columns, wherever its pieces are cut."""
    space = Space(client, "columns", 30_000, columns=[7_000, 7_000, 16_000])
    hashes = named(3, "columns")
    records = [os.urandom(space.record_bytes) for _ in hashes]
    assert space.put(hashes, records)[1].blocks == 3
    assert space.get(hashes) == (3, records)


def test_a_record_is_larger_than_a_message(client: Reflecting) -> None:
    """Nor need it fit a window of the server: it comes in parts, each from a lease of its own."""
    space = Space(client, "large", 4 << 20)
    hashes = named(2, "large")
    records = [os.urandom(space.record_bytes) for _ in hashes]
    for number, record in enumerate(records):
        parent = hashes[number - 1] if number else b""
        assert space.put([hashes[number]], [record], parent)[1].blocks == 1
        assert space.get(hashes[: number + 1])[1][-1] == record


def test_a_wrong_checksum_is_not_stored(client: Reflecting) -> None:
    """Of the records of a stream only those are stored whose bytes are what their checksums say, and that came whole."""
    space = Space(client, "wrong")
    hashes = named(4, "wrong")
    records = [space.record(number) for number in range(4)]

    def messages() -> Iterator[dict[str, Any]]:
        yield space.start(hashes)
        yield from space.pieces(0, records[0])
        yield from space.pieces(1, records[1], sums=b"\0" * 16)
        yield from list(space.pieces(2, records[2]))[:-1]

    _, last = client.start("CacheService/Put", messages())
    assert (last.stored.blocks, list(last.stored.refused)) == (1, [1, 2, 3])
    assert space.get(hashes) == (1, records[:1])


@pytest.mark.parametrize(
    ("piece", "why"),
    [
        ({"index": 7, "data": b"x"}, "index 7: not one of those"),
        (
            {"index": 0, "offset": 5, "data": b"x", "checksums": b"0" * 16},
            "1 bytes at 5; expected are those from 0",
        ),
        ({"index": 0, "data": b"x" * 40_001, "checksums": b"0" * 16}, "at most 40000"),
        ({"index": 0, "data": b"x"}, "0 bytes of checksums with its first piece"),
        ({"index": 0, "checksums": b"0" * 16}, "0 bytes at 0; expected are those from 0"),
        ({"start": {"hashes": b"h" * 32}}, "start: of the first message, and of no other"),
    ],
)
def test_a_piece_that_does_not_fit_ends_its_stream(
    client: Reflecting, node: Serving, piece: Any, why: str
) -> None:
    """In one line, and nothing of the stream is stored."""
    space = Space(client, "misfit")
    hashes = named(1, why)
    answers = client.start("CacheService/Put", [space.start(hashes), piece])
    with pytest.raises(grpc.RpcError) as refused:
        list(answers)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT and why in refused.value.details()
    assert reason(refused.value) == "BAD_REQUEST"
    assert space.get(hashes) == (0, [])


SMALL_FIELDS = b"\x10\x00" * (2 << 20)  # 4 MiB of "index: 0"
OF_SMALL_THINGS = [
    ("Put", [SMALL_FIELDS], "at most 65536 are allowed"),
    ("Put", [b"", SMALL_FIELDS], "more than 64 fields"),
    ("RegisterNamespace", {"columns": [1] * 1025}, "columns: 1025 of them: at most 1024"),
    ("RegisterNamespace", {"fields": {str(n): "" for n in range(65)}}, "fields: 65 of them: at most 64"),
]


@pytest.mark.parametrize(
    ("method", "sent", "why"), OF_SMALL_THINGS, ids=["start", "piece", "columns", "fields"]
)
def test_a_message_has_no_more_small_things_than_it_needs(
    client: Reflecting, method: str, sent: Any, why: str
) -> None:
    """Each takes its time, in which nobody else is answered: they are counted, and refused in a line."""
    space = Space(client, "small things")
    if method == "Put":
        start = cache_pb2.PutRequest(**space.start(named(1, why))).SerializeToString()
        call: Any = client.channel.stream_stream("/kvstore.v1.CacheService/Put")
        with pytest.raises(grpc.RpcError) as refused:
            list(call(iter([message or start for message in sent]), timeout=60))
    else:
        with pytest.raises(grpc.RpcError) as refused:
            client("CacheService/RegisterNamespace", namespace={"digest": space.digest, **sent})
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT and why in refused.value.details()


def test_pieces_are_read_with_fields_of_later_versions() -> None:
    """As many as may be, beside the data; one more is refused."""
    piece = cache_pb2.PutRequest(index=3, offset=4, data=b"data").SerializeToString()
    later = b"\xa2\x06\x03abc" * (FIELDS_MAX - 3)  # field 100
    found = read_piece(later + piece)
    assert (found.record, found.offset, bytes(found.data)) == (3, 4, b"data")
    with pytest.raises(BadRequest, match="more than 64 fields"):
        read_piece(later + b"\x10\x00" + piece)


def test_streams_keep_no_namespaces(client: Reflecting, node: Serving) -> None:
    """However many are stored and read while other streams go on: each connection to the daemon, which counts what they
    register, has the last one or two."""
    spaces = [Space(client, f"passing {number}") for number in range(12)]
    for space in spaces:
        hashes = named(1, "passing")
        assert space.put(hashes, [space.record(1)])[1].blocks == 1
        assert client("CacheService/Prefetch", namespace=space.selector, hashes=hashes[0]).blocks == 0
        assert space.get(hashes) == (1, [space.record(1)])
    with Client(node.place.socket, 10.0, attach=False) as local:
        ours = [one["namespaces"] for one in local.clients() if "grpc" in one["label"]]
    assert ours and max(ours) <= 2


def test_one_namespace_is_registered_at_once_by_several(client: Reflecting, node: Serving) -> None:
    """Each is told that it is known, and none stays registered."""
    with ThreadPoolExecutor(4) as threads:
        for number in range(5):
            list(threads.map(lambda _, n=number: Space(client, f"at once {n}"), range(4)))
    with Client(node.place.socket, 10.0, attach=False) as local:
        until(lambda: not any("at once" in one["model"] for one in local.clients()), "none stays registered")
    known = [space.fields["model"] for space in client("CacheService/ListNamespaces").namespaces]
    assert sum(model.startswith("at once") for model in known) == 5


def test_lookup_tells_what_is_held_and_why_not_more(client: Reflecting) -> None:
    """The longest prefix, by tier; then the reason for the first that is missing. A miss is an answer."""
    space = Space(client, "looked up")
    hashes = named(6, "looked up")
    space.put(hashes[:4], [space.record(n) for n in range(4)])
    found = client("CacheService/Lookup", namespace=space.selector, blocks={"hashes": b"".join(hashes)})
    assert (found.blocks, found.held_blocks, found.held_tokens) == (6, 4, 64)
    assert found.held_bytes == 4 * space.record_bytes and found.predicted_load_s == 0
    assert [(run["blocks"], run.get("tier"), run["outcome"]) for run in MessageToDict(found)["runs"]] == [
        (4, "TIER_DRAM", "dram"),
        (1, None, "never_seen"),
    ]
    none = client("CacheService/Lookup", namespace=space.selector, blocks={"hashes": b"n" * 32})
    assert (none.held_blocks, len(none.runs)) == (0, 1)
    nothing = client("CacheService/Lookup", namespace=space.selector, blocks={})
    assert (nothing.blocks, len(nothing.runs)) == (0, 0)


def test_tokens_are_hashed_as_the_engine_does(client: Reflecting) -> None:
    """A prompt of token ids finds what was stored under the engine's own hashes, and is told them."""
    space = Space(client, "tokens")
    tokens = [7 * number % 5_000 for number in range(100)]
    seed = hashlib.sha256(ALGORITHMS["sha256"](DEFAULT_SEED)).hexdigest()[:32]
    parent = none_hash("sha256", seed, [DEFAULT_SEED])
    assert parent is not None
    for salt in ("", "salted"):
        hashes = block_hashes("sha256", parent, tokens, BLOCK_TOKENS, salt)
        space.put(hashes[:5], [space.record(n) for n in range(5)])
        asked = {"ids": tokens, "cache_salt": salt}
        found = client("CacheService/Lookup", namespace={"model": "tokens"}, tokens=asked)
        assert (found.blocks, found.held_blocks, found.hashes) == (6, 5, b"".join(hashes))
    long = client("CacheService/Lookup", namespace={"model": "tokens"}, tokens={"ids": tokens * 100})
    assert long.blocks == 625
    with pytest.raises(grpc.RpcError) as refused:
        client("CacheService/Lookup", namespace={"model": "tokens"}, tokens={**asked, "hash_seed": "5"})
    assert "the PYTHONHASHSEED of the engine is required" in refused.value.details()


def test_explain_is_what_the_command_says(client: Reflecting) -> None:
    """Its document has each block; a prefix is explained by its last block, too."""
    space = Space(client, "explained")
    hashes = named(4, "explained")
    space.put(hashes[:3], [space.record(n) for n in range(3)])
    for asked in ({"blocks": {"hashes": b"".join(hashes)}}, {"hash": hashes[2]}):
        found = client("CacheService/Explain", namespace={"model": "explained"}, **asked)
        document = json.loads(found.document_json)
        assert document["hit_tokens"] == 48 and document["model"] == "explained"
        assert [block["hash"] for block in document["blocks"]][:3] == [h.hex() for h in hashes[:3]]
        assert found.runs[0].blocks == 3


def test_the_longest_prompt_is_explained(client: Reflecting, node: Serving) -> None:
    """A document of 65,536 blocks is one answer; a lookup of as many by token ids has all their hashes."""
    space = Space(client, "longest")
    hashes = [number.to_bytes(32, "big") for number in range(1, 65_537)]
    space.put(hashes[:1], [space.record(0)])
    with Node(node.target, timeout_s=TIMEOUT_S) as far:
        document = far.explain(Selector(model="longest"), hashes)
        assert len(document["blocks"]) == 65_536 and document["hit_tokens"] == 16
        found = far.lookup(Selector(model="longest"), tokens=range(1 << 20))
        assert found.blocks == 65_536 == len(found.hashes) // 32


def test_rules_are_set_and_listed(client: Reflecting, node: Serving) -> None:
    """Pin, Unpin, SetTtl, SetQuota: in force when they are answered, as the daemon's own socket shows."""
    space = Space(client, "ruled", tenant="acme")
    hashes = named(2, "ruled")
    space.put(hashes, [space.record(n) for n in range(2)])
    digest = space.digest.hex()
    assert list(client("CacheService/Pin", namespace=space.selector, hash=hashes[1]).namespaces) == [digest]
    scope = {"hash": hashes[0], "namespace": space.selector}
    assert list(client("CacheService/SetTtl", scope=scope, ttl_s=3600.0).namespaces) == [digest]
    client("CacheService/SetTtl", scope={"tenant": "acme"}, ttl_s=0.0)
    client("CacheService/SetQuota", tenant="acme", dram_bytes=1 << 20, nvme_bytes=-1)
    client("CacheService/SetQuota", tenant="acme", nvme_bytes=1 << 30)
    document = json.loads(client("CacheService/ListRules").document_json)
    with Client(node.place.socket, 10, attach=False) as local:
        assert local.retention()["pins"] == document["pins"]
    assert [pin["block_hash"] for pin in document["pins"]] == [hashes[1].hex()]
    assert {(ttl["tenant"], ttl["ttl_s"]) for ttl in document["ttls"]} == {("acme", 3600.0), ("acme", None)}
    (quota,) = document["quotas"]
    assert (quota["dram_bytes"], quota["nvme_bytes"]) == (1 << 20, 1 << 30)
    client("CacheService/Unpin", namespace=space.selector, hash=hashes[1])
    client("CacheService/SetTtl", scope=scope)
    client("CacheService/SetTtl", scope={"tenant": "acme"})
    client("CacheService/SetQuota", tenant="acme", dram_bytes=-1, nvme_bytes=-1)
    document = json.loads(client("CacheService/ListRules").document_json)
    assert not document["pins"] and not document["ttls"]


def test_erase_drops_what_it_names(client: Reflecting) -> None:
    """A dry run says what would be; then it is gone, and what is beside it stays."""
    space, other = Space(client, "erased"), Space(client, "kept")
    hashes = named(3, "erased")
    for one in (space, other):
        one.put(hashes, [one.record(n) for n in range(3)])
    dry = client("CacheService/Erase", scope={"namespace": space.selector}, dry_run=True)
    assert (dry.blocks, space.get(hashes)[0]) == (3, 3)
    assert client("CacheService/Erase", scope={"namespace": space.selector}).blocks == 3
    assert (space.get(hashes)[0], other.get(hashes)[0]) == (0, 3)
    (found,) = client("CacheService/FindPrefixes", beginning=hashes[2].hex()[:12]).hashes
    assert found == hashes[2]


def test_prefetch_brings_blocks(client: Reflecting) -> None:
    """What is in DRAM needs no bringing, what is nowhere cannot be brought."""
    space = Space(client, "prefetched")
    hashes = named(3, "prefetched")
    space.put(hashes[:2], [space.record(n) for n in range(2)])
    assert client("CacheService/Prefetch", namespace=space.selector, hashes=b"".join(hashes)).blocks == 0


def test_namespaces_are_listed_as_they_are(client: Reflecting) -> None:
    """With their sizes and columns; one that is not known is not found, and several that fit are named."""
    spaces = [Space(client, f"listed {n}", 4_000 * n, f"{n}", columns=[1_000] * 4 * n) for n in (1, 2)]
    known = {}
    while (page := client("CacheService/ListNamespaces", skip=len(known))).namespaces:
        known.update({n.digest: n for n in page.namespaces})
    for space in spaces:
        found = known[space.digest]
        assert (found.record_bytes, found.hash_bytes, found.block_tokens) == (
            space.record_bytes,
            HASH_BYTES,
            BLOCK_TOKENS,
        )
        assert list(found.columns) == space.columns and found.fields["model"].startswith("listed")
    asked = {"hashes": b"x" * 32}
    with pytest.raises(grpc.RpcError) as refused:
        client("CacheService/Lookup", namespace={"model": "listed"}, blocks=asked)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT and "listed 2" in refused.value.details()
    with pytest.raises(grpc.RpcError) as refused:
        client("CacheService/Lookup", namespace={"digest": "00" * 16}, blocks=asked)
    assert (refused.value.code(), reason(refused.value)) == (grpc.StatusCode.NOT_FOUND, "NOT_FOUND")


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("Lookup", {"namespace": {"digest": "xyz"}}),
        ("Lookup", {"namespace": {"model": "bad"}, "blocks": {"hashes": b"short"}}),
        ("Prefetch", {"namespace": {"model": "bad"}}),
        ("Get", {"namespace": {"model": "bad"}, "hashes": b"x" * 64}),
        ("Get", {"namespace": {"model": "bad"}, "hashes": b"x" * 32, "wait_ms": 70_000}),
        ("Get", {"namespace": {"model": "bad"}, "hashes": b"x" * 32, "parent": b"p"}),
        ("Put", {"index": 0, "data": b"x"}),
        ("Put", {"start": {"namespace": {"model": "bad"}, "hashes": b"x" * 33}}),
        ("Put", {"start": {"namespace": {"model": "bad"}, "hashes": b"x" * 32}, "data": b"x"}),
        ("Put", {"start": {"namespace": {"model": "bad"}, "hashes": b"x" * 513 * 32}}),
        ("Put", {"start": {"namespace": {"model": "m" * 70_000}, "hashes": b"x" * 32}}),
        ("FindPrefixes", {"beginning": "no digits"}),
        ("Pin", {"hash": b"h" * 65}),
        ("SetTtl", {"scope": {"tenant": "t"}, "ttl_s": -1.0}),
        ("RegisterNamespace", {"namespace": {"digest": b"d"}}),
    ],
)
def test_bad_input_is_refused_in_a_line(client: Reflecting, method: str, fields: Any) -> None:
    """INVALID_ARGUMENT, with what is allowed; nothing of a traceback."""
    Space(client, "bad")
    with pytest.raises(grpc.RpcError) as refused:  # noqa: PT012 a stream says it when it is read
        answer = client.start(f"CacheService/{method}", [fields])
        if method in ("Get", "Put"):
            list(answer)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT, refused.value
    assert "\n" not in refused.value.details() and "Error" not in refused.value.details()


def test_more_than_one_put_holds_is_stored_behind_what_is_held(client: Reflecting) -> None:
    """One Put has an eighth of the arena. What is held already takes none of that: the first that is not is wanted, in whatever of an
    engine's KV groups, and `full` says that there are more."""
    groups = [Space(client, "behind", 128 << 10, group=group) for group in "01"]
    hashes = named(24, "behind")
    records = [groups[1].record(number) for number in range(24)]
    for begin, end in ((0, 16), (16, 24), (24, 24)):
        wanted, stored = groups[1].put(hashes, records)
        assert list(wanted.indexes) == list(range(begin, end)) and wanted.full == (end < 24)
        assert stored.blocks == end - begin and not stored.refused
    assert groups[1].get(hashes) == (24, records)


def test_a_namespace_may_come_again_with_other_sizes(client: Reflecting, node: Serving) -> None:
    """What was known of one that has ended registers nothing of it anew."""
    hashes = named(1, "again")
    for record_bytes in (40_000, 80_000):
        space = Space(client, "again", record_bytes)
        assert space.put(hashes, [space.record(1)])[1].blocks == 1
        assert space.get(hashes) == (1, [space.record(1)])
        with Client(node.place.socket, 10.0, attach=False) as local:
            local.unregister(local.namespace(space.digest, record_bytes, 32, 16, {}), end=True)
        until(partial(is_gone, node, space.digest), "it has ended")


def is_gone(node: Serving, digest: bytes) -> bool:
    with Client(node.place.socket, 10.0, attach=False) as local:
        return digest.hex() not in {one["digest"] for one in local.list_namespaces()}
