"""Seal all that was sealed with an older key of key_file with its first one (docs/security.md).

  kvstore region reseal NAME

Exit code 1 when some objects cannot be opened and stay as they are, 2 without a key, 4 when the bucket does not answer.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kvstore.tools.cli import FAILED, OK, USAGE, CliError
from kvstore.tools.cli.buckets import asked, opened
from kvstore.tools.cli.commands.region import add_region_arguments, load_deployment
from kvstore.tools.cli.output import present, say

if TYPE_CHECKING:
    from replication.mirror.resealing import Resealed


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    add_region_arguments(parser)


def run_verb(args: argparse.Namespace) -> int:
    from replication.mirror.resealing import reseal
    from tiers.bucket.sealed_objects import SealedObjects

    deployment = load_deployment(args)
    deployment.place(args.region, args.called)

    async def work() -> Resealed:
        objects = await opened(deployment, args.region)
        if not isinstance(objects, SealedObjects):
            raise CliError(f"{args.called}: the file of regions has no key_file", exit_code=USAGE)
        return await reseal(objects)

    done = asked(work)
    present(args, done._asdict(), _show)
    return FAILED if done.left else OK


def _show(done: dict[str, Any]) -> None:
    print(f"{done['resealed']} objects resealed, {done['sealed']} were sealed with the first key before")
    if done["left"]:
        say(f"{done['left']} cannot be opened, and stay as they are: {done['problem']}")
