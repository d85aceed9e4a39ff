"""Recording: what a daemon keeps of lookups, and the lines that are made of it."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.index.block import Namespace
from kvstore.ledger import recording
from kvstore.ledger.recording import RECORD_WAITING_BYTES_MAX, Recording
from kvstore.protocol.frames import FRAME_BYTES_MAX, HASHES_MAX, Lookup, Reserve, encode_frame
from kvstore.tools.replay.recorder import RECORD_HOLD_S, RECORD_QUIET_S, Recorder, TraceFile
from kvstore.tools.replay.trace import read
from tiers.namespace_spec import NamespaceSpec

HASH_BYTES, BLOCK_TOKENS = 16, 16


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def space_of(name: str = "a", number: int = 1) -> Namespace:
    return Namespace(number, NamespaceSpec(name.encode() * 16, 4096, HASH_BYTES, BLOCK_TOKENS))


def block(name: object) -> bytes:
    return str(name).encode().ljust(HASH_BYTES, b".")


def asking(names: Sequence[object], ticket: int = 0, tokens: int = 0, **more: Any) -> Lookup:
    return Lookup([1], b"".join(map(block, names)), ticket, tokens=tokens, **more)


def storing(names: Sequence[object], parent: object, ticket: int) -> Reserve:
    return Reserve(1, b"".join(map(block, names)), block(parent) if parent != "" else b"", ticket)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def kept(clock: Clock) -> Recording:
    return Recording(clock)


@pytest.fixture
def recorder(tmp_path: Path, clock: Clock) -> Recorder:
    return Recorder(TraceFile(tmp_path / "t.jsonl"), clock.now_s)


def written(recorder: Recorder, kept: Recording, clock: Clock, path: Path) -> list[dict[str, Any]]:
    recorder.take(kept.take(), clock.now_s)
    recorder.write(clock.now_s, all_of_it=True)
    return lines_of(path)


def test_a_request_is_recorded_once_however_often_it_is_asked_for(clock: Clock, kept: Recording) -> None:
    """Asked again while it waits, for further namespaces, preempted, or on a decode engine: one request."""
    spaces = [space_of(), space_of("b", 2)]
    for _ in range(3):
        kept.asked(asking("abc", 7), spaces)
    kept.asked(asking("abc", 7, more=True), [space_of("c", 3)])
    kept.asked(asking("abcd", 8, again=True), spaces)
    (one,) = kept.take().requests
    assert (one.hashes, one.block_bytes) == (asking("abc").hashes, 2 * spaces[0].slot_bytes)
    kept.asked(asking("abc"), spaces)
    kept.asked(asking("abc"), spaces)  # without a ticket nobody knows: two
    assert len(kept.take().requests) == 2


def test_a_block_takes_what_it_does_in_all_groups(kept: Recording) -> None:
    """Of a hybrid model a block of the first group takes half a block of one with twice the tokens: as soon as one request has hit,
    and was asked for there, also of those that miss."""
    small, large = space_of(), Namespace(2, NamespaceSpec(b"d" * 16, 65536, HASH_BYTES, 2 * BLOCK_TOKENS))
    kept.asked(asking("abc", 1), [small])
    kept.asked(asking("ab", 1, more=True), [large])
    kept.asked(asking("abc", 1), [small])
    kept.asked(asking("ab", 1, more=True), [large])
    kept.asked(asking("xyz", 2), [small])
    sizes = [one.block_bytes for one in kept.take().requests]
    assert sizes == [small.slot_bytes, small.slot_bytes + large.slot_bytes // 2]


def test_lengths_are_exact_and_output_is_whole_blocks(
    clock: Clock, kept: Recording, recorder: Recorder, tmp_path: Path
) -> None:
    """The prompt's tokens as told; of output what was offered behind the prompt, in one or several runs, as far as
    there is no gap, less than a block too few."""
    space = space_of()
    kept.asked(asking("abc", 7, tokens=53), [space])  # 3 blocks and 5 tokens
    kept.stored(storing("bc", "a", 7))  # of the prompt: no output
    kept.stored(storing("cde", "b", 7))  # block d has 11 tokens of output, e 16
    kept.stored(storing("fg", "e", 7))
    kept.stored(storing("i", "h", 7))  # behind a gap
    kept.stored(storing("z", "c", 99))  # of nobody who was recorded
    kept.asked(asking("", 8, tokens=9), [space])
    kept.stored(storing("x", "", 8))
    first, second = written(recorder, kept, clock, tmp_path / "t.jsonl")
    assert (first["input_length"], first["output_length"]) == (53, 7 * BLOCK_TOKENS - 53)
    assert (second["input_length"], second["output_length"], second["hash_ids"]) == (9, 7, [])
    assert recorder.output_tokens == 7 * BLOCK_TOKENS - 53 + 7


def test_lines_are_written_in_order_when_their_output_is_there(
    clock: Clock, kept: Recording, recorder: Recorder, tmp_path: Path
) -> None:
    """Quiet for ten seconds, or a minute old: then a line is written, and never before one that came earlier."""
    space, path = space_of(), tmp_path / "t.jsonl"
    kept.asked(asking("ab", 1), [space])
    clock.now_s += 0.25
    kept.asked(asking("x"), [space])  # has no ticket: there will be no news
    last = "b"
    for n in range(13):  # the first one generates a block every 5 s
        recorder.take(kept.take(), clock.now_s)
        assert path.read_bytes() == b"", n
        clock.now_s += 5
        kept.stored(storing([n], last, 1))
        last = str(n)
        if clock.now_s - 1000.25 >= RECORD_HOLD_S:
            break
    recorder.take(kept.take(), clock.now_s)
    first, second = lines_of(path)
    assert (first["timestamp"], second["timestamp"]) == (0, 250)
    assert first["output_length"] == 12 * BLOCK_TOKENS
    kept.asked(asking("y", 3), [space])
    recorder.take(kept.take(), clock.now_s)
    clock.now_s += RECORD_QUIET_S
    recorder.take(kept.take(), clock.now_s)
    assert len(lines_of(path)) == 3


def test_what_waits_is_bounded_and_counted(
    clock: Clock, kept: Recording, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody fetches: so many requests and bytes are kept, the others are counted; then it goes on."""
    space = space_of()
    monkeypatch.setattr(recording, "RECORD_WAITING_MAX", 10)
    for ticket in range(1, 16):
        kept.asked(asking("ab", ticket), [space])
        kept.asked(asking("ab", ticket), [space])  # lost once, though asked for twice
    answer = kept.take()
    assert (len(answer.requests), answer.lost) == (10, 5)
    recorder.take(answer, clock.now_s)
    monkeypatch.setattr(recording, "RECORD_WAITING_BYTES_MAX", 1000)
    for ticket in range(20, 25):
        kept.asked(asking(range(20), ticket), [space])
    answer = kept.take()
    assert (len(answer.requests), answer.lost) == (2, 8)
    recorder.take(answer, clock.now_s)
    assert (recorder.requests, recorder.lost_requests) == (12, 8)


@pytest.mark.parametrize("prompts", [1, 3, 40])
def test_answers_fit_a_frame(clock: Clock, kept: Recording, prompts: int) -> None:
    """Also of the longest prompts there may be; what does not fit comes with the next answer."""
    space, hashes = space_of(), os.urandom(HASHES_MAX * HASH_BYTES)
    for _ in range(prompts):
        kept.asked(Lookup([1], hashes), [space])
    expected, got = min(prompts, RECORD_WAITING_BYTES_MAX // (len(hashes) + 100)), 0
    while True:
        answer = kept.take()
        assert len(encode_frame(answer)) <= FRAME_BYTES_MAX
        got += len(answer.requests)
        if not answer.left:
            break
    assert (got, answer.lost) == (expected, prompts - expected)
    longest = Lookup([1], os.urandom(FRAME_BYTES_MAX - 100 - 100))
    kept.asked(longest, [space])
    assert len(encode_frame(kept.take())) <= FRAME_BYTES_MAX


prompts_of_two_models = st.lists(
    st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 2), max_size=6)), min_size=1, max_size=20
)


def numbered(prompts: list[tuple[str, list[int]]]) -> list[list[int]]:
    """The numbers that a recording has for prompts: (model, what its blocks hold)."""
    spaces = {"a": space_of("a"), "b": space_of("b")}
    clock = Clock()
    kept = Recording(clock)
    for model, path in prompts:
        chain = [hashlib.md5(repr(path[: n + 1]).encode()).digest() for n in range(len(path))]
        kept.asked(Lookup([1], b"".join(chain)), [spaces[model]])
    with tempfile.TemporaryDirectory() as directory:
        file = TraceFile(Path(directory) / "t")
        lines = written(Recorder(file, clock.now_s), kept, clock, Path(directory) / "t")
        file.close()
    return [line["hash_ids"] for line in lines]


@settings(max_examples=60)
@given(prompts_of_two_models)
def test_numbers_say_what_is_shared(prompts: list[tuple[str, list[int]]]) -> None:
    """Two blocks have one number exactly where model and tokens up to there are equal; numbers are dense."""
    of: dict[tuple[str, str], int] = {}
    for (model, path), ids in zip(prompts, numbered(prompts), strict=True):
        assert len(ids) == len(path)
        for at, number in enumerate(ids):
            assert of.setdefault((model, repr(path[: at + 1])), number) == number
    assert sorted(of.values()) == list(range(len(of)))


@settings(max_examples=60)
@given(prompts_of_two_models)
def test_numbers_of_two_recordings_do_not_match(prompts: list[tuple[str, list[int]]]) -> None:
    """One that began a request later has another number for every block: numbers are no names."""
    earlier, later = numbered([("b", [9]), *prompts])[1:], numbered(prompts)
    for one, other in zip(earlier, later, strict=True):
        assert all(a != b for a, b in zip(one, other, strict=True))


def test_what_a_client_repeats_is_cut_off(
    clock: Clock, kept: Recording, recorder: Recorder, tmp_path: Path
) -> None:
    """A lookup that names a block twice is nonsense, and must not make the whole file unreadable for replay."""
    kept.asked(asking("abcbd"), [space_of()])
    (line,) = written(recorder, kept, clock, tmp_path / "t.jsonl")
    assert line["hash_ids"] == [0, 1, 2]
    assert read([tmp_path / "t.jsonl"]).block_refs == 3


def test_after_a_restart_of_the_daemon_numbers_and_time_go_on(
    clock: Clock, kept: Recording, recorder: Recorder, tmp_path: Path
) -> None:
    """Another daemon counts requests and seconds from anywhere: the file has one clock, and blocks keep their numbers."""
    space = space_of()
    kept.asked(asking("ab", 1), [space])
    recorder.take(kept.take(), clock.now_s)
    recorder.disconnected()
    other = Clock()
    other.now_s = 5.0
    again = Recording(other)
    clock.now_s += 30
    recorder.take(again.take(), clock.now_s)
    other.now_s += 2
    again.asked(asking("abc", 1), [space])
    again.stored(storing("z", "c", 1))
    clock.now_s += 2
    recorder.take(again.take(), clock.now_s)
    recorder.write(clock.now_s, all_of_it=True)
    first, second = lines_of(tmp_path / "t.jsonl")
    assert (first["timestamp"], second["timestamp"]) == (0, 32_000)
    assert (first["hash_ids"], second["hash_ids"]) == ([0, 1], [0, 1, 2])
    assert (first["output_length"], second["output_length"]) == (0, BLOCK_TOKENS)


def test_a_full_disk_leaves_whole_lines(
    clock: Clock, kept: Recording, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not fit any more is taken back to the last whole line, and a later one follows it without a hole."""
    kept.asked(asking("ab"), [space_of()])
    recorder.take(kept.take(), clock.now_s)
    whole = (tmp_path / "t.jsonl").read_bytes()
    write, room = os.write, [7]

    def full(fd: int, content: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        count = write(fd, content[: room[0]])
        room[0] -= count
        return count

    monkeypatch.setattr(os, "write", full)
    kept.asked(asking("abc"), [space_of()])
    with pytest.raises(OSError, match="No space"):
        recorder.take(kept.take(), clock.now_s)
    assert (tmp_path / "t.jsonl").read_bytes() == whole
    assert recorder.file.size_bytes == len(whole)
    room[0] = 1 << 20  # somebody has made room meanwhile
    recorder.write(clock.now_s)
    assert len(lines_of(tmp_path / "t.jsonl")) == 2


def test_recording_a_lookup_is_cheap(kept: Recording) -> None:
    """Hashes are kept as they came: no copy, no look into them, whatever the length."""
    request = Lookup([1], os.urandom(HASHES_MAX * HASH_BYTES), 5)
    kept.asked(request, [space_of()])
    assert kept.take().requests[0].hashes is request.hashes
