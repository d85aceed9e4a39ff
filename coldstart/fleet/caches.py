"""Compile caches of engines, beside a revision: published, chosen, restored whole, and whether they were used.

    <dir>/cache ─publish─▶ models/caches/<model>/<revision>/<key> ─▶ signed by us? of an environment like this one?
                                                                          │ restored below a name of its own, verified
    <into>/<key>/cache ◀───────────── one rename, when all is there ◀─────┘
    <into>/<key>/manifest                                                 VLLM_CACHE_ROOT=<into>/<key>/cache

They are code that engines run. So a manifest of caches has a signature: an HMAC with a key that publishers and nodes have in a file, of
the model, the revision, what they were made with, and the digest of every file's SHA-256; files without it are not even
fetched. That keeps out whoever can write to the bucket and has no key. It does not keep out somebody who has the key: each
node that may use caches could sign some. SHA-256 is compared, of every chunk and of every file: xxh3 finds accidents, no attacks.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import shutil
import stat
from collections.abc import Mapping
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from coldstart.disk.folders import locked
from coldstart.disk.sources import true_chunk
from coldstart.errors import ChunkDamaged, FilesWrong, ModelError, NoRoom
from replication.errors import Damaged
from replication.formats.manifests import (
    CACHES,
    MANIFEST_BYTES_MAX,
    File,
    Manifest,
    decode,
    encode,
    key_of,
    read_manifest,
)
from replication.models.published import latest_first
from tiers.bucket.objects import Objects
from tiers.errors import ObjectMissing, ObjectRefused
from tiers.files import replace_file
from tiers.nvme.direct import free_bytes
from tiers.reading import Unreadable, read_bytes
from tiers.together import each

SIGNATURE: Final = "signature"  # its place in `about`
KEY_BYTES_MIN, KEY_BYTES_MAX = 32, 4096
CACHES_BYTES_MAX: Final = 32 << 30  # of one environment
RESTORED_NS: Final = 10**9  # the time of change of what was restored, beside none of reading: see `used`
READS: Final = 16  # files at a time
_DOMAIN: Final = b"kvstore compile caches 1\0"
COMPILED: Final = "torch_compile_cache"  # vLLM's folder, one below it for each of its keys
AHEAD_OF_TIME: Final = "torch_aot_compile"  # inside it, the same again


def read_key(path: Path) -> bytes:
    """Of a file that nobody else can read. Raises ModelError."""
    try:
        mode = os.stat(path).st_mode
        key = read_bytes(path, KEY_BYTES_MAX).strip()
    except (OSError, Unreadable) as error:
        raise ModelError(
            f"key for compile caches: {path}: {getattr(error, 'strerror', '') or error}"
        ) from error
    if stat.S_IMODE(mode) & 0o077:
        raise ModelError(f"key for compile caches: {path}: others may read it: chmod 600")
    if len(key) < KEY_BYTES_MIN:
        raise ModelError(
            f"key for compile caches: {path}: {len(key)} bytes: allowed are {KEY_BYTES_MIN} to {KEY_BYTES_MAX}"
        )
    return key


def signed(manifest: Manifest, key: bytes) -> Manifest:
    """The same with a signature; what a publisher puts."""
    about = {**manifest.about, SIGNATURE: _signature(manifest, key)}
    return msgspec.structs.replace(manifest, about=about)


def is_signed(manifest: Manifest, key: bytes) -> bool:
    return hmac.compare_digest(manifest.about.get(SIGNATURE, "").encode(), _signature(manifest, key).encode())


def _signature(manifest: Manifest, key: bytes) -> str:
    facts = sorted((name, value) for name, value in manifest.about.items() if name != SIGNATURE)
    text = msgspec.json.encode([manifest.model, manifest.revision, manifest.content.hex(), facts])
    return hmac.new(key, _DOMAIN + text, hashlib.sha256).hexdigest()


class Found(NamedTuple):
    """manifest: None where nothing fits, and `why` says what there is, in words."""

    manifest: Manifest | None
    why: str


async def find_caches(
    objects: Objects, model: str, revision: str, about: Mapping[str, str], key: bytes
) -> Found:
    """The newest that fit this environment and are signed with this key. Raises ObjectError."""
    differ: list[str] = []
    for one in await latest_first(objects, f"{model}/{revision}", CACHES):
        try:
            manifest = await read_manifest(objects, one.model, one.revision, one.key)
        except (Damaged, ObjectMissing, ObjectRefused) as error:
            differ.append(str(error))
            continue
        theirs = {name: value for name, value in manifest.about.items() if name != SIGNATURE}
        if not is_signed(manifest, key):
            differ.append(f"one of {manifest.published_by!r} is not signed with our key")
        elif theirs != about:
            differ.append(_difference(theirs, about))
        elif manifest.size_bytes > CACHES_BYTES_MAX:
            differ.append(f"{manifest.size_bytes} bytes: allowed are {CACHES_BYTES_MAX}")
        else:
            return Found(manifest, "")
    return Found(None, differ[0] if differ else "there are none")


def _difference(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    names = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
    return "; ".join(
        f"{name}: theirs {theirs.get(name, 'unknown')}, here {ours.get(name, 'unknown')}" for name in names
    )


class Home:
    """A directory for caches, of one user. Below it each environment, or each that was restored, has a directory of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def empty(self, about: Mapping[str, str], model: str, revision: str) -> Path:
        """Where an engine of this environment may put what it compiles. Raises OSError."""
        own = key_of({**about, "model": model, "revision": revision})
        cache = self.path / own / "cache"
        os.makedirs(self.path, mode=0o700, exist_ok=True)
        os.makedirs(cache, mode=0o700, exist_ok=True)
        return cache

    async def restore(self, objects: Objects, manifest: Manifest) -> Path:
        """All files of it, or nothing; those that were restored before stay. Returns the cache's directory.

        Raises NoRoom, ChunkDamaged, ObjectError, OSError.
        """
        os.makedirs(self.path, mode=0o700, exist_ok=True)
        final = self.path / manifest.key
        with locked(self.path):
            there = _restored(final)
            if there is not None and there.content == manifest.content:  # an engine may be using it
                return final / "cache"
            if manifest.size_bytes > free_bytes(self.path):
                raise NoRoom(f"{self.path}: compile caches of {manifest.size_bytes} bytes do not fit")
            under_way = self.path / ".under-way"
            shutil.rmtree(under_way, ignore_errors=True)
            shutil.rmtree(final, ignore_errors=True)  # whatever it is, it is not what we put there
            try:
                await self._fill(objects, manifest, under_way)
                os.sync()
                os.rename(under_way, final)
            finally:
                shutil.rmtree(under_way, ignore_errors=True)
        return final / "cache"

    async def _fill(self, objects: Objects, manifest: Manifest, under_way: Path) -> None:
        cache = under_way / "cache"
        os.makedirs(cache, mode=0o700)
        for folder in sorted({os.path.dirname(file.path) for file in manifest.files}):
            os.makedirs(cache / folder, mode=0o700, exist_ok=True)
        await each(lambda file: _fetch(objects, manifest, file, cache / file.path), manifest.files, READS)
        replace_file(under_way / "manifest", encode(manifest))


def _restored(directory: Path) -> Manifest | None:
    """What lies there, as we put it; None where it is nothing of the kind."""
    try:
        return decode(read_bytes(directory / "manifest", MANIFEST_BYTES_MAX, follow=False), str(directory))
    except (Unreadable, Damaged):
        return None


async def _fetch(objects: Objects, manifest: Manifest, file: File, path: Path) -> None:
    """One file, compared with its digests. Raises ChunkDamaged, ObjectError, OSError."""
    digest = hashlib.sha256()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with BufferedWriter(FileIO(os.open(path, flags, 0o600), "w")) as into:
        for place in file.chunks:
            content = await true_chunk(objects, manifest.chunks[place])
            digest.update(content)
            await asyncio.to_thread(into.write, content)
    if digest.digest() != file.sha256:
        raise ChunkDamaged(
            f"{objects.where}: {manifest.name}: {file.path}: its bytes are not what its digest says"
        )
    os.utime(path, ns=(0, RESTORED_NS))


class Used(NamedTuple):
    """Of a cache after an engine's start. made: vLLM's keys of what it compiled: beside what was restored, or again because it could
    not load that. read: how many of the restored files were read since."""

    made: list[str]
    read: int

    @property
    def is_hit(self) -> bool:
        return bool(self.read) and not self.made


def used(cache: Path) -> Used:
    """Whether an engine took what was restored into this directory. Raises FilesWrong where nothing was."""
    manifest = _restored(cache.parent)
    if manifest is None:
        raise FilesWrong(f"{cache}: nothing was restored there")
    restored = {key for file in manifest.files if (key := _compiled(file.path))}
    top = [f"{COMPILED}/{name}/" for name in _names(cache / COMPILED) if name != AHEAD_OF_TIME]
    ahead = [f"{COMPILED}/{AHEAD_OF_TIME}/{name}/" for name in _names(cache / COMPILED / AHEAD_OF_TIME)]
    made = {key for path in (*top, *ahead) if (key := _compiled(path))} - restored
    looked = {path: _times(cache / path) for file in manifest.files if _compiled(path := file.path)}
    made |= {_compiled(path) for path, (_, changed_ns) in looked.items() if changed_ns != RESTORED_NS}
    return Used(sorted(made), sum(read_ns > 0 for read_ns, _ in looked.values()))


def _compiled(path: str) -> str:
    """vLLM's key of something compiled; "" of other files."""
    folder, _, rest = path.partition("/")
    key, *inside = rest.removeprefix(f"{AHEAD_OF_TIME}/").split("/")
    return key if folder == COMPILED and inside else ""


def _names(directory: Path) -> list[str]:
    try:
        return [name for name in os.listdir(directory) if (directory / name).is_dir()]
    except OSError:
        return []


def _times(path: Path) -> tuple[int, int]:
    """When it was read and changed. Restored files have no time of reading; the first read gives them one, where the file system
    keeps such times at all."""
    try:
        found = os.lstat(path)
    except OSError:
        return 0, 0  # away: replaced, or cleared
    return found.st_atime_ns, found.st_mtime_ns


def exports(cache: Path) -> dict[str, str]:
    """What an engine needs in its environment to use it."""
    return {
        "VLLM_CACHE_ROOT": str(cache),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "VLLM_ENABLE_STARTUP_PLAN": "1",
    }
