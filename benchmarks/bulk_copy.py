"""Whether juicefs copies a large set sooner than our own copier: a mirror that begins, with each, in turn.

    na: packs that were always there ─▶ `kvstore mirror` ─▶ eu, empty        until eu has all of them
         directory, or an S3 emulator (behind a proxy that answers later, with --rtt-ms)

    python -m benchmarks.bulk_copy [--packs 2000] [--pack-bytes 1MiB] [--store file|s3] [--rtt-ms 0] [--rounds 2] [-o json]

Needs `juicefs` on PATH, or the package of this name; and as much memory (s3) or disk (file) as three times the packs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.miss_overhead import BenchError
from kvstore.bench.machine import Others, facts
from kvstore.cli.output import print_json, print_table
from kvstore.daemon.regions_file import load_regions
from kvstore.units import parse_bytes
from replication.announced import Announced
from replication.feed import FeedWriter
from replication.juicefs import find_juicefs
from tests.juicefs import real_juicefs
from tests.objects import S3Server
from tests.region.mirrors import mirrors
from tests.region.proxy import Proxy
from tests.region.regions import S3_KEYS, init, regions_file
from tests.running import TIMEOUT_S
from tiers.checksum import digest
from tiers.namespace_spec import NamespaceSpec
from tiers.pack_io import put_pack
from tiers.packs import PACKS, PackHeader

WAIT_S_MAX = 900.0
LOOK_S = 0.25
RECORDS = 8  # of a pack
COPIERS = ("own", "juicefs")


async def make(file: Path, count: int, pack_bytes: int) -> None:
    """So many packs in na, announced."""
    objects = load_regions(file).regions["na"].open()
    writer = FeedWriter(objects, "b" * 16, time.time, random.Random())
    await writer.open()
    spec = NamespaceSpec(
        b"bulk copies".ljust(16, b"."), pack_bytes // RECORDS, 16, 16, {"model": "m", "tenant": ""}
    )
    made: list[Announced] = []
    for number in range(count):
        content = random.Random(number).randbytes(spec.record_bytes)
        records = [content[index:] + content[:index] for index in range(RECORDS)]
        hashes = b"".join(digest(f"{number} {index}".encode()) for index in range(RECORDS))
        header = PackHeader(spec, b"", hashes, b"".join(map(digest, records)))
        made.append(Announced(await put_pack(objects, header, records), int(time.time())))
        if len(made) == 100 or number == count - 1:
            await writer.announce(made)
            made = []


async def held(file: Path) -> int:
    """How many packs eu has."""
    return sum([len(page) async for page in load_regions(file).regions["eu"].open().list(PACKS)])


def copied_s(file: Path, scratch: Path, count: int) -> float:
    """Seconds from the start of a mirror until all packs are in eu."""
    with mirrors(scratch) as start:
        began_s = time.monotonic()
        process = start(file)
        while (found := asyncio.run(held(file))) < count:
            if time.monotonic() - began_s > WAIT_S_MAX or process.poll() is not None:
                raise BenchError(f"{found} of {count} packs after {time.monotonic() - began_s:.0f} s")
            time.sleep(LOOK_S)
        took_s = time.monotonic() - began_s
        process.terminate()
        process.wait(TIMEOUT_S)
    return took_s


@contextmanager
def deployment(scratch: Path, args: argparse.Namespace) -> Iterator[Path]:
    """A file of regions, na and eu, whose buckets are ready: na with all packs, and as far away as is asked for."""
    with ExitStack() as stack:
        s3 = S3Server() if args.store == "s3" else None
        if s3 is not None:
            stack.callback(s3.stop)
        file = regions_file(scratch, "na", "eu", s3=s3)
        init(file, "na", "eu")
        asyncio.run(make(file, args.packs, args.pack_bytes))
        if s3 is not None and args.rtt_ms:
            proxy = stack.enter_context(closing(Proxy(s3.port)))
            proxy.delay_s = args.rtt_ms / 1e3
            file.write_text(file.read_text().replace(s3.endpoint, proxy.endpoint, 1))  # of na, which is first
        yield file


def measure(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The report. Raises BenchError."""
    os.environ.update(S3_KEYS)
    (scratch / "bin").mkdir()
    os.environ["PATH"] = f"{os.environ['PATH']}:{real_juicefs(scratch / 'bin')}"
    version = asyncio.run(find_juicefs()).version
    load = Others()
    took: dict[str, list[float]] = {copier: [] for copier in COPIERS}
    for number in range(args.rounds):
        for copier in COPIERS if number % 2 == 0 else reversed(COPIERS):
            place = scratch / f"{number}-{copier}"
            place.mkdir()
            with deployment(place, args) as file:
                file.write_text(file.read_text() + f'[[rules]]\ncopier = "{copier}"\n')
                took[copier].append(copied_s(file, place, args.packs))
                if copier == "juicefs" and "fetched in bulk" not in (place / "mirror.log").read_text():
                    raise BenchError(f"juicefs copied nothing: {(place / 'mirror.log').read_text()[-1000:]}")
            _say(f"{copier}: {took[copier][-1]:.1f} s")
    own_s, juicefs_s = (statistics.median(took[copier]) for copier in COPIERS)
    return {
        "store": args.store,
        "packs": args.packs,
        "pack_bytes": args.pack_bytes,
        "rtt_ms": args.rtt_ms,
        "juicefs_version": version,
        "own_s": round(own_s, 2),
        "juicefs_s": round(juicefs_s, 2),
        "own_mib_per_s": round(args.packs * args.pack_bytes / own_s / (1 << 20), 1),
        "juicefs_mib_per_s": round(args.packs * args.pack_bytes / juicefs_s / (1 << 20), 1),
        "speedup": round(own_s / juicefs_s, 2),
        "rounds": args.rounds,
        "other_cpu_percent": load.percent(),
        **facts(scratch, scratch),
    }


def _say(line: str) -> None:
    print(f"bulk_copy: {line}", file=sys.stderr, flush=True)


def main(words: list[str] | None = None) -> int:
    """Measure and print; 0 when everything was measured, whatever the figures are."""
    parser = argparse.ArgumentParser(
        prog="bulk_copy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packs", type=int, default=2000, help="how many (default 2000)")
    parser.add_argument("--pack-bytes", type=parse_bytes, default="1MiB", help="size of one (default 1MiB)")
    parser.add_argument(
        "--store", choices=("file", "s3"), default="s3", help="what the regions are (default s3)"
    )
    parser.add_argument(
        "--rtt-ms", type=float, default=0.0, help="how much later na answers; s3 only (default 0)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="of both copiers (default 2)")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="kvb-", ignore_cleanup_errors=True) as name:
        try:
            report = measure(args, Path(name))
        except BenchError as error:
            _say(str(error))
            return 1
    if args.output == "json":
        print_json(report)
    else:
        print_table("a mirror that begins", ["field", "value"], list(report.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
