"""What each eviction policy would have hit on recorded traffic, and how far ours is from the best.

  kvstore replay trace.jsonl                      every policy at 1, 5, 10 and 25 % of the trace's blocks
  kvstore replay trace.jsonl.gz --capacity 2%,40% other capacities
  kvstore replay mine.jsonl --capacity 64GiB,1TiB of tiers; only where the trace says what a block takes (kvstore record)
  kvstore replay trace.jsonl --policy kvstore,lru some of the policies
  kvstore replay trace.jsonl --tail drop          without the partly filled last blocks, as engines store
  kvstore replay trace.jsonl --block-tokens 16 --time-unit s   of another recorder, whose lines do not say it
  kvstore replay trace.jsonl --html page.html     one self-contained page with plots, beside the table
  kvstore replay trace.jsonl -o json              for programs; docs/cli.md lists the fields

Traces are those of `kvstore record`, or in the form of the Mooncake release: one JSON object a line with timestamp (ms, unless
--time-unit says s) and hash_ids (of blocks of 512 tokens, unless a line or --block-tokens says otherwise), each of which stands for a block and everything before it, so that it follows the same
one everywhere; optionally input_length, without which --tail drop leaves a request as it is. The
requests go through the daemon's own engine and its own policies; only the bytes and the clock are
made up. The envelope is the best reference policy of each capacity; belady knows the future, and is
an approximate bound; infinite never evicts. Exit code 0 when all was computed, whatever the figures
are, 2 where a file is no trace, 3 where there is none.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.constants import REPLAY_BLOCK_TOKENS
from kvstore.tools.cli import FAILED, NOT_FOUND, USAGE, CliError
from kvstore.tools.cli.commands.report import add_html_argument, require_page, write_page
from kvstore.tools.cli.options import add_output_argument, names, whole
from kvstore.tools.cli.output import present, print_table, progress_bars
from kvstore.units import (
    exact_bytes,
    format_bytes,
    format_duration,
    parse_bytes,
    plural,
    printable,
    short_count,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.tools.replay.table import Cell, Result
    from kvstore.tools.replay.trace import Trace

REPLAY_BLOCK_TOKENS_MAX = 1 << 20

CAPACITIES = "1%,5%,10%,25%"
_A_SECOND = {"ms": 1000, "s": 1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_output_argument(parser, "table", "json")
    parser.add_argument(
        "trace", nargs="+", type=Path, metavar="TRACE", help="JSONL files, gzip or not, one after the other"
    )
    parser.add_argument(
        "--capacity",
        default=CAPACITIES,
        metavar="LIST",
        help=f"of the trace's unique blocks (default {CAPACITIES.replace('%', '%%')}), or sizes: 64GiB",
    )
    parser.add_argument(
        "--policy", action="append", metavar="LIST", help="all (default), or names of the table: kvstore,lru"
    )
    parser.add_argument(
        "--tail",
        choices=("keep", "drop"),
        default="keep",
        help="the partly filled last block of a prompt, by its input_length (default keep)",
    )
    parser.add_argument(
        "--block-tokens",
        type=whole(1, REPLAY_BLOCK_TOKENS_MAX),
        default=REPLAY_BLOCK_TOKENS,
        metavar="N",
        help=f"of lines that do not say it (default {REPLAY_BLOCK_TOKENS}, as in the Mooncake release)",
    )
    parser.add_argument(
        "--time-unit", choices=tuple(_A_SECOND), default="ms", help="of timestamps (default ms)"
    )
    add_html_argument(parser)


def run(args: argparse.Namespace) -> int:
    from kvstore.errors import ReplayError, WorkerError
    from kvstore.tools.replay import table, trace

    asked = _capacities(args.capacity)
    policies = _policies(args.policy or ["all"])
    require_page(args.html, "replay")
    for path in args.trace:
        if not path.is_file():
            what = "not a file" if path.exists() else "no such file"
            raise CliError(f"replay: {path}: {what}", exit_code=NOT_FOUND)
    drop_tail = args.tail == "drop"
    assumed = trace.Assumed(args.block_tokens, _A_SECOND[args.time_unit])
    try:
        requests = trace.read(args.trace, drop_tail, assumed)
    except ReplayError as error:
        raise CliError(f"replay: {error}", exit_code=USAGE) from error
    _say(
        f"{len(requests.prompts)} requests, {requests.block_refs} block references, {requests.unique_blocks} unique blocks"
    )
    for line in _notes(requests, args):
        _say(line)
    fractions = _fractions(asked, requests)
    cells = table.plan(requests, policies, fractions)
    with progress_bars() as show:
        try:
            results = table.compute(requests, cells, lambda done, total: _progress(show, cells, done, total))
        except WorkerError as error:
            raise CliError(f"replay: {error}", exit_code=FAILED) from error
    document = _document(requests, results)
    if args.html is not None:
        from kvstore.tools.pages import replay_page

        lasted_s = requests.times_s[-1] - requests.times_s[0]
        traces = [printable(path.name) for path in args.trace]
        write_page(args.html, replay_page(document, traces, drop_tail, lasted_s), "replay")
    return present(args, document, lambda _: _print(results, fractions))


def _notes(requests: Trace, args: argparse.Namespace) -> Iterator[str]:
    """What the trace was read by, and where it does not look right."""
    lasted_s = requests.times_s[-1] - requests.times_s[0]
    rate = f", {short_count(len(requests.prompts) / lasted_s)} requests/s" if lasted_s > 0 else ""
    yield f"timestamps taken as {args.time_unit}: {format_duration(lasted_s)}{rate} (--time-unit)"
    if requests.assumed_lines:
        yield f"blocks taken as {args.block_tokens} tokens where lines do not say it (--block-tokens)"
    if requests.unfit_lines:
        dropped = "; --tail drop left out whole blocks of these" if args.tail == "drop" else ""
        fitting = requests.fitting_tokens  # 0 of a line without blocks
        hint = f": try --block-tokens {fitting}" if fitting not in (0, args.block_tokens) else ""
        lines = plural(requests.unfit_lines, "line")
        yield f"{lines} with an input_length that does not fit its blocks{dropped}{hint}"
    if requests.cut_lines:
        yield "the last line is cut off, and left out"
    if requests.unchained_ids:
        yield f"{requests.unchained_ids} hash ids follow several others: each of these counts as a block of its own"
    if requests.repeated_ids:
        yield f"{requests.repeated_ids} hash ids are named again in one prompt: each time they count as another block"


def _capacities(text: str) -> list[float | int]:
    """Shares of a trace's blocks, and sizes in bytes. Raises CliError."""
    given: list[float | int] = []
    for word in text.split(","):
        if re.fullmatch(r"\s*\d+(\.\d+)?%\s*", word):
            share = float(Decimal(word.strip()[:-1]) / 100)
            if 0 < share <= 1:
                given.append(share)
        elif re.fullmatch(r"\s*[\d.]+\s*[KMGT]iB\s*", word):
            with contextlib.suppress(ValueError):
                given += [size] if (size := parse_bytes(word)) else []
    if len(given) < len(text.split(",")):
        raise CliError(
            f"replay: --capacity {text}: percentages above 0 % up to 100 % are allowed, e.g. {CAPACITIES}, and sizes, "
            "e.g. 64GiB",
            exit_code=USAGE,
        )
    return given


def _fractions(asked: list[float | int], requests: Trace) -> list[float]:
    """All as shares of the trace's blocks. Raises CliError."""
    fractions = {share for share in asked if isinstance(share, float)}
    for size in sorted(size for size in asked if isinstance(size, int)):
        if requests.block_bytes is None:
            raise CliError(
                f"replay: --capacity {exact_bytes(size)}: the trace does not say what a block takes "
                "(those of `kvstore record` do); give percentages of its blocks",
                exit_code=USAGE,
            )
        share = min(1.0, float(f"{size / requests.block_bytes / requests.unique_blocks:.3g}"))
        fractions.add(share)
        blocks = "all of the trace's blocks" if share == 1 else f"{_percent(share)} of the trace's blocks"
        _say(f"{exact_bytes(size)}: {blocks}, {format_bytes(requests.block_bytes)} each")
    return sorted(fractions)


def _policies(given: list[str]) -> list[str]:
    from kvstore.tools.replay.policies import BOUND, EVERYTHING, POLICIES

    known = [*POLICIES, BOUND, EVERYTHING]
    wanted = names("replay: --policy", given, ["all", *known])
    return [name for name in known if "all" in wanted or name in wanted]


def _document(requests: Trace, results: list[Result]) -> dict[str, object]:
    from kvstore.tools.replay.table import envelope

    return {
        "trace": {
            "requests": len(requests.prompts),
            "block_refs": requests.block_refs,
            "unique_blocks": requests.unique_blocks,
            "block_bytes": None if requests.block_bytes is None else round(requests.block_bytes),
        },
        "results": [
            {
                "policy": result.cell.policy,
                "capacity_blocks": result.cell.blocks,
                "capacity_fraction": result.cell.fraction,
                "hit_ratio": round(result.hit_ratio, 5),
            }
            for result in results
        ],
        "envelope": {repr(fraction): round(ratio, 5) for fraction, ratio in envelope(results).items()},
    }


def _print(results: list[Result], fractions: list[float]) -> None:
    from kvstore.policies.names import OURS
    from kvstore.tools.replay.policies import EVERYTHING
    from kvstore.tools.replay.table import envelope

    rows: dict[str, list[object]] = {}
    for result in results:
        cells = len(fractions) if result.cell.policy == EVERYTHING else 1
        rows.setdefault(result.cell.policy, []).extend([round(100 * result.hit_ratio, 1)] * cells)
    best = envelope(results)
    if best:
        rows["envelope"] = [round(100 * best[fraction], 1) for fraction in fractions]
        ours = {r.cell.fraction: r.hit_ratio for r in results if r.cell.policy == OURS}
        if ours:
            rows[f"{OURS} - envelope"] = [
                round(100 * (ours[f] - best[f]), 1) + 0.0 for f in fractions
            ]  # no -0.0
    columns = ["policy", *map(_percent, fractions)]
    print_table(
        "prefix hit ratio in per cent, by capacity", columns, [[name, *row] for name, row in rows.items()]
    )


def _progress(show: object, cells: list[Cell], done: int, total: int) -> None:
    if sys.stderr.isatty() and callable(show):
        show("replay", done, total)
    else:
        done_cell = cells[done - 1]
        _say(f"{done} of {total}: {done_cell.policy} at {_percent(done_cell.fraction)}")


def _percent(fraction: float) -> str:
    """As it was given: digits enough to tell close ones apart, and none that only multiplying made."""
    return f"{100 * fraction:.12g} %"


def _say(line: str) -> None:
    print(f"replay: {line}", file=sys.stderr, flush=True)
