"""`kvstore model preload` and what goes with it, as processes: over a real S3 server, killed, two at once, on a full disk."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.daemon.beside.preloading import Preloads
from kvstore.daemon.config.config import Config
from replication.formats.manifests import MIB, Manifest
from tests.coldstart.models import cut_evenly, files_at, made, put, random_files
from tests.objects import S3Server, flip
from tests.region.proxy import Proxy
from tests.region.regions import S3_KEYS, init, regions_file
from tests.running import TIMEOUT_S, Daemon, Place, environment, kvstore
from tiers.bucket.object_store import open_objects

ROUNDS = int(os.environ.get("ROUNDS", "3"))
CHUNK_BYTES = 1 << 18
CHANCE = random.Random(7)
FILES = {"config.json": b'{"model_type": "tiny"}', "empty.txt": b"", **random_files(CHANCE, 24 * MIB)}


class Node:
    """Words of a command that is given on a node: its bucket and its models' directory."""

    def __init__(self, path: Path, server: S3Server, prefix: str, files: dict[str, bytes] = FILES) -> None:
        self.path = path
        self.models = path / "models"
        self.objects = open_objects(f"s3://kvstore/{prefix}", server.options())
        self.words = ["--to", f"s3://kvstore/{prefix}", "--endpoint", server.endpoint]
        self.manifest, contents = made(files, cut_evenly(files, CHUNK_BYTES), "tiny", "r1")
        asyncio.run(put(self.objects, self.manifest, contents))

    @property
    def directory(self) -> list[str]:
        return [f"--set=models.dir={self.models}"]

    def preload(self, *words: str) -> subprocess.CompletedProcess[str]:
        return kvstore("model", "preload", "tiny", *self.words, *self.directory, *words, **S3_KEYS)

    def local(self, verb: str, *words: str) -> subprocess.CompletedProcess[str]:
        return kvstore("model", verb, *words, *self.directory)

    def begin(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "kvstore", "model", "preload", "tiny"]
        return subprocess.Popen(
            [*command, *self.words, *self.directory, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**S3_KEYS),
        )


@pytest.fixture
def node(tmp_path: Path, s3_server: S3Server) -> Node:
    return Node(tmp_path, s3_server, tmp_path.name)


def answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_from_nothing_to_a_directory_and_away_again(node: Node) -> None:
    """Preloaded, found, listed, pinned, evicted: each says what it did in the fields of the manual."""
    done = answer(node.preload("-o", "json"))
    assert set(done) == {"model", "revision", "path", "bytes", "by_source", "kept_bytes", "seconds"}
    assert done["by_source"] == {"bucket": done["bytes"]} and files_at(Path(done["path"])) == FILES
    again = node.preload()
    assert again.stdout == f"{done['path']}\ntiny@r1: here already\n"
    assert node.local("path", "tiny").stdout == f"{done['path']}\n"
    assert "tiny@r1 is pinned" in node.local("pin", "tiny").stdout
    (row,) = answer(node.local("ls", "--local", "-o", "json"))["revisions"]
    assert (row["model"], row["bytes"], row["pinned"], row["in_use"]) == ("tiny", done["bytes"], True, False)
    refused = node.local("evict", "tiny")
    assert (refused.returncode, refused.stderr.count("\n")) == (
        1,
        1,
    ) and "unpin tiny@r1 first" in refused.stderr
    assert node.local("unpin", "tiny@r1").returncode == 0
    assert "24 MiB" in node.local("ls", "--local").stdout
    assert node.local("evict", "tiny").returncode == 0
    gone = node.local("path", "tiny")
    assert (gone.returncode, gone.stderr.count("\n")) == (
        3,
        1,
    ) and "kvstore model preload tiny" in gone.stderr


def test_what_a_user_gets_wrong_is_one_line(node: Node) -> None:
    """A model that there is not, a name that is none, a place that cannot be written to."""
    for code, says, words in (
        (3, "no model nothing", ["nothing"]),
        (2, "allowed are", ["../tiny"]),
        (1, "models.dir", ["tiny", "--set=models.dir=/proc/models"]),
        (2, "models.nvme_bytes", ["tiny", "--set=models.nvme_bytes=12"]),
    ):
        done = kvstore(
            "model", "preload", *words, *node.words, *(node.directory if len(words) == 1 else []), **S3_KEYS
        )
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert says in done.stderr and done.stderr.count("\n") == 1
    assert not node.models.exists() or files_at(node.models) == {}


def test_killed_at_any_moment_it_goes_on_where_it_was(node: Node) -> None:
    """With -9, at random moments, until it is done: nothing half-done has a final name, and what was there is not fetched again."""
    killed, done, rounds = 0, False, 0
    while rounds < ROUNDS or not killed:  # each kill may come too late
        rounds += 1
        process = node.begin()
        time.sleep(CHANCE.uniform(0.3, 1.3))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=TIMEOUT_S)
        killed += process.returncode == -signal.SIGKILL
        snapshots = list(node.models.glob("models--tiny/snapshots/*"))
        done = bool(snapshots)
        assert all(files_at(path) == FILES for path in snapshots)
        if done:
            kvstore("model", "evict", "tiny", *node.directory)
    last = answer(node.preload("-o", "json"))
    assert files_at(Path(last["path"])) == FILES
    assert last["kept_bytes"] + sum(last["by_source"].values()) == last["bytes"]


def test_two_at_once_fetch_one_copy(node: Node) -> None:
    """One fetches, the other one waits for it, and both print the same directory."""
    processes = [node.begin("-o", "json") for _ in range(2)]
    ended = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ended
    told = [json.loads(said) for said, _ in ended]
    assert sum(sum(one["by_source"].values()) for one in told) == told[0]["bytes"]
    assert files_at(Path(told[0]["path"])) == FILES


def test_one_that_is_killed_is_taken_over_from(node: Node) -> None:
    """Whoever waits for it goes on with what it left, and nothing is left half-done."""
    first = node.begin()
    while not list(node.models.glob(".under-way/tiny@r1/.kvstore-model")):
        assert first.poll() is None, first.communicate()
        time.sleep(0.01)
    second = node.begin("-o", "json")
    time.sleep(CHANCE.uniform(0.0, 1.0))
    first.kill()
    first.communicate(timeout=TIMEOUT_S)
    said, problem = second.communicate(timeout=TIMEOUT_S)
    assert second.returncode == 0, problem
    assert files_at(Path(json.loads(said)["path"])) == FILES


def test_bits_that_flip_are_never_under_a_final_name(node: Node) -> None:
    """In the bucket: one line that names the chunk, and exit code 1. On disk: found and mended when asked for."""
    chunk = node.manifest.chunks[3]
    good = bytes(asyncio.run(node.objects.get(chunk.name)))
    asyncio.run(node.objects.put(chunk.name, flip(good, 12345)))
    done = node.preload()
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert chunk.name in done.stderr and not list(node.models.glob("models--*"))
    asyncio.run(node.objects.put(chunk.name, good))
    told = answer(node.preload("-o", "json"))
    path = Path(told["path"]) / "f1.bin"
    path.write_bytes(flip(path.read_bytes(), 999))
    mended = answer(node.preload("-o", "json", "--verify"))
    assert mended["by_source"] == {"bucket": CHUNK_BYTES} and files_at(path.parent) == FILES


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["503", "cut", "hang"])
def test_a_bucket_that_fails_in_the_middle_is_one_line(
    tmp_path: Path, s3_server: S3Server, mode: str
) -> None:
    """It answers 503, breaks connections off, or answers no more: exit code 4, nothing has its final name; when it is well again what came
    is not fetched twice."""
    node, proxy = Node(tmp_path, s3_server, tmp_path.name), Proxy(s3_server.port, bytes_per_s=8 * MIB)
    node.words[-1] = proxy.endpoint
    try:
        process = node.begin("-o", "json")
        while not filled_bytes(node):
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        proxy.mode = mode
        said, problem = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, said, problem.count("\n")) == (4, "", 1), problem
        assert "s3://kvstore/" in problem and not list(node.models.glob("models--*"))
        proxy.mode, there_bytes = "pass", filled_bytes(node)
        done = answer(node.preload("-o", "json"))
        assert files_at(Path(done["path"])) == FILES
        assert done["kept_bytes"] > 0 and done["kept_bytes"] + done["by_source"]["bucket"] == done["bytes"]
        assert (
            there_bytes - done["kept_bytes"] <= 16 * CHUNK_BYTES
        )  # what was half-written: one of each stream at most
    finally:
        proxy.close()


def filled_bytes(node: Node) -> int:
    """Of what is under way, at least as much as is true."""
    files = node.models.glob(".under-way/tiny@r1/f*")
    return sum(len(file.read_bytes().replace(bytes(4096), b"")) for file in files)


def test_a_disk_that_fills_up_is_one_line(node: Node) -> None:
    """A limit of the process stands for it: nothing is left half-done, and with room it goes on."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, 4 * MIB))

    done = subprocess.run(
        [sys.executable, "-m", "kvstore", "model", "preload", "tiny", *node.words, *node.directory],
        capture_output=True,
        text=True,
        preexec_fn=limit,
        env=environment(**S3_KEYS),
        timeout=TIMEOUT_S,
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1) and "do not fit" in done.stderr
    assert not list(node.models.glob(".under-way/tiny*")) and not list(node.models.glob("models--*"))
    assert node.preload().returncode == 0


def status_of(place: Place) -> dict[str, Any]:
    return answer(kvstore("status", "--socket", place.socket, "-o", "json"))


def preloads_until(place: Place, wanted: str) -> dict[str, Any]:
    """What a status says of its one model, once that is in this state."""
    while True:
        (found,) = status_of(place)["preloads"]
        if found["state"] == wanted:
            return dict(found)
        time.sleep(0.2)


def published(file: Path, files: dict[str, bytes], server: S3Server) -> Manifest:
    """Into the region of the file, directly."""
    url = next(line.split('"')[1] for line in file.read_text().splitlines() if line.startswith("url"))
    manifest, contents = made(files, cut_evenly(files, CHUNK_BYTES), "tiny", "r1")
    asyncio.run(put(open_objects(url, server.options()), manifest, contents))
    return manifest


def children_of(daemon: Daemon) -> list[int]:
    """Its processes that preload."""
    pids = Path(f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children").read_text().split()
    return [int(pid) for pid in pids if b"preload" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_daemon_preloads_what_its_configuration_names(
    place: Place, tmp_path: Path, serve: Callable[..., Daemon], s3_server: S3Server
) -> None:
    """It fails while there is no such model, says why, tries again, and has it once it is published; at the next start it is there."""
    file = regions_file(tmp_path, "na", s3=s3_server)
    init(file, "na")
    words = [*place.arguments, f"--set=regions_file={file}", "--set=region=na", "--set=models.preload=tiny"]
    daemon = serve(place, *words, **S3_KEYS)
    failed = preloads_until(place, "failed")
    assert "no model tiny" in failed["problem"] and "preloading tiny failed" in daemon.log()
    while "tiny: failed: " not in kvstore("status", "--socket", place.socket).stdout:
        time.sleep(0.1)  # it is trying again; the time limit is pytest's
    published(file, FILES, s3_server)
    there = preloads_until(place, "there")
    assert there["by_source"] == {"bucket": sum(map(len, FILES.values()))} and there["attempts"] > 1
    assert files_at(place.data_dir / "models/models--tiny/snapshots/r1") == FILES
    assert kvstore("model", "path", "tiny", "--data-dir", place.data_dir).returncode == 0
    assert daemon.stop() == 0
    serve(place, *words, **S3_KEYS)
    assert preloads_until(place, "there")["by_source"] == {}


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_what_a_daemon_preloads_ends_with_it(
    place: Place, tmp_path: Path, serve: Callable[..., Daemon], s3_server: S3Server, how: signal.Signals
) -> None:
    """However it ends; what was filled stays for the next one."""
    file = regions_file(tmp_path, "na", s3=s3_server)
    init(file, "na")
    published(file, random_files(random.Random(3), 96 * MIB), s3_server)
    words = [*place.arguments, f"--set=regions_file={file}", "--set=region=na", "--set=models.preload=tiny"]
    daemon = serve(place, *words, **S3_KEYS)
    while not (children := children_of(daemon)):
        time.sleep(0.02)
    daemon.stop(how)
    for pid in children:
        while Path(f"/proc/{pid}/cmdline").is_file() and Path(f"/proc/{pid}/cmdline").read_bytes():
            time.sleep(0.05)  # the time limit is pytest's


class NumberGoesOn:
    """A pipe whose number is another file's as soon as it is closed."""

    def __init__(self, pipe: Any, other: int) -> None:
        self._pipe, self._other = pipe, other
        self.fileno = pipe.fileno
        self.numbers: list[int] = []

    def close(self) -> None:
        number = self._pipe.fileno()
        self._pipe.close()
        os.dup2(self._other, number)
        self.numbers.append(number)


def test_why_a_preload_failed_is_read_of_its_own_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of what another thread has opened meanwhile, whose bytes stay its own."""
    other, its_end = os.pipe()
    os.write(its_end, b"bytes of others\n")
    os.close(its_end)
    pipes = []

    def failing(_: list[str], stdout: int, stderr: int | None) -> Any:
        words = ["sh", "-c", "echo 'kvstore: no such model' >&2; exit 1"]
        child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr)
        child.stdout, child.stderr = (NumberGoesOn(pipe, other) for pipe in (child.stdout, child.stderr))  # type: ignore[assignment]
        pipes.extend([child.stdout, child.stderr])
        return child

    async def problem_of(preloads: Preloads) -> str:
        state, running = preloads.order("tiny"), asyncio.create_task(preloads.run())
        while not state["problem"]:
            await asyncio.sleep(0.01)
        preloads.end()
        await running
        return state["problem"]

    monkeypatch.setattr("kvstore.daemon.beside.children.start_child", failing)
    try:
        assert asyncio.run(problem_of(Preloads(Config()))) == "no such model"
        assert os.read(other, 100) == b"bytes of others\n"
    finally:
        for number in [other, *(number for pipe in pipes for number in pipe.numbers)]:
            os.close(number)


def test_models_that_are_preloaded_need_a_region() -> None:
    """One line that names the key, before anything starts; names that are none are refused as well."""
    for value, says in (
        ("tiny", "regions_file must be set"),
        ("../x", "allowed are NAME"),
        ("a,a", "listed twice"),
    ):
        done = kvstore("config", "check", f"--set=models.preload={value}")
        assert done.returncode == 2 and "models.preload" in done.stderr and says in done.stderr
