"""Twenty faults, one by one, under traffic: does everything that people look at name the cause, and is it gone when the fault is over?

  python -m benchmarks.drill                        all of them, half an hour
  python -m benchmarks.drill "disk hung" "port taken"
  python -m benchmarks.drill --list                 their names
  python -m benchmarks.drill -o json                for programs; -o markdown: the table of docs/operations.md

Each has a daemon, an engine, a web process and a bucket of its own. Within a minute `kvstore status`, `top`, the page, the metrics and
`kvstore doctor` must name it, with what to do; and none of them may name it a while after it was mended. What needs root (mounts,
cgroups) is left out without. Exit code 1 where one misses.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.drill import buckets, disks, machine, mistakes
from benchmarks.drill.drill import HOLD_S, LINES_MAX, Outcome, carry_out
from benchmarks.drill.fault import Fault
from benchmarks.drill.surfaces import SURFACES
from kvstore.tools.cli.output import print_json, print_table

_HEX = re.compile(r"(?<=[-/])[0-9a-f]{10,}(/[0-9a-f]{10,})?")  # made up, different each time

FAULTS: tuple[type[Fault], ...] = (
    disks.DiskHung, disks.DiskFull, disks.DiskUnmounted, disks.DiskRemoved, disks.DiskDamaged,
    buckets.BucketRefuses, buckets.BucketOverloaded, buckets.BucketHangs, buckets.BucketFlips, buckets.BucketAway,
    machine.ClockWrong, machine.DaemonStopped, machine.MirrorDead, mistakes.DramQuota, mistakes.DiskQuota,
    mistakes.OtherDtype, mistakes.OtherSeed, machine.PortTaken, machine.MemoryShort, machine.CertificateExpired,
)  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    """0 where all were named in time and are gone."""
    parser = argparse.ArgumentParser(
        prog="drill", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [fault.name for fault in FAULTS]
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="by name; all if none is given")
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument(
        "--hold", type=float, default=HOLD_S, metavar="S", help=f"how long each lasts (default {HOLD_S:g})"
    )
    parser.add_argument("-o", "--output", choices=("table", "json", "markdown"), default="table")
    args = parser.parse_args(words)
    if unknown := set(args.faults) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; allowed are {', '.join(names)}")
    if args.list:
        print("\n".join(names))
        return 0
    disks.alone()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="kvd-", ignore_cleanup_errors=True) as home:
        for fault in FAULTS:
            if not args.faults or fault.name in args.faults:
                print(f"drill: {fault.name}", file=sys.stderr, flush=True)
                outcomes.append(carry_out(fault(), Path(home), args.hold))
                if outcomes[-1].problem:
                    print(f"drill: {outcomes[-1].problem}", file=sys.stderr, flush=True)
    if args.output == "json":
        print_json(
            {
                "ok": all(one.ok for one in outcomes),
                "faults": [{**asdict(one), "ok": one.ok} for one in outcomes],
            }
        )
    elif args.output == "markdown":
        print(*_document(outcomes), sep="\n")
    else:
        _print(outcomes)
    return 0 if all(one.ok for one in outcomes) else 1


def _document(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The table of docs/operations.md."""
    yield "| fault | what is said | what to do | named after | gone after | lines an hour |"
    yield "|---|---|---|---|---|---|"
    for one in outcomes:
        if one.ok and not one.not_here:
            said = _HEX.sub("…", one.said)
            after = [f"{max(seconds.values()):.0f} s" for seconds in (one.named_s, one.gone_s)]
            yield f"| {one.fault} | {said} | {' '.join(one.to_do.split())} | {' | '.join(after)} | {one.lines_hour} |"


def _print(outcomes: Sequence[Outcome]) -> None:
    columns = ["fault", *(f"{where} s" for where in SURFACES), "gone s", "lines", "an hour", ""]
    rows = [
        [
            one.fault,
            *(one.named_s.get(where, "–") for where in SURFACES),
            max(one.gone_s.values()) if len(one.gone_s) == len(SURFACES) else "–",
            one.lines,
            one.lines_hour,
            one.not_here or ("ok" if one.ok else "MISSED"),
        ]
        for one in outcomes
    ]
    print_table(f"named after, gone after; lines of the log (at most {LINES_MAX} an hour)", columns, rows)
    for one in outcomes:
        if one.said:
            print(f"{one.fault}: {one.said}\n    -> {one.to_do}")


if __name__ == "__main__":
    sys.exit(main())
