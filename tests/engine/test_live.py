"""What is told every second: counts that never decrease, minutes that are corrected, and an answer that does not grow."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.constants import NAMESPACES_MAX
from kvstore.engine.live import LIVE_PREFIXES, LIVE_SESSIONS_MAX, live_steps
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.ledger.latencies import BOUNDS, BOUNDS_S, Histogram
from kvstore.ledger.minutes import LIVE_MINUTES_MAX, MINUTE_S, Minutes
from kvstore.ledger.since_start import LIVE_ROWS_MAX, SinceStart
from kvstore.ledger.sums import EVERYBODY_ELSE, Sums
from kvstore.ledger.totals import Totals
from kvstore.protocol import outcomes
from kvstore.steps import finish
from tests.engine.test_accounts import RECORD_BYTES, Node, hashes
from tiers.namespace_spec import NamespaceSpec

LIVE_BYTES_MAX = 400_000  # of an answer with everything in it that there may be


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "arena")
    yield made
    made.arena.close(unlink=True)


def live(node: Node, since_s: float = 0.0) -> dict[str, Any]:
    return finish(live_steps(node.engine, since_s, node.now_s))


def told(tokens: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in tokens.items() if count}


# -- latencies --


@given(st.lists(st.floats(0, 300) | st.floats(0, 1e-3)))
def test_each_duration_is_in_the_first_bucket_that_it_fits(durations: list[float]) -> None:
    """A bucket counts what is below its bound, to the microsecond, and not below the one before; the last one the rest."""
    histogram = Histogram()
    expected = [0] * (BOUNDS + 1)
    for seconds in durations:
        histogram.add(seconds)
        micros = int(seconds * 1e6)
        expected[next((i for i, bound in enumerate(BOUNDS_S) if micros < round(bound * 1e6)), BOUNDS)] += 1
    assert histogram.as_dict()["buckets"] == expected
    assert histogram.count == len(durations) and histogram.sum_s == pytest.approx(sum(durations))


# -- since the start --


def add(sums: Sums, lookups: int, tokens: int, outcome: int) -> None:
    """As many more lookups of so many tokens with one outcome."""
    sums.lookups += lookups
    sums.tokens_asked += lookups * tokens
    sums.tokens[outcome] += lookups * tokens


OUTCOMES = st.integers(0, outcomes.OUTCOMES - 1)
CHANGES = st.lists(
    st.tuples(st.just("book"), OUTCOMES, st.integers(1, 50))
    | st.tuples(st.just("move"), OUTCOMES, OUTCOMES)  # all tokens of one outcome become another one's
    | st.tuples(st.just("take"), OUTCOMES, st.integers(1, 50))  # asked again, with a shorter prompt
    | st.tuples(st.just("publish"), st.just(0), st.just(0)),
    max_size=60,
)


@given(CHANGES)
def test_what_is_published_never_decreases(changes: list[tuple[str, int, int]]) -> None:
    """Whatever the truth does: no outcome decreases, their sum is what was asked for, none is ahead of the highest that was
    true; and when each outcome has caught up, what is published is what is true."""
    since_start = SinceStart()
    true = since_start.of("m", "t")
    peak, before, is_shorter = [0] * outcomes.OUTCOMES, [0] * outcomes.OUTCOMES, False
    for what, first, second in [*changes, ("publish", 0, 0)]:
        if what == "book":
            add(true, 1, second, first)
        elif what == "move" and first != second:
            true.tokens[second] += true.tokens[first]
            true.tokens[first] = 0
        elif what == "take":
            size = min(second, true.tokens[first])
            add(true, -1, size, first)
            is_shorter |= size > 0
        elif what == "publish":
            peak = list(map(max, peak, true.tokens))
            ((_, published),) = since_start.publish()
            assert all(now >= then for now, then in zip(published.tokens, before, strict=True))
            assert all(now <= high for now, high in zip(published.tokens, peak, strict=True))
            assert sum(published.tokens) == published.tokens_asked
            assert is_shorter or published.tokens_asked == true.tokens_asked
            before = list(published.tokens)
    for outcome in range(outcomes.OUTCOMES):
        size = max(0, before[outcome] - true.tokens[outcome])
        add(true, 1, size, outcome)
    ((_, published),) = since_start.publish()
    assert published.tokens == true.tokens


def test_a_settled_load_is_held_back_and_comes_with_the_next_hits(node: Node) -> None:
    """Hits that were told and did not come are not taken back; the misses they became are told when others have hit."""
    node.put("a0", "a1")
    node.ask("a0", "a1", ticket=1)
    assert told(live(node)["tokens"][0]["tokens"]) == {"dram": 32}
    node.engine.settle(1, 0, node.space, b"")
    assert told(live(node)["tokens"][0]["tokens"]) == {"dram": 32}
    assert node.tokens() == {"unusable": 32}
    node.ask("a0", ticket=2)
    assert told(live(node)["tokens"][0]["tokens"]) == {"dram": 32, "unusable": 16}
    node.ask("a0", "a1", ticket=3)
    assert told(live(node)["tokens"][0]["tokens"]) == {"dram": 48, "unusable": 32} == node.tokens()


@pytest.mark.parametrize("seed", range(4))
def test_an_engine_s_counts_never_decrease(node: Node, seed: int) -> None:
    """Requests that ask again, settle and time out, in any order: every count of a Live answer only grows, and the tokens
    are those asked for. The minutes are true at every moment."""
    draw = random.Random(seed)
    names, before = [f"b{n}" for n in range(8)], {}
    for _ in range(200):
        asked = names[: draw.randint(1, 8)]
        ticket = draw.randint(0, 5)
        match draw.randrange(4):
            case 0:
                node.put(*asked)
            case 1 | 2:
                node.ask(*asked, ticket=ticket, local_tokens=draw.choice((0, 16)), prefill_tokens_per_s=100.0)
            case 3:
                node.engine.settle(
                    ticket, 16 * draw.randint(0, 4), node.space, draw.choice((b"", hashes("b1")))
                )
        if not (rows := live(node)["tokens"]):
            continue
        row = rows[0]
        now = {**row["tokens"], **row["bytes"], "lookups": row["lookups"], "saved": row["prefill_s_saved"]}
        assert all(now[name] >= count for name, count in before.items())
        assert sum(row["tokens"].values()) == row["tokens_asked"]
        before = now
        true = node.tokens()
        minutes = live(node)["minutes"]
        assert {name: sum(m["tokens"][name] for m in minutes) for name in true} == true
        assert min(min(m["tokens"].values()) for m in minutes) >= 0


def test_the_last_row_is_for_all_others(node: Node) -> None:
    """Models beyond the limit share one row, for ever: a row that changed its name would decrease."""
    for model in range(2 * LIVE_ROWS_MAX):
        add(node.totals.since_start.of(f"m{model}", "t"), 1, 10, outcomes.HIT_DRAM)
    rows = live(node)["tokens"]
    assert len(rows) == LIVE_ROWS_MAX
    assert [row["model"] for row in rows[:2]] == ["m0", "m1"]
    assert (rows[-1]["model"], rows[-1]["tenant"]) == (EVERYBODY_ELSE, EVERYBODY_ELSE)
    assert sum(row["tokens_asked"] for row in rows) == 2 * LIVE_ROWS_MAX * 10


# -- minutes --


def test_a_settle_corrects_the_minute_of_its_lookup(node: Node) -> None:
    """Ten minutes later hits of then become misses of then; the minute in which that is told has only its own."""
    node.put("a0", "a1")
    first_s = int(node.now_s) // MINUTE_S * MINUTE_S
    node.ask("a0", "a1", ticket=1, prefill_tokens_per_s=100.0)
    node.now_s += 10 * MINUTE_S
    node.ask("a0", ticket=2)
    node.engine.settle(1, 16, node.space, b"")
    minutes = live(node)["minutes"]
    assert [minute["minute_s"] for minute in minutes] == [first_s, first_s + 10 * MINUTE_S]
    assert told(minutes[0]["tokens"]) == {"dram": 16, "unusable": 16}
    assert minutes[0]["prefill_s_saved"] == pytest.approx(0.16)
    assert told(minutes[1]["tokens"]) == {"dram": 16}
    assert minutes[0]["bytes"]["stored"] == 2 * RECORD_BYTES


def test_a_request_that_asks_again_counts_in_its_last_minute(node: Node) -> None:
    """The lookup is taken out of the minute in which it was booked first."""
    node.put("a0")
    node.ask("a0", ticket=1)
    node.now_s += MINUTE_S
    node.ask("a0", ticket=1)
    assert [(minute["lookups"], told(minute["tokens"])) for minute in live(node)["minutes"]] == [
        (0, {}), (1, {"dram": 16})
    ]  # fmt: skip


def test_minutes_roll_over_and_are_forgotten(node: Node) -> None:
    """No more are kept than may be told, those of long ago are not told, and since when can be asked for."""
    start_s = int(node.now_s) // MINUTE_S * MINUTE_S
    for minute in range(LIVE_MINUTES_MAX + 10):
        node.now_s = start_s + minute * MINUTE_S + 7
        node.ask("x")
    minutes = live(node)["minutes"]
    assert [m["minute_s"] for m in minutes] == [
        start_s + n * MINUTE_S for n in range(10, LIVE_MINUTES_MAX + 10)
    ]
    assert all(m["lookups"] == 1 for m in minutes)
    since_s = node.now_s - 2 * MINUTE_S
    assert [m["minute_s"] for m in live(node, since_s)["minutes"]] == [m["minute_s"] for m in minutes[-3:]]
    node.now_s += (LIVE_MINUTES_MAX - 1) * MINUTE_S
    assert [m["minute_s"] for m in live(node)["minutes"]] == [minutes[-1]["minute_s"]]
    node.now_s += MINUTE_S
    assert live(node)["minutes"] == []


def test_a_clock_that_is_set_back_costs_order_and_no_memory() -> None:
    """Minutes after the jump are told in the order of the clock, and those of before it when it is their time; there are never more than
    the limit."""
    minutes, now_s = Minutes(), 100_000 * MINUTE_S
    for minute in range(LIVE_MINUTES_MAX):
        minutes.of(now_s + minute * MINUTE_S).lookups += 1
    for minute in range(10):
        minutes.of(now_s - (minute + 1) * MINUTE_S).lookups += 1
    assert [minute_s for minute_s, _ in minutes.since(0, now_s)] == [
        now_s - number * MINUTE_S for number in range(10, 0, -1)
    ]
    later = [minute_s for minute_s, _ in minutes.since(0, now_s + (LIVE_MINUTES_MAX - 11) * MINUTE_S)]
    assert later[0] == now_s - 10 * MINUTE_S and later == sorted(later)
    assert len(list(minutes.between(0, 2 * now_s))) == LIVE_MINUTES_MAX


# -- the answer --


def test_the_answer_does_not_grow_with_what_is_held(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many namespaces as there may be, of 2,000 models, all minutes, all sessions and many prefixes it is put together in as many
    steps as without the namespaces, none of which is looked at, and is smaller than a tenth of a frame."""
    engine = node.engine
    for number in range(NAMESPACES_MAX):
        fields = {"model": f"organisation/model-{number % 2000}", "tenant": "t" * 40}
        space = engine.register(NamespaceSpec(number.to_bytes(8, "big") * 2, RECORD_BYTES, 8, 16, fields))
        if number % 5 == 0:
            node.ask("x", spaces=(space,))
            namespace = engine.namespaces.get(space)
            node.totals.used(namespace, b"h" * 8, 64, number, node.now_s)
    for _ in range(LIVE_MINUTES_MAX):
        node.now_s += MINUTE_S
        node.ask("x", spaces=(space,))
    for number in range(2 * LIVE_SESSIONS_MAX):
        engine.open_session(-1, f"vllm {number}")

    def nobody(_: NamespaceRegistry) -> Iterator[Any]:
        raise AssertionError("Live walks over namespaces")

    monkeypatch.setattr(NamespaceRegistry, "__iter__", nobody)
    steps, pieces, answer = live_steps(engine, 0.0, node.now_s), 0, {}
    while not answer:
        try:
            next(steps)
            pieces += 1
        except StopIteration as end:
            answer = end.value
    assert pieces == 3 + LIVE_MINUTES_MAX // 120
    sizes = {name: len(answer[name]) for name in ("tokens", "sessions", "prefixes", "minutes")}
    assert sizes == {
        "tokens": LIVE_ROWS_MAX, "sessions": LIVE_SESSIONS_MAX, "prefixes": LIVE_PREFIXES, "minutes": LIVE_MINUTES_MAX
    }  # fmt: skip
    assert (
        answer["namespaces_total"] == NAMESPACES_MAX and answer["sessions_total"] == 2 * LIVE_SESSIONS_MAX + 1
    )
    assert len(msgspec.msgpack.encode(answer)) < LIVE_BYTES_MAX


# -- the end --


def test_totals_that_wait_for_a_thread_at_a_stop_are_saved(tmp_path: Path) -> None:
    """A pool that closes forgets what waits in it; the last save has those rows, too."""
    node = Node(tmp_path / "arena", totals=Totals("na", tmp_path / "totals.sqlite"))
    node.ask("a0", "a1")
    node.engine.tick()  # hands the rows to a thread that never gets to them
    assert node.totals.snapshot(node.now_s) is None
    node.engine.accounts.save_again()
    snapshot = node.totals.snapshot(node.now_s)
    assert snapshot is not None and node.totals.save(snapshot)
    assert [row.tokens_asked for row in Totals("na", tmp_path / "totals.sqlite").since(0)] == [32]
    node.arena.close(unlink=True)
