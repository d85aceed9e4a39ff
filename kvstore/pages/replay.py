"""The page of `kvstore replay --html`, made of the document that `-o json` prints.

headline ─▶ hit ratio by capacity ─▶ table ─▶ policies and words
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvstore import __version__
from kvstore.pages import html, svg
from kvstore.pages.html import Figure, Html
from kvstore.policies.names import OURS
from kvstore.replay.policies import BOUND, EVERYTHING, REFERENCES
from kvstore.units import NOTHING, count, format_duration, percent

Document = Mapping[str, Any]
Ratios = dict[str, dict[float, float]]  # policy → capacity fraction → hit ratio

ENVELOPE = "envelope"
LEAD = (
    "A cache that is full has to choose what it gives up. Here the same recorded requests went through the same cache "
    "several times, each time with another way to choose (a policy) and another size (capacity), "
    "and the hits were counted."
)
POLICIES = {
    OURS: "Ours. Learns from the traffic how soon blocks of a kind come back, and gives up the block that promises the fewest hits for its place.",
    "lru": "Least recently used, leaves of the prefix tree first: what was asked for longest ago goes.",
    "arc": "Adaptive replacement cache: two lists, used once and used again, with a border between them that adapts.",
    "s3fifo": "Three queues: newcomers have to prove themselves in a small one before they may stay in the main one.",
    "sieve": "One queue in order of arrival, and a hand that passes over it and spares what was used since it last came by.",
    "lfu": "Least frequently used, with a count for every block that was ever seen, kept for ever.",
    "wtinylfu": "A small window for newcomers; to stay, a block must have been used more often than the one it replaces.",
    BOUND: "Knows the future, and gives up what is needed last. No real cache can do that: it is about the most that is possible at a capacity.",
    EVERYTHING: "Never gives anything up: all that can be hit in these requests, with room for everything.",
    ENVELOPE: "Not a policy: at each capacity the best of the references (all but ours and the bounds). Which one that is can differ.",
}
WORDS = {
    "block": "The keys and values of a fixed run of tokens of a prompt; the unit that is stored and found.",
    "hit ratio": "Of all blocks that requests asked for, how many were there, with everything before them in the prompt: those need not be computed again.",
    "capacity": "How many blocks fit in the cache, as a share of all different blocks in the recording.",
    "point": "A percentage point: from 20 % to 21 % is one.",
}

SHOWN = 0.0005  # a twentieth of a point: less counts as equal


def replay_page(document: Document, traces: Sequence[str], drop_tail: bool, lasted_s: float = 0.0) -> str:
    """The page. document: what `-o json` prints. traces: names of the recordings, which lasted so long."""
    ratios = ratios_of(document)
    fractions = sorted({fraction for name, row in ratios.items() if name != EVERYTHING for fraction in row})
    recorded = f"{', '.join(traces)}{', without the partly filled last blocks' if drop_tail else ''}"
    parts = [html.tiles(_headline(document, ratios, fractions, lasted_s)), *_verdict(ratios, fractions)]
    if len(fractions) > 1:
        parts.append(_by_capacity(ratios, fractions))
    if fractions:
        parts.append(_all(ratios, fractions))
    named = {name: means for name, means in POLICIES.items() if name in ratios}
    parts += [html.glossary("The policies", named), html.glossary("Words on this page", WORDS)]
    made_by = f"kvstore {__version__}. The daemon's own engine and policies; only the bytes and the clock are made up."
    lead = (f"Recorded traffic: {recorded}", LEAD)
    return html.page("What each eviction policy would have hit", lead, parts, made_by)


def ratios_of(document: Document) -> Ratios:
    """Hit ratios by policy and capacity, the envelope among them."""
    ratios: Ratios = {}
    for result in document["results"]:
        ratios.setdefault(result["policy"], {})[result["capacity_fraction"]] = result["hit_ratio"]
    if document["envelope"]:
        ratios[ENVELOPE] = {float(fraction): ratio for fraction, ratio in document["envelope"].items()}
    return ratios


def _headline(
    document: Document, ratios: Ratios, fractions: Sequence[float], lasted_s: float
) -> list[tuple[str, str, str]]:
    trace = document["trace"]
    lasted = f" in {format_duration(lasted_s)}" if lasted_s > 0 else ""
    unique = f"of {count(trace['unique_blocks'])} different ones"
    boxes = [
        ("Requests", count(trace["requests"]), f"recorded{lasted}"),
        ("Blocks asked for", count(trace["block_refs"]), unique),
    ]
    if EVERYTHING in ratios:
        most = percent(max(ratios[EVERYTHING].values()))
        boxes.append(("At most", most, "can be hit at all: the rest had never been asked for before"))
    if OURS in ratios and fractions:
        middle = fractions[len(fractions) // 2]
        difference = _less(ratios[OURS][middle], ratios.get(ENVELOPE, {}).get(middle))
        against = "" if difference is None else f"{points(difference)} points against the best reference"
        boxes.append((f"Ours at {_percent(middle)} capacity", percent(ratios[OURS][middle]), against))
    return boxes


def _verdict(ratios: Ratios, fractions: Sequence[float]) -> list[Html]:
    """One sentence: who is ahead at which capacities."""
    if OURS not in ratios or ENVELOPE not in ratios:
        return []
    lead = {f: ratios[OURS][f] - ratios[ENVELOPE][f] for f in fractions}
    groups = (
        ("more at", [f for f in fractions if lead[f] >= SHOWN]),
        ("as much at", [f for f in fractions if abs(lead[f]) < SHOWN]),
        ("less at", [f for f in fractions if lead[f] <= -SHOWN]),
    )
    clauses = [f"{word} {_joined([*map(_percent, which)])} capacity" for word, which in groups if which]
    references = sum(name in ratios for name in REFERENCES)
    return [
        html.paragraph(
            f"Against the best of the {references} references ours hits {_joined(clauses)}.", "verdict"
        )
    ]


def _joined(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _by_capacity(ratios: Ratios, fractions: Sequence[float]) -> Html:
    high = max(max(row.values()) for row in ratios.values())
    shown = _order(ratios)
    series = [
        _series(name, [high if name == EVERYTHING else ratios[name].get(f) for f in fractions])
        for name in shown
    ]
    meanings = (
        ({OURS}, "the thick line is ours"),
        ({ENVELOPE}, "the dashed line is the envelope, the best reference at each capacity"),
        (
            {BOUND, EVERYTHING},
            "a dotted line is a bound: belady at a capacity, which is approximate, infinite at any",
        ),
    )
    drawn = "; ".join(meaning for names, meaning in meanings if names & set(shown))
    title = "Hit ratio by capacity"
    positions = _positions(fractions)
    ticks: list[tuple[float, str]] = []
    for at, fraction in zip(positions, fractions, strict=True):
        if not ticks or at - ticks[-1][0] > 0.055:  # where there is room
            ticks.append((at, _percent(fraction)))
    frame = svg.Frame(
        title,
        "One line for each policy. The table below has the same figures.",
        "hit ratio",
        lambda value: f"{100 * value:.3g} %",
        svg.steps(high, 5),
        ticks,
        [f"capacity {_percent(fraction)}" for fraction in fractions],
        height=430,
        x="capacity, as a share of all different blocks (logarithmic)",
    )
    # Both bounds have one colour.
    names = [
        (one.colour, f"{one.name}, level" if one.name.startswith(EVERYTHING) else one.name, "")
        for one in reversed(series)
    ]
    return html.section(
        title,
        svg.lines(frame, series, positions),
        html.legend(names),
        note=f"Higher is better.{f' {drawn.capitalize()}.' if drawn else ''}",
    )


def _all(ratios: Ratios, fractions: Sequence[float]) -> Html:
    best, ours = ratios.get(ENVELOPE, {}), Html(f"<b>{OURS}</b>")
    rows = []
    for name in (OURS, ENVELOPE, *REFERENCES, BOUND, EVERYTHING):
        if name not in ratios:
            continue
        row: list[object] = [ours if name == OURS else name]
        for fraction in fractions:
            ratio = max(ratios[name].values()) if name == EVERYTHING else ratios[name].get(fraction)
            row.append(Figure(percent(ratio)))
            if best:
                row.append(Figure(_against(name, _less(ratio, best.get(fraction)))))
        rows.append(row)
    columns = ["policy"]
    for fraction in fractions:
        columns += [f"at {_percent(fraction)}", "less envelope"] if best else [f"at {_percent(fraction)}"]
    caption = "hit ratio at each capacity" + (", and its distance to the envelope in points" if best else "")
    return html.section("All figures", html.table(caption, columns, rows, ours))


def points(difference: float) -> str:
    """0.0123 -> "+1.2"."""
    return f"{round(100 * difference, 1) + 0.0:+.1f}"  # + 0.0: no "-0.0"


def _against(name: str, difference: float | None) -> str:
    """A policy beside the envelope, in a cell."""
    if difference is None or name in (ENVELOPE, EVERYTHING):
        return NOTHING
    return "best" if difference == 0 and name in REFERENCES else points(difference)


def _order(ratios: Ratios) -> list[str]:
    """As they are drawn: what matters most comes last, on top."""
    references = [name for name in REFERENCES if name in ratios]
    return [name for name in (EVERYTHING, BOUND, *reversed(references), ENVELOPE, OURS) if name in ratios]


def _series(name: str, values: Sequence[float | None]) -> svg.Series:
    colour, style = {
        OURS: ("ours", "thick"),
        ENVELOPE: ("envelope", "dashed"),
        BOUND: ("bound", "dotted"),
        EVERYTHING: ("bound", "dotted"),
    }.get(name, ("", ""))
    label = {OURS: f"{OURS} (ours)", BOUND: f"{BOUND} (bound)", EVERYTHING: f"{EVERYTHING} (bound)"}.get(
        name, name
    )
    return svg.Series(label, colour or f"ref{[*REFERENCES].index(name) % 6 + 1}", values, style)


def _positions(fractions: Sequence[float]) -> list[float]:
    """From left to right on a logarithmic scale, of two or more."""
    low, high = math.log(fractions[0]), math.log(fractions[-1])
    return [0.03 + 0.94 * (math.log(fraction) - low) / (high - low) for fraction in fractions]


def _percent(fraction: float) -> str:
    return f"{100 * fraction:g} %"


def _less(ratio: float | None, other: float | None) -> float | None:
    return None if ratio is None or other is None else ratio - other
