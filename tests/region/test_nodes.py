"""`kvstore region nodes`: all nodes of a region, by what each wrote into its bucket."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore.daemon.config.regions_file import load_regions
from replication.constants import NODE_SILENT_S
from replication.formats.nodes import NODE_FORMAT, NODES, Condition, Node, Trouble
from tests.region.regions import arguments, init, regions_file
from tests.running import Daemon, Place, kvstore
from tests.web.asked import get, until, url_of


def nodes(file: Path, *more: str) -> tuple[int, dict[str, Any]]:
    done = kvstore("region", "nodes", *more, "--regions", file, "-o", "json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_daemon_is_seen_from_its_bucket(place: Place, serve: Callable[..., Daemon], tmp_path: Path) -> None:
    """A daemon that runs is there by its host's name with its figures; one that has stopped long ago is silent, one that told of a
    problem has it, one of last month is only counted; exit code 1 while one of them is not well. The page has the same."""
    file = regions_file(tmp_path, "na", "eu")
    init(file, "na", "eu")
    url = url_of(serve(place, *arguments(place, file, "na", "--set=web.listen=127.0.0.1:0")))
    deadline = time.monotonic() + 30
    while not (told := nodes(file, "na"))[1]["nodes"] and time.monotonic() < deadline:
        time.sleep(0.2)
    code, document = told
    (node,) = document["nodes"]
    assert (code, node["region"], node["host"], node["state"]) == (0, "na", socket.gethostname(), "ok"), node
    assert node["dram_bytes"] == 16 << 20 and node["nvme_bytes"] == 0 and 0 <= node["age_s"] < 30
    assert (node["asked_tokens"], node["hit_ratio"], node["problems"]) == (0, None, [])
    shown = until(lambda: get(url, "/nodes.json").json()["nodes"], "the page has asked")
    assert [one["writer"] for one in shown] == [node["writer"]]

    async def others() -> None:
        objects = load_regions(file).regions["na"].open()
        about = Condition(
            host="gpu-8", version="1", up_s=5.0, sessions=2, dram_used_bytes=512, nvme_used_bytes=0, asked_tokens=1000,
            hit_tokens=700, problems=[Trouble("disk", "nvme1", "problem", "is full", time.time() - 9)],
        )  # fmt: skip
        for name, ago_s, told in (
            ("a" * 16, 1.0, about),
            ("b" * 16, NODE_SILENT_S + 60, None),
            ("c" * 16, 1e7, None),
        ):
            await NODE_FORMAT.put(
                objects,
                Node(writer=name, at_s=time.time() - ago_s, dram_bytes=1024, nvme_bytes=0, condition=told),
            )

    asyncio.run(others())
    code, document = nodes(file)
    states = {one["writer"]: one["state"] for one in document["nodes"] if one["writer"] != node["writer"]}
    assert (code, states, document["forgotten"]) == (1, {"a" * 16: "problems", "b" * 16: "silent"}, 1)
    (bad,) = [one for one in document["nodes"] if one["host"] == "gpu-8"]
    assert (bad["hit_ratio"], bad["problems"][0]["text"]) == (0.7, "is full")
    done = kvstore("region", "nodes", "na", "--regions", file)
    assert "  gpu-8: disk nvme1: is full\n" in done.stdout and "50.0 % of 1 KiB" in done.stdout
    assert (
        f"  {'b' * 16}: nothing was heard of it for 26" in done.stdout  # minutes, and some seconds
        and "1 node of which" in done.stdout
    )
    for words, says, code in (
        (["eu"], "nodes of acme", 0),
        (["mars"], "mars", 2),
        (["na", "--node", "x:1"], "--node", 2),
    ):
        done = kvstore("region", "nodes", *words, "--regions", file)
        assert (done.returncode, says in done.stdout + done.stderr) == (code, True), done.stderr


def test_a_region_that_is_away_hides_no_other(tmp_path: Path) -> None:
    """Of several regions the bucket of one is away, or is none: what the others have is shown, and the exit code says which it
    was; so do the list of regions, the status of those that have no mirror, and what is erased or would be."""
    file = regions_file(tmp_path, "na", "eu")
    init(file, "na", "eu")
    objects = load_regions(file).regions["na"].open()
    asyncio.run(NODE_FORMAT.put(objects, Node(writer="a" * 16, at_s=time.time(), dram_bytes=1, nvme_bytes=0)))
    assert kvstore("region", "status", "--regions", file).returncode == 0
    here = f'url = "file://{tmp_path / "eu"}"'
    for there, expected, says in (
        ("url = 's3://eu/kv'\nendpoint = 'http://127.0.0.1:1'", 4, "s3://eu/kv"),
        (f"url = 'file://{tmp_path / 'gone'}'", 1, "no such directory"),
    ):
        file.write_text(file.read_text().replace(here, there))
        here = there
        code, document = nodes(file)
        (unread,) = document["unread"]
        assert (code, unread["region"], says in unread["problem"]) == (expected, "eu", True), unread
        assert [node["writer"] for node in document["nodes"]] == ["a" * 16]
        done = kvstore("region", "nodes", "--regions", file)
        assert f"eu: {unread['problem']}" in done.stdout and "a" * 16 in done.stdout
        alone = kvstore("region", "nodes", "eu", "--regions", file)
        assert (alone.returncode, says in alone.stderr, alone.stdout) == (expected, True, "")
        done = kvstore("region", "ls", "--regions", file, "-o", "json")
        told = json.loads(done.stdout)
        assert (done.returncode, told["away"]) == (expected, ["eu"] if expected == 4 else [])
        assert told["regions"][0]["state"] == "ready" and says in told["regions"][1]["state"]
        done = kvstore("region", "status", "--regions", file, "-o", "json")
        told = json.loads(done.stdout)
        assert told["away"] == (["eu"] if expected == 4 else [])
        for words in (("--ls",), ("--tenant", "a", "--dry-run", "--force")):
            erased = kvstore("region", "erase", *words, "--regions", file, "-o", "json")
            document = json.loads(erased.stdout)
            assert (erased.returncode, document["away"]) == (expected, ["eu"] if expected == 4 else [])
        na, eu = told["keepers"]
        assert (done.returncode, "problem" in na, says in eu["problem"]) == (expected, False, True)


def test_a_node_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """What one of two nodes wrote is cut off: it is named, with its region and why, and that is no success. Nobody says that a tenant
    is known nowhere while it could be that node's; one that is damaged for a week is only counted."""
    file = regions_file(tmp_path, "na", "eu")
    init(file, "na", "eu")
    objects = load_regions(file).regions["na"].open()
    for name in "ab":
        node = Node(writer=16 * name, at_s=time.time(), dram_bytes=1, nvme_bytes=0)
        asyncio.run(NODE_FORMAT.put(objects, node))
    path = tmp_path / "na" / NODES / (16 * "b")
    path.write_bytes(path.read_bytes()[:-3])
    for words in ([], ["na"]):
        code, document = nodes(file, *words)
        (unread,) = document["unread"]
        assert (code, unread["region"], unread["writer"]) == (1, "na", 16 * "b"), document
        assert "checksum" in unread["problem"] and 0 <= unread["age_s"] < 60
        assert [node["writer"] for node in document["nodes"]] == [16 * "a"]
    done = kvstore("region", "nodes", "--regions", file)
    assert f"na: node {16 * 'b'} cannot be read: {unread['problem']}\n" in done.stdout
    done = kvstore("region", "erase", "--tenant", "ghost", "--yes", "--regions", file)
    assert (done.returncode, f"na: node {16 * 'b'} cannot be read" in done.stderr) == (1, True), done.stderr
    os.utime(path, (0, 0))
    code, document = nodes(file)
    assert (code, document["unread"], document["forgotten"]) == (0, [], 1)
