"""Checks of what the daemon says of itself, with a real answer in which one thing is bad."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client
from kvstore.tools.doctor import service, software
from kvstore.tools.doctor.examine import OfDaemon
from tests.doctor.looked import case
from tests.running import Daemon, Place

Status = dict[str, Any]


@pytest.fixture
def status(place: Place, serve: Callable[..., Daemon]) -> Status:
    """Of a daemon that is well, with two disks."""
    serve(place, *place.with_nvme())
    with Client(place.socket, 10, label="test", attach=False) as client:
        return client.status()


def problem(s: Status) -> None:
    s["problems"] = [
        {"kind": "left_alone", "subject": "nvme1", "level": "problem", "text": "/mnt/b/kvstore: Input/output error",
         "fix": "mend it", "since_s": s["daemon"]["now_s"] - 90, "count": 3}
    ]  # fmt: skip


def corrupt(s: Status) -> None:
    s["counters"]["corrupt_nvme"] = 3


def corrupt_in_bucket(s: Status) -> None:
    s["counters"]["corrupt_shared"] = 2


def wrong_peer(s: Status) -> None:
    s["door"]["refused"] = {"wrong_peer": 4}


def old_daemon(s: Status) -> None:
    s["daemon"]["version"] = "0.0.9"


def old_engine(s: Status) -> None:
    s["namespaces"] = [space(model="m", vllm="0.9", hash="sha256")]


def two_formats(s: Status) -> None:
    s["namespaces"] = [space(model="m", hash="sha256", format=n) for n in "12"]


def space(**fields: str) -> dict[str, Any]:
    return {"fields": fields, "differs": {}, "asked_blocks": 0, "hit_blocks": 0, "users": 1}


@pytest.mark.parametrize(
    ("spoil", "check", "level", "says"),
    [
        (
            problem,
            service.problems,
            "problem",
            "nvme1: /mnt/b/kvstore: Input/output error (for 90 s, 3 times)",
        ),
        (corrupt, service.damage, "note", "3 blocks of nvme came back with other bytes"),
        (corrupt_in_bucket, service.damage, "note", "2 blocks of a bucket came back with other bytes"),
        (wrong_peer, service.refusals, "warning", "wrong_peer, 4 times"),
        (old_engine, service.engines, "warning", "an engine is vLLM 0.9"),
        (two_formats, service.engines, "warning", "differ in format of the connector only"),
    ],
)
def test_what_is_bad_is_found(
    status: Status, spoil: Callable[[Status], None], check: OfDaemon, level: str, says: str
) -> None:
    """A daemon that is well has no such finding; one thing bad has exactly one, on the level that fits."""
    assert not [f for f in check(status) if says in f.found]
    bad = copy.deepcopy(status)
    spoil(bad)
    (found,) = [f for f in check(bad) if says in f.found]
    assert found.level == level and found.action


def test_a_limit_may_be_any(status: Status) -> None:
    """A model that does not fit is beyond a limit, too: nobody is sent to look for lost leases."""
    (found,) = service.refusals({**status, "door": {**status["door"], "refused": {"limit_exceeded": 1}}})
    assert "the log names the limit" in found.action and "models.dram_bytes" in found.action


def test_a_cold_kind_of_engine_is_found_beside_a_warm_one(place: Place, serve: Callable[..., Daemon]) -> None:
    """Two engines of one model and tenant, of which one has another dtype: what differs is told with both values in status and
    doctor, and that the one finds nothing where the other finds all is a problem. Another model, and an adapter, are no kinds."""
    serve(place)
    hashes = [bytes([n]) * 32 for n in range(100)]

    with Client(place.socket, 10, label="warm") as warm, Client(place.socket, 10, label="cold") as cold:
        one, other, adapter, model = (
            warm.namespace(name.encode() * 16, 16384, 32, 16, {"model": "m", "tenant": "t", **fields})
            for name, fields in (
                ("a", {"dtype": "bfloat16"}),
                ("b", {"dtype": "float8"}),
                ("c", {"dtype": "bfloat16", "adapter": "poems"}),
                ("d", {"model": "n"}),
            )
        )
        warm.put(one, hashes, b"", [bytes(16384)] * 100)
        cold.lookup([adapter], hashes), cold.lookup([model], hashes)
        deadline = time.monotonic() + 40
        while not (problems := (status := warm.status())["problems"]) and time.monotonic() < deadline:
            assert warm.lookup([one], hashes) == 100 and cold.lookup([other], hashes) == 0
            time.sleep(0.1)
    holding, _ = status["holdings"]
    assert holding["differs"] == [{"field": "dtype", "values": ["bfloat16", "float8"]}]
    assert (holding["kinds"], holding["dram_bytes"], holding["blocks"]) == (2, 100 * 16384, 100)
    differs = {
        n["fields"].get("dtype"): n["differs"] for n in status["namespaces"] if "adapter" not in n["fields"]
    }
    assert differs == {"bfloat16": {"dtype": "bfloat16"}, "float8": {"dtype": "float8"}, None: {}}
    (note,) = service.engines(status)
    assert note.level == "note"
    assert "2 kinds of engines of m, tenant t, differ in dtype: bfloat16 / float8" in note.found
    (problem,) = problems
    assert (problem["kind"], problem["level"]) == ("engines", "warning") and "same settings" in problem["fix"]
    assert problem["subject"] == "m, tenant t, dtype float8"
    assert "with dtype float8 found 0.0 % of" in problem["text"]
    assert "those with dtype bfloat16 100.0 %" in problem["text"]


def test_an_old_daemon_is_found(status: Status, tmp_path: Path) -> None:
    """Its version is another one than that of this command."""
    old_daemon(status)
    (found,) = [f for f in software.versions(case(tmp_path, status=status)) if f.check == "kvstore"]
    assert (found.level, found.action != "") == ("warning", True) and "the daemon is 0.0.9" in found.found
