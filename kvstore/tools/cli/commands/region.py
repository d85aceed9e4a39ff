"""The regions of a deployment and their buckets.

  kvstore region ls                    all regions of the file, and whether each bucket is ready
  kvstore region init NAME             make the bucket of a region ready, once; says so again if it is; --create makes the
                                       bucket itself, too (S3, with boto3), and has the store abort what uploads left
  kvstore region status [NAME]         what the mirrors of a region, or of all, have copied, and what is left
  kvstore region lag [NAME]            how far they are behind, by the feeds of their sources as they are now
  kvstore region verify NAME           whether its bucket has what was announced, and nothing else; --deep reads every byte,
                                       --repair mends, --against OTHER says what should be copied from there, and is not
  kvstore region reseal NAME           seal all that was sealed with an older key of key_file with its first one

The file of regions is --regions FILE, or regions_file of the configuration (deploy/regions.toml explains it). Credentials
come from the environment, or from the machine's role.

Exit code 0 when all is well, 1 when a bucket is not ready or refuses, or a mirror has stopped, could not copy something, or
is more than 15 minutes behind, or something that was found is not repaired; 2 for a wrong file or name, 4 when a bucket does not answer.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.tools.cli import FAILED, OK, USAGE, CliError
from kvstore.tools.cli.buckets import asked, opened, place_of
from kvstore.tools.cli.options import add_config_arguments, add_node_arguments, is_of_node, load_config
from kvstore.tools.cli.output import present, print_json, print_table

if TYPE_CHECKING:
    from kvstore.daemon.config.regions_file import Deployment, Place


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from kvstore.tools.cli.commands import region_verify

    parser.add_argument("action", choices=("ls", "init", "status", "lag", "verify", "reseal"))
    parser.add_argument("region", nargs="?", default="", metavar="NAME", help="a region of the file")
    parser.add_argument("--create", action="store_true", help="init: make the bucket, too (S3)")
    region_verify.add_verify_arguments(parser)
    add_regions_argument(parser)
    add_config_arguments(parser, "table", "json")
    add_node_arguments(parser, "create", "repair")


def add_regions_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--regions",
        type=Path,
        metavar="FILE",
        help="file of regions (default: regions_file of the configuration)",
    )


def run(args: argparse.Namespace) -> int:
    from kvstore.tools.cli.commands import region_verify

    if args.create and args.action != "init":
        raise CliError(f"region {args.action}: --create is for init", exit_code=USAGE)
    if args.action != "verify" and (option := region_verify.is_given(args)):
        raise CliError(f"region {args.action}: {option} is for verify", exit_code=USAGE)
    if is_of_node(args):
        return _of_node(args)
    if args.action == "verify":
        return region_verify.verify(args, load_deployment(args))
    if args.action == "ls":
        return _ls(args)
    if args.action in ("status", "lag"):
        return _mirrors(args)
    if not args.region:
        raise CliError(f"region {args.action}: a NAME is required", exit_code=USAGE)
    return _reseal(args) if args.action == "reseal" else _init(args)


def _of_node(args: argparse.Namespace) -> int:
    """Of the regions that another node knows."""
    from kvstore.tools.cli.commands import region_mirrors, region_verify
    from kvstore.tools.cli.nodes import node_of, run_there

    command, is_live = f"region {args.action}", args.action == "lag"
    if args.action == "verify":
        wanted = region_verify.fields(args)
        return run_there(
            args, command, lambda node: node.verify_region(args.region, **wanted), region_verify.show
        )
    if args.action == "init":
        raise CliError(f"{command}: --node does not go with it", exit_code=USAGE)
    with node_of(args, command) as node:
        document = node.list_regions() if args.action == "ls" else node.get_regions(args.region, is_live)
    if args.action == "ls":
        present(args, document, _show)
        return OK if {row["state"] for row in document["regions"]} == {"ready"} else FAILED
    present(args, document, lambda mirrors: region_mirrors.show(mirrors, is_live))
    return OK if all(pair["state"] == "ok" for pair in document["mirrors"]) else FAILED


def load_deployment(args: argparse.Namespace) -> Deployment:
    """The file of regions that is asked for. Raises CliError."""
    from kvstore.daemon.config.regions_file import RegionsFileError, load_regions

    path = args.regions or load_config(args).config.regions_file
    if not path:
        raise CliError("no file of regions: name one with --regions, or set regions_file", exit_code=USAGE)
    try:
        return load_regions(Path(path))
    except RegionsFileError as error:
        raise CliError(*error.problems, exit_code=USAGE) from error


def region_place(args: argparse.Namespace, region: str, asked_by: str) -> Place:
    """Where a region is. Raises CliError."""
    return place_of(load_deployment(args), region, asked_by)


def _mirrors(args: argparse.Namespace) -> int:
    from kvstore.tools.cli.commands.region_mirrors import show_mirrors

    deployment = load_deployment(args)
    if args.region:
        place_of(deployment, args.region, f"region {args.action}")
    regions = [args.region] if args.region else list(deployment.regions)
    return show_mirrors(deployment, regions, args.action == "lag", time.time, args.output)


def _init(args: argparse.Namespace) -> int:
    from replication.formats.region import init_region

    deployment, place = load_deployment(args), region_place(args, args.region, "region init")
    did = _created(place) if args.create else {}
    made = asked(lambda: init_region(place.open(), deployment.deployment, args.region, time.time))
    facts = {"deployment": made.deployment, "region": made.region, "url": place.url, "made_s": made.made_s}
    facts |= did
    if args.output == "json":
        print_json(facts)
    else:
        print(f"{place.url} is region {made.region} of deployment {made.deployment}")
        if did:
            print("its bucket was made" if did["bucket_made"] else "its bucket was there")
    return OK


def _reseal(args: argparse.Namespace) -> int:
    from replication.region.resealing import Resealed, reseal
    from tiers.bucket.sealed_objects import SealedObjects

    deployment = load_deployment(args)
    region_place(args, args.region, "region reseal")

    async def work() -> Resealed:
        objects = await opened(deployment, args.region)
        if not isinstance(objects, SealedObjects):
            raise CliError("region reseal: the file of regions has no key_file", exit_code=USAGE)
        return await reseal(objects)

    done = asked(work)
    if args.output == "json":
        print_json(done._asdict())
    else:
        print(f"{done.resealed} objects resealed, {done.sealed} were sealed with the first key before")
        if done.left:
            print(f"{done.left} cannot be opened, and stay as they are: {done.problem}")
    return FAILED if done.left else OK


def _created(place: Place) -> dict[str, object]:
    """The bucket is there, and what uploads leave goes by itself. Raises CliError."""
    from coldstart.fleet.bucket_admin import Bucket, BucketError

    try:
        bucket = Bucket(place.url, place.options())
        return {"bucket_made": bucket.create(), "rule_made": bucket.abort_leftovers()}
    except BucketError as error:
        raise CliError(f"region init: --create: {error}", exit_code=FAILED) from error


def _ls(args: argparse.Namespace) -> int:
    from replication.errors import ReplicationError
    from tiers.errors import TierError
    from tiers.together import together

    deployment = load_deployment(args)

    async def state(name: str) -> str:
        try:
            await opened(deployment, name)
        except (ReplicationError, TierError) as error:
            return str(error)
        return "ready"

    async def states() -> list[str]:
        return await together(map(state, deployment.regions))

    found = dict(zip(deployment.regions, asked(states), strict=True))
    rows = [{"region": name, "url": deployment.regions[name].url, "state": found[name]} for name in found]
    present(args, {"deployment": deployment.deployment, "regions": rows}, _show)
    return OK if set(found.values()) == {"ready"} else FAILED


def _show(document: dict[str, Any]) -> None:
    rows = document["regions"]
    print_table(f"regions of {document['deployment']}", list(rows[0]), [list(row.values()) for row in rows])
