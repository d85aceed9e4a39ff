"""The answers of a daemon have the fields that are described, all of them and no others."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kvstore.client import Client
from kvstore.protocol import answers
from tests.running import Daemon, Place


def of(kind: Any, answer: Any) -> Any:
    """The same, of the fields of this kind only. Raises msgspec.ValidationError where one is missing, or another type."""
    return msgspec.convert(answer, kind)


def test_answers_are_as_described(place: Place, serve: Callable[..., Daemon], tmp_path: Path) -> None:
    """Of a daemon with NVMe, a write budget, events, rules and hits: `kvstore.protocol.answers` says what they are."""
    options = (
        f"--set=nvme.directories={tmp_path / 'nvme'}",
        "--set=nvme.capacity_bytes=64MiB",
        "--set=nvme.write_bytes_per_day=1GiB",
        f"--set=events.endpoint=ipc://{tmp_path / 'events'}",
    )
    (tmp_path / "nvme").mkdir()
    serve(place, *place.arguments, *options)
    with Client(place.socket, timeout_s=20) as client:
        space = client.namespace(b"n" * 16, 4096, 32, 16, {"model": "m", "tenant": "acme"})
        hashes = [bytes([number]) * 32 for number in range(4)]
        assert client.put(space, hashes, b"", [bytes(4096)] * 4) == 4
        assert client.lookup([space], hashes, ticket=1, tokens=70) == 4
        client.get(space, hashes, [bytearray(4096) for _ in hashes])
        client.pin(hashes[3])
        client.set_ttl(3600.0, tenant="acme")
        client.set_quota(1 << 20, None, tenant="acme")
        for kind, answer in (
            (answers.Status, client.status()),
            (answers.Live, client.live()),
            (answers.Report, client.report(time.time() - 7200)),
            (answers.Retention, client.retention()),
            (list[answers.Namespace], client.list_namespaces()),
        ):
            assert of(kind, answer) == answer
        status, live, retention = client.status(), client.live(), client.retention()
    assert status["events"] and status["write_budget"] and len(status["tiers"]) == 2 and status["breakers"]
    assert live["tokens"] and live["minutes"] and live["prefixes"] and live["sessions"]
    assert retention["pins"] and retention["ttls"] and retention["quotas"] and retention["tenants"]
