"""A directory as a store, with things in it that nobody of us put there; and objects that are not what they should be."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import obstore
import pytest

from tiers.bucket.directory import Root
from tiers.bucket.object_options import ObjectOptions
from tiers.bucket.object_store import STAGED_S_MAX, open_objects
from tiers.errors import ObjectDamaged, ObjectMissing, ObjectRefused, ObjectUnavailable


def _file(folder: bytes, name: bytes) -> None:
    open(os.path.join(folder, name), "wb").close()


STRAYS: dict[str, Callable[[bytes], None]] = {
    "no text": lambda folder: _file(folder, b"a\xff"),
    "a line break": lambda folder: _file(folder, b"x\ny"),
    "a link to itself": lambda folder: os.symlink(b"loop", os.path.join(folder, b"loop")),
    "a link upwards": lambda folder: os.symlink(b".", os.path.join(folder, b"upwards")),
    "a link to nothing": lambda folder: os.symlink(b"/nowhere", os.path.join(folder, b"dangling")),
    "a pipe": lambda folder: os.mkfifo(os.path.join(folder, b"pipe")),
    "a note": lambda folder: _file(folder, b"a note.txt"),
}


@pytest.mark.parametrize("stray", STRAYS)
def test_a_stray_name_ends_no_list(tmp_path: Path, stray: str) -> None:
    """Whatever lies in a folder, the objects beside it are listed, with the same ETags as before, and so are the folders."""

    async def work() -> None:
        objects = open_objects(f"file://{tmp_path}")
        for name in ("t/a", "t/b/c", "t/d/e/f", "u/g"):
            await objects.put(name, name.encode())
        before = [info async for page in objects.list("t/") for info in page]
        assert [info.name for info in before] == ["t/a", "t/b/c", "t/d/e/f"]
        STRAYS[stray](os.fsencode(tmp_path / "t"))
        after = [info async for page in objects.list("t/") for info in page]
        assert set(before) <= set(after) and {"t/a note.txt"} >= {one.name for one in after} - {
            "t/a",
            "t/b/c",
            "t/d/e/f",
        }
        assert [info.name async for page in objects.list("t/", "t/a") for info in page][-2:] == [
            "t/b/c",
            "t/d/e/f",
        ]
        assert set(await objects.folders("t/")) == {"b", "d"} or stray == "a link upwards"

    asyncio.run(work())


@pytest.mark.parametrize("left", ["nothing", "an empty directory", "a file"])
def test_a_directory_that_is_gone_is_away(tmp_path: Path, left: str) -> None:
    """Unmounted or removed under us: no call says that something is not there, none makes it anew, and all is as before when it is back.
    One with other things in it is what somebody put in its place."""

    def seen() -> list[Path]:
        return sorted(tmp_path.rglob("*"))

    async def work() -> None:
        root, aside = tmp_path / "root", tmp_path / "aside"
        objects = open_objects(
            f"file://{root}", ObjectOptions(create=True, retries_max=1, backoff_s_min=0.0, backoff_s_max=0.0)
        )
        await objects.put("a/b", b"content")
        root.rename(aside)
        if left == "an empty directory":
            root.mkdir()
        elif left == "a file":
            root.touch()
        before = seen()
        for call in (
            objects.put("a/c", b"x"),
            objects.put("a/d", b"x", only_new=True),
            objects.get("a/b"),
            objects.get_ranges("a/b", [(0, 2)]),
            objects.head("a/b"),
            objects.delete(["a/b"]),
            objects.folders("a/"),
            anext(aiter(objects.list("a/"))),
        ):
            with pytest.raises(ObjectUnavailable, match=f"^file://{root}: .*is it mounted"):
                await call
        assert seen() == before
        if left == "an empty directory":
            root.rmdir()
        elif left == "a file":
            root.unlink()
        aside.rename(root)
        assert await objects.get("a/b") == b"content"
        root.rename(aside)
        (root / "a").mkdir(parents=True)
        (root / "a" / "b").write_bytes(b"restored")
        assert await objects.get("a/b") == b"restored"
        (root / "a" / "b").unlink()
        with pytest.raises(ObjectMissing):
            await objects.get("a/b")

    asyncio.run(work())


def test_a_directory_that_hangs_takes_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many calls there are; they say so in time, and all is well when it goes on."""
    goes_on, looks = threading.Event(), list[str]()

    def wrong(root: Root) -> str:
        looks.append(root.path)
        goes_on.wait()
        return ""

    async def work() -> None:
        await open_objects(f"file://{tmp_path}").put("a/b", b"content")
        objects = open_objects(f"file://{tmp_path}", ObjectOptions(retries_max=0, timeout_s=0.05))
        monkeypatch.setattr(Root, "wrong", wrong)
        try:
            for call in [objects.get("a/b") for _ in range(20)] + [
                objects.put("a/c", b"x") for _ in range(20)
            ]:
                with pytest.raises(ObjectUnavailable, match="in time"):
                    await call
            assert len(looks) == 1
        finally:
            goes_on.set()
        found = b""
        while not found:  # a busy machine can take longer than its time for this one, too
            with suppress(ObjectUnavailable):
                found = bytes(await objects.get("a/b"))
        assert found == b"content"

    asyncio.run(work())


def test_what_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    """Half-written objects go when they are older than any upload lasts by the clock of the files; objects, younger ones and files of
    other names stay."""

    async def work() -> None:
        objects = open_objects(f"file://{tmp_path}")
        await objects.put("packs/n/id", b"pack")
        for name, age_s in (("id#1", STAGED_S_MAX + 60), ("id#2", 60.0), ("notes#x", STAGED_S_MAX + 60)):
            path = tmp_path / "packs" / "n" / name
            path.write_bytes(b"half")
            changed_s = path.stat().st_mtime - age_s
            os.utime(path, (changed_s, changed_s))
        assert await objects.sweep() == 1
        assert sorted(os.listdir(tmp_path / "packs" / "n")) == ["id", "id#2", "notes#x"]
        assert await objects.sweep() == 0 and bytes(await objects.get("packs/n/id")) == b"pack"

    asyncio.run(work())


def test_nothing_is_fetched_of_what_is_too_large(tmp_path: Path) -> None:
    """The size of an object is looked at before its bytes: one of 3 GiB costs an error and no memory; one of the bound is read."""
    with open(tmp_path / "large", "wb") as file:
        file.truncate(3 << 30)

    async def work() -> None:
        objects = open_objects(f"file://{tmp_path}")
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(ObjectDamaged, match="large: 3221225472 bytes: at most 4096 are allowed"):
            await objects.get_within("large", 4096)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 64 << 10
        await objects.put("fits", bytes(4096))
        assert len(await objects.get_within("fits", 4096)) == 4096

    asyncio.run(work())


class Panic(BaseException):
    """As pyo3 raises a panic of Rust: no `Exception`."""


@pytest.mark.parametrize(
    "error", [Panic("at src/lib.rs: secret"), RuntimeError("secret"), TypeError("secret")], ids=repr
)
def test_a_panic_of_the_library_is_a_failure_of_the_store(
    tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the library raises, a call raises `ObjectError` and nothing else, without its words; what asks to end does end."""
    found: list[BaseException] = []

    async def broken(*args: object, **more: object) -> None:
        found.append(error)
        raise error

    for name in ("get_async", "put_async", "head_async", "get_range_async"):
        monkeypatch.setattr(obstore, name, broken)

    async def work() -> None:
        objects = open_objects(f"file://{tmp_path}", ObjectOptions(retries_max=1, backoff_s_max=0.01))
        for call in (
            objects.get("a"),
            objects.get_within("a", 1),
            objects.put("a", b""),
            objects.head("a"),
            objects.get_ranges("a", [(0, 1)]),
        ):
            with pytest.raises(ObjectUnavailable, match=type(error).__name__) as said:
                await call
            assert "secret" not in str(said.value)
        assert len(found) == 10

    asyncio.run(work())
    monkeypatch.setattr(
        "tiers.bucket.object_urls.LocalStore", lambda *args, **more: (_ for _ in ()).throw(error)
    )
    with pytest.raises(ObjectRefused):
        open_objects(f"file://{tmp_path}")
