"""What the cache gave back, and why not when it did not: of the last day, or of any time, or beside another one.

  kvstore report                       of the last 24 hours, in tables
  kvstore report --since 7d            since a span ago (30m, 24h, 7d, 2w) or a time (2026-11-21T15:00, UTC)
  kvstore report --since 3h --until 1h             what came between two times
  kvstore report --since 2h --against yesterday    what changed, beside the same time of the day before
  kvstore report --by tenant,hour      these groupings and nothing else: of tier, reason, model, tenant, region, hour
  kvstore report --by minute           the last six hours by the minute
  kvstore report --html page.html      one self-contained page of all of it with plots, beside the tables
  kvstore report -o json               for programs; docs/cli.md lists the fields

Minutes are kept for six hours: a report that begins within them begins at the minute, an older one with the whole hour.
--against takes yesterday, before (the time just before), or how long before (7d).
With the setting report.gpu_hour_price it also says what the saved prefill is worth.
Exit code 0 also when there was nothing to report, 4 when no daemon answers.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.tools.cli import FAILED, NOT_FOUND, USAGE, CliError
from kvstore.tools.cli.commands.status import print_holdings
from kvstore.tools.cli.options import add_config_arguments, add_node_arguments, duration, is_of_node, names
from kvstore.tools.cli.output import HASH_DIGITS_SHOWN, Figure, is_terminal, present, print_table, say
from kvstore.tools.cli.prefixes import ask
from kvstore.units import count, format_bytes, format_duration, format_time, money, percent, short_count

if TYPE_CHECKING:
    from kvstore.client import Client

BY = ("tier", "reason", "model", "tenant", "region", "hour", "minute")
SHOWN = ("tier", "reason", "model", "tenant")  # in tables, unless --by says otherwise
TIMES = ("hour", "minute")
FOR_EVER_S = 1e12
PREFIXES_SHOWN = 10
PREFIX_COLUMNS = ("tokens saved", "hits", "length", "first hit", "last hit", "lives in")

Document = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, "table", "json")
    parser.add_argument(
        "--since", default="24h", metavar="WHEN", help="30m, 24h, 7d, 2w, or a time in UTC (default 24h)"
    )
    parser.add_argument("--until", default="", metavar="WHEN", help="the end, likewise (default: now)")
    parser.add_argument(
        "--against",
        default="",
        metavar="WHEN",
        help="compare with the same time yesterday, before, or so long before (7d)",
    )
    parser.add_argument(
        "--by", action="append", default=[], metavar="LIST", help=f"these groupings only, of {','.join(BY)}"
    )
    add_html_argument(parser)
    add_node_arguments(parser, "until", "against")


def add_html_argument(parser: argparse.ArgumentParser) -> None:
    """--html, as every command has it that makes a page."""
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page for a browser")


def run(args: argparse.Namespace) -> int:
    from kvstore.ledger import report
    from kvstore.ledger.minutes import oldest_minute

    chosen = names("report: --by", args.by, BY)
    require_page(args.html, "report")
    since_s, until_s = _span(args)
    is_all_by_minute = since_s >= oldest_minute(time.time())
    by_minute = report.MINUTE in chosen or (args.html is not None and is_all_by_minute)
    if is_of_node(args):
        return _present(args, _of_node(args, since_s, by_minute), chosen, is_all_by_minute)
    if args.against:
        return _compare(args, since_s, until_s, chosen)

    def question(client: Client) -> Document:
        minutes = client.live(since_s)["minutes"] if by_minute else None
        return report.document(client.report(since_s, until_s), minutes=minutes)

    return _present(args, ask(args, "report", question), chosen, is_all_by_minute)


def _compare(args: argparse.Namespace, since_s: float, until_s: float, chosen: list[str]) -> int:
    """What changed between two times."""
    from kvstore.ledger import report
    from kvstore.ledger.comparing import changes, per_hour
    from kvstore.ledger.totals import hour_of
    from kvstore.tools.cli.commands.report_changes import GROUPINGS, print_changes

    if args.html is not None:
        raise CliError("report: --html does not go with --against", exit_code=USAGE)
    for name in chosen:
        if name not in GROUPINGS:
            raise CliError(
                f"report: --by {name}: with --against known are {', '.join(GROUPINGS)}", exit_code=USAGE
            )
    shift_s = _shift(args.against, min(until_s, time.time()) - since_s)

    def question(client: Client) -> tuple[Document, Document]:
        then_s = max(0.0, since_s - shift_s)
        until_then_s = max(0.0, min(until_s, time.time()) - shift_s)
        then = report.document(client.report(then_s, until_then_s))
        is_whole_hours = then["since_s"] == hour_of(then_s)
        begin_s = hour_of(since_s) if is_whole_hours else since_s  # like with like
        return report.document(client.report(begin_s, until_s)), then

    now, then = ask(args, "report", question)
    wanted = chosen or GROUPINGS
    document = {
        **{name: now[name] for name in ("region", "since_s", "until_s", "totals")},
        "per_hour": per_hour(now),
        "against": {
            **{name: then[name] for name in ("since_s", "until_s", "totals")},
            "per_hour": per_hour(then),
        },
        "changes": {name: rows for name, rows in changes(now, then).items() if name in wanted},
    }
    return present(args, document, lambda shown: print_changes(shown, is_whole=not chosen))


def _of_node(args: argparse.Namespace, since_s: float, by_minute: bool) -> Document:
    from kvstore.tools.cli.nodes import node_of

    with node_of(args, "report") as node:
        document: Document = node.report(max(0.0, time.time() - since_s), by_minute)
    return document


def _present(args: argparse.Namespace, document: Document, chosen: list[str], is_all_by_minute: bool) -> int:
    """is_all_by_minute: of all of its time minutes are kept; else a page draws hours, which add up to its totals."""
    from kvstore.ledger import report

    if args.html is not None:
        from kvstore.tools.pages import report_page

        by = {
            name: rows for name, rows in document["by"].items() if is_all_by_minute or name != report.MINUTE
        }
        write_page(args.html, report_page({**document, "by": by}), "report")
    wanted = chosen or (report.GROUPINGS if args.output == "json" else SHOWN)
    document["by"] = {name: document["by"][name] for name in BY if name in wanted and name in document["by"]}
    return present(args, document, lambda shown: _print(shown, is_whole=not chosen))


def _span(args: argparse.Namespace) -> tuple[float, float]:
    """Since when and until when. Raises CliError."""
    since_s = _time("--since", args.since)
    until_s = _time("--until", args.until) if args.until else FOR_EVER_S
    if until_s <= since_s:
        raise CliError(f"report: --until {args.until}: not later than --since {args.since}", exit_code=USAGE)
    return since_s, until_s


def _time(option: str, text: str) -> float:
    from kvstore.ledger import report

    try:
        return report.since(text, time.time())
    except ValueError as error:
        raise CliError(f"report: {option} {text}: {error}", exit_code=USAGE) from error


def _shift(text: str, span_s: float) -> float:
    """How long before the other time was. Raises CliError."""
    if text in ("yesterday", "before"):
        return {"yesterday": 86_400.0, "before": span_s}[text]
    return duration("report: --against", text, 60, 90 * 86_400, "; or yesterday, before")


def require_page(path: Path | None, command: str) -> None:
    """Refuse before the work what `write_page` would refuse after it. Raises CliError."""
    if path is None:
        return
    parent, problem, code = path.absolute().parent, "", USAGE
    if path.exists() and not path.is_file():
        problem = "not a file" if path.is_dir() else "not a regular file"
    elif not parent.is_dir():
        problem, code = "no such directory", NOT_FOUND
    elif not os.access(parent, os.W_OK):
        problem = "the directory cannot be written to"
    if problem:
        raise CliError(f"{command}: --html {path}: {problem}", exit_code=code)


def write_page(path: Path, text: str, command: str) -> None:
    """Write it whole or not at all. Raises CliError."""
    from tiers.files import replace_file

    require_page(path, command)
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise CliError(f"{command}: --html {path}: {error.strerror or error}", exit_code=FAILED) from error


def _print(document: Document, is_whole: bool) -> None:
    """is_whole: with the totals and the prefixes, and not groupings alone."""
    region = f", region {document['region']}" if document["region"] else ""
    print(
        f"kvstore report: {format_time(document['since_s'])} to {format_time(document['until_s'])} UTC{region}\n"
    )
    if not document["totals"]["tokens"]:
        print("Nothing was looked up in this time: there is nothing to report.")
        return
    if is_whole:
        _print_totals(document)
    for name, groups in document["by"].items():
        if name == "tier":
            _print_shares("hits by tier", name, "hit_ratio", groups)
        elif name == "reason":
            _print_shares("misses by reason", name, "share", groups)
        elif name == "minute" and not groups:
            say(
                "The daemon has no minute of this time: they are kept for six hours, whole hours for 90 days."
            )
            say()
        else:
            _print_sums(name, groups, document["currency"])
    if is_whole:
        _print_prefixes(document)
        if document["holdings"]:
            print_holdings(document["holdings"])


def _print_totals(document: Document) -> None:
    total, price, currency = document["totals"], document["gpu_hour_price"], document["currency"]
    moved = {way: format_bytes(size_bytes) for way, size_bytes in total["bytes"].items()}
    asked = count(total["tokens"] - total["engine_tokens"])
    rows = [
        ("hit ratio", percent(total["hit_ratio"]), f"of {asked} tokens that engines asked for"),
        (
            "not computed",
            percent(total["overall_ratio"]),
            f"of all {count(total['tokens'])} prompt tokens, with the engines' own caches",
        ),
        ("lookups", count(total["lookups"]), "one for each prompt that an engine asked about"),
        ("tokens hit", count(total["hit_tokens"]), "were loaded and not computed"),
        ("tokens missed", count(total["missed_tokens"]), "were computed"),
        ("in the engine", count(total["engine_tokens"]), "were still in the engine's own cache"),
    ]
    if total["prefill_s_saved"]:
        speed = "of engine time, at the speed that engines report, or that is configured"
        rows.append(("prefill saved", format_duration(total["prefill_s_saved"]), speed))
        if price:
            rows.append(
                ("money saved", money(total["money_saved"], currency), f"at {money(price, currency)} an hour")
            )
    rows += [
        ("loaded", moved["loaded"], "given back to engines"),
        ("stored", moved["stored"], "copied here by engines"),
        ("demoted", moved["demoted"], "written from DRAM to NVMe"),
        ("promoted", moved["promoted"], "read from NVMe to DRAM"),
    ]
    print_table("what it came to", ["", "", "what it means"], [(a, Figure(b), c) for a, b, c in rows])


def _print_shares(title: str, name: str, share: str, groups: list[Document]) -> None:
    """Hits by tier, or misses by reason."""
    if not groups:
        print("No token missed.\n")
        return
    rows = [(g[name], Figure(count(g["tokens"])), Figure(percent(g[share])), g["meaning"]) for g in groups]
    print_table(title, [name, "tokens", share.replace("_", " "), "what it means"], rows, ("what it means",))


def _print_sums(name: str, groups: list[Document], currency: str) -> None:
    paid = any(g["money_saved"] for g in groups)
    timed = any(g["prefill_s_saved"] for g in groups)
    rows = []
    for g in groups:
        label = format_time(g[f"{name}_s"]) if name in TIMES else g[name] or "(none)"
        cells = [count(g["lookups"]), count(g["tokens"]), count(g["hit_tokens"]), percent(g["hit_ratio"])]
        cells += [format_bytes(g["bytes"]["loaded"]), format_bytes(g["bytes"]["stored"])]
        cells += [format_duration(g["prefill_s_saved"])] * timed + [money(g["money_saved"], currency)] * paid
        rows.append([label, *map(Figure, cells), *[_most_missed(g)] * (name in TIMES)])
    columns = [f"{name} (UTC)" if name in TIMES else name, "lookups", "tokens", "of these hits", "hit ratio"]
    columns += ["loaded", "stored"] + ["prefill saved"] * timed + ["money saved"] * paid
    columns += ["missed most for"] * (name in TIMES)
    drop = ("money saved", "prefill saved", "stored", "loaded", "of these hits", "lookups")
    print_table(f"by {name}", columns, rows, drop)


def _most_missed(group: Document) -> str:
    """The reason of most misses, with its share of them."""
    from kvstore.ledger.report import misses

    if not group["missed_tokens"]:
        return ""
    name, tokens = next(iter(misses(group["outcomes"]).items()))
    return f"{name} {percent(tokens / group['missed_tokens'])}"


def _print_prefixes(document: Document) -> None:
    shown = document["prefixes"][:PREFIXES_SHOWN]
    rows: list[list[object]] = []
    for p in shown:
        block_hash = (
            p["block_hash"][:HASH_DIGITS_SHOWN] if is_terminal() else p["block_hash"]
        )  # whole, it would be folded
        *figures, tiers = _prefix_cells(p)
        rows.append(
            [block_hash, p["model"] or "(none)", p["tenant"] or "(none)", *map(Figure, figures), tiers]
        )
    if rows:
        there = len(document["prefixes"])
        cut = f", {len(shown)} of {there}" if len(shown) < there else ""
        title = f"prefixes that saved most, since they were first hit{cut} (times are ago)"
        drop = ("first hit", "length", "last hit", "lives in", "tenant", "model")
        print_table(title, ["last block", "model", "tenant", *PREFIX_COLUMNS], rows, drop)


def _prefix_cells(prefix: Document) -> list[str]:
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
