"""What this machine does with our tiers, each figure measured in turn with its limit.

  kvstore bench                        everything, about five minutes
  kvstore bench --quick                fewer rounds, about forty seconds
  kvstore bench --dir /nvme0           where the files of the NVMe figures go (default: the temporary directory)
  kvstore bench --only disk            one part: dram, lookup, policy, ranks, disk, promote, restart or region
  kvstore bench --region na            the bucket of a region of --regions FILE (or of the configuration's regions_file)
  kvstore bench --region na --to eu    the same, and its mirror copies into the bucket of another region
  kvstore bench -o json                one flat document; docs/cli.md lists its fields

It starts daemons of its own, with settings of its own; a running daemon is neither asked nor
disturbed, but it shares the machine. Progress goes to stderr. Exit code 0 when everything was
measured, whatever the figures are.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from kvstore.cli import FAILED, NOT_FOUND, OK, USAGE, CliError
from kvstore.cli.options import add_config_arguments, add_output_argument
from kvstore.cli.output import print_json, print_table
from kvstore.cli.region import add_regions_argument, region_place

PARTS = ("dram", "lookup", "policy", "ranks", "disk", "promote", "restart", "region")


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument(
        "--to", default="", metavar="NAME", help="with --region NAME: the region that its mirror copies into"
    )
    add_regions_argument(parser)
    add_config_arguments(parser)
    parser.add_argument(
        "--only", choices=PARTS, action="append", help="this part; may be given several times"
    )


def run(args: argparse.Namespace) -> int:
    from kvstore.bench import figures, plan, runner
    from kvstore.bench.daemon import DaemonError
    from kvstore.errors import KvstoreError
    from tiers.errors import TierError

    directory = (args.dir or Path(tempfile.gettempdir())).absolute()
    if not directory.is_dir():
        raise CliError(f"bench: --dir {directory}: not a directory", exit_code=NOT_FOUND)
    chosen = plan.QUICK if args.quick else plan.FULL
    parts = [name for name in PARTS if not args.only or name in args.only]
    if args.region is not None:
        parts = ["region"]
    if args.region:
        place = region_place(args, args.region, "bench --region")
        chosen = replace(chosen, region_url=place.url, region_options=place.options())
    if args.to:
        if not args.region:
            raise CliError("bench: --to needs --region NAME, the region to copy from", exit_code=USAGE)
        place = region_place(args, args.to, "bench --to")
        chosen = replace(chosen, mirror_url=place.url, mirror_options=place.options())
    try:
        values = runner.run(chosen, directory, parts, _say)
    except (DaemonError, KvstoreError, TierError, OSError) as error:
        raise CliError(f"bench: {error}", exit_code=FAILED) from error
    if args.output == "json":
        print_json(figures.flat(values))
        return OK
    print_table("figures", ["figure", "value", "aim", "", "what it is"], figures.rows(values))
    measured = {figure.name for figure in figures.FIGURES}
    print_table("conditions", ["field", "value"], [row for row in values.items() if row[0] not in measured])
    return OK


def _say(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)
