"""Copy into this region what the rules say, from all other regions, until SIGTERM or SIGINT.

  kvstore mirror --set region=eu --regions regions.toml

One process a region, anywhere near its bucket. It needs to read the other regions' buckets, and to read and write its own.
When it has joined its region, one line goes to stdout:

    ready region=eu sources=na,apac bucket=s3://example-kv-eu

With --metrics 127.0.0.1:9473 its figures and problems are served for Prometheus (docs/metrics.md), whether it has joined or not.
Everything else is logged to stderr; `kvstore region status` says how far it is. It keeps catalogues in a directory of its
own: --data-dir DIR, or data_dir of the configuration with "-mirror" behind it. That may be lost: what is missing is found
again, and nothing is copied twice.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.tools.cli import OK, USAGE, CliError
from kvstore.tools.cli.commands.region import add_regions_argument, load_deployment
from kvstore.tools.cli.options import add_config_arguments, load_config

if TYPE_CHECKING:
    from kvstore.daemon.beside.mirroring import Mirroring
    from kvstore.daemon.listening import Listen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_regions_argument(parser)
    parser.add_argument(
        "--metrics", metavar="ADDRESS:PORT", help="serve /metrics and /healthz there, on this machine only"
    )
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    config = load_config(args).config
    deployment = load_deployment(args)
    listen = _listen(args.metrics) if args.metrics is not None else None

    import uvloop

    from kvstore import logs
    from kvstore.daemon import process
    from kvstore.daemon.beside.mirroring import Mirroring
    from kvstore.daemon.data_dir import hold

    signals = process.begin()
    deployment.place(config.region, "region")
    deployment.require_openable(Path(args.regions or config.regions_file), [config.region])
    logs.configure(config.log.level, config.log.format)
    os.umask(0o077)
    own = config.data_dir
    data_dir = hold(own if args.data_dir is not None else own.with_name(own.name + "-mirror"))
    try:
        ready = partial(print, flush=True)
        beside = _served(listen) if listen is not None else None
        mirroring = Mirroring(deployment, config.region, data_dir, ready, signals=signals, beside=beside)
        uvloop.run(mirroring.run())
    finally:
        data_dir.close()
    return OK


def _listen(text: str) -> Listen:
    """Raises CliError."""
    from kvstore.daemon.listening import parse_listen

    try:
        listen = parse_listen(text)
    except ValueError as error:
        raise CliError(f"mirror: --metrics {text}: {error}", exit_code=USAGE) from error
    if not listen.is_loopback:
        raise CliError(
            f"mirror: --metrics {text}: allowed are addresses of this machine only: 127.0.0.1, [::1]",
            exit_code=USAGE,
        )
    return listen


def _served(listen: Listen) -> Callable[[Mirroring], Coroutine[Any, Any, None]]:
    """Raises StartError where nobody can listen there."""
    from kvstore.errors import StartError
    from kvstore.tools.beside import bind
    from kvstore.tools.web.mirror import serve_mirror

    try:
        door = bind(listen)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise StartError(f"mirror: --metrics {listen}: cannot listen there: {why}") from error
    return lambda mirroring: serve_mirror(listen, door, mirroring.figures)
