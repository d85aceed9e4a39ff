"""Whether a daemon answers, who it is, and how fast.

  kvstore ping                         one line: socket, version, pid, uptime, round trip
  kvstore ping -o json                 the same for programs; docs/cli.md lists the fields

The round trip is the median of a few empty calls on one connection. Exit code 4 when no daemon answers.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from kvstore.tools.cli.options import add_config_arguments, add_node_arguments, socket_path
from kvstore.tools.cli.output import present
from kvstore.tools.cli.prefixes import ask
from kvstore.units import format_duration

CALLS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, "text", "json")
    add_node_arguments(parser)


def run(args: argparse.Namespace) -> int:
    answer = ask(args, "ping", _measured)
    place = {"node": args.node} if args.node else {"socket": str(socket_path(args))}
    who = f"kvstore at {next(iter(place.values()))}: "
    if "pid" in answer:
        who = f"kvstore {answer['version']} at {next(iter(place.values()))}: pid {answer['pid']}, instance {answer['instance']}, "
        who += f"up {format_duration(answer['uptime_s'])}, "
    took = f"answers in {1e3 * answer['round_trip_s']:.3g} ms"
    return present(args, {**place, **answer}, lambda _: print(f"{who}{took}"))


def _measured(client: Any) -> dict[str, Any]:
    daemon = client.status().get("daemon", {})  # nothing, to who asks as a tenant
    took_s = []
    for _ in range(CALLS):
        begun_s = time.monotonic()
        client.ping()
        took_s.append(time.monotonic() - begun_s)
    told = {name: daemon[name] for name in ("version", "pid", "instance", "uptime_s") if name in daemon}
    return {**told, "round_trip_s": round(sorted(took_s)[CALLS // 2], 6)}
