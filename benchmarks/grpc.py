"""What the gRPC door adds: lookups beside the local door and beside an empty RPC, streams beside a raw gRPC byte stream.

    lookups    local door │ gRPC Lookup │ gRPC, an RPC of the same sizes that does nothing      1, 128, 2,048 blocks, in turn
    streams    Get │ raw stream of the same messages        2 MiB records in pieces of 1 MiB, in turn; Put likewise
    engine     lookups through the local door   without │ while a client reads at full rate

The raw server is grpc.aio on uvloop, as ours, in a process of its own; the client is the same for both and parses nothing.

    python -m benchmarks.grpc [--rounds 7] [--lookups 2000] [-o json]

Aims: streams at 0.85 of the raw ones; an engine's p99 within 10 % where a core is free for the door. Needs no GPU and no
vLLM; two minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import xxhash

from benchmarks.command import parser_of, run
from kvstore.client import Client
from kvstore.remote.pieces import written
from kvstore.tools.bench.daemon import Daemon, DaemonError, settings
from kvstore.tools.bench.machine import Others, facts
from kvstore.tools.bench.rounds import percentile_us
from kvstore.tools.cli.output import print_table
from kvstore.v1 import cache_pb2
from kvstore.v1.types_pb2 import NamespaceSelector
from tiers.dram.pages import choose_arena_path

AIM = 0.85
BLOCKS = (1, 128, 2048)
SMALL_BYTES, RECORD_BYTES, PIECE_BYTES = 4096, 2 << 20, 1 << 20
STREAM_RECORDS = 32
ARENA_BYTES = 512 << 20
WARM_UP_ROUNDS = 10  # so that every slot was written once
WINDOW_S = 3.0
START_S = 30.0
OPTIONS = [("grpc.max_receive_message_length", 8 << 20), ("grpc.max_send_message_length", 8 << 20)]
SERVICE = "/kvstore.v1.CacheService/"


class Process:
    """Another process that says where it listens, or that it has begun. Context manager."""

    def __init__(self, *words: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], START_S)
        line = self._process.stdout.readline().decode() if readable else ""
        if not line.startswith("ready "):
            raise DaemonError(f"{words[0]} did not become ready")
        self.ready = dict(word.split("=", 1) for word in line.split()[1:] if "=" in word)

    def cpu_s(self) -> float:
        """Seconds of processors that it has taken."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Raw:
    """A server that does nothing but gRPC."""

    def __init__(self) -> None:
        pieces = (
            memoryview(os.urandom(PIECE_BYTES)) for _ in range(STREAM_RECORDS * RECORD_BYTES // PIECE_BYTES)
        )
        self._messages = [written(number, 0, b"", piece) for number, piece in enumerate(pieces)]

    async def empty(self, request: bytes, context: Any) -> bytes:
        """As many bytes as the first four say."""
        return bytes(int.from_bytes(request[:4], "little"))

    async def get(self, request: bytes, context: Any) -> None:
        """As many messages as it says, of the sizes of ours, from memory as ours are: none of them is in a cache."""
        for number in range(int.from_bytes(request, "little")):
            await context.write(self._messages[number % len(self._messages)])

    async def put(self, _: object, context: Any) -> None:
        """Takes what comes."""
        while await context.read() is not grpc.aio.EOF:
            pass
        await context.write(b"")

    async def serve(self) -> None:
        server = grpc.aio.server(options=OPTIONS)
        handlers: dict[str, Any] = {
            "Empty": grpc.unary_unary_rpc_method_handler(self.empty),
            "Get": grpc.unary_stream_rpc_method_handler(self.get),
            "Put": grpc.stream_stream_rpc_method_handler(self.put),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("raw", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        print(f"ready grpc=127.0.0.1:{port}", flush=True)
        await server.wait_for_termination()


def named(count: int, salt: str) -> list[bytes]:
    return [hashlib.sha256(f"{salt} {number}".encode()).digest() for number in range(count)]


class Bench:
    """A daemon with something in it, its gRPC door, and the raw one."""

    def __init__(self, local: Client, ours: Process, raw: Process) -> None:
        self.local = local
        self.processes = {"": ours, "raw_": raw}
        self.ours: Any = grpc.insecure_channel(ours.ready["grpc"], OPTIONS)
        self.raw: Any = grpc.insecure_channel(raw.ready["grpc"], OPTIONS)
        self.small = local.namespace(os.urandom(16), SMALL_BYTES, 32, 16, {"model": "small"})
        self.large = local.namespace(os.urandom(16), RECORD_BYTES, 32, 16, {"model": "large"})
        self.hashes = named(max(BLOCKS), "small")
        self.records = named(STREAM_RECORDS, "large")
        for space, hashes in ((self.small, self.hashes), (self.large, self.records)):
            record = memoryview(os.urandom(space.record_bytes))
            if local.put(space, hashes, b"", [record] * len(hashes)) != len(hashes):
                raise DaemonError("the arena does not hold the blocks")
        self._puts = 0

    # -- lookups --

    def lookup_ways(self, blocks: int) -> dict[str, Callable[[], object]]:
        hashes = self.hashes[:blocks]
        selector = NamespaceSelector(digest=self.small.digest.hex())
        asked_of_ours = cache_pb2.LookupRequest(
            namespace=selector, blocks=cache_pb2.Blocks(hashes=b"".join(hashes))
        )
        request = asked_of_ours.SerializeToString()
        lookup = self.ours.unary_unary(f"{SERVICE}Lookup")
        answer = lookup(request)
        if cache_pb2.LookupResponse.FromString(answer).held_blocks != blocks:
            raise DaemonError("Lookup does not find what was put")
        empty = self.raw.unary_unary("/raw/Empty")
        asked = len(answer).to_bytes(4, "little") + request[4:]
        return {
            "local": lambda: self.local.lookup([self.small], hashes),
            "grpc": lambda: lookup(request),
            "empty": lambda: empty(asked),
        }

    def lookups(self, count: int) -> dict[str, Any]:
        """p50 and p99 of each way, a call of each in turn."""
        found = {}
        for blocks in BLOCKS:
            ways = self.lookup_ways(blocks)
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            for number in range(count + count // 10):
                for name, way in ways.items():
                    begun = time.perf_counter()
                    way()
                    if number >= count // 10:
                        seconds[name].append(time.perf_counter() - begun)
            found[str(blocks)] = {name: percentiles(taken) for name, taken in seconds.items()}
        return found

    # -- streams --

    def get(self) -> float:
        """Bytes a second of records."""
        return self._read(self.ours.unary_stream(f"{SERVICE}Get")(get_request(self.large.digest.hex())))

    def get_raw(self) -> float:
        messages = STREAM_RECORDS * RECORD_BYTES // PIECE_BYTES
        return self._read(self.raw.unary_stream("/raw/Get")(messages.to_bytes(4, "little")))

    def put(self) -> float:
        """New blocks each time."""
        self._puts += 1
        hashes = named(STREAM_RECORDS, f"put {self._puts}")
        selector = NamespaceSelector(digest=self.large.digest.hex())
        start = cache_pb2.PutRequest.Start(namespace=selector, hashes=b"".join(hashes))
        return self._write(self.ours.stream_stream(f"{SERVICE}Put"), cache_pb2.PutRequest(start=start))

    def put_raw(self) -> float:
        return self._write(self.raw.stream_stream("/raw/Put"), cache_pb2.PutRequest())

    def _read(self, answers: Iterator[bytes]) -> float:
        begun, size = time.perf_counter(), 0
        for message in answers:
            size += len(message)
        if size < STREAM_RECORDS * RECORD_BYTES:
            raise DaemonError(f"{size} bytes came of {STREAM_RECORDS} records")
        return size / (time.perf_counter() - begun)

    def _write(self, put: Any, start: cache_pb2.PutRequest) -> float:
        record = bytes(RECORD_BYTES)
        sums = xxhash.xxh3_128_digest(record)
        pieces = [
            (
                at,
                cache_pb2.PutRequest(
                    offset=at, checksums=b"" if at else sums, data=record[at:][:PIECE_BYTES]
                ),
            )
            for at in range(0, RECORD_BYTES, PIECE_BYTES)
        ]

        def messages() -> Iterator[bytes]:
            yield start.SerializeToString()
            for index in range(STREAM_RECORDS):
                number = cache_pb2.PutRequest(index=index).SerializeToString()
                for _, whole in serialized:
                    yield number + whole

        serialized = [(at, piece.SerializeToString()) for at, piece in pieces]
        begun = time.perf_counter()
        answers = list(put(messages()))
        taken_s = time.perf_counter() - begun
        if (
            start.start.hashes
            and cache_pb2.PutResponse.FromString(answers[-1]).stored.blocks != STREAM_RECORDS
        ):
            raise DaemonError(f"Put: {cache_pb2.PutResponse.FromString(answers[-1])}")
        return STREAM_RECORDS * RECORD_BYTES / taken_s

    def streams(self, rounds: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, ours, raw in (("get", self.get, self.get_raw), ("put", self.put, self.put_raw)):
            for _ in range(WARM_UP_ROUNDS):
                ours(), raw()
            cpu_s = {side: -process.cpu_s() for side, process in self.processes.items()}
            pairs = [(ours(), raw()) for _ in range(rounds)]
            found[name] = {
                f"{side}cpu_ms_per_mib": round(
                    (process.cpu_s() + cpu_s[side]) * 1e3 / (rounds * STREAM_RECORDS * RECORD_BYTES >> 20), 3
                )
                for side, process in self.processes.items()
            } | {
                "bytes_per_s": round(statistics.median(a for a, _ in pairs)),
                "raw_bytes_per_s": round(statistics.median(b for _, b in pairs)),
                "share": round(statistics.median(a / b for a, b in pairs), 3),
            }
        return found

    # -- an engine beside it --

    def engine(self, target: str, rounds: int) -> dict[str, Any]:
        """An engine's lookups of 512 blocks, alone and beside a client that reads."""
        alone: list[float] = []
        beside: list[float] = []
        for _ in range(max(1, rounds // 2)):
            alone += self._window()
            with Process("benchmarks.grpc", "--reader", target, self.large.digest.hex()):
                beside += self._window()
        return {"alone": percentiles(alone), "beside_a_reader": percentiles(beside)}

    def _window(self) -> list[float]:
        seconds, hashes, end = [], self.hashes[:512], time.perf_counter() + WINDOW_S
        while (begun := time.perf_counter()) < end:
            self.local.lookup([self.small], hashes)
            seconds.append(time.perf_counter() - begun)
            time.sleep(0.001)
        return seconds


def get_request(digest: str) -> bytes:
    hashes = b"".join(named(STREAM_RECORDS, "large"))
    return cache_pb2.GetRequest(namespace=NamespaceSelector(digest=digest), hashes=hashes).SerializeToString()


def percentiles(seconds: list[float]) -> dict[str, float]:
    return {"p50_us": percentile_us(seconds, 0.5), "p99_us": percentile_us(seconds, 0.99)}


def read_for_ever(target: str, digest: str) -> None:
    """The reader's process."""
    channel: Any = grpc.insecure_channel(target, OPTIONS)
    get = channel.unary_stream(f"{SERVICE}Get")
    print("ready reader", flush=True)
    while True:
        for _ in get(get_request(digest)):
            pass


def measure(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The report. Raises DaemonError, ClientError."""
    arena_directory = choose_arena_path(None, "auto", ARENA_BYTES, "bench").parent
    load = Others()
    parts: dict[str, Callable[[], dict[str, Any]]]
    with (
        Daemon(
            scratch / "daemon", settings(arena_directory, ARENA_BYTES, dram__slab_bytes="16MiB")
        ) as daemon,
        Process("kvstore", "grpc", "--listen=127.0.0.1:0", f"--socket={daemon.socket_path}") as ours,
        Process("benchmarks.grpc", "--raw") as raw,
        daemon.client() as local,
    ):
        daemon.wait_until_prefaulted(ARENA_BYTES)
        bench = Bench(local, ours, raw)
        parts = {
            "lookups": lambda: bench.lookups(args.lookups),
            "streams": lambda: bench.streams(args.rounds),
            "engine": lambda: bench.engine(ours.ready["grpc"], args.rounds),
        }
        return {
            **{name: part() for name, part in parts.items() if name in (args.only or parts)},
            "other_cpu_percent": load.percent(),
            **facts(scratch, arena_directory),
        }


def show(report: dict[str, Any]) -> None:
    rows = [
        (
            blocks,
            *(f"{ways[name][p]:.0f}" for name in ("local", "grpc", "empty") for p in ("p50_us", "p99_us")),
        )
        for blocks, ways in report.get("lookups", {}).items()
    ]
    heads = [f"{name} {p}" for name in ("local", "grpc", "empty") for p in ("p50", "p99")]
    print_table("lookups, in microseconds", ["blocks", *heads], rows)
    streams = [
        (
            *(
                name,
                f"{s['bytes_per_s'] / 1e6:.0f}",
                f"{s['raw_bytes_per_s'] / 1e6:.0f}",
                f"{s['share']:.2f}",
            ),
            *(f"{s[f'{side}cpu_ms_per_mib']:.2f}" for side in ("", "raw_")),
        )
        for name, s in report.get("streams", {}).items()
    ]
    heads = ["", "ours", "raw", "share", "processor", "raw"]
    print_table(
        f"streams, in MB/s, and ms of the servers' processors per MiB; the aim is {AIM}", heads, streams
    )
    engine = [
        (name, f"{p['p50_us']:.0f}", f"{p['p99_us']:.0f}") for name, p in report.get("engine", {}).items()
    ]
    print_table("an engine's lookups, in microseconds", ["", "p50", "p99"], engine)


def main() -> int:
    """See `benchmarks.command.run`."""
    parser = parser_of("grpc", __doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lookups", type=int, default=2000)
    parser.add_argument(
        "--only", choices=("lookups", "streams", "engine"), nargs="*", help="in place of all three"
    )
    match sys.argv[1:]:  # processes of ours
        case ["--raw"]:
            import uvloop

            uvloop.run(Raw().serve())
        case ["--reader", target, digest]:
            read_for_ever(target, digest)
    return run(parser, measure, show)


if __name__ == "__main__":
    sys.exit(main())
