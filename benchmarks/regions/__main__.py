"""Three regions on one machine: what a new cluster in another region gains from what was asked for elsewhere.

  make demo-regions                          a made-up hour of chat
  make demo-regions TRACE=trace.jsonl        recorded requests, in Mooncake's format
  make demo-regions SPEED=10                 how much faster than real time the first half is served (default: 5, or less
                                             where two cores would not keep up, and half of it where these do not)

The S3 server is radosgw where it is installed (Debian: radosgw ceph-mon ceph-osd ceph-common), else moto, which is slower.

A real S3 server has a bucket for each region. NA serves the first half; what is worth it is persisted and copied to EU and APAC,
and, in a deployment beside it, everything. Then NA is switched off, and a new, empty cluster in EU serves the second half:
cold, with the durable set, and with everything.

Exit code 0 when all bytes were right and the durable set reached its aims, 1 when not, 2 for wrong options or a wrong trace.
"""

from __future__ import annotations

import argparse
import math
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.regions import workload
from benchmarks.regions.phases import Show
from benchmarks.regions.radosgw import ServerError, is_installed
from benchmarks.regions.report import LATE_S_MAX, document, print_report
from benchmarks.regions.serving import TooLate
from kvstore.client import ClientError
from kvstore.errors import ReplayError
from kvstore.tools.bench.daemon import DaemonError
from kvstore.tools.cli import INTERRUPTED
from kvstore.tools.cli.output import print_json

SPEED_MAX = 60.0  # lives are whole seconds of the demo's clock
# If nothing else is said. A pack outlives what was worth keeping by two skews of the demo's clock: at 20 times real time that would
# be as long as the lives themselves, and bytes of packs that are over would be most of what is measured.
SPEED = 5.0
PROMPTS_PER_S_MAX, PROMPTS_PER_S_MAX_MOTO = 32.0, 14.0  # two cores keep up with all of it
DURATION_S = 3600.0  # of the made-up traffic
ARRIVALS_PER_S = 1.0
SEED = 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.regions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="recorded requests (default: made up)")
    parser.add_argument("--speed", type=float, help=f"1 to {SPEED_MAX:g}, of the first half")
    parser.add_argument("--seed", type=int, default=SEED, help="of the made-up requests")
    parser.add_argument("--moto", action="store_true", help="use moto even where radosgw is installed")
    parser.add_argument("--keep", action="store_true", help="keep the directory with data and logs")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    args = parser.parse_args(arguments)
    if args.speed is not None and not 1 <= args.speed <= SPEED_MAX:
        parser.error(f"--speed {args.speed:g}: allowed are 1 to {SPEED_MAX:g}")
    try:
        prompts = (
            workload.conversations(args.seed, DURATION_S, ARRIVALS_PER_S)
            if args.trace is None
            else workload.recorded(args.trace)
        )
        if len(prompts) < 2:
            parser.error(f"--trace {args.trace}: two requests is the least")
        if args.speed is not None:
            return _show(args, prompts, math.inf)
        args.speed = _speed(prompts, is_installed() and not args.moto)
        while True:
            try:
                return _show(args, prompts, LATE_S_MAX if args.speed > 1 else math.inf)
            except TooLate as error:
                args.speed = max(1.0, args.speed // 2)
                print(
                    f"demo-regions: {error.late_s:.1f} s late: once more, at {args.speed:g} times real time",
                    file=sys.stderr,
                )
    except ReplayError as error:
        parser.error(f"--trace: {error}")
    except KeyboardInterrupt:
        return INTERRUPTED


def _speed(prompts: list[workload.Prompt], real_server: bool) -> float:
    """At which a small machine should keep up."""
    first, _ = workload.halves(prompts)
    per_s_max = PROMPTS_PER_S_MAX if real_server else PROMPTS_PER_S_MAX_MOTO
    return max(1.0, min(SPEED, per_s_max * first[-1].at_s // len(first)))


def _show(args: argparse.Namespace, prompts: list[workload.Prompt], late_s_max: float) -> int:
    """Raises TooLate."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no process of ours stays behind
    begun_s = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begun_s:6.1f} s  {text}", file=sys.stderr, flush=True)

    directory = Path(tempfile.mkdtemp(prefix="kvstore-regions-"))
    arenas = Path(tempfile.mkdtemp(prefix="kvstore-regions-", dir="/dev/shm"))
    try:
        halves = workload.halves(prompts)
        shown = Show(directory, arenas, halves, args.speed, say, not args.moto, late_s_max).carry_out()
    except (DaemonError, ClientError, ServerError, OSError) as error:
        print(f"demo-regions: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(arenas, ignore_errors=True)
        if args.keep:
            say(f"kept: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    source = "made up" if args.trace is None else args.trace.name
    report = document(source, workload.figures(prompts), args.speed, shown, time.monotonic() - begun_s)
    if args.output == "json":
        print_json(report)
    else:
        print_report(report)
    for problem in report["problems"]:
        print(f"demo-regions: {problem}", file=sys.stderr)
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
