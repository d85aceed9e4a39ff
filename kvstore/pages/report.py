"""The page of `kvstore report --html`, made of the document that `-o json` prints.

what it came to ─▶ where every token went ─▶ over time ─▶ why not ─▶ bytes ─▶ who ─▶ prefixes ─▶ words
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstore import __version__
from kvstore.ledger.report import Document
from kvstore.pages import html, svg
from kvstore.pages.hours import Bars
from kvstore.pages.html import Figure, Html, name
from kvstore.units import count, format_bytes, format_duration, format_time, money, percent, short_count

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
    ("stored", "copied into the cache by engines"),
    ("loaded", "given back to engines"),
    ("demoted", "written from DRAM to NVMe"),
    ("promoted", "read from NVMe to DRAM"),
)
PREFIXES_SHOWN = 20
LEAD = (
    "To answer, an engine first computes for each token of a prompt a key and a value: the prefill. This cache keeps "
    "them, so that a prompt that begins like an earlier one is loaded and not computed again. "
    "This page says how often that worked, and why not when it did not."
)
WORDS = {
    "token": "A piece of text, about three quarters of an English word. Prompts are counted in tokens.",
    "block": "The keys and values of a fixed run of tokens; the unit that is stored, found and loaded.",
    "lookup": "An engine asks how much of one prompt is here, from its beginning on.",
    "hit, miss": "A token is a hit if its keys and values came from here. It can be one only if all before it are.",
    "hit ratio": "Hits among the tokens that engines asked us for. What an engine still had itself is not counted: it does not ask for it.",
    "DRAM, NVMe": "The tiers: main memory, which is fast and small, and solid-state disks, which are slower and large.",
    "prefill": "Computing a prompt before the first word of the answer. Time saved is at the speed that engines report, or that is configured.",
    "evicted": "Given up to make room for others, when a tier was full.",
    "prefix": "The beginning that prompts share: a system prompt, a document, a conversation that goes on.",
    "tenant": "Whose prompts they are. Tenants never see each other's blocks.",
}


def report_page(document: Document, first: Sequence[Html] = ()) -> str:
    """The page. document: with every grouping of `report.GROUPINGS`. first: sections before all others."""
    region = f", region {document['region']}" if document["region"] else ""
    period = f"{format_time(document['since_s'])} to {format_time(document['until_s'])} UTC{region}"
    if document["totals"]["tokens"]:
        parts = [
            html.tiles(_headline(document)),
            _verdict(document),
            _whole(document),
            *_over_time(document),
            _reasons(document),
            _who("model", "Models", "(no name)", document),
            _who("tenant", "Tenants", "(no tenant)", document),
            _prefixes(document),
        ]
    else:
        nothing = "No engine looked anything up in this time, so there is nothing to report."
        parts = [_moved_table(document), html.section("Nothing was asked for", html.paragraph(nothing))]
    parts = [*first, *parts, html.glossary("Words on this page", WORDS)]
    made_by = (
        f"kvstore {__version__}. Every token that was asked about is in this report once, with one outcome."
    )
    return html.page("What the KV cache gave back", (period, LEAD), parts, made_by)


def kinds(by_outcome: Mapping[str, int]) -> list[tuple[str, str, int]]:
    """Each of KINDS with its tokens: (colour, name, tokens). They sum up to all."""
    found = [(colour, what, sum(by_outcome.get(name, 0) for name in names)) for colour, what, names in KINDS]
    other = sum(by_outcome.values()) - sum(tokens for _, _, tokens in found)
    return [(colour, what, tokens or (other if colour == "other" else 0)) for colour, what, tokens in found]


def _headline(document: Document) -> list[tuple[str, str, str]]:
    total = document["totals"]
    tiers = {tier["tier"]: percent(tier["hit_ratio"]) for tier in document["by"]["tier"]}
    asked = short_count(total["tokens"] - total["engine_tokens"])
    prefill_s, price, currency = total["prefill_s_saved"], document["gpu_hour_price"], document["currency"]
    moved = {way: format_bytes(size_bytes) for way, size_bytes in total["bytes"].items()}
    boxes = [
        (
            "Hit ratio",
            percent(total["hit_ratio"]),
            f"of {asked} tokens asked for: {tiers['dram']} in DRAM, {tiers['nvme']} on NVMe",
        ),
        (
            "Tokens saved",
            short_count(total["hit_tokens"]),
            f"loaded and not computed again; {count(total['lookups'])} lookups in all",
        ),
        ("Prefill time saved", format_duration(prefill_s), "of engine time"),
        ("Money saved", money(total["money_saved"], currency), f"at {money(price, currency)} an hour"),
        ("Given back to engines", moved["loaded"], f"and {moved['stored']} stored"),
    ]
    unknown = {"Prefill time saved": not prefill_s, "Money saved": not (prefill_s and price)}
    return [box for box in boxes if not unknown.get(box[0])]


def _verdict(document: Document) -> Html:
    """One sentence: what it came to, and what the rest was mostly for."""
    total, reasons = document["totals"], document["by"]["reason"]
    asked = short_count(total["tokens"] - total["engine_tokens"])
    sentence = (
        f"Of {asked} tokens that engines asked for, {short_count(total['hit_tokens'])} came from the cache"
    )
    if reasons:
        share = "all" if len(reasons) == 1 else percent(reasons[0]["share"])
        _, what = _kind_of(reasons[0]["reason"])
        why = what or f"a miss because of {reasons[0]['reason']} ({reasons[0]['meaning']})"
        sentence += f"; {share} of the others were {why}"
    return html.paragraph(f"{sentence}.", "verdict")


def _kind_of(reason: str) -> tuple[str, str]:
    """The colour of a reason, and its name where it has one of its own."""
    return next(((colour, what) for colour, what, names in KINDS if reason in names), ("other", ""))


def _whole(document: Document) -> Html:
    total = document["totals"]
    tokens = total["tokens"]
    drawn = [kind for kind in kinds(total["outcomes"]) if kind[2]]
    shares = [percent(amount / tokens) for _, _, amount in drawn]
    bar = html.bars(
        *(
            (amount / tokens, colour, f"{what}: {count(amount)} tokens, {share}")
            for (colour, what, amount), share in zip(drawn, shares, strict=True)
        )
    )
    rows = [
        (html.chip(colour, what), Figure(count(amount)), Figure(share))
        for (colour, what, amount), share in zip(drawn, shares, strict=True)
    ]
    rows.append((Html("all"), Figure(count(tokens)), Figure(percent(1.0))))
    columns = ["outcome", "tokens", "of all prompt tokens"]
    return html.section(
        "Where every token went",
        html.boxed("whole", bar),
        html.legend((colour, what, share) for (colour, what, _), share in zip(drawn, shares, strict=True)),
        html.folded("the same as a table", html.table("tokens by outcome", columns, rows)),
        note=f"Of {count(tokens)} prompt tokens, {percent(total['overall_ratio'])} did not have to be computed, the "
        "engines' own caches included. Shares here are of all prompt tokens; the hit ratio is of those that engines "
        "asked for.",
    )


# -- over time --


def _over_time(document: Document) -> list[Html]:
    made = Bars(document["by"]["hour"], document["until_s"])
    if len(made.begins) < 2:
        once = html.paragraph(
            f"All of it happened in the hour from {format_time(made.begins[0])} UTC.", "note"
        )
        return [html.section("Over time", once), html.section("Bytes moved", _moved_table(document))]
    amounts = [kinds(tokens) for tokens in made.tokens]
    drawn = [n for n in range(len(KINDS)) if any(row[n][2] for row in amounts)]
    ratios = [_hit_ratio(tokens) for tokens in made.tokens]
    rows = [
        [place, *(Figure(count(row[n][2])) for n in drawn), Figure(percent(ratio))]
        for place, row, ratio in zip(made.places(), amounts, ratios, strict=True)
    ]
    columns = ["from (UTC)", *(KINDS[n][1] for n in drawn), "hit ratio"]
    moved_rows = [
        [place, *(Figure(format_bytes(moved.get(way, 0))) for way, _ in MOVED)]
        for place, moved in zip(made.places(), made.moved, strict=True)
    ]
    moved_columns = ["from (UTC)", *(way for way, _ in MOVED)]
    return [
        html.section(
            f"Tokens {made.per}",
            _tokens_plot(made, [[row[n][2] for row in amounts] for n in drawn], drawn),
            html.legend((KINDS[n][0], KINDS[n][1], "") for n in drawn),
            html.folded("the same as a table", html.table(f"tokens {made.per}, by outcome", columns, rows)),
            note="What engines asked about, by outcome. Times are UTC; the last bar is not complete.",
        ),
        html.section(
            f"Hit ratio {made.per}",
            _ratio_plot(made, ratios),
            note="Hits among the tokens that engines asked us for. A gap: nobody asked.",
        ),
        html.section(
            f"Bytes moved {made.per}",
            _moved_plots(made),
            _moved_table(document),
            html.folded(
                "the bars as a table", html.table(f"bytes moved {made.per}", moved_columns, moved_rows)
            ),
            note="All four have the same scale.",
        ),
    ]


def _tokens_plot(made: Bars, amounts: Sequence[Sequence[int]], drawn: Sequence[int]) -> Html:
    series = [
        svg.Series(f"tokens {KINDS[n][1]}", KINDS[n][0], row) for n, row in zip(drawn, amounts, strict=True)
    ]
    frame = svg.Frame(
        f"Tokens {made.per} by outcome",
        "Stacked bars: hits below, misses above. The table below has the same figures.",
        f"tokens {made.per}",
        short_count,
        svg.steps(max(map(sum, zip(*amounts, strict=True)))),
        made.ticks(),
        made.places(),
        height=290,
    )
    return svg.stacked_bars(frame, series)


def _ratio_plot(made: Bars, ratios: Sequence[float | None]) -> Html:
    frame = svg.Frame(
        f"Hit ratio {made.per}",
        "A line from 0 to 100 %; it is interrupted where nothing was asked for.",
        "hits among the tokens asked for",
        lambda value: f"{100 * value:.0f} %",
        [0, 0.25, 0.5, 0.75, 1],
        made.ticks(),
        made.places(),
        height=200,
    )
    at = [(number + 0.5) / len(ratios) for number in range(len(ratios))]
    return svg.lines(frame, [svg.Series("hit ratio", "dram", ratios)], at)


def _hit_ratio(by_outcome: Mapping[str, int]) -> float | None:
    asked = sum(by_outcome.values()) - by_outcome.get("engine", 0)
    return (by_outcome.get("dram", 0) + by_outcome.get("nvme", 0)) / asked if asked else None


def _moved_plots(made: Bars) -> Html:
    high = max((moved.get(way, 0) for moved in made.moved for way, _ in MOVED), default=0)
    ticks = made.ticks()
    plots = []
    for way, means in MOVED:
        frame = svg.Frame(
            f"Bytes {way} {made.per}",
            f"Bars: bytes {means}.",
            f"{way}: {means}",
            format_bytes,
            svg.byte_steps(high, 3),
            ticks[:: 2 if len(ticks) > 5 else 1],
            made.places(),
            width=470,
            height=150,
        )
        plots.append(svg.stacked_bars(frame, [svg.Series(way, way, [m.get(way, 0) for m in made.moved])]))
    return html.boxed("grid", "".join(plots))


def _moved_table(document: Document) -> Html:
    moved = document["totals"]["bytes"]
    rows = [(html.chip(way, way), means, Figure(format_bytes(moved.get(way, 0)))) for way, means in MOVED]
    return html.boxed(
        "narrow", html.table("bytes moved in the whole time", ["", "what it is", "bytes"], rows)
    )


# -- why not, who, what --


def _reasons(document: Document) -> Html:
    reasons, title = document["by"]["reason"], "Why tokens missed"
    if not reasons:
        return html.section(title, html.paragraph("None did: everything asked for was here.", "note"))
    rows = [
        (
            Html(f"<code>{html.escape(reason['reason'])}</code>"),
            html.bars((reason["share"], _kind_of(reason["reason"])[0], percent(reason["share"]))),
            Figure(percent(reason["share"])),
            Figure(count(reason["tokens"])),
            reason["meaning"],
        )
        for reason in reasons
    ]
    caption = "reasons, most tokens first; a full bar is all that missed"
    return html.section(
        title,
        html.table(caption, ["reason", "", "share", "tokens", "what it means"], rows),
        note=f"{count(document['totals']['missed_tokens'])} tokens were not here when asked for, or could not be used. "
        "Each has one reason: that of its block. What was held behind a block that did not come cannot be used, and "
        "has the reason of that one.",
    )


def _who(field: str, title: str, otherwise: str, document: Document) -> Html:
    groups, currency = document["by"][field], document["currency"]
    most = max(group["tokens"] for group in groups) or 1
    timed = document["totals"]["prefill_s_saved"] > 0
    paid = timed and document["totals"]["money_saved"] is not None
    rows = []
    for group in groups:
        parts = (
            (amount / most, colour, f"{what}: {count(amount)} tokens")
            for colour, what, amount in kinds(group["outcomes"])
        )
        cells = [percent(group["hit_ratio"]), short_count(group["tokens"]), short_count(group["hit_tokens"])]
        cells += [count(group["lookups"]), *[format_duration(group["prefill_s_saved"])] * timed]
        cells += [money(group["money_saved"], currency)] * paid
        rows.append([name(group[field], otherwise), html.bars(*parts), *map(Figure, cells)])
    columns = [field, "outcomes", "hit ratio", "tokens", "of these hits", "lookups"]
    columns += ["prefill saved"] * timed + ["money saved"] * paid
    caption = (
        "most tokens first; a bar is as long as the row has tokens, against the first row; colours as above"
    )
    return html.section(title, html.table(caption, columns, rows))


def _prefixes(document: Document) -> Html:
    prefixes, title = document["prefixes"][:PREFIXES_SHOWN], "Prefixes that saved most"
    if not prefixes:
        return html.section(title, html.paragraph("No prefix was hit in this time.", "note"))
    most = max(prefix["tokens_saved"] for prefix in prefixes) or 1
    rows = []
    for prefix in prefixes:
        block_hash = html.escape(prefix["block_hash"])
        saved, *others = prefix_cells(prefix)
        rows.append(
            [
                Html(f'<code class="hash" title="{block_hash}">{block_hash}</code>'),
                name(prefix["model"], "(no name)"),
                name(prefix["tenant"], "(no tenant)"),
                html.bars((prefix["tokens_saved"] / most, "dram", count(prefix["tokens_saved"]))),
                *map(Figure, (saved, *others[:-1])),
                others[-1],
            ]
        )
    caption = (
        f"tokens saved since the prefix was first hit, most first{cut(prefixes, document)}; times are ago"
    )
    columns = ["ends with block", "model", "tenant", "", *PREFIX_COLUMNS]
    return html.section(
        title,
        html.boxed("tight", html.table(caption, columns, rows)),
        note="The longest beginnings of prompts that were found here. ± says how much of a figure may belong to another "
        "prefix: only the heaviest are counted exactly.",
    )


PREFIX_COLUMNS = ("tokens saved", "hits", "length", "first hit", "last hit", "lives in")


def prefix_cells(prefix: Mapping[str, Any]) -> list[str]:
    """What is known of a prefix, for PREFIX_COLUMNS; tokens saved with the error of that figure."""
    error = prefix["error_tokens"]
    tiers = [{"dram": "DRAM", "nvme": "NVMe"}.get(tier, tier) for tier in prefix["tiers"]]
    return [
        short_count(prefix["tokens_saved"]) + (f" ±{short_count(error)}" if error else ""),
        count(prefix["uses"]),
        count(prefix["tokens"]),
        format_duration(prefix["age_s"]),
        format_duration(prefix["idle_s"]),
        ", ".join(tiers) or "gone",
    ]


def cut(shown: Sequence[Mapping[str, Any]], document: Document) -> str:
    """What a table of prefixes leaves out: ", 10 of 50", or nothing."""
    there = len(document["prefixes"])
    return f", {len(shown)} of {there}" if len(shown) < there else ""
