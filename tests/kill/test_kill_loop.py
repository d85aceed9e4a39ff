"""kill -9 at random instants under load: no wrong byte, books balanced, nothing held, hits again."""

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

from kvstore.client import Client
from tests.kill import load
from tests.running import ROOT, Daemon, Place

ROUNDS = int(os.environ.get("ROUNDS", "6"))
SEED = 20


def start_load(place: Place, ledger: Path, seed: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.kill.load", str(place.socket), str(ledger), str(seed)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "loading\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    """Kill the load and make sure that it saw no wrong byte until then."""
    process.kill()
    assert process.stdout is not None
    said = process.stdout.read()
    process.stdout.close()
    process.wait(10)
    assert said == ""
    assert process.returncode == -signal.SIGKILL


def wait_until(truth: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not truth():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


def prove(place: Place, ledger: Path, newest: int) -> int:
    """Nothing is held by the dead, the books balance, and the newest chains are hit; answers blocks read."""
    with Client(str(place.socket), timeout_s=20.0, label="prove") as client:
        space = load.namespace(client)

        def leases_are_returned() -> bool:
            status = client.status()
            return (
                sum(session["leases"] for session in status["sessions"]) == 0
                and status["arena"]["quarantined_slots"] == 0
                and not status["adopting"]
            )

        wait_until(leases_are_returned, "leases of the dead were not returned, or rows not read")
        with Client(str(place.socket), timeout_s=20.0, label="check", attach=False) as tool:
            assert tool.check() == []
        read = 0
        for number, count in load.ledger_lines(ledger)[-newest:]:
            got = load.read_back(client, space, number, count)
            assert got == count, f"chain {number}: {got} of {count} blocks came back: {client.status()}"
            read += count
        return read


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_kill_loop(place: Place, serve: Callable[..., Daemon], tmp_path: Path) -> None:
    """Whoever is killed, and whenever, what was acknowledged comes back byte for byte."""
    words = [*place.with_nvme(), "--set=dram.capacity_bytes=32MiB", "--set=nvme.capacity_bytes=1GiB"]
    ledger = tmp_path / "ledger"
    chance = random.Random(SEED)
    daemon = serve(place, *words)
    read = 0
    for number in range(ROUNDS):
        process = start_load(place, ledger, number + 1)
        time.sleep(chance.uniform(0.02, 0.5))
        victim = chance.choice(["daemon", "client", "both"])
        if victim != "client":
            daemon.stop(signal.SIGKILL)
        if victim == "daemon":  # the client goes on and finds the next daemon by itself
            daemon = serve(place, *words)
            time.sleep(chance.uniform(0.0, 0.2))
        end(process)
        if victim == "both":
            daemon = serve(place, *words)
        read += prove(place, ledger, newest=12)
    assert read > ROUNDS * 12
    assert daemon.stop() == 0
    daemon = serve(place, *words)
    assert prove(place, ledger, newest=40) > 0
    assert daemon.stop() == 0
