"""The page of `kvstore report --html`, made of the document that `-o json` prints.

what it came to ─▶ where every token went ─▶ over time ─▶ why not ─▶ bytes ─▶ who ─▶ prefixes ─▶ words
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstore import __version__
from kvstore.pages import html, svg
from kvstore.pages.hours import Bars, bars
from kvstore.pages.html import Figure, Html
from kvstore.report import Document
from kvstore.sizes import short_size
from kvstore.wording import count, moment, money, percent, short_count, span

# Outcomes as they are drawn, hits below misses: colour, name, which.
KINDS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("engine", "already in the engine", ("engine",)),
    ("dram", "hit in DRAM", ("dram",)),
    ("nvme", "hit on NVMe", ("nvme",)),
    ("never", "not seen before", ("never_seen",)),
    ("evicted", "evicted meanwhile", ("evicted_dram", "evicted_nvme")),
    ("other", "missed for another reason", ()),
    ("tail", "behind the last whole block", ("partial_block",)),
)
MOVED = (
    ("stored", "stored", "copied into the cache by engines"),
    ("loaded", "loaded", "given back to engines"),
    ("demoted", "demoted", "written from DRAM to NVMe"),
    ("promoted", "promoted", "read from NVMe to DRAM"),
)
PREFIXES_SHOWN = 20
LEAD = (
    "To answer, an engine first computes for each token of a prompt a key and a value: the prefill. This cache keeps "
    "them, so that a prompt that begins like an earlier one is loaded and not computed again. "
    "This page says how often that worked, and why not when it did not."
)
WORDS = (
    ("token", "A piece of text, about three quarters of an English word. Prompts are counted in tokens."),
    ("block", "The keys and values of a fixed run of tokens; the unit that is stored, found and loaded."),
    ("lookup", "An engine asks how much of one prompt is here, from its beginning on."),
    (
        "hit, miss",
        "A token is a hit if its keys and values came from here. It can be one only if all before it are.",
    ),
    (
        "hit ratio",
        "Hits among the tokens that engines asked us for. What an engine still had itself is not counted: it does not ask for it.",
    ),
    (
        "DRAM, NVMe",
        "The tiers: main memory, which is fast and small, and solid-state disks, which are slower and large.",
    ),
    (
        "prefill",
        "Computing a prompt before the first word of the answer. Time saved is at the speed that engines report, or that is configured.",
    ),
    ("evicted", "Given up to make room for others, when a tier was full."),
    ("prefix", "The beginning that prompts share: a system prompt, a document, a conversation that goes on."),
    ("tenant", "Whose prompts they are. Tenants never see each other's blocks."),
)


def report_page(document: Document, first: Sequence[Html] = ()) -> str:
    """The page. document: with every grouping of `report.GROUPINGS`. first: sections before all others."""
    region = f", region {document['region']}" if document["region"] else ""
    title = "What the KV cache gave back"
    period = f"{moment(document['since_s'])} to {moment(document['until_s'])} UTC{region}"
    made_by = (
        f"kvstore {__version__}. Every token that was asked about is in this report once, with one outcome."
    )
    if not document["totals"]["tokens"]:
        empty = html.section(
            "Nothing was asked for",
            html.paragraph("No engine looked anything up in this time, so there is nothing to report."),
        )
        return html.page(title, (period, LEAD), [*first, _moved_table(document), empty, _words()], made_by)
    parts = [
        *first,
        html.tiles(_headline(document)),
        _verdict(document),
        _whole(document),
        *_over_time(document),
        _reasons(document),
        _who("model", "Models", "(no name)", document),
        _who("tenant", "Tenants", "(no tenant)", document),
        _prefixes(document),
        _words(),
    ]
    return html.page(title, (period, LEAD), parts, made_by)


def kinds(by_outcome: Mapping[str, int]) -> list[int]:
    """Tokens of each of KINDS; they sum up to all."""
    named = {name for _, _, names in KINDS for name in names}
    other = sum(tokens for name, tokens in by_outcome.items() if name not in named)
    return [sum(by_outcome.get(name, 0) for name in names) if names else other for _, _, names in KINDS]


def _headline(document: Document) -> list[tuple[str, str, str]]:
    total = document["totals"]
    tiers = {tier["tier"]: tier["hit_ratio"] for tier in document["by"]["tier"]}
    asked = total["tokens"] - total["engine_tokens"]
    prefill_s, price = total["prefill_s_saved"], document["gpu_hour_price"]
    boxes = [
        (
            "Hit ratio",
            percent(total["hit_ratio"]),
            f"of {short_count(asked)} tokens asked for: {percent(tiers['dram'])} in DRAM, {percent(tiers['nvme'])} on NVMe",
        ),
        (
            "Tokens saved",
            short_count(total["hit_tokens"]),
            f"loaded and not computed again; {count(total['lookups'])} lookups in all",
        ),
    ]
    if prefill_s:
        boxes.append(("Prefill time saved", span(prefill_s), "of engine time"))
    if prefill_s and price:
        each = f"at {money(price, document['currency'])} an hour"
        boxes.append(("Money saved", money(total["money_saved"], document["currency"]), each))
    boxes.append(
        (
            "Given back to engines",
            short_size(total["bytes"]["loaded"]),
            f"and {short_size(total['bytes']['stored'])} stored",
        )
    )
    return boxes


def _verdict(document: Document) -> Html:
    """One sentence: what it came to, and what the rest was mostly for."""
    total, reasons = document["totals"], document["by"]["reason"]
    asked = total["tokens"] - total["engine_tokens"]
    told = f"Of {short_count(asked)} tokens that engines asked for, {short_count(total['hit_tokens'])} came from the cache"
    if reasons:
        share = "all" if len(reasons) == 1 else percent(reasons[0]["share"])
        told += f"; {share} of the others were {_mostly(reasons[0])}"
    return html.paragraph(f"{told}.", "verdict")


def _mostly(reason: Mapping[str, Any]) -> str:
    what = next((what for _, what, names in KINDS if reason["reason"] in names), "")
    return what or f"a miss because of {reason['reason']} ({reason['meaning']})"


def _whole(document: Document) -> Html:
    total = document["totals"]
    tokens = total["tokens"]
    drawn = [
        (colour, what, amount)
        for (colour, what, _), amount in zip(KINDS, kinds(total["outcomes"]), strict=True)
        if amount
    ]
    bar = html.bars(
        (amount / tokens, f"c-{colour}", f"{what}: {count(amount)} tokens, {percent(amount / tokens)}")
        for colour, what, amount in drawn
    )
    legend = html.legend((f"c-{colour}", what, percent(amount / tokens)) for colour, what, amount in drawn)
    rows = [
        (html.chip(f"c-{colour}", what), Figure(count(amount)), Figure(percent(amount / tokens)))
        for colour, what, amount in drawn
    ]
    rows.append((Html("all"), Figure(count(tokens)), Figure(percent(1.0))))
    table = html.table("tokens by what became of them", ["outcome", "tokens", "of all prompt tokens"], rows)
    overall = percent(total["overall_ratio"])
    return html.section(
        "Where every token went",
        Html(f'<div class="whole">{bar}</div>'),
        legend,
        html.folded("the same as a table", table),
        note=f"Of {count(tokens)} prompt tokens, {overall} did not have to be computed, the engines' own caches included. "
        "Shares here are of all prompt tokens; the hit ratio is of those that engines asked for.",
    )


# -- over time --


def _over_time(document: Document) -> list[Html]:
    made = bars(document["by"]["hour"], document["until_s"])
    if len(made.begins) < 2:
        once = html.paragraph(f"All of it happened in the hour from {moment(made.begins[0])} UTC.", "note")
        return [html.section("Over time", once), html.section("Bytes moved", _moved_table(document))]
    return [
        html.section(
            f"Tokens {made.per}",
            _tokens_plot(made),
            html.legend((f"c-{colour}", what, "") for colour, what in _drawn(made)),
            html.folded("the same as a table", _tokens_table(made)),
            note="What was asked about, and what became of it. Times are UTC; the last bar is not complete.",
        ),
        html.section(
            f"Hit ratio {made.per}",
            _ratio_plot(made),
            note="Hits among the tokens that engines asked us for. A gap: nobody asked.",
        ),
        html.section(
            f"Bytes moved {made.per}",
            _moved_plots(made),
            _moved_table(document),
            html.folded("the bars as a table", _moved_bars(made)),
            note="All four have the same scale.",
        ),
    ]


def _drawn(made: Bars) -> list[tuple[str, str]]:
    """Kinds that are there at all."""
    amounts = [kinds(tokens) for tokens in made.tokens]
    return [(colour, what) for n, (colour, what, _) in enumerate(KINDS) if any(row[n] for row in amounts)]


def _tokens_plot(made: Bars) -> Html:
    amounts = [kinds(tokens) for tokens in made.tokens]
    series = [
        svg.Series(f"tokens {what}", colour, [row[n] for row in amounts])
        for n, (colour, what, _) in enumerate(KINDS)
        if any(row[n] for row in amounts)
    ]
    frame = svg.Frame(
        f"Tokens {made.per} by outcome",
        "Stacked bars: hits below, misses above. The table below has the same figures.",
        f"tokens {made.per}",
        short_count,
        made.ticks(),
        height=290,
    )
    return svg.stacked_bars(frame, series, made.places(), svg.steps(0, max(map(sum, amounts))))


def _tokens_table(made: Bars) -> Html:
    drawn = _drawn(made)
    rows = []
    for place, tokens in zip(made.places(), made.tokens, strict=True):
        amounts = dict(zip((colour for colour, _, _ in KINDS), kinds(tokens), strict=True))
        rows.append(
            [
                place,
                *(Figure(count(amounts[colour])) for colour, _ in drawn),
                Figure(percent(_hit_ratio(tokens))),
            ]
        )
    return html.table(
        f"tokens {made.per}, by outcome", ["from (UTC)", *(what for _, what in drawn), "hit ratio"], rows
    )


def _ratio_plot(made: Bars) -> Html:
    ratios = [_hit_ratio(tokens) for tokens in made.tokens]
    size = len(ratios)
    frame = svg.Frame(
        f"Hit ratio {made.per}",
        "A line from 0 to 100 %; it is interrupted where nothing was asked for.",
        "hits among the tokens asked for",
        lambda value: f"{100 * value:.0f} %",
        made.ticks(),
        height=200,
    )
    at = [(number + 0.5) / size for number in range(size)]
    return svg.lines(
        frame, [svg.Series("hit ratio", "dram", ratios)], at, made.places(), [0, 0.25, 0.5, 0.75, 1]
    )


def _hit_ratio(by_outcome: Mapping[str, int]) -> float | None:
    asked = sum(by_outcome.values()) - by_outcome.get("engine", 0)
    return (by_outcome.get("dram", 0) + by_outcome.get("nvme", 0)) / asked if asked else None


def _moved_plots(made: Bars) -> Html:
    high = max((moved.get(name, 0) for moved in made.moved for name, _, _ in MOVED), default=0)
    marks = svg.byte_steps(high, 3)
    plots = []
    for name, what, means in MOVED:
        frame = svg.Frame(
            f"Bytes {what} {made.per}",
            f"Bars: bytes {means}.",
            f"{what}: {means}",
            short_size,
            made.ticks()[:: 2 if len(made.ticks()) > 5 else 1],
            width=470,
            height=150,
        )
        series = svg.Series(what, name, [moved.get(name, 0) for moved in made.moved])
        plots.append(svg.stacked_bars(frame, [series], made.places(), marks))
    return Html(f'<div class="grid">{"".join(plots)}</div>')


def _moved_bars(made: Bars) -> Html:
    rows = [
        [place, *(Figure(short_size(moved.get(name, 0))) for name, _, _ in MOVED)]
        for place, moved in zip(made.places(), made.moved, strict=True)
    ]
    return html.table(f"bytes moved {made.per}", ["from (UTC)", *(what for _, what, _ in MOVED)], rows)


def _moved_table(document: Document) -> Html:
    moved = document["totals"]["bytes"]
    rows = [
        (html.chip(f"c-{name}", what), means, Figure(short_size(moved.get(name, 0))))
        for name, what, means in MOVED
    ]
    table = html.table("bytes moved in the whole time", ["", "what it is", "bytes"], rows)
    return Html(f'<div class="narrow">{table}</div>')


# -- why not, who, what --


def _reasons(document: Document) -> Html:
    reasons = document["by"]["reason"]
    if not reasons:
        return html.section(
            "Why tokens missed", html.paragraph("None did: everything asked for was here.", "note")
        )
    rows = [
        (
            Html(f"<code>{html.escape(reason['reason'])}</code>"),
            html.bar(reason["share"], f"c-{_colour_of(reason['reason'])}", percent(reason["share"])),
            Figure(percent(reason["share"])),
            Figure(count(reason["tokens"])),
            reason["meaning"],
        )
        for reason in reasons
    ]
    missed = count(document["totals"]["missed_tokens"])
    return html.section(
        "Why tokens missed",
        html.table(
            "reasons, most tokens first; a full bar is all that missed",
            ["reason", "", "share", "tokens", "what it means"],
            rows,
        ),
        note=f"{missed} tokens were not here when asked for, or could not be used. Each has one reason: that of its block. "
        "What was held behind a block that did not come cannot be used, and has the reason of that one.",
    )


def _who(field: str, title: str, otherwise: str, document: Document) -> Html:
    groups = document["by"][field]
    most = max(group["tokens"] for group in groups) or 1
    paid = document["totals"]["money_saved"] is not None
    timed = document["totals"]["prefill_s_saved"] > 0
    rows = []
    for group in groups:
        parts = [
            (amount / most, f"c-{colour}", f"{what}: {count(amount)} tokens")
            for (colour, what, _), amount in zip(KINDS, kinds(group["outcomes"]), strict=True)
        ]
        row = [
            html.name(group[field], otherwise),
            html.bars(parts),
            Figure(percent(group["hit_ratio"])),
            Figure(short_count(group["tokens"])),
            Figure(short_count(group["hit_tokens"])),
            Figure(count(group["lookups"])),
        ]
        row += [Figure(span(group["prefill_s_saved"]))] * timed
        row += [Figure(money(group["money_saved"], document["currency"]))] * (paid and timed)
        rows.append(row)
    columns = [field, "outcomes", "hit ratio", "tokens", "of these hits", "lookups"]
    columns += ["prefill saved"] * timed + ["money saved"] * (paid and timed)
    caption = (
        "most tokens first; a bar is as long as the row has tokens, against the first row; colours as above"
    )
    return html.section(title, html.table(caption, columns, rows))


def _prefixes(document: Document) -> Html:
    prefixes = document["prefixes"][:PREFIXES_SHOWN]
    title = "Prefixes that saved most"
    if not prefixes:
        return html.section(title, html.paragraph("No prefix was hit in this time.", "note"))
    most = max(prefix["tokens_saved"] for prefix in prefixes) or 1
    rows = [
        (
            Html(
                f'<code class="hash" title="{html.escape(prefix["block_hash"])}">'
                f"{html.escape(prefix['block_hash'])}</code>"
            ),
            html.name(prefix["model"], "(no name)"),
            html.name(prefix["tenant"], "(no tenant)"),
            html.bar(prefix["tokens_saved"] / most, "c-dram", count(prefix["tokens_saved"])),
            Figure(saved(prefix)),
            Figure(count(prefix["uses"])),
            Figure(count(prefix["tokens"])),
            Figure(span(prefix["age_s"])),
            Figure(span(prefix["idle_s"])),
            lives_in(prefix["tiers"]),
        )
        for prefix in prefixes
    ]
    columns = [
        "ends with block",
        "model",
        "tenant",
        "",
        "tokens saved",
        "hits",
        "length",
        "first hit",
        "last hit",
        "lives in",
    ]
    caption = (
        f"tokens saved since the prefix was first hit, most first{cut(prefixes, document)}; times are ago"
    )
    table = html.table(caption, columns, rows)
    return html.section(
        title,
        Html(f'<div class="tight">{table}</div>'),
        note="The longest beginnings of prompts that were found here. ± says how much of a figure may belong to another "
        "prefix: only the heaviest are counted exactly.",
    )


def cut(shown: Sequence[Mapping[str, Any]], document: Document) -> str:
    """What a table of prefixes leaves out: ", 10 of 50", or nothing."""
    there = len(document["prefixes"])
    return f", {len(shown)} of {there}" if len(shown) < there else ""


def saved(prefix: Mapping[str, Any]) -> str:
    """Tokens a prefix saved, with the error of that figure."""
    error = prefix["error_tokens"]
    return short_count(prefix["tokens_saved"]) + (f" ±{short_count(error)}" if error else "")


def lives_in(tiers: Sequence[str]) -> str:
    """Where a prefix is now."""
    return ", ".join({"dram": "DRAM", "nvme": "NVMe"}.get(tier, tier) for tier in tiers) or "gone"


def _words() -> Html:
    return html.section("Words on this page", html.glossary(WORDS))


def _colour_of(reason: str) -> str:
    return next((colour for colour, _, names in KINDS if reason in names), "other")
