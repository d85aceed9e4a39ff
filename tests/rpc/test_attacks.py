"""A daemon and its gRPC process under attack, with an engine on the local socket that may notice nothing.

ATTACKS=1 (`make soak`) takes as many connections as there are descriptors, and 10,000 pairs of lookups in place of a few.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.client import Client
from kvstore.remote import Node, NodeError, NotAllowed, NotFound, NotKnown, Selector, Unreachable
from kvstore.tools.rpc.calls import OPEN_OF_ONE_MAX
from kvstore.tools.rpc.server import CALLS_MAX, CONNECTIONS_MAX
from kvstore.v1 import cache_pb2
from tests.region.regions import chain, read, space_of, store
from tests.rpc.serving import Serving, resident_bytes, target_of, until
from tests.running import Place, daemons
from tests.security import certificates
from tests.security.certificates import DAY, Authority

IS_LONG = bool(os.environ.get("ATTACKS"))
CONNECTIONS = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 3 if IS_LONG else 1200
PAIRS = 10_000 if IS_LONG else 0
GROWTH_BYTES_MAX = (512 if IS_LONG else 128) << 20
TENANTS = ("acme", "rival")


def access(*tokens: str) -> str:
    """The name of a certificate is a tenant's, or operator; each token is a reader's."""
    found = ['[[grant]]\nname = "operator"\nroles = ["admin"]\n']
    found += [f'[[grant]]\nname = "{t}"\nroles = ["read", "write"]\ntenant = "{t}"\n' for t in TENANTS]
    for token in tokens:
        digest = hashlib.sha256(token.encode()).hexdigest()
        found.append(f'[[grant]]\ntoken_sha256 = "{digest}"\nlabel = "{token}"\nroles = ["read"]\n')
    return "\n".join(found)


class Attacked(Serving):
    """With certificates of `authority`, in `path`."""

    path: Path
    authority: Authority

    def node(self, name: str = "", authority: Authority | None = None, token: str = "", **dates: Any) -> Node:
        """As whom it says, by a certificate that is signed now. name "": without one."""
        files: dict[str, Any] = {"ca": self.path / "tls" / "ca.crt"}
        if name:
            signed = (authority or self.authority).signed([name], **dates)
            files |= {"certificate": self.path / f"{name}.crt", "key": self.path / f"{name}.key"}
            for file, content in zip((files["certificate"], files["key"]), signed, strict=True):
                file.write_bytes(content)
        if token:
            files["token_file"] = self.path / "token"
            files["token_file"].write_text(token)
        return Node(self.target, **files)


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    path = tmp_path_factory.mktemp("attacked")
    place, authority = Place(path), Authority()
    (path / "tls").mkdir()
    files = certificates.write(path / "tls", *authority.signed(["node"]), authority.pem)
    (path / "access.toml").write_text(access("today"))
    words = [*place.arguments, "--set=grpc.listen=127.0.0.1:0"]
    with daemons(path) as start:
        daemon = start(place, *words, *certificates.settings(files, path / "access.toml"))
        found = Attacked(place, daemon, target_of(daemon))
        found.path, found.authority = path, authority
        with Client(place.socket, 10.0) as client:
            for tenant in TENANTS:
                store(client, space_of(client, tenant), chain(tenant, 3))
            yield found


@pytest.fixture
def engine(attacked: Attacked) -> Iterator[Callable[[], int]]:
    """Works all the while; how often it has. Any failure of it is the test's."""
    done, failures, end = 0, list[BaseException](), threading.Event()

    def work() -> None:
        nonlocal done
        try:
            with Client(attacked.place.socket, 10.0, label="an engine") as client:
                space, hashes = space_of(client, "acme"), chain("acme", 3)
                while not end.wait(0.005):
                    assert client.lookup([space], hashes) == 3 == read(client, space, hashes)
                    done += 1
        except BaseException as error:  # noqa: BLE001 - told to the test
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    yield lambda: done
    end.set()
    thread.join(60)
    assert not failures and done


def test_nobody_comes_in_who_should_not(attacked: Attacked, engine: Callable[[], int]) -> None:
    """No certificate, another authority's, expired, not yet valid; none of them is asked for what it wants. Another role, another
    tenant, a token of yesterday: each its refusal."""
    first = engine()
    for shown in (
        {},
        {"token": "today"},
        {"name": "operator", "authority": Authority()},
        {"name": "operator", "begins": -2 * DAY, "ends": -DAY},
        {"name": "operator", "begins": DAY, "ends": 2 * DAY},
    ):
        with attacked.node(**shown).within(0.7) as nobody, pytest.raises((Unreachable, NodeError)) as out:
            nobody.caller()
        assert type(out.value).__name__ in ("Unreachable", "DeadlinePassed"), out.value
    with attacked.node("stranger") as stranger, pytest.raises(NotKnown):
        stranger.caller()
    with attacked.node("acme") as acme:
        assert acme.caller().tenant == "acme"
        assert {one.fields["tenant"] for one in acme.namespaces()} == {"acme"}
        for refused in (acme.erase, acme.settings, acme.rules, acme.operations, acme.list_models):
            with pytest.raises(NotAllowed):
                refused()
        with pytest.raises(NotFound):
            acme.lookup(b"rival".ljust(16, b".").hex(), chain("rival", 3))
        forged = acme.lookup(Selector(model="a model", tenant="rival"), chain("rival", 3))
        assert forged.held_blocks == 0
    with attacked.node("operator", token="today") as reader:
        assert reader.caller().name == "today"
        (attacked.path / "access.toml").write_text(access("tomorrow"))
        until(lambda: _is_out(reader), "the token of yesterday is out")
    until(lambda: engine() > first, "the engine goes on")


def _is_out(node: Node) -> bool:
    try:
        node.caller()
    except NotKnown:
        return True
    return False


def answers(node: Attacked, name: str) -> Callable[..., tuple[Any, ...]]:
    """What a call brings, to the last byte: of answer, code, words and trailers."""
    asked = node.node(name)
    line = asked._lines.take()  # the channel itself, for bytes

    def ask(method: str, request: Any) -> tuple[Any, ...]:
        kind = line.channel.unary_stream if method == "Get" else line.channel.unary_unary
        call = kind(f"/kvstore.v1.CacheService/{method}")
        try:
            found = call(request.SerializeToString(), timeout=30)
            return tuple(found) if method == "Get" else (found,)
        except grpc.RpcError as error:
            failed: Any = error
            return failed.code(), failed.details(), tuple(map(tuple, failed.trailing_metadata() or ()))

    return ask


# Of keywords, as dictionaries.
LOOKUP: Any = cache_pb2.LookupRequest
EXPLAIN: Any = cache_pb2.ExplainRequest
GET: Any = cache_pb2.GetRequest
PREFETCH: Any = cache_pb2.PrefetchRequest


def questions(hashes: bytes, digest: str, model: str) -> Iterator[tuple[str, Any]]:
    """All that a tenant may ask of blocks, and of namespaces."""
    own = {"digest": b"acme".ljust(16, b".").hex()}
    for space in ({"digest": digest}, {"model": model}, {"digest": digest, "tenant": "rival"}):
        yield "Lookup", LOOKUP(namespace=space, blocks={"hashes": hashes})
        yield "Explain", EXPLAIN(namespace=space, hash=hashes[:32])
        yield "Get", GET(namespace=space, hashes=hashes, wait_ms=1)
        yield "Prefetch", PREFETCH(namespace=space, hashes=hashes)
    yield "Get", GET(namespace=own, hashes=hashes, wait_ms=1)
    yield "Prefetch", PREFETCH(namespace=own, hashes=hashes)
    yield "Explain", EXPLAIN(namespace=own, hash=hashes[-32:])
    yield "Explain", EXPLAIN(hash=hashes[-32:])
    yield "Lookup", LOOKUP(namespace=own, blocks={"hashes": hashes})


RIVALS = b"".join(chain("rival", 3)), b"rival".ljust(16, b".").hex(), "rival's model"
NOBODYS = b"".join(chain("nobody", 3)), b"nobod".ljust(16, b".").hex(), "nobody's model"


def test_a_tenant_is_answered_the_same_of_another_as_of_nobody(
    attacked: Attacked, engine: Callable[[], int]
) -> None:
    """Byte for byte: blocks that another one stored and blocks that nobody did, namespaces that are another's and that are none."""
    with Client(attacked.place.socket, 10.0) as client:
        space = client.namespace(
            b"of a rival".ljust(16, b"."), 4096, 32, 16, {"model": RIVALS[2], "tenant": "rival"}
        )
        client.lookup([space], [b"r" * 32])
        ask = answers(attacked, "acme")
        for (method, of_rival), (_, of_nobody) in zip(questions(*RIVALS), questions(*NOBODYS), strict=True):
            told = ask(method, of_rival)
            assert told == ask(method, of_nobody), method
            assert not [word for word in ("rival", RIVALS[1]) if word in repr(told)], told


@pytest.mark.skipif(not IS_LONG, reason="10,000 pairs: `make soak`")
@pytest.mark.parametrize("which", ["blocks", "digest", "model", "prefix"])
def test_no_time_tells_a_tenant_of_another(attacked: Attacked, which: str) -> None:
    """10,000 pairs in a random order, by a signed rank test: what is another tenant's takes as long as what is nobody's."""
    ask, rng = answers(attacked, "acme"), random.Random(which)
    own = {"digest": b"acme".ljust(16, b".").hex()}

    def asked(hashes: bytes, digest: str, model: str) -> tuple[str, Any]:
        if which == "prefix":
            return "Explain", EXPLAIN(hash=hashes[-32:])
        space = {"blocks": own, "digest": {"digest": digest}, "model": {"model": model}}[which]
        return "Lookup", LOOKUP(namespace=space, blocks={"hashes": hashes})

    with Client(attacked.place.socket, 10.0) as client:
        fields = {"model": RIVALS[2], "tenant": "rival"}
        client.namespace(b"of a rival".ljust(16, b"."), 4096, 32, 16, fields)
        pair = asked(*RIVALS), asked(*NOBODYS)
        differences = []
        for _ in range(PAIRS):
            took = [0, 0]
            for one in rng.sample((0, 1), 2):
                begun = time.perf_counter_ns()
                ask(*pair[one])
                took[one] = time.perf_counter_ns() - begun
            differences.append(took[0] - took[1])
    chance = _chance(differences)
    print(f"{which}: p = {chance:.3f}")
    assert chance > 1e-4


def _chance(differences: list[int]) -> float:
    """Of differences as large as these where there is none: Wilcoxon's signed ranks."""
    kept = sorted((one for one in differences if one), key=abs)
    count = len(kept)
    above = sum(rank for rank, one in enumerate(kept, 1) if one > 0)
    spread = (count * (count + 1) * (2 * count + 1) / 24) ** 0.5
    return 2 * NormalDist().cdf(-abs(above - count * (count + 1) / 4) / spread)


def test_more_connections_than_it_takes(attacked: Attacked, engine: Callable[[], int]) -> None:
    """That say nothing, or garbage: those beyond its limit are closed, memory is bounded, and once they are gone who should come
    in does."""
    first, before = engine(), resident_bytes(attacked.process())
    host, port = attacked.target.rsplit(":", 1)
    with contextlib.ExitStack() as held:
        for number in range(CONNECTIONS):
            try:
                peer = held.enter_context(socket.create_connection((host, int(port)), 2.0))
                peer.sendall(os.urandom(64) if number % 3 else b"\x16\x03\x01")
            except OSError:
                continue
        there = len(os.listdir(f"/proc/{attacked.process()}/fd"))
        assert there < CONNECTIONS_MAX + 200
        assert resident_bytes(attacked.process()) - before < GROWTH_BYTES_MAX
        until(lambda: engine() > first + 10, "the engine goes on")
    with attacked.node("acme") as acme:
        until(lambda: _is_in(acme), "who may comes in again")


def _is_in(node: Node) -> bool:
    try:
        return bool(node.within(5.0).namespaces())
    except NodeError:
        return False


def test_who_watches_keeps_no_probe_out(attacked: Attacked) -> None:
    """More watchers than there may be are refused, in a line; who asks once for the health is answered beside them."""
    lines = [attacked.node("acme")._lines.take().channel for _ in range(6)]
    watches: list[Any] = []
    for line in lines:
        stub = health_pb2_grpc.HealthStub(line)
        watches += [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(CALLS_MAX - 8)]
    refused = 0
    for watch in watches:
        try:
            next(watch)
        except grpc.RpcError as error:
            failed: Any = error
            assert failed.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, failed
            refused += 1
    assert refused == len(watches) - OPEN_OF_ONE_MAX
    assert stub.Check(health_pb2.HealthCheckRequest(), timeout=30).status
    for line in lines:
        line.close()


def test_watchers_are_told_of_the_end_beside_slow_ones(place: Place, tmp_path: Path) -> None:
    """Who comes, goes, or takes nothing keeps nobody else from it; nobody who is not known has more calls than one may have."""
    with daemons(tmp_path) as start:
        daemon = start(place, *place.arguments, "--set=grpc.listen=127.0.0.1:0")
        with grpc.insecure_channel(target_of(daemon)) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            slow = [stub.Watch(health_pb2.HealthCheckRequest(service=f"none {n}")) for n in range(50)]
            gone, watch = (stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2))
            states = [next(gone).status, next(watch).status]
            gone.cancel()
            daemon.process.terminate()
            with contextlib.suppress(grpc.RpcError):
                for one in watch:
                    states.append(one.status)
            assert daemon.process.wait(60) == 0
            del slow
    known = health_pb2.HealthCheckResponse.ServingStatus
    assert states == [known.SERVING, known.SERVING, known.NOT_SERVING]
