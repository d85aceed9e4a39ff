"""What is pinned, what expires, and who may hold how much.

kvstore retention                    tables, for people
kvstore retention -o json            the same for programs; docs/cli.md lists the fields
"""

from __future__ import annotations

import argparse
from typing import Any

from kvstore.cli import OK
from kvstore.cli.options import add_config_arguments, add_output_argument
from kvstore.cli.output import print_json, print_table
from kvstore.cli.prefixes import ask

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    add_output_argument(parser, "table", "json")


def run(args: argparse.Namespace) -> int:
    report = ask(args, "retention", lambda client: client.retention())
    if args.output == "json":
        print_json(report)
        return OK
    _print_pins(report)
    _print_ttls(report["ttls"])
    _print_quotas(report)
    return OK


def _print_pins(report: Row) -> None:
    from kvstore.sizes import short_size

    shares = [
        f"{short_size(tier['pinned_bytes'])} of {short_size(tier['limit_bytes'])} of {tier['tier']}"
        for tier in report["pinned"]
    ]
    print(f"pins hold {', '.join(shares)}")
    rows = [
        [
            pin["block_hash"],
            *_about(pin),
            pin["blocks"],
            _told(pin["held_blocks"]),
            _told(pin["guarded_blocks"]),
        ]
        for pin in report["pins"]
    ]
    if rows:
        print_table("pins", ["prefix", "namespace", "model", "tenant", "blocks", "held", "kept"], rows)


def _print_ttls(ttls: list[Row]) -> None:
    from kvstore.durations import short_duration

    rows = [
        [
            ttl["block_hash"] or "(all)",
            *_about(ttl),
            "never" if ttl["ttl_s"] is None else short_duration(ttl["ttl_s"]),
        ]
        for ttl in ttls
    ]
    if rows:
        print_table("ttls", ["prefix", "namespace", "model", "tenant", "ttl"], rows)


def _print_quotas(report: Row) -> None:
    columns = ["namespace", "model", "tenant", "dram", "of", "nvme", "of"]
    rows = [
        [
            *_about(quota),
            _size(quota["dram_used_bytes"]),
            _size(quota["dram_bytes"]),
            _size(quota["nvme_used_bytes"]),
            _size(quota["nvme_bytes"]),
        ]
        for quota in report["quotas"]
    ]
    if rows:
        print_table("quotas", columns, rows)
    held = [
        [_told(t["tenant"]), _size(t["dram_used_bytes"]), _size(t["nvme_used_bytes"])]
        for t in report["tenants"]
    ]
    if held:
        print_table("tenants", ["tenant", "dram", "nvme"], held)


def _about(row: Row) -> list[object]:
    namespace = row["namespace"]
    return [namespace[:12] if namespace else "(all)", _told(row["model"]), _told(row["tenant"])]


def _told(value: object) -> object:
    """Blank where the question does not arise; "(none)" for the name of whoever gave none."""
    return "" if value is None else "(none)" if value == "" else value


def _size(size_bytes: int | None) -> str:
    from kvstore.sizes import short_size

    return "no limit" if size_bytes is None else short_size(size_bytes)
