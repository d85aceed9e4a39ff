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
from pathlib import Path

from kvstore.tools.cli import OK, USAGE, CliError
from kvstore.tools.cli.options import add_config_arguments, load_config, socket_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--listen", metavar="ADDRESS:PORT", help="same as --set web.listen=ADDRESS:PORT")
    parser.add_argument("--names", choices=("user", "all"), help="same as --set web.names=…")
    for of_kvstore_serve in ("--child", "--access"):
        parser.add_argument(of_kvstore_serve, help=argparse.SUPPRESS)
    parser.add_argument("--tls", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--region", nargs=2, help=argparse.SUPPRESS)
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    import asyncio

    from kvstore import logs
    from kvstore.daemon import process
    from kvstore.daemon.listening import parse_listen
    from kvstore.security.identity import Gate
    from kvstore.security.tls import Tls, TlsFiles
    from kvstore.tools.web.nodes import Nodes
    from kvstore.tools.web.running import serve

    if args.child is not None:
        level, _, form = args.child.partition(",")
        if level not in ("debug", "info", "warning", "error") or form not in ("auto", "json", "console"):
            raise CliError(f"web: --child {args.child}: not a level and a format of the log", exit_code=USAGE)
        text, names_for, path = args.listen, args.names, socket_path(args)
        files, access = TlsFiles(*map(Path, args.tls)) if args.tls else None, args.access
        region = args.region or ()
    else:
        config = load_config(args, web__listen=args.listen, web__names=args.names).config
        level, form = config.log.level, config.log.format
        text, names_for, path = config.web.listen, config.web.names, config.socket_path
        files, access = config.web_tls, config.security.access_file
        region = (config.region, str(config.regions_file))
    if not text:
        raise CliError(
            'web: web.listen is "", which turns it off: choose an address with --listen', exit_code=USAGE
        )
    signals = process.begin()
    logs.configure(level, form)
    security = Tls(files) if files is not None else None, Gate(Path(access) if access else None)
    is_child, ready = args.child is not None, partial(print, flush=True)
    nodes = Nodes(*region)
    asyncio.run(serve(parse_listen(text), names_for, path, security, nodes, is_child, ready, signals))
    return OK
