"""Models on this node's disk: the directory that the configuration names, and the exit code for what goes wrong with it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.tools.cli import USAGE, CliError
from kvstore.tools.cli.options import add_config_arguments, add_model_name, load_config
from kvstore.tools.cli.output import Figure, present, print_table
from kvstore.units import format_bytes, format_duration, format_time, percent

if TYPE_CHECKING:
    from coldstart.disk.home import Home

T = TypeVar("T")


def add_local_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_name(
        parser, metavar="NAME[@REVISION]", help="which; NAME alone: the revision that it stands for here"
    )
    add_config_arguments(parser)


def home_of(args: argparse.Namespace) -> Home:
    """Raises CliError."""
    from coldstart.disk.home import Home

    config = load_config(args).config
    return Home(config.models_dir, config.models.nvme_bytes)


def asked_of_home(work: Callable[[], T]) -> T:
    """Run something with it. Raises CliError for what the directory does wrong, ModelError."""
    try:
        return work()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise CliError(f"models.dir: {where}{error.strerror or error}") from error


def show_local(args: argparse.Namespace) -> int:
    """`kvstore model ls --local`."""
    if args.to or args.region or args.name:
        raise CliError("model ls: --local is of all models on this node", exit_code=USAGE)
    home = home_of(args)
    return present(args, asked_of_home(lambda: _document(home)), show)


def _document(home: Home) -> dict[str, Any]:
    whole = [
        {
            "model": one.manifest.model,
            "revision": one.manifest.revision,
            "path": str(one.path),
            "bytes": one.manifest.size_bytes,
            "used_s": one.used_s,
            "pinned": one.is_pinned,
            "in_use": home.is_used(one.manifest.model, one.manifest.revision),
        }
        for one in home.revisions()
    ]
    begun = []
    for name, said in home.under_way():
        model, _, revision = name.partition("@")
        begun.append(
            {
                "model": model,
                "revision": revision,
                "bytes": said.total_bytes if said is not None else None,
                "left_bytes": said.left_bytes if said is not None else None,
            }
        )
    return {
        "directory": str(home.path),
        "capacity_bytes": home.capacity_bytes,
        "revisions": whole,
        "under_way": begun,
    }


def show(document: dict[str, Any]) -> None:
    rows = [
        [
            row["model"],
            row["revision"],
            Figure(format_bytes(row["bytes"])),
            format_time(row["used_s"]),
            " ".join(word for word, holds in (("pinned", row["pinned"]), ("in use", row["in_use"])) if holds),
        ]
        for row in document["revisions"]
    ]
    limit = f" of {format_bytes(document['capacity_bytes'])}" if document["capacity_bytes"] else ""
    held = format_bytes(sum(row["bytes"] for row in document["revisions"]))
    if rows:
        columns = ["model", "revision", "size", "used last", "stays"]
        print_table(f"models in {document['directory']}, {held}{limit}", columns, rows)
    else:
        print(f"No model is in {document['directory']}.")
    for row in document["under_way"]:
        far = (
            "" if row["bytes"] is None else f", {percent(1 - row['left_bytes'] / max(1, row['bytes']))} there"
        )
        print(f"under way   {row['model']}@{row['revision']}{far}")


def in_words(by_source: dict[str, int], kept_bytes: int, seconds: float) -> str:
    """How it came: "16.4 GiB in 12 s (1.4 GiB/s): bucket 16 GiB, disk 0.4 GiB, there already 1 GiB"."""
    came_bytes = sum(by_source.values())
    parts = [f"{name} {format_bytes(size)}" for name, size in sorted(by_source.items())]
    if kept_bytes:
        parts.append(f"there already {format_bytes(kept_bytes)}")
    rate = f" ({format_bytes(came_bytes / max(seconds, 1e-3))}/s)" if came_bytes else ""
    return f"{format_bytes(came_bytes)} in {format_duration(seconds)}{rate}{': ' if parts else ''}{', '.join(parts)}"
