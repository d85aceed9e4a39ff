"""Numbers in a frame: none lets one client touch what another one holds, and one that is bad costs itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from kvstore.client import Client, FillsRefused, Refused, Unavailable
from kvstore.client.leases import Grant
from kvstore.door.api import KINDS, Caller
from kvstore.door.holders import Holder
from kvstore.protocol import frames
from kvstore.security.principals import local
from tests.door.conftest import RECORD_BYTES, check, hashes_of, records_of, space_of
from tests.door.daemon import Daemon
from tests.door.peer import Peer
from tiers.checksum import digest


@pytest.fixture
def peer(daemon: Daemon) -> Iterator[Peer]:
    connected = Peer(daemon.socket_path)
    yield connected
    connected.socket.close()


@pytest.fixture
def scheduler(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.socket_path, timeout_s=20, label="scheduler", attach=False) as connected:
        yield connected


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_nobody_guesses_a_lease(daemon: Daemon, client: Client, scheduler: Client) -> None:
    """Leases have random numbers of 64 bits; small ones, and those beside a real one, fill, commit and release
    nothing."""
    space = space_of(client)
    leases = [scheduler.reserve_slots(space, hashes_of(1, f"{number}")) for number in range(64)]
    numbers = {lease.grant.lease for lease in leases}
    assert len(numbers) == 64 and max(numbers) >= 1 << 61 and not numbers & set(range(1 << 20))
    guesses = [*range(1, 25), *(number ^ bit for number in list(numbers)[:20] for bit in (1, 2))]
    peer = Peer(daemon.socket_path)
    filled = peer.ask(frames.Fill([(guess, 0, bytes(16)) for guess in guesses]))
    assert filled == frames.Filled([0] * len(guesses))
    for guess in guesses:
        assert peer.code_of(frames.Commit(guess, [0], bytes(16))) == "unknown_lease"
        assert peer.code_of(frames.Release(guess)) == "unknown_lease"
    peer.socket.close()
    assert scheduler.lookup([space], hashes_of(1, "0")) == 0
    assert client.fill([(lease.grant, 0, [bytes(16)]) for lease in leases]) == [1] * 64


def test_a_lease_is_committed_and_released_on_its_own_connection(daemon: Daemon, peer: Peer) -> None:
    """Who knows the number of an attached client's lease can neither fill nor commit nor release it."""
    space = peer.register()
    lease = peer.ask(frames.Reserve(space, hashes_of(1)[0], b"")).lease
    other = Peer(daemon.socket_path)
    assert other.ask(frames.Fill([(lease, 0, bytes(16))])) == frames.Filled([0])
    assert other.code_of(frames.Commit(lease, [0], bytes(16))) == "unknown_lease"
    assert other.code_of(frames.Release(lease)) == "unknown_lease"
    other.socket.close()
    assert peer.ask(frames.Commit(lease, [0], bytes(16))) == frames.Count(1)


def test_a_fill_of_another_life_is_refused(daemon: Daemon, client: Client, scheduler: Client) -> None:
    """The daemon itself compares the life that the grant is of; a client from before that field is believed."""
    lease = scheduler.reserve_slots(space_of(client), hashes_of(2))
    fills, life = [(lease.grant.lease, 0, bytes(32))], lease.grant.life
    peer = Peer(daemon.socket_path)
    assert peer.code_of(frames.Fill(fills, life + 1)) == "unknown_lease"
    assert peer.ask(frames.Fill(fills, life)) == frames.Filled([2])
    lease = scheduler.reserve_slots(space_of(client), hashes_of(1, "old"))
    assert peer.ask(frames.Fill([(lease.grant.lease, 0, bytes(16))])) == frames.Filled([1])
    peer.socket.close()


@pytest.mark.parametrize("bad", [(99, 16), (0, 15), (0, 48), (1 << 60, 16)])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_bad_fill_fails_alone(
    daemon: Daemon, client: Client, scheduler: Client, bad: tuple[int, int], at: int
) -> None:
    """The others of its call are committed, and the caller learns which one was refused."""
    space = space_of(client)
    leases = [scheduler.reserve_slots(space, hashes_of(1, f"{number}")) for number in range(3)]
    fills = [(lease.grant, 0, [digest(bytes(RECORD_BYTES))]) for lease in leases]
    fills[at] = leases[at].grant, bad[0], [bytes(bad[1])]
    with pytest.raises(FillsRefused, match="bad_request: fill: column") as refused:
        client.fill(fills)
    assert list(refused.value.refused) == [at]
    assert refused.value.committed == [int(number != at) for number in range(3)]
    for number in range(3):
        assert client.lookup([space], hashes_of(1, f"{number}")) == int(number != at)
    assert client.fill([(leases[at].grant, 0, [bytes(16)])]) == [1], "its lease is as it was"


def test_a_fill_of_an_earlier_daemon_fails_alone(client: Client, scheduler: Client) -> None:
    """Of one call, some leases may be of before a restart: the others are committed."""
    space = space_of(client)
    leases = [scheduler.reserve_slots(space, hashes_of(1, f"{number}")) for number in range(3)]
    fills = [(lease.grant, 0, [digest(bytes(RECORD_BYTES))]) for lease in leases]
    before = Grant(leases[1].grant.life ^ 1, leases[1].grant.lease, leases[1].grant.extents)
    with pytest.raises(FillsRefused, match="another daemon") as refused:
        client.fill([fills[0], (before, *fills[1][1:]), (fills[2][0], 99, fills[2][2])])
    assert [(at, why.code) for at, why in refused.value.refused.items()] == [
        (1, "unknown_lease"),
        (2, "bad_request"),
    ]
    assert refused.value.committed == [1, 0, 0]
    with pytest.raises(Unavailable, match="another daemon"):
        client.fill([(before, *fills[1][1:])])
    assert client.fill(fills[1:]) == [1, 1]


def test_our_own_bug_in_a_fill_is_an_answer_to_that_one(
    daemon: Daemon, client: Client, scheduler: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception inside the engine costs the fill that met it."""
    space = space_of(client)
    leases = [scheduler.reserve_slots(space, hashes_of(1, f"{number}")) for number in range(2)]
    fill = daemon.engine.fill

    def broken(session: object, lease: int, *more: object) -> int:
        if lease == leases[0].grant.lease:
            raise ZeroDivisionError("planted")
        return fill(session, lease, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(daemon.engine, "fill", broken)
    with pytest.raises(FillsRefused, match="internal"):
        client.fill([(lease.grant, 0, [bytes(16)]) for lease in leases])
    assert client.lookup([space], hashes_of(1, "1")) == 1


def test_a_lease_that_is_held_for_too_long_costs_itself(
    daemon: Daemon, client: Client, scheduler: Client
) -> None:
    """What was leased too long ago is taken back, one lease after the other; the connection, and what it leased
    since, stay."""
    space, api = space_of(client), daemon.door.api
    held = hashes_of(3, "held")
    assert client.put(space, held, b"", records_of(3)) == 3
    ages = {"s": 0.0}
    daemon.call(lambda: setattr(api, "clock", lambda: time.monotonic() + ages["s"]))
    old = [scheduler.reserve_slots(space, hashes_of(2, f"old {number}")) for number in range(5)]
    old_reading, old_writing = client.acquire(space, held), client.reserve(space, hashes_of(2, "mine"))
    ages["s"] = 599
    new, new_reading = scheduler.reserve_slots(space, hashes_of(2, "new")), client.acquire(space, held)
    ages["s"] = 601
    wait_for(lambda: daemon.door.counters["refused"].get("lease_expired") == 7)
    assert client.connected and scheduler.connected
    assert client.fill([(lease.grant, 0, [bytes(16)] * 2) for lease in (*old, new)]) == [0] * 5 + [2]
    with pytest.raises(Refused, match="unknown_lease"):
        old_writing.commit()
    old_reading.release()
    assert client.lookup([space], held) == 3 and new_reading.valid()
    blocks = daemon.call(lambda: [b.pins for b in daemon.engine.namespaces.get(0).blocks.walk()])
    assert sorted(blocks)[-3:] == [1, 1, 1], "the new lease holds what it reads"
    new_reading.release()
    assert check(daemon.socket_path) == []
    assert len(daemon.call(lambda: daemon.engine.sessions)) == 2


def test_tickets_are_a_process_s_own(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs that count their requests from 1 are two requests, and neither settles the other's; the
    connections of one program share them."""
    api = daemon.door.api
    mine, again, theirs = (api.enter(local(0, process)) for process in (11, 11, -12))
    answers: list[frames.Answer] = []

    def ask(holder: Holder, tokens: int) -> None:
        caller = Caller(api, holder, None, "test", answers.append, lambda: None)
        caller.serve(frames.Register(b"t" * 16, RECORD_BYTES, 32, 16, {}))
        number = answers.pop().namespace  # type: ignore[union-attr]
        caller.serve(frames.Lookup([number], hashes_of(1)[0], 1, False, tokens))
        caller.end()

    daemon.call(lambda: ask(mine, 16))
    daemon.call(lambda: ask(theirs, 20))
    assert daemon.engine.accounts.tickets == 2
    daemon.call(lambda: ask(again, 16))
    assert daemon.engine.accounts.tickets == 2
    for holder in (mine, again, theirs):
        api.leave(holder)


def test_every_number_of_a_frame_has_an_owner() -> None:
    """Whoever adds a frame with a number that names something says here whose it is."""
    judged = {
        "lease": "random; of the connection, or filled by whoever was given a grant",
        "fills": "as lease",
        "life": "compared with the daemon's",
        "namespace": "registered on this connection",
        "namespaces": "as namespace",
        "groups": "as namespace",
        "ticket": "of the process",
        "skip": "a position in a list",
        "number": "a client, for who may administer",
        "indexes": "within the lease",
    }
    for kind in KINDS:
        for name, type_ in kind.__annotations__.items():
            if "_Id" in type_ or "_Lease" in type_:
                assert name in judged, f"{kind.__name__}.{name}: whose is it?"
