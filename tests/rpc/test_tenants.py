"""Who asks as a tenant sees that tenant's namespaces; and an engine of several KV groups is looked up as one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.tools.cli import main
from tests.rpc.reflecting import Reflecting
from tests.rpc.serving import Serving, serving
from tests.rpc.spaces import Space, named
from tests.running import Place

TENANTS = ("acme", "umbra")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A node of two tenants, each with a token."""
    path = tmp_path_factory.mktemp("shared")
    access = path / "access.toml"
    access.write_text("".join(_grant(tenant) for tenant in TENANTS))
    access.chmod(0o600)
    with serving(Place(path), f"security.access_file={access}") as found:
        yield found


def _grant(tenant: str) -> str:
    digest = hashlib.sha256(f"token-of-{tenant}".encode()).hexdigest()
    return f'[[grant]]\ntoken_sha256 = "{digest}"\nlabel = "{tenant}"\nroles = ["read", "write"]\ntenant = "{tenant}"\n'


@pytest.fixture
def clients(shared: Serving) -> Iterator[dict[str, Reflecting]]:
    """Of the tenants, and "" of the daemon's user."""
    found = {name: Reflecting(shared.target, f"token-of-{name}" if name else "") for name in ("", *TENANTS)}
    yield found
    for client in found.values():
        client.close()


def refusal(client: Reflecting, method: str, **fields: Any) -> tuple[str, str]:
    """Code and message of a call that is refused."""
    with pytest.raises(grpc.RpcError) as refused:
        client(f"CacheService/{method}", **fields)
    return refused.value.code().name, refused.value.details()


def test_two_tenants_with_one_prompt_share_nothing(clients: dict[str, Reflecting]) -> None:
    """Each gets its own bytes of the same hashes, whatever tenant the request names; what is another's is not there."""
    hashes, spaces = named(4, "shared"), {}
    for number, tenant in enumerate(TENANTS):
        spaces[tenant] = Space(clients[""], "m", tenant=tenant)
        spaces[tenant].client = clients[tenant]
        records = [spaces[tenant].record(10 * number + n) for n in range(3 + number)]
        assert spaces[tenant].put(hashes[: 3 + number], records)[1].blocks == 3 + number
    asked = {"hashes": b"".join(hashes)}
    for number, tenant in enumerate(TENANTS):
        client, other = clients[tenant], spaces[TENANTS[1 - number]]
        for selector in ({}, {"model": "m"}, {"tenant": TENANTS[1 - number]}, spaces[tenant].selector):
            found = client("CacheService/Lookup", namespace=selector, blocks=asked)
            assert found.held_blocks == 3 + number
        held, records = spaces[tenant].get(hashes)
        assert held == 3 + number and records[0] == spaces[tenant].record(10 * number)
        (known,) = client("CacheService/ListNamespaces").namespaces
        assert known.digest == spaces[tenant].digest
        unknown = {"digest": "00" * 16}
        for method, fields in (("Lookup", {"blocks": asked}), ("Prefetch", asked)):
            calls = [
                refusal(client, method, namespace=selector, **fields)
                for selector in (other.selector, unknown)
            ]
            assert calls[0] == calls[1] and calls[0][0] == "NOT_FOUND"


def test_a_tenant_changes_nothing_of_others(clients: dict[str, Reflecting]) -> None:
    """Rules, erasure and namespaces are not for a tenant, nor is a view of the node."""
    client = clients["acme"]
    namespace = {"digest": b"d" * 16, "record_bytes": 4096, "hash_bytes": 32, "block_tokens": 16}
    for method, fields in (
        ("Pin", {"hash": b"h" * 32}),
        ("Erase", {"everything": True}),
        ("SetQuota", {"tenant": "umbra", "dram_bytes": 0}),
        ("RegisterNamespace", {"namespace": namespace}),
        ("ListRules", {}),
    ):
        code, _ = refusal(client, method, **fields)
        assert code == "PERMISSION_DENIED", method


@pytest.mark.parametrize("words", ["status", "ping", "top --once", "report", "explain --tokens 1 --model m"])
def test_commands_of_a_tenant(
    shared: Serving,
    clients: dict[str, Reflecting],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With --node and a tenant's token they show what there is of that tenant, and nothing of others, for people and for programs."""
    monkeypatch.setenv("KVSTORE_CONFIG", "")
    for tenant in TENANTS:
        Space(clients[""], "m", tenant=tenant)
    (tmp_path / "token").write_text("token-of-acme")
    for form in ("json", "") if "top" not in words else ("",):
        more = ["-o", form] if form else []
        node = ["--node", shared.target, "--node-token-file", str(tmp_path / "token")]
        assert main([*words.split(), *more, *node]) == 0
        said = capsys.readouterr()
        assert said.out and "umbra" not in said.out and not said.err


def test_an_engine_of_several_groups_is_looked_up_as_one(client: Reflecting) -> None:
    """A block counts where every group has its part: one of 32 tokens is two hashes of 16."""
    fine = Space(client, "hybrid", 4_000, group="0")
    coarse = Space(client, "hybrid", 12_000, group="1", block_tokens=32)
    hashes = named(6, "hybrid")
    fine.put(hashes, [fine.record(n) for n in range(6)])
    coarse.put([hashes[1], hashes[3]], [coarse.record(n) for n in range(2)])
    found = client("CacheService/Lookup", namespace={"model": "hybrid"}, blocks={"hashes": b"".join(hashes)})
    assert (found.blocks, found.held_blocks, found.held_tokens) == (3, 2, 64)
    assert found.held_bytes == 2 * (2 * 4_000 + 12_000)
    assert [(run.blocks, run.outcome) for run in found.runs] == [(2, "dram"), (1, "never_seen")]
    code, details = refusal(client, "Prefetch", namespace={"model": "hybrid"}, hashes=hashes[0])
    assert code == "INVALID_ARGUMENT" and coarse.digest.hex() in details
