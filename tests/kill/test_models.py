"""kill -9 of the daemon, of fillers and of users, with models in DRAM beside KV: never a wrong byte, nothing half-done is seen."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.client import Client, models
from kvstore.errors import Refused
from tests.kill.model_filler import bring, files, name_of, wrong_of
from tests.kill.test_kill_loop import prove, start_load
from tests.running import ROOT, Daemon, Place

ROUNDS = int(os.environ.get("ROUNDS", "3"))
SEED = 31


def start(what: str, place: Place, seed: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.kill.model_filler", what, str(place.socket), str(seed)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def first_word(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> str:
    """Kill it; what it said since its first word."""
    process.kill()
    assert process.stdout is not None
    said = process.stdout.read()
    process.stdout.close()
    process.wait(10)
    return said


def no_model_is_half_seen(place: Place) -> None:
    """Whatever is whole is true; what is not cannot be attached to; the books balance."""
    for model in models.listed(place.socket):
        seed = int(model["name"].rpartition("-")[2])
        if model["state"] in ("whole", "verifying"):
            assert wrong_of(str(place.socket), seed) == ""
        else:
            with pytest.raises(Refused, match=r"partial|filling"):
                models.attach(model["name"], "r1", place.socket)
    with Client(str(place.socket), timeout_s=20.0, attach=False) as tool:
        assert tool.check() == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_kill_loop_with_models(place: Place, serve: Callable[..., Daemon], tmp_path: Path) -> None:
    """Under load of KV, whoever is killed and whenever: what is whole is true, and is there again without being read; the
    filler that is run again reads only what is missing; KV that was acknowledged comes back."""
    words = [
        *place.with_nvme(),
        "--set=dram.capacity_bytes=96MiB",
        "--set=models.dram_bytes=64MiB",
        "--set=nvme.capacity_bytes=1GiB",
    ]
    chance = random.Random(SEED)
    daemon = serve(place, *words)
    bring(str(place.socket), 0)  # stays, as long as somebody uses it
    for number in range(ROUNDS):
        user = start("use", place, 0)
        assert first_word(user) == "using"
        load = start_load(place, tmp_path / "ledger", number + 1)
        filler = start("fill", place, number % 3 + 1)
        assert first_word(filler) == "filling"
        time.sleep(chance.uniform(0.0, 0.3))
        victim = chance.choice(["daemon", "filler", "both"])
        if victim != "filler":
            daemon.stop(signal.SIGKILL)
        if victim == "daemon":
            daemon = serve(place, *words)
        end(filler)
        if victim == "both":
            daemon = serve(place, *words)
        load.kill()
        assert load.stdout is not None and load.stdout.read() == ""
        load.stdout.close()
        load.wait(10)
        no_model_is_half_seen(place)
        assert bring(str(place.socket), number % 3 + 1) <= sum(map(len, files(number % 3 + 1).values()))
        assert wrong_of(str(place.socket), number % 3 + 1) == ""
        assert name_of(0) in {model["name"] for model in models.listed(place.socket)}
        assert end(user) == ""
        prove(place, tmp_path / "ledger", newest=3)
    assert bring(str(place.socket), 0) == 0
