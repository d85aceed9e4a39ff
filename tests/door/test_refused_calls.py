"""A call that cannot succeed is refused by the client itself: whatever is wrong with it, the connection and all leases stay.

The calls are found by reflection: a new method, or a new parameter, is tried without being named here.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FunctionType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.client import ArenaView, Client, ClientError, Grant, Namespace, Refused, Unavailable
from kvstore.client.calls import Calls
from kvstore.client.leases import GrantedSlots, ReadLease, SlotLease, WriteLease
from kvstore.protocol import frames
from tests.door.conftest import HASH_BYTES, RECORD_BYTES, check, hashes_of, records_of, space_of
from tests.door.daemon import Daemon


class Strange:
    """Nothing that anybody would pass."""

    def __iter__(self) -> Iterator[int]:
        return iter((1, 2, 3))

    def __len__(self) -> int:
        return 5


TOO_MANY = bytes(32 * 65_537)  # hashes
WRONG: list[Any] = [
    *(None, True, -1, 0, 1, 3.5, math.nan, math.inf, -math.inf, 1 << 63, 1 << 70, -(1 << 70), 2j),
    *("", "x", "\ud800", "x" * 100_000, b"", b"short", TOO_MANY, bytearray(3), memoryview(b"abc")[::2]),
    *([], [None], [1], ["a" * 32], [b"short"], [b""], [hashes_of(1)[0]] * 2, [[]], [b"x" * 32] * 131_072),
    *({}, {None: None}, {0: b"short"}, {7: bytes(16)}, {"a": 1}, {1, 2}, object(), Strange(), len, Client),
    *([(None, None, None)], [(1, 2)], [object()], [Strange()]),
]
METHODS = [
    (of.__name__, name)
    for of in (Calls, Client, Namespace, SlotLease, GrantedSlots, WriteLease, ReadLease, ArenaView)
    for name, member in vars(of).items()
    if isinstance(member, FunctionType) and not name.startswith("_") and name != "close"
]


class Stage:
    """One of each, and arguments that are right."""

    def __init__(self, daemon: Daemon, client: Client, scheduler: Client) -> None:
        self.client, self.scheduler = client, scheduler
        self.space, self.other = space_of(client), space_of(client, "other")
        self.held = hashes_of(3, "held")
        client.put(self.space, self.held, b"", records_of(3))
        self.of: dict[str, Any] = {"Client": client, "Calls": client, "Namespace": self.space}
        self.renew()
        self.kept = client.reserve(self.space, hashes_of(2, "kept"))
        self.kept_reading = client.acquire(self.space, self.held)
        self.lent = scheduler.reserve_slots(self.space, hashes_of(2, "lent"))
        self.connections = client._connection, scheduler._connection

    def renew(self) -> None:
        """What a right call uses up."""
        self.of["WriteLease"] = self.client.reserve(self.space, hashes_of(2, "written"))
        self.of["ReadLease"] = self.client.acquire(self.space, self.held)
        self.of["SlotLease"] = self.scheduler.reserve_slots(self.space, hashes_of(2, "slots"))
        self.of["GrantedSlots"] = self.client.open_grant(self.of["SlotLease"].grant, 0, 8)
        self.of["ArenaView"] = self.client.arena

    def done(self) -> None:
        for name in ("WriteLease", "ReadLease", "SlotLease"):
            lease = self.of[name]
            lease.abort() if name == "WriteLease" else lease.release()

    def caller(self, of: str, name: str) -> Callable[..., Any]:
        """A scheduler's calls are those of a client without the arena."""
        subject = self.scheduler if name in ("reserve_slots", "change_setting", "check") else self.of[of]
        return getattr(subject, name)  # type: ignore[no-any-return]

    def right(self, name: str, parameter: str) -> Any:
        digest = self.space.digest.hex()
        grant = self.lent.grant
        values: dict[str, Any] = {
            "namespace": self.other if name == "unregister" else digest if name in BY_DIGEST else self.space,
            "namespaces": [self.space],
            "groups": [(self.space, 16)],
            **dict.fromkeys(("hash_tokens", "align_tokens", "held_tokens", "reach_tokens"), 16),
            "hashes": b"".join(self.held) if name == "explain" else self.held,
            "digests": [self.space.digest],
            "buffers": records_of(3),
            "into": [bytearray(RECORD_BYTES) for _ in self.held],
            "parent": b"",
            "block_hash": self.held[0],
            "missing": self.held[0],
            "ticket": 5,
            "tokens": 16,
            "since_s": 0.0,
            "grant": grant,
            "start_bytes": 0,
            "size_bytes": 8,
            "fills": [(grant, 0, [bytes(16)])],
            "ttl_s": 60.0,
            "dram_bytes": 1 << 20,
            "nvme_bytes": None,
            "tenant": "acme" if name != "clear" else None,
            "beginning": self.held[0].hex()[:8],
            "key": "log.level",
            "text": "debug",
            "name": "log",
            "connection": self.client._connection,
            "lease": 12345,
            "checksums": {0: bytes(16)},
            "position": 0,
            "offset": 0,
            "offsets": [0],
            "count": 1,
            "extents": grant.extents,
            "w": frames,
        }
        return values[parameter]


BY_DIGEST = ("pin", "set_ttl", "set_quota", "clear", "find_prefixes", "chains", "warm_prefix")


@pytest.fixture
def stage(daemon: Daemon) -> Iterator[Stage]:
    """On a daemon whose rules are saved and whose blocks are cleared, as the service does it."""

    def upkeep() -> None:
        daemon.io.run()
        daemon.engine.clearing.step()
        daemon.loop.call_later(0.005, upkeep)

    daemon.call(upkeep)
    with (
        Client(daemon.socket_path, timeout_s=20) as client,
        Client(daemon.socket_path, timeout_s=20, attach=False) as scheduler,
    ):
        yield Stage(daemon, client, scheduler)


def parameters(call: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(call).parameters.values())


def call_with(call: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """It succeeds, or it raises a ClientError; nothing else. Unavailable only for a lease of a lost connection."""
    positional = [arguments.pop(p.name) for p in parameters(call) if p.kind is p.POSITIONAL_ONLY]
    with suppress(Refused):
        call(*positional, **arguments)


def assert_untouched(stage: Stage, daemon: Daemon) -> None:
    """The connections are those from before, and every lease is held and can be committed."""
    assert (stage.client._connection, stage.scheduler._connection) == stage.connections
    stage.client.ping()
    assert stage.kept_reading.valid()
    held = daemon.call(lambda: [lease for s in daemon.engine.sessions for lease in s.leases])
    assert {stage.kept._lease.grant.lease, stage.kept_reading._lease.grant.lease} <= set(held)


@pytest.mark.parametrize(("of", "name"), METHODS)
def test_every_parameter_of_every_method(stage: Stage, daemon: Daemon, of: str, name: str) -> None:
    """Each argument in turn is replaced by whatever it is not."""
    ends = {"abort", "release", "drop", "commit", "commit_soon", "unregister", "forget", "release_lease"}
    needed = [p for p in parameters(stage.caller(of, name)) if p.default is p.empty]
    for bad in parameters(stage.caller(of, name)):
        for value in WRONG:
            arguments = {p.name: stage.right(name, p.name) for p in needed}
            arguments[bad.name] = value
            call_with(stage.caller(of, name), arguments)
            if name in ends:
                stage.done()
                stage.renew()
        assert_untouched(stage, daemon)
    stage.done()
    assert stage.kept.commit() == 2
    assert check(daemon.socket_path) == []


@pytest.mark.parametrize("name", sorted(inspect.signature(Client.__init__).parameters)[:-1] or [])
def test_every_parameter_of_a_new_client(daemon: Daemon, name: str) -> None:
    """A client that cannot be made is refused; one that can be made raises nothing else than ClientErrors."""
    for value in WRONG:
        with suppress(ClientError):
            right = {"socket_path": daemon.socket_path, "timeout_s": 0.05}
            with Client(**{**right, name: value}) as made:
                made.ping()


@pytest.mark.parametrize("name", [p for p in inspect.signature(Namespace.__init__).parameters if p != "self"])
def test_every_parameter_of_a_namespace(stage: Stage, daemon: Daemon, name: str) -> None:
    """A namespace that is made can be used: nothing about it breaks a call later."""
    right = {"digest": b"n" * 16, "record_bytes": 4096, "hash_bytes": 32, "block_tokens": 16, "fields": {}}
    for value in [*WRONG, {"k": "v" * 1025}, {"k" * n: "v" * 500 for n in range(60)}, [4096, 0], [1] * 1025]:
        try:
            space = stage.client.namespace(**{**right, name: value})
        except Refused:
            continue
        with suppress(Refused):
            stage.client.lookup([space], hashes_of(1))
            stage.client.put(space, hashes_of(1), b"", [bytes(4096)])
    assert_untouched(stage, daemon)


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_several_wrong_arguments_at_a_time(stage: Stage, daemon: Daemon, data: st.DataObject) -> None:
    """Any mixture of wrong and right ones, of whatever type msgpack can or cannot carry."""
    name = data.draw(st.sampled_from([name for of, name in METHODS if of in ("Calls", "Client")]))
    values = st.one_of(
        st.sampled_from(WRONG),
        st.integers(),
        st.floats(),
        st.binary(max_size=70),
        st.text(max_size=70),
        st.lists(st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES), max_size=3),
        st.dictionaries(st.integers(0, 3), st.binary(max_size=16), max_size=3),
    )
    call = stage.caller("Client", name)
    arguments = {}
    for parameter in parameters(call):
        if data.draw(st.booleans()):
            arguments[parameter.name] = data.draw(values)
        elif parameter.default is parameter.empty:
            arguments[parameter.name] = stage.right(name, parameter.name)
    call_with(call, arguments)
    assert_untouched(stage, daemon)


def test_what_is_refused_is_not_sent(tmp_path: Any) -> None:
    """Without a daemon, a call that cannot succeed is Refused and not Unavailable: nobody was asked."""
    with Client(tmp_path / "nobody", attach=False) as client:
        space = space_of(client)
        many = [number.to_bytes(32, "big") for number in range(131_072)]
        for call in (
            lambda: client.lookup([space], many),
            lambda: client.residency(space, many),
            lambda: client.windows(
                [(space, 16)], many, hash_tokens=16, align_tokens=16, held_tokens=16, reach_tokens=16
            ),
            lambda: client.prefetch(space, many),
            lambda: client.acquire_slots(space, many[:513]),
            lambda: client.acquire_slots(space, []),
            lambda: client.reserve_slots(space, many[:1] * 2),
            lambda: client.reserve_slots(space, many[:2], parent=b"short"),
            lambda: client.lookup([space], ["0" * 32]),
            lambda: client.lookup([space], [bytes(31), bytes(33)]),
            lambda: client.lookup([space], many[:1], ticket=-1),
            lambda: client.lookup([space] * 65, many[:1]),
            lambda: client.explain([b"short"], bytes(32)),
            lambda: client.explain([bytes(16)], bytes(5 << 20)),
            lambda: client.acquire_slots(space, many[:1], wait_s=-1),
            lambda: client.acquire_slots(space, many[:1], wait_s=61),
            lambda: client.pin(b"x" * 65),
            lambda: client.set_ttl(0),
            lambda: client.set_quota(-2, None),
            lambda: client.find_prefixes("nothing hex"),
            lambda: client.settle(1, 1 << 32),
            lambda: client.report(math.nan),
            lambda: client.fill([(None, 0, None)]),
            lambda: client.fill([(Grant(1, 1, None), 0, None)] * 65),
            lambda: client.namespace(bytes(16), 0, 32, 16, {}),
        ):
            with pytest.raises(Refused) as refused:
                call()
            assert refused.value.code in ("bad_request", "limit_exceeded", "frame_too_large")
        with pytest.raises(Unavailable):
            client.lookup([space], many[:1])


def test_the_words_name_the_argument(client: Client) -> None:
    """One line says which argument it is, and what is allowed."""
    with pytest.raises(Refused, match=r"^bad_request: lookup: ticket: Expected `int` >= 0$"):
        client.lookup([space_of(client)], hashes_of(1), ticket=-1)
    with pytest.raises(Refused, match=r"^bad_request: settle: hash: Expected `bytes`, got `str`$"):
        client.settle(1, 2, None, "x")  # type: ignore[arg-type]


def test_a_commit_that_makes_no_sense_leaves_its_lease(client: Client) -> None:
    """It can be committed rightly afterwards."""
    lease = client.reserve(space_of(client), hashes_of(2))
    for checksums in ({2: bytes(16)}, {0: bytes(15)}, {0: "x" * 16}, {0: None}, [1], 5):
        with pytest.raises(Refused):
            lease.commit(checksums)  # type: ignore[arg-type]
    assert lease.commit() == 2


def test_a_closed_client(daemon: Daemon) -> None:
    """Every call of a closed client raises Unavailable, or what is wrong with it, at once."""
    client = Client(daemon.socket_path, timeout_s=20)
    space = space_of(client)
    client.ping()
    client.close()
    for call in (client.ping, client.status, lambda: client.lookup([space], hashes_of(1))):
        with pytest.raises(Unavailable, match="closed"):
            call()
