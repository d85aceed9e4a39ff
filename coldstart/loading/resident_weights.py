"""Loading from DRAM: the weights of a revision that this node has in memory, as tensors over that memory.

    image, every byte verified when it came there ─▶ tensors, views of it ─▶ the engine copies its slice

Nothing is read from a disk, copied or verified again. What an engine keeps of it keeps the whole model in DRAM, as long as it
lives. The memory is read-only, and others look at it: who writes into a large tensor is ended by the kernel, small ones are copies.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Protocol

from coldstart.disk.home import name_of
from coldstart.errors import FilesWrong
from coldstart.loading.loading import as_tensor, for_a_writer
from coldstart.loading.pins import Pins, ahead
from coldstart.loading.resident import Image
from coldstart.loading.weight_plan import WeightFile
from coldstart.published.cutting import TensorPlace
from replication.errors import Damaged
from replication.formats.manifests import Manifest

# Of a file, copied by this rank: registering costs as much as copying from registered memory does, a sixth of a copy from any other.
PINNED_SHARE: Final = 0.3


class Mapped(Protocol):
    """As `kvstore.client.models.ResidentModel`."""

    view: memoryview

    def valid(self) -> bool: ...
    def touch(self, start: int, size_bytes: int) -> None: ...
    def close(self) -> None: ...


class ResidentWeights:
    """Some files of a revision. files: as a loader knows those of a disk. loaded_bytes: of tensors that were given back."""

    def __init__(self, model: Mapped, manifest: Manifest, directory: Path, paths: Sequence[Path]) -> None:
        """directory, paths: where they lie, or would lie, on the disk. Raises ModelError where these are other files, or no
        safetensors."""
        self._model = model
        self._directory = directory
        self.loaded_bytes = 0
        self.name = name_of(manifest.model, manifest.revision)
        names = [os.path.relpath(path, directory) for path in paths]
        try:
            self._image = Image(model.view)
            if self._image.manifest.content != manifest.content:
                raise FilesWrong(f"{self.name}: other files of that name are in DRAM")
            found = [[tensor for tensor, _ in self._image.tensors(name)] for name in names]
        except Damaged as error:
            raise FilesWrong(f"{self.name}: {error}") from error
        self.files = [WeightFile(path, (), tensors) for path, tensors in zip(paths, found, strict=True)]
        self._places = [self._image.place(name) for name in names]

    def tensors(
        self, wanted: Callable[[str], bool], pins: Pins | None = None, ranks: int = 1
    ) -> Iterator[tuple[str, Any]]:
        """Names and tensors of torch, in the order of the bytes. pins: of the device that they are copied to. ranks: that copy a
        slice each. Raises FilesWrong."""
        chosen = [[tensor for tensor in file.tensors if wanted(tensor.name)] for file in self.files]
        views = [self._pinned(*each, ranks) for each in zip(self.files, chosen, strict=True)]
        with closing(ahead(pins, views)) as registered:
            for tensors, file, place, _ in zip(chosen, self.files, self._places, registered, strict=True):
                for tensor in tensors:
                    start, size_bytes = place + tensor.start, tensor.end - tensor.start
                    self._model.touch(start, size_bytes)
                    view = for_a_writer(self._model.view[start : start + size_bytes])
                    yield tensor.name, as_tensor(tensor, view, file.path)
                    self.loaded_bytes += size_bytes
        if not self._model.valid():
            raise FilesWrong(f"{self.name}: its memory was given to others while it was loaded")

    def _pinned(self, file: WeightFile, tensors: Sequence[TensorPlace], ranks: int) -> memoryview:
        """What is registered of a file: all, unless so little is copied that the copies alone are faster."""
        whole = self.file(file.path)
        copied_bytes = sum(tensor.end - tensor.start for tensor in tensors)
        return whole if copied_bytes >= PINNED_SHARE * ranks * len(whole) else whole[:0]

    def file(self, path: Path) -> memoryview:
        """All bytes of one of its files."""
        return self._image.file(os.path.relpath(path, self._directory))

    def close(self) -> None:
        """The use ends when nobody holds a tensor any more. Idempotent."""
        del self._image
        self._model.close()
