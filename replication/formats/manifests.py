"""Manifests: which files a revision of a model has, and of which chunks they are made.

    models/chunks/<2 hex>/<sha256, 64 hex>             a chunk: a run of bytes of a file, immutable, named by its content
    models/manifests/<model>/<revision>                Manifest: sealed, written once, when all of its chunks are there
    models/caches/<model>/<revision>/<key, 32 hex>     Manifest of an engine's compile caches, which belong to that revision
    models/publishing/<id, 16 hex>                     Manifest whose chunks somebody is putting: none of them is deleted

    file    │ header │ tensor │ tensor   ...        │ small tensors │ tensor ...
    chunks  │   0    │   1    │ 2 │ 3 │ 4           │       5       │ ...           each at most CHUNK_BYTES_MAX

A chunk has two digests: SHA-256 says which it is, wherever it comes from; xxh3_128, seven times as fast, is compared after
every hop. The content of a manifest is a digest of its files' paths, sizes and SHA-256: two publishers of the same files write
the same content, whoever they are and however their files were cut.

Whatever lies in a bucket may be anybody's: a manifest that was read has names that stay inside the directory they are
unpacked in, sizes that add up, and no more than it may have; else it is `Damaged`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from replication.errors import Damaged
from replication.formats.ranges import Size, Text, UnixS, Word
from replication.formats.sealed import Sealed
from tiers.bucket.objects import Objects
from tiers.errors import ObjectDamaged
from tiers.parsing import ParserErrors, is_later, parser_failure
from tiers.together import in_thread

MIB: Final = 1 << 20
CHUNK_BYTES_MAX: Final = 16 * MIB  # one request of a bucket; larger ones are no faster
MANIFEST_BYTES_MAX: Final = (
    64 * MIB
)  # of a model of some 10 TB; whatever is in it, it takes less than 1 GiB to read
MANIFEST_FILES_MAX: Final = 1 << 16
MANIFEST_FOLDERS_MAX: Final = 1 << 16
MANIFEST_CHUNKS_MAX: Final = 1 << 20
PAGE_CHUNKS_MAX: Final = 1 << 12  # decoded at once, in a millisecond that no other thread runs in
PATH_BYTES_MAX: Final = 1024
NAME_BYTES_MAX: Final = 255  # of a file, on every file system

CHUNKS: Final = "models/chunks/"
MANIFESTS: Final = "models/manifests/"
CACHES: Final = "models/caches/"
PUBLISHING: Final = "models/publishing/"
MODEL_NAME: Final = r"^[a-z0-9][a-z0-9._-]{0,95}\Z"  # also of a revision
_MODEL_NAME: Final = re.compile(MODEL_NAME)
_KEY: Final = re.compile(r"[0-9a-f]{32}")
AT_ONCE_BYTES_MAX: Final = (
    128 << 10
)  # decoded in the event loop, in about a millisecond; what is larger in a thread
_MAGIC: Final = b"KVMODEL2"

ModelName = Annotated[str, Meta(pattern=MODEL_NAME)]
Sha256 = Annotated[bytes, Meta(min_length=32, max_length=32)]
Xxh3 = Annotated[bytes, Meta(min_length=16, max_length=16)]


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """sha256: which it is. checksum: xxh3_128 of its bytes."""

    sha256: Sha256
    checksum: Xxh3
    size_bytes: Annotated[int, Meta(gt=0, le=CHUNK_BYTES_MAX)]

    @property
    def name(self) -> str:
        return chunk_name(self.sha256)


class File(msgspec.Struct, frozen=True, array_like=True):
    """path: relative, with "/" between folders. chunks: their places in the manifest's list, in the order of the bytes."""

    path: Annotated[str, Meta(min_length=1, max_length=PATH_BYTES_MAX)]
    size_bytes: Size
    sha256: Sha256
    chunks: Annotated[list[int], Meta(max_length=MANIFEST_CHUNKS_MAX)]


Files = Annotated[list[File], Meta(max_length=MANIFEST_FILES_MAX)]
_page = msgspec.msgpack.Decoder(Annotated[list[Chunk], Meta(max_length=PAGE_CHUNKS_MAX)])


class Head(msgspec.Struct, frozen=True, array_like=True):
    """A manifest without its chunks and files."""

    model: ModelName
    revision: ModelName
    content: Sha256
    published_s: UnixS
    published_by: Text
    source: Text
    about: Annotated[dict[Word, Text], Meta(max_length=64)]

    @property
    def name(self) -> str:
        """Of the object."""
        return manifest_name(self.model, self.revision, self.key)

    @property
    def key(self) -> str:
        """Of caches; "" of a model."""
        return key_of(self.about) if self.about else ""


H = TypeVar("H", bound=Head)


class _Written(Head, frozen=True, array_like=True):
    """A manifest as it is in its object: chunks in pages, each of them decoded by itself."""

    chunks: Annotated[list[msgspec.Raw], Meta(max_length=MANIFEST_CHUNKS_MAX // PAGE_CHUNKS_MAX)]
    files: Files


class Manifest(Head, frozen=True, array_like=True):
    """One revision of a model, or the compile caches of one.

    content: as `content_of` its files. published_s: unix seconds, by the clock of the store that it was published to; 0: not said. published_by: who, in words. source: where it was before: a path, a repository.
    about: of caches, what they were made with. chunks: each once, however often files have it.
    """

    chunks: list[Chunk]
    files: Files

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(file.size_bytes for file in self.files)

    def chunks_of(self, file: File) -> Iterator[tuple[int, Chunk]]:
        """Each with its place in the file, in bytes."""
        at = 0
        for place in file.chunks:
            chunk = self.chunks[place]
            yield at, chunk
            at += chunk.size_bytes


def is_model_name(name: str) -> bool:
    return _MODEL_NAME.fullmatch(name) is not None


def chunk_name(sha256: bytes) -> str:
    digits = sha256.hex()
    return f"{CHUNKS}{digits[:2]}/{digits}"


def manifest_name(model: str, revision: str, key: str = "") -> str:
    """key: of caches."""
    return f"{CACHES}{model}/{revision}/{key}" if key else f"{MANIFESTS}{model}/{revision}"


def named(name: str) -> tuple[str, str, str] | None:
    """Model, revision and key ("" of a model) in the name of a manifest; None if it is no such name."""
    folder = next((folder for folder in (MANIFESTS, CACHES) if name.startswith(folder)), "")
    parts = name.removeprefix(folder).split("/")
    if (
        not folder
        or len(parts) != (2 if folder == MANIFESTS else 3)
        or not all(map(is_model_name, parts[:2]))
    ):
        return None
    if folder == CACHES and not _KEY.fullmatch(parts[2]):
        return None
    return parts[0], parts[1], parts[2] if folder == CACHES else ""


def key_of(about: dict[str, str]) -> str:
    """Of caches: what they were made with, as a name."""
    return hashlib.sha256(msgspec.json.encode(sorted(about.items()))).hexdigest()[:32]


def content_of(files: Sequence[File]) -> bytes:
    """A digest of what files are, however they are cut."""
    facts = sorted((file.path, file.size_bytes, file.sha256.hex()) for file in files)
    return hashlib.sha256(msgspec.json.encode(facts)).digest()


def encode(manifest: Manifest) -> bytes:
    chunks = manifest.chunks
    pages = [
        msgspec.Raw(msgspec.msgpack.encode(chunks[at : at + PAGE_CHUNKS_MAX]))
        for at in range(0, len(chunks), PAGE_CHUNKS_MAX)
    ]
    return _WRITTEN.seal(_Written(**_head_of(manifest), chunks=pages, files=manifest.files))


def _head_of(written: Head) -> dict[str, Any]:
    return {name: getattr(written, name) for name in Head.__struct_fields__}


_HEAD: Final = Sealed(_MAGIC, Head, MANIFEST_BYTES_MAX)
_WRITTEN: Final = Sealed(_MAGIC, _Written, MANIFEST_BYTES_MAX)


def decode_head(content: bytes | memoryview, where: str) -> Head:
    """where: its name, for people. Raises Damaged."""
    return _HEAD.unseal(content, where)


def decode(content: bytes | memoryview, where: str) -> Manifest:
    """where: its name, for people. Raises Damaged."""
    written = _WRITTEN.unseal(content, where)
    try:
        chunks = [chunk for page in written.chunks for chunk in _page.decode(page)]
    except ParserErrors as error:
        raise Damaged(f"{where}: not understood: {parser_failure(error)}") from error
    manifest = Manifest(**_head_of(written), chunks=chunks, files=written.files)
    if wrong := wrong_of_manifest(manifest):
        raise Damaged(f"{where}: {wrong}")
    return manifest


def is_manifest_later(content: bytes | memoryview) -> bool:
    """Whether it is a manifest of a later version: nobody here may replace or delete it."""
    return is_later(content, _MAGIC)


async def read_manifest(objects: Objects, model: str, revision: str, key: str = "") -> Manifest:
    """Raises Damaged, ObjectError."""
    return await _read(objects, manifest_name(model, revision, key), decode)


async def read_head(objects: Objects, model: str, revision: str, key: str = "") -> Head:
    """The same, but whether its chunks and files can be true is not looked at."""
    return await _read(objects, manifest_name(model, revision, key), decode_head)


async def _read(objects: Objects, name: str, decoded: Callable[[bytes | memoryview, str], H]) -> H:
    try:
        content = await objects.get_within(name, MANIFEST_BYTES_MAX)
    except ObjectDamaged as error:
        raise Damaged(str(error)) from error
    is_large = len(content) > AT_ONCE_BYTES_MAX
    found = await in_thread(decoded, content, name) if is_large else decoded(content, name)
    if found.name != name:
        raise Damaged(f"{name}: says it is {found.name}")
    return found


def wrong_of_manifest(manifest: Manifest) -> str:
    """What cannot be true of it, in words; "" where all can."""
    chunks = manifest.chunks
    if len({chunk.sha256 for chunk in chunks}) != len(chunks):
        return "a chunk twice in its list"
    paths = [file.path for file in manifest.files]
    if (
        wrong := next(filter(None, map(wrong_of_path, paths)), "")
        or wrong_of_tree(paths)
        or _wrong_of_folders(paths)
    ):
        return wrong
    for file in manifest.files:
        if any(not 0 <= place < len(chunks) for place in file.chunks):
            return f"file {file.path!r}: of a chunk that is not in its list"
        if (found := sum(chunks[place].size_bytes for place in file.chunks)) != file.size_bytes:
            return f"file {file.path!r}: {file.size_bytes} bytes, of chunks with {found}"
    if manifest.content != content_of(manifest.files):
        return "its content is not that of its files"
    return ""


def _wrong_of_folders(paths: Sequence[str]) -> str:
    """Whoever preloads it makes them: a small manifest can name millions."""
    folders = set[str]()
    for path in paths:
        folder = path.rpartition("/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
        if len(folders) > MANIFEST_FOLDERS_MAX:
            return f"more than {MANIFEST_FOLDERS_MAX} folders"
    return ""


def wrong_of_path(path: str) -> str:
    """Why a file must not be called so, in words; "" where it may: a path that stays inside the directory it is put in."""
    parts = path.split("/")
    try:
        long = (
            len(path.encode()) > PATH_BYTES_MAX or max(len(part.encode()) for part in parts) > NAME_BYTES_MAX
        )
    except UnicodeEncodeError:
        return f"path {path!r}: not UTF-8"
    if not path or "" in parts or not {".", ".."}.isdisjoint(parts):
        return f"path {path!r}: it leads outside, or nowhere"
    if long or not path.isprintable() or "\\" in path:
        return f"path {path[:80]!r}: allowed are {PATH_BYTES_MAX} printable bytes without \\, {NAME_BYTES_MAX} in each part"
    return ""


def wrong_of_tree(paths: Sequence[str]) -> str:
    """No path twice, and no file where another one needs a folder: in order, what lies below a name follows it."""
    ordered = sorted(path.replace("/", "\0") for path in paths)
    for path, following in pairwise(ordered):
        if path == following:
            return "a path twice"
        if following.startswith(path + "\0"):
            return f"path {following.replace(chr(0), '/')!r}: below what is a file"
    return ""
