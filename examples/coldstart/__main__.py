"""A model is published, preloaded, killed, resumed, loaded from everywhere, mirrored: by real engines, and with every byte counted.

  python -m examples.coldstart                   progress on stderr, at the end a table
  python -m examples.coldstart -o json           one JSON document instead of the table
  python -m examples.coldstart --size 512MiB     of the model, which is random and made on the spot
  python -m examples.coldstart --keep            leave data and logs of the run behind, and say where

The S3 servers, one a region, are radosgw where it is installed (Debian: radosgw ceph-mon ceph-osd ceph-common), else moto.
Four times the model's size on disk, and five times in memory, is needed.

Exit code 0 when every engine gave the tokens of the plain directory and no byte came twice (of a preload that was killed: none
but what was under way), 1 when not.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from benchmarks.regions.radosgw import ServerError
from examples.coldstart.phases import Show
from kvstore.client import ClientError
from kvstore.tools.bench.daemon import DaemonError
from kvstore.tools.cli import FAILED, INTERRUPTED, NOT_FOUND, OK, USAGE, CliError, Parser
from kvstore.tools.cli.options import add_output_argument
from kvstore.tools.cli.output import Figure, print_json, print_table
from kvstore.units import NOTHING, format_bytes, parse_bytes

SIZE_BYTES_MIN = 32 << 20  # less is there before it can be killed


def main() -> int:
    """The exit code."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m examples.coldstart", description=__doc__, formatter_class=formatter)
    add_output_argument(parser, "table", "json")
    parser.add_argument("--size", type=parse_bytes, default="2GiB", help="of the model (default: 2GiB)")
    parser.add_argument("--moto", action="store_true", help="use moto even where radosgw is installed")
    parser.add_argument("--keep", action="store_true", help="keep the directory with data and logs")
    try:
        return _run(parser.parse_args())
    except KeyboardInterrupt:
        return INTERRUPTED
    except CliError as error:
        print(*(f"demo-coldstart: {problem}" for problem in error.problems), sep="\n", file=sys.stderr)
        return error.exit_code


def _run(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("vllm") is None:
        raise CliError("vLLM is not installed beside kvstore (make venv installs it)", exit_code=NOT_FOUND)
    if args.size < SIZE_BYTES_MIN:
        raise CliError(f"--size: {format_bytes(SIZE_BYTES_MIN)} is the least", exit_code=USAGE)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no process of ours stays behind
    begun_s = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begun_s:6.1f} s  {text}", file=sys.stderr, flush=True)

    directory = Path(tempfile.mkdtemp(prefix="kvstore-coldstart-"))
    arenas = Path(tempfile.mkdtemp(prefix=f"{directory.name}-", dir="/dev/shm"))
    show = Show(directory, arenas, args.size, say, not args.moto)
    try:
        show.carry_out()
    except (DaemonError, ClientError, ServerError, OSError) as error:
        show.problems.append(str(error))
    finally:
        _end_preloads(directory)
        shutil.rmtree(arenas, ignore_errors=True)
        if args.keep:
            say(f"kept: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    document = {
        "server": show.server,
        "model_bytes": show.model_bytes,
        "stages": [{**asdict(stage), "seconds": round(stage.seconds, 2)} for stage in show.stages],
        "seconds": round(time.monotonic() - begun_s, 1),
        "ok": not show.problems,
        "problems": show.problems,
    }
    print_json(document) if args.output == "json" else _print(show)
    for problem in show.problems:
        print(f"demo-coldstart: {problem}", file=sys.stderr)
    return FAILED if show.problems else OK


def _print(show: Show) -> None:
    rows = [
        [
            stage.name,
            Figure(f"{stage.seconds:.1f}"),
            ", ".join(f"{name} {format_bytes(size)}" for name, size in stage.sources.items()) or NOTHING,
            stage.twice,
            Figure(NOTHING if stage.ready_s is None else f"{stage.ready_s:.1f}"),
            {None: NOTHING, True: "equal", False: "DIFFER"}[stage.tokens_equal],
        ]
        for stage in show.stages
    ]
    columns = ["stage", "s", "from", "chunks twice", "ready s", "tokens"]
    print_table(f"a model of {format_bytes(show.model_bytes)}, S3 servers: {show.server}", columns, rows)


def _end_preloads(directory: Path) -> None:
    """Those that engines have begun go on when their engines end."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it ended meanwhile
            words = path.read_bytes()
            if f"{directory}/".encode() in words and b"\0preload\0" in words:
                os.kill(int(path.parent.name), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
