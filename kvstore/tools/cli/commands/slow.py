"""The last requests that took long, whose they were, and what they waited for.

  kvstore slow                 the latest first, 20 of the 128 that are kept
  kvstore slow --all           all of them
  kvstore slow -o json         for programs; docs/cli.md lists the fields

A request is slow that takes longer than `door.slow_s` (0.1 s, unless set), from when all of it is here to its answer. Why is what
most of that time went to: turn (others' work came first), work (its own: a long prompt), disk, bucket, room (DRAM was full of what is
in use), proof (checksums of what an earlier daemon left).
"""

from __future__ import annotations

import argparse
from typing import Any

from kvstore.tools.cli.options import add_config_arguments
from kvstore.tools.cli.output import Figure, present, print_table, say
from kvstore.tools.cli.prefixes import ask
from kvstore.units import count, format_duration, plural

SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="all that are kept, and not the latest alone")
    add_config_arguments(parser, "table", "json")


def run(args: argparse.Namespace) -> int:
    document = ask(args, "slow", lambda client: client.slow_requests())
    return present(args, document, lambda found: _print(found, len(found["slow"]) if args.all else SHOWN))


def _print(document: dict[str, Any], shown: int) -> None:
    limit = f"{document['slow_s']:g} s"
    if not document["slow"]:
        say(f"No request took longer than {limit} since the start (door.slow_s).")
        return
    rows = [
        [
            Figure(format_duration(one["ago_s"])),
            one["request"],
            Figure(f"{one['took_s']:.3f} s"),
            Figure(f"{one['waited_s']:.3f} s"),
            one["why"],
            one["blocks"],
            one["label"] or "unnamed",
            one["pid"] or "?",
            one["model"],
            one["tenant"],
        ]
        for one in document["slow"][:shown]
    ]
    columns = ["ago", "request", "took", "for its turn", "why", "blocks", "name", "pid", "model", "tenant"]
    print_table(
        f"slow requests: over {limit}", columns, rows, ("tenant", "pid", "blocks", "for its turn", "model")
    )
    kept = len(document["slow"])
    if kept < document["total"] or shown < kept:
        since = plural(document["total"], "slow request")
        say(f"{since} since the start, of which the last {count(kept)} are kept.")
