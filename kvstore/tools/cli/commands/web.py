"""Serve metrics, health and a live page of a running daemon, until SIGTERM or SIGINT.

  kvstore web                                      where web.listen says: http://127.0.0.1:9471/
  kvstore web --listen [::1]:9480 --socket S       of another daemon, somewhere else

`kvstore serve` starts one itself, unless web.listen is "". It only reads; daemons that are away and come back
are waited for. When it listens, one line goes to stdout:

    ready url=http://127.0.0.1:9471/ socket=/run/kvstore/kvstore.sock

/ is the page, /metrics for Prometheus (docs/metrics.md), /healthz and /readyz for probes.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from kvstore.tools.cli import OK, USAGE, CliError
from kvstore.tools.cli.options import add_config_arguments, load_config, socket_path, start_failure

if TYPE_CHECKING:
    from kvstore.tools.web.strangers import Names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--listen", metavar="ADDRESS:PORT", help="same as --set web.listen=ADDRESS:PORT")
    parser.add_argument("--names", choices=("user", "all"), help="same as --set web.names=…")
    parser.add_argument("--child", metavar="LEVEL,FORMAT", help=argparse.SUPPRESS)  # of kvstore serve
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    import asyncio

    from kvstore import logs
    from kvstore.daemon import process
    from kvstore.daemon.listening import parse_listen
    from kvstore.errors import StartError
    from kvstore.tools.web.running import serve

    text, level, form = args.listen, "info", "auto"
    names_for: Names = args.names or "user"
    if args.child is not None:
        level, _, form = args.child.partition(",")
        if level not in ("debug", "info", "warning", "error") or form not in ("auto", "json", "console"):
            raise CliError(f"web: --child {args.child}: not a level and a format of the log", exit_code=USAGE)
    elif text is None or args.socket is None:
        config = load_config(args).config
        text = text if text is not None else config.web.listen
        names_for, level, form = args.names or config.web.names, config.log.level, config.log.format
    if not text:
        raise CliError(
            'web: web.listen is "", which turns it off: choose an address with --listen', exit_code=USAGE
        )
    try:
        listen = parse_listen(text)
    except ValueError as error:
        raise CliError(f"web: --listen {text}: {error}", exit_code=USAGE) from error
    path = socket_path(args)
    try:
        signals = process.begin()
    except StartError as error:
        raise start_failure(error) from error
    logs.configure(level, form)  # type: ignore[arg-type]  # those of the configuration
    try:
        asyncio.run(
            serve(listen, names_for, path, args.child is not None, partial(print, flush=True), signals)
        )
    except StartError as error:
        raise start_failure(error) from error
    return OK
