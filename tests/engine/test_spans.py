"""Spans begin and end when they say: by the minute within the last six hours, by the hour before, over a restart, too."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvstore.index.block import Namespace
from kvstore.ledger.minutes import MINUTE_ROWS_MAX, MINUTE_S, oldest_minute
from kvstore.ledger.sums import EVERYBODY_ELSE
from kvstore.ledger.totals import HOUR_S, Rows, Totals, hour_of
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
    for row in totals.span(since_s, until_s, now_s).rows:
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
            span = which.span(since_s, until_s, NOW_S)
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
    (row,) = Totals("na", path).span(NOW_S - 1800, NOW_S - 1700, NOW_S).rows
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
