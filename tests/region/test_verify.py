"""`kvstore region verify`: finds what is wrong with a bucket, repairs it when asked to, and changes nothing when not."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from kvstore.daemon.config.regions_file import load_regions
from kvstore.tools.cli import main
from replication.feed.feed import FeedWriter
from replication.formats.announced import Announced
from replication.formats.segment import segment_name
from replication.formats.tombstones import Tombstone, bury
from tests.objects import S3Server, flip
from tests.region.regions import S3_KEYS, STORES, init, regions_file
from tests.replication.audited import SPECS, Made, make
from tests.running import kvstore
from tiers.bucket.objects import Objects
from tiers.errors import ObjectUnavailable
from tiers.packs.packs import describe

T = TypeVar("T")
WRITER = "a" * 16
RULES = '[[rules]]\nfrom = ["na"]\nto = ["eu"]\ntenants = ["acme"]'
NOW_S = int(time.time())


@pytest.fixture(params=STORES)
def regions(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the regions na and eu, whose buckets are ready; credentials are in the environment."""
    for name, value in S3_KEYS.items():
        monkeypatch.setenv(name, value)
    s3: S3Server | None = request.getfixturevalue("s3_server") if request.param == "s3" else None
    file = regions_file(tmp_path, "na", "eu", s3=s3, rules=RULES)
    init(file, "na", "eu")
    return file


def in_bucket(file: Path, region: str, work: Callable[[Objects], Awaitable[T]]) -> T:
    async def done() -> T:
        return await work(load_regions(file).regions[region].open())

    return asyncio.run(done())


def put(file: Path, *made: Made, region: str = "na", announced: bool = True, kept_until_s: int = 0) -> None:
    """A segment for each pack that is announced."""

    async def work(objects: Objects) -> None:
        writer = FeedWriter(objects, WRITER, time.time, random.Random())
        for one in made:
            await objects.put(one.pack.name, one.content)
            if announced:
                await writer.announce([Announced(one.pack, kept_until_s=kept_until_s)])

    in_bucket(file, region, work)


def replace(file: Path, name: str, content: bytes | None) -> None:
    async def work(objects: Objects) -> None:
        await (objects.delete([name]) if content is None else objects.put(name, content))

    in_bucket(file, "na", work)


def everything(file: Path, region: str = "na") -> dict[str, bytes]:
    async def work(objects: Objects) -> dict[str, bytes]:
        prefixes = ("packs/", "feed/", "heads/", "snapshots/", "tombstones/")
        names = [info.name for prefix in prefixes async for page in objects.list(prefix) for info in page]
        return {name: bytes(await objects.get(name)) for name in names}

    return in_bucket(file, region, work)


def verify(file: Path, *more: str, region: str = "na") -> tuple[int, dict[str, Any]]:
    done = kvstore("region", "verify", region, "--regions", file, "-o", "json", *more)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def make_old(file: Path, days: float = 3) -> None:
    """Orphans of a directory become as old as that; nothing in a bucket can."""
    import os

    for path in (file.parent / "na" / "packs").rglob("*"):
        if path.is_file():
            os.utime(path, (time.time() - days * 86400,) * 2)


def kinds(facts: dict[str, Any]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for finding in facts["findings"]:
        found.setdefault(finding["kind"], set()).add(finding["pack"])
    return found


def test_a_sound_region_is_sound(regions: Path) -> None:
    """Exit code 0, also with every byte read; packs whose life is over are no finding; nothing is written."""
    root = make("root")
    put(regions, root, make("leaf", root), *(make(number) for number in range(20)))
    put(regions, make("over"), kept_until_s=NOW_S - 5000)
    replace(regions, make("over").pack.name, None)
    before = everything(regions)
    code, facts = verify(regions, "--deep", "--bytes-per-s", "100MiB")
    assert (code, facts["ok"], facts["findings"]) == (0, True, [])
    assert (facts["packs"], facts["announced_packs"], facts["read_packs"], facts["left"]) == (
        22, 23, 22, 0,
    )  # fmt: skip
    assert everything(regions) == before
    sampled = verify(regions, "--deep", "--sample", "0.0001%")[1]
    assert sampled["read_packs"] < 5


def test_what_is_wrong_is_found_and_repaired(regions: Path) -> None:
    """Missing, cut off, rotten and erased packs and lost segments are named, each with its kind; nothing changes without --repair;
    with it, all that can be repaired is, and the next look says so."""
    lost, cut, rotten, erased, behind = (make(name) for name in ("lost", "cut", "rotten", "erased", "behind"))
    secret = make("secret", spec=SPECS[0])
    put(regions, lost, cut, rotten, behind, make("last"))
    put(regions, secret, announced=False)
    assert erased.id
    replace(regions, lost.pack.name, None)
    replace(regions, cut.pack.name, cut.content[:-1])
    replace(regions, rotten.pack.name, flip(rotten.content, 8 * len(rotten.content) - 3))
    replace(regions, segment_name(WRITER, 4), None)  # which announced `behind`
    replace(regions, "packs/notes.txt", b"who put this here")
    stone = Tombstone(tenant="acme", watched_until_s=NOW_S + 10**6)
    in_bucket(regions, "na", lambda objects: bury(objects, stone))
    before = everything(regions)
    code, facts = verify(regions, "--deep")
    assert code == 1 and not facts["ok"] and everything(regions) == before
    assert kinds(facts) == {
        "gap": {f"feed/{WRITER}"},
        "missing": {lost.pack.name},
        "size": {cut.pack.name},
        "damaged": {rotten.pack.name},
        "orphan": {behind.pack.name},
        "erased": {secret.pack.name},
        "strange": {"packs/notes.txt"},
    }
    code, facts = verify(regions, "--deep", "--repair")
    assert code == 1 and [one["kind"] for one in facts["findings"] if not one["repaired"]] == ["strange"]
    assert kinds(verify(regions, "--deep")[1]) == {"strange": {"packs/notes.txt"}}
    after = everything(regions)
    assert behind.pack.name in after and secret.pack.name not in after and cut.pack.name not in after
    put(regions, lost, cut, rotten)
    replace(regions, "packs/notes.txt", None)
    code, facts = verify(regions, "--deep")
    assert (code, facts["packs"], facts["announced_packs"]) == (0, 5, 5)


def test_orphans_are_repaired_when_they_are_old(tmp_path: Path) -> None:
    """A pack that was just put is left alone: its writer may be about to announce it. An old one is found, announced with
    --repair, parents first, and sound from then on."""
    file = regions_file(tmp_path, "na")
    init(file, "na")
    root = make("root")
    leaf = make("leaf", make("stem", root))
    assert leaf.parent is not None
    put(file, root)
    put(file, leaf, leaf.parent, announced=False)
    code, facts = verify(file)
    assert (code, facts["left"], facts["findings"]) == (0, 2, [])
    make_old(file)
    assert kinds(verify(file)[1]) == {"orphan": {leaf.pack.name, leaf.parent.pack.name}}
    assert verify(file, "--repair")[0] == 0
    code, facts = verify(file)
    assert (code, facts["announced_packs"], facts["packs"]) == (0, 3, 3)


def test_against_another_region(regions: Path) -> None:
    """What the rules copy and is not here is named, and only that."""
    mine = [make(number, spec=SPECS[0]) for number in range(3)]
    put(regions, *mine, make("not by the rules"))
    put(regions, make("over", spec=SPECS[0]), kept_until_s=NOW_S - 10)
    put(regions, mine[0], region="eu")
    code, facts = verify(regions, "--against", "na", region="eu")
    assert code == 1 and facts["lacking_packs"] == 2
    assert kinds(facts) == {"lacking": {one.pack.name for one in mine[1:]}}
    put(regions, *mine[1:], region="eu")
    assert verify(regions, "--against", "na", region="eu")[0] == 0


@pytest.mark.parametrize(
    ("away", "code", "says"),
    [
        ("url = 's3://eu/kv'\nendpoint = 'http://127.0.0.1:1'", 4, "s3://eu/kv"),
        ("url = 'file:///nowhere/eu'", 1, "no such directory"),
    ],
)
def test_what_was_repaired_before_a_failure_is_told(tmp_path: Path, away: str, code: int, says: str) -> None:
    """The region that it is compared with is away, or no region: all that was read and repaired here is told, and why it ended."""
    file = regions_file(tmp_path, "na", "eu", rules=RULES)
    init(file, "na")
    put(file, damaged := make("a"))
    in_bucket(file, "na", lambda objects: objects.put(damaged.pack.name, flip(damaged.content, 999)))
    file.write_text(file.read_text().replace(f'url = "file://{tmp_path / "eu"}"', away))
    words = ("na", "--deep", "--repair", "--against", "eu")
    found, facts = verify(file, *words[1:])
    assert (found, facts["ok"], facts["against"], says in facts["problem"]) == (code, False, "eu", True), (
        facts
    )
    assert facts["repaired"] == facts["counts"]["damaged"] == 1 and facts["read_packs"] == 1
    assert "lacking_packs" not in facts and [one["kind"] for one in facts["findings"]] == ["damaged"]
    done = kvstore("region", "verify", *words, "--regions", file)
    assert (done.returncode, done.stderr) == (code, "") and "not all was looked at: " in done.stdout
    assert done.stdout.endswith("\nno problem so far\n")


def test_what_was_repaired_before_the_audit_failed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bucket is away when models are looked at: what was repaired of packs is told, and why it ended; a gap over which no snapshot leads
    by then is not said to be repaired."""
    file = regions_file(tmp_path, "na")
    init(file, "na")
    put(file, damaged := make("a"), make("b"))
    replace(file, damaged.pack.name, flip(damaged.content, 8 * 20))
    replace(file, segment_name(WRITER, 1), None)
    make_old(file)

    async def fails(*of: Any) -> None:
        raise ObjectUnavailable("na: no answer")

    monkeypatch.setattr("replication.audit.model_audit.ModelAudit.run", fails)
    code = main(["region", "verify", "na", "--repair", "--regions", str(file), "-o", "json"])
    facts = json.loads(capsys.readouterr().out)
    assert (code, facts["ok"], facts["problem"], facts["packs"]) == (4, False, "na: no answer", 2)
    repaired = {one["kind"]: bool(one["repaired"]) for one in facts["findings"]}
    assert not repaired.pop("gap") and repaired and all(repaired.values()), facts
    assert facts["repaired"] == len(facts["findings"]) - 1


def test_a_pack_that_this_version_cannot_read_is_not_read(tmp_path: Path) -> None:
    """A codec of a later version: it is named, neither damaged nor among those that were read, and stays."""
    file = regions_file(tmp_path, "na")
    init(file, "na")
    header = msgspec.structs.replace(
        make("a").pack.header, codec="later", sizes=(8,) * make("a").pack.header.count
    )
    pack, first = describe(header)
    strange = Made(pack, first + bytes(8 * header.count), None)
    put(file, make("b"), strange)
    code, facts = verify(file, "--deep", "--repair")
    assert (code, facts["read_packs"], facts["unread_packs"], facts["damaged_packs"]) == (1, 1, 1, 0)
    (finding,) = facts["findings"]
    assert finding["pack"] == strange.pack.name and finding["reason"].startswith(
        "could not be read by this version"
    )
    assert strange.pack.name in everything(file)


def test_wrong_words_are_one_line(tmp_path: Path) -> None:
    """What is no region, no share, no speed, or an option of another action ends in one line and exit code 2; a bucket that does
    not answer in 4."""
    file = regions_file(tmp_path, "na")
    for words, wanted in {
        ("verify",): "arguments are required: NAME",
        ("verify", "eu"): "known are na",
        ("verify", "na", "--against", "na"): "is the region itself",
        ("verify", "na", "--against", "eu"): "known are na",
        ("verify", "na", "--sample", "1%"): "needs --deep",
        ("verify", "na", "--deep", "--sample", "101%"): "allowed are",
        ("verify", "na", "--deep", "--sample", "much"): "allowed are",
        ("verify", "na", "--deep", "--bytes-per-s", "1GB"): "GiB",
        ("verify", "na", "--deep", "--bytes-per-s", "0"): "allowed are",
        ("ls", "--repair"): "unrecognized",
    }.items():
        done = kvstore("region", *words, "--regions", file)
        assert done.returncode == 2 and wanted in done.stderr, (words, done)
        assert done.stderr.count("\n") == 1 and not done.stdout
    done = kvstore("region", "verify", "na", "--regions", file)
    assert done.returncode == 1 and "kvstore region init" in done.stderr and done.stderr.count("\n") == 1
    file.write_text(
        'deployment = "acme"\n[regions.na]\nurl = "s3://bucket/kv"\nendpoint = "http://127.0.0.1:9"\nstall_s = 1'
    )
    done = kvstore("region", "verify", "na", "--regions", file, **S3_KEYS)
    assert done.returncode == 4 and done.stderr.count("\n") == 1


def test_for_people(tmp_path: Path) -> None:
    """Without -o json there are plain lines, and a last one that says it all."""
    file = regions_file(tmp_path, "na")
    init(file, "na")
    one = make("one")
    put(file, one, make("two"))
    done = kvstore("region", "verify", "na", "--regions", file)
    assert done.returncode == 0 and done.stdout.endswith("sound\n") and "2 packs" in done.stdout
    replace(file, one.pack.name, None)
    done = kvstore("region", "verify", "na", "--regions", file)
    assert done.returncode == 1 and f"missing: {one.pack.name}" in done.stdout
    assert done.stdout.endswith("1 problem\n")
