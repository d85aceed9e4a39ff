"""docs/upgrade.md: its numbers are the code's, and what it says of other formats is what a start does."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client
from kvstore.daemon.data_dir import DATA_DIR_FORMAT
from kvstore.protocol.frames import PROTOCOL_VERSION
from tests.cli.test_service import put
from tests.running import TIMEOUT_S, Daemon, Place, environment
from tests.web.asked import until
from tiers.dram.arena_files import ARENA_VERSION
from tiers.nvme.device_home import DEVICE_VERSION
from tiers.packs.packs import PACK_MAGIC

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/upgrade.md").read_text(encoding="utf-8")
# Read, as importing it imports vLLM.
CONNECTOR = (ROOT / "connectors/vllm/identity/namespace.py").read_text(encoding="utf-8")
VERSION_AT = 8  # behind the magic of an arena's table

Serve = Callable[..., Daemon]


def test_the_formats_are_those_of_the_code() -> None:
    """Each format's number on the page is the constant that the code writes."""
    stated = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|", PAGE, re.MULTILINE))
    assert stated["data directory"] == str(DATA_DIR_FORMAT)
    assert stated["arena (DRAM)"] == str(ARENA_VERSION)
    assert stated["NVMe directory"] == str(DEVICE_VERSION)
    assert stated["protocol with engines"] == str(PROTOCOL_VERSION)
    assert re.findall(r"^CONNECTOR_FORMAT = (\d+)", CONNECTOR, re.MULTILINE) == [
        stated["connector's records"]
    ]
    assert stated["packs in a region's bucket"] == f"`{PACK_MAGIC.decode().strip()}`"


@pytest.fixture
def stopped(place: Place, serve: Serve) -> Place:
    """A place where a daemon has been."""
    daemon = serve(place, *place.with_nvme())
    put(daemon.socket)  # an empty arena goes at a stop
    assert daemon.stop() == 0
    return place


def raise_version(path: Path, key: str, by: int) -> None:
    found: dict[str, Any] = json.loads(path.read_text())
    path.write_text(json.dumps({**found, key: found[key] + by}))


def refused_start(place: Place) -> tuple[int, str]:
    """Exit code and last line of a start that is refused."""
    run = subprocess.run(
        [sys.executable, "-m", "kvstore", "serve", *place.with_nvme()],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment(),
    )
    return run.returncode, run.stderr.strip().splitlines()[-1]


def test_a_newer_data_directory_is_refused_and_not_touched(stopped: Place) -> None:
    """With a data directory of a later format the daemon exits with code 2 and leaves every file as it is."""
    mark = stopped.data_dir / "kvstore-data.json"
    raise_version(mark, "format", 1)
    before = mark.read_bytes()
    code, line = refused_start(stopped)
    assert code == 2 and "use the version that made it" in line
    assert mark.read_bytes() == before


def test_a_newer_nvme_directory_is_left_alone(stopped: Place, serve: Serve) -> None:
    """An NVMe directory of a later format stays as it is, with one line in the log, and the daemon serves without it."""
    marker = stopped.path / "nvme0/kvstore.json"
    raise_version(marker, "version", 1)
    before = marker.read_bytes()
    daemon = serve(stopped, *stopped.with_nvme())
    with Client(daemon.socket, attach=False) as client:
        while client.status()["adopting"]:
            pass
        said = f"this program reads {DEVICE_VERSION}"
        until(
            lambda: said in daemon.log(), "it is one of the problems, which are looked for every few seconds"
        )
    assert daemon.stop() == 0
    assert daemon.log().count(said) == 1
    assert marker.read_bytes() == before


def test_an_older_nvme_directory_starts_cold(stopped: Place, serve: Serve) -> None:
    """An NVMe directory of an earlier format is begun anew, with one warning, and the daemon serves."""
    raise_version(stopped.path / "nvme0/kvstore.json", "version", -1)
    daemon = serve(stopped, *stopped.with_nvme())
    assert daemon.stop() == 0  # each directory is opened by a thread of its own
    assert daemon.log().count(f"has format version {DEVICE_VERSION - 1}") == 1


@pytest.mark.parametrize("by", [-1, 1])
def test_another_arena_is_replaced(stopped: Place, serve: Serve, by: int) -> None:
    """An arena of an earlier or later format is replaced, with one warning, and the daemon serves."""
    (table,) = (stopped.path / "shm").glob("kvstore-*.table")
    with open(table, "r+b") as file:
        file.seek(VERSION_AT)
        file.write(struct.pack("<I", ARENA_VERSION + by))
    log = serve(stopped, *stopped.with_nvme()).log()
    assert log.count(f"format version {ARENA_VERSION + by}") == 1
