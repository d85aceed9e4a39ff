"""Reading a model's tensors from this node's files, for anyone: `open_model`.

    with open_model("qwen3-8b") as model:
        for name, tensor in model.items():             in the order of the bytes, file by file
            tensor.dtype, tensor.shape, tensor.view    "BF16", (4096, 4096), a read-only memoryview of the mapped file
        model["model.embed_tokens.weight"].torch()     a torch tensor over the same pages, nothing copied

What is read from disk is what is touched. Tensors of torch may be written to: that changes pages of this process, and no file.
A model stays on the disk as long as it is open here, or the process lives; views and tensors may be kept longer.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

from coldstart.blocks import Tree, slots
from coldstart.disk.filling import Run, is_true, runs_of
from coldstart.disk.home import MARK, MODELS, Home, Use, default_models_dir, name_of, parse_name
from coldstart.errors import FilesWrong
from coldstart.published.cutting import SAFETENSORS, TensorPlace, read_header
from replication.formats.manifests import Chunk, Manifest

if TYPE_CHECKING:
    import torch

VERIFY_THREADS: Final = 4
# Of safetensors → torch; what is not here has a view, and no tensor.
_DTYPES: Final = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F4": "float4_e2m1fn_x2", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip

_PACKED: Final = {"F4": 2}  # of these an element of torch holds so many, side by side in the last dimension

_NORESERVE: Final = 0x4000  # mmap has it from Python 3.13 on: what is written needs memory, not what is read


class Tensor:
    """One of a file that is mapped. dtype: as safetensors names it. view: its bytes, read-only."""

    def __init__(self, place: TensorPlace, memory: memoryview, where: str) -> None:
        self.dtype = place.dtype
        self.shape = place.shape
        self._memory = memory
        self._where = where

    @property
    def view(self) -> memoryview:
        return self._memory.toreadonly()

    def torch(self) -> torch.Tensor:
        """Over the same memory. Raises FilesWrong where torch has no such type, or its bytes are not as many as its shape says."""
        import torch

        dtype = getattr(torch, _DTYPES.get(self.dtype, ""), None)
        if dtype is None:
            raise FilesWrong(f"{self._where}: torch has no type for {self.dtype}; its bytes are in `view`")
        shape = list(self.shape)
        if packed := _PACKED.get(self.dtype):
            shape[-1:] = [last // packed for last in shape[-1:] if not last % packed]
        if math.prod(shape) * dtype.itemsize != len(self._memory):
            raise FilesWrong(
                f"{self._where}: {len(self._memory)} bytes are no {self.dtype} of shape {self.shape}"
            )
        if not len(self._memory):
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype).reshape(shape)


class OpenModel(Mapping[str, Tensor]):
    """Tensors by name, in the order of the bytes. path: of the directory. manifest: None of a directory that is not ours."""

    def __init__(self, path: Path, use: Use | None) -> None:
        """Raises FilesWrong, OSError."""
        self.path = path
        self.manifest = use.manifest if use is not None else None
        self._use = use
        self._tensors: dict[str, Tensor] = {}
        for file in sorted(path.glob(f"*{SAFETENSORS}")):
            for name, tensor in _tensors(file):
                if name in self._tensors:
                    raise FilesWrong(f"{file}: {name} is in another file, too")
                self._tensors[name] = tensor

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def close(self) -> None:
        """The revision may be evicted from now on; what was mapped stays readable. Idempotent."""
        if self._use is not None:
            self._use.close()

    def __enter__(self) -> OpenModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_model(name: str | Path, models_dir: Path | None = None, is_verified: bool = False) -> OpenModel:
    """The tensors of a model on this node. name: a directory with safetensors files, or NAME or NAME@REVISION of what is in
    `models_dir`, by default where the daemon keeps models.

    is_verified: every byte is read and compared first; only of models that were preloaded. Raises ModelError, OSError.
    """
    path = Path(name)
    if path.is_dir():
        use = _use_at(path.resolve())
    else:
        use = Home(models_dir or default_models_dir()).use(*parse_name(str(name)))
        path = use.path
    try:
        if is_verified:
            _verify(path, use)
        return OpenModel(path, use)
    except BaseException:
        if use is not None:
            use.close()
        raise


def untrue(root: Path, manifest: Manifest) -> list[Run]:
    """The runs of a revision's files whose bytes are not those of its chunks. Reads all of them; blocks. Raises OSError. Who asks
    has a `Use`, so that nobody takes them away meanwhile."""
    tree, largest = Tree(root), max((chunk.size_bytes for chunk in manifest.chunks), default=1)
    jobs = [(chunk, run) for chunk, runs in runs_of(manifest).items() for run in runs]
    ring = slots(VERIFY_THREADS, largest)

    def is_untrue(job: tuple[Chunk, Run]) -> bool:
        chunk, run = job
        slot = ring.pop()
        try:
            return not is_true(tree, chunk, run, slot)
        finally:
            ring.append(slot)

    with ThreadPoolExecutor(VERIFY_THREADS, "coldstart-verify") as threads:
        return [job[1] for job, is_wrong in zip(jobs, threads.map(is_untrue, jobs), strict=True) if is_wrong]


def _verify(path: Path, use: Use | None) -> None:
    if use is None:
        raise FilesWrong(f"{path}: nothing to verify it with: it was not preloaded")
    if wrong := untrue(path, use.manifest):
        name = name_of(use.manifest.model, use.manifest.revision)
        raise FilesWrong(
            f"{path / wrong[0].path}: damaged at byte {wrong[0].at}, and {len(wrong) - 1} places more:"
            f" kvstore model preload {name} --verify mends it"
        )


def _use_at(path: Path) -> Use | None:
    """Where it is a revision in a models' directory."""
    if not (path / MARK).is_file() or len(path.parents) < 3 or not path.parts[-3].startswith(MODELS):
        return None
    return Home(path.parents[2]).use(path.parts[-3].removeprefix(MODELS), path.name)


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Names, and tensors over one mapping of the file."""
    fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # of a pipe, too
    try:
        header = read_header(fd)
        if header is None:
            raise FilesWrong(f"{file}: no safetensors file, or cut off")
        memory = memoryview(mmap.mmap(fd, 0, mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE))
    finally:
        os.close(fd)
    for place in header.tensors:
        yield place.name, Tensor(place, memory[place.start : place.end], f"{file}: {place.name}")
