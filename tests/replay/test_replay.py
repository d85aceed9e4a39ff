"""Replay: traces are read right, the engine is the daemon's, the figures are what they should be."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.envelope import AIM_POINTS, compare, generated
from benchmarks.traffic import SHAPES
from kvstore.errors import ReplayError
from kvstore.policies.base import Policies
from kvstore.policies.learned import hazard
from kvstore.policies.lru import LeafLru
from kvstore.policies.names import OURS
from kvstore.tools.cli import main
from kvstore.tools.replay import cell, table
from kvstore.tools.replay.policies import BOUND, EVERYTHING, POLICIES, REFERENCES
from kvstore.tools.replay.trace import Assumed, Trace, read
from tests.pages import read_page

IS_SOAK = "SEEDS" in os.environ
# Traffic that nobody has seen in life, and short: the right judge is found too late. What is
# reached where the aim is not. A change that lets one of these grow has to be worth it elsewhere.
GAPS = {"drift": 1.6, "popular": 0.8, "rag": 0.5}  # points


def write(path: Path, *requests: tuple[int, list[int]], tokens: int | None = 0) -> Path:
    told = {} if tokens is None else {"input_length": tokens}
    lines = [
        json.dumps({"timestamp": at, **told, "output_length": 1, "hash_ids": ids}) for at, ids in requests
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def ratio(trace: Trace, policy: str, fraction: float) -> float:
    return table.run_cell(trace, table.plan(trace, [policy], [fraction])[0]).hit_ratio


def test_gzip_and_plain_are_the_same(tmp_path: Path) -> None:
    """A packed trace is recognised by its bytes, whatever it is called."""
    plain = write(tmp_path / "a.jsonl", (0, [1, 2]), (5, [1, 2, 3]))
    packed = tmp_path / "b.jsonl"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read([plain]) == read([packed])
    assert read([plain]).unique_blocks == 3


def test_a_partly_filled_tail_can_be_left_out(tmp_path: Path) -> None:
    """`--tail drop` drops the last block of prompts that are not whole blocks, and of no others."""
    path = write(tmp_path / "a.jsonl", (0, [1, 2]), tokens=513)
    assert read([path], drop_tail=True).block_refs == 1
    path = write(tmp_path / "b.jsonl", (0, [1, 2]), tokens=1024)
    assert read([path], drop_tail=True).block_refs == 2


def test_a_block_named_twice_in_a_prompt_is_two(tmp_path: Path) -> None:
    """Each behind another one, so each is a block of its own; a file is not refused for it."""
    trace = read([write(tmp_path / "a.jsonl", (0, [1, 2, 1, 1]), (1, [1, 2, 1]))])
    assert (trace.unique_blocks, trace.block_refs, trace.repeated_ids) == (4, 7, 3)


@pytest.mark.parametrize("block_tokens", [16, 64, 256])
def test_blocks_of_other_sizes_are_noticed_and_can_be_given(tmp_path: Path, block_tokens: int) -> None:
    """Whole blocks that are taken for partly filled ones are counted, with the size that would fit; given that size,
    `--tail drop` leaves out what is partly filled and nothing else."""
    path = write(tmp_path / "a.jsonl", (0, list(range(20))), tokens=20 * block_tokens)
    wrong = read([path], drop_tail=True)
    assert (wrong.block_refs, wrong.unfit_lines, wrong.fitting_tokens) == (19, 1, block_tokens)
    right = read([path], drop_tail=True, assumed=Assumed(block_tokens))
    assert (right.block_refs, right.unfit_lines) == (20, 0)
    path = write(path, (0, list(range(20))), tokens=20 * block_tokens - 1)
    assert read([path], drop_tail=True, assumed=Assumed(block_tokens)).block_refs == 19


@pytest.mark.parametrize("ids", [[], list(range(20))])
def test_no_size_is_advised_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ids: list[int]
) -> None:
    """A line without blocks, and one that no other size fits better, are told without advice."""
    path = write(tmp_path / "a.jsonl", (0, [1]), tokens=512)
    with path.open("a") as file:
        file.write(json.dumps({"timestamp": 1, "hash_ids": ids, "input_length": 8000}) + "\n")
    assert main(["replay", str(path), "--policy", "lru"]) == 0
    said = capsys.readouterr().err
    assert (
        "1 line with an input_length that does not fit its blocks" in said
        and "try --block-tokens" not in said
    )


def test_seconds_can_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Timestamps are milliseconds unless somebody says so; what they were taken for is said."""
    path = write(tmp_path / "a.jsonl", (0, [1]), (60, [1, 2]), tokens=None)
    assert read([path]).times_s == [0.0, 0.06]
    assert read([path], assumed=Assumed(a_second=1)).times_s == [0.0, 60.0]
    assert main(["replay", str(path), "--policy", "lru", "--time-unit", "s"]) == 0
    assert "timestamps taken as s: 60 s" in capsys.readouterr().err
    assert main(["replay", str(path), "--policy", "lru", "--block-tokens", "0"]) == 2


def test_a_tail_of_unknown_length_stays(tmp_path: Path) -> None:
    """`--tail drop` drops only where `input_length` is told: a missing one is not 0 tokens."""
    path = write(tmp_path / "a.jsonl", (0, [1, 2]), (1, [1, 3]), tokens=None)
    assert read([path], drop_tail=True) == read([path])
    assert read([path]).block_refs == 4
    path.write_text('{"timestamp": 0, "hash_ids": [1, 2], "input_length": null}')
    assert read([path], drop_tail=True).block_refs == 2
    assert read([write(path, (0, [1, 2]), tokens=0)], drop_tail=True).block_refs == 1


def test_time_never_runs_backwards_and_files_share_no_blocks(tmp_path: Path) -> None:
    """Late lines happen at the time of the line before; equal numbers in two files are two blocks."""
    first = write(tmp_path / "a.jsonl", (9000, [1]), (4000, [2]))
    trace = read([first, write(tmp_path / "b.jsonl", (0, [1]))])
    assert trace.times_s == [9.0, 9.0, 9.0]
    assert trace.unique_blocks == 3


LARGE = "1" + "0" * 400  # no float is so large


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"timestamp": 1}',
        "",
        *(
            f'{{"timestamp": 1, "hash_ids": [1], "{name}": {LARGE}}}'
            for name in ("input_length", "block_bytes")
        ),
    ],
)
def test_a_bad_trace_is_named(tmp_path: Path, text: str) -> None:
    """What cannot be read stops the replay with the file's name, and the line's where there is one."""
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ReplayError, match=r"bad\.jsonl"):
        read([path])


@pytest.mark.parametrize(
    ("last", "cut"), [('{"timestamp": 2, "hash', 1), ('{"timestamp": 2, "hash_ids": [3]}', 0)]
)
def test_a_last_line_that_is_cut_off_is_left_out(tmp_path: Path, last: str, cut: int) -> None:
    """As kill -9 of a recorder leaves it; one that only lacks its end of line is read, and others are errors."""
    path = write(tmp_path / "cut.jsonl", (0, [1, 2]))
    whole = path.read_text()
    path.write_text(whole + last)
    trace = read([path])
    assert (trace.cut_lines, len(trace.prompts)) == (cut, 2 - cut)
    for text in (last[:12] + "\n", '{"timestamp": "x"}'):
        path.write_text(whole + text)
        with pytest.raises(ReplayError, match=r"cut\.jsonl:2"):
            read([path])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True), min_size=1, max_size=12))
def test_whatever_is_read_can_be_replayed(prompts: list[list[int]]) -> None:
    """Ids in any order, before and after each other: every policy gets through, and all prefixes are blocks."""
    with tempfile.TemporaryDirectory() as directory:
        trace = read([write(Path(directory) / "a.jsonl", *enumerate(prompts))])
    assert trace.unique_blocks == len({tuple(p[: at + 1]) for p in prompts for at in range(len(p))})
    for slots in (1, 3, 10):
        assert 0 <= cell.run(trace, slots, POLICIES[OURS]()) <= 1


def test_ids_that_follow_several_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are no chained hashes: behind each one they are another block, as for an engine, and that is told."""
    path = write(tmp_path / "a.jsonl", (0, [1, 2, 3]), (1, [4, 2, 3]), (2, [3]), (3, [1, 2]))
    assert read([path]).unchained_ids == 2
    assert read([path]).unique_blocks == 7
    assert main(["replay", str(path), "--capacity", "50%", "--policy", "lru"]) == 0
    assert "2 hash ids follow several others" in capsys.readouterr().err


def test_equal_ids_of_two_files_are_not_the_same(tmp_path: Path) -> None:
    """Files were recorded apart: equal ids may follow others, also those of a dropped tail."""
    first = write(tmp_path / "a.jsonl", (0, [1, 2, 3]), (1, []), (2, [1, 4]))
    second = write(tmp_path / "b.jsonl", (0, [3, 2, 1]))
    assert read([first, second], drop_tail=True).unique_blocks == 2 + 2
    assert read([first, second]).unique_blocks == 4 + 3


@pytest.mark.parametrize("shape", SHAPES)
def test_generated_traffic_is_chained(tmp_path: Path, shape: str) -> None:
    """Every shape of made-up traffic is a trace as it has to be."""
    assert not generated(tmp_path, shape, 3, 3000).unchained_ids


def test_a_line_of_brackets_is_named(tmp_path: Path) -> None:
    """A field nobody reads, nested deeper than the parser goes, is an error with file and line."""
    path = write(tmp_path / "a.jsonl", (0, [1]))
    with path.open("a") as file:
        file.write('{"timestamp":0,"hash_ids":[1],"x":' + 100_000 * "[")
    with pytest.raises(ReplayError, match=r"a\.jsonl:2: nested too deeply"):
        read([path])


def test_a_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    """Whatever a flipped byte makes of a packed trace, it is an error of that file or a trace, and no other."""
    plain = write(tmp_path / "a.jsonl", *((n, [n, n + 10_000]) for n in range(1000)))
    packed = gzip.compress(plain.read_bytes())
    said = ""
    for at in range(20, len(packed) - 8, len(packed) // 100):
        plain.write_bytes(packed[:at] + bytes((packed[at] ^ 0xFF,)) + packed[at + 1 :])
        with pytest.raises(ReplayError, match=r"a\.jsonl") as caught:
            read([plain])
        said += str(caught.value)
    assert "damaged gzip after line" in said and "invalid" in said


def test_half_a_gzip_file_is_named(tmp_path: Path) -> None:
    """A packed trace that was cut short is an error, not a short trace."""
    path = write(tmp_path / "a.jsonl", *((n, [n, n + 1]) for n in range(0, 4000, 2)))
    path.write_bytes(gzip.compress(path.read_bytes())[:-2000])
    with pytest.raises(ReplayError, match=r"a\.jsonl"):
        read([path])


def test_the_engine_agrees_with_lru_on_paper(tmp_path: Path) -> None:
    """Three slots, four prompts: hits counted by hand; a hit needs its whole prefix."""
    path = write(tmp_path / "a.jsonl", (0, [1, 2]), (1, [1, 3]), (2, [1, 2]), (3, [4, 5, 6]), (4, [1]))
    # 0: stores 1 2; 1: hits 1, stores 3; 2: hits 1 2; 3: evicts 3 2 1; 4: misses
    assert cell.run(read([path]), 3, Policies(LeafLru)) == 3 / 10


@pytest.mark.parametrize("name", [*POLICIES, BOUND])
def test_everything_that_fits_is_hit(tmp_path: Path, name: str) -> None:
    """With a slot for every block all policies equal the infinite cache."""
    trace = generated(tmp_path, "agents", 3, 4000)
    assert ratio(trace, name, 1.0) == ratio(trace, EVERYTHING, 1.0) > 0.5


@pytest.mark.parametrize("name", POLICIES)
def test_nobody_beats_the_bound(tmp_path: Path, name: str) -> None:
    """On traffic like life Belady's bound, approximate as it is, is not below a policy that does not know the future."""
    trace = generated(tmp_path, "chat", 2, 10_000)
    for fraction in (0.02, 0.1):
        assert ratio(trace, name, fraction) <= ratio(trace, BOUND, fraction)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["chat", *(IS_SOAK * ["agents", "scan", "shift", "study", "tasks"])])
def test_ours_is_close_to_the_envelope(shape: str) -> None:
    """On conversations, and in `make soak` on documents, scans, agents and sudden changes, ours is nowhere further below the best
    reference than is aimed at. `python -m benchmarks.envelope` has more capacities, seeds and blocks."""
    assert min(cell.points for cell in compare(shape, 21, 60_000, (0.1,))) >= -AIM_POINTS


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["loop", *(IS_SOAK * ["drift", "mix", "popular", "rag"])])
def test_ours_is_not_far_from_the_envelope_on_odd_traffic(shape: str) -> None:
    """On traffic without conversations, short as it is, the gaps are known."""
    assert min(cell.points for cell in compare(shape, 21, 20_000, (0.01, 0.1))) >= -GAPS.get(
        shape, AIM_POINTS
    )


@pytest.mark.skipif(not IS_SOAK, reason="of make soak: two long replays")
def test_a_sample_of_uses_teaches_as_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large cache counts one use of many, and decides as well as if it counted all."""
    trace = generated(tmp_path, "chat", 21, 60_000)
    counted = ratio(trace, OURS, 0.1)
    monkeypatch.setattr(hazard, "REUSE_COUNT_ALL_MAX", trace.unique_blocks // 10 // 16)
    assert ratio(trace, OURS, 0.1) == pytest.approx(counted, abs=0.006)


def test_generated_traffic_follows_from_its_seed() -> None:
    """Equal seeds give equal requests, in order of time, and other seeds others."""
    for shape, make in SHAPES.items():
        requests = list(make(4, 3000))
        assert requests == list(make(4, 3000))
        assert requests != list(make(5, 3000)), shape
        assert [r.timestamp_ms for r in requests] == sorted(r.timestamp_ms for r in requests), shape


def test_json_is_what_programs_expect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One document with the trace, a result a cell, and the envelope of the references."""
    path = write(tmp_path / "a.jsonl", *((n * 100, [n % 7, 10 + n % 35]) for n in range(60)))
    assert main(["replay", str(path), "--capacity", "50%,25%", "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["trace"] == {"requests": 60, "block_refs": 120, "unique_blocks": 42, "block_bytes": None}
    cells = {(r["policy"], r["capacity_fraction"]): r for r in document["results"]}
    assert len(cells) == 2 * (len(POLICIES) + 1) + 1
    assert cells["lru", 0.5]["capacity_blocks"] == 21
    best = max(cells[name, 0.25]["hit_ratio"] for name in REFERENCES)
    assert document["envelope"]["0.25"] == best


def test_a_capacity_is_one_number_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A percentage is the fraction it means; the envelope has it as a key, however close two are."""
    path = write(tmp_path / "a.jsonl", *((n * 100, [n % 7, 10 + n % 35]) for n in range(60)))
    asked = "14.3%,14.30000001%,1%,5%,10%,25%,0.1%,100%"
    assert main(["replay", str(path), "--policy", "lru", "--capacity", asked, "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    fractions = [result["capacity_fraction"] for result in document["results"]]
    assert fractions == [0.001, 0.01, 0.05, 0.1, 0.143, 0.1430000001, 0.25, 1.0]
    assert list(document["envelope"]) == list(map(json.dumps, fractions))
    assert {"0.01", "0.05", "0.1", "0.25"} < set(document["envelope"])
    assert main(["replay", str(path), "--policy", "lru", "--capacity", asked]) == 0
    columns = capsys.readouterr().out.splitlines()[1].split("policy")[1]
    assert columns.split(" %")[4:6] == ["  14.3", "  14.30000001"]


def test_a_trace_may_have_any_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The name of a file is bytes; on the page it is what can be shown of it."""
    path = write(tmp_path / "a\udcff.jsonl", (0, [1, 2]))
    page = tmp_path / "page.html"
    assert main(["replay", str(path), "--policy", "lru", "--html", str(page)]) == 0
    assert read_page(page.read_text())["traces"] == ["a\ufffd.jsonl"]
    assert "lru" in capsys.readouterr().out


def test_the_table_compares_with_the_envelope(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row a policy, then the envelope and how far ours is from it; progress goes to stderr."""
    path = write(tmp_path / "a.jsonl", *((n * 100, [n % 7, 10 + n % 35]) for n in range(60)))
    assert main(["replay", str(path), "--policy", OURS, "--policy", "lru", "--capacity", "25%"]) == 0
    printed = capsys.readouterr()
    rows = [line.split()[0] for line in printed.out.splitlines() if line.startswith("  ")]
    assert rows == ["policy", OURS, "lru", "envelope", OURS]
    assert "2 of 2" in printed.err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--policy", "best"], 2, "known are all"),
        (["--capacity", "10"], 2, "percentages"),
        (["--capacity", "0%"], 2, "percentages"),
        (["--capacity", "100.1%"], 2, "percentages"),
        (["--capacity", f"0.{400 * '0'}1%"], 2, "percentages"),
    ],
)
def test_wrong_options_are_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, says: str
) -> None:
    """A wrong option says what is allowed, and nothing is computed."""
    path = write(tmp_path / "a.jsonl", (0, [1]))
    assert main(["replay", str(path), *words]) == code
    assert says in capsys.readouterr().err


def test_a_missing_trace_is_not_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code of what is not there."""
    assert main(["replay", str(tmp_path / "none.jsonl")]) == 3
    assert "no such file" in capsys.readouterr().err


def test_what_is_no_trace_is_a_wrong_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and one line with file and line."""
    path = tmp_path / "notes.txt"
    path.write_text("# notes\n")
    assert main(["replay", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"kvstore: replay: {path}:1: ") and said.count("\n") == 1
