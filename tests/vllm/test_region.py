"""A prompt computed by an engine on one node is hit by an engine on a node that starts with nothing: through the bucket of
their region, and through a mirror in another one."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.client import Client
from tests.region.mirrors import mirrors
from tests.region.regions import arguments, init, regions_file, status, until
from tests.running import Daemon, Place, kvstore
from tests.vllm.conftest import prompt, totals
from tests.vllm.engines import EngineHost

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPT = prompt(1, 530)
DURABLE_TOKENS = 512  # whole granules


RULES = '[[rules]]\nfrom = ["na"]\nto = ["eu"]'


def node(path: Path, file: Path, serve: Callable[..., Daemon], region: str = "na") -> Daemon:
    path.mkdir()
    return serve(Place(path), *arguments(Place(path), file, region, "--set=durable.seen_times=1"))


def test_a_fresh_node_hits_what_another_computed(
    host: EngineHost, serve: Callable[..., Daemon], tmp_path: Path
) -> None:
    """The first node is gone, memory and all; the same greedy tokens come out, and 512 of 530 prompt tokens were not computed."""
    file = regions_file(tmp_path, "na")
    init(file, "na")
    first = node(tmp_path / "first", file, serve)
    host.start(first.socket)
    expected = host.generate([PROMPT])
    assert expected.cached == [0]
    with Client(str(first.socket), timeout_s=5.0) as client:
        until(lambda: status(client)["blocks"] == DURABLE_TOKENS // 32)
    first.stop(signal.SIGKILL)
    shutil.rmtree(tmp_path / "first")
    second = node(tmp_path / "second", file, serve)
    with Client(str(second.socket), timeout_s=5.0) as client:
        until(lambda: status(client).get("blocks") == DURABLE_TOKENS // 32)
    host.start(second.socket)
    again = host.generate([PROMPT])
    assert (again.tokens, again.cached) == (expected.tokens, [DURABLE_TOKENS])
    assert totals(second)["shared"] == DURABLE_TOKENS
    assert host.metrics().get("hook_errors", 0) == 0


def test_another_region_hits_what_na_computed_and_na_is_gone(
    host: EngineHost, serve: Callable[..., Daemon], tmp_path: Path
) -> None:
    """Daemon, mirror and bucket of NA are off when a fresh node in EU is asked: the same tokens, 512 of 530 not computed."""
    file = regions_file(tmp_path, "na", "eu", rules=RULES)
    init(file, "na", "eu")
    first = node(tmp_path / "first", file, serve)
    host.start(first.socket)
    expected = host.generate([PROMPT])
    assert expected.cached == [0]
    with Client(str(first.socket), timeout_s=5.0) as client:
        until(lambda: status(client)["blocks"] == DURABLE_TOKENS // 32)
        durable_bytes = status(client)["bytes"]
    with mirrors(tmp_path) as mirror:
        mirror(file)
        until(lambda: copied_bytes(file) == durable_bytes, 60.0)
    first.stop(signal.SIGKILL)
    shutil.rmtree(tmp_path / "na")
    second = node(tmp_path / "second", file, serve, "eu")
    with Client(str(second.socket), timeout_s=5.0) as client:
        until(lambda: status(client).get("blocks") == DURABLE_TOKENS // 32)
    host.start(second.socket)
    again = host.generate([PROMPT])
    assert (again.tokens, again.cached) == (expected.tokens, [DURABLE_TOKENS])
    assert totals(second)["shared"] == DURABLE_TOKENS
    assert host.metrics().get("hook_errors", 0) == 0


def copied_bytes(file: Path) -> int:
    """How much the mirror says that it brought to eu."""
    told = kvstore("region", "status", "eu", "--regions", file, "-o", "json")
    [pair] = json.loads(told.stdout)["mirrors"]
    copied: int = pair["copied_bytes"]
    return copied
