"""A digest of a model's weights: two checkpoints of equal shapes and different values differ.

    every tensor of every file ── xxh3_128 ──┐
    its name, dtype and shape ───────────────┴─ sorted by name ──▶ xxh3_128 ─▶ weights digest

Tensors count, and not how they are laid out: the same tensors in other files, under other names of files, in another
order, are the same weights. A file that is no safetensors counts as a whole, with its name.

Every byte is read, because a fine-tune may change a few tensors and nothing else. That costs one pass over the files
at the speed of the disk, once: what was read is remembered under the user's cache directory, and believed as long as

    size, modification and change time, inode and device      are what they were, and
    the head of the file and pages spread over it             (a sample of a few hundred KiB, read each time)

So a file is read again also where the modification time was kept (`tar`, layers of images, `cp -p`) or the clock was set
back. Not noticed is a change that brings all five numbers back to the nanosecond, and no byte of the sample. Files that
change while they are read have no digest.

A file may be in memory instead of on the disk, where it cannot change (`Held`): its digest is the same.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from connectors import constants as limits
from connectors.constants import KIB, MIB

WEIGHTS_CHUNK_BYTES = 1 * MIB
WEIGHTS_THREADS = 8
WEIGHTS_READS_MAX = 3  # of a file that changes while it is read
WEIGHTS_HEADER_BYTES_MAX = 100 * MIB  # of a safetensors file; its own library reads no longer one
WEIGHTS_SAMPLE_HEAD_BYTES = 256 * KIB  # of a file whose digest is remembered, read at each start
WEIGHTS_SAMPLE_PAGES, WEIGHTS_SAMPLE_PAGE_BYTES = 32, 4 * KIB
WEIGHTS_SETTLED_S = 0.05  # after which a further change of a file gets another change time

Part = tuple[str, str, str]  # name, what it is (dtype and shape), digest of its bytes
Facts = list[str | int]


class WeightsUnknown(Exception):
    """There is no digest of these weights; the message says why."""


class Held(NamedTuple):
    """A file in memory, verified. path: where it would lie. content: names all that it came with, for ever."""

    path: Path
    view: memoryview
    content: str


def weights_digest(files: Sequence[Path | Held], cache: Path, stop: threading.Event) -> str:
    """32 hex digits over what is in the files, in any order. Blocks for as long as reading takes. Raises OSError when a file
    cannot be read; WeightsUnknown when one changes meanwhile, when two hold a tensor of the same name with different contents
    (which of them counts is the loader's to say), and when `stop` is set."""
    with ThreadPoolExecutor(WEIGHTS_THREADS, thread_name_prefix="kvstore-weights") as pool:
        of_files = list(pool.map(lambda file: _parts(file, cache, stop), files))
    known: dict[str, Part] = {}
    for file, parts in zip(files, of_files, strict=True):
        for part in parts:
            path = file.path if isinstance(file, Held) else file
            named = part if part[0] else (f"file {path.name}", *part[1:])
            if known.setdefault(named[0], named) != named:
                raise WeightsUnknown(f"{named[0]} is in two files, with different contents")
    total = xxhash.xxh3_128()
    for name in sorted(known):
        total.update(json.dumps(known[name]).encode())
    return total.hexdigest()


def default_cache_dir() -> Path:
    """Where digests of weight files are remembered when nothing else is said."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvstore"


# ---- one file --------------------------------------------------------------------------


def _parts(file: Path | Held, cache: Path, stop: threading.Event) -> list[Part]:
    """What is in a file: as it is remembered, or read now."""
    if isinstance(file, Held):
        return _parts_held(file, cache, stop)
    where = file.resolve()
    note = cache / "weights" / f"{xxhash.xxh3_128_hexdigest(os.fsencode(where))}.json"
    known = _recall(note, file_facts(where), lambda: _sample(where))
    if known is not None:
        return known
    for _ in range(WEIGHTS_READS_MAX):
        _let_settle(where)
        before = file_facts(where)
        parts = _read_through(where, stop)
        sample = _sample(where)
        if file_facts(where) == before:
            write_note(note, {"facts": before, "sample": sample, "parts": parts})
            return parts
    raise WeightsUnknown(f"{file} changed while it was read")


def _parts_held(file: Held, cache: Path, stop: threading.Event) -> list[Part]:
    facts: Facts = [file.content, file.path.name, len(file.view)]
    note = cache / "weights" / f"{xxhash.xxh3_128_hexdigest(json.dumps(facts).encode())}.json"
    known = _recall(note, facts, lambda: "")
    if known is None:
        known = list(_parts_in(file.view, stop))
        write_note(note, {"facts": facts, "sample": "", "parts": known})
    return known


def _parts_in(view: memoryview, stop: threading.Event) -> Iterator[Part]:
    """As `_read_through`, and nothing is copied."""
    header_bytes = min(int.from_bytes(view[:8], "little"), WEIGHTS_HEADER_BYTES_MAX)
    tensors, at = _tensors(io.BytesIO(view[: 8 + header_bytes]), len(view))
    if tensors is None:
        tensors, at = [("", str(len(view)), len(view))], 0
    for name, kind, count in tensors:
        digest = xxhash.xxh3_128()
        for start in range(at, at + count, WEIGHTS_CHUNK_BYTES):
            if stop.is_set():
                raise WeightsUnknown("stopped while reading weights")
            digest.update(view[start : min(at + count, start + WEIGHTS_CHUNK_BYTES)])
        at += count
        yield name, kind, digest.hexdigest()


def file_facts(path: Path) -> Facts:
    """What is the same as long as the file does not change."""
    stat = path.stat()
    return [str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]


def _let_settle(path: Path) -> None:
    """Wait until a further change would get another change time: file systems take it from this clock, as it was at
    its last tick."""
    age_s = time.clock_gettime(time.CLOCK_REALTIME) - path.stat().st_ctime
    if 0 <= age_s < WEIGHTS_SETTLED_S:
        time.sleep(WEIGHTS_SETTLED_S - age_s)


def _sample(path: Path) -> str:
    """Of the head of the file, where safetensors says what is in it, and of pages spread over the rest."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        size, page = os.fstat(file.fileno()).st_size, WEIGHTS_SAMPLE_PAGE_BYTES
        digest.update(os.pread(file.fileno(), WEIGHTS_SAMPLE_HEAD_BYTES, 0))
        for index in range(WEIGHTS_SAMPLE_PAGES):
            place = max(0, size - page) * index // (WEIGHTS_SAMPLE_PAGES - 1)
            digest.update(os.pread(file.fileno(), page, place))
    return digest.hexdigest()


def _read_through(path: Path, stop: threading.Event) -> list[Part]:
    """Every byte of it, as tensors where it is safetensors, otherwise as one part without a name."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        tensors, start = _tensors(file, size)
        if tensors is None:
            file.seek(0)
            return [("", str(size), _read_bytes(file, size, stop))]
        file.seek(start)
        return [(name, kind, _read_bytes(file, count, stop)) for name, kind, count in tensors]


def _read_bytes(file: Any, count: int, stop: threading.Event) -> str:
    """Digest of the next so many bytes of it."""
    digest = xxhash.xxh3_128()
    chunk = memoryview(bytearray(min(count, WEIGHTS_CHUNK_BYTES)))
    while count:
        if stop.is_set():
            raise WeightsUnknown("stopped while reading weights")
        got = file.readinto(chunk[:count])
        if not got:
            raise WeightsUnknown(f"{file.name} became shorter while it was read")
        digest.update(chunk[:got])
        count -= got
    return digest.hexdigest()


def _tensors(file: Any, size: int) -> tuple[list[tuple[str, str, int]] | None, int]:
    """Name, kind and size of the tensors of a safetensors file, in the order in which they lie in it, and where they
    begin; None for any other file, and where they do not lie one behind the other. What its metadata says counts
    as a tensor without bytes: some loaders go by it."""
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(size - 8, WEIGHTS_HEADER_BYTES_MAX):
        return None, 0
    try:
        header = json.loads(file.read(length))
        metadata = header.pop("__metadata__", None) or {}
        found = [(*map(int, entry["data_offsets"]), name, entry) for name, entry in header.items()]
        tensors, end = [], 0
        for first, last, name, entry in sorted(found, key=lambda item: item[:2]):
            if first != end or last < first:
                return None, 0
            tensors.append((name, json.dumps([entry["dtype"], entry["shape"]]), last - first))
            end = last
        said = {key: value for key, value in metadata.items() if key != "format"}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None, 0
    if said:
        tensors.append((f"metadata {json.dumps(said, sort_keys=True)}", "", 0))
    return (tensors, 8 + length) if 8 + length + end == size else (None, 0)


# ---- what is remembered ----------------------------------------------------------------


def _recall(note: Path, facts: Facts, sample: Callable[[], str]) -> list[Part] | None:
    """What a note says of a file that is still the same."""
    said = read_note(note)
    try:
        if said["facts"] != facts or said["sample"] != sample():
            return None
        return [(str(name), str(kind), str(digest)) for name, kind, digest in said["parts"]]
    except (OSError, ValueError, TypeError, KeyError):
        return None


def read_note(note: Path) -> dict[str, Any]:
    """Empty where there is none, or it is damaged: what it is about is then read again."""
    try:
        said = json.loads(note.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def write_note(note: Path, document: dict[str, Any]) -> None:
    """New files appear whole; a cache that cannot be written only costs time."""
    with contextlib.suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=note.parent, delete=False) as file:
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, note)


def known_as(cache: Path, live: str, name: str) -> str:
    """What weights are called that ranks compute with, as a digest of theirs says: `name`, unless a note has another one.
    The first engine of this cache directory that has them writes it, whether it was started with them or got them later."""
    note = cache / "weights" / f"live-{live}.json"
    said = read_note(note).get("name")
    if isinstance(said, str) and said:
        return said
    write_note(note, {"name": name})
    return name


class DigestInBackground:
    """Starts reading at once; `result` is None until all files are read, and stays None when that fails."""

    def __init__(self, work: Callable[[threading.Event], str], failed: Callable[[Exception], None]) -> None:
        self.result: str | None = None
        self._stop = threading.Event()
        self._work, self._failed = work, failed
        self._thread = threading.Thread(target=self._run, name="kvstore-weights", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> str | None:
        """The result, waiting for it at most so long."""
        self._thread.join(seconds)
        return self.result

    @property
    def running(self) -> bool:
        """Whether there may still be a result."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop reading; idempotent."""
        self._stop.set()
        self._thread.join(limits.THREAD_JOIN_S)

    def _run(self) -> None:
        try:
            self.result = self._work(self._stop)
        except Exception as error:  # noqa: BLE001 - whatever it is, the connector declines and says why
            if not self._stop.is_set():
                self._failed(error)
