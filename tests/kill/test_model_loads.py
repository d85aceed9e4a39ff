"""kill -9 of those who load models: into the node's DRAM by the command, and as an engine's ranks do, from files and while they come.

ROUNDS=50 kills them more often (`make soak`).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from safetensors.torch import load_file

from coldstart.disk.home import Home
from coldstart.loading.resident import Image
from coldstart.loading.ring import make_shared
from coldstart.loading.start_dir import Revision
from coldstart.loading.weight_plan import Plan
from kvstore.client import Client, models
from kvstore.errors import Refused
from tests.coldstart.model_files import contents, make_model
from tests.coldstart.models import files_at
from tests.coldstart.revisions import Bucket
from tests.kill.model_loader import digest_of, plan_of
from tests.running import ROOT, TIMEOUT_S, Daemon, Place, environment, kvstore
from tiers.dram.pages import SHM

ROUNDS = int(os.environ.get("ROUNDS", "2"))
MIB = 1 << 20
TENSOR_BYTES = 2 * MIB  # each is a chunk
SLAB_BYTES = 4 * MIB


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(make_model(tmp_path / "model", tensors=24, tensor_bytes=TENSOR_BYTES), tmp_path)


def answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def begin(*words: str | Path, **how: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        cwd=ROOT,
        **how,
    )


def kill_within(process: subprocess.Popen[str], longest_s: float) -> bool:
    """Whether it was killed; else it has ended before."""
    try:
        process.wait(longest_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
    process.communicate(timeout=TIMEOUT_S)
    return process.returncode == -signal.SIGKILL


# ---- into DRAM --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_load_into_dram_that_is_killed(place: Place, serve: Callable[..., Daemon], bucket: Bucket) -> None:
    """At any instant, from the disk or straight from the bucket: nobody attaches to half a model; the rerun reads what was not
    committed and no byte twice; then each byte is right, and memory given back is all there."""
    sizes = ["--set=dram.capacity_bytes=128MiB", "--set=models.dram_bytes=96MiB"]
    serve(place, *place.arguments, *sizes, f"--set=models.dir={bucket.models}")
    whole, chance = contents(bucket.model), random.Random(int(os.environ.get("SEED", "1")))
    load = ["model", "load", "tiny", *bucket.words, f"--socket={place.socket}"]
    killed = partly = 0
    begun_s = time.monotonic()
    assert kvstore(*load).returncode == 0
    last_s = time.monotonic() - begun_s
    assert kvstore("model", "unload", "tiny", f"--socket={place.socket}").returncode == 0
    number = -1
    while number < ROUNDS - 1 or not killed:  # each kill may come too late
        number += 1
        if number % 2 != bool(Home(bucket.models).revisions()):
            verb = (
                ["preload", "tiny", *bucket.words]
                if number % 2
                else ["evict", "tiny", f"--set=models.dir={bucket.models}"]
            )
            assert kvstore("model", *verb).returncode == 0
        process = begin("kvstore", *load)
        while number % 3 and process.poll() is None and not models.listed(place.socket):
            time.sleep(0.002)  # until it has begun to fill
        longest_s = chance.uniform(0.0, 0.1) if number % 3 else chance.uniform(0.4 * last_s, last_s)
        killed += kill_within(process, longest_s)
        ready_bytes = seen_by_others(place, whole)
        partly += 0 < ready_bytes < bucket.manifest.size_bytes
        done = answer(kvstore(*load, "-o", "json"))
        assert set(done["by_source"]) <= {"disk" if number % 2 else "bucket"}
        # Chunks that reach over the end of a slab that is there are read for their other half: one of each slab.
        again_bytes = ready_bytes // SLAB_BYTES * TENSOR_BYTES
        assert sum(done["by_source"].values()) <= done["bytes"] - ready_bytes + again_bytes + SLAB_BYTES
        assert seen_by_others(place, whole) >= done["bytes"]
        assert kvstore("model", "unload", "tiny", f"--socket={place.socket}").returncode == 0
    assert partly or ROUNDS < 20, killed


def seen_by_others(place: Place, whole: dict[str, bytes]) -> int:
    """How much of the model is committed. What is whole is true, what is not cannot be attached to; the books balance."""
    with Client(str(place.socket), timeout_s=20.0, attach=False) as tool:
        assert tool.check() == []
    for model in models.listed(place.socket):
        if model["state"] == "whole":
            with models.attach("tiny", "r1", place.socket, wait_s=20) as found:
                image = Image(found.view)
                assert {path: bytes(image.file(path)) for path in whole} == whole
                del image
        else:
            with pytest.raises(Refused, match=r"partial|filling"):
                models.attach("tiny", "r1", place.socket)
        return model["ready_bytes"]
    return 0


# ---- as ranks do ------------------------------------------------------------------------------


@pytest.fixture
def preloads(bucket: Bucket) -> Iterator[Callable[[], list[int]]]:
    """Which processes fill this node's directory now; those that are left in the end are killed."""

    def find() -> list[int]:
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = entry.read_bytes()
            except OSError:
                continue
            if b"\0preload\0" in words and str(bucket.models).encode() in words:
                found.append(int(entry.parent.name))
        return found

    yield find
    for pid in find():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ranks_that_are_killed_while_they_load(bucket: Bucket, preloads: Callable[[], list[int]]) -> None:
    """One of them, or all, at any instant; from a whole revision, or from a start directory while a preload fills it, which is
    killed sometimes, too. A rank that goes on alone has every tensor right; so has who loads next; nothing is under a final name
    that is not whole; no use and no shared memory is left."""
    chance = random.Random(int(os.environ.get("SEED", "2")))
    whole, expected, before = contents(bucket.model), digest_of(tensors_of(bucket.model)), rings()
    plan = plan_of(Revision(bucket.model, bucket.manifest))
    killed = finished = 0
    number = -1
    while number < ROUNDS - 1 or not killed:  # each kill may come too late
        number += 1
        started = bucket.start()
        assert started.returncode == 0, started.stderr
        directory, count = Path(started.stdout.strip()), chance.choice((1, 2, 3))
        processes = ranks(directory, plan, count, pause_s=chance.choice((0.0, 0.02)))
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "loading\n"
        victims = chance.sample(processes, chance.randint(1, count))
        for process in victims:
            killed += kill_within(process, chance.uniform(0.0, 0.8))
        if number % 3 == 0:
            for pid in preloads():
                os.kill(pid, signal.SIGKILL)
        for process in processes:
            if process not in victims:
                said, problem = process.communicate(timeout=TIMEOUT_S)
                finished += process.returncode == 0
                assert process.returncode != 0 or said.split()[0] == expected
                # Of a preload that is killed the rank that has begun it says so, and the others that it does.
                why = ["cannot be preloaded: it was killed", "(another rank says why)"] * (number % 3 == 0)
                assert process.returncode == 0 or any(words in problem for words in why), (number, problem)
        for path in bucket.models.glob("models--tiny/snapshots/*"):
            assert files_at(path) == whole
        (last,) = ranks(directory, plan, 1, pause_s=0.0)
        said, problem = last.communicate(timeout=TIMEOUT_S)
        assert last.returncode == 0, problem
        assert said.split()[:2] == ["loading", expected]
        while preloads():  # the last one may still be syncing
            time.sleep(0.05)
        assert rings() == before
        assert files_at(Home(bucket.models).find("tiny", "r1").path) == whole
        if number % 2:
            Home(bucket.models).evict("tiny", "r1")  # nobody uses it


def ranks(directory: Path, plan: Plan, count: int, pause_s: float) -> list[subprocess.Popen[str]]:
    """So many, with one ring, whose name is gone when all have it, as a loader does."""
    path = make_shared(plan.ring_bytes, len(plan.pieces), count) if count > 1 else None
    processes = [
        begin("tests.kill.model_loader", directory, path or "", str(index), str(count), str(pause_s))
        for index in range(count)
    ]
    if path is not None:
        while any(path.name not in os.popen(f"ls -l /proc/{one.pid}/fd 2>&1").read() for one in processes):
            time.sleep(0.01)
        path.unlink()
    return processes


def rings() -> set[Path]:
    return set(SHM.glob("kvstore-load-*"))


def tensors_of(directory: Path) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.numpy()).hexdigest()
        for path in directory.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
