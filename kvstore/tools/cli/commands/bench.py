"""What this machine does with our tiers, each figure measured in turn with its limit.

  kvstore bench                        everything, about two minutes
  kvstore bench --quick                fewer rounds, about twenty seconds
  kvstore bench --dir /nvme0           where the files of the NVMe figures go (default: the temporary directory)
  kvstore bench --only disk            one part: dram, lookup, disk, promote or region
  kvstore bench --region na            the bucket of a region of --regions FILE (or of the configuration's regions_file)
  kvstore bench -o json                one flat document; docs/cli.md lists its fields

It starts daemons of its own, with settings of its own; a running daemon is neither asked nor
disturbed, but it shares the machine. Progress goes to stderr. Exit code 0 when everything was
measured, whatever the figures are.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvstore.tools.cli import FAILED, NOT_FOUND, OK, CliError
from kvstore.tools.cli.commands.region import add_regions_argument, load_deployment
from kvstore.tools.cli.options import add_config_arguments, add_output_argument
from kvstore.tools.cli.output import print_json, print_table

if TYPE_CHECKING:
    from kvstore.tools.bench.figures import Figure
    from kvstore.tools.bench.plan import Plan
    from kvstore.tools.bench.runner import Part

P = TypeVar("P", bound="Plan")
PARTS = ("dram", "lookup", "disk", "promote", "region")


def add_arguments(parser: argparse.ArgumentParser, parts: Sequence[str] = PARTS) -> None:
    add_output_argument(parser, "table", "json")
    parser.add_argument(
        "--dir", type=Path, metavar="PATH", help="existing directory for the files; a disk, not a tmpfs"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds and less data")
    parser.add_argument(
        "--region",
        nargs="?",
        const="",
        metavar="NAME",
        help="only the part of regions: of this region's bucket, or without a NAME of a directory",
    )
    add_regions_argument(parser)
    add_config_arguments(parser)
    parser.add_argument(
        "--only", choices=parts, action="append", help="this part; may be given several times"
    )


def run(args: argparse.Namespace) -> int:
    from kvstore.tools.bench import figures, plan, runner

    chosen = of_region(args, plan.QUICK if args.quick else plan.FULL)
    return carry_out(args, chosen, runner.PARTS, figures.FIGURES)


def of_region(args: argparse.Namespace, plan: P) -> P:
    """The plan, with the bucket of --region NAME. Raises CliError."""
    if not args.region:
        return plan
    place = load_deployment(args).place(args.region, "bench --region")
    return replace(plan, region_url=place.url, region_options=place.options())


def carry_out(
    args: argparse.Namespace, plan: P, parts: Mapping[str, Part[P]], figures: Sequence[Figure]
) -> int:
    """Measure the parts that were asked for, of these, and print their figures. Raises CliError."""
    from kvstore.errors import KvstoreError
    from kvstore.tools.bench import runner
    from kvstore.tools.bench.daemon import DaemonError
    from kvstore.tools.bench.figures import flat, rows
    from tiers.errors import TierError

    directory = (args.dir or Path(tempfile.gettempdir())).absolute()
    if not directory.is_dir():
        raise CliError(f"bench: --dir {directory}: not a directory", exit_code=NOT_FOUND)
    only = ["region"] if args.region is not None else args.only or parts
    try:
        values = runner.run(plan, directory, {name: parts[name] for name in parts if name in only}, _say)
    except (DaemonError, KvstoreError, TierError, OSError) as error:
        if getattr(error, "filename", None):
            raise
        raise CliError(f"bench: {getattr(error, 'strerror', error)}", exit_code=FAILED) from error
    if args.output == "json":
        print_json(flat(values, figures))
        return OK
    print_table("figures", ["figure", "value", "aim", "", "what it is"], rows(values, figures))
    measured = {figure.name for figure in figures}
    print_table("conditions", ["field", "value"], [row for row in values.items() if row[0] not in measured])
    return OK


def _say(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)
