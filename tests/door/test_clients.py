"""Who is connected, hanging up on one, and whose requests were slow, and why."""

from __future__ import annotations

import os
from typing import Any

import pytest

from kvstore.client import Client, Namespace, Refused, Unavailable
from kvstore.door.api import Caller
from kvstore.door.clients import SLOW_KEPT
from kvstore.protocol import frames
from kvstore.security.principals import local
from tests.door.conftest import RECORD_BYTES, hashes_of, records_of, space_of
from tests.door.daemon import Daemon
from tests.door.test_leases import wait_for
from tests.door.test_lost import demoted, with_nvme

__all__ = ["with_nvme"]  # a fixture


def test_each_connection_is_told_with_what_it_did(daemon: Daemon, client: Client) -> None:
    """Pid, uid, name, model, and the requests, blocks, bytes and leases of that connection alone; who leaves is not listed."""
    space, hashes = space_of(client), hashes_of(8)
    client.put(space, hashes, b"", records_of(8))
    with Client(daemon.socket_path, timeout_s=20, label="reads") as other:
        lease = other.acquire(space, hashes[:3])
        assert other.lookup([space], [*hashes, b"x" * 32]) == 8
        writes, reads = client.clients()
        assert (writes["label"], reads["label"]) == ("test", "reads") and writes["id"] < reads["id"]
        for one in (writes, reads):
            assert (one["pid"], one["uid"]) == (os.getpid(), os.geteuid())
            assert (one["model"], one["namespaces"], one["attached"]) == ("model", 1, True)
        assert (writes["stored_bytes"], writes["loaded_bytes"]) == (8 * RECORD_BYTES, 0)
        assert (reads["stored_bytes"], reads["loaded_bytes"]) == (0, 3 * RECORD_BYTES)
        assert (reads["asked_blocks"], reads["hit_blocks"]) == (9, 8)
        assert (reads["leases"], reads["lease_bytes"]) == (1, 3 * RECORD_BYTES)
        assert (writes["leases"], writes["asked_blocks"]) == (0, 0)
        lease.release()
        before = reads["requests"]
        for _ in range(5):
            other.ping()
        assert client.clients()[1]["requests"] >= before + 5
        assert [one["label"] for one in client.live()["sessions"]] == ["test", "reads"]
    wait_for(lambda: [one["label"] for one in client.clients()] == ["test"])


def test_who_is_cut_off_holds_nothing_any_more(daemon: Daemon, client: Client) -> None:
    """Its leases go back, others go on, it may come again under another id, and an id that is gone is not found."""
    space, hashes = space_of(client), hashes_of(4)
    client.put(space, hashes, b"", records_of(4))
    other = Client(daemon.socket_path, label="hangs")
    other.acquire(space, hashes)
    number = client.clients()[1]["id"]
    for session in daemon.engine.sessions:
        session.peer.since_s -= 3600
    told = client.kill_client(number)
    assert (told["label"], told["leases"]) == ("hangs", 1) and told["connected_s"] >= 3600
    blocks = daemon.call(lambda: [b.pins for b in daemon.engine.namespaces.get(0).blocks.walk()])
    assert blocks == [0] * 4 and client.lookup([space], hashes) == 4
    with pytest.raises((Refused, Unavailable)):
        other.ping()
    wait_for(lambda: found_again(other, space, hashes))
    assert client.clients()[-1]["id"] > number
    with pytest.raises(Refused, match="not_found"):
        client.kill_client(number)
    other.close()


def found_again(client: Client, space: Namespace, hashes: list[bytes]) -> bool:
    """Whether it is served again."""
    try:
        return client.lookup([space], hashes) == len(hashes)
    except Unavailable:
        return False


class Slow:
    """A caller of a daemon whose clock is ours, and whose every request is slow."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon, self.api = daemon, daemon.door.api
        self.now_s, self.answers = 100.0, list[frames.Answer]()
        self.api.clock = lambda: self.now_s
        self.holder = self.api.enter(local(0, 11))
        self.caller = Caller(self.api, self.holder, None, "slow", self.answered, lambda: None)
        self.takes_s = 0.0

    def answered(self, answer: frames.Answer) -> None:
        self.answers.append(answer)

    def why(self) -> dict[str, Any]:
        told = self.api.slow.report(self.now_s, self.api.limits.slow_s)
        return dict(told["slow"][0])

    def close(self) -> None:
        self.caller.end()
        self.api.leave(self.holder)


def test_what_waited_for_its_turn_says_so(daemon: Daemon) -> None:
    """A request that lay whole for long before it was begun waited for its turn; pieces that come late did, too; a long prompt
    whose pieces come one after the other is work; and what was quick is not kept."""

    def run() -> None:
        slow = Slow(daemon)
        register = frames.Register(b"t" * 16, RECORD_BYTES, 32, 16, {"model": "m", "tenant": "t"})
        slow.caller.serve(register, 99.95)
        number = slow.answers.pop().namespace  # type: ignore[union-attr]
        assert slow.api.slow.report(slow.now_s, 0.1)["slow"] == []
        slow.api.limits = slow.api.limits._replace(slow_s=0.04)
        slow.caller.serve(frames.Ping(), 99.0)
        assert (slow.why()["why"], slow.why()["waited_s"], slow.why()["request"]) == ("turn", 1.0, "ping")
        for step_s, why in ((0.5, "turn"), (0.001, "work")):
            slow.caller.serve(frames.Residency(number, b"".join(hashes_of(60_000))))
            while slow.caller.has_steps:
                slow.now_s += step_s
                slow.caller.step()
            assert (slow.why()["why"], slow.why()["blocks"], slow.why()["model"]) == (why, 60_000, "m")
        slow.close()

    daemon.call(run)


def test_what_waited_for_a_disk_says_so(with_nvme: Daemon) -> None:
    """An acquire whose blocks are on NVMe, and one that finds DRAM full of what is in use, each with whose it was; the last
    ones are kept, all are counted."""
    with Client(with_nvme.socket_path, timeout_s=10, label="engine 7") as client:
        space, hashes = demoted(with_nvme, client)
        with client.acquire(space, hashes, wait_s=0.2):
            pass
        told = client.slow_requests()
        (one,) = [each for each in told["slow"] if each["request"] == "acquire"]
        assert (one["why"], one["label"], one["pid"]) == ("disk", "engine 7", os.getpid())
        assert one["took_s"] >= 0.2 and one["blocks"] == len(hashes) and one["model"] == "model"
        assert with_nvme.call(lambda: with_nvme.door.counters["slow"]["disk"]) >= 1
        with_nvme.call(with_nvme.io.run)

        def many() -> None:
            api = with_nvme.door.api
            api.limits = api.limits._replace(slow_s=0.0)

        with_nvme.call(many)
        for _ in range(SLOW_KEPT + 10):
            client.ping()
        told = client.slow_requests()
        assert len(told["slow"]) == SLOW_KEPT < told["total"]
