"""What is told of requests as they go: how long they took, and who is here."""

from __future__ import annotations

import logging

import pytest

from kvstore.client import Client, Refused
from tests.door.conftest import RECORD_BYTES, hashes_of, records_of, space_of
from tests.door.daemon import Daemon
from tests.door.test_lost import demoted, with_nvme

WAIT_S = 0.1
__all__ = ["with_nvme"]  # a fixture


def test_every_request_is_in_a_histogram(daemon: Daemon, client: Client) -> None:
    """As many durations as requests of each kind were answered, refused ones included; a Live request is not in its own answer."""
    space, hashes, records = space_of(client), hashes_of(8), records_of(8)
    client.put(space, hashes, b"", records)
    for _ in range(3):
        client.lookup([space], hashes)
    client.get(space, hashes, [bytearray(RECORD_BYTES) for _ in hashes])
    with pytest.raises(Refused):
        client.check()
    client.ping()  # answered behind everything that was sent before
    client.live()
    told = client.live()
    counted = daemon.call(lambda: daemon.door.counters["frames"])
    times = daemon.call(daemon.door.api.times_by_name)
    assert counted["Lookup"] == 3 and counted["Check"] == 1 and counted["Live"] == 2
    assert {name: histogram["count"] for name, histogram in times.items()} == {  # type: ignore[index]
        kind.lower(): count for kind, count in counted.items()
    }
    assert sum(told["tokens"][0]["tokens"].values()) == 3 * 8 * 16
    assert told["tokens"][0]["bytes"]["loaded"] == 8 * RECORD_BYTES


def test_a_wait_for_a_slower_tier_is_part_of_the_time(with_nvme: Daemon) -> None:
    """An acquire that waits for a device is as long as its client had to wait; the load is counted when it came back."""
    with Client(with_nvme.socket_path, timeout_s=10) as client:
        space, hashes = demoted(with_nvme, client)
        with client.acquire(space, hashes, wait_s=WAIT_S) as lease:
            assert lease.pending
        told = client.live()["latencies"]
        assert (told["load"]["nvme"]["count"], told["store"]["nvme"]["count"]) == (0, 1)
        with_nvme.call(with_nvme.io.run)
        told = client.live()["latencies"]
        assert 1 <= told["load"]["nvme"]["count"] <= 2 and told["load"]["nvme"]["sum_s"] >= WAIT_S
    times = with_nvme.call(with_nvme.door.api.times_by_name)
    assert times["acquire"]["sum_s"] >= WAIT_S  # type: ignore[index]


def engines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.message.startswith("an engine")]


def test_one_line_when_an_engine_comes_and_one_when_it_leaves(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    """Several connections and namespaces of one process are one engine; the lines say who it is and what it did."""
    caplog.set_level(logging.INFO, logger="kvstore.door")
    with (
        Client(daemon.socket_path, timeout_s=20, label="first") as first,
        Client(daemon.socket_path, timeout_s=20, label="second") as second,
    ):
        spaces = [(client, space_of(client, name)) for client in (first, second) for name in ("a", "b")]
        for client, space in spaces:
            client.lookup([space], hashes_of(2))
    while daemon.call(lambda: len(daemon.door.connections)):
        pass
    assert engines(caplog) == ["an engine is here", "an engine is gone"]
    here, gone = (r for r in caplog.records if r.message.startswith("an engine"))
    facts = ("engine", "model", "tenant", "record", "block_tokens", "columns")
    told = {name: getattr(here, name) for name in facts}
    assert told["engine"].startswith("first (pid ") and told["record"] == "64 KiB" and told["columns"] == 1
    assert gone.engine == told["engine"] and gone.requests == 8 and gone.seconds >= 0  # type: ignore[attr-defined]


def test_tools_leave_no_line(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    """Who registers no namespace is no engine, whether it maps the arena or not."""
    caplog.set_level(logging.INFO, logger="kvstore.door")
    for attach in (False, True):
        with Client(daemon.socket_path, timeout_s=20, label="tool", attach=attach) as client:
            client.status()
    while daemon.call(lambda: len(daemon.door.connections)):
        pass
    assert engines(caplog) == []
