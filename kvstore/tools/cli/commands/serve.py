"""Run the daemon in the foreground until SIGTERM or SIGINT.

When engines can attach, one line goes to stdout:

    ready socket=/run/kvstore/kvstore.sock arena=/dev/shm/kvstore-….arena pages=4-KiB

Everything else is logged to stderr. SIGTERM: no new connections, blocks that only DRAM
holds are written to NVMe for at most stop_timeout_s, and the arena stays in shared memory
for the next start. A second SIGTERM skips the writing. SIGHUP: what can change while serving is read again.

Exit code 0 after SIGTERM or SIGINT, 1 where another start may succeed, 2 and 3 where it cannot: settings that do not
work here, or a directory that is not there.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from functools import partial

from kvstore.tools.cli import FAILED, OK, CliError
from kvstore.tools.cli.options import add_config_arguments, load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    gc.disable()  # until `heap.freeze`: what is imported is not garbage
    from kvstore.daemon import process

    signals = process.begin()
    loaded = load_config(args)
    config = loaded.config

    import uvloop

    from kvstore import logs
    from kvstore.daemon.beside.doors import require_doors
    from kvstore.daemon.process import memory_limits_in_words, require_threads
    from kvstore.daemon.service import Service, threads_needed
    from kvstore.daemon.storage import open_storage
    from kvstore.security import audit

    logs.configure(config.log.level, config.log.format)
    audit.to_stream(sys.stderr)
    os.umask(0o077)  # what SQLite makes in our directories is nobody else's either
    try:
        if config.regions_file:  # files that are named, before anything is made
            from kvstore.daemon.regional import require_regions

            require_regions(config)
        require_doors(config)
        require_threads(threads_needed(config))
        storage = open_storage(config)
        reread = partial(load_config, args)
        service = Service(config, storage, reread=reread, loaded=loaded, signals=signals)
        uvloop.run(service.run())
    except MemoryError as error:
        raise CliError(
            f"too little memory for a daemon{memory_limits_in_words()}", exit_code=FAILED
        ) from error
    if service.failure is not None:
        raise CliError(service.failure, exit_code=FAILED)
    return OK
