"""Where the models are that a `kvstore model` command is about: options, opening, and the exit code for what goes wrong."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from kvstore.tools.cli import NOT_FOUND, USAGE, CliError
from kvstore.tools.cli.buckets import asked, opened
from kvstore.tools.cli.commands.region import add_regions_argument, load_deployment
from kvstore.tools.cli.options import add_config_arguments, load_config

if TYPE_CHECKING:
    from tiers.bucket.objects import Objects

T = TypeVar("T")


def add_bucket_arguments(parser: argparse.ArgumentParser, *outputs: str) -> None:
    """--region and --to, what shapes the configuration, and -o with these outputs."""
    parser.add_argument(
        "--region", default="", metavar="NAME", help="of the file of regions (default: the node's own)"
    )
    parser.add_argument(
        "--to", default="", metavar="URL", help="any store instead: s3://…, gs://…, az://… or file:///…"
    )
    parser.add_argument("--endpoint", default="", metavar="URL", help="of a store of one's own, with --to")
    add_regions_argument(parser)
    add_config_arguments(parser, *outputs)


def asked_of_bucket(args: argparse.Namespace, work: Callable[[Objects], Awaitable[T]]) -> T:
    """Run something with the bucket that the arguments name. Raises CliError, RegionsFileError, and what the bucket or a model does wrong."""
    open_bucket = _opening(args)

    async def answer() -> T:
        return await work(await open_bucket())

    return asked(answer)


def this_user() -> str:
    """Who publishes, or removes: USER@HOST."""
    from kvstore.tools.doctor.findings import user_name

    return f"{user_name(os.getuid())}@{platform.node()}"


def _opening(args: argparse.Namespace) -> Callable[[], Awaitable[Objects]]:
    verb = f"model {args.verb}"
    if not args.to:
        if args.endpoint:
            raise CliError(f"{verb}: --endpoint needs --to URL", exit_code=USAGE)
        deployment = load_deployment(args)
        region = args.region or load_config(args).config.region
        deployment.place(region, f"{verb}: --region")
        return lambda: opened(deployment, region)
    if args.region or args.regions:
        raise CliError(f"{verb}: --to and a region: one of them is allowed", exit_code=USAGE)
    return _store(verb, args.to, args.endpoint)


def _store(verb: str, url: str, endpoint: str) -> Callable[[], Awaitable[Objects]]:
    from pydantic import ValidationError

    from kvstore.daemon.config.regions_file import Place
    from tiers.errors import ObjectRefused, PlaceMissing

    try:
        place = Place(url=url, endpoint=endpoint)
    except ValidationError as error:
        wrong = error.errors()[0]
        option = "--to" if wrong["loc"] == ("url",) else "--endpoint"
        said = str(wrong["msg"]).removeprefix("Value error, ")
        raise CliError(f"{verb}: {option}: {said}", exit_code=USAGE) from None

    if not url.startswith("file:"):
        try:
            place.open()
        except ObjectRefused as error:
            raise CliError(f"{verb}: --to {error}", exit_code=USAGE) from error

    async def open_store() -> Objects:
        try:
            return place.open()
        except PlaceMissing as error:
            raise CliError(f"{verb}: --to {error}", exit_code=NOT_FOUND) from error

    return open_store
