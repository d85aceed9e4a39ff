"""Reports: every token is counted once, however it is grouped, and told so that anybody can read it."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore import units
from kvstore.index.block import Namespace
from kvstore.ledger import report
from kvstore.ledger.comparing import changes, per_hour
from kvstore.ledger.sums import LOADED
from kvstore.ledger.totals import HOUR_S, Totals, hour_of
from kvstore.protocol import outcomes
from kvstore.tools.pages import COLUMNS_MAX, Document, report_page
from tests.browser import Browser, Page, in_a_browser
from tests.pages import opened, read_page, text, texts
from tests.running import Daemon, Place, kvstore
from tiers.namespace_spec import NamespaceSpec

Serve = Callable[..., Daemon]
NOW_S = 1_000_000 * HOUR_S + 1234.0
HOSTILE = '<script>alert("x")</script>\u202e\x1b[31m\x00&amp;\''
COLUMNS = {"lookups", "tokens", "engine_tokens", "hit_tokens", "missed_tokens", "hit_ratio", "overall_ratio"}
COLUMNS |= {"prefill_s_saved", "money_saved", "outcomes", "bytes"}


def row(
    hour: int = 0, model: str = "m", tenant: str = "t", prefill_s: float = 0.0, **tokens: int
) -> dict[str, Any]:
    """A row as the daemon tells it; hours before now."""
    return {
        "hour_s": (1_000_000 - hour) * HOUR_S,
        "region": "",
        "model": model,
        "tenant": tenant,
        "lookups": 1,
        "tokens": {**dict.fromkeys(outcomes.NAMES, 0), **tokens},
        "bytes": {"stored": 1, "loaded": 2, "promoted": 3, "demoted": 4},
        "prefill_s_saved": prefill_s,
    }


def answer(
    *rows: dict[str, Any], price: float = 0.0, prefixes: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    return {
        "region": "eu", "now_s": NOW_S, "gpu_hour_price": price, "currency": "EUR", "rows": list(rows), "prefixes": prefixes or [],
    }  # fmt: skip


def document_of(answered: dict[str, Any], since_s: float, **more: Any) -> dict[str, Any]:
    """Of an answer that begins with this hour, where it does not say when."""
    told = {"since_s": hour_of(since_s), "until_s": NOW_S, "holdings": [], **answered}
    return report.document(told, **more)


def prefix(last_s: float = NOW_S - 60, **changes: Any) -> dict[str, Any]:
    return {
        "namespace": "00" * 16, "model": "m", "tenant": "t", "block_hash": "ab" * 32, "tokens": 64, "uses": 3,
        "tokens_saved": 192, "error_tokens": 0, "first_s": NOW_S - 7200, "last_s": last_s, "tiers": ["dram"], **changes,
    }  # fmt: skip


def made_up(seed: int, hours: int = 30) -> dict[str, Any]:
    """A day and a bit of several models and tenants, one of them with a hostile name."""
    draw = random.Random(seed)
    rows = [
        row(
            hour,
            model,
            tenant,
            draw.random() * 100,
            **{name: draw.randrange(10_000) for name in outcomes.NAMES},
        )
        for hour in range(hours)
        for model in ("llama", "qwen")
        for tenant in ("", "acme", HOSTILE)
        if draw.random() < 0.8
    ]
    return answer(*rows, price=2.0, prefixes=[prefix(), prefix(model=HOSTILE, error_tokens=5, tiers=[])])


def test_ratios_leave_out_what_the_engine_had() -> None:
    """hit ratio = hits in tiers / (tokens - the engine's own); overall counts the engine's own as well."""
    total = report.figures([row(engine=50, dram=20, nvme=5, never_seen=25)], price=0)
    assert (total["tokens"], total["engine_tokens"], total["hit_tokens"], total["missed_tokens"]) == (
        100,
        50,
        25,
        25,
    )
    assert (total["hit_ratio"], total["overall_ratio"]) == (0.5, 0.75)


def test_nothing_asked_has_no_ratio_and_no_price_has_no_money() -> None:
    """What cannot be known is None, and not 0."""
    total = report.figures([row(engine=5, prefill_s=7200)], price=0)
    assert (total["hit_ratio"], total["overall_ratio"], total["money_saved"]) == (None, 1.0, None)
    assert report.figures([row(dram=5, prefill_s=7200)], price=2.5)["money_saved"] == 5.0
    assert report.figures([], price=1)["overall_ratio"] is None


@pytest.mark.parametrize("seed", range(5))
def test_every_token_is_counted_once_in_every_grouping(seed: int) -> None:
    """tokens = sum of outcomes = engine + hit + missed; each grouping adds up to the same."""
    document = document_of(made_up(seed), NOW_S - 24 * HOUR_S)
    total = document["totals"]
    assert sum(total["outcomes"].values()) == total["tokens"]
    assert total["engine_tokens"] + total["hit_tokens"] + total["missed_tokens"] == total["tokens"]
    for name in ("model", "tenant", "region", "hour"):
        for field in ("tokens", "hit_tokens", "missed_tokens", "lookups"):
            assert sum(group[field] for group in document["by"][name]) == total[field]
        for outcome, tokens in total["outcomes"].items():
            assert sum(group["outcomes"][outcome] for group in document["by"][name]) == tokens
    assert sum(group["tokens"] for group in document["by"]["tier"]) == total["hit_tokens"]
    assert sum(group["tokens"] for group in document["by"]["reason"]) == total["missed_tokens"]


def test_a_daemon_that_moved_tells_the_regions_apart() -> None:
    """Lookups are of the region that the daemon was in then."""
    rows = [row(dram=3), {**row(dram=4), "region": "ap"}]
    by = document_of(answer(*rows), 0)["by"]
    assert {group["region"]: group["tokens"] for group in by["region"]} == {rows[0]["region"]: 3, "ap": 4}


def test_the_document_has_the_documented_fields() -> None:
    """Names are a contract; groups are in a fixed order."""
    document = document_of(made_up(1), NOW_S - 24 * HOUR_S)
    assert set(document) == {
        "region",
        "since_s",
        "until_s",
        "gpu_hour_price",
        "currency",
        "totals",
        "by",
        "prefixes",
        "holdings",
    }
    assert set(document["totals"]) == COLUMNS
    assert set(document["by"]) == set(report.GROUPINGS)
    assert set(document["by"]["tier"][0]) == {"tier", "tokens", "hit_ratio", "meaning"}
    assert set(document["by"]["reason"][0]) == {"reason", "tokens", "share", "meaning"}
    for name, field in (("model", "model"), ("tenant", "tenant"), ("region", "region"), ("hour", "hour_s")):
        assert set(document["by"][name][0]) == COLUMNS | {field}
    hours = [group["hour_s"] for group in document["by"]["hour"]]
    assert hours == sorted(hours)
    shares = [group["share"] for group in document["by"]["reason"]]
    assert shares == sorted(shares, reverse=True)
    assert set(prefix()) | {"age_s", "idle_s"} == set(document["prefixes"][0])


def test_two_times_beside_each_other_say_what_changed() -> None:
    """Shares of what was asked for, in points, most changed first; amounts by the hour; who is new or gone has no change. Times of
    different length are compared all the same."""
    now = document_of(
        {**answer(row(dram=20, never_seen=70, corrupt=10), row(model="new", never_seen=50)), "since_s": 0.0, "until_s": 3600.0}, 0
    )  # fmt: skip
    then = document_of(
        {
            **answer(row(dram=160, never_seen=40), row(model="gone", dram=200)),
            "since_s": 0.0,
            "until_s": 7200.0,
        },
        0,
    )
    found = changes(now, then)
    assert found["tier"][0] == {"tier": "dram", "now": 0.133333, "then": 0.9, "change": -0.766667}
    assert [(one["reason"], one["change"]) for one in found["reason"]] == [
        ("never_seen", 0.7),
        ("corrupt", 0.066667),
    ]
    models = {one["model"]: one for one in found["model"]}
    assert (models["m"]["now"], models["m"]["then"], models["m"]["change"]) == (0.2, 0.8, -0.6)
    assert (models["new"]["change"], models["gone"]["change"]) == (None, None)
    assert (models["m"]["asked_per_hour_now"], models["m"]["asked_per_hour_then"]) == (100.0, 100.0)
    assert per_hour(now)["tokens"] == 150.0 and per_hour(then)["tokens"] == 200.0
    assert set(found) == {"tier", "reason", "model", "tenant"}


def test_a_short_report_is_drawn_by_the_minute() -> None:
    """The columns of a page are minutes where all of its time has them, each token in one; else hours."""
    minutes = [
        {**row(dram=minute + 1), "minute_s": NOW_S // 60 * 60 - 60 * (9 - minute)} for minute in range(10)
    ]
    document = document_of(
        {**answer(row(dram=55)), "since_s": NOW_S - 600, "until_s": NOW_S}, 0, minutes=minutes
    )
    told = read_page(report_page(document))
    assert told["column_s"] == 60 and [column["hit_tokens"] for column in told["columns"]] == list(
        range(1, 11)
    )
    day = {**document, "since_s": NOW_S - 86_400}
    assert read_page(report_page(day))["column_s"] == 3600


def test_prefixes_that_were_not_used_in_the_time_are_left_out() -> None:
    """Only what was hit since then is told, with its age."""
    document = document_of(answer(prefixes=[prefix(), prefix(last_s=NOW_S - 90 * HOUR_S)]), NOW_S - HOUR_S)
    assert [(p["age_s"], p["idle_s"]) for p in document["prefixes"]] == [(7200.0, 60.0)]


def test_outcomes_of_a_newer_daemon_are_misses() -> None:
    """An outcome that this version does not know is counted, and told by its name."""
    document = document_of(answer(row(dram=1, moon_phase=3)), NOW_S - HOUR_S)
    assert document["totals"]["missed_tokens"] == 3
    assert document["by"]["reason"][0]["reason"] == "moon_phase"
    assert "moon_phase" in report_page(document)


@pytest.mark.parametrize(
    ("text", "ago_s"),
    [
        ("24h", 86_400),
        ("30m", 1800),
        ("7d", 604_800),
        ("2w", 1_209_600),
        (" 1h ", 3600),
        ("30min", 1800),
        ("1.5h", 5400),
    ],
)
def test_a_span_is_before_now(text: str, ago_s: int) -> None:
    """Spans end at the daemon's now."""
    assert report.since(text, NOW_S) == NOW_S - ago_s


def test_a_time_without_zone_is_utc() -> None:
    """ISO times, with and without zone; the epoch is the earliest."""
    assert report.since("2026-11-21T15:00", 2e9) == report.since("2026-11-21T16:00+01:00", 2e9)
    assert report.since("1960-01-01", NOW_S) == 0


@pytest.mark.parametrize(
    "text", ["", "soon", "24", "-3h", "0h", "9999d", "2999-01-01", "0001-01-01T00:00+23:00"]
)
def test_other_words_are_refused(text: str) -> None:
    """What is no time in the past says what is."""
    if text.startswith("0001"):
        assert report.since(text, NOW_S) == 0
        return
    with pytest.raises(ValueError, match=r"allowed|future"):
        report.since(text, NOW_S)


# -- the page --


def shown(
    browser: Browser,
    tmp_path: Path,
    document: Document,
    first: Document | None = None,
    width: int = 1300,
    dark: bool = False,
) -> Page:
    """The page of a report, in a browser."""
    path = tmp_path / "page.html"
    path.write_text(report_page(document, first))
    return opened(browser, path, width, dark)


def widths(page: Page, selector: str) -> dict[str, float]:
    """How much of its bar each piece of the first such bar takes, by what it stands for."""
    found: dict[str, float] = page.value(
        f"Object.fromEntries([...document.querySelector('{selector}').children].map((one) => [one.title, "
        "one.getBoundingClientRect().width / one.parentElement.getBoundingClientRect().width]))"
    )
    return found


@pytest.mark.parametrize("hours", [1, 2, 30, 24 * 90])
def test_the_page_is_one_sound_file(hours: int) -> None:
    """Nothing from elsewhere, no script but its own, and as long for three months as for a day; a tenant that is called
    <script> adds no element."""
    document = document_of(made_up(2, hours), NOW_S - hours * HOUR_S)
    content = report_page(document)
    told = read_page(content)
    assert told["document"]["totals"] == document["totals"]
    assert content.count("<script") == 2 and "\x1b" not in content and "\x00" not in content
    assert len(content) < 150_000


@pytest.mark.parametrize("hours", [1, 30, 200, 2000])
def test_columns_keep_every_token(hours: int) -> None:
    """Hours are put together without losing any, whatever the length of the time."""
    document = document_of(made_up(3, hours), NOW_S - hours * HOUR_S)
    told = read_page(report_page(document))
    columns, step_s = told["columns"], told["column_s"]
    for field in ("tokens", "hit_tokens", "missed_tokens", "lookups"):
        assert sum(column[field] for column in columns) == document["totals"][field]
    begins = [column["from_s"] for column in columns]
    assert begins == sorted(set(begins)) and not any(begin % step_s for begin in begins)
    assert (NOW_S - begins[0]) / step_s <= COLUMNS_MAX + 1


@in_a_browser
@pytest.mark.parametrize(
    ("width", "dark"), [(1300, False), (1300, True), (820, False), (420, False), (420, True)]
)
def test_the_page_shows_it_all_at_every_width(
    browser: Browser, tmp_path: Path, width: int, dark: bool
) -> None:
    """Figures, reasons and names are on the page; markup in a name is text, is not run, and widens nothing."""
    document = document_of(made_up(2), NOW_S - 24 * HOUR_S)
    for prefix_ in document["prefixes"]:
        prefix_["model"] += "m" * 55
    page = shown(browser, tmp_path, document, width=width, dark=dark)
    assert text(page, ".figure") == units.percent(document["totals"]["hit_ratio"])
    assert {group["meaning"] for group in document["by"]["reason"]} <= set(texts(page, "#table-reasons td"))
    assert any("<script>alert" in cell for cell in texts(page, "#table-tenant bdi"))
    whole = page.value("document.body.textContent")
    assert "\u202e" not in whole and "\x1b" not in whole
    assert page.value("document.querySelectorAll('main script').length") == 0
    assert page.value("document.querySelectorAll('.plot svg .layer, .plot svg .line').length") > 10
    paper = page.value("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(20, 24, 27)" if dark else "rgb(251, 251, 249)")


@in_a_browser
def test_hits_in_buckets_are_hits(browser: Browser, tmp_path: Path) -> None:
    """What came from the region's bucket or another region is in the hit rate, the plots and the bars, as a hit."""
    rows = [
        row(hour, dram=30, nvme=20, shared=10, read_through=5, never_seen=35, engine=100) for hour in range(3)
    ]
    page = shown(browser, tmp_path, document_of(answer(*rows), NOW_S - 3 * HOUR_S))
    assert text(page, ".figure") == "65.0 %"
    assert (
        text(page, ".means")
        == "of 300 tokens asked for: DRAM 30.0 %, NVMe 20.0 %, bucket 10.0 %, other region 5.0 %"
    )
    said = {"DRAM": "30.0 %", "NVMe": "20.0 %", "bucket": "10.0 %", "other region": "5.0 %"}
    legend = dict(zip(texts(page, "#chart-hits .name"), texts(page, "#chart-hits .legend b"), strict=True))
    assert legend == said
    assert "computed" in texts(page, "#chart-tokens .name")
    legend = dict(
        zip(texts(page, "#chart-tokens .name"), texts(page, "#chart-tokens .legend b"), strict=True)
    )
    assert (legend["bucket"], legend["other region"], legend["computed"]) == ("30", "15", "105")
    assert texts(page, "#chart-missed .name") == ["never_seen"]
    bar = widths(page, "#table-model .bar")
    assert bar["hit: bucket: 30 tokens"] == pytest.approx(0.05, abs=0.01)
    assert bar["hit: other region: 15 tokens"] == pytest.approx(0.025, abs=0.01)
    assert [cell for cell in texts(page, "#table-times tbody td:nth-child(5)") if cell != "65.0 %"] == []


@in_a_browser
def test_an_unknown_outcome_is_drawn_as_a_miss(browser: Browser, tmp_path: Path) -> None:
    """A reason of a newer daemon is in the plot, the bar and the table, by its name."""
    rows = [row(hour, dram=1, moon_phase=3) for hour in range(2)]
    page = shown(browser, tmp_path, document_of(answer(*rows), NOW_S - 2 * HOUR_S))
    assert texts(page, "#chart-missed .name") == ["never_seen", "moon_phase"]
    assert "moon_phase" in texts(page, "#table-reasons td")
    assert widths(page, "#whole .bar")["missed: others: 6 tokens"] == pytest.approx(0.75, abs=0.01)


@in_a_browser
def test_the_page_of_nothing_says_so(browser: Browser, tmp_path: Path) -> None:
    """No rows: a plain sentence, the words, and no figure."""
    page = shown(browser, tmp_path, document_of(answer(), NOW_S - HOUR_S))
    assert "nothing to report" in text(page, "#verdict") and "Words on this page" in text(page, "main")
    assert (
        page.value(
            "[...document.querySelectorAll('.figure, svg, table')].some((one) => one.checkVisibility())"
        )
        is False
    )


@in_a_browser
def test_one_hour_is_a_table(browser: Browser, tmp_path: Path) -> None:
    """One bar is no plot: its figures stand in an open table of one row."""
    page = shown(browser, tmp_path, document_of(answer(row(dram=300, never_seen=100)), NOW_S - HOUR_S))
    assert page.value("[...document.querySelectorAll('svg')].some((one) => one.checkVisibility())") is False
    assert text(page, "#table-times tbody tr").split("\t")[1:] == [
        "1",
        "400",
        "300",
        "75.0 %",
        "2 B",
        "1 B",
        "3 B",
        "4 B",
    ]


@in_a_browser
def test_bars_of_reasons_are_shares_of_all_misses(browser: Browser, tmp_path: Path) -> None:
    """The bar beside "75.0 %" is three quarters of its place, though it is the longest."""
    page = shown(browser, tmp_path, document_of(answer(row(never_seen=300, corrupt=100)), NOW_S - HOUR_S))
    assert widths(page, "#table-reasons .bar") == {"75.0 %": pytest.approx(0.75, abs=0.01)}
    assert widths(page, "#table-reasons tr:last-child .bar") == {"25.0 %": pytest.approx(0.25, abs=0.01)}
    assert "has the reason of that one" in text(page, "#table-reasons .note")
    assert "Of the others 75.0 % missed for one reason, never_seen: not seen before" in text(page, "#verdict")


@in_a_browser
@pytest.mark.parametrize(("prefill_s", "is_there"), [(0.0, False), (60.0, True)])
def test_what_was_not_measured_has_no_tile(
    browser: Browser, tmp_path: Path, prefill_s: float, is_there: bool
) -> None:
    """Prefill time is told where engines said how fast they compute, and left out where not; money with a price only."""
    answered = answer(row(dram=5, prefill_s=prefill_s), price=2.5 if is_there else 0.0)
    page = shown(browser, tmp_path, document_of(answered, NOW_S - HOUR_S))
    assert ("Prefill time saved" in texts(page, ".what")) is is_there
    assert ("0.042 EUR" in texts(page, ".figure")) is is_there
    assert ("prefill saved" in texts(page, "#table-model th")) is is_there


@in_a_browser
def test_a_table_of_prefixes_begins_with_ten(browser: Browser, tmp_path: Path) -> None:
    """The others are there when they are asked for."""
    prefixes = [prefix(error_tokens=9 * n) for n in range(30)]
    page = shown(browser, tmp_path, document_of(answer(row(dram=5), prefixes=prefixes), NOW_S - HOUR_S))
    rows = "document.querySelectorAll('#table-prefixes tbody tr').length"
    assert page.value(rows) == 10 and text(page, "#table-prefixes .more") == "show all 30"
    assert "192 ±81" in texts(page, "#table-prefixes td") and "DRAM" in texts(page, "#table-prefixes td")
    page.value("document.querySelector('#table-prefixes .more').click()")
    assert page.value(rows) == 30


@in_a_browser
def test_a_narrow_screen_loses_nothing(browser: Browser, tmp_path: Path) -> None:
    """Rows become cards, in which each cell names its column, and plots end inside the window."""
    page = shown(browser, tmp_path, document_of(made_up(4, 30), NOW_S - 30 * HOUR_S), width=420)
    assert page.value("document.querySelector('#table-model thead').checkVisibility()") is False
    named = page.value(
        "[...document.querySelectorAll('#table-model tbody tr:first-child td')].map((one) => "
        "getComputedStyle(one, '::before').content)"
    )
    assert named == [f'"{title}"' for title in texts(page, "#table-model th")]
    edges = page.value(
        "[...document.querySelectorAll('.plot svg')].map((one) => one.getBoundingClientRect().right)"
    )
    assert len(edges) == 4 and max(edges) <= 420


@in_a_browser
def test_a_table_can_be_put_before_all_others(browser: Browser, tmp_path: Path) -> None:
    """What somebody puts first is on top, as text, also of a page without anything to report."""
    first = {
        "title": "What came before", "note": "<b>", "caption": "in words", "columns": ["what", "how many"],
        "rows": [["<i>", 1234.5]], "problems": ["<u>"],
    }  # fmt: skip
    for rows in ([row(dram=5)], []):
        page = shown(browser, tmp_path, document_of(answer(*rows), NOW_S - HOUR_S), first)
        said = text(page, "main")
        assert 0 < said.index("What came before") < said.index("1,234.5") < said.index("■ <u>")
        assert said.index("■ <u>") < said.index("Hit rate" if rows else "nothing to report")
        assert texts(page, "#first td") == ["<i>", "1,234.5"] and "<b>" in said


@in_a_browser
def test_a_plot_can_be_read_with_the_keyboard(browser: Browser, tmp_path: Path) -> None:
    """Without a choice a legend has the whole; arrow keys go through the columns, in all plots at once."""
    rows = [row(hour, dram=100 + hour, never_seen=10) for hour in range(5)]
    page = shown(browser, tmp_path, document_of(answer(*rows), NOW_S - 5 * HOUR_S))
    assert (text(page, "#chart-tokens .at"), texts(page, "#chart-tokens .legend b")[1]) == ("in all", "510")
    page.value("document.querySelector('#chart-tokens svg').focus()")
    page.press("Home")
    page.press("ArrowRight")
    at = set(texts(page, ".at"))
    assert at == {f"{units.format_time(rows[3]['hour_s']).replace(' 2084', '')} UTC"}
    assert texts(page, "#chart-tokens .legend b")[1] == "103"
    page.press("Escape")
    assert text(page, "#chart-tokens .at") == "in all"


@in_a_browser
def test_a_print_is_black_on_white(browser: Browser, tmp_path: Path) -> None:
    """On paper there is no dark, no button, and no plot wider than the page; bars keep their colours."""
    document = document_of(made_up(2), NOW_S - 24 * HOUR_S)
    document["prefixes"] *= 10
    page = shown(browser, tmp_path, document, dark=True)
    page.resize(720, 1000)
    page.call(
        "Emulation.setEmulatedMedia",
        media="print",
        features=[{"name": "prefers-color-scheme", "value": "dark"}],
    )
    assert page.value("getComputedStyle(document.body).color") == "rgb(28, 35, 40)"
    assert page.value("getComputedStyle(document.querySelector('.bar i')).printColorAdjust") == "exact"
    assert page.value("document.querySelector('.more').checkVisibility()") is False
    edges = page.value(
        "[...document.querySelectorAll('.plot svg')].map((one) => one.getBoundingClientRect().right)"
    )
    assert max(edges) <= 720


# -- figures --


@pytest.mark.parametrize(
    ("ratio", "told"),
    [(None, "–"), (0, "0.0 %"), (1, "100.0 %"), (0.0001, "<0.1 %"), (0.99999, ">99.9 %"), (0.1234, "12.3 %")],
)
def test_percent_never_rounds_to_nothing(ratio: float | None, told: str) -> None:
    """A little is not nothing, and almost all is not all."""
    assert units.percent(ratio) == told


@pytest.mark.parametrize(
    ("amount", "told"),
    [
        (None, "–"), (0, "0.00 EUR"), (0.0149, "0.015 EUR"), (0.0015, "0.0015 EUR"), (0.00001, "0.000010 EUR"),
        (0.126, "0.13 EUR"), (0.9999, "1.00 EUR"), (12.3456, "12.35 EUR"), (-0.0149, "-0.015 EUR"), (12_345.6, "12,346 EUR"),
    ],
)  # fmt: skip
def test_money_has_two_digits_that_count(amount: float | None, told: str) -> None:
    """Small sums are not told as a cent, beside parts that are told exactly."""
    assert units.money(amount, "EUR") == told


# -- with a daemon --


def fill(place: Place) -> None:
    """Totals as an earlier daemon left them: three hours, two tenants."""
    totals = Totals("eu-west", place.data_dir / "totals.sqlite")
    now_s = time.time()
    for number, tenant in enumerate(("acme", HOSTILE)):
        namespace = Namespace(
            number, NamespaceSpec(bytes([number]) * 16, 100, 32, 16, {"model": "m", "tenant": tenant})
        )
        for hour in range(3):
            for total in totals.of(namespace, now_s - hour * HOUR_S)[:2]:
                total.lookups += 2
                total.tokens = [100 * (n + 1) for n in range(outcomes.OUTCOMES)]
                total.bytes_moved[LOADED] += 1 << 20
                total.prefill_s_saved += 1800
        totals.used(namespace, b"h" * 32, 64, 640, now_s - 60)
    snapshot = totals.snapshot(now_s)
    assert snapshot is not None and totals.save(snapshot)


@pytest.fixture
def filled(place: Place, serve: Serve) -> Place:
    """A daemon that knows what it did in the last hours."""
    assert serve(place).stop() == 0
    fill(place)
    serve(place, *place.arguments, "--set=report.gpu_hour_price=2", "--set=report.currency=EUR")
    return place


def test_the_three_forms_tell_the_same(filled: Place, tmp_path: Path) -> None:
    """JSON, tables and page of a real daemon; what its counters say is what is printed."""
    file = tmp_path / "page.html"
    done = kvstore("report", "-o", "json", "--socket", filled.socket, "--html", file)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    total = document["totals"]
    assert total["tokens"] == 6 * sum(100 * (n + 1) for n in range(outcomes.OUTCOMES))
    assert total["prefill_s_saved"] == 6 * 1800 and total["money_saved"] == 6.0
    assert [len(document["by"][name]) for name in report.GROUPINGS[:4]] == [4, outcomes.OUTCOMES - 5, 1, 2]
    told = kvstore("report", "--socket", filled.socket).stdout
    assert read_page(file.read_text())["document"]["totals"] == total
    for figure in (units.percent(total["hit_ratio"]), "6.00 EUR", "acme"):
        assert figure in told
    assert "\x1b" not in told
    assert [path.name for path in tmp_path.glob(".*")] == []


@in_a_browser
def test_the_page_of_a_real_daemon_shows_its_figures(filled: Place, tmp_path: Path, browser: Browser) -> None:
    """What --html wrote is opened from its file, and says what the tables say."""
    file = tmp_path / "page.html"
    told = kvstore("report", "--socket", filled.socket, "--html", file).stdout
    page = opened(browser, file)
    figures = texts(page, ".figure")
    assert figures[0] in told and "6.00 EUR" in figures
    assert "acme" in texts(page, "#table-tenant bdi")
    assert len(texts(page, "#table-times tbody tr")) == 3


def test_a_page_is_drawn_of_all_of_its_time(place: Place, serve: Serve, tmp_path: Path) -> None:
    """Where minutes are known of a part of the time only, a page draws hours: its columns come to its totals. A minute
    that is not in the totals is in no table."""
    assert serve(place).stop() == 0
    totals = Totals("", place.data_dir / "totals.sqlite")
    now_s = time.time()
    namespace = Namespace(1, NamespaceSpec(bytes(16), 100, 32, 16, {"model": "m"}))
    for minute in range(9 * 60, -1, -1):
        for total in totals.of(namespace, now_s - 60 * minute)[:2]:
            total.lookups, total.tokens = total.lookups + 1, [*total.tokens]
            total.tokens[0] += 1
    snapshot = totals.snapshot(now_s)
    assert snapshot is not None and totals.save(snapshot)
    serve(place)

    def told(since: str, until: str) -> tuple[int, int, int]:
        words = ("--since", since, "--until", until, "--by", "minute", "--html", tmp_path / "page.html")
        done = kvstore("report", *words, "-o", "json", "--socket", place.socket)
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        columns = read_page((tmp_path / "page.html").read_text())["columns"]
        parts = (columns, document["by"]["minute"])
        return document["totals"]["lookups"], *(sum(row["lookups"] for row in rows) for rows in parts)

    in_all, drawn, by_minute = told("8h", "3h")
    assert in_all == drawn > 200 and 0 < by_minute < in_all
    # Half a minute from now: whenever this runs, it does not end with a whole one.
    until = time.strftime("%Y-%m-%dT%H:%M:30", time.gmtime(now_s - 1800))
    assert len(set(told("2h", until))) == 1


def test_groupings_can_be_chosen(filled: Place) -> None:
    """--by leaves out the others; several may be given."""
    done = kvstore("report", "-o", "json", "--by", "tenant", "--by", "hour", "--socket", filled.socket)
    assert list(json.loads(done.stdout)["by"]) == ["tenant", "hour"]
    done = kvstore("report", "-o", "json", "--by", "tier, model", "--socket", filled.socket)
    assert list(json.loads(done.stdout)["by"]) == ["tier", "model"]


def test_a_chosen_grouping_is_all_that_is_printed(filled: Place, tmp_path: Path) -> None:
    """--by in tables: no totals, no prefixes, no other grouping. The page is whole all the same."""
    file = tmp_path / "page.html"
    told = kvstore("report", "--by", "hour", "--socket", filled.socket, "--html", file).stdout
    titles = [line for line in told.splitlines() if line and not line.startswith(("  ", "kvstore report"))]
    assert titles == ["by hour"]
    page = read_page(file.read_text())
    assert set(page["document"]["by"]) == set(report.GROUPINGS) - {"hour"} and len(page["columns"]) == 3
    assert len(page["document"]["prefixes"]) == 2
    whole = kvstore("report", "--socket", filled.socket).stdout
    assert "what it came to" in whole and "since they were first hit (times" in whole
    lookups = next(line for line in whole.splitlines() if line.startswith("  lookups"))
    assert lookups.split()[1] == "12"


def test_a_time_and_another_beside_it(filled: Place) -> None:
    """--until ends a report, --against compares: of a real daemon, as documents and in words, with the times that they are of."""
    done = kvstore("report", "-o", "json", "--since", "30h", "--until", "90min", "--socket", filled.socket)
    document = json.loads(done.stdout)
    assert document["until_s"] <= time.time() - 5300 and document["totals"]["lookups"] == 4
    done = kvstore(
        "report", "-o", "json", "--since", "7h", "--against", "yesterday", "--socket", filled.socket
    )
    document = json.loads(done.stdout)
    assert document["since_s"] - document["against"]["since_s"] == 86_400
    assert document["totals"]["lookups"] == 12 and document["against"]["totals"]["lookups"] == 0
    assert {name: rows[0]["then"] for name, rows in document["changes"].items()} == dict.fromkeys(
        ("tier", "reason", "model", "tenant")
    )
    told = kvstore("report", "--since", "7h", "--against", "before", "--socket", filled.socket).stdout
    assert "misses by reason, of what was asked for" in told and ", against " in told
    told = kvstore("report", "--since", "7h", "--by", "hour", "--socket", filled.socket).stdout
    assert "missed most for" in told


def test_what_was_before_all_time(place: Place, serve: Serve) -> None:
    """A time that would be before 1970, as with a clock that was never set, is 1970: nothing was counted then."""
    serve(place)
    words = ["report", "-o", "json", "--since", "1970-01-02", "--socket", place.socket]
    for against in ("90d", "yesterday", "before"):
        done = kvstore(*words, "--against", against)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["against"]["since_s"] == 0


def test_an_empty_report_says_so(place: Place, serve: Serve) -> None:
    """A fresh daemon: exit code 0 and a plain sentence, in words and in figures."""
    serve(place)
    done = kvstore("report", "--socket", place.socket)
    assert done.returncode == 0 and "nothing to report" in done.stdout
    done = kvstore("report", "-o", "json", "--socket", place.socket)
    assert json.loads(done.stdout)["totals"]["hit_ratio"] is None


def test_wrong_options_are_one_line(filled: Place, tmp_path: Path) -> None:
    """A wrong time, a directory, a directory that is not there: what, where, exit code, nothing written."""
    for words, says in (
        (
            ["--by", "tier,moon"],
            "report: --by moon: known are tier, reason, model, tenant, region, hour, minute",
        ),
        (["--by", ""], "report: argument --by: is empty"),
        (["--since", "yesterday"], "--since yesterday: allowed are a time span"),
        (["--since", "1h", "--until", "2h"], "--until 2h: not later than --since 1h"),
        (["--until", "soon"], "--until soon: allowed are a time span"),
        (["--against", "moon"], "--against moon: not a time"),
        (
            ["--against", "before", "--by", "hour"],
            "--by hour: with --against known are tier, reason, model, tenant",
        ),
        (["--html", tmp_path], "not a file"),
        (["--html", tmp_path / "none" / "page.html"], "no such directory"),
        (["--html", "/dev/null"], "not a regular file"),
    ):
        done = kvstore("report", "--socket", filled.socket, *words)
        assert (done.returncode, done.stdout) == (3 if "no such" in says else 2, ""), done.stderr
        assert says in done.stderr and done.stderr.count("\n") == 1


def test_without_a_daemon_it_is_exit_code_4(tmp_path: Path) -> None:
    """Nobody answers: the same as for status."""
    assert kvstore("report", "--socket", tmp_path / "s").returncode == 4
