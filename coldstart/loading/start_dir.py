"""Start directories: what an engine needs of a model before its weights are there, so that it starts while they stream.

    <dir>/.starts/<model>@<revision>/config.json, tokenizer.json ...     small files, whole
    <dir>/.starts/<model>@<revision>/model-00001.safetensors             the header alone: eight bytes and JSON, no data
    <dir>/.starts/<model>@<revision>/.kvstore-start                      what it stands for, and how it comes: `Start`

Engines read headers before they load anything: without them one with tied embeddings, whose checkpoint has a head of its own,
computes wrong tokens and says nothing. A file that ends behind its header is refused by whatever reads it as weights; a file
with holes would be zeros that look like weights, so there is none.

`open_revision` is how a loader looks at a directory, whichever it is; pieces come from the files under way, or from the whole
ones once they are.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import msgspec
import xxhash
from msgspec import Meta

from coldstart.blocks import RunsFile
from coldstart.disk.folders import shared
from coldstart.disk.home import Home, name_of, read_mark, said_at
from coldstart.disk.sources import THIS_DISK, true_chunk
from coldstart.errors import FilesWrong, ModelError
from coldstart.loading.loading import Chunks, WholeFiles, weight_file
from coldstart.loading.weight_plan import Piece, Plan, WeightFile
from coldstart.published.cutting import HEADER_BYTES_MAX, SAFETENSORS
from replication.errors import Damaged
from replication.formats.manifests import MANIFEST_BYTES_MAX, File, Manifest, decode, encode
from replication.formats.sealed import Sealed
from tiers.bucket.objects import Objects
from tiers.reading import Unreadable, read_bytes
from tiers.sizes import format_bytes

START: Final = ".kvstore-start"
# Other files of weights: no part of a start directory.
LEFT_OUT: Final = (
    ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".onnx_data", ".h5", ".msgpack", ".npz", ".tflite",
)  # fmt: skip
SMALL_BYTES_MAX: Final = 512 << 20  # of all that an engine needs before weights: tokenizers have some 20 MB
_LOOK_S: Final = 0.02  # between looks for a piece
_AGAIN_S: Final = 0.2  # before one is read again whose bytes were there, and not yet true
_JOIN_S: Final = 15.0  # after which a rank that waits begins a preload itself, or joins one: whoever should have may be gone
_SAID_BYTES_MAX: Final = 64 << 10

_used: dict[Path, int] = {}  # revisions that this process holds, until it ends


class _Start(msgspec.Struct, frozen=True, array_like=True):
    """manifest: encoded. home: the models' directory that the revision comes to. arguments: of `kvstore model preload`, behind
    its name."""

    manifest: bytes
    home: Annotated[str, Meta(max_length=4096)]
    arguments: Annotated[list[str], Meta(max_length=64)]


_START: Final = Sealed(b"KVSTART1", _Start, MANIFEST_BYTES_MAX)


class Revision:
    """A whole one, in this directory. name: for people."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory, self.manifest = directory, manifest
        self.place = directory
        self.name = name_of(manifest.model, manifest.revision)
        self._files = {file.path: file for file in manifest.files}

    def weight_file(self, path: Path) -> WeightFile:
        """What is in a file of the directory. Raises FilesWrong, ChunkDamaged, OSError."""
        return weight_file(path, self._file(path), self.manifest)

    def chunks(self, plan: Plan, begins: bool) -> Chunks:
        """Where pieces are read from. begins: whether this rank has them preloaded where they are not there."""
        return WholeFiles(plan.paths)

    def is_whole(self) -> bool:
        return True

    def fetched(self) -> str:
        """From where, in words."""
        return "nothing: it was on this disk"

    def by_source(self, read_bytes: int) -> dict[str, int]:
        """Of what a rank has read: bytes by where they came from onto this node, or from within it."""
        return {THIS_DISK: read_bytes}

    def at_home(self, source: Any) -> Any:
        """The same source of a loader, of whole files."""
        moved = copy.copy(source)
        moved.model_or_path = str(self.place)
        return moved

    def keep(self) -> None:
        """It was loaded from elsewhere, and should be on this disk, too: KV is named by what is there."""

    def close(self) -> None:
        """The load is over. The revision is used until the process ends."""
        with suppress(OSError):
            use(self.place)

    def _file(self, path: Path) -> File:
        """Raises FilesWrong."""
        name = os.path.relpath(path, self.directory)
        if name not in self._files:
            raise FilesWrong(f"{path}: not a file of {self.name}")
        return self._files[name]


class Starting(Revision):
    """One that a start directory stands for: whole, under way, or not even begun."""

    def __init__(self, directory: Path, start: _Start) -> None:
        """Raises Damaged."""
        super().__init__(directory, decode(start.manifest, str(directory / START)))
        home, names = Home(Path(start.home)), (self.manifest.model, self.manifest.revision)
        self.place, self.under_way = home.place(*names), home.place_under_way(*names)
        self._order = [
            sys.executable,
            "-P",
            "-m",
            "kvstore",
            "model",
            "preload",
            self.name,
            "-o",
            "json",
            *start.arguments,
            f"--set=models.dir={start.home}",  # whatever this engine's environment says
        ]
        self._preload: subprocess.Popen[bytes] | None = None
        self._answer: Any = None
        self._errors: Any = None
        self._by_source: dict[str, int] = {}
        self._was_missing = not self.is_whole()
        self._guard = threading.Lock()

    def weight_file(self, path: Path) -> WeightFile:
        found = weight_file(path, self._file(path), self.manifest, is_header_alone=True)
        return found._replace(path=self.place / os.path.relpath(path, self.directory))

    def chunks(self, plan: Plan, begins: bool) -> Chunks:
        if self.is_whole():
            return WholeFiles(plan.paths)
        if begins:
            self.begin()
        return Following(self, [path.relative_to(self.place) for path in plan.paths])

    def fetched(self) -> str:
        sources = ", ".join(f"{source} {size:,} bytes" for source, size in sorted(self._by_source.items()))
        return sources or ("by a preload" if self._was_missing else super().fetched())

    def by_source(self, read_bytes: int) -> dict[str, int]:
        """What came by the preload counts once: for the rank that began it."""
        if not self._was_missing:
            return super().by_source(read_bytes)
        return dict(self._by_source) if self._preload is not None else {}

    def at_home(self, source: Any) -> Any:
        """When it is whole. Raises ModelError."""
        while not self.is_whole():
            self.look()
            time.sleep(_LOOK_S)
        return super().at_home(source)

    def is_whole(self) -> bool:
        return self.place.is_dir()

    def begin(self) -> None:
        """Have it preloaded by a process of its own, which joins one that does so already. Raises OSError."""
        with self._guard:
            if self._preload is None:
                self._answer = tempfile.TemporaryFile()  # noqa: SIM115 - open for as long as the process
                self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as well
                self._preload = subprocess.Popen(
                    self._order,
                    stdin=subprocess.DEVNULL,
                    stdout=self._answer,
                    stderr=self._errors,
                    start_new_session=True,  # it goes on when the engine is stopped: somebody will want the model again
                )

    def look(self) -> None:
        """How far it is. Raises ModelError where it will not come."""
        if (said := said_at(self.under_way)) is not None:
            self._by_source = said.by_source
        ended = None if self._preload is None else self._preload.poll()
        if ended == 0 and not self.is_whole():
            raise ModelError(f"{self.name}: has left {self.place.parent} again")
        if ended == 0:
            self._answer.seek(0)
            with suppress(ValueError):
                self._by_source = {
                    source: size
                    for source, size in json.loads(self._answer.read(_SAID_BYTES_MAX))["by_source"].items()
                    if size
                }
        if ended:
            self._errors.seek(0)
            lines = self._errors.read(_SAID_BYTES_MAX).decode(errors="replace").strip().splitlines()
            raise ModelError(f"{self.name}: cannot be preloaded: {lines[-1] if lines else 'it was killed'}")

    def keep(self) -> None:
        if not self.is_whole():
            self.begin()

    def close(self) -> None:
        with suppress(ModelError):
            self.look()
        if self.is_whole():
            super().close()


class Following:
    """Pieces of files that are being filled: each is there when its bytes are true."""

    def __init__(self, revision: Starting, names: Sequence[Path]) -> None:
        self._revision, self._names = revision, names
        self._open: dict[int, RunsFile] = {}
        self._replaced: list[RunsFile] = []
        self._guard = threading.Lock()

    def read(self, piece: Piece, view: memoryview, stopped: Callable[[], bool]) -> bool:
        begun_s = time.monotonic()
        while not stopped():
            is_whole = self._revision.is_whole()  # before the bytes are looked at: then they must be true
            file = self._file(piece.file)
            is_filled = file is not None and _is_filled(file.fd, piece.at, len(view))
            if file is not None and is_filled:
                if file.read(view, piece.at) and xxhash.xxh3_128_digest(view) == piece.chunk.checksum:
                    return True
                if is_whole:
                    return False
            self._revision.look()
            if time.monotonic() - begun_s > _JOIN_S:
                self._revision.begin()
            time.sleep(_AGAIN_S if is_filled else _LOOK_S)
        return False

    def close(self) -> None:
        with self._guard:
            for file in (*self._open.values(), *self._replaced):
                file.close()
            self._open, self._replaced = {}, []

    def _file(self, number: int) -> RunsFile | None:
        """As it lies now: it may have been filled anew, and others may still read the one before."""
        with self._guard:
            held = self._open.get(number)
            for folder in (self._revision.place, self._revision.under_way):
                with suppress(FileNotFoundError):
                    path = folder / self._names[number]
                    if held is None or not os.path.samestat(os.fstat(held.fd), path.stat()):
                        self._replaced += [] if held is None else [held]
                        held = self._open[number] = RunsFile(path)
                    break
            return held


def _is_filled(fd: int, at: int, size_bytes: int) -> bool:
    """Whether all of a run may have been written. Raises OSError."""
    try:
        return os.lseek(fd, at, os.SEEK_DATA) == at and os.lseek(fd, at, os.SEEK_HOLE) >= at + size_bytes
    except OSError:
        return False  # nothing from here on


def use(directory: Path) -> None:
    """Hold a revision until this process ends: nobody evicts it. Blocks while somebody is about to. Raises FilesWrong, OSError."""
    directory = directory.resolve()  # a link to it is held as well
    if directory not in _used and (fd := shared(directory)) is not None:
        _used[directory] = fd


def open_revision(directory: Path) -> Revision | None:
    """What a directory is a revision of, whole or to come; None of any other directory, and of what is none. Raises FilesWrong."""
    if not directory.is_dir():
        return None
    manifest = read_mark(directory)
    if manifest is not None:
        use(directory)
        return Revision(directory, manifest)
    mark = directory / START
    try:
        start = _START.unseal(read_bytes(mark, MANIFEST_BYTES_MAX, follow=False), str(mark))
        found = Starting(directory, start)
    except (Unreadable, Damaged) as error:
        if isinstance(error, Unreadable) and error.is_missing:
            return None
        raise FilesWrong(str(error)) from error
    if directory.resolve() != _place(Path(start.home), found.manifest).resolve():  # it says what is run
        raise FilesWrong(f"{mark}: not of this place: kvstore model start {found.name}")
    use(directory)
    return found


def _place(home: Path, manifest: Manifest) -> Path:
    return Home(home).place_of_start(manifest.model, manifest.revision)


# ---- making one -----------------------------------------------------------------------------


async def make_start(objects: Objects, manifest: Manifest, home: Path, arguments: Sequence[str]) -> Path:
    """A start directory of a revision that is in a bucket. arguments: with which `kvstore model preload` finds that bucket. It is there
    whole or not at all; one that is there with the same files stays. Raises FilesWrong, ChunkDamaged, ObjectError, OSError."""
    if not any(file.path.endswith(SAFETENSORS) for file in manifest.files):
        _refuse(manifest, "it has no safetensors")
    needed = [file for file in manifest.files if not file.path.endswith(LEFT_OUT)]
    small_bytes = sum(file.size_bytes for file in needed if not file.path.endswith(SAFETENSORS))
    if small_bytes > SMALL_BYTES_MAX:
        _refuse(
            manifest,
            f"its files beside the weights have {format_bytes(small_bytes)} of {format_bytes(SMALL_BYTES_MAX)}",
        )
    with Home(home).new_start(manifest.model, manifest.revision) as fresh:
        for file in needed:
            path = fresh / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(await _start_of(objects, manifest, file))
        (fresh / START).write_bytes(_START.seal(_Start(encode(manifest), str(home), list(arguments))))
    return _place(home, manifest)


async def _start_of(objects: Objects, manifest: Manifest, file: File) -> bytes:
    """All of a small file, and the header of one with weights."""
    content, wanted = bytearray(), file.size_bytes
    is_weights = file.path.endswith(SAFETENSORS)
    for _, chunk in manifest.chunks_of(file):
        if len(content) >= wanted:
            break
        content += await true_chunk(objects, chunk)
        if is_weights and len(content) >= 8:
            header_bytes = int.from_bytes(content[:8], "little")
            if header_bytes > min(HEADER_BYTES_MAX, file.size_bytes - 8):
                _refuse(
                    manifest,
                    f"{file.path} is no safetensors file: its header would have {header_bytes} bytes",
                )
            wanted = 8 + header_bytes
    return bytes(content[:wanted])


def _refuse(manifest: Manifest, why: str) -> NoReturn:
    name = name_of(manifest.model, manifest.revision)
    raise FilesWrong(f"{name}: an engine cannot start before it is here: {why}: kvstore model preload {name}")
