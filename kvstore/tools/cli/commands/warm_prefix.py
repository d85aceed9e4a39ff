"""`kvstore warm --prefix`: one daemon loads prefixes that somebody names, and says how far it is.

beginning of a hash ─▶ the daemon finds it ─▶ asked every few milliseconds until all is over ─▶ a row for each prefix
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from kvstore.constants import WARM_PAUSE_S
from kvstore.tools.cli import FAILED, INTERRUPTED, OK, USAGE, CliError
from kvstore.tools.cli.output import (
    HASH_DIGITS_SHOWN,
    Figure,
    Progress,
    is_terminal,
    later,
    present,
    print_table,
    progress_bars,
)
from kvstore.tools.cli.prefixes import ask, find_prefix, namespace_of, require_beginning
from kvstore.units import count, format_bytes

if TYPE_CHECKING:
    from kvstore.client import Client

Told = dict[str, Any]


def run_prefixes(args: argparse.Namespace) -> int:
    namespace = _checked(args)
    rows: list[Told] = []
    try:
        with progress_bars(of_bytes=True) as show:
            ask(args, "warm", lambda client: _warm_all(client, args.prefix, namespace, later(show), rows))
    except KeyboardInterrupt:
        print("kvstore: warm: stopped; what is loaded stays", file=sys.stderr)
        return INTERRUPTED
    present(args, {"to": args.to, "prefixes": rows}, lambda _: _print(rows))
    return OK if all(row["state"] == "done" for row in rows) else FAILED


def _checked(args: argparse.Namespace) -> str:
    """The beginning of a digest. Raises CliError for words that do not go together."""
    of_orders = {
        "a REGION": args.region is not None,
        "--model": args.model,
        "--tenant": args.tenant,
        "--budget": args.budget,
        "--dry-run": args.dry_run,
        "--cancel": args.cancel,
        "--weights": args.weights,
        "--to nvme": args.to != "dram",
        "--for": args.life is not None,
        "--wait": args.wait is not None,
        "--regions": args.regions is not None,
    }
    for name, is_given in of_orders.items():
        if is_given:
            raise CliError(
                f"warm: --prefix is loaded into the DRAM of this node: {name} does not go with it",
                exit_code=USAGE,
            )
    for text in args.prefix:
        require_beginning("warm", text)
    return namespace_of("warm", args)


def _warm_all(client: Client, prefixes: list[str], namespace: str, show: Progress, rows: list[Told]) -> None:
    """All are found before the first one is loaded."""
    found = [find_prefix(client, "warm", text, namespace) for text in prefixes]
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
        print(
            "What is gone is in no tier here and not in the region's bucket: it is computed when it is asked for."
        )
    if any(row["refused"] for row in rows):
        print("No room: all of DRAM is in use, pinned or not yet written to NVMe, or a quota is used up.")
