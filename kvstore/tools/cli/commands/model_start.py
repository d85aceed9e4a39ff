"""A directory from which an engine starts at once, while the model's weights are still on their way.

  vllm serve "$(kvstore model start NAME)" --load-format kvstore

Where the model is whole on this node, it is that directory, as of kvstore model path; for NAME@REVISION without the bucket. Else it has the small files and the headers
of the weights, no data; the engine then begins the preload, with the options given here, and loads each tensor when its bytes are
there and true. Other load formats refuse it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.tools.cli import OK
from kvstore.tools.cli.commands.model_bucket import add_bucket_arguments, asked_of_bucket
from kvstore.tools.cli.commands.model_local import asked_of_home, home_of
from kvstore.tools.cli.options import add_model_name

if TYPE_CHECKING:
    from tiers.bucket.objects import Objects

# That the preload needs, too.
OPTIONS = ("region", "to", "endpoint", "regions", "config", "data_dir", "socket")


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_name(parser, metavar="NAME[@REVISION]", help="which; NAME alone: the revision published last")
    add_bucket_arguments(parser)


def run_verb(args: argparse.Namespace) -> int:
    print(asked_of_home(lambda: _here(args) or asked_of_bucket(args, lambda objects: _start(args, objects))))
    return OK


def _here(args: argparse.Namespace) -> Path | None:
    """Of a revision that is named and whole: the bucket has nothing to say of it. Raises ModelError."""
    from coldstart.disk.home import parse_name
    from coldstart.errors import FilesWrong, ModelMissing

    model, revision = parse_name(args.name)
    try:
        return home_of(args).find(model, revision).path if revision else None
    except (ModelMissing, FilesWrong):
        return None


async def _start(args: argparse.Namespace, objects: Objects) -> Path:
    from coldstart.errors import FilesWrong, ModelMissing
    from coldstart.loading.start_dir import make_start
    from coldstart.published.models import read

    home, manifest = home_of(args), await read(objects, args.name)
    try:
        found = home.find(manifest.model, manifest.revision)
    except (ModelMissing, FilesWrong):
        return await make_start(objects, manifest, home.path.absolute(), _words(args))
    if found.manifest.content != manifest.content:
        raise FilesWrong(
            f"{found.path}: was published anew, with other files: kvstore model preload {manifest.model} brings them"
        )
    return found.path


def _words(args: argparse.Namespace) -> list[str]:
    """Options as they were given, of a process that runs elsewhere."""
    given = {option: getattr(args, option) for option in OPTIONS}
    words = [
        f"--{option.replace('_', '-')}={value.absolute() if isinstance(value, Path) else value}"
        for option, value in given.items()
        if value
    ]
    return [*words, *(f"--set={item}" for item in args.set)]
