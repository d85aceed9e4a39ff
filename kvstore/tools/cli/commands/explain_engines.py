"""Which engines of a model do not share, and what separates them: `kvstore explain --engines`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kvstore.tools.cli import NOT_FOUND, CliError
from kvstore.tools.cli.output import Figure, print_table
from kvstore.units import count

if TYPE_CHECKING:
    from kvstore.client import Client

COLUMNS_MAX = 6  # engines beside each other
CELL_CHARS_MAX = 40


def compare(client: Client, args: argparse.Namespace) -> dict[str, Any]:
    """The document of `-o json`. Raises CliError, Unavailable, Refused."""
    from kvstore.ledger import engines, explain

    try:
        return engines.compared(client.list_namespaces(), args.namespace, args.model, args.tenant)
    except explain.NoneSuch as error:
        raise CliError(f"explain: {error}", exit_code=NOT_FOUND) from error


def print_comparison(document: dict[str, Any]) -> None:
    engines, differences = document["engines"], document["differences"]
    rows = [
        (
            Figure(engine["engine"]),
            ", ".join(digest[:8] for digest in engine["namespaces"]),
            engine["model"] or "(no name)",
            engine["tenant"] or "(none)",
            Figure(count(engine["blocks"])),
        )
        for engine in engines
    ]
    print_table("engines that do not share", ["engine", "namespaces", "model", "tenant", "blocks"], rows)
    if len(engines) == 1:
        print("One engine, or several that share all they store.")
        return
    shown = engines[:COLUMNS_MAX]
    cells = [
        [row["field"], *(_cell(row["field"], value) for value in row["values"][:COLUMNS_MAX])]
        for row in differences
    ]
    names = ["field", *(f"engine {engine['engine']}" for engine in shown)]
    print_table("what separates them", names, cells)
    if len(engines) > COLUMNS_MAX:
        print(f"{len(engines) - COLUMNS_MAX} more engines: narrow it down, or -o json")


def _cell(field: str, value: str | None) -> str:
    if value is None:
        return "(vLLM's own)" if "." in field else "(none)"
    return value if len(value) <= CELL_CHARS_MAX else f"{value[: CELL_CHARS_MAX - 1]}…"
