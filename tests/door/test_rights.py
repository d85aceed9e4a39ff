"""Who may ask what: each kind of request needs a right, and a principal without it is refused before anything is done."""

from __future__ import annotations

import os

import pytest

from kvstore.client import Client
from kvstore.door.api import KINDS, Caller
from kvstore.protocol import frames
from kvstore.security.principals import EVERYTHING, Access, Principal, local
from tests.door.conftest import hashes_of, records_of, space_of
from tests.door.daemon import Daemon


def answers(daemon: Daemon, principal: Principal, *requests: frames.Request) -> list[frames.Answer]:
    """Of one caller that has come in by some door."""
    api = daemon.door.api
    answered: list[frames.Answer] = []

    def ask() -> None:
        holder = api.enter(principal)
        caller = Caller(api, holder, None, "test", answered.append, lambda: None)
        for request in requests:
            caller.serve(request)
            while caller.has_steps:
                caller.step()
        caller.end()
        api.leave(holder)

    daemon.call(ask)
    return answered


def of_each_kind() -> list[frames.Request]:
    """One of each kind, with nothing in it."""
    return [
        kind(*[None] * (len(kind.__struct_fields__) - len(kind.__struct_defaults__)))  # type: ignore[misc]
        for kind in KINDS
    ]


def test_without_a_right_nothing_is_served(daemon: Daemon, client: Client) -> None:
    """Of a principal that may nothing every kind of request is refused, and the refusal names the right and who lacks it."""
    client.put(space_of(client), hashes_of(3), b"", records_of(3))
    before = daemon.call(daemon.engine.counters.as_dict)
    refused = answers(daemon, Principal(7, 12, frozenset()), *of_each_kind())
    assert [answer.code for answer in refused] == ["not_allowed"] * len(KINDS)  # type: ignore[union-attr]
    last = refused[list(KINDS).index(frames.SetSetting)]
    assert last.message == "setsetting: needs the right to admin, which pid 12, uid 7 has not"  # type: ignore[union-attr]
    assert daemon.call(daemon.engine.counters.as_dict) == before


@pytest.mark.parametrize("right", sorted(EVERYTHING))
def test_a_right_opens_its_kinds(daemon: Daemon, right: Access) -> None:
    """Who has one right is served what needs it, and nothing else. Two rights open nothing on the socket."""
    served: dict[Access, frames.Request] = {
        "read": frames.Ping(),
        "write": frames.Fill([]),
        "view": frames.Live(),
        "admin": frames.Record(),
    }
    given = answers(daemon, Principal(7, 12, frozenset({right})), *served.values())
    codes = [getattr(answer, "code", "") for answer in given]
    assert codes == ["" if each == right else "not_allowed" for each in served]


def test_who_may_come_in_by_the_socket() -> None:
    """Root and our own user may everything; anybody else nothing."""
    assert local(0, 1).may == local(os.geteuid(), 1).may == EVERYTHING
    assert not local(os.geteuid() + 1, 1).may
