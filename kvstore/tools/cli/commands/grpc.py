"""Serve the gRPC API of a running daemon, until SIGTERM or SIGINT (docs/grpc.md).

  kvstore grpc                                       where grpc.listen says
  kvstore grpc --listen 127.0.0.1:9472 --socket S    of another daemon, somewhere else

`kvstore serve` starts one itself where grpc.listen is set. Daemons that are away and come back are waited for. When it
listens, one line goes to stdout:

    ready grpc=127.0.0.1:9472 socket=/run/kvstore/kvstore.sock
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from kvstore.tools.cli import OK, USAGE, CliError
from kvstore.tools.cli.options import add_config_arguments, load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--listen", metavar="ADDRESS:PORT", help="same as --set grpc.listen=ADDRESS:PORT")
    parser.add_argument("--child", metavar="LEVEL,FORMAT", help=argparse.SUPPRESS)  # of kvstore serve
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    import uvloop

    from kvstore import logs
    from kvstore.daemon import process
    from kvstore.daemon.listening import parse_listen
    from kvstore.security import audit
    from kvstore.security.identity import Gate
    from kvstore.security.tls import Tls

    try:
        from kvstore.tools.rpc.server import Settings, serve
    except ImportError as error:
        raise CliError(f"grpc: {error.name} is missing: pip install 'kvstore-llm[grpc]'") from error

    config = load_config(args, grpc__listen=args.listen).config
    text = config.grpc.listen
    if not text:
        raise CliError(
            'grpc: grpc.listen is "", which turns it off: choose an address with --listen', exit_code=USAGE
        )
    level, form = config.log.level, config.log.format
    if args.child is not None:
        level, _, form = args.child.partition(",")
    access, files = config.security.access_file, config.security.tls_files
    signals = process.begin()
    logs.configure(level, form)
    audit.to_stream(sys.stderr)
    settings = Settings(
        parse_listen(text),
        config.socket_path,
        config.grpc.connection_age_s,
        config.grpc.streams_max,
        Tls(files).grpc_credentials() if files is not None else None,
    )
    uvloop.run(
        serve(
            settings,
            Gate(Path(access) if access else None),
            args.child is not None,
            partial(print, flush=True),
            signals,
        )
    )
    return OK
