"""The regions of a deployment and their buckets.

  kvstore region ls                    all regions of the file, and whether each bucket is ready
  kvstore region init NAME             make the bucket of a region ready, once
  kvstore region status [NAME]         what the mirrors of a region, or of all, have copied, and how far they are behind
  kvstore region nodes [NAME]          the nodes of a region, or of all, by what each says of itself in the bucket
  kvstore region verify NAME           whether its bucket has what was announced, and nothing else
  kvstore region erase                 erase what is stored of a tenant, a namespace or a prefix, in all regions
  kvstore region reseal NAME           seal all that was sealed with an older key of key_file with its first one

`kvstore region VERB --help` tells the options of each. The file of regions is --regions FILE, or regions_file of the configuration
(deploy/regions.toml explains it). Credentials come from the environment, or from the machine's role.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.tools.cli import USAGE, CliError
from kvstore.tools.cli.options import add_config_arguments, load_config
from kvstore.tools.cli.verbs import Verbs

if TYPE_CHECKING:
    from kvstore.daemon.config.regions_file import Deployment

VERBS = Verbs(
    "region",
    {
        "ls": "all regions of the file, and whether each bucket is ready",
        "init": "make the bucket of a region ready, once",
        "status": "what mirrors have copied, and how far they are behind",
        "nodes": "the nodes of a region, by what each says of itself: hit rate, bytes, problems",
        "verify": "whether a bucket has what was announced, and nothing else",
        "erase": "erase what is stored of a tenant, a namespace or a prefix, in all regions",
        "reseal": "seal all that was sealed with an older key with the first one",
    },
    of_nodes={"ls": (), "status": (), "verify": ("repair",), "erase": ()},
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    VERBS.add_to(parser)


def run(args: argparse.Namespace) -> int:
    return VERBS.run(args)


def add_region_arguments(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """NAME, the file of regions, the configuration and -o."""
    parser.add_argument("region", nargs=nargs, default="", metavar="NAME", help="a region of the file")
    add_regions_argument(parser)
    add_config_arguments(parser, "table", "json")


def add_regions_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--regions",
        type=Path,
        metavar="FILE",
        help="file of regions (default: regions_file of the configuration)",
    )


def load_deployment(args: argparse.Namespace) -> Deployment:
    """The file of regions that is asked for. Raises CliError, RegionsFileError."""
    from kvstore.daemon.config.regions_file import load_regions

    path = args.regions or load_config(args).config.regions_file
    if not path:
        raise CliError("no file of regions: name one with --regions, or set regions_file", exit_code=USAGE)
    return load_regions(Path(path))
