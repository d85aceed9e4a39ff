"""Have a model on this node's disk: real files, each byte verified, in a directory that any engine opens.

  kvstore model preload NAME              the revision that was published last
  kvstore model preload NAME@REVISION
  kvstore model preload NAME --verify     read again what is here already, and mend it
  kvstore model preload NAME -o json      what was done, for programs

It prints the directory. Interrupted or killed, it goes on where it was when it is run again. Two at once fetch one copy. Where
the disk, or models.nvme_bytes, is too small, those that were used longest ago leave; where that is not enough, nothing is begun.

Exit code 1 where it does not fit, or bytes are damaged in the bucket; 3 where there is no such model, 4 where the bucket does
not answer.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvstore.tools.cli import FAILED, OK, CliError
from kvstore.tools.cli.commands.model_bucket import add_bucket_arguments, asked_of_bucket
from kvstore.tools.cli.commands.model_local import asked_of_home, home_of, in_words
from kvstore.tools.cli.options import add_model_name, load_config
from kvstore.tools.cli.output import present, progress_bars

if TYPE_CHECKING:
    from collections.abc import Callable

    from coldstart.disk.filling import Progress
    from coldstart.disk.home import Said
    from coldstart.disk.preload import Preloaded
    from tiers.bucket.objects import Objects


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_name(parser, metavar="NAME[@REVISION]", help="which")
    parser.add_argument("--verify", action="store_true", help="read again what is here already, and mend it")
    # Of a daemon: see kvstore/daemon/beside/preloading.py.
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    add_bucket_arguments(parser, "text", "json")


def run_verb(args: argparse.Namespace) -> int:
    from coldstart.disk.filling import Progress

    if args.child:
        threading.Thread(target=_end_with_parent, daemon=True).start()
        asked_of_home(lambda: _require_disk(args))
    progress = Progress()
    with progress_bars(of_bytes=True) as bars:

        def follow(said: Said) -> None:
            bars(args.name, said.total_bytes - said.left_bytes, said.total_bytes)
            if args.child:
                print(_line(said), flush=True)

        done = asked_of_home(
            lambda: asked_of_bucket(args, lambda objects: _preload(args, objects, progress, follow))
        )
    if args.child:
        _remember_disk(args)
    else:
        _say(args, done, progress)
    return OK


def _require_disk(args: argparse.Namespace) -> None:
    """Raises CliError, OSError."""
    from kvstore.daemon.disks.models_disk import wrong_of_models_disk

    config = load_config(args).config
    if wrong := wrong_of_models_disk(config.data_dir, config.models_dir):
        raise CliError(f"model preload: {wrong}", exit_code=FAILED)


def _remember_disk(args: argparse.Namespace) -> None:
    from kvstore.daemon.disks.models_disk import remember_models_disk

    config = load_config(args).config
    with suppress(OSError):  # the next one is not known, and taken as it is
        remember_models_disk(config.data_dir, config.models_dir)


async def _preload(
    args: argparse.Namespace, objects: Objects, progress: Progress, follow: Callable[[Said], None]
) -> Preloaded:
    from coldstart.disk.home import parse_name
    from coldstart.disk.preload import preload

    model, revision = parse_name(args.name)
    return await preload(objects, home_of(args), model, revision, progress, args.verify, follow=follow)


def _say(args: argparse.Namespace, done: Preloaded, progress: Progress) -> None:
    document = {
        "model": done.manifest.model,
        "revision": done.manifest.revision,
        "path": str(done.path),
        "bytes": done.manifest.size_bytes,
        "by_source": dict(progress.by_source),
        "kept_bytes": progress.kept_bytes,
        "seconds": round(progress.seconds, 3),
    }
    present(args, document, show)


def show(document: dict[str, Any]) -> None:
    came = (document["by_source"], document["kept_bytes"], document["seconds"])
    how = in_words(*came) if came[0] or came[1] else "here already"
    print(f"{document['path']}\n{document['model']}@{document['revision']}: {how}")


def _line(said: Said) -> str:
    import msgspec

    return msgspec.json.encode(said).decode()


def _end_with_parent() -> None:
    """stdin is a pipe that nobody writes to: it ends when whoever started us does. What was filled stays."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
