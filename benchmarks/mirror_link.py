"""How well a mirror fills its links: `python -m benchmarks --region na --to eu` where each bucket is behind a link of its own.

    na: S3 emulator ── link ──╮                             ╭── link ── eu: S3 emulator
                              ╰─▶ obstore alone │ a mirror ─╯

Where servers and mirror share two cores, these are the limit of both sides together, and nothing is learned of how a
mirror gets and puts at the same time. A link of less than the cores can do is a limit that each side has to itself.

    python -m benchmarks.mirror_link [--link-bytes-per-s 64MB] [--quick]

Prints what `python -m benchmarks -o json` prints. Links are proxies (tests/region/proxy.py).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path

from kvstore.units import parse_bytes
from tests.objects import S3Server
from tests.region.proxy import Proxy
from tests.region.regions import S3_KEYS, regions_file


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--link-bytes-per-s", type=parse_bytes, default=64_000_000, help="of each direction")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: three minutes instead of ten")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        files = []
        for name in ("na", "eu"):
            server = S3Server()
            stack.callback(server.stop)
            link = stack.enter_context(closing(Proxy(server.port, bytes_per_s=args.link_bytes_per_s)))
            place = Path(scratch) / name
            place.mkdir()
            files.append(
                regions_file(place, name, s3=server).read_text().replace(server.endpoint, link.endpoint)
            )
        regions = Path(scratch) / "regions.toml"
        regions.write_text(files[0] + files[1].split("\n", 1)[1])  # one deployment
        command = ["--region", "na", "--to", "eu", "--regions", str(regions), "-o", "json"]
        command += ["--quick"] * args.quick
        return subprocess.run(
            [sys.executable, "-m", "benchmarks", *command], env={**os.environ, **S3_KEYS}, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
