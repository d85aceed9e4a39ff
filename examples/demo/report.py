"""What the phases showed: the verdict, the JSON document, the table and the page.

    {"phases": [{"name", "prompt_tokens", "cached_tokens": {tier: n}, "ttft_ms", "outputs_equal",
                 "corrupt_blocks"}],
     "ok": true, "problems": []}

The fields are a contract: they may grow, none is renamed or removed. The page has the table on top, and
below it what the daemon itself has to report of the phases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

NOTE = (
    "The same prompts again and again, each time from a fresh engine process. The faults were provoked: the daemon was "
    "killed, its memory was thrown away, and bytes of one stored block were flipped on disk. That block is what is counted "
    "as corrupt below, with all that was held behind it in its prompt. Output: whether every token of the answers is that "
    "of the cold run. Not in the figures below this table: the last seconds before the daemon was killed, and the last "
    "phase, which had an empty daemon of its own."
)

TIERS = ("dram", "nvme")  # fastest first


@dataclass(slots=True, frozen=True)
class Expected:
    """What a phase must show to count. tier: where hits must come from, "" where there must be none."""

    tier: str = ""
    corrupt_blocks: int = 0


@dataclass(slots=True, frozen=True)
class Shown:
    """What one phase showed.

    prompt_tokens: of all prompts. cached_tokens: tokens not computed, by the tier their blocks
    were in when the engine asked. ttft_ms: median over the prompts. outputs_equal: every output
    token is that of the cold run. corrupt_blocks: blocks whose checksum did not match.
    """

    name: str
    prompt_tokens: int
    cached_tokens: dict[str, int]
    ttft_ms: float
    outputs_equal: bool
    corrupt_blocks: int = 0
    expected: Expected = field(default=Expected(), repr=False)


def problems(phases: Sequence[Shown]) -> list[str]:
    """One line for everything that did not come out as it must; empty when all is well."""
    found = []
    for phase in phases:
        expected, cached = phase.expected, phase.cached_tokens
        if not phase.outputs_equal:
            found.append(f"{phase.name}: the output is not that of the cold run")
        if expected.tier and not cached.get(expected.tier):
            found.append(f"{phase.name}: no tokens came from {expected.tier}")
        if not expected.tier and any(cached.values()):
            found.append(f"{phase.name}: tokens came from a cache that must be empty")
        if sum(cached.values()) > phase.prompt_tokens:
            found.append(f"{phase.name}: more tokens cached than asked for; a counter is wrong")
        if phase.corrupt_blocks != expected.corrupt_blocks:
            found.append(
                f"{phase.name}: {phase.corrupt_blocks} corrupt blocks counted, expected {expected.corrupt_blocks}"
            )
    return found


def document(phases: Sequence[Shown], also: Sequence[str] = ()) -> dict[str, Any]:
    """The JSON document. also: problems that no phase could report."""
    rows = [{**asdict(phase), "ttft_ms": round(phase.ttft_ms, 2)} for phase in phases]
    for row in rows:
        del row["expected"]
    found = [*problems(phases), *also]
    return {"phases": rows, "ok": not found, "problems": found}


def table(phases: Sequence[Shown]) -> tuple[list[str], list[list[object]]]:
    """Column names and rows for people."""
    columns = ["phase", "prompt tokens", "from dram", "from nvme", "computed", "ttft ms", "output", "corrupt"]
    rows: list[list[object]] = [
        [
            phase.name,
            phase.prompt_tokens,
            *(phase.cached_tokens.get(tier, 0) for tier in TIERS),
            phase.prompt_tokens - sum(phase.cached_tokens.values()),
            round(phase.ttft_ms, 1),
            "equal" if phase.outputs_equal else "DIFFERS",
            phase.corrupt_blocks,
        ]
        for phase in phases
    ]
    return columns, rows


def page(phases: Sequence[Shown], answer: Mapping[str, Any], also: Sequence[str] = ()) -> str:
    """The page: this table, then the report of the daemon. answer: of `Client.report`. also: as for `document`."""
    from kvstore.ledger import report
    from kvstore.tools.pages import report_page

    columns, rows = table(phases)
    first = {
        "title": "What the demo did",
        "note": NOTE,
        "caption": "Tokens by where they came from; ttft: time to the first token, median.",
        "columns": columns,
        "rows": rows,
        "problems": [*problems(phases), *also],
    }
    return report_page(report.document(answer), first)
