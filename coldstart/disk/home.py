"""The models' directory of a node: what is whole there, what is under way, who uses it, what must leave.

    <dir>/models--<model>/snapshots/<revision>/<path>              real files: a directory that any engine can open
    <dir>/models--<model>/snapshots/<revision>/.kvstore-model      its manifest, sealed
    <dir>/models--<model>/refs/main, refs/<revision>               which revision a name stands for
    <dir>/.under-way/<model>@<revision>/...                        the same files, filled chunk by chunk
    <dir>/.under-way/<model>@<revision>~progress                   how far it is, for whoever waits
    <dir>/.under-way/<model>@<revision>~<8 hex>~leaving            evicted: removed by whoever comes next, if it is still there
    <dir>/.pins/<model>@<revision>                                 never evicted
    <dir>/.starts/<model>@<revision>/                              to start from before it is here: coldstart/loading/start_dir.py

        under way ──rename, when every chunk was verified and is on disk──▶ snapshots ──rename──▶ leaving

A revision is in snapshots/ whole or not at all. One process fills it: an exclusive flock on its directory, which moves with it.
Processes that use it hold a shared one, so that a use ends with its process, however that ends. Room is made, and given,
under a lock on <dir>: two that begin at the same time see each other's sizes.

When a revision was used last is the time of its manifest file.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Self

import msgspec

from coldstart.blocks import allocate
from coldstart.disk.folders import (
    allocated_bytes,
    check_rights,
    held,
    holding,
    is_folder,
    is_held,
    is_same,
    locked,
    make_way,
    may_leave,
    names_in,
    not_ours,
    put_in_place,
    remove,
    remove_all,
    shared,
)
from coldstart.errors import FilesWrong, InUse, ModelMissing, NoRoom
from replication.errors import Damaged
from replication.formats.manifests import (
    MANIFEST_BYTES_MAX,
    Manifest,
    decode,
    encode,
    is_model_name,
    manifest_name,
)
from tiers.constants import NVME_HEADROOM_BYTES
from tiers.files import replace_file, sync_directory
from tiers.nvme.direct import free_bytes
from tiers.parsing import ParserErrors
from tiers.reading import Unreadable, read_bytes
from tiers.sizes import format_bytes

MARK: Final = ".kvstore-model"
MODELS: Final = "models--"
MAIN: Final = "main"
_UNDER_WAY, _PINS, _STARTS, _LEAVING, _PROGRESS = ".under-way", ".pins", ".starts", "~leaving", "~progress"
START_STAYS_S: Final = 3600.0  # since it was made: an engine is about to open it
_MODE: Final = 0o666  # less the umask, as of the files beside them: engines of other users read them, too
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

log = logging.getLogger("coldstart.home")


class Revision(NamedTuple):
    """A whole one. used_s: unix seconds, when it was used last."""

    path: Path
    manifest: Manifest
    used_s: float
    is_pinned: bool

    @property
    def name(self) -> str:
        return name_of(self.manifest.model, self.manifest.revision)


class Said(msgspec.Struct):
    """What a process that fills a revision writes of how far it is, for others."""

    total_bytes: int
    kept_bytes: int
    by_source: dict[str, int]
    bytes_per_s: float

    @property
    def left_bytes(self) -> int:
        return self.total_bytes - self.kept_bytes - sum(self.by_source.values())


def said_in(words: bytes) -> Said | None:
    """None where that is nothing yet."""
    try:
        return msgspec.json.decode(words, type=Said)
    except ParserErrors:
        return None


class _Held:
    """A revision's directory, on which this process has a lock until it closes it, or has ended."""

    def __init__(self, path: Path, manifest: Manifest, fd: int) -> None:
        self.path = path
        self.manifest = manifest
        self._fd = fd

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Use(_Held):
    """Of a whole revision: nobody evicts it meanwhile."""


class UnderWay(_Held):
    """A revision that this process alone fills: files of their full length below `path`. What was filled stays for the next one."""

    def say(self, said: Said) -> None:
        """For whoever waits; nothing depends on it, and where the disk is full it is not said."""
        with suppress(OSError):
            _progress(self.path).write_bytes(msgspec.json.encode(said))


class Home:
    """One models' directory, which is made where it is missing. Everything blocks on the file system.

    capacity_bytes: of all revisions together; 0: as much as the disk has.
    """

    def __init__(self, path: Path, capacity_bytes: int = 0) -> None:
        self.path = path
        self.capacity_bytes = capacity_bytes
        self._under_way = path / _UNDER_WAY

    # -- what is whole --

    def place(self, model: str, revision: str) -> Path:
        return self.path / f"{MODELS}{model}" / "snapshots" / revision

    def place_under_way(self, model: str, revision: str) -> Path:
        """Of its files while they are filled."""
        return self._under_way / name_of(model, revision)

    def place_of_start(self, model: str, revision: str) -> Path:
        return self.path / _STARTS / name_of(model, revision)

    def find(self, model: str, revision: str = "") -> Revision:
        """revision "": the one that the name stands for here. Raises ModelMissing, FilesWrong."""
        chosen = revision or self._main(model)
        path = self.place(model, chosen)
        if not os.path.lexists(path):
            raise ModelMissing(
                f"{name_of(model, revision)}: not on this disk, in {self.path}: kvstore model preload {name_of(model, revision)}"
            )
        return self._revision(path, model, chosen)

    def use(self, model: str, revision: str = "") -> Use:
        """Raises ModelMissing, FilesWrong."""
        while True:
            found = self.find(model, revision)
            if (fd := shared(found.path)) is not None:  # else evicted in this moment
                with suppress(OSError):  # another user's, or read-only
                    os.utime(found.path / MARK)
                return Use(found.path, found.manifest, fd)

    def revisions(self) -> list[Revision]:
        """Those that are whole, the one used last first."""
        found = []
        for folder in filter(lambda name: name.startswith(MODELS), names_in(self.path)):
            for revision in names_in(self.path / folder / "snapshots"):
                model = folder.removeprefix(MODELS)
                with suppress(ModelMissing, FilesWrong):
                    found.append(self._revision(self.place(model, revision), model, revision))
        return sorted(found, key=lambda one: -one.used_s)

    def under_way(self) -> list[tuple[str, Said | None]]:
        """Names of those that were begun, and what is known of how far they are."""
        return [(name, said_at(self._under_way / name)) for name in sorted(self._begun())]

    def is_used(self, model: str, revision: str) -> bool:
        return is_held(self.place(model, revision))

    def _main(self, model: str) -> str:
        """What its name alone stands for: "-" if that is nothing. The only revision that is whole, where who made it whole was
        killed before its name could stand for it."""
        named, there = self._said_main(model), self._there(model)
        return there[0] if named not in there and len(there) == 1 else named

    def _said_main(self, model: str) -> str:
        """What refs/main says, and nothing else: "-" where it is not there, or says nothing."""
        text = _content(self.path / f"{MODELS}{model}" / "refs" / MAIN).decode(errors="replace").strip()
        return text if is_model_name(text) else "-"

    def _there(self, model: str) -> list[str]:
        """Its revisions on this disk."""
        folder = self.path / f"{MODELS}{model}" / "snapshots"
        return [name for name in names_in(folder) if is_model_name(name) and is_folder(folder / name)]

    def _revision(self, path: Path, model: str, revision: str) -> Revision:
        if path.is_symlink() or path.is_file():
            raise not_ours(path)
        manifest, name = read_mark(path), name_of(model, revision)
        if manifest is None or manifest.name != manifest_name(model, revision):
            raise FilesWrong(f"{path / MARK}: is not there, or of another revision")
        for file in manifest.files:
            if not _has_size(path / file.path, file.size_bytes):
                raise FilesWrong(
                    f"{path / file.path}: not {file.size_bytes} bytes long any more: kvstore model preload {name} mends it"
                )
        try:
            used_s = os.lstat(path / MARK).st_mtime
        except OSError as error:  # evicted in this moment
            raise FilesWrong(f"{path / MARK}: {error.strerror}") from error
        return Revision(path, manifest, used_s, self._pin(model, revision).exists())

    # -- pins --

    def pin(self, model: str, revision: str = "") -> str:
        """Its revision. Waits while others make room: it may be what leaves. Raises ModelMissing, FilesWrong."""
        self.find(model, revision)  # else a directory is made where there is none
        with self._locked():
            found = self.find(model, revision).manifest
            path = self._pin(model, found.revision)
            path.parent.mkdir(exist_ok=True)
            path.touch()
        return found.revision

    def unpin(self, model: str, revision: str = "") -> str:
        """Its revision. Raises ModelMissing where it is not pinned."""
        chosen = revision or self._main(model)
        try:
            self._pin(model, chosen).unlink()
        except FileNotFoundError:
            raise ModelMissing(f"{name_of(model, revision)}: not pinned in {self.path}") from None
        return chosen

    def pins(self) -> set[str]:
        """Names of those that are pinned."""
        return set(names_in(self.path / _PINS))

    def _pin(self, model: str, revision: str) -> Path:
        return self.path / _PINS / name_of(model, revision)

    # -- what comes --

    def begin(self, manifest: Manifest, is_untrue: bool = False) -> UnderWay | None:
        """Room for a revision, and files of their full length in it; what an earlier process filled is kept. None: another
        process fills it, or it is whole. is_untrue: somebody has found that the bytes of the whole one are not true.

        What is used least lately leaves first; pinned and used ones never. Raises NoRoom, with nothing changed; InUse where
        its place is taken by files that are not whole; Damaged.
        """
        if any(file.path.casefold().startswith(MARK) for file in manifest.files):  # and what it is made of
            raise Damaged(f"{manifest.name}: has a file {MARK}, which is ours")
        path = self._under_way / name_of(manifest.model, manifest.revision)
        with self._locked():
            if (not is_untrue and self._is_whole(manifest)) or is_held(path, or_missing=False):
                return None
            self._sweep()
            was_here = self._take_back(manifest, path)
            is_new = not path.exists()
            path.mkdir(exist_ok=True)
            fd = held(path)
            if fd is None:
                return None
            try:
                self._make_room(manifest, path)
                was_here = False  # and may be overwritten
                self._allocate(manifest, path)
            except BaseException as error:
                os.close(fd)
                if was_here:
                    os.rename(path, self.place(manifest.model, manifest.revision))
                elif is_new:
                    shutil.rmtree(path, ignore_errors=True)
                if isinstance(error, OSError) and error.errno in _NO_SPACE:
                    raise NoRoom(f"{self._no_room(manifest)} ({error.strerror})") from error
                raise
            return UnderWay(path, manifest, fd)

    def finish(self, filled: UnderWay, is_main: bool) -> Path:
        """It is whole, and on disk. is_main: its name alone stands for it from now on. Returns where it lies."""
        manifest = filled.manifest
        for inner, _, _ in os.walk(filled.path):
            sync_directory(Path(inner))
        place = self.place(manifest.model, manifest.revision)
        with self._locked():
            place.parent.mkdir(parents=True, exist_ok=True)
            os.utime(filled.path / MARK)
            os.rename(filled.path, place)
            for folder in (place.parent, place.parent.parent, self.path, self._under_way):
                sync_directory(folder)
            self._refer(manifest.model, manifest.revision, is_main)
        _progress(filled.path).unlink(missing_ok=True)
        filled.close()
        return place

    def refer(self, model: str, revision: str, is_main: bool) -> None:
        """Have its name stand for it, and the model's name alone, if it should, or nothing else is there that it could stand for."""
        with self._locked():
            if self.place(model, revision).is_dir():
                self._refer(model, revision, is_main)

    def _refer(self, model: str, revision: str, is_main: bool) -> None:
        refs = self.path / f"{MODELS}{model}" / "refs"
        refs.mkdir(exist_ok=True)
        main, there = self._said_main(model), self._there(model)
        if is_main or main not in there:
            others = [one for one in there if one != revision]
            main = others[0] if not is_main and len(others) == 1 else revision  # what it stood for until now
        for name, stands_for in ((revision, revision), (MAIN, main)):
            if _content(refs / name) != stands_for.encode():
                replace_file(refs / name, stands_for.encode(), _MODE)

    def _is_whole(self, manifest: Manifest) -> bool:
        try:
            return self.find(manifest.model, manifest.revision).manifest.content == manifest.content
        except ModelMissing:
            return False
        except FilesWrong as error:
            log.warning("filled again: %s", error)
            return False

    def _take_back(self, manifest: Manifest, path: Path) -> bool:
        """What lies in its place and is not it, not whole or not true, is filled again; what is true of it stays. Whether there is
        something. Raises InUse."""
        place = self.place(manifest.model, manifest.revision)
        if not os.path.lexists(place):
            return False
        with holding(place) as is_free:
            if not is_free:
                raise InUse(
                    f"{place}: damaged, or published anew with other files, and in use: end what uses it, and preload it again"
                )
            remove(path)
            os.rename(place, path)
        return True

    def _allocate(self, manifest: Manifest, path: Path) -> None:
        mark = path / MARK
        if not _says(path, manifest):  # of another one, or not there
            for entry in path.iterdir():
                remove(entry)
        own, folders = set[tuple[int, int]](), {path}
        for file in manifest.files:
            target = path / file.path
            make_way(target, folders)
            allocate(target, file.size_bytes)
            found = target.lstat()
            if (found.st_dev, found.st_ino) in own:
                raise FilesWrong(
                    f"{target}: another file of the model has this name here: this file system takes A and a for one letter"
                )
            own.add((found.st_dev, found.st_ino))
        if not mark.exists():
            replace_file(mark, encode(manifest), _MODE)

    # -- what leaves --

    def evict(self, model: str, revision: str = "") -> str:
        """Its revision; one that was begun only goes, too. Raises ModelMissing, InUse, FilesWrong."""
        if not self.path.is_dir():
            raise ModelMissing(f"{name_of(model, revision)}: not on this disk: there is no {self.path}")
        with self._locked():
            chosen = revision or self._main(model)
            begun = [name.partition("@")[2] for name in self._begun() if name.startswith(f"{model}@")]
            if chosen == "-" and len(begun) == 1:
                [chosen] = begun
            path, name = self.place(model, chosen), name_of(model, chosen)
            had_start = self._drop_start(name)
            if not os.path.lexists(path):
                path = self._under_way / name
            if not os.path.lexists(path):
                if had_start:
                    return chosen
                raise ModelMissing(f"{name_of(model, revision)}: not on this disk, in {self.path}")
            if self._pin(model, chosen).exists():
                raise InUse(f"{name}: pinned: kvstore model unpin {name} first")
            if not self._leave(path, name):
                raise InUse(f"{name}: a process uses it: end that first")
        return chosen

    def _make_room(self, manifest: Manifest, path: Path) -> None:
        """Raises NoRoom, with nothing changed."""
        # Again, if one of them was used in this moment, and without those that cannot be removed.
        tries, stuck = 3, set[Path]()
        while tries:
            for at, name in self._leaving(manifest, path, stuck):
                try:
                    if self._leave(at, name):
                        continue
                    tries -= 1
                except (OSError, FilesWrong) as error:
                    log.warning("passed over, as it cannot leave: %s", error)
                    stuck.add(at)
                break
            else:
                return
        raise NoRoom(self._no_room(manifest))

    def _leaving(self, manifest: Manifest, path: Path, stuck: Collection[Path]) -> list[tuple[Path, str]]:
        """Who must leave, so that a revision fits that is filled at this path; those that are stuck cannot. Raises NoRoom."""
        begun = {name: self._begun_bytes(name) for name in self._begun() if name != path.name}
        whole, starts = self.revisions(), self._starts()
        broken = self._broken(whole)
        over_bytes = over_disk_bytes = 0
        if self.capacity_bytes:
            held_bytes = sum(one.manifest.size_bytes for one in whole) + sum(broken.values())
            held_bytes += sum(size for size, _ in begun.values()) + sum(starts.values())
            held_bytes += sum(map(allocated_bytes, self._remains()))
            over_bytes = held_bytes + manifest.size_bytes - self.capacity_bytes
        promised_bytes = sum(max(0, size - there) for size, there in begun.values())
        missing_bytes = max(0, manifest.size_bytes - allocated_bytes(path))
        if missing_bytes:
            over_disk_bytes = missing_bytes + promised_bytes + NVME_HEADROOM_BYTES - free_bytes(self.path)
        leaving: list[tuple[Path, str]] = []
        candidates = self._candidates(whole, broken, begun, starts)
        while max(over_bytes, over_disk_bytes) > 0:
            candidate = next(candidates, None)
            if candidate is None:
                raise NoRoom(self._no_room(manifest))
            at, name, size_bytes = candidate
            if at in stuck:
                continue
            leaving.append((at, name))
            over_bytes -= size_bytes
            over_disk_bytes -= size_bytes
        return leaving

    def _broken(self, whole: Sequence[Revision]) -> dict[Path, int]:
        """The bytes of what was a revision and is none: cut off, its manifest damaged. What never was one is somebody else's."""
        there = {one.path for one in whole}
        marks = self.path.glob(f"{MODELS}*/snapshots/*/{MARK}")
        found = {mark.parent for mark in marks if not mark.parent.is_symlink()} - there
        return {path: allocated_bytes(path) for path in found}

    def _candidates(
        self,
        whole: Sequence[Revision],
        broken: Mapping[Path, int],
        begun: Mapping[str, tuple[int, int]],
        starts: Mapping[str, int],
    ) -> Iterator[tuple[Path, str, int]]:
        """What may leave, in the order in which it does: what nobody starts from, what was begun and given up, what is whole no
        more, then what was used longest ago."""
        for name, size_bytes in starts.items():
            if self._is_start_over(name):
                yield self.path / _STARTS / name, name, size_bytes
        pins = self.pins()  # also of one that is being mended
        for name, (size_bytes, _) in begun.items():
            if name not in pins and may_leave(self._under_way / name):
                yield self._under_way / name, name, size_bytes
        for path, size_bytes in broken.items():
            model = path.parts[-3].removeprefix(MODELS)
            if not self._pin(model, path.name).exists() and may_leave(path):
                yield path, name_of(model, path.name), size_bytes
        for one in reversed(whole):
            if not one.is_pinned and may_leave(one.path):
                yield one.path, one.name, one.manifest.size_bytes

    def _no_room(self, manifest: Manifest) -> str:
        limit = f"models.nvme_bytes is {format_bytes(self.capacity_bytes)}, " if self.capacity_bytes else ""
        return (
            f"{name_of(manifest.model, manifest.revision)}: {format_bytes(manifest.size_bytes)} do not fit in {self.path}: "
            f"{limit}the disk has {format_bytes(free_bytes(self.path))} free, and what could leave is too small:"
            " pinned models and those in use stay"
        )

    def _leave(self, path: Path, name: str) -> bool:
        """False where it is in use. Raises FilesWrong, OSError where it cannot be removed, or not all of it: the rest still counts."""
        if path.parent.name == _STARTS:
            return self._drop_start(name)
        check_rights(path)
        with holding(path) as is_free:
            if not is_free:
                return False
            target = self._put_aside(path, name)
        self._forget(*name.split("@"))
        _progress(self._under_way / name).unlink(missing_ok=True)
        remove_all(target)
        return True

    def _put_aside(self, path: Path, name: str) -> Path:
        """Where it is then: no matter who removes it, it has left. Raises OSError."""
        target = self._under_way / _aside(name)
        os.rename(path, target)
        return target

    def _forget(self, model: str, revision: str) -> None:
        """Names that stand for a revision which is gone, and folders with nothing in them."""
        folder = self.path / f"{MODELS}{model}"
        if self.place(model, revision).exists():
            return
        for name in (revision, MAIN):
            if _content(folder / "refs" / name) == revision.encode():
                (folder / "refs" / name).unlink()
        for empty in (folder / "refs", folder / "snapshots", folder):
            with suppress(OSError):
                empty.rmdir()

    def _starts(self) -> dict[str, int]:
        """Start directories, and the bytes that they have."""
        return {
            name: allocated_bytes(self.path / _STARTS / name) for name in _revisions_in(self.path / _STARTS)
        }

    def _is_start_over(self, name: str) -> bool:
        """Nobody starts from it, nor is about to, by the clock of files."""
        path = self.path / _STARTS / name
        os.utime(self._under_way)
        try:
            age_s = self._under_way.stat().st_mtime - path.lstat().st_mtime
        except OSError:  # gone
            return False
        return age_s > START_STAYS_S and may_leave(path)

    def _drop_start(self, name: str) -> bool:
        """False where there is none, or an engine has it."""
        path = self.path / _STARTS / name
        with holding(path) as is_free:
            if not is_free:
                return False
            target = self._put_aside(path, f"{name}~start")
        remove_all(target)
        return True

    def _begun(self) -> set[str]:
        return _revisions_in(self._under_way)

    def _begun_bytes(self, name: str) -> tuple[int, int]:
        """How large it will be, and how much of the disk it has."""
        path = self._under_way / name
        there_bytes = allocated_bytes(path)
        with suppress(FilesWrong):
            if (manifest := read_mark(path)) is not None:
                return manifest.size_bytes, there_bytes
        return there_bytes, there_bytes

    @contextmanager
    def new_start(self, model: str, revision: str) -> Iterator[Path]:
        """An empty folder, which is its start directory when the block has ended well, in one step. One that is there and has the
        same files stays, and those that have it open keep it. Raises OSError."""
        place = self.place_of_start(model, revision)
        fresh = self._under_way / _aside(name_of(model, revision))
        with ExitStack() as stack:  # if this process is killed, the next one removes it
            with self._locked():
                fresh.mkdir()
                stack.enter_context(holding(fresh))
            stack.callback(shutil.rmtree, fresh, ignore_errors=True)
            yield fresh
            with self._locked():
                place.parent.mkdir(exist_ok=True)
                if is_same(fresh, place):
                    os.utime(place)
                else:
                    put_in_place(fresh, place)
                with suppress(FilesWrong):  # the next one says it
                    remove_all(fresh)

    def _sweep(self) -> None:
        """What killed processes were removing, and start directories of what is here by now."""
        works: list[Callable[[], object]] = [partial(_clear, path) for path in self._remains()]
        for name in _revisions_in(self.path / _STARTS):
            if self.place(*name.split("@")).is_dir() and self._is_start_over(name):
                works.append(partial(self._drop_start, name))
        for work in works:
            try:
                work()
            except (OSError, FilesWrong) as error:
                log.warning("stays for now: %s", error)

    def _remains(self) -> list[Path]:
        """Of what has left, and could not be removed."""
        return [self._under_way / name for name in names_in(self._under_way) if name.endswith(_LEAVING)]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._under_way.mkdir(parents=True, exist_ok=True)
        with locked(self._under_way):
            yield


def name_of(model: str, revision: str) -> str:
    """For people, and of files."""
    return f"{model}@{revision}" if revision else model


def parse_name(text: str) -> tuple[str, str]:
    """Model and revision ("" where none is named) of NAME or NAME@REVISION. Raises ModelError."""
    from coldstart.published.models import (
        check_name,  # an engine's process imports this module, and no catalogue with it
    )

    model, at, revision = text.partition("@")
    check_name("model", model)
    if at:
        check_name("revision", revision)
    return model, revision


def default_models_dir() -> Path:
    """Where the daemon keeps them unless its configuration says otherwise; $KVSTORE_MODELS__DIR says it, too."""
    if named := os.environ.get("KVSTORE_MODELS__DIR", ""):
        return Path(named)
    state = os.environ.get("XDG_STATE_HOME", "") or os.path.expanduser("~/.local/state")
    system = os.environ.get("KVSTORE_DATA_DIR", "") or "/var/lib/kvstore"
    places = [Path(system, "models"), Path(state, "kvstore", "models")]
    return next((place for place in places if place.is_dir()), places[0])


def read_mark(directory: Path) -> Manifest | None:
    """The manifest of the revision in this directory; None where it is a directory like any other. Raises FilesWrong."""
    mark = directory / MARK
    try:
        return decode(read_bytes(mark, MANIFEST_BYTES_MAX, follow=False), str(mark))
    except (Unreadable, Damaged) as error:
        if isinstance(error, Unreadable) and error.is_missing:
            return None
        raise FilesWrong(str(error)) from error


def _says(directory: Path, manifest: Manifest) -> bool:
    with suppress(FilesWrong):
        found = read_mark(directory)
        return found is not None and (found.files, found.chunks) == (manifest.files, manifest.chunks)
    return False


def _has_size(path: Path, size_bytes: int) -> bool:
    try:
        return os.lstat(path).st_size == size_bytes
    except OSError:
        return False


def _content(path: Path) -> bytes:
    """Of a small file of ours; b"" where it cannot be read."""
    with suppress(Unreadable):
        return read_bytes(path, 64 << 10, follow=False)
    return b""


def _revisions_in(folder: Path) -> set[str]:
    """Folders that have the name of a revision. Whatever else lies there is somebody else's."""
    found = (
        name for name in names_in(folder) if name.count("@") == 1 and all(map(is_model_name, name.split("@")))
    )
    return {name for name in found if is_folder(folder / name)}


def _aside(name: str) -> str:
    """A name of its own: remains of an earlier one may be there."""
    return f"{name}~{os.urandom(4).hex()}{_LEAVING}"


def _clear(path: Path) -> None:
    """Of what has left, unless a start directory is being made of it."""
    with holding(path) as is_free:
        if is_free:
            remove_all(path)


def _progress(under_way: Path) -> Path:
    return under_way.with_name(under_way.name + _PROGRESS)


def said_at(under_way: Path) -> Said | None:
    """How far the revision is that is filled there, as its process said last."""
    return said_in(_content(_progress(under_way)))
