"""What a running daemon holds and does.

  kvstore status                       tables, for people
  kvstore status -o json               the whole report; docs/cli.md lists its fields
  kvstore status --watch               again and again, until Ctrl-C (with -o json: one line each)

Exit code 0 when the daemon is healthy, 1 when its last check found problems, 4 when none answers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore.cli import FAILED, OK, UNREACHABLE, USAGE, CliError
from kvstore.cli.options import add_config_arguments, add_output_argument, socket_path
from kvstore.cli.output import Figure, is_terminal, print_json, print_table

MEMORIES = (
    "suspects",
    "probe_targets",
    "tickets",
    "prompts",
)  # the latest so many: full is as they should be

Report = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    add_output_argument(parser, "table", "json")
    parser.add_argument("--watch", action="store_true", help="repeat until interrupted")
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="SECONDS", help="pause between two looks (default 2)"
    )


def run(args: argparse.Namespace) -> int:
    from kvstore.constants import WATCH_INTERVAL_S_MAX, WATCH_INTERVAL_S_MIN

    if not WATCH_INTERVAL_S_MIN <= args.interval <= WATCH_INTERVAL_S_MAX:
        raise CliError(
            f"status: --interval {args.interval}: "
            f"allowed are {WATCH_INTERVAL_S_MIN} to {WATCH_INTERVAL_S_MAX} seconds",
            exit_code=USAGE,
        )
    path = socket_path(args)
    if args.watch:
        return _watch(path, args)
    report = ask(path, lambda client: client.status())
    _print(report, args.output)
    return OK if report["health"]["ok"] else FAILED


def ask(path: Path, question: Callable[[Any], Any], timeout_s: float | None = None) -> Any:
    """The daemon's answer to one question. Raises CliError when there is none."""
    from kvstore.client import Client, Refused, Unavailable
    from kvstore.constants import STATUS_TIMEOUT_S

    try:
        with Client(
            path, timeout_s=timeout_s or STATUS_TIMEOUT_S, label="kvstore cli", attach=False
        ) as client:
            return question(client)
    except Unavailable as error:
        raise CliError(str(error), exit_code=UNREACHABLE) from error
    except Refused as error:
        raise CliError(f"kvstore daemon at {path}: {error}", exit_code=FAILED) from error


def _watch(path: Path, args: argparse.Namespace) -> int:
    while True:
        report = ask(path, lambda client: client.status())
        if args.output == "json":
            print_json(report, indent=None)
        else:
            if is_terminal():
                print("\033[H\033[2J", end="")
            _print(report, "table")
        time.sleep(args.interval)


def _print(report: Report, output: str) -> None:
    if output == "json":
        print_json(report)
        return
    _print_head(report)
    _print_tiers(report)
    _print_lists(report)


def _print_head(report: Report) -> None:
    from kvstore.sizes import short_size
    from kvstore.wording import percent

    daemon, arena, health = report["daemon"], report["arena"], report["health"]
    capacity_bytes = report["tiers"][0]["capacity_bytes"]
    print(f"kvstore {daemon['version']}, pid {daemon['pid']}, up {_duration(daemon['uptime_s'])}")
    print(f"health      {'ok' if health['ok'] else 'PROBLEMS'}")
    for problem in health["problems"]:
        print(f"            {problem}")
    touched = f"{short_size(arena['prefaulted_bytes'])} of {short_size(capacity_bytes)}"
    print(f"arena       {arena['path']} ({arena['pages']} pages, prefaulted {touched})")
    under_way = {
        "loads": report["loading_blocks"],
        "stores": report["demoting_blocks"],
        "adopted blocks to verify": report["unverified_blocks"],
        "slots in quarantine": arena["quarantined_slots"],
    }
    if report["adopting"]:
        print("start       still reading the rows of NVMe; nothing is written there meanwhile")
    print(f"under way   {', '.join(f'{count} {what}' for what, count in under_way.items())}")
    counters = report["counters"]
    asked, hit = counters["lookup_blocks"], counters["lookup_hit_blocks"]
    share = percent(hit / asked) if asked else "nothing asked yet"
    told = f"{hit} of {asked} blocks found ({share}), those that engines had themselves counted too"
    print(f"lookups     {counters['lookups']}: {told}")
    print(flush=True)


def _print_tiers(report: Report) -> None:
    from kvstore.sizes import short_size
    from kvstore.wording import percent

    counters = report["counters"]
    rows = []
    for tier in report["tiers"]:
        name = tier["name"]
        used = tier["used_bytes"] / tier["capacity_bytes"] if tier["capacity_bytes"] else 0
        rows.append(
            [
                name,
                short_size(tier["capacity_bytes"]),
                short_size(tier["used_bytes"]),
                Figure(percent(used)),
                tier["records"],
                counters.get(f"acquired_{name}", 0),
                counters.get(f"evicted_{name}", 0),
                counters.get(f"corrupt_{name}", 0),
            ]
        )
    columns = ["tier", "capacity", "used", "used %", "records", "handed out", "evicted", "corrupt"]
    print_table("tiers", columns, rows)
    _print_health(report)


def _print_health(report: Report) -> None:
    from kvstore.sizes import short_size

    for speed in report["speeds"]:
        if speed["samples"]:
            told = f"{1e3 * speed['latency_s']:.2f} ms, then {short_size(speed['bytes_per_s'])}/s"
            waiting = f", {short_size(speed['waiting_bytes'])} wait" if speed["waiting_bytes"] else ""
            print(f"{speed['name']:<12}loads take {told}{waiting}")
    for breaker in report["breakers"]:
        if breaker["trips"]:
            again = f", tried again in {breaker['retry_in_s']:.0f} s" if breaker["state"] == "open" else ""
            print(
                f"breaker     {breaker['name']}: {breaker['state']}{again}; "
                f"{breaker['trips']} trips, the last one: {breaker['reason']}"
            )
    for queue in report["queues"]:
        if queue["length"] >= queue["limit"] and queue["name"] not in MEMORIES:
            print(f"queue full  {queue['name']}: {queue['length']}")
    print(flush=True)


def _print_lists(report: Report) -> None:
    from kvstore.sizes import short_size

    if report["sessions"]:
        rows = [[s["owner"], s["label"], s["leases"]] for s in report["sessions"]]
        print_table("sessions", ["owner", "label", "leases"], rows)
    if report["namespaces"]:
        rows = [
            [
                n["digest"][:12],
                n["blocks"],
                short_size(n["record_bytes"]),
                n["block_tokens"],
                " ".join(f"{name}={value}" for name, value in n["fields"].items()),
            ]
            for n in report["namespaces"]
        ]
        print_table("namespaces", ["digest", "blocks", "record", "tokens", "fields"], rows)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    told = [f"{count} {unit}" for count, unit in parts if count]
    return " ".join(told[:2]) or "0 s"
