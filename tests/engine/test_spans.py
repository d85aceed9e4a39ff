"""Spans begin and end when they say: by the minute within the last six hours, by the hour before, over a restart, too."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest

from kvstore.index.block import Namespace
from kvstore.ledger import totals as totals_module
from kvstore.ledger.minutes import MINUTE_ROWS_MAX, MINUTE_S, oldest_minute
from kvstore.ledger.sums import EVERYBODY_ELSE
from kvstore.ledger.totals import HOUR_S, Rows, Totals, hour_of
from kvstore.steps import finish
from tiers.namespace_spec import NamespaceSpec

NOW_S = 1_795_100_523.0  # 23 s after a minute began, 8 minutes and 43 s after an hour did


def spaces(count: int) -> list[Namespace]:
    return [
        Namespace(
            number,
            NamespaceSpec(number.to_bytes(16, "big"), 4096, 32, 16, {"model": f"m{number}", "tenant": "t"}),
        )
        for number in range(count)
    ]


def book(totals: Totals, space: Namespace, at_s: float, tokens: int) -> Rows:
    rows = totals.of(space, at_s)
    for sums in rows:
        sums.lookups += 1
        sums.tokens_asked += tokens
        sums.tokens[1] += tokens
    return rows


def tokens(totals: Totals, since_s: float, until_s: float, now_s: float = NOW_S) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in finish(totals.span_steps(since_s, until_s, now_s)).rows:
        found[row.model] = found.get(row.model, 0) + sum(row.tokens)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_a_span_is_what_came_in_it(seed: int, tmp_path: Path) -> None:
    """Of any two times the rows are those booked from the minute (long ago: the hour) of the one to that of the other, none twice
    and none left out, by model; and the same after a restart."""
    draw, path = random.Random(seed), tmp_path / "totals.sqlite"
    totals, booked = Totals("na", path), list[tuple[float, str, int]]()
    known = spaces(3)
    for at_s in sorted(NOW_S - draw.uniform(0, 9 * HOUR_S) for _ in range(2000)):
        space, size = draw.choice(known), draw.randint(1, 1000)
        book(totals, space, at_s, size)
        booked.append((at_s, space.spec.fields["model"], size))
        if draw.random() < 0.01 and (snapshot := totals.snapshot(at_s)) is not None:
            assert totals.save(snapshot)
    snapshot = totals.snapshot(NOW_S)
    assert snapshot is not None and totals.save(snapshot)
    for which in (totals, Totals("na", path)):
        for _ in range(60):
            since_s, until_s = sorted(NOW_S - draw.uniform(0, 9 * HOUR_S) for _ in range(2))
            until_s = draw.choice((until_s, 1e12))
            span = finish(which.span_steps(since_s, until_s, NOW_S))
            expected: dict[str, int] = {}
            for at_s, model, size in booked:
                if span.begin_s <= at_s < span.end_s or (at_s >= span.begin_s and span.end_s == NOW_S):
                    expected[model] = expected.get(model, 0) + size
            assert tokens(which, since_s, until_s) == expected
            is_fine = since_s >= oldest_minute(NOW_S)
            assert span.begin_s == (since_s // MINUTE_S * MINUTE_S if is_fine else hour_of(since_s))
            assert is_fine is False or until_s > 1e11 or abs(span.end_s - until_s) <= MINUTE_S
            assert span.end_s > span.begin_s


def test_two_spans_that_meet_have_nothing_in_common() -> None:
    """What ends where another one begins is of one of them alone, wherever within a minute that is."""
    totals, (space,) = Totals(), spaces(1)
    for minute in range(60):
        book(totals, space, NOW_S - MINUTE_S * minute, 1)
    for ago_s in (600, 1234, 1800):
        at_s = NOW_S - ago_s
        before, after = (tokens(totals, *span) for span in ((NOW_S - 3000, at_s), (at_s, 1e12)))
        assert before["m0"] + after["m0"] == tokens(totals, NOW_S - 3000, 1e12)["m0"]


def test_hours_to_come_are_in_no_report() -> None:
    """A clock that was ahead, as after a start, has counted for hours that are to come: neither a report nor the minutes of now
    have that, until it is so late."""
    totals = Totals()
    namespace = Namespace(1, NamespaceSpec(bytes(16), 100, 32, 16, {}))
    for at_s in (NOW_S, NOW_S + 30 * 86_400):
        for sums in totals.of(namespace, at_s)[:2]:
            sums.lookups += 1
    assert [row.lookups for row in finish(totals.span_steps(NOW_S - 3600, 1e12, NOW_S)).rows] == [1]
    assert [at_s for at_s, _ in totals.minutes.since(0.0, NOW_S)] == [NOW_S // 60 * 60]
    assert (
        sum(row.lookups for row in finish(totals.span_steps(NOW_S - 3600, 1e12, NOW_S + 31 * 86_400)).rows)
        == 2
    )


def test_a_clock_that_is_set_forward_by_mistake_takes_nothing_away(tmp_path: Path) -> None:
    """For less than an hour. One that goes on has what is too old forgotten, in memory and on disk."""
    path, (space,) = tmp_path / "totals.sqlite", spaces(1)
    totals = Totals("na", path)

    def kept(now_s: float) -> int:
        book(totals, space, now_s, 1)
        snapshot = totals.snapshot(now_s)
        assert snapshot is not None and totals.save(snapshot)
        assert len(totals.since(0.0)) == len(Totals("na", path).since(0.0))
        return len(totals.since(0.0))

    for hour in range(30):
        kept(NOW_S + hour * HOUR_S)
    later_s = NOW_S + 365 * 86_400
    assert kept(later_s) == 31
    assert kept(NOW_S + 30 * HOUR_S) == 32  # it is set right
    assert kept(later_s + HOUR_S) == 2


def test_a_minute_that_is_corrected_is_corrected_on_disk(tmp_path: Path) -> None:
    """An account that changes long after its minute was saved changes the saved minute, too; one that could not be saved waits."""
    path, (space,) = tmp_path / "totals.sqlite", spaces(1)
    totals = Totals("na", path)
    old = book(totals, space, NOW_S - 1800, 100)
    totals.save(totals.snapshot(NOW_S - 1790))  # type: ignore[arg-type]
    book(totals, space, NOW_S, 1)
    totals.save(totals.snapshot(NOW_S))  # type: ignore[arg-type]
    for sums in old:
        sums.tokens[1] -= 60
        sums.tokens[2] += 60
    totals.changed(old)
    lost = totals.snapshot(NOW_S + 5)
    assert lost is not None
    totals.unsaved(lost)
    totals.save(totals.snapshot(NOW_S + 10))  # type: ignore[arg-type]
    (row,) = finish(Totals("na", path).span_steps(NOW_S - 1800, NOW_S - 1700, NOW_S)).rows
    assert row.tokens[1:3] == [40, 60] and row.tokens_asked == 100


def test_models_beyond_the_limit_share_a_row_of_each_minute(tmp_path: Path) -> None:
    """However many models ask, a minute has no more rows than may be, with every token in one of them; the minutes on disk are no
    older than those in memory."""
    totals, known = Totals("na", tmp_path / "totals.sqlite"), spaces(3 * MINUTE_ROWS_MAX)
    for space in known:
        book(totals, space, NOW_S - 120, 10)
    found = tokens(totals, NOW_S - 180, NOW_S - 60)
    assert len(found) == MINUTE_ROWS_MAX and sum(found.values()) == 10 * len(known)
    assert found[EVERYBODY_ELSE] == 10 * (2 * MINUTE_ROWS_MAX + 1)
    totals.save(totals.snapshot(NOW_S))  # type: ignore[arg-type]
    later_s = NOW_S + 7 * HOUR_S
    book(totals, known[0], later_s, 1)
    totals.save(totals.snapshot(later_s))  # type: ignore[arg-type]
    again = Totals("na", tmp_path / "totals.sqlite")
    assert [minute.minute_s for minute in again.minutes.between(0, 1e12)] == [later_s // MINUTE_S * MINUTE_S]


def test_hours_that_are_yet_to_come_are_in_no_report_of_now() -> None:
    """The clock was wrong once: what was counted then is not of the last day, nor of the last minutes."""
    totals, (space,) = Totals(), spaces(1)
    for at_s in (NOW_S + 50 * 86_400, NOW_S):
        book(totals, space, at_s, 10)
    for since_s in (0.0, NOW_S - 86_400, NOW_S - 600):
        assert tokens(totals, since_s, 1e12) == tokens(totals, NOW_S - 60, NOW_S) != {}
    assert [minute_s for minute_s, _ in totals.minutes.since(0.0, NOW_S)] == [NOW_S // 60 * 60]


def test_an_hour_of_a_report_is_put_together_in_many_turns(tmp_path: Path) -> None:
    """Minutes of many models and tenants, and a save of them."""
    totals, known = Totals("na", tmp_path / "totals.sqlite"), spaces(15)
    for minute in range(60):
        for space in known:
            totals.of(space, NOW_S - 1800 - 60 * minute)
    turns = 1 + sum(1 for _ in totals.span_steps(NOW_S - 5400, NOW_S - 2000, NOW_S))
    assert turns > 10
    snapshot = totals.begin_snapshot(NOW_S)
    assert snapshot is not None
    sizes = [len(snapshot.rows) + len(snapshot.minutes) for _ in totals.fill_steps(snapshot)]
    assert max(after - before for before, after in pairwise([0, *sizes])) <= 200
    assert len(snapshot.minutes) == 60 * 15


def test_a_snapshot_that_is_not_filled_at_a_stop_is_part_of_the_next(tmp_path: Path) -> None:
    """Nothing of it is lost."""
    totals, (space,) = Totals("na", tmp_path / "totals.sqlite"), spaces(1)
    book(totals, space, NOW_S, 10)
    begun = totals.begin_snapshot(NOW_S)
    assert begun is not None
    totals.unsaved(begun)
    last = totals.snapshot(NOW_S)
    assert last is not None and len(last.rows) == 1


def test_rows_are_put_together_some_at_a_time() -> None:
    """A new row costs no walk over all that there are."""
    totals, known = Totals(), spaces(300)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(totals_module, "TOTALS_ROWS_MAX", 250)
        for hour in range(3):
            for space in known:
                before = len(totals.since(0.0))
                totals.of(space, NOW_S + 3600 * hour)
                assert before - len(totals.since(0.0)) <= totals_module.TOTALS_PUT_TOGETHER
    assert len(totals.since(0.0)) <= 250 + 1, "besides those of everybody else"
    of_their_own = {row.hour_s for row in totals.since(0.0) if row.tenant != EVERYBODY_ELSE}
    assert of_their_own == {hour_of(NOW_S + 7200)}
