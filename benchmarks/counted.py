"""Requests of real processes to a real S3 server, counted by a proxy in front of it for each process and bucket, beside the plan.

    python -m benchmarks.counted [--idle-minutes 15] [--busy-minutes 8] [-o json]

    daemon, keeps NA ─▶ proxy ─┬▶ S3 server        mirror of EU ─▶ proxy ─▶ EU, which it keeps
    daemon of NA ─────▶ proxy ─┤                                ╰▶ proxy ─▶ NA, its source
                               ╰ what each asks for is counted: LIST, GET, HEAD, PUT (deletes are free)

First nobody writes, after the quarter of an hour in which a region becomes idle. Then the second daemon persists a prompt every 20 s.
Exit code 0 when what an idle process costs a month differs from the plan by a tenth at most.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks import scale
from benchmarks.regions.deployment import MIB, Mirror, kvstore, start
from benchmarks.regions.prices import Settings
from benchmarks.regions.servers import BUCKET_REGION
from kvstore.client import Client
from kvstore.tools.bench.daemon import Daemon
from kvstore.tools.cli.output import print_json, print_table
from replication.keeper.news_reader import SURE_S
from replication.keeper.watch import LISTEN_ON_S, LISTEN_S
from tests.objects import S3Server
from tests.region.proxy import Proxy

SETTLE_S: Final = (
    LISTEN_S + LISTEN_ON_S + 60.0
)  # until a region is idle in which somebody wrote at its beginning
PROMPT_S: Final = 20.0
TOLERANCE: Final = 0.1
BLOCKS, RECORD_BYTES, BLOCK_TOKENS = 16, 4096, 64
_REQUEST: Final = re.compile(rb"(GET|PUT|POST|HEAD|DELETE) (\S+) HTTP/1\.1\r\n")


class _Counted:
    """A reader of what a client sends: a request begins a piece."""

    def __init__(self, reader: asyncio.StreamReader, requests: Counter[str]) -> None:
        self._reader = reader
        self._requests = requests

    async def read(self, size_bytes: int) -> bytes:
        piece = await self._reader.read(size_bytes)
        if found := _REQUEST.match(piece):
            method, path = found.groups()
            self._requests["list" if b"list-type=2" in path else method.decode().lower()] += 1
        return piece


class CountingProxy(Proxy):
    """requests: by kind, since somebody cleared it."""

    def __init__(self, port: int) -> None:
        self.requests: Counter[str] = Counter()
        super().__init__(port)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: bool) -> None:
        counted: Any = reader if answers else _Counted(reader, self.requests)
        await super()._pump(counted, writer, answers)

    def asked(self, for_s: float) -> scale.Requests:
        return scale.Requests(
            (self.requests["put"] + self.requests["list"]) / for_s,
            (self.requests["get"] + self.requests["head"]) / for_s,
        )


class Region:
    """Two regions behind proxies, and who runs in them."""

    def __init__(self, home: Path, stack: ExitStack) -> None:
        server = stack.enter_context(_server())
        ways = ("keeper", "node", "mirror", "source")
        self.proxies = {name: CountingProxy(int(server.endpoint.rpartition(":")[2])) for name in ways}
        for proxy in self.proxies.values():
            stack.callback(proxy.close)
        endpoints = {name: proxy.endpoint for name, proxy in self.proxies.items()}
        files = {
            name: _file(home, name, endpoints.get("source" if name == "mirror" else name, server.endpoint),
                        endpoints["mirror"])
            for name in ("init", "keeper", "node", "mirror")
        }  # fmt: skip
        for region in ("na", "eu"):
            server.make_bucket(f"counted-{region}")
            kvstore("region", "init", region, "--regions", files["init"])
        arenas = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        self.daemons: dict[str, Daemon] = {}
        for name in ("keeper", "node"):
            words: Settings = {"regions_file": str(files[name]), "region": "na", "durable.seen_times": 1}
            daemon = stack.enter_context(start(home / name, Path(arenas), 64 * MIB, words))
            self.daemons[name] = daemon
            with daemon.client(attach=False) as client:
                daemon.wait(lambda: _keeps(client) is (name == "keeper"), "keeping")  # noqa: B023 called in this round
        stack.enter_context(Mirror(home / "m", files["mirror"], "eu"))

    def count(self, for_s: float, meanwhile: Callable[[float], None]) -> dict[str, scale.Requests]:
        for proxy in self.proxies.values():
            proxy.requests.clear()
        begun_s = time.monotonic()
        meanwhile(begun_s + for_s)
        took_s = time.monotonic() - begun_s
        return {name: proxy.asked(took_s) for name, proxy in self.proxies.items()}


@contextmanager
def _server() -> Iterator[S3Server]:
    server = S3Server(None)
    try:
        yield server
    finally:
        server.stop()


def _file(home: Path, name: str, na: str, eu: str) -> Path:
    path = home / f"{name}.toml"
    lines = ['deployment = "counted"', "[[rules]]", 'from = ["na"]', 'to = ["eu"]']
    for region, endpoint in (("na", na), ("eu", eu)):
        lines += [
            f"[regions.{region}]",
            f'url = "s3://counted-{region}"',
            f'bucket_region = "{BUCKET_REGION}"',
        ]
        lines += [f'endpoint = "{endpoint}"']
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _keeps(client: Client) -> bool | None:
    keeps: bool | None = (client.status()["region"] or {}).get("keeps")
    return keeps


def _wait(until_s: float) -> None:
    time.sleep(max(0.0, until_s - time.monotonic()))


def _persist(daemon: Daemon) -> Callable[[float], None]:
    """A prompt every PROMPT_S, asked for once."""

    def work(until_s: float) -> None:
        with daemon.client() as client:
            space = client.namespace(b"counted requests", RECORD_BYTES, 32, BLOCK_TOKENS, {"model": "m"})
            ticket = 0
            while time.monotonic() < until_s:
                ticket += 1
                hashes = [os.urandom(32) for _ in range(BLOCKS)]
                client.put(space, hashes, b"", [bytes(RECORD_BYTES)] * BLOCKS)
                client.lookup([space], hashes, ticket=ticket, tokens=BLOCKS * BLOCK_TOKENS)
                time.sleep(min(PROMPT_S, max(0.0, until_s - time.monotonic())))

    return work


def planned() -> dict[str, dict[str, scale.Requests]]:
    load = scale.Load(packs_per_s=1 / PROMPT_S)
    busy = scale.following(1, load) + scale.tombstones() + scale.warming()
    told = scale.Requests(1 / PROMPT_S, 0.0)  # a state of the mirror, of each pack that it copied
    copied = scale.Requests(1 / PROMPT_S, 0.0) + scale.announcing(1, load) + told
    home = scale.following(1, load) + scale.tombstones() + scale.Requests(1 / SURE_S, 0.0)
    return {
        "idle": {
            "keeper": scale.idle_keeper(2),
            "node": scale.idle(2),
            "mirror": scale.idle_mirror(1),
            "source": scale.idle_source(2),
        },
        "busy": {
            "keeper": busy + scale.listing(1, load),
            "node": busy + scale.announcing(1, load) + scale.Requests(1 / PROMPT_S, 0.0),
            "mirror": home + copied + scale.listing(1, load),
            "source": scale.following_closely(1, load) + scale.Requests(0.0, 1 / PROMPT_S),
        },
    }


def counted(idle_s: float, busy_s: float, settle_s: float = SETTLE_S) -> list[dict[str, Any]]:
    rows, plan = [], planned()
    os.environ.update(AWS_ACCESS_KEY_ID="counted", AWS_SECRET_ACCESS_KEY="counted", AWS_REGION=BUCKET_REGION)
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-counted-")))
        region = Region(home, stack)
        _wait(time.monotonic() + settle_s)
        found = {"idle": region.count(idle_s, _wait)}
        found["busy"] = region.count(busy_s, _persist(region.daemons["node"]))
    for state, processes in found.items():
        for name, asked in processes.items():
            expected = plan[state][name]
            row = {
                "state": state,
                "process": name,
                "puts_per_h": round(3600 * asked.puts, 1),
                "gets_per_h": round(3600 * asked.gets, 1),
                "planned_puts_per_h": round(3600 * expected.puts, 1),
                "planned_gets_per_h": round(3600 * expected.gets, 1),
                "month_price": round(asked.month_price, 3),
                "planned_month_price": round(expected.month_price, 3),
            }
            rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counted", description=__doc__)
    parser.add_argument("--idle-minutes", type=float, default=15.0)
    parser.add_argument("--busy-minutes", type=float, default=8.0)
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    args = parser.parse_args()
    rows = counted(60 * args.idle_minutes, 60 * args.busy_minutes)
    if args.output == "json":
        print_json({"rows": rows})
    else:
        print_table(
            "requests an hour, and dollars a month: counted, planned",
            ["", "process", "PUT, LIST", "planned", "GET, HEAD", "planned", "a month", "planned"],
            [
                [
                    row["state"], row["process"], f"{row['puts_per_h']:,.0f}", f"{row['planned_puts_per_h']:,.0f}",
                    f"{row['gets_per_h']:,.0f}", f"{row['planned_gets_per_h']:,.0f}",
                    f"${row['month_price']:.2f}", f"${row['planned_month_price']:.2f}",
                ]
                for row in rows
            ],
        )  # fmt: skip
    differ = [row for row in rows if abs(row["month_price"] / row["planned_month_price"] - 1) > TOLERANCE]
    for row in differ:
        print(f"{row['state']} {row['process']}: differs from the plan by more than a tenth", file=sys.stderr)
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
