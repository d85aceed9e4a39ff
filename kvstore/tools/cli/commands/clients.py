"""Who is connected to a running daemon, and what each does: engines, their ranks, and tools.

  kvstore clients                    over one second, who asks most first
  kvstore clients --interval 10s     rates over ten
  kvstore clients --kill 12          hang up on the client with this id: its leases go back; it may connect again
  kvstore clients -o json            for programs; docs/cli.md lists the fields

One line a connection: an engine has one for its scheduler and one for each rank. Bytes count where the leases are: a scheduler
that leases slots for its ranks has theirs. Exit code 3 where no client has that id: those before it are cut off, and told.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from kvstore.tools.cli import OK
from kvstore.tools.cli.options import add_config_arguments, duration, whole
from kvstore.tools.cli.output import Figure, present, presented, print_table
from kvstore.tools.cli.prefixes import ask
from kvstore.units import format_bytes, format_duration, percent, plural, printable, short_count

if TYPE_CHECKING:
    from kvstore.client import Client
    from kvstore.protocol import answers

ID_MAX = 10**18 - 1
INTERVAL_S_MIN, INTERVAL_S_MAX = 0.1, 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--interval", default="1s", metavar="TIME", help="that rates are of (default 1s)")
    parser.add_argument(
        "--kill",
        action="append",
        default=[],
        type=whole(1, ID_MAX),
        metavar="ID",
        help="hang up on this client; may be given several times",
    )
    add_config_arguments(parser, "table", "json")


def run(args: argparse.Namespace) -> int:
    interval_s = duration("clients: --interval", args.interval, INTERVAL_S_MIN, INTERVAL_S_MAX)
    if args.kill:
        return _kill(args)

    def look(client: Client) -> dict[str, Any]:
        from kvstore.tools.web.figures import clients

        before, begun_s = client.clients(), time.monotonic()
        time.sleep(interval_s)
        now = client.clients()
        span_s = time.monotonic() - begun_s
        return {"interval_s": round(span_s, 3), "clients": clients(before, now, span_s)}

    return present(args, ask(args, "clients", look), _print)


def _kill(args: argparse.Namespace) -> int:
    killed: list[answers.Client] = []

    def kill(client: Client) -> None:
        for number in args.kill:
            killed.append(client.kill_client(number))

    with presented(args, {"killed": killed}, killed, _print_killed):
        ask(args, "clients", kill)
    return OK


def _print_killed(document: dict[str, Any]) -> None:
    for one in document["killed"]:
        who = f"{printable(one['label']) or 'unnamed'}, pid {one['pid'] or '?'}, uid {one['uid']}"
        print(f"client {one['id']} ({who}) is cut off: {plural(one['leases'], 'lease')} went back")


def _print(document: dict[str, Any]) -> None:
    rows = [
        [
            one["id"],
            one["pid"] or "?",
            one["uid"],
            one["label"] or "unnamed",
            one["model"],
            one["tenant"],
            Figure(format_duration(one["connected_s"])),
            Figure(short_count(one["requests_per_s"])),
            Figure(f"{format_bytes(int(one['loaded_bytes_per_s']))}/s"),
            Figure(f"{format_bytes(int(one['stored_bytes_per_s']))}/s"),
            Figure(percent(one["hit_blocks"] / one["asked_blocks"]) if one["asked_blocks"] else ""),
            one["leases"],
            Figure(format_bytes(one["lease_bytes"])),
            one["namespaces"],
        ]
        for one in document["clients"]
    ]
    columns = ["id", "pid", "uid", "name", "model", "tenant", "since", "requests/s", "loaded", "stored"]
    columns += ["blocks hit", "leases", "held", "namespaces"]
    drop = ("namespaces", "uid", "held", "blocks hit", "tenant", "leases", "stored", "loaded", "model")
    print_table(f"clients, over {document['interval_s']:.3g} s", columns, rows, drop)
