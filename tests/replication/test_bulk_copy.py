"""Bulk copies by the real juicefs: what is asked for comes and nothing else, whatever goes wrong is told, and nobody is left behind.

JUICEFS=/path/to/juicefs tries another version than that of the package.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from replication import bulk_copy as bulk_module
from replication.bulk_copy import BulkCopy, open_bulk_copy
from replication.errors import BulkCopyFailed, BulkCopyRefused
from replication.jobs import Job, Jobs
from replication.juicefs import address, complaint, copied, find_juicefs
from replication.rules import Rule
from tests.juicefs import real_juicefs, running
from tests.objects import S3Server
from tests.region.proxy import Proxy
from tests.running import ROOT, environment
from tiers.checksum import digest
from tiers.object_options import ObjectOptions
from tiers.object_store import open_objects
from tiers.objects import Objects
from tiers.packs import PACKS

SECRET = "a-secret-that-is-in-no-argument"
SPACES = ("aa" * 16, "bb" * 16)


@pytest.fixture(autouse=True)
def _juicefs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is on PATH, and credentials are in the environment."""
    directory = real_juicefs(tmp_path_factory.mktemp("bin"))
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.delenv("AWS_REGION", raising=False)


class Source:
    """A store with packs in two namespaces, and other things."""

    def __init__(self, url: str, options: ObjectOptions) -> None:
        self.url, self.options = url, options
        self.objects: Objects = open_objects(url, options)
        self.packs = {
            f"{PACKS}{space}/{digest(f'{space} {number}'.encode()).hex()}": random.Random(number).randbytes(
                3000
            )
            for space in SPACES
            for number in range(40)
        }

    async def fill(self) -> None:
        for name, content in self.packs.items():
            await self.objects.put(name, content)
        await self.objects.put("region.json", b"{}")
        await self.objects.put(f"{PACKS}{SPACES[0]}/.leftover.tmp", b"half")
        for name in self.packs:  # of which a name is a part
            await self.objects.put(f"{name}.old", b"old")
            await self.objects.put(f"{PACKS}ab/{name.removeprefix(PACKS)}", b"old")

    def some(self, count: int) -> list[str]:
        return random.Random(1).sample(sorted(self.packs), count)


@pytest.fixture(params=["file", "s3"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    if request.param == "file":
        place = tmp_path / "a place, with %41 signs"
        place.mkdir()
        url, options = f"file://{str(place).replace('%', '%25')}", ObjectOptions()
    else:
        s3: S3Server = request.getfixturevalue("s3_server")
        bucket = f"bulk-{random.SystemRandom().getrandbits(40):010x}"
        s3.make_bucket(bucket)
        url, options = f"s3://{bucket}/kv", ObjectOptions(endpoint=s3.endpoint, allow_http=True)
    made = Source(url, options)
    asyncio.run(made.fill())
    return made


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[Proxy]:
    made = Proxy(s3_server.port)
    yield made
    made.close()


def bulk(source: Source, directory: Path) -> BulkCopy:
    return asyncio.run(open_bulk_copy(source.url, source.options, directory))


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != "names"
    }


def gone(word: str) -> None:
    """Wait until no process has this among its arguments."""
    give_up_s = time.monotonic() + 30.0
    while running(word):
        assert time.monotonic() < give_up_s, "it still runs"
        time.sleep(0.02)


def until(true: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + 60.0
    while not true():
        assert time.monotonic() < give_up_s, "it did not happen"
        time.sleep(0.02)


def stand_in(
    directory: Path, monkeypatch: pytest.MonkeyPatch, lines: str, usage: str = "--files-from FILE"
) -> None:
    """Another juicefs on PATH: a script of which these lines are the sync. The real one is $REAL."""
    directory.mkdir()
    script = directory / "juicefs"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *--version) echo juicefs version 1.4.1; exit;; *--help) echo "{usage}"; exit;; esac\n{lines}\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


def test_what_is_asked_for_comes_and_nothing_else(source: Source, tmp_path: Path) -> None:
    """Packs out of two namespaces come byte by byte; no other pack, no dot file and no marker does; the source stays as it is."""
    copy = bulk(source, tmp_path / "near")
    wanted = source.some(25)
    assert asyncio.run(copy.fetch(wanted, 75_000)) == 25
    assert contents(tmp_path / "near") == {name: source.packs[name] for name in wanted}
    assert bytes(asyncio.run(copy.fetched.get(wanted[0]))) == source.packs[wanted[0]]
    (first, *_) = others = sorted(set(source.packs) - set(wanted))
    assert asyncio.run(copy.fetch([first], 3000)) == 1, "a folder of one pack"
    assert len(contents(tmp_path / "near")) == 26 and len(others) == 55
    copy.close()
    assert not (tmp_path / "near").exists()


def test_a_full_run_fits_an_argument_list(source: Source, tmp_path: Path) -> None:
    """As many names as a run has at most are asked for, of which few are there: those come."""
    copy = bulk(source, tmp_path / "near")
    absent = [f"{PACKS}{SPACES[0]}/{digest(str(number).encode()).hex()}" for number in range(1014)]
    assert asyncio.run(copy.fetch([*absent, *source.some(10)], 0)) == 10


def test_a_source_that_is_not_there_is_told_and_not_made(tmp_path: Path, s3_server: S3Server) -> None:
    """A directory that is away, a bucket that does not exist, a store that does not answer, and an empty one: each is
    one line; juicefs itself would end well for the first and the last one, and make the first."""
    (tmp_path / "empty" / "packs").mkdir(parents=True)
    far = ObjectOptions(endpoint=s3_server.endpoint, allow_http=True)
    dead = ObjectOptions(endpoint="http://127.0.0.1:9", allow_http=True)
    for url, options, says in (
        (f"file://{tmp_path / 'away'}", ObjectOptions(), "there is no such directory"),
        (f"file://{tmp_path / 'empty'}", ObjectOptions(), "found none of 1 packs"),
        ("s3://no-such-bucket/kv", far, "NoSuchBucket"),
        ("s3://no-such-bucket/kv", dead, "connection refused"),
    ):
        copy = asyncio.run(open_bulk_copy(url, options, tmp_path / "near"))
        with pytest.raises(BulkCopyFailed, match=says) as caught:
            asyncio.run(copy.fetch([f"{PACKS}{SPACES[0]}/{'0' * 32}"], 1))
        assert "\n" not in str(caught.value) and SECRET not in str(caught.value)
    assert not (tmp_path / "away").exists()


def test_an_end_that_is_none_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 0 without the line that counts what was copied is a failure, as is any other exit code with it."""
    (tmp_path / "na" / "packs").mkdir(parents=True)
    for number, (lines, says) in enumerate(
        (
            ("echo 'juicefs[1] <INFO>: interrupted, checkpoint saved' >&2", "exit code 0: it did not say"),
            ("echo 'juicefs[1] <INFO>: Found: 1, copied: 1' >&2; exit 3", "exit code 3"),
            ("echo 'juicefs[1] <FATAL>: no way' >&2; exit 1", "exit code 1: no way"),
        )
    ):
        stand_in(tmp_path / f"bin{number}", monkeypatch, lines)
        copy = asyncio.run(open_bulk_copy(f"file://{tmp_path / 'na'}", ObjectOptions(), tmp_path / "near"))
        with pytest.raises(BulkCopyFailed, match=says):
            asyncio.run(copy.fetch([f"{PACKS}aa/bb"], 1))


def test_a_newer_one_gets_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version with --files-from is given the names in a file, one a line, below the folder that it is shown; and no
    regular expressions, which mean other things to it."""
    place = tmp_path / "na" / "packs"
    (place / "aa").mkdir(parents=True)
    for name in ("one", "two", "three"):
        (place / "aa" / name).write_text(name)
    stand_in(
        tmp_path / "bin",
        monkeypatch,
        'for word; do case "$word" in --files-from=*) list=${word#*=};; --include*|--start*) exit 9;; esac; last=$word; done\n'
        f'while read name; do mkdir -p "$last${{name%/*}}"; cp "{place}/$name" "$last$name"; done <"$list"\n'
        "echo 'juicefs[1] <INFO>: Found: 2, excluded: 0 (0 B), skipped: 0 (0 B), copied: 2 (6 B), extra: 0 (0 B)' >&2",
    )
    copy = asyncio.run(open_bulk_copy(f"file://{tmp_path / 'na'}", ObjectOptions(), tmp_path / "near"))
    assert asyncio.run(copy.fetch([f"{PACKS}aa/one", f"{PACKS}aa/three"], 8)) == 2
    assert contents(tmp_path / "near") == {"packs/aa/one": b"one", "packs/aa/three": b"three"}


def hanging(source_bucket: str, s3: S3Server, proxy: Proxy) -> tuple[str, ObjectOptions]:
    """A source that does not answer any more."""
    s3.make_bucket(source_bucket)
    proxy.mode = "hang"
    return f"s3://{source_bucket}/kv", ObjectOptions(endpoint=proxy.endpoint, allow_http=True)


def test_one_that_hangs_is_ended(
    tmp_path: Path, s3_server: S3Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that takes too long is killed with its session and told; so is one that is cancelled. Its arguments hold no
    credentials, and its doors are open to this machine only."""
    url, options = hanging("hang-bulk", s3_server, proxy)
    copy = asyncio.run(open_bulk_copy(url, options, tmp_path / "near"))
    names = [f"{PACKS}{SPACES[0]}/{'0' * 32}"]

    async def cancelled() -> None:
        task = asyncio.ensure_future(copy.fetch(names, 1))
        while not (found := _listening(f"hang-bulk.127.0.0.1:{proxy.port}")):
            await asyncio.sleep(0.02)
        for pid, doors in found:
            words, settings = _told(pid)
            assert SECRET.encode() not in words and b"delete" not in words and SECRET.encode() in settings
            assert all(door.startswith("0100007F:") for door in doors), "it listens to other machines"
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() and not running("hang-bulk.")

    asyncio.run(cancelled())
    monkeypatch.setattr(bulk_module, "BULK_START_S_MAX", 0.5)
    with pytest.raises(BulkCopyFailed, match="not done within"):
        asyncio.run(copy.fetch(names, 1))
    assert not running("hang-bulk.")


def _told(pid: int) -> tuple[bytes, bytes]:
    """Arguments and environment."""
    return Path(f"/proc/{pid}/cmdline").read_bytes(), Path(f"/proc/{pid}/environ").read_bytes()


def _listening(word: str) -> list[tuple[int, list[str]]]:
    """Processes that have asked for their objects, with the doors at which they listen."""
    found = []
    for pid in running(word):
        try:
            sockets = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
            rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
        except OSError:
            continue
        own = [row for row in rows if f"socket:[{row[9]}]" in sockets]
        if any(row[3] == "01" for row in own):  # connected: everything that it opens is open
            found.append((pid, [row[1] for row in own if row[3] == "0A"]))
    return found


_OWNER = """
import asyncio, sys
from pathlib import Path
from replication.bulk_copy import open_bulk_copy
from tiers.object_options import ObjectOptions

async def main(url, endpoint, directory, name):
    copy = await open_bulk_copy(url, ObjectOptions(endpoint=endpoint, allow_http=True), Path(directory))
    await copy.fetch([name], 1)

asyncio.run(main(*sys.argv[1:]))
"""


def test_it_ends_with_whoever_asked_for_it(tmp_path: Path, s3_server: S3Server, proxy: Proxy) -> None:
    """After kill -9 of the process that copies, no juicefs is left."""
    url, options = hanging("orphan-bulk", s3_server, proxy)
    words = [url, options.endpoint, str(tmp_path / "near"), f"{PACKS}{SPACES[0]}/{'0' * 32}"]
    owner = subprocess.Popen([sys.executable, "-c", _OWNER, *words], env=environment(), cwd=ROOT)
    try:
        until(lambda: _listening("orphan-bulk.127.0.0.1"))
    finally:
        owner.kill()
        owner.wait(30)
    gone("orphan-bulk.127.0.0.1")


def test_what_a_kill_leaves_is_used_by_nobody(tmp_path: Path, s3_server: S3Server, proxy: Proxy) -> None:
    """kill -9 of juicefs is told; what lies there then, whole or half (.….tmp), is gone at the next start."""
    url, options = hanging("killed-bulk", s3_server, proxy)
    near = tmp_path / "near"
    copy = asyncio.run(open_bulk_copy(url, options, near))
    half = near / PACKS / SPACES[0] / f".{'0' * 32}.tmp"

    async def killed() -> None:
        task = asyncio.ensure_future(copy.fetch([f"{PACKS}{SPACES[0]}/{'0' * 32}"], 1))
        while not (found := _listening("killed-bulk.127.0.0.1")):
            await asyncio.sleep(0.02)
        for pid, _ in found:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(BulkCopyFailed, match="exit code -9"):
            await task

    asyncio.run(killed())
    half.parent.mkdir(parents=True)
    half.write_bytes(b"half")
    asyncio.run(open_bulk_copy(url, options, near))
    assert contents(near) == {}


def test_a_disk_without_room_is_told(source: Source, tmp_path: Path) -> None:
    """Nothing is begun that would fill the disk."""
    copy = bulk(source, tmp_path / "near")
    with pytest.raises(BulkCopyFailed, match="MiB are free, needed are"):
        asyncio.run(copy.fetch(source.some(1), 1 << 60))
    assert contents(tmp_path / "near") == {}


def test_which_one_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one is known by its version and what it can do; none, one that can do neither, says nothing or cannot be
    started is one line."""
    found = asyncio.run(find_juicefs())
    assert found.version[0].isdigit() and found.takes_list == (found.version >= "1.3")

    def refused(says: str) -> None:
        with pytest.raises(BulkCopyRefused, match=says):
            asyncio.run(find_juicefs())

    stand_in(tmp_path / "old", monkeypatch, "", usage="--include PATTERN")
    refused("is 1.4.1: needed is 1.3 or newer, for sync --files-from")
    (tmp_path / "old" / "juicefs").write_text("#!/bin/sh\necho hello\n")
    refused("does not say which version it is")
    (tmp_path / "old" / "juicefs").write_bytes(b"\x7fELF no program")
    refused("Exec format error")
    monkeypatch.setenv("PATH", str(tmp_path))
    refused("there is no juicefs on PATH")


S3 = ObjectOptions(endpoint="http://10.0.0.7:9000", allow_http=True)


def _place(url: str, options: ObjectOptions, **environ: str) -> tuple[str, Sequence[str], dict[str, str]]:
    found = address(url, options, PACKS, environ)
    return found.url, found.flags, dict(found.environment)


def test_how_a_store_is_named(tmp_path: Path) -> None:
    """Its bucket stands before its host; a region is told in the environment; what juicefs would take for another place, or
    needs credentials in its URL for, is refused."""
    here = {"AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1"}
    assert _place("s3://b/kv/", S3) == ("s3://b.10.0.0.7:9000/kv/packs/", ("--no-https",), here)
    tls = ObjectOptions(endpoint="https://s3.example:9000")
    assert _place("s3://b", tls) == ("s3://b.s3.example:9000/packs/", (), here)
    eu = {"AWS_REGION": "eu-west-3", "AWS_DEFAULT_REGION": "eu-west-3"}
    aws = "s3://b.s3.eu-west-3.amazonaws.com/kv/packs/"
    assert _place("s3://b/kv", ObjectOptions(region="eu-west-3"), AWS_REGION="x") == (aws, (), eu)
    assert _place("s3://b/kv", ObjectOptions(), AWS_REGION="eu-west-3") == (aws, (), eu)
    assert _place("s3://b", ObjectOptions(), AWS_REGION="cn-north-1")[0].endswith("amazonaws.com.cn/packs/")
    assert _place("file:///mnt/a%20b", ObjectOptions())[0] == "file:///mnt/a%20b/packs/"
    for url, options, says in (
        ("gs://b/kv", ObjectOptions(), "allowed are s3:// and file:///"),
        ("az://b/kv", ObjectOptions(), "allowed are s3:// and file:///"),
        ("s3://my.bucket/kv", S3, "without a dot"),
        ("s3://b", ObjectOptions(endpoint="https://10.0.0.7:9000"), "names of hosts"),
        ("s3://b", ObjectOptions(endpoint="http://[::1]:9000", allow_http=True), "names of hosts"),
        ("s3://b", ObjectOptions(endpoint="https://s3.example", path_style=False), "path_style on"),
    ):
        with pytest.raises(BulkCopyRefused, match=says):
            address(url, options, PACKS, {})
    with pytest.raises(BulkCopyRefused, match="in the environment"):
        address("s3://b", ObjectOptions(), PACKS, {"AWS_ENDPOINT_URL": "https://x"})


def test_last_words() -> None:
    """Both forms of the line that counts are read, the last one counts, and errors are found among other lines."""
    old = "juicefs[1] <INFO>: Found: 3, copied: 2, deleted: 0, failed: 0, transferred: 1 B"
    new = "<INFO>: Found: 9, excluded: 1 (0 B), skipped: 0 (0 B), copied: 8 (2 B), extra: 0 (0 B) [sync.go:1]"
    assert (copied(old), copied(new), copied(f"{old}\n{new}\n"), copied("Found: 3")) == (2, 8, 8, None)
    assert copied("<INFO>: Failed to copy 3") is None
    assert complaint("x <INFO>: a\ny <ERROR>: b\n  cause\nz <INFO>: c") == "b cause" and complaint("") == ""


def _job(number: int, rule: Rule) -> Job:
    return Job(number.to_bytes(16, "big"), 10, rule, float(number))


def test_which_jobs_are_fetched_ahead() -> None:
    """Those of a rule that asks for it, when it is its turn, in their order, if there are enough, and no more bytes than allowed."""
    own, large = Rule(priority=1), Rule(in_bulk=True)
    jobs = Jobs({})
    for number in range(20):
        jobs.add(_job(number, large))
    assert jobs.take_bulk(0.0, 21, 30, 1000) == []
    assert [job.since_s for job in jobs.take_bulk(0.0, 20, 5, 1000)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [job.since_s for job in jobs.take_bulk(0.0, 15, 30, 25)] == [5.0, 6.0]
    assert jobs.take_bulk(0.0, 1, 30, 9) == [] and len(jobs) == 20
    for number in range(20, 40):
        jobs.add(_job(number, own))
    assert jobs.take_bulk(0.0, 1, 30, 1000) == [], "a rule with a higher priority waits"
    while (job := jobs.take(0.0, 1000)) is not None and job.rule is own:
        jobs.done(job)
    assert job is not None and job.since_s == 7.0
    assert [job.since_s for job in jobs.take_bulk(0.0, 1, 2, 1000)] == [8.0, 9.0]
