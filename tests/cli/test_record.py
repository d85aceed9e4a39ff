"""`kvstore record` with a real daemon: what it writes is what was asked, and replay of it is what the daemon did."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.traffic import SHAPES
from kvstore.client import Client, Namespace, Unavailable
from kvstore.tools.replay.trace import read
from tests.cli.terminal import on_terminal
from tests.running import TIMEOUT_S, Daemon, Place, environment, kvstore

BLOCK_TOKENS, RECORD_BYTES = 16, 64 << 10  # 256 of them in 16 MiB
TENANT = "tenant-nobody-may-know"
CLEAR_LINE = re.compile("\r(?:\x1b\\[1A)?\x1b\\[2K")  # this one, or the one above
CURSOR = re.compile("\x1b\\[[?]25[lh]")
TOLERANCE = {"lru": 0.0005, "kvstore": 0.02}  # of the hit ratio: ours looks at the clock, too


class Recording:
    """A `kvstore record` in a process of its own, that has begun."""

    def __init__(self, daemon: Daemon, path: Path, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvstore", "record", path, "--socket", daemon.socket, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        wait(lambda: self.process.poll() is not None or path.exists())

    def end(self, how: signal.Signals = signal.SIGINT) -> dict[str, Any]:
        """The summary (with -o json)."""
        self.process.send_signal(how)
        out, errors = self.process.communicate(timeout=TIMEOUT_S)
        assert self.process.returncode == 0, errors
        summary: dict[str, Any] = json.loads(out)
        return summary


def wait(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def chain(numbers: Sequence[int]) -> list[bytes]:
    """Block hashes that name everything before them, too."""
    hashes, before = [], b""
    for number in numbers:
        before = hashlib.sha256(before + number.to_bytes(8, "big")).digest()
        hashes.append(before)
    return hashes


def space_of(client: Client) -> Namespace:
    return client.namespace(
        b"m" * 16, RECORD_BYTES, 32, BLOCK_TOKENS, {"model": "model-nobody-may-know", "tenant": TENANT}
    )


def serve_one(client: Client, space: Namespace, hashes: list[bytes], ticket: int, tokens: int = 0) -> None:
    """As an engine does: look up, read what is there, store the rest."""
    held = client.lookup([space], hashes, ticket=ticket, tokens=tokens)
    if held:
        client.acquire(space, hashes[:held], 1.0, ticket).release()
    if hashes[held:]:
        parent = hashes[held - 1] if held else b""
        client.reserve(space, hashes[held:], parent, ticket).commit()


@pytest.fixture
def client(place: Place) -> Iterator[Client]:
    with Client(place.socket, timeout_s=20.0, label="test") as connected:
        yield connected


@pytest.mark.parametrize("policy", ["lru", "kvstore"])
def test_replay_of_a_recording_is_what_the_daemon_did(
    place: Place, serve: Callable[..., Daemon], client: Client, tmp_path: Path, policy: str
) -> None:
    """Recorded while a daemon serves chat and agents: the file has the same sharing as the traffic, and `replay` with the same
    policy and size finds the hit ratio that the daemon reports."""
    daemon = serve(place, *place.arguments, f"--set=engine.policy={policy}")
    asked = [request for request in SHAPES["mix"](4, 15_000) if 0 < len(request.hashes) <= 60]
    path = tmp_path / "t.jsonl"
    recording = Recording(daemon, path, "-o", "json")
    space = space_of(client)
    for ticket, request in enumerate(asked, 1):
        serve_one(client, space, chain(request.hashes), ticket, len(request.hashes) * BLOCK_TOKENS + 3)
    summary = recording.end()
    assert (summary["requests"], summary["lost_requests"], summary["ended"]) == (len(asked), 0, "interrupted")
    (row,) = client.report(0)["rows"]
    tokens = row["tokens"]
    assert summary["input_tokens"] == row["tokens_asked"]
    served = tokens["dram"] / (row["tokens_asked"] - tokens["partial_block"])
    assert 0.1 < served < summary["reusable_ratio"] - 0.05, "a full cache, or the test shows nothing"
    original = tmp_path / "asked.jsonl"
    original.write_text("".join(json.dumps({"timestamp": 0, "hash_ids": r.hashes}) + "\n" for r in asked))
    assert read([path]).prompts == read([original]).prompts  # named in the order of appearance: the same tree
    told = kvstore("replay", path, "--capacity", "16MiB", "--policy", policy, "-o", "json")
    (result,) = json.loads(told.stdout)["results"]
    assert result["hit_ratio"] == pytest.approx(served, abs=TOLERANCE[policy])


def test_nothing_in_the_file_names_anybody(
    place: Place, serve: Callable[..., Daemon], client: Client, tmp_path: Path
) -> None:
    """No name, no hash, no time of day; only its owner may read it."""
    daemon, path = serve(place), tmp_path / "t.jsonl"
    recording = Recording(daemon, path, "--requests", "2", "-o", "json")
    space, hashes = space_of(client), chain(range(5))
    serve_one(client, space, hashes, 1, 83)
    serve_one(client, space, hashes[:2], 2, 33)
    assert json.loads(recording.process.communicate(timeout=TIMEOUT_S)[0])["ended"] == "requests"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [sorted(line) for line in lines] == 2 * [
        sorted(("timestamp", "input_length", "output_length", "hash_ids", "block_tokens", "block_bytes"))
    ]
    assert [line["hash_ids"] for line in lines] == [[0, 1, 2, 3, 4], [0, 1]]
    assert [line["input_length"] for line in lines] == [83, 33]
    assert {(line["block_tokens"], line["block_bytes"]) for line in lines} == {(BLOCK_TOKENS, RECORD_BYTES)}
    assert max(line["timestamp"] for line in lines) < 1000 * TIMEOUT_S
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_recordings_are_apart_and_end_with_their_connection(
    place: Place, serve: Callable[..., Daemon], client: Client, tmp_path: Path
) -> None:
    """Several at once each have all; kill -9 of one leaves a file that replay reads, and nothing in the daemon."""
    daemon, space = serve(place), space_of(client)
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    killed = Recording(daemon, one)
    ended = Recording(daemon, other, "-o", "json")
    for _ in range(3):
        client.lookup([space], chain(range(4)))  # without a ticket: written at once
    wait(lambda: one.read_text().count("\n") == 3)
    killed.process.kill()
    killed.process.communicate(timeout=TIMEOUT_S)
    client.lookup([space], chain(range(6)))
    assert ended.end()["requests"] == 4
    assert len(read([one]).prompts) == 3
    wait(lambda: client.status()["door"]["connections"] == 1)


def test_a_daemon_that_is_killed_is_waited_for(
    place: Place, serve: Callable[..., Daemon], client: Client, tmp_path: Path
) -> None:
    """kill -9 of the daemon: a warning, and what the next one is asked comes into the same file, with the same numbers."""
    daemon, path = serve(place), tmp_path / "t.jsonl"
    recording = Recording(daemon, path, "-o", "json")
    client.lookup([space_of(client)], chain(range(4)), ticket=1)
    wait(lambda: client.status()["door"]["frames"]["Record"] >= 4)
    daemon.stop(signal.SIGKILL)
    serve(place)

    def is_recorded() -> bool:
        try:
            return bool(client.status()["door"]["frames"].get("Record", 0))
        except Unavailable:
            return False

    wait(is_recorded)
    client.lookup([space_of(client)], chain(range(5)), ticket=1)
    recording.process.send_signal(signal.SIGTERM)
    out, errors = recording.process.communicate(timeout=TIMEOUT_S)
    assert recording.process.returncode == 0
    assert errors.count("waiting for it") == 1 and "the daemon is back" in errors
    summary = json.loads(out)
    assert (summary["interruptions"], summary["requests"]) == (1, 2)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["hash_ids"] for line in lines] == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert lines[0]["timestamp"] <= lines[1]["timestamp"]


def test_a_file_is_never_written_over_unasked(
    place: Place, serve: Callable[..., Daemon], tmp_path: Path
) -> None:
    """Exit code 1 and the file as it was; --force makes a new one, for the owner only, but of no link or device."""
    serve(place)
    path, link = tmp_path / "t.jsonl", tmp_path / "link"
    path.write_text("mine\n")
    link.symlink_to(path)
    words: list[str | Path] = ["record", path, "--for", "0.1", "--socket", place.socket]
    refused = kvstore(*words)
    assert (refused.returncode, path.read_text()) == (1, "mine\n")
    assert "is there already; --force writes over it" in refused.stderr
    for other in (link, Path("/dev/null"), tmp_path):
        refused = kvstore("record", other, "--force", "--for", "0.1", "--socket", place.socket)
        assert (refused.returncode, "no regular file" in refused.stderr) == (1, True), other
    path.chmod(0o644)
    done = kvstore(*words, "--force")
    assert done.returncode == 0, done.stderr
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("", 0o600)
    assert done.stdout.startswith("0 requests in ") and "no engine asked" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "FILE"),
        (["f", "--for", "1x"], 2, "allowed are seconds"),
        (["f", "--for", "0"], 2, "allowed are 0.001 s to 365 d"),
        (["f", "--requests", "0"], 2, "whole numbers from 1"),
        (["f", "--requests", "many"], 2, "whole numbers from 1"),
        (["nowhere/f"], 3, "no directory"),
        (["f"], 4, "is it running?"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path: Path, words: list[str], code: int, said: str) -> None:
    """One line that says what is allowed, and no file is made."""
    words = [str(tmp_path / word) if word.endswith("f") else word for word in words]
    refused = kvstore("record", *words, "--socket", tmp_path / "s")
    assert refused.returncode == code
    assert said in refused.stderr and refused.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_too_many_recordings_are_refused(place: Place, serve: Callable[..., Daemon], tmp_path: Path) -> None:
    """Each keeps memory in the daemon: the ninth is told so, and makes no file."""
    serve(place)
    clients = [Client(place.socket, timeout_s=20.0, attach=False) for _ in range(8)]
    for one in clients:
        one.record()
    refused = kvstore("record", tmp_path / "f", "--for", "1", "--socket", place.socket)
    assert (refused.returncode, "8 recordings at a time" in refused.stderr) == (1, True)
    assert not (tmp_path / "f").exists()
    clients.pop().close()
    done = kvstore("record", tmp_path / "f", "--for", "0.1", "--socket", place.socket)
    assert done.returncode == 0, done.stderr
    for one in clients:
        one.close()


@pytest.mark.parametrize("columns", [80, 40])
def test_progress_is_one_line_on_a_terminal(
    place: Place, serve: Callable[..., Daemon], tmp_path: Path, columns: int
) -> None:
    """Requests, rate, size and time left, written over in place, never wider than the terminal; nothing of it is left."""
    serve(place)
    code, shown = on_terminal(columns, "record", tmp_path / "f", "--for", "1.5", "--socket", place.socket)
    assert code == 0
    *progress, last = CLEAR_LINE.split(CURSOR.sub("", shown))
    assert any("0 requests, 0/s" in line for line in progress)
    assert all(len(line.removesuffix("\n")) <= columns for line in progress)
    assert last.startswith("0 requests in 1.")


def test_sizes_are_capacities_of_a_recording(tmp_path: Path) -> None:
    """`replay --capacity 2MiB` is as many blocks as fit; a trace that does not say what a block takes is told so."""
    path = tmp_path / "t.jsonl"
    line = {
        "timestamp": 0,
        "input_length": 53,
        "hash_ids": list(range(64)),
        "block_tokens": 16,
        "block_bytes": 65536,
    }
    path.write_text(json.dumps(line))
    words: list[str | Path] = ["replay", path, "--policy", "lru", "-o", "json", "--tail", "drop"]
    done = kvstore(*words, "--capacity", "2MiB,8GiB,25%")
    results = json.loads(done.stdout)["results"]
    assert [result["capacity_blocks"] for result in results] == [15, 32, 63]
    assert "8GiB: all of the trace's blocks" in done.stderr
    del line["block_bytes"]
    path.write_text(json.dumps(line))
    refused = kvstore(*words, "--capacity", "2MiB")
    assert (refused.returncode, "does not say what a block takes" in refused.stderr) == (2, True)
    path.write_text(json.dumps({**line, "block_tokens": 0}))
    refused = kvstore(*words)
    assert (refused.returncode, "block_tokens" in refused.stderr) == (2, True)
