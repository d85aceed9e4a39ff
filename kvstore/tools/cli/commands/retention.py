"""What is pinned, what expires, and who may hold how much.

kvstore retention                    tables, for people
kvstore retention -o json            the same for programs; docs/cli.md lists the fields
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from kvstore.tools.cli.options import add_config_arguments, add_node_arguments
from kvstore.tools.cli.output import HASH_DIGITS_SHOWN, is_terminal, present, print_table, say
from kvstore.tools.cli.prefixes import ask
from kvstore.units import exact_duration, format_bytes

Row = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, "table", "json")
    add_node_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return present(args, ask(args, "retention", lambda client: client.retention()), _show)


def _show(report: Row) -> None:
    _print_pins(report)
    _print_ttls(report["ttls"])
    _print_quotas(report)


def _print_pins(report: Row) -> None:
    shares = [
        f"{format_bytes(tier['pinned_bytes'])} of {format_bytes(tier['limit_bytes'])} of {tier['tier']}"
        for tier in report["pinned"]
    ]
    say(f"pins hold {', '.join(shares)}")
    columns = ["prefix", "namespace", "model", "tenant", "blocks", "held", "kept"]
    counts = ("blocks", "held_blocks", "guarded_blocks")
    _print(
        "pins",
        columns,
        [[_hash(p), *_about(p), *(_cell(p[n]) for n in counts)] for p in report["pins"]],
        drop=("blocks", "namespace", "tenant", "held"),
    )


def _print_ttls(ttls: list[Row]) -> None:
    rows = [
        [
            _hash(t) if t["block_hash"] else "(all)",
            *_about(t),
            "never" if t["ttl_s"] is None else exact_duration(t["ttl_s"]),
        ]
        for t in ttls
    ]
    _print("ttls", ["prefix", "namespace", "model", "tenant", "ttl"], rows, drop=("model",))


def _print_quotas(report: Row) -> None:
    sizes = ("dram_used_bytes", "dram_bytes", "nvme_used_bytes", "nvme_bytes")
    rows = [[*_about(quota), *(_size(quota[name]) for name in sizes)] for quota in report["quotas"]]
    columns = ["namespace", "model", "tenant", "dram", "limit", "nvme", "nvme limit"]
    _print("quotas", columns, rows, drop=("model",))
    held = [
        [_cell(t["tenant"]), _size(t["dram_used_bytes"]), _size(t["nvme_used_bytes"])]
        for t in report["tenants"]
    ]
    _print("tenants", ["tenant", "dram", "nvme"], held)


def _print(title: str, columns: list[str], rows: list[list[object]], drop: Sequence[str] = ()) -> None:
    if rows:
        print_table(title, columns, rows, drop)


def _hash(row: Row) -> str:
    """Whole in a pipe; on a terminal as much of it as commands need to know it again."""
    block_hash: str = row["block_hash"]
    return block_hash[:HASH_DIGITS_SHOWN] if is_terminal() else block_hash


def _about(row: Row) -> list[object]:
    namespace = row["namespace"]
    return [namespace[:12] if namespace else "(all)", _cell(row["model"]), _cell(row["tenant"])]


def _cell(value: object) -> object:
    """Blank where the question does not arise; "(none)" for the name of whoever gave none."""
    return "" if value is None else "(none)" if value == "" else value


def _size(size_bytes: int | None) -> str:
    return "no limit" if size_bytes is None else format_bytes(size_bytes)
