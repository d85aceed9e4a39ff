"""The compile caches of an engine: restored before it starts, and whether it used them.

  eval "$(kvstore model env NAME)"     restore what fits this environment, and print what the engine needs in its own
  kvstore model env NAME --check       after its start: whether it took what was restored

Run it as the engine's user, with the engine's Python and the variables that the engine will have (VLLM_…, CUDA_…). Where nothing fits the
exports name an empty directory: what the engine compiles there can be published, `kvstore model publish … --with-cache DIR`.
Caches are code: taken only where they are signed with the key that is in models.cache_key_file, or --key-file FILE (at least 32
bytes, nobody else may read it). Where the weights cannot fit into the free memory of the devices, that is said before anything starts. stdout has the exports, stderr one line that says hit or miss, and why. --check: exit code 0 for a hit, 1
for a miss, 3 where nothing was restored or no engine has started. docs/models.md says what must be equal.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.tools.cli import FAILED, NOT_FOUND, OK, USAGE, CliError
from kvstore.tools.cli.commands.model_bucket import add_bucket_arguments, asked_of_bucket
from kvstore.tools.cli.options import add_model_name, load_config, whole
from kvstore.tools.cli.output import present
from kvstore.units import format_bytes, format_duration, plural, printable

if TYPE_CHECKING:
    from coldstart.fleet.caches import Found, Home
    from replication.formats.manifests import Manifest
    from tiers.bucket.objects import Objects

PARALLEL_MAX = 4096


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_name(parser, metavar="NAME", help="NAME or NAME@REVISION")
    parser.add_argument(
        "--into", type=Path, metavar="DIR", help="where caches lie (default: ~/.cache/kvstore/engines)"
    )
    parser.add_argument("--check", action="store_true", help="after a start: was it used?")
    add_environment_arguments(parser)
    add_bucket_arguments(parser, "text", "json")


def add_environment_arguments(parser: argparse.ArgumentParser) -> None:
    """What caches are chosen by, beside what is found; also of `publish --with-cache`."""
    parser.add_argument(
        "--tp", type=whole(1, PARALLEL_MAX), default=1, metavar="N", help="tensor parallel size (default 1)"
    )
    parser.add_argument(
        "--pp", type=whole(1, PARALLEL_MAX), default=1, metavar="N", help="pipeline parallel size (default 1)"
    )
    parser.add_argument(
        "--path",
        type=Path,
        metavar="DIR",
        help="from which the engine loads (default: where preload puts it)",
    )
    parser.add_argument(
        "--key-file", type=Path, metavar="FILE", help="of the key that caches are signed with"
    )


def environment_of(args: argparse.Namespace, model: str, revision: str) -> dict[str, str]:
    """What this engine's caches depend on. Raises CliError."""
    from coldstart.disk.home import Home
    from coldstart.errors import ModelError
    from coldstart.fleet.devices import first_name
    from coldstart.fleet.environment import facts

    place = args.path or Home(load_config(args).config.models_dir).place(model, revision)
    try:
        return facts(str(place.absolute()), args.tp, args.pp, first_name(os.environ), os.environ)
    except ModelError as error:
        raise CliError(f"model {args.verb}: {error}", exit_code=FAILED) from error


def key_of(args: argparse.Namespace) -> bytes:
    """b"" where there is none. Raises CliError."""
    from coldstart.errors import ModelError
    from coldstart.fleet.caches import read_key

    path = args.key_file or load_config(args).config.models.cache_key_file
    try:
        return read_key(Path(path)) if path else b""
    except ModelError as error:
        code = USAGE if os.path.lexists(path) else NOT_FOUND
        raise CliError(f"model {args.verb}: {error}", exit_code=code) from error


def signing_key(args: argparse.Namespace) -> bytes:
    """Raises CliError where there is none."""
    if key := key_of(args):
        return key
    raise CliError(
        f"model {args.verb}: compile caches need a key: models.cache_key_file, or --key-file", exit_code=USAGE
    )


def run_verb(args: argparse.Namespace) -> int:
    from coldstart.fleet.caches import Found, Home, exports, find_caches
    from coldstart.published.models import find, read

    key = key_of(args)
    home = Home((args.into or default_home()).absolute())

    async def ask(objects: Objects) -> tuple[Found, Path]:
        one = await find(objects, args.name)
        about = environment_of(args, one.model, one.revision)
        if not args.check:
            _require_room(args, await read(objects, f"{one.model}@{one.revision}"))
        found = Found(None, "there is no key that they are signed with (models.cache_key_file, --key-file)")
        if key:
            found = await find_caches(objects, one.model, one.revision, about, key)
        if args.check:
            return found, home.path
        if found.manifest is None:
            return found, home.empty(about, one.model, one.revision)
        return found, await home.restore(objects, found.manifest)

    began_s = time.monotonic()
    try:
        found, cache = asked_of_bucket(args, ask)
        if args.check:
            return _check(args, home, found)
    except OSError as error:
        where = error.filename or home.path
        raise CliError(f"model env: {where}: {error.strerror}", exit_code=FAILED) from error
    _say(found, time.monotonic() - began_s)
    document = {"hit": found.manifest is not None, "why": found.why, "exports": exports(cache)}
    return present(args, document, _show)


def _show(document: dict[str, Any]) -> None:
    for name, value in document["exports"].items():
        print(f"export {name}={shlex.quote(value)}")


def _require_room(args: argparse.Namespace, manifest: Manifest) -> None:
    """Raises CliError where the weights cannot fit into the devices that the engine will see."""
    from coldstart.fleet.devices import devices, visible, weight_bytes, wrong_of_load

    loaded_bytes = weight_bytes((file.path, file.size_bytes) for file in manifest.files)
    if wrong := wrong_of_load(loaded_bytes, args.tp * args.pp, visible(devices(), os.environ)):
        raise CliError(f"model env: {manifest.model}: {wrong}", exit_code=FAILED)


def default_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kvstore", "engines")


def _say(found: Found, took_s: float) -> None:
    if found.manifest is None:
        print(printable(f"compile caches: miss: {found.why}"), file=sys.stderr)
        return
    size = f"{format_bytes(found.manifest.size_bytes)} in {plural(len(found.manifest.files), 'file')}"
    print(f"compile caches: hit: {size}, restored after {format_duration(took_s)}", file=sys.stderr)


def _check(args: argparse.Namespace, home: Home, found: Found) -> int:
    from coldstart.errors import FilesWrong
    from coldstart.fleet.caches import used

    if found.manifest is None:
        raise CliError(f"model env: nothing was restored: {found.why}", exit_code=NOT_FOUND)
    try:
        seen = used(home.path / found.manifest.key / "cache")
    except FilesWrong as error:
        raise CliError(f"model env: {error}", exit_code=NOT_FOUND) from error
    if seen.made:
        text = f"miss: the engine compiled anew, under {', '.join(seen.made)}: something of its key differs"
    elif seen.read:
        text = f"hit: {plural(seen.read, 'restored file')} read, nothing compiled beside them"
    else:
        text = (
            "unknown: nothing was read or compiled: no engine has started, or this file system keeps no times"
        )
    present(args, {"hit": seen.is_hit, "read": seen.read, "made": seen.made}, lambda _: print(text))
    return OK if seen.is_hit else FAILED if seen.made else NOT_FOUND
