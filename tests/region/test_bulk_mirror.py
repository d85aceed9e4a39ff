"""`kvstore mirror` with `copier = "juicefs"`: the real program fetches large sets, and nothing depends on it."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from replication.announced import Announced
from replication.constants import BULK_PACKS_MIN
from replication.feed import FeedWriter
from tests.juicefs import real_juicefs, running
from tests.objects import S3Server
from tests.region.mirrors import StartMirror, mirrors
from tests.region.regions import S3_KEYS, init, regions_file, until
from tests.region.test_mirror_process import RULES, bucket, contents, told
from tests.running import TIMEOUT_S, kvstore
from tiers.checksum import digest
from tiers.namespace_spec import NamespaceSpec
from tiers.pack_io import put_pack
from tiers.packs import PackHeader

PACKS = 3 * BULK_PACKS_MIN
SPEC = NamespaceSpec(b"tests of bulk copies".ljust(16)[:16], 4096, 16, 16, {"model": "a model", "tenant": ""})


@pytest.fixture(params=["file", "s3"])
def regions(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A file with the regions na and eu; juicefs is on PATH, credentials are in the environment."""
    for name, value in S3_KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{real_juicefs(tmp_path_factory.mktemp('bin'))}:{os.environ['PATH']}")
    s3: S3Server | None = request.getfixturevalue("s3_server") if request.param == "s3" else None
    file = regions_file(tmp_path, "na", "eu", s3=s3, rules=f'{RULES}\ncopier = "juicefs"')
    init(file, "na", "eu")
    return file


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[StartMirror]:
    with mirrors(tmp_path) as start:
        yield start


async def _make(file: Path, seed: str, count: int) -> list[str]:
    objects = bucket(file, "na")
    writer = FeedWriter(objects, digest(seed.encode()).hex()[:16], time.time, random.Random())
    await writer.open()
    packs = []
    for number in range(count):
        records = [
            digest(f"{seed} {number} {index}".encode()) * (SPEC.record_bytes // 16) for index in range(2)
        ]
        hashes = [digest(record[:16]) for record in records]
        header = PackHeader(SPEC, b"", b"".join(hashes), b"".join(map(digest, records)))
        packs.append(await put_pack(objects, header, records))
    for start in range(0, count, 200):
        await writer.announce([Announced(pack, int(time.time())) for pack in packs[start : start + 200]])
    return [pack.name for pack in packs]


def log(tmp_path: Path) -> str:
    return (tmp_path / "mirror.log").read_text()


@pytest.mark.slow
def test_a_large_set_is_fetched_and_believed_only_after_it_was_compared(
    tmp_path: Path, mirror: StartMirror, regions: Path
) -> None:
    """Hundreds of packs come through juicefs, byte by byte what they were; one of the same size that rotted does not, and is
    told. What was fetched is removed. It works on after kill -9, which leaves no juicefs behind."""
    names = asyncio.run(_make(regions, "first", PACKS))
    rotten = bytearray(contents(regions, "na")[names[7]])
    rotten[-1] ^= 1
    asyncio.run(bucket(regions, "na").put(names[7], bytes(rotten)))
    process = mirror(regions)
    until(lambda: len(contents(regions, "eu")) == PACKS - 1, 120.0)
    until(lambda: told(regions)[1]["failed"] == 1, 60.0)
    there = contents(regions, "na")
    assert contents(regions, "eu") == {name: there[name] for name in names if name != names[7]}
    assert "fetched in bulk" in log(tmp_path), log(tmp_path)
    fetched = tmp_path / "mirror" / "mirror" / "na" / "bulk"
    until(lambda: not [path for path in fetched.rglob("packs/*/*") if path.is_file()])
    process.kill()
    process.wait(TIMEOUT_S)
    until(lambda: not running("/packs/"))
    asyncio.run(_make(regions, "second", PACKS))
    asyncio.run(bucket(regions, "na").put(names[7], bytes(rotten[:-1]) + bytes([rotten[-1] ^ 1])))
    process = mirror(regions)
    until(lambda: told(regions)[0] == 0 and told(regions)[1]["copied_packs"] == 2 * PACKS, 120.0)
    assert contents(regions, "eu") == contents(regions, "na")
    assert log(tmp_path).count("fetched in bulk") >= 2
    process.terminate()
    assert process.wait(TIMEOUT_S) == 0 and not fetched.exists()


@pytest.mark.slow
@pytest.mark.parametrize("regions", ["file"], indirect=True)
def test_without_the_program_all_is_copied_one_by_one(
    tmp_path: Path, mirror: StartMirror, regions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No juicefs is one line, one that fails another; everything comes all the same."""
    asyncio.run(_make(regions, "first", PACKS))
    monkeypatch.setenv("PATH", str(tmp_path))
    process = mirror(regions)
    until(lambda: told(regions)[0] == 0 and told(regions)[1]["copied_packs"] == PACKS, 120.0)
    assert log(tmp_path).count("there is no juicefs on PATH") == 1 and "Traceback" not in log(tmp_path)
    process.kill()
    process.wait(TIMEOUT_S)
    script = tmp_path / "juicefs"
    script.write_text(
        '#!/bin/sh\ncase "$*" in *--version) echo version 1.4.1;; *--help) echo --files-from;; *) echo "1 <FATAL>: out of luck" >&2; exit 1;; esac\n'
    )
    script.chmod(0o755)
    asyncio.run(_make(regions, "second", PACKS))
    mirror(regions)
    until(lambda: told(regions)[0] == 0 and told(regions)[1]["copied_packs"] == 2 * PACKS, 120.0)
    assert contents(regions, "eu") == contents(regions, "na")
    assert log(tmp_path).count("out of luck") == 1 and "Traceback" not in log(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("regions", ["file"], indirect=True)
def test_what_was_fetched_is_not_believed(
    tmp_path: Path, mirror: StartMirror, regions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that juicefs fetched is damaged before it says that it is done: bytes changed, cut off, empty, or of another
    pack. No such byte is in eu, and all packs are."""
    real = shutil.which("juicefs")
    (tmp_path / "damaging").mkdir()
    script = tmp_path / "damaging" / "juicefs"
    script.write_text(_DAMAGE.format(python=sys.executable, real=real, seen=tmp_path / "seen"))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    asyncio.run(_make(regions, "first", PACKS))
    mirror(regions)
    until(lambda: told(regions)[0] == 0 and told(regions)[1]["copied_packs"] == PACKS, 120.0)
    assert contents(regions, "eu") == contents(regions, "na")
    assert int((tmp_path / "seen").read_text()) >= BULK_PACKS_MIN
    assert "not what its checksum says" in log(tmp_path) and "Traceback" not in log(tmp_path)


_DAMAGE = """#!{python}
import os, pathlib, subprocess, sys
done = subprocess.run(["{real}", *sys.argv[1:]])
paths = sorted(path for path in pathlib.Path("packs").rglob("*") if path.is_file()) if "sync" in sys.argv else []
other = paths[0].read_bytes() if paths else b""
for number, path in enumerate(paths):
    content = path.read_bytes()
    damaged = [content[:-1] + bytes([content[-1] ^ 1]), content[:-1], b"", other][number % 4]
    path.write_bytes(damaged)
if paths:
    pathlib.Path("{seen}").write_text(str(len(paths)))
sys.exit(done.returncode)
"""


def test_what_a_rule_may_say(tmp_path: Path) -> None:
    """Another copier, or juicefs with a rate that it would not keep, is one line."""
    for said, says in (
        ('copier = "rsync"', "allowed"),
        ('bytes_per_s = "1MiB"\ncopier = "juicefs"', 'allowed is "own", or bytes_per_s = 0'),
    ):
        place = tmp_path / str(len(said))
        place.mkdir()
        file = regions_file(place, "na", "eu", rules=f"{RULES}\n{said}")
        done = kvstore("region", "ls", "--regions", file)
        assert done.returncode == 2 and "rules[1].copier" in done.stderr, done.stderr
        assert says in done.stderr or "juicefs" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
