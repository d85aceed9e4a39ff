"""`kvstore model` as a user runs it: over a directory, over S3, killed, with wrong words and with damage."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from coldstart.published.models import Published
from kvstore.tools.cli import main
from kvstore.units import REPLACED
from replication.formats.manifests import CHUNKS, MANIFESTS, Chunk, encode
from replication.models.collecting import COLLECTING, LOCK_S
from tests.coldstart.model_files import contents, make_model
from tests.objects import S3Server
from tests.region.regions import S3_KEYS, init, regions_file
from tests.replication.test_manifests import chunk_of, manifest_of
from tests.running import TIMEOUT_S, environment, kvstore
from tiers.errors import ObjectRefused

ROUNDS = int(os.environ.get("ROUNDS", "3"))


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket"


def model(*words: str | Path, to: Path) -> subprocess.CompletedProcess[str]:
    """A verb, over a directory."""
    return kvstore("model", *words, "--to", f"file://{to}")


def answer(*words: str | Path, to: Path) -> dict[str, Any]:
    done = model(*words, "-o", "json", to=to)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def refused(code: int, says: str, *words: str | Path, to: Path) -> None:
    """One line on stderr, and nothing on stdout."""
    done = model(*words, to=to)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert says in done.stderr and done.stderr.startswith("kvstore: ") and done.stderr.count("\n") == 1


def files_of(bucket: Path, folder: str) -> list[Path]:
    return sorted(path for path in (bucket / folder).rglob("*") if path.is_file())


def test_from_a_directory_to_nothing_left(tmp_path: Path, bucket: Path) -> None:
    """Published, listed, shown, verified, removed, collected: each says what it did in the fields of the manual."""
    directory = make_model(tmp_path / "Tiny")
    size_bytes = sum(map(len, contents(directory).values()))
    made = answer("publish", directory, "--name", "tiny", "--by", "me", to=bucket)
    assert set(made) == {
        "bucket", "model", "revision", "was_there", "bytes", "files", "chunks", "put_chunks", "put_bytes", "left_out", "with_cache", "took_s",
    }  # fmt: skip
    assert (made["model"], made["was_there"], made["bytes"], made["files"]) == ("tiny", False, size_bytes, 5)
    [row] = answer("ls", to=bucket)["revisions"]
    assert (row["revision"], row["bytes"], row["published_by"], row["problem"]) == (
        made["revision"],
        size_bytes,
        "me",
        "",
    )
    shown = answer("show", "tiny", to=bucket)
    assert shown["source"] == str(directory) and {file["path"] for file in shown["files"]} == set(
        contents(directory)
    )
    report = answer("verify", "tiny", "--deep", to=bucket)
    assert report["ok"] and report["read_bytes"] == report["bytes"] == made["put_bytes"]
    name = f"tiny@{made['revision']}"
    assert answer("rm", name, to=bucket)["removed"] == [name]
    assert answer("gc", "--grace=0", "--dry-run", to=bucket)["deleted"] == made["chunks"]
    assert answer("gc", to=bucket)["young"] == made["chunks"]
    assert answer("gc", "--grace=0", to=bucket)["deleted_bytes"] == made["put_bytes"]
    assert files_of(bucket, CHUNKS) == files_of(bucket, MANIFESTS) == []


def test_people_get_words(tmp_path: Path, bucket: Path) -> None:
    """The same as lines and tables."""
    directory = make_model(tmp_path / "Tiny")
    (directory / ".git").mkdir()
    assert model("ls", to=bucket).stdout == f"No model is in file://{bucket}.\n"
    said = model("publish", directory, "--name=tiny", "--revision=v1", to=bucket).stdout
    assert said.startswith("tiny@v1 is published: 5 files, 1.5") and "left out 1 name with a dot" in said
    assert model("publish", directory, "--name=tiny", "--revision=v1", to=bucket).stdout.startswith(
        "tiny@v1 was published before: "
    )
    assert (
        "tiny   v1" in model("ls", to=bucket).stdout
        and "config.json" in model("show", "tiny", to=bucket).stdout
    )
    assert model("verify", to=bucket).stdout.endswith("\nsound\n")
    assert model("rm", "tiny", "--all", to=bucket).stdout.startswith("removed tiny@v1 from")
    assert "deleted 0 chunks" in (said := model("gc", to=bucket).stdout) and "younger than 1 h" in said


def test_what_was_removed_before_a_failure_is_told(
    tmp_path: Path, bucket: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of all revisions the first one stays: the second one is named, and then why it went no further."""
    directory = make_model(tmp_path / "Tiny")
    for revision in ("v1", "v2"):
        answer("publish", directory, "--name=tiny", f"--revision={revision}", to=bucket)

    async def removed(objects: object, one: Published, removal: object) -> None:
        if one.revision == "v1":
            raise ObjectRefused("the store answers 403")

    monkeypatch.setattr("coldstart.published.models.remove", removed)
    assert main(["model", "rm", "tiny", "--all", "--to", f"file://{bucket}", "-o", "json"]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out) == {"bucket": f"file://{bucket}", "removed": ["tiny@v2"]}
    assert told.err == "kvstore: the store answers 403\n"


def test_wrong_words_are_one_line(tmp_path: Path, bucket: Path) -> None:
    """What, and what is allowed; 2 for words, 3 for what is not there, 1 for files that are no model."""
    directory = make_model(tmp_path / "Tiny")
    refused(3, "no such directory", "publish", tmp_path / "gone", "--name=m", to=bucket)
    refused(
        2,
        "Tiny: allowed are NAME and NAME@REVISION, each of up to 96 of a-z",
        "publish",
        directory,
        "--name=Tiny",
        to=bucket,
    )
    refused(2, "../x: allowed are NAME", "publish", directory, "--name=m", "--revision=../x", to=bucket)
    refused(2, "arguments are required: --name", "publish", directory, to=bucket)
    refused(3, "no model m: there is none", "show", "m", to=bucket)
    refused(3, "no model m: there is none", "rm", "m@v1", to=bucket)
    refused(2, "allowed is NAME@REVISION, or --all", "rm", "m", to=bucket)
    refused(2, "--grace soon: not a time", "gc", "--grace=soon", to=bucket)
    refused(2, "did you mean --deep?", "verify", "--depe", to=bucket)
    refused(2, "invalid choice: 'lss'", "lss", to=bucket)
    refused(3, "there is no such directory", "ls", to=tmp_path / "none")
    for words, says in (
        (["--to=s3://user:pass@x"], "--to: allowed are s3://bucket"),
        (["--to=s3://x", "--endpoint=x"], "--endpoint: allowed are http"),
        (["--to=s3://x", "--region=na"], "--to and a region: one of them"),
        (["--endpoint=http://x"], "--endpoint needs --to"),
        ([], "no file of regions"),
    ):
        done = kvstore("model", "ls", *words)
        assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1


def test_a_truncated_shard_is_not_published(tmp_path: Path, bucket: Path) -> None:
    """One line that names the file; the bucket is as it was."""
    directory = make_model(tmp_path / "Tiny")
    shard = directory / "model-00002-of-00002.safetensors"
    os.truncate(shard, 1000)
    refused(
        1, f"{shard}: 1000 bytes are no whole safetensors file", "publish", directory, "--name=m", to=bucket
    )
    assert not files_of(bucket, "models")


def test_a_directory_of_any_name_is_published(tmp_path: Path, bucket: Path) -> None:
    """One whose name is no UTF-8, too: what cannot be written down of it is replaced."""
    directory = tmp_path / os.fsdecode(b"m\xff")
    directory.mkdir()
    (directory / "a").write_bytes(b"x")
    answer("publish", directory, "--name=m", to=bucket)
    assert answer("show", "m", to=bucket)["source"] == f"{tmp_path}/m{REPLACED}"


def test_a_name_with_other_content_is_refused(tmp_path: Path, bucket: Path) -> None:
    """Who published it and when; the first one stays."""
    one, two = make_model(tmp_path / "one"), make_model(tmp_path / "two", seed=1)
    answer("publish", one, "--name=m", "--revision=v1", "--by=ann", to=bucket)
    before = files_of(bucket, "models")
    says = "m@v1 is there with other files, published by ann on 20"
    refused(1, says, "publish", two, "--name=m", "--revision=v1", to=bucket)
    assert files_of(bucket, "models") == before and answer("verify", "--deep", to=bucket)["ok"]


def test_damage_in_the_bucket_is_found_and_repaired(tmp_path: Path, bucket: Path) -> None:
    """A chunk that is gone, one that is cut off, and one with a flipped bit, which only --deep finds: each with the file that has
    it. Publishing again puts back what is missing, and with --again all."""
    directory = make_model(tmp_path / "Tiny")
    answer("publish", directory, "--name=m", "--revision=v1", to=bucket)
    gone, short, flipped = random.Random(0).sample(files_of(bucket, CHUNKS), 3)
    gone.unlink()
    os.truncate(short, short.stat().st_size - 1)
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)

    def kinds(*words: str) -> dict[str, str]:
        done = model("verify", *words, "-o", "json", to=bucket)
        assert done.returncode == 1
        findings = json.loads(done.stdout)["findings"]
        assert all(file.startswith("m@v1/") for finding in findings for file in finding["files"])
        assert all(finding["files"] for finding in findings)
        return {finding["name"].rpartition("/")[2]: finding["kind"] for finding in findings}

    assert kinds() == {gone.name: "missing", short.name: "size"}
    assert kinds("--deep") == {gone.name: "missing", short.name: "size", flipped.name: "damaged"}
    said = model("verify", "--deep", to=bucket)
    assert said.returncode == 1 and "damaged: models/chunks/" in said.stdout and ": in m@v1/" in said.stdout
    assert answer("publish", directory, "--name=m", "--revision=v1", to=bucket)["put_chunks"] == 2
    assert kinds("--deep") == {flipped.name: "damaged"}
    answer("publish", directory, "--name=m", "--revision=v1", "--again", to=bucket)
    assert answer("verify", "--deep", to=bucket)["ok"]


@pytest.mark.parametrize("kind", ["future", "climbing", "flipped", "other"])
def test_a_manifest_that_cannot_be_is_one_line(kind: str, bucket: Path) -> None:
    """From the future, with names that climb out, damaged, or under the name of another one: listed with what is wrong, shown never; it stops
    a collection, and can be removed."""
    good = manifest_of({"a.txt": [b"x"]}, model="m", revision="v1")
    climbing = manifest_of({"../a.txt": [b"x"]}, model="m", revision="v1")
    content = {
        "future": b"KVMODEL3" + encode(good)[8:],
        "climbing": encode(climbing),
        "flipped": encode(good)[:-1] + b"\x07",
        "other": encode(manifest_of({"a.txt": [b"x"]}, model="n", revision="v1")),
    }[kind]
    says = {
        "future": "of a later version",
        "climbing": "path '../a.txt': it leads outside",
        "flipped": "its checksum does not match",
        "other": "says it is models/manifests/n/v1",
    }[kind]
    chunk = bucket / chunk_of(b"x").name
    for path, data in ((bucket / "models/manifests/m/v1", content), (chunk, b"x")):
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
    refused(1, says, "show", "m", to=bucket)
    listed = model("ls", "-o", "json", to=bucket)
    assert listed.returncode == 1 and says in json.loads(listed.stdout)["revisions"][0]["problem"]
    assert model("verify", to=bucket).returncode == 1
    if kind != "other":  # which chunks that one names is known all the same
        refused(1, "nothing was collected", "gc", "--grace=0", to=bucket)
    assert chunk.exists()
    answer("rm", "m@v1", to=bucket)
    assert answer("gc", "--grace=0", to=bucket)["deleted"] == 1


def test_a_publisher_says_nothing_that_steers_a_terminal(tmp_path: Path, bucket: Path) -> None:
    """Whoever publishes may call themselves anything: it is one line, without escape sequences."""
    one, two = make_model(tmp_path / "one"), make_model(tmp_path / "two", seed=1)
    answer("publish", one, "--name=m", "--revision=v1", "--by=\x1b[2Jann\nbob", to=bucket)
    refused(1, "published by", "publish", two, "--name=m", "--revision=v1", to=bucket)
    for verb in ("ls", "show"):
        assert "\x1b" not in model(verb, "m", to=bucket).stdout


def _bucket_size(regions: Path) -> dict[str, Any]:
    done = kvstore("model", "verify", "--deep", "--region=na", "--regions", regions, "-o", "json", **S3_KEYS)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_publisher_that_is_killed(tmp_path: Path, s3_server: S3Server) -> None:
    """Killed with -9 at any instant of a publication into a region on S3: what is named is whole and true; the rerun puts the rest, once."""
    regions = regions_file(tmp_path, "na", s3=s3_server)
    init(regions, "na")
    chance = random.Random(int(os.environ.get("SEED", "1")))
    where = ["--region=na", "--regions", str(regions)]
    last_s, killed, revisions, named = 2.0, 0, 0, 0
    number = -1
    while number < ROUNDS - 1 or killed < max(1, ROUNDS // 3):  # each kill may come too late
        number += 1
        directory = make_model(tmp_path / "tiny", tensors=24, seed=number)
        words = ["model", "publish", str(directory), "--name=m", *where]
        process = subprocess.Popen(
            [sys.executable, "-m", "kvstore", *words],
            env=environment(**S3_KEYS),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            process.wait(chance.uniform(0.4 * last_s, last_s))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait(TIMEOUT_S)
            killed += 1
        report = _bucket_size(regions)
        assert report["revisions"] in (revisions, revisions + 1)
        done = kvstore(*words, "-o", "json", **S3_KEYS)
        assert done.returncode == 0, done.stderr
        made = json.loads(done.stdout)
        assert made["was_there"] == (report["revisions"] == revisions + 1)
        assert not made["was_there"] or made["put_chunks"] == 0
        revisions, named = revisions + 1, _bucket_size(regions)["chunks"]
        last_s = max(1.0, 1.2 * (made["took_s"] + 0.7))
    gone = kvstore("model", "gc", "--grace=0", *where, "-o", "json", **S3_KEYS)
    assert json.loads(gone.stdout)["named"] == named and json.loads(gone.stdout)["deleted"] == 0


def chunks_at(bucket: Path) -> int:
    """While folders may vanish."""
    return sum(len(names) for _, _, names in os.walk(bucket / CHUNKS))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_collector_that_is_killed(tmp_path: Path, bucket: Path) -> None:
    """Killed with -9 at any instant: what is named is whole and true; once its lock has run out (it is made older) the next one deletes
    the rest, and nothing else."""
    chance = random.Random(int(os.environ.get("SEED", "3")))
    kept = make_model(tmp_path / "kept")
    answer("publish", kept, "--name=kept", to=bucket)
    named, killed, partly = files_of(bucket, CHUNKS), 0, 0
    number = -1
    while number < ROUNDS - 1 or not killed:  # each kill may come too late
        number += 1
        directory = make_model(tmp_path / "gone", tensors=200, tensor_bytes=1 << 14, seed=number)
        (directory / "many").mkdir(exist_ok=True)
        for file in range(300):
            (directory / "many" / str(file)).write_bytes(chance.randbytes(40))
        made = answer("publish", directory, "--name=gone", to=bucket)
        answer("rm", f"gone@{made['revision']}", to=bucket)
        there = len(files_of(bucket, CHUNKS))
        collector = subprocess.Popen(
            [sys.executable, "-m", "kvstore", "model", "gc", "--grace=0", "--to", f"file://{bucket}"],
            env=environment(),
            stdout=subprocess.DEVNULL,
        )
        looked_for = chance.choice(
            [there, chance.randrange(len(named), there)]
        )  # chunks: all, or some are deleted
        while collector.poll() is None and chunks_at(bucket) > looked_for:
            pass
        with suppress(subprocess.TimeoutExpired):
            collector.wait(chance.uniform(0.0, 0.8) if looked_for == there else 0.0)
        collector.kill()
        killed += collector.wait(TIMEOUT_S) == -signal.SIGKILL
        left = len(files_of(bucket, CHUNKS))
        partly += len(named) < left < there
        assert answer("verify", "--deep", to=bucket)["ok"]
        for lock in files_of(bucket, COLLECTING):
            os.utime(lock, (time.time() - LOCK_S - 1,) * 2)
        assert answer("gc", "--grace=0", to=bucket)["deleted"] == left - len(named)
        assert files_of(bucket, CHUNKS) == named
        for lock in files_of(
            bucket, COLLECTING
        ):  # that of the rerun, which stays for a while behind its last delete
            os.utime(lock, (time.time() - LOCK_S - 1,) * 2)
    assert partly or ROUNDS < 20


def test_chunks_that_lie_are_not_put_by_a_name_of_others(tmp_path: Path, bucket: Path) -> None:
    """A manifest that is there with the same files, and whose chunks are not of them: nothing is put under their names."""
    directory = tmp_path / "m"
    directory.mkdir()
    (directory / "a.txt").write_bytes(b"x")
    lying = Chunk(bytes(32), chunk_of(b"x").checksum, 1)
    path = bucket / "models/manifests/m/v1"
    path.parent.mkdir(parents=True)
    path.write_bytes(encode(manifest_of({"a.txt": [b"x"]}, model="m", revision="v1", chunks=[lying])))
    refused(
        1,
        "its chunks are not those of its files",
        "publish",
        directory,
        "--name=m",
        "--revision=v1",
        to=bucket,
    )
    assert not files_of(bucket, CHUNKS)
