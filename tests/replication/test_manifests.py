"""Manifests: what was written is read; what cannot be true is damaged."""

from __future__ import annotations

import asyncio
import hashlib
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from replication.errors import Damaged
from replication.formats import manifests
from replication.formats.manifests import (
    MANIFEST_BYTES_MAX,
    MANIFEST_CHUNKS_MAX,
    PAGE_CHUNKS_MAX,
    Chunk,
    File,
    Manifest,
    content_of,
    decode,
    encode,
    manifest_name,
    named,
    wrong_of_manifest,
    wrong_of_path,
    wrong_of_tree,
)
from tests.objects import MemoryObjects
from tests.running import ROOT


def chunk_of(content: bytes) -> Chunk:
    return Chunk(hashlib.sha256(content).digest(), xxhash.xxh3_128_digest(content), len(content))


def manifest_of(files: dict[str, list[bytes]], **changes: Any) -> Manifest:
    """files: of each, its chunks."""
    chunks: dict[bytes, Chunk] = {}
    found = []
    for path, pieces in files.items():
        mine = [chunk_of(piece) for piece in pieces]
        chunks |= {chunk.sha256: chunk for chunk in mine}
        whole = b"".join(pieces)
        places = [list(chunks).index(chunk.sha256) for chunk in mine]
        found.append(File(path, len(whole), hashlib.sha256(whole).digest(), places))
    made = Manifest("m", "r", content_of(found), 1.0, "me", "/m", {}, list(chunks.values()), found)
    return msgspec.structs.replace(made, **changes)


FILES = {"config.json": [b"{}"], "a/model.safetensors": [b"head", b"tensor", b"head"], "empty": []}


def test_what_was_written_is_read() -> None:
    """A chunk that lies twice in a file is in the list once."""
    manifest = manifest_of(FILES)
    assert decode(encode(manifest), "x") == manifest and len(manifest.chunks) == 3
    assert [at for at, _ in manifest.chunks_of(manifest.files[1])] == [0, 4, 10]


def test_names_say_what_it_is() -> None:
    """Of a model, of caches; and what is neither is said to be none."""
    assert named(manifest_name("m", "r")) == ("m", "r", "")
    caches = manifest_of(FILES, about={"vllm": "0.32"})
    assert named(caches.name) == ("m", "r", caches.key) and caches.key
    assert named("models/manifests/m") is None and named("models/chunks/aa/bb") is None
    assert named("models/manifests/../r") is None and named("models/caches/m/r/x") is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"content": b"x" * 32},
        {"chunks": [chunk_of(b"{}")]},
        {"chunks": [chunk_of(b"{}")] * 4},
        {"chunks": [chunk_of(b"{}"), chunk_of(b"heads"), chunk_of(b"tensor")]},
    ],
)
def test_what_cannot_be_true_is_damaged(wrong: dict[str, Any]) -> None:
    """Under a checksum that matches, too."""
    with pytest.raises(Damaged, match="x: "):
        decode(encode(manifest_of(FILES, **wrong)), "x")


@pytest.mark.parametrize("paths", [("a", "a/b"), ("a/b/c", "a/b"), ("../a",), ("/etc/passwd",), ("a//b",)])
def test_no_file_lies_outside_or_below_another(paths: tuple[str, ...]) -> None:
    """Wherever a manifest is unpacked, it writes inside, and each file has its place."""
    with pytest.raises(Damaged, match="path"):
        decode(encode(manifest_of({path: [b"x"] for path in paths})), "x")


def test_folders_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that no file lies in count, and each once: what makes them has as many as files may be, and no more."""
    monkeypatch.setattr("replication.formats.manifests.MANIFEST_FOLDERS_MAX", 3)
    for paths, is_right in ((("a/b/f", "a/b/g", "a/c/f", "h"), True), (("a/b/c/d/f",), False)):
        assert (wrong_of_manifest(manifest_of({path: [b"x"] for path in paths})) == "") == is_right


def test_a_tree_of_any_depth_is_looked_at_once() -> None:
    """As many paths as there may be, each as deep as it may be: looked at in seconds, and what is wrong is found among them."""
    paths = [f"{number:05}" + "/a" * 500 for number in range(1 << 12)]
    assert wrong_of_tree(paths) == "" and wrong_of_tree([*paths, paths[7]]) == "a path twice"
    assert wrong_of_tree([*paths, "00007/a/a"]).endswith("below what is a file")
    assert wrong_of_tree(["a", "a.b", "a b", "ab", "a-b/c"]) == ""
    assert wrong_of_tree(["a", "a.b", "a b", "a/c"]) == "path 'a/c': below what is a file"


@pytest.mark.parametrize("kind", ["places", "chunks", "files", "text", "depth"])
def test_no_manifest_takes_more_memory_than_its_bound(kind: str, tmp_path: Path) -> None:
    """The largest ones, of whatever they have most: read or refused with less than a gigabyte, in a process of its own."""
    path = tmp_path / kind
    path.write_bytes(largest(kind))
    assert path.stat().st_size <= MANIFEST_BYTES_MAX
    done = subprocess.run([sys.executable, "-c", READ, path], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1 << 20, f"{done.stdout} KiB"


READ = """
import sys
from pathlib import Path
from replication.errors import Damaged
from replication.formats.manifests import decode
try:
    decode(Path(sys.argv[1]).read_bytes(), "x")
except Damaged:
    pass
# Not ru_maxrss: that begins with what the process had that started this one.
[peak] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(peak.split()[1])
"""


def largest(kind: str) -> bytes:
    """A manifest of nearly MANIFEST_BYTES_MAX under a checksum that matches."""
    pack, room = msgspec.msgpack.encode, MANIFEST_BYTES_MAX - 40_000

    def many(count: int, items: bytes) -> bytes:
        return b"\xdd" + count.to_bytes(4, "big") + items

    def file(path: str, size: int, places: bytes) -> bytes:
        return b"\x94" + pack(path) + pack(size) + pack(bytes(32)) + places

    def chunks(count: int) -> bytes:
        each = [pack((bytes(28) + number.to_bytes(4, "big"), bytes(16), 1)) for number in range(count)]
        starts = range(0, count, PAGE_CHUNKS_MAX)
        pages = (each[start : start + PAGE_CHUNKS_MAX] for start in starts)
        return many(len(starts), b"".join(many(len(page), b"".join(page)) for page in pages))

    no_places = many(0, b"")
    if kind == "places":  # of three bytes, each a number of its own in memory
        count = room // 3 // 40 - 100
        found = file("f", count, many(count, b"\xcd\x01\x2c" * count))
        body = chunks(400) + many(40, found * 40)
    elif kind == "chunks":
        body = chunks(min(MANIFEST_CHUNKS_MAX, room // 56)) + many(1, file("f", 0, no_places))
    elif kind == "files":
        files = (file(f"{number:04x}" + "\U0001f600" * 220, 0, no_places) for number in range(1 << 16))
        body = chunks(0) + many(1 << 16, b"".join(files))
    elif kind == "text":
        text = b"\xdb" + (room - 100).to_bytes(4, "big") + b"a" * (room - 100)
        body = chunks(0) + many(1, b"\x94" + text + pack(0) + pack(bytes(32)) + no_places)
    else:
        files = (file(f"{number:04x}" + "/a" * 450, 0, no_places) for number in range(1 << 16))
        body = chunks(0) + many(1 << 16, b"".join(files))
    head = b"\x99" + b"".join(map(pack, ("m", "r", bytes(32), 1.0, "x", "y", {})))
    return sealed(head + body)


def test_a_manifest_of_a_later_format_is_said_to_be_one() -> None:
    """Not damaged, but newer: what to do about it follows from that."""
    with pytest.raises(Damaged, match="x: of a later version"):
        decode(b"KVMODEL3" + encode(manifest_of(FILES))[8:], "x")


def test_pages_of_chunks_are_bounded() -> None:
    """Each is decoded at once, while nothing else runs: one that is too long, or no page at all, is damaged."""
    pack, chunks = msgspec.msgpack.encode, [chunk_of(bytes([number])) for number in range(200)] * 25
    for page in (pack(chunks), pack("no page"), pack([("no", "chunk", 1)])):
        body = (
            b"\x99" + b"".join(map(pack, ("m", "r", bytes(32), 1.0, "x", "y", {}))) + b"\x91" + page + b"\x90"
        )
        with pytest.raises(Damaged, match="x: not understood"):
            decode(sealed(body), "x")


def sealed(whole: bytes) -> bytes:
    return struct.pack("<8sII16s", b"KVMODEL2", len(whole), 0, xxhash.xxh3_128_digest(whole)) + whole


@pytest.mark.parametrize(
    "path", ["", ".", "..", "a/..", "a/./b", "/a", "a/", "a\0", "a\n", "a\\b", "é" * 128, "\udc80"]
)
def test_names_of_files_stay_inside(path: str) -> None:
    """No way out, nothing that a terminal or a file system takes amiss."""
    assert wrong_of_path(path)


@pytest.mark.parametrize("path", ["a", "a.b/c d", "é", "..a", "x" * 255])
def test_other_names_are_allowed(path: str) -> None:
    """Dots, spaces and letters of all alphabets are names."""
    assert wrong_of_path(path) == ""


def test_a_large_manifest_is_decoded_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines wait for that loop; what is wrong with it is said all the same."""
    chunks = [chunk_of(str(number).encode()) for number in range(4000)]
    size_bytes = sum(chunk.size_bytes for chunk in chunks)
    files = [File("w.bin", size_bytes, bytes(32), list(range(len(chunks))))]
    manifest = Manifest("m", "r", content_of(files), 1.0, "me", "/m", {}, chunks, files)
    threads: list[threading.Thread] = []
    true_decode = manifests.decode
    monkeypatch.setattr(
        manifests, "decode", lambda *words: threads.append(threading.current_thread()) or true_decode(*words)
    )

    async def main() -> None:
        objects = MemoryObjects()
        for made in (manifest, manifest_of(FILES)):
            await objects.put(made.name, encode(made))
            assert await manifests.read_manifest(objects, "m", "r") == made
        assert [thread is threading.current_thread() for thread in threads] == [False, True]
        await objects.put(manifest.name, encode(manifest)[:-1] + b"?")
        with pytest.raises(Damaged, match="checksum"):
            await manifests.read_manifest(objects, "m", "r")

    asyncio.run(main())
