"""Every call of the API, by a client that knows the reflection service only, with TLS and without."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tests.rpc.reflecting import Reflecting
from tests.rpc.serving import Serving, door_of
from tests.rpc.spaces import Space, named
from tests.security import certificates
from tests.security.certificates import Authority

HASHES = named(2, "every call")
TOKEN = "operator"
# What is asked, and the code of the answer. What our commands do is asked wrongly: those of their own tests do it.
CACHE: dict[str, tuple[dict[str, Any], str]] = {
    "ListNamespaces": ({}, "OK"),
    "Lookup": ({"blocks": {"hashes": b"".join(HASHES)}}, "OK"),
    "Put": ({}, "INVALID_ARGUMENT"),
    "Get": ({"hashes": HASHES[0]}, "OK"),
    "Prefetch": ({"hashes": HASHES[0]}, "OK"),
    "Explain": ({"blocks": {"hashes": HASHES[0]}}, "OK"),
    "Pin": ({"hash": HASHES[0]}, "OK"),
    "Unpin": ({"hash": HASHES[0]}, "OK"),
    "SetTtl": ({"scope": {"tenant": "t"}, "ttl_s": 60.0}, "OK"),
    "SetQuota": ({"tenant": "t", "dram_bytes": 1 << 20}, "OK"),
    "ListRules": ({}, "OK"),
    "FindPrefixes": ({"beginning": "abcd"}, "OK"),
    "Erase": ({"everything": True, "dry_run": True}, "OK"),
    "RegisterNamespace": ({}, "INVALID_ARGUMENT"),
}
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "ReportService/GetReport": ({}, "OK"),
    "ReportService/WatchFigures": ({}, "OK"),
    "NodeService/GetNode": ({}, "OK"),
    "NodeService/GetPrincipal": ({}, "OK"),
    "NodeService/ListSettings": ({"name": "log"}, "OK"),
    "NodeService/ChangeSetting": ({"key": "log.level", "value": "info"}, "OK"),
    "NodeService/CheckNode": ({}, "OK"),
    "NodeService/ListOperations": ({}, "OK"),
    **{f"NodeService/{name}Operation": ({"id": "0"}, "NOT_FOUND") for name in ("Get", "Watch", "Cancel")},
    "ModelService/UnloadModel": ({"model": "m"}, "NOT_FOUND"),
    "ModelService/ListModels": ({"local": True, "model": "m"}, "INVALID_ARGUMENT"),
    "ModelService/CollectModels": ({"grace": {"seconds": -1}}, "INVALID_ARGUMENT"),
    "ModelService/VerifyModel": ({"model": "-x"}, "INVALID_ARGUMENT"),
    **{
        f"ModelService/{name}Model": ({}, "INVALID_ARGUMENT")
        for name in ("Get", "Publish", "Remove", "Preload", "Load", "Pin", "Unpin", "Evict")
    },
    "RegionService/ListRegions": ({}, "FAILED_PRECONDITION"),
    "RegionService/ListErasures": ({"regions": ["-x"]}, "INVALID_ARGUMENT"),
    "RegionService/GetRegions": ({"region": "-x"}, "INVALID_ARGUMENT"),
    **{
        f"RegionService/{name}": ({}, "INVALID_ARGUMENT")
        for name in (
            *("PlanWarming", "WarmRegion", "CancelWarming", "VerifyRegion"),
            *("PlanErasure", "EraseRegions", "CancelErasure"),
        )
    },
}


@pytest.fixture(params=["plain", "tls"])
def asking(
    request: pytest.FixtureRequest, node: Serving, tmp_path: Any
) -> Iterator[tuple[Reflecting, Reflecting]]:
    """An operator's client, and that of somebody who is nobody."""
    if request.param == "plain":
        yield (client := Reflecting(node.target)), Reflecting(node.target, "a token that nobody has")
        client.close()
        return
    authority = Authority()
    files = certificates.write(tmp_path, *authority.signed(["node"]), authority.pem)
    access = tmp_path / "access.toml"
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    access.write_text(f'[[grant]]\ntoken_sha256 = "{digest}"\nlabel = "{TOKEN}"\nroles = ["admin"]\n')
    certificate, key = authority.signed(["somebody"])
    credentials = grpc.ssl_channel_credentials(authority.pem, key, certificate)
    with door_of(node.place.socket, *certificates.settings(files, access)) as (_, address):
        target = address.replace("127.0.0.1", "localhost")
        yield (client := Reflecting(target, TOKEN, credentials)), Reflecting(target, "", credentials)
        client.close()


def code_of(client: Reflecting, name: str, fields: dict[str, Any]) -> str:
    """What the first answer says."""
    try:
        answer = client.start(name, [fields])
        if client.methods()[name].server_streaming:
            next(answer)
            answer.cancel()
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def test_every_call_is_answered(asking: tuple[Reflecting, Reflecting]) -> None:
    """Each of those that are reflected, and each is refused to who is not known."""
    client, nobody = asking
    space = Space(client, "every call")
    of_space = {
        f"CacheService/{name}": ({**fields, "namespace": space.selector}, code)
        for name, (fields, code) in CACHE.items()
        if name in ("Lookup", "Get", "Prefetch", "Explain", "Pin", "Unpin")
    }
    asked = {f"CacheService/{name}": what for name, what in CACHE.items()} | of_space | OTHERS
    asked["CacheService/Put"] = space.start(HASHES), "OK"
    methods = client.methods()
    assert set(asked) == set(methods)
    for name, (fields, code) in asked.items():
        assert code_of(client, name, fields) == code, name
    with pytest.raises(grpc.RpcError) as refused:
        nobody.methods()
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    nobody.pool, nobody.database = client.pool, client.database
    for name in methods:
        assert code_of(nobody, name, {}) == "UNAUTHENTICATED", name
    nobody.close()
