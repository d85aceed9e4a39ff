"""A prompt computed by an engine on one node is hit by an engine on a node that starts with nothing, through the bucket."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.client import Client
from tests.region.regions import arguments, init, regions_file, status, until
from tests.running import Daemon, Place
from tests.vllm.conftest import prompt, totals
from tests.vllm.engines import EngineHost

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPT = prompt(1, 530)
DURABLE_TOKENS = 512  # whole granules


def node(path: Path, file: Path, serve: Callable[..., Daemon]) -> Daemon:
    path.mkdir()
    return serve(Place(path), *arguments(Place(path), file, "na", "--set=durable.seen_times=1"))


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
