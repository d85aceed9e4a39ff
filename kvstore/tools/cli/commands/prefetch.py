"""Load prefixes that you name into the DRAM of this node, from its NVMe or the region's bucket.

  kvstore prefetch 6f66b1302f                     a prefix, by the hash of its last block, or a beginning of it
  kvstore prefetch 6f66b1302f 09ab --namespace 3fa2     several, in one namespace
  kvstore prefetch 6f66b1302f -o json             for programs; docs/cli.md lists the fields

The daemon loads each with all that comes before it, and this shows how far it is. Engines go first; what is used less may leave DRAM for
it. Control-C stops it, and what is loaded stays. A whole region: kvstore warm.

Exit code 0 when all are there, 1 when something was in no tier, found no room or could not be read, 2 for wrong words, 3 when nothing
has a prefix like that, 4 when no daemon answers.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from kvstore.constants import WARM_PAUSE_S
from kvstore.tools.cli import FAILED, INTERRUPTED, OK
from kvstore.tools.cli.options import add_config_arguments
from kvstore.tools.cli.output import (
    HASH_DIGITS_SHOWN,
    Figure,
    Progress,
    is_terminal,
    later,
    presented,
    print_table,
    progress_bars,
    say,
)
from kvstore.tools.cli.prefixes import ask, find_prefix, namespace_of, require_beginning
from kvstore.units import count, format_bytes

if TYPE_CHECKING:
    from kvstore.client import Client

Told = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prefixes",
        nargs="+",
        metavar="PREFIX",
        help="hash of the last block of a prefix, in hex, or a unique beginning of it",
    )
    parser.add_argument(
        "--namespace", default="", metavar="DIGEST", help="beginning of the namespace's digest (default: all)"
    )
    add_config_arguments(parser, "table", "json")


def run(args: argparse.Namespace) -> int:
    for text in args.prefixes:
        require_beginning("prefetch", text)
    namespace = namespace_of("prefetch", args)
    rows: list[Told] = []
    try:
        with (
            presented(args, {"to": "dram", "prefixes": rows}, rows, lambda _: _print(rows)),
            progress_bars(of_bytes=True) as show,
        ):
            ask(args, "prefetch", lambda client: _load(client, args.prefixes, namespace, later(show), rows))
    except KeyboardInterrupt:
        print("kvstore: prefetch: stopped; what is loaded stays", file=sys.stderr)
        return INTERRUPTED
    return OK if all(row["state"] == "done" for row in rows) else FAILED


def _load(client: Client, prefixes: list[str], namespace: str, show: Progress, rows: list[Told]) -> None:
    """All are found before the first one is loaded."""
    found = [find_prefix(client, "prefetch", text, namespace) for text in prefixes]
    for block_hash in dict.fromkeys(found):
        while not (told := client.warm_prefix(block_hash, namespace))["is_over"]:
            loaded = told["loaded_bytes"]
            to_load = loaded + told["bytes"] // max(1, told["blocks"]) * (told["under_way"] + told["left"])
            show(block_hash.hex()[:HASH_DIGITS_SHOWN], loaded, to_load)
            time.sleep(WARM_PAUSE_S)
        rows.append({"prefix": block_hash.hex(), "state": _state(told), **told})


def _state(told: Told) -> str:
    """In a word: what kept it from being there as a whole."""
    for name, word in (("gone", "gone"), ("refused", "no room"), ("failed", "failed")):
        if told[name]:
            return word
    return "done"


def _print(rows: list[Told]) -> None:
    cells = [
        [
            row["prefix"][:HASH_DIGITS_SHOWN] if is_terminal() else row["prefix"],
            row["state"],
            *(Figure(count(row[name])) for name in ("blocks", "held", "loaded", "refused", "failed", "gone")),
            Figure(format_bytes(row["bytes"])),
        ]
        for row in rows
    ]
    columns = ["prefix", "state", "blocks", "in DRAM before", "loaded", "no room", "failed", "gone", "bytes"]
    print_table("into DRAM", columns, cells, drop=("bytes", "failed", "no room"))
    if any(row["gone"] for row in rows):
        say(
            "What is gone is in no tier here and not in the region's bucket: it is computed when it is asked for."
        )
    if any(row["refused"] for row in rows):
        say("No room: all of DRAM is in use, pinned or not yet written to NVMe, or a quota is used up.")
