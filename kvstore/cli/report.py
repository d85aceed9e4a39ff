"""What the cache gave back, and why not when it did not: of the last day, or since you say.

  kvstore report                       of the last 24 hours, in tables
  kvstore report --since 7d            since a span ago (30m, 24h, 7d, 2w) or a time (2026-11-21T15:00, UTC)
  kvstore report --by tenant,hour      these groupings and nothing else: of tier, reason, model, tenant, region, hour
  kvstore report --html page.html      one self-contained page of all of it with plots, beside the tables
  kvstore report -o json               for programs; docs/cli.md lists the fields

Totals are kept by the hour, so a report begins with the whole hour that --since falls into.
What saved prefill is worth is told where the setting report.gpu_hour_price has a price.
Exit code 0 also when there was nothing to report, 4 when no daemon answers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.cli import FAILED, OK, USAGE, CliError
from kvstore.cli.options import add_config_arguments, add_output_argument, names, socket_path
from kvstore.cli.output import Figure, is_terminal, print_json, print_table

if TYPE_CHECKING:
    from kvstore.client import Client

BY = ("tier", "reason", "model", "tenant", "region", "hour")
SHOWN = ("tier", "reason", "model", "tenant")  # in tables, unless --by says otherwise
PREFIXES_SHOWN = 10
FAR_S = 1e12  # no hour begins there: such a report has no rows

Document = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    add_output_argument(parser, "table", "json")
    parser.add_argument(
        "--since", default="24h", metavar="WHEN", help="30m, 24h, 7d, 2w, or a time in UTC (default 24h)"
    )
    parser.add_argument(
        "--by", action="append", default=[], metavar="LIST", help=f"these groupings only, of {','.join(BY)}"
    )
    add_html_argument(parser)


def add_html_argument(parser: argparse.ArgumentParser) -> None:
    """--html, as every command has it that makes a page."""
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page for a browser")


def run(args: argparse.Namespace) -> int:
    from kvstore.cli.status import ask

    chosen = names("report: --by", args.by, BY)
    require_page(args.html, "report")
    _since(args.since, FAR_S)  # a wrong one is told before anybody is asked
    document = ask(socket_path(args), lambda client: fetch(client, args.since))
    if args.html is not None:
        from kvstore.pages.report import report_page

        write_page(args.html, report_page(document), "report")
    wanted = chosen or (BY if args.output == "json" else SHOWN)
    document["by"] = {name: document["by"][name] for name in BY if name in wanted}
    if args.output == "json":
        print_json(document)
    else:
        _print(document, is_whole=not chosen)
    return OK


def fetch(client: Client, since: str) -> Document:
    """The document, with every grouping; its clock is the daemon's. Raises CliError for a wrong `since`."""
    from kvstore import report

    since_s = _since(since, client.report(FAR_S)["now_s"])
    return report.document(client.report(since_s), since_s)


def _since(text: str, now_s: float) -> float:
    from kvstore import report

    try:
        return report.since(text, now_s)
    except ValueError as error:
        raise CliError(f"report: --since {text}: {error}", exit_code=USAGE) from error


def require_page(path: Path | None, command: str) -> None:
    """Before the work: whether a page can be written there. Raises CliError."""
    from kvstore.pages.html import require_writable

    if path is not None:
        try:
            require_writable(path)
        except OSError as error:
            raise CliError(f"{command}: --html {path}: {error.strerror}", exit_code=USAGE) from error


def write_page(path: Path, text: str, command: str) -> None:
    """Write it whole or not at all. Raises CliError."""
    from kvstore.pages.html import write

    try:
        write(path, text)
    except OSError as error:
        raise CliError(f"{command}: --html {path}: {error.strerror or error}", exit_code=FAILED) from error


def _print(document: Document, is_whole: bool) -> None:
    """is_whole: with the totals and the prefixes, and not groupings alone."""
    from kvstore.wording import moment

    region = f", region {document['region']}" if document["region"] else ""
    print(f"kvstore report: {moment(document['since_s'])} to {moment(document['until_s'])} UTC{region}\n")
    if not document["totals"]["tokens"]:
        print("Nothing was looked up in this time: there is nothing to report.")
        return
    if is_whole:
        _print_totals(document)
    for name, groups in document["by"].items():
        if name == "tier":
            _print_tiers(groups)
        elif name == "reason":
            _print_reasons(groups)
        else:
            _print_sums(name, groups, document["currency"])
    if is_whole:
        _print_prefixes(document)


def _print_totals(document: Document) -> None:
    from kvstore.sizes import short_size
    from kvstore.wording import count, money, percent, span

    total, price = document["totals"], document["gpu_hour_price"]
    moved = {name: short_size(size_bytes) for name, size_bytes in total["bytes"].items()}
    asked = total["tokens"] - total["engine_tokens"]
    rows = [
        ("hit ratio", percent(total["hit_ratio"]), f"of {count(asked)} tokens that engines asked for"),
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
        rows.append(
            (
                "prefill saved",
                span(total["prefill_s_saved"]),
                "of engine time, at the speed that engines report, or that is configured",
            )
        )
    if total["prefill_s_saved"] and price:
        each = money(price, document["currency"])
        rows.append(("money saved", money(total["money_saved"], document["currency"]), f"at {each} an hour"))
    rows += [
        ("loaded", moved["loaded"], "given back to engines"),
        ("stored", moved["stored"], "copied here by engines"),
        ("demoted", moved["demoted"], "written from DRAM to NVMe"),
        ("promoted", moved["promoted"], "read from NVMe to DRAM"),
    ]
    print_table("what it came to", ["", "", "what it means"], [(a, Figure(b), c) for a, b, c in rows])


def _print_tiers(groups: list[Document]) -> None:
    from kvstore.wording import count, percent

    rows = [
        (g["tier"], Figure(count(g["tokens"])), Figure(percent(g["hit_ratio"])), g["meaning"]) for g in groups
    ]
    print_table("hits by tier", ["tier", "tokens", "hit ratio", "what it means"], rows)


def _print_reasons(groups: list[Document]) -> None:
    from kvstore.wording import count, percent

    if not groups:
        print("No token missed.\n")
        return
    rows = [
        (g["reason"], Figure(count(g["tokens"])), Figure(percent(g["share"])), g["meaning"]) for g in groups
    ]
    print_table("misses by reason", ["reason", "tokens", "share", "what it means"], rows)


def _print_sums(name: str, groups: list[Document], currency: str) -> None:
    from kvstore.sizes import short_size
    from kvstore.wording import count, moment, money, percent, span

    paid = any(g["money_saved"] for g in groups)
    timed = any(g["prefill_s_saved"] for g in groups)
    rows = []
    for g in groups:
        label = moment(g["hour_s"]) if name == "hour" else g[name] or "(none)"
        cells = [count(g["lookups"]), count(g["tokens"]), count(g["hit_tokens"]), percent(g["hit_ratio"])]
        cells += [short_size(g["bytes"]["loaded"]), short_size(g["bytes"]["stored"])]
        cells += [span(g["prefill_s_saved"])] * timed + [money(g["money_saved"], currency)] * paid
        rows.append([label, *map(Figure, cells)])
    columns = [f"{name} (UTC)" if name == "hour" else name, "lookups", "tokens", "of these hits", "hit ratio"]
    columns += ["loaded", "stored"] + ["prefill saved"] * timed + ["money saved"] * paid
    print_table(f"by {name}", columns, rows)


def _print_prefixes(document: Document) -> None:
    from kvstore.pages.report import cut, lives_in, saved
    from kvstore.wording import count, span

    shown = document["prefixes"][:PREFIXES_SHOWN]
    rows = [
        [
            p["block_hash"][:10] if is_terminal() else p["block_hash"],  # whole, it would be folded
            p["model"] or "(none)",
            p["tenant"] or "(none)",
            Figure(saved(p)),
            Figure(count(p["uses"])),
            Figure(count(p["tokens"])),
            Figure(span(p["age_s"])),
            Figure(span(p["idle_s"])),
            lives_in(p["tiers"]),
        ]
        for p in shown
    ]
    if rows:
        columns = [
            "last block",
            "model",
            "tenant",
            "tokens saved",
            "hits",
            "length",
            "first hit",
            "last hit",
            "lives in",
        ]
        title = f"prefixes that saved most, since they were first hit{cut(shown, document)} (times are ago)"
        print_table(title, columns, rows)
