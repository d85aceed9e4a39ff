"""Everything that is measured on this machine: all parts of `kvstore bench`, those for developers, the cost of a miss.

  python -m benchmarks                         everything, about five minutes, and four of a real vLLM where it is installed
  python -m benchmarks --only policy           one part: what deciding costs, and how long the event loop is held
  python -m benchmarks --region na --to eu     the bucket of a region, and a mirror into another region's
  python -m benchmarks -o json                 one flat document, and one of the cost of a miss

Other options are those of `kvstore bench`. README.md says how each figure is measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks import miss_overhead
from benchmarks.bench import PARTS, plan
from benchmarks.bench.figures import FIGURES
from kvstore.tools.cli import OK, USAGE, CliError, Parser
from kvstore.tools.cli.commands import bench
from kvstore.tools.cli.commands.region import load_deployment


def main(arguments: Sequence[str] | None = None) -> int:
    """The first exit code that is not 0."""
    parser = Parser(
        "python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    bench.add_arguments(parser, tuple(PARTS))
    parser.add_argument(
        "--to", default="", metavar="NAME", help="with --region NAME: the region that a mirror copies into"
    )
    try:
        args = parser.parse_args(arguments)
        chosen = bench.of_region(args, plan.QUICK if args.quick else plan.FULL)
        code = bench.carry_out(args, _to_region(args, chosen), PARTS, FIGURES)
    except CliError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if code == OK and not args.only and args.region is None and importlib.util.find_spec("vllm") is not None:
        code = miss_overhead.main(["-o", "json"] if args.output == "json" else [])
    return code


def _to_region(args: argparse.Namespace, chosen: plan.Plan) -> plan.Plan:
    if not args.to:
        return chosen
    if not args.region:
        raise CliError("bench: --to needs --region NAME, the region to copy from", exit_code=USAGE)
    place = load_deployment(args).place(args.to, "bench --to")
    return replace(chosen, mirror_url=place.url, mirror_options=place.options())


if __name__ == "__main__":
    sys.exit(main())
