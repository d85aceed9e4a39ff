"""Show it: a real daemon, real vLLM engines, and the same prompts again and again.

  python -m examples.demo                         progress on stderr, at the end a table
  python -m examples.demo -o json                 one JSON document instead of the table
  python -m examples.demo --model DIRECTORY       a real model (a GPU, or a CPU and patience)
  python -m examples.demo --html page.html        also a page for a browser: the table, and the daemon's report of these phases
  python -m examples.demo --keep                  leave data and logs of the run behind, and say where

Without --model a tiny model is made on the spot; nothing is downloaded. Every phase is a fresh
engine process: cold, after a restart of the engine, after kill -9 of the daemon, after the loss
of the arena, with a damaged record on disk, and with prefill and decode apart.

Exit code 0 when every phase gave the cold run's output token for token and the warm ones had hits.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from examples.demo.phases import Show
from examples.demo.report import document, page, table
from kvstore.tools.cli import FAILED, INTERRUPTED, NOT_FOUND, OK, CliError, Parser
from kvstore.tools.cli.commands.report import add_html_argument, require_page, write_page
from kvstore.tools.cli.options import add_output_argument
from kvstore.tools.cli.output import print_json, print_table


def main() -> int:
    """The exit code."""
    try:
        return run(arguments())
    except KeyboardInterrupt:
        return INTERRUPTED
    except CliError as error:
        print(*(f"demo: {problem}" for problem in error.problems), sep="\n", file=sys.stderr)
        return error.exit_code


def arguments() -> argparse.Namespace:
    parser = Parser(
        prog="python -m examples.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_output_argument(parser, "table", "json")
    parser.add_argument(
        "--model", type=Path, metavar="DIRECTORY", help="a model that vLLM can load (default: a tiny one)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the directory with data and logs")
    add_html_argument(parser)
    args: argparse.Namespace = parser.parse_args()
    return args


def run(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("vllm") is None:
        raise CliError("vLLM is not installed beside kvstore (make venv installs it)", exit_code=NOT_FOUND)
    require_page(args.html, "demo")
    if args.model is not None and not (args.model / "config.json").is_file():
        raise CliError(f"--model {args.model}: not a model directory (no config.json)", exit_code=NOT_FOUND)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no process of ours stays behind
    started = time.monotonic()
    directory = Path(tempfile.mkdtemp(prefix="kvstore-demo-"))
    try:
        show = Show(directory, args.model and args.model.absolute(), lambda text: _say(started, text))
        stopped = show.carry_out()
    except OSError as error:
        raise CliError(str(error)) from error
    finally:
        if args.keep:
            _say(started, f"kept: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    also = [stopped] if stopped else []
    report = document(show.shown, also)
    if args.output == "json":
        print_json(report)
    else:
        print_table(
            "the same prompts, one fresh engine a phase",
            *table(show.shown),
            drop=("corrupt", "prompt tokens"),
        )
    for problem in report["problems"]:
        print(f"demo: {problem}", file=sys.stderr)
    if args.html is not None and show.report is not None:
        write_page(args.html, page(show.shown, show.report, also), "demo")
        _say(started, f"the table and a report of these phases: {args.html}")
    return OK if report["ok"] else FAILED


def _say(started: float, text: str) -> None:
    print(f"{time.monotonic() - started:6.1f} s  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
