"""A digest of a model's weights: two checkpoints of equal shapes and different values differ.

    model directory ── every weight file, whole ── xxh3_128 ──┐
                       (name, size, digest), sorted by name ──┴─▶ xxh3_128 ─▶ weights digest

Every byte is read, because a fine-tune may change a few tensors and nothing else. That costs
one pass over the files at the speed of the disk, once: the digest of a file is remembered
under the user's cache directory, by path, size, modification time and inode. Whoever changes
a file and sets its old modification time again defeats that, and nothing else does.

Not digested: LoRA adapters (vLLM puts their name and path into every block hash: an adapter
replaced under the same name and path is not seen), and weights that an engine changes while
it runs (see `connectors/vllm/live_weights.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from connectors import constants as limits

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")


class WeightsUnknown(Exception):
    """There are no weight files to read; the message says where they were looked for."""


def weight_files(model: str, revision: str | None) -> list[Path]:
    """The weight files of a local directory, of one file, or of a model in the Hugging Face cache.

    Raises WeightsUnknown. Never asks the network.
    """
    root = Path(model)
    if root.is_file():
        return [root]
    if not root.is_dir():
        root = _snapshot(model, revision)
    found = sorted(path for path in _walk(root) if path.suffix in WEIGHT_SUFFIXES)
    if not found:
        raise WeightsUnknown(f"no weight files ({', '.join(WEIGHT_SUFFIXES)}) under {root}")
    return found


def _walk(root: Path) -> Iterator[Path]:
    for count, path in enumerate(root.rglob("*")):
        if count >= limits.WEIGHTS_FILES_MAX:
            raise WeightsUnknown(f"more than {limits.WEIGHTS_FILES_MAX} files under {root}")
        if path.is_file():
            yield path


def _snapshot(model: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception as error:
        raise WeightsUnknown(f"{model} is neither a directory nor in the local model cache") from error


def weights_digest(files: list[Path], cache: Path, stop: threading.Event) -> str:
    """32 hex digits over names, sizes and contents. Blocks for as long as reading takes.

    Raises OSError when a file cannot be read, WeightsUnknown when `stop` is set meanwhile.
    """
    root = Path(os.path.commonpath([path.parent for path in files]))
    with ThreadPoolExecutor(limits.WEIGHTS_THREADS, thread_name_prefix="kvstore-weights") as pool:
        digests = list(pool.map(lambda path: _file_digest(path, cache, stop), files))
    total = xxhash.xxh3_128()
    for path, digest in zip(files, digests, strict=True):
        total.update(json.dumps([path.relative_to(root).as_posix(), path.stat().st_size, digest]).encode())
    return total.hexdigest()


def default_cache_dir() -> Path:
    """Where digests of weight files are remembered when nothing else is said."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvstore"


def _file_digest(path: Path, cache: Path, stop: threading.Event) -> str:
    stat = path.stat()
    where = str(path.resolve())
    facts: list[str | int] = [where, stat.st_size, stat.st_mtime_ns, stat.st_ino]
    note = cache / "weights" / f"{xxhash.xxh3_128_hexdigest(where.encode())}.json"
    known = _recall(note, facts)
    if known is None:
        known = _read_through(path, stop)
        _remember(note, facts, known)
    return known


def _read_through(path: Path, stop: threading.Event) -> str:
    digest = xxhash.xxh3_128()
    chunk = bytearray(limits.WEIGHTS_CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            if stop.is_set():
                raise WeightsUnknown("stopped while reading weights")
            digest.update(memoryview(chunk)[:count])
    return digest.hexdigest()


def _recall(note: Path, facts: list[str | int]) -> str | None:
    try:
        said = json.loads(note.read_bytes())
        known = said["digest"] if said["facts"] == facts else None
    except (OSError, ValueError, TypeError, KeyError):
        return None  # not noted yet, or damaged: reading the weights again is the answer to both
    return known if isinstance(known, str) and len(known) == 32 else None


def _remember(note: Path, facts: list[str | int], digest: str) -> None:
    """New files appear whole; a cache that cannot be written only costs time."""
    with contextlib.suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=note.parent, delete=False) as file:
            json.dump({"facts": facts, "digest": digest}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, note)


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
