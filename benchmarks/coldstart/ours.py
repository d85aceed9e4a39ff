"""What the bucket, the disk and the memory do by themselves, and what models make of it: each a way of benchmarks.coldstart.

s3_raw         every chunk by a plain client: signed addresses, a socket for each thread, bytes received and thrown away
disk_write     as many bytes as the model has to files that were allocated before, O_DIRECT, then synced
disk_read      the model's files, O_DIRECT
preload        the model from the bucket to an empty directory, verified and synced, as `kvstore model preload` does it
load_nvme      its tensors from that directory, verified, as the load format does it
memcpy         two threads, memory on huge pages that was touched before
dram_attach    the model in DRAM mapped, and a view of each of its tensors
dram_copy      each of its tensors copied out of there, by two threads
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import obstore

from benchmarks.coldstart.bucket import Bucket
from benchmarks.coldstart.child import Facts, Work, serve
from benchmarks.errors import BenchError
from coldstart.blocks import allocate
from coldstart.disk.home import Home
from coldstart.disk.preload import preload
from coldstart.loading.loading import BUFFER_BYTES, Loading
from coldstart.loading.resident import Image
from coldstart.loading.start_dir import open_revision
from coldstart.loading.weight_plan import Plan
from kvstore.client import models
from kvstore.tools.bench.memory import Region
from tiers.copying import copy

MIB = 1 << 20
THROWN_BYTES = 1 * MIB  # received into, again and again
DISK_BYTES = 16 * MIB  # of a request
ADDRESS_S = 900
ANSWER_S = 20


def timed(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def by_threads(count: int, work: Callable[[int], None]) -> None:
    """One thread for each number. Raises the first failure."""
    failures: list[BaseException] = []

    def tried(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=tried, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


# ---- the limits -------------------------------------------------------------------------------


def s3_raw(facts: Facts) -> Work:
    bucket, count = Bucket(**facts["bucket"]), int(os.environ["CONNECTIONS"])
    revision = open_revision(Path(facts["revision"]))
    assert revision is not None
    chunks = revision.manifest.chunks
    buffers = [bytearray(THROWN_BYTES) for _ in range(count)]

    def work() -> float:
        life = timedelta(seconds=ADDRESS_S)
        signed = obstore.sign(bucket.store(), "GET", [chunk.name for chunk in chunks], life)
        jobs = iter([(urlsplit(url), chunk.size_bytes) for url, chunk in zip(signed, chunks, strict=True)])
        return timed(lambda: by_threads(count, lambda number: _receive(jobs, memoryview(buffers[number]))))

    return work


def _receive(jobs: Iterator[tuple[SplitResult, int]], buffer: memoryview) -> None:
    """Of one connection. Raises OSError, BenchError."""
    connection: socket.socket | None = None
    for url, size_bytes in jobs:
        if connection is None:
            assert url.hostname is not None
            connection = socket.create_connection((url.hostname, url.port or 80))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", ANSWER_S, 0))
        words = f"GET {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\nRange: bytes=0-{size_bytes - 1}\r\n\r\n"
        connection.sendall(words.encode())
        head = b""
        while b"\r\n\r\n" not in head and (more := connection.recv(4096)):
            head += more
        head, _, body = head.partition(b"\r\n\r\n")
        if b" 206 " not in head.partition(b"\r\n")[0]:
            raise BenchError(f"{url.netloc} answers {head[:200]!r}")
        left = size_bytes - len(body)
        while left:
            count = connection.recv_into(buffer[:left], 0, socket.MSG_WAITALL)
            if not count:
                raise BenchError(f"{url.netloc}: {left} bytes did not come")
            left -= count
        if b"connection: close" in head.lower():
            connection.close()
            connection = None
    if connection is not None:
        connection.close()


def disk_write(facts: Facts) -> Work:
    path, size_bytes = Path(facts["scratch"]) / "raw", facts["size_bytes"] & -mmap.PAGESIZE
    views = _disk_views()

    def write() -> None:
        _through(path, os.O_WRONLY, os.pwrite, size_bytes, views)
        _sync(path)

    def work() -> float:
        allocate(path, size_bytes)
        try:
            return timed(write)
        finally:
            path.unlink()

    return work


def disk_read(facts: Facts) -> Work:
    files, views = _weights(facts), _disk_views()

    def preadv(fd: int, view: memoryview, at: int) -> int:
        return os.preadv(fd, [view], at)

    def read() -> None:
        for path in files:
            _through(path, os.O_RDONLY, preadv, path.stat().st_size, views)

    def work() -> float:
        return timed(read)

    return work


def _disk_views() -> list[memoryview]:
    return Region(int(os.environ["THREADS"]), DISK_BYTES).views


def _through(
    path: Path,
    flags: int,
    move: Callable[[int, memoryview, int], int],
    size_bytes: int,
    views: list[memoryview],
) -> None:
    fd = os.open(path, flags | os.O_DIRECT)
    places = iter(range(0, size_bytes, DISK_BYTES))

    def some(number: int) -> None:
        for at in places:
            wanted = min(DISK_BYTES, size_bytes - at)
            view = views[number][: -(-wanted // mmap.PAGESIZE) * mmap.PAGESIZE]
            if move(fd, view, at) < wanted:
                raise BenchError(f"{path}: less than {wanted} bytes at {at}")

    try:
        by_threads(len(views), some)
    finally:
        os.close(fd)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def memcpy(facts: Facts) -> Work:
    size_bytes: int = facts["size_bytes"]
    pieces = -(-size_bytes // DISK_BYTES)

    def work() -> float:
        source, target = Region(pieces, DISK_BYTES), Region(pieces, DISK_BYTES)
        numbers = iter(range(pieces))

        def some(_: int) -> None:
            for number in numbers:
                ctypes.memmove(target.addresses[number], source.addresses[number], DISK_BYTES)

        return timed(lambda: by_threads(2, some)) * size_bytes / (pieces * DISK_BYTES)

    return work


# ---- models -----------------------------------------------------------------------------------


def preloaded(facts: Facts) -> Work:
    bucket, home = Bucket(**facts["bucket"]), Path(facts["scratch"]) / "preloaded"

    def work() -> float:
        try:
            return timed(lambda: asyncio.run(preload(bucket.objects(), Home(home), facts["model"])))
        finally:
            shutil.rmtree(home)

    return work


def load_nvme(facts: Facts) -> Work:
    import torch  # noqa: F401 - before its time begins

    def load() -> None:
        revision = open_revision(Path(facts["revision"]))
        assert revision is not None
        plan = Plan([revision.weight_file(path) for path in _weights(facts)], lambda name: True, BUFFER_BYTES)
        loading = Loading(plan, revision.chunks(plan, True))
        for _ in loading.tensors():
            pass

    return lambda: timed(load)


def dram_attach(facts: Facts) -> Work:
    def work() -> float:
        began_s = time.perf_counter()
        model = _attached(facts)
        count = sum(1 for _ in _in(Image(model.view)))
        took_s = time.perf_counter() - began_s
        model.close()
        assert count
        return took_s

    return work


def dram_copy(facts: Facts) -> Work:
    def work() -> float:
        size_bytes: int = facts["size_bytes"]
        target, at = Region(1, size_bytes).views[0], 0
        with _attached(facts) as model:
            jobs: list[tuple[memoryview, memoryview]] = []
            places: list[tuple[int, int]] = []
            for place, view in _in(Image(model.view)):
                jobs.append((target[at : at + len(view)], view))
                places.append((place, len(view)))
                at += len(view)
            return timed(lambda: copy(jobs, lambda n: model.touch(*places[n]))) * size_bytes / at

    return work


def _attached(facts: Facts) -> models.ResidentModel:
    return models.attach(facts["model"], facts["revision_name"], facts["socket"])


def _in(image: Image) -> Iterator[tuple[int, memoryview]]:
    """Every tensor, and where it begins in the image."""
    for path in image.weights():
        for tensor, view in image.tensors(path):
            yield image.place(path) + tensor.start, view


def _weights(facts: Facts) -> list[Path]:
    return sorted(Path(facts["revision"]).glob("*.safetensors"))


if __name__ == "__main__":
    serve(
        {
            "s3_raw": s3_raw,
            "disk_write": disk_write,
            "disk_read": disk_read,
            "memcpy": memcpy,
            "preload": preloaded,
            "load_nvme": load_nvme,
            "dram_attach": dram_attach,
            "dram_copy": dram_copy,
        }
    )
