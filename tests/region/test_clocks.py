"""Commands on a machine whose clock is wrong by years: what they judge in a bucket is judged by the clock of its store."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.daemon.config.regions_file import load_regions
from replication.erasure.removed_models import read_removals
from replication.feed.feed import FeedWriter
from replication.formats.announced import Announced
from replication.formats.keeping import store_now_s
from replication.formats.mirror_state import MIRROR_STATE_FORMAT, MIRRORS, MirrorState
from replication.formats.nodes import NODE_FORMAT, Node
from replication.formats.orders import read_orders
from replication.formats.segment import HEAD_FORMAT
from replication.formats.tombstones import Tombstone, bury, read_tombstones
from tests.region.regions import init, regions_file
from tests.replication.audited import make
from tests.running import TIMEOUT_S, environment
from tiers.bucket.objects import Objects

YEAR_S = 365 * 86400.0
RULES = '[[rules]]\nfrom = ["na"]\nto = ["eu"]'
# `python -m kvstore`, told another time than it is.
WRONG = """
import runpy, sys, time
wrong_s, right = float(sys.argv.pop(1)), time.time
time.time, time.time_ns = lambda: right() + wrong_s, lambda: int(1e9 * (right() + wrong_s))
runpy.run_module("kvstore", run_name="__main__")
"""


class Machine:
    """A machine with a clock that is ahead by so much, and a file of the regions na and eu."""

    def __init__(self, file: Path, wrong_s: float) -> None:
        self.file = file
        self.wrong_s = wrong_s

    def run(self, *words: str | Path, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-c", WRONG, str(self.wrong_s), *map(str, words), "--regions", str(self.file)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=environment(),
        )
        assert done.returncode == code, (words, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def document(self, *words: str | Path, code: int = 0) -> Any:
        return json.loads(self.run(*words, "-o", "json", code=code))

    def there(self, work: Callable[[Objects], Awaitable[Any]], region: str = "na") -> Any:
        async def done() -> Any:
            return await work(load_regions(self.file).regions[region].open())

        return asyncio.run(done())


@pytest.fixture(params=[-10 * YEAR_S, 10 * YEAR_S], ids=["behind", "ahead"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    file = regions_file(tmp_path, "na", "eu", rules=RULES)
    init(file, "na", "eu")
    return Machine(file, request.param)


def is_in(at_s: float, days: float) -> bool:
    """Whether a moment is in so many days, to a few minutes."""
    return abs(at_s - time.time() - days * 86400) < 300


def test_models_are_removed_and_published_by_the_store(machine: Machine, tmp_path: Path) -> None:
    """A removal holds for as long as was said, refuses the same revision, and what is published is announced now."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    publish = ("model", "publish", tmp_path / "m", "--name", "m", "--revision", "r", "--region", "na")
    machine.run(*publish)

    async def announced(objects: Objects) -> list[float]:
        names = [info.name async for page in objects.list("heads/") for info in page]
        return [(await HEAD_FORMAT.fetch(objects, name)).at_s for name in names]

    assert all(is_in(at_s, 0) for at_s in machine.there(announced))
    order = machine.document("warm", "na", "--weights", "m", "--wait", "0")["order"]
    assert is_in(order["until_s"], 1)
    [there] = machine.there(lambda objects: read_orders(objects, {})).by_key.values()
    assert is_in(there.made_s, 0) and is_in(there.until_s, 1)
    machine.run("model", "rm", "m@r", "--days", "2", "--region", "na")
    [removal] = machine.there(read_removals).by_key.values()
    assert is_in(removal.removed_s, 0) and is_in(removal.watched_until_s, 2)
    assert "was removed by" in machine.run(*publish, code=1)


def test_ages_and_lives_are_by_the_store(machine: Machine) -> None:
    """A pack that lives is read, and its orphan restored for a week; a mirror and a node that told of themselves just now are well; a
    tombstone of yesterday's is in force, and one that is put holds for as long as was said."""
    lives, lost = make("lives"), make("lost")

    async def fill(objects: Objects) -> None:
        now_s = await store_now_s(objects)
        writer = FeedWriter(objects, "a" * 16, lambda: now_s, random.Random())
        for one in (lives, lost):
            await objects.put(one.pack.name, one.content)
        await writer.announce([Announced(lives.pack, kept_until_s=int(now_s) + 3600)])
        await NODE_FORMAT.put(objects, Node(writer="b" * 16, at_s=now_s, dram_bytes=1, nvme_bytes=0))
        await bury(objects, Tombstone(tenant="gone", watched_until_s=int(now_s) + 3600, serial=1))

    machine.there(fill)
    facts = machine.document("region", "verify", "na", "--deep")
    assert (facts["ok"], facts["read_packs"], facts["announced_packs"]) == (True, 1, 1)
    assert [node["state"] for node in machine.document("region", "nodes", "na")["nodes"]] == ["ok"]
    assert [one["tenant"] for one in machine.document("region", "erase", "--ls")["tombstones"]] == ["gone"]

    async def tell(objects: Objects) -> None:
        state = MirrorState(source="na", at_s=await store_now_s(objects), oldest_age_s=1.0)
        await objects.put(MIRRORS + "na", MIRROR_STATE_FORMAT.seal(state))

    machine.there(tell, "eu")
    [mirror] = machine.document("region", "status", "eu")["mirrors"]
    assert (mirror["state"], mirror["heartbeat_age_s"] < 300) == ("ok", True)
    erase = ("region", "erase", "--tenant", "other", "--force", "--yes", "--days", "3", "--region", "na")
    assert is_in(machine.document(*erase)["watched_until_s"], 3)
    stones = {one.tenant: one for one in machine.there(read_tombstones).by_key.values()}
    assert is_in(stones["other"].watched_until_s, 3) and stones["other"].serial >= 1000 * (time.time() - 300)
