"""The models' directory: who stays, who leaves, and that a use lasts as long as its process."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from coldstart.disk import folders
from coldstart.disk import home as home_module
from coldstart.disk.home import START_STAYS_S, Home, name_of, parse_name
from coldstart.disk.preload import preload
from coldstart.errors import FilesWrong, InUse, ModelError, ModelMissing, NoRoom
from coldstart.loading.start_dir import use
from replication.errors import Damaged
from replication.formats.manifests import MIB
from tests.coldstart.models import cut_evenly, files_at, made, put
from tests.objects import MemoryObjects
from tests.running import environment

MODEL_BYTES = MIB


@pytest.fixture
def bring(tmp_path: Path) -> Callable[..., Path]:
    """Preload a model of MODEL_BYTES and this name; its capacity is that of three."""
    objects = MemoryObjects()

    def work(
        model: str, revision: str = "r", size_bytes: int = MODEL_BYTES, capacity: int = 3 * MODEL_BYTES
    ) -> Path:
        files = {"config.json": b"{}", "w.bin": random.Random(model + revision).randbytes(size_bytes - 2)}
        asyncio.run(put(objects, *made(files, cut_evenly(files, 300_000), model, revision)))
        path = asyncio.run(preload(objects, Home(tmp_path, capacity), model, revision)).path
        assert files_at(path) == files
        os.utime(path / home_module.MARK, (work.clock, work.clock))  # type: ignore[attr-defined]
        work.clock += 1  # type: ignore[attr-defined]
        return path

    work.clock = 1000.0  # type: ignore[attr-defined]
    return work


def there(path: Path) -> set[str]:
    return {one.manifest.model for one in Home(path).revisions()}


def test_a_name_that_its_maker_could_not_give_any_more(tmp_path: Path, bring: Callable[..., Path]) -> None:
    """Who made a revision whole was killed before its name stood for it: it does, as long as it is the only one."""
    path = bring("a")
    shutil.rmtree(path.parents[1] / "refs")
    assert Home(tmp_path).find("a").path == path
    bring("a", "other")
    (path.parents[1] / "refs" / home_module.MAIN).unlink()
    with pytest.raises(ModelMissing):
        Home(tmp_path).find("a")


def test_a_revision_that_is_named_takes_no_name_away(tmp_path: Path, bring: Callable[..., Path]) -> None:
    """The first one is what the name stands for, in refs/main for others, too; the next ones change that only when it is gone. Who
    made the first one may have been killed before it said so."""
    main = bring("a", "r1").parents[1] / "refs" / home_module.MAIN
    assert main.read_text() == "r1"
    main.unlink()
    bring("a", "r2")
    assert main.read_text() == "r1" and Home(tmp_path).find("a").path.name == "r1"
    Home(tmp_path).evict("a")
    bring("a", "r3")
    assert main.read_text() == "r2"


def test_the_one_used_longest_ago_leaves(tmp_path: Path, bring: Callable[..., Path]) -> None:
    """A use counts, not when it came; with a model leaves what named it."""
    for model in ("a", "b", "c"):
        bring(model)
    Home(tmp_path).use("a").close()
    bring("d")
    assert there(tmp_path) == {"a", "c", "d"}
    assert not (tmp_path / "models--b").exists()
    with pytest.raises(ModelMissing, match="kvstore model preload b"):
        Home(tmp_path).find("b")


def test_pinned_models_and_those_in_use_stay(tmp_path: Path, bring: Callable[..., Path]) -> None:
    """And where nothing else is left, the new one is refused before anything is changed."""
    for model in ("a", "b", "c"):
        bring(model)
    home = Home(tmp_path)
    home.pin("a")
    with home.use("b"):
        bring("d")
        assert there(tmp_path) == {"a", "b", "d"}
        with (
            home.use("d"),
            pytest.raises(NoRoom, match=r"e@r: 1 MiB do not fit in .*models.nvme_bytes is 3 MiB"),
        ):
            bring("e")
        assert there(tmp_path) == {"a", "b", "d"} and home.under_way() == []
        with pytest.raises(InUse, match="b@r: a process uses it"):
            home.evict("b")
    with pytest.raises(InUse, match="pinned"):
        home.evict("a")
    home.unpin("a")
    home.evict("a")
    assert there(tmp_path) == {"b", "d"}
    with pytest.raises(ModelMissing, match="not pinned"):
        home.unpin("d")


def test_what_is_pinned_while_others_leave(
    tmp_path: Path, bring: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who pins a model that is about to leave hears that it is gone, or it stays."""
    for model in ("a", "b", "c"):
        bring(model)
    pinned, real = list[str](), home_module.remove_all

    def pin() -> None:
        with suppress(ModelMissing):
            pinned.append(Home(tmp_path).pin("b"))

    thread = threading.Thread(target=pin)

    def remove_all(path: Path) -> None:
        if thread.ident is None:
            thread.start()
            thread.join(0.1)
        real(path)

    monkeypatch.setattr(home_module, "remove_all", remove_all)
    bring("d", size_bytes=2 * MODEL_BYTES)
    thread.join()
    assert bool(pinned) == ("b" in there(tmp_path))


def test_a_use_ends_with_its_process(tmp_path: Path, bring: Callable[..., Path]) -> None:
    """However that ends: killed, it holds nothing any more."""
    bring("a")
    script = (
        "import sys, time; from pathlib import Path; from coldstart.disk.home import Home;"
        "use = Home(Path(sys.argv[1])).use('a'); print('has it', flush=True); time.sleep(600)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment()
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "has it\n"
        assert Home(tmp_path).is_used("a", "r")
        with pytest.raises(InUse):
            Home(tmp_path).evict("a")
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert child.stdout is not None
    child.stdout.close()
    assert not Home(tmp_path).is_used("a", "r")
    Home(tmp_path).evict("a")


def test_what_was_begun_and_given_up_leaves_first(tmp_path: Path, bring: Callable[..., Path]) -> None:
    """Its room counts as long as it is there."""
    home = Home(tmp_path, 3 * MODEL_BYTES)
    bring("a")
    bring("b")
    files = {"w.bin": bytes(MODEL_BYTES)}
    manifest, _ = made(files, cut_evenly(files, 100_000), "begun")
    begun = home.begin(manifest)
    assert begun is not None
    with pytest.raises(NoRoom):  # it is filled by somebody, and a and b are used
        with home.use("a"), home.use("b"):
            bring("c")
    begun.close()
    bring("c")
    assert there(tmp_path) == {"a", "b", "c"} and home.under_way() == []


@pytest.mark.parametrize("revision", ["r1", ""])
def test_what_was_begun_and_given_up_is_evicted(
    tmp_path: Path, bring: Callable[..., Path], revision: str
) -> None:
    """By its name, and not while somebody fills it."""
    home = Home(tmp_path)
    bring("a")
    files = {"w.bin": bytes(MODEL_BYTES)}
    manifest, _ = made(files, cut_evenly(files, 100_000), "begun")
    begun = home.begin(manifest)
    assert begun is not None
    with pytest.raises(InUse, match="begun@r1: a process uses it"):
        home.evict("begun", revision)
    begun.close()
    assert home.evict("begun", revision) == "r1"
    assert there(tmp_path) == {"a"} and home.under_way() == []
    with pytest.raises(ModelMissing):
        home.evict("begun", revision)


def test_what_is_pinned_stays_while_it_is_mended(tmp_path: Path, bring: Callable[..., Path]) -> None:
    """Whoever mends it was killed: what it has is no room for others."""
    home = Home(tmp_path)
    bring("a")
    home.pin("a")
    under_way = home.begin(home.find("a").manifest, is_untrue=True)
    assert under_way is not None
    under_way.close()
    for model in "bcd":
        bring(model)
    assert there(tmp_path) == {"c", "d"} and [name for name, _ in home.under_way()] == ["a@r"]


def test_a_disk_that_is_too_small_is_refused_before_anything_starts(
    tmp_path: Path, bring: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the disk has free, which others may have taken; models that may leave make room for it."""
    bring("a", capacity=0)
    free = {"bytes": home_module.NVME_HEADROOM_BYTES + MODEL_BYTES // 2}
    monkeypatch.setattr(home_module, "free_bytes", lambda path: free["bytes"])
    with Home(tmp_path).use("a"), pytest.raises(NoRoom, match=r"the disk has 64\.5 MiB free"):
        bring("b", capacity=0)
    assert there(tmp_path) == {"a"} and Home(tmp_path).under_way() == []
    bring("b", capacity=0)
    assert there(tmp_path) == {"b"}


def test_a_manifest_that_names_our_mark_is_refused(tmp_path: Path) -> None:
    """Its file would say of itself that it is whole."""
    files = {home_module.MARK: b"x"}
    manifest, _ = made(files, cut_evenly(files, 10))
    with pytest.raises(Damaged, match="which is ours"):
        Home(tmp_path).begin(manifest)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [home_module.MARK, home_module.MARK.upper(), f"{home_module.MARK}/a"])
def test_a_manifest_that_names_our_mark_in_any_case_is_refused(tmp_path: Path, name: str) -> None:
    """There are file systems for which they are one name."""
    manifest, _ = made({name: b"x"}, cut_evenly({name: b"x"}, 10))
    with pytest.raises(Damaged, match="which is ours"):
        Home(tmp_path).begin(manifest)


def test_two_names_that_are_one_file_here_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a file system takes capitals for small letters (a double stands for it), one file would be two: nothing is begun."""
    files = {"readme": b"x", "README": b"y"}
    manifest, _ = made(files, cut_evenly(files, 10))

    def lower(path: Path) -> Path:
        return path.with_name(path.name.lower())

    real = home_module.allocate
    monkeypatch.setattr(home_module, "allocate", lambda path, size: real(lower(path), size))
    monkeypatch.setattr(Path, "lstat", lambda path: os.lstat(lower(path)))
    with pytest.raises(FilesWrong, match=r"README: another file of the model has this name here"):
        Home(tmp_path).begin(manifest)
    assert not list(tmp_path.glob(".under-way/*"))


def test_what_is_filled_again_writes_into_its_own_files_only(
    tmp_path: Path, bring: Callable[..., Path]
) -> None:
    """Files that were replaced by links, to elsewhere or by another name, a folder by a link, a file by a folder: each becomes a file
    of its own again, and what the links led to stays as it is."""
    outside = tmp_path / "outside"
    outside.mkdir()
    models = tmp_path / "models"
    objects, files = MemoryObjects(), {f"{n}/w.bin": random.Random(n).randbytes(70_000) for n in range(4)}
    asyncio.run(put(objects, *made(files, cut_evenly(files, 30_000))))
    path = asyncio.run(preload(objects, Home(models), "m", "r1")).path
    (outside / "copy").write_bytes(b"x" * 70_000)
    (path / "0/w.bin").unlink()
    (path / "0/w.bin").symlink_to(outside / "copy")
    (path / "1/w.bin").unlink()
    os.link(outside / "copy", path / "1/w.bin")
    os.rename(path / "2", outside / "2")
    (outside / "2/w.bin").write_bytes(b"y" * 70_000)
    (path / "2").symlink_to(outside / "2")
    (path / "3/w.bin").unlink()
    (path / "3/w.bin").mkdir()
    assert files_at(asyncio.run(preload(objects, Home(models), "m", "r1", is_verified=True)).path) == files
    assert not any(one.is_symlink() for one in path.rglob("*"))
    assert files_at(outside) == {"copy": b"x" * 70_000, "2/w.bin": b"y" * 70_000}


def test_what_is_no_directory_of_ours_is_said(tmp_path: Path, bring: Callable[..., Path]) -> None:
    """A file or a link, dangling or to a revision, where a revision should be: whoever asks hears at once which it is, and nobody waits
    for it, or follows it. The others are there as before."""
    home, place = Home(tmp_path), bring("a")
    os.rename(place, tmp_path / "elsewhere")
    bring("b")
    for path in (place, home.place_under_way("a", "r")):
        for make in (
            Path.touch,
            lambda path: path.symlink_to(tmp_path / "elsewhere"),
            lambda path: path.symlink_to("nowhere"),
        ):
            make(path)
            with pytest.raises(FilesWrong, match=f"{path}: no directory of ours"):
                bring("a")
            if path == place:
                for work in (home.use, home.evict):
                    with pytest.raises(FilesWrong, match="no directory of ours"):
                        work("a", "r")
            bring("c", capacity=MODEL_BYTES)
            bring("b", capacity=MODEL_BYTES)
            assert there(tmp_path) == {"b"}
            path.unlink()
    assert (tmp_path / "elsewhere" / "w.bin").stat().st_size == MODEL_BYTES - 2
    assert bring("a") == place


@pytest.mark.parametrize("name", ["old", "a@b@c", "A@b", "@"])
def test_a_folder_of_somebody_else_beside_ours_stays(
    tmp_path: Path, bring: Callable[..., Path], name: str
) -> None:
    """What has not the name of a revision is neither counted, nor shown, nor removed for room, however it came there."""
    for folder in (".under-way", ".starts"):
        (tmp_path / folder / name).mkdir(parents=True)
        (tmp_path / folder / name / "x").write_bytes(bytes(4096))
    for model in "abcd":
        bring(model)
    assert there(tmp_path) == set("bcd") and Home(tmp_path).under_way() == []
    assert (tmp_path / ".under-way" / name / "x").exists() and (tmp_path / ".starts" / name / "x").exists()


@pytest.mark.parametrize("what", ["rename", "access", "remove"])
def test_what_cannot_leave_is_passed_over(
    tmp_path: Path, bring: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """One that may not be moved, one that has a folder of somebody else, or what is left of one: it is said, the next one leaves, and
    its bytes still count. Where the rest is too small, nothing leaves."""
    home, bring = Home(tmp_path), partial(bring, capacity=3 * MODEL_BYTES + 32768)
    for model in "abc":
        bring(model)
    place = home.place("a", "r")
    of = folders if what == "remove" else os
    real = getattr(of, what)

    def refused(path: Path, *arguments: object) -> object:
        if str(path).startswith((str(place), str(tmp_path / ".under-way/a@r~"))):
            if what == "access":
                return False
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "x.json")
        return real(path, *arguments)

    monkeypatch.setattr(of, what, refused)
    bring("d")
    stay = {"rename": "acd", "access": "acd", "remove": "cd"}[what]
    assert there(tmp_path) == set(stay)
    bring("e")
    home.pin("e")
    with pytest.raises(NoRoom):
        bring("f", size_bytes=2 * MODEL_BYTES)  # as much as is not pinned
    assert there(tmp_path) == set(stay) - {"c"} | {"e"}
    if what != "remove":
        with pytest.raises((FilesWrong, PermissionError)):
            home.evict("a")
    monkeypatch.undo()
    bring("g")
    assert there(tmp_path) == set("deg")
    assert not list((tmp_path / ".under-way").iterdir())


def test_a_damaged_mark_is_no_revision(tmp_path: Path, bring: Callable[..., Path]) -> None:
    """It is said, it may be evicted, and preloading fills the place anew."""
    path = bring("a")
    (path / home_module.MARK).write_bytes(b"KVMODEL2 nonsense")
    with pytest.raises(FilesWrong, match=r"\.kvstore-model"):
        Home(tmp_path).find("a")
    assert Home(tmp_path).revisions() == []
    bring("a")
    (path / home_module.MARK).write_bytes(b"")
    Home(tmp_path).evict("a")
    assert not path.exists()


def test_one_that_is_evicted_while_it_is_looked_at(
    tmp_path: Path, bring: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever lists models has the others, and no failure; whoever looks for it hears that it is not there."""
    for model in ("a", "b"):
        bring(model)
    has_size = home_module._has_size

    def evicted_meanwhile(path: Path, size_bytes: int) -> bool:
        found = has_size(path, size_bytes)
        if path.name == "w.bin" and "models--a" in path.parts:
            shutil.rmtree(tmp_path / "models--a")
        return found

    monkeypatch.setattr(home_module, "_has_size", evicted_meanwhile)
    assert there(tmp_path) == {"b"}
    with pytest.raises(ModelMissing):
        Home(tmp_path).find("a")


def test_users_of_other_names_may_read_what_is_whole(tmp_path: Path, bring: Callable[..., Path]) -> None:
    """The daemon of one user preloads, an engine of another one loads: names and manifests are as readable as the files."""
    umask = os.umask(0o022)
    try:
        path = bring("a")
    finally:
        os.umask(umask)
    for file in (path / "w.bin", path / home_module.MARK, *(path.parents[1] / "refs").iterdir()):
        assert file.stat().st_mode & 0o777 == 0o644, file


def test_a_preload_that_cannot_say_how_far_it_is_goes_on(tmp_path: Path, bring: Callable[..., Path]) -> None:
    """The room for its files was taken before; that of a word about them may be missing."""
    (tmp_path / ".under-way").mkdir()
    (tmp_path / ".under-way" / "a@r~progress").symlink_to("/dev/full")
    bring("a")
    assert os.listdir(tmp_path / ".under-way") == []


def test_what_is_whole_no_more_counts_and_leaves_first(tmp_path: Path, bring: Callable[..., Path]) -> None:
    """A revision whose manifest is damaged takes room like any other, and leaves before those that are whole; a snapshot that somebody
    else keeps in this directory is neither counted nor touched."""
    strange = tmp_path / "models--org--Name/snapshots/abc"
    strange.mkdir(parents=True)
    (strange / "w.bin").write_bytes(bytes(4 * MODEL_BYTES))
    for model in ("a", "b", "c"):
        path = bring(model)
    (path / home_module.MARK).write_bytes(b"KVMODEL2 nonsense")
    bring("d")
    assert there(tmp_path) == {"a", "b", "d"} and not path.exists()
    assert (strange / "w.bin").stat().st_size == 4 * MODEL_BYTES


@pytest.mark.parametrize("text", ["", "@", "a@", "../a", "a@../b", "A", "a/b", "a@b@c", "x" * 97])
def test_names_stay_inside(text: str) -> None:
    """What is no name of a model is no path either."""
    with pytest.raises(ModelError, match="allowed are"):
        parse_name(text)


def test_names_are_read_as_they_are_written() -> None:
    """With and without a revision."""
    assert parse_name("qwen3-8b") == ("qwen3-8b", "") and parse_name("m@r1") == ("m", "r1")
    assert name_of("m", "r1") == "m@r1" and name_of("m", "") == "m"


def start_of(home: Path, name: str, size_bytes: int, age_s: float) -> Path:
    """A start directory, as it is left."""
    path = home / ".starts" / name
    path.mkdir(parents=True)
    (path / "tokenizer.json").write_bytes(bytes(size_bytes))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_start_directories_count_and_leave(tmp_path: Path, bring: Callable[..., Path]) -> None:
    """They have room of models.nvme_bytes; the first to leave are those that nobody has, and that nobody is about to open."""
    over = start_of(tmp_path, "over@r", MODEL_BYTES // 2, 2 * START_STAYS_S)
    young = start_of(tmp_path, "young@r", 4096, 0.0)
    used = start_of(tmp_path, "used@r", 4096, 2 * START_STAYS_S)
    use(used)
    bring("a")
    bring("b")
    assert over.is_dir()
    bring("c", capacity=3 * MODEL_BYTES + 32768)
    assert there(tmp_path) == {"a", "b", "c"} and not over.is_dir() and young.is_dir() and used.is_dir()
    bring("d", capacity=3 * MODEL_BYTES)
    assert there(tmp_path) == {"c", "d"}  # what young and used have is no room for models


def test_a_start_directory_that_is_being_made_stays(tmp_path: Path, bring: Callable[..., Path]) -> None:
    """Whoever sweeps meanwhile leaves it; what a killed process was making goes."""
    home, left = Home(tmp_path), tmp_path / ".under-way" / "a@r~0~leaving"
    left.mkdir(parents=True)
    with home.new_start("a", "r") as fresh:
        (fresh / "x").touch()
        bring("b")
        assert (fresh / "x").exists() and not left.exists() and not home.place_of_start("a", "r").exists()
    assert os.listdir(home.place_of_start("a", "r")) == ["x"] and os.listdir(tmp_path / ".under-way") == []
    with pytest.raises(KeyError), home.new_start("a", "r"):
        raise KeyError
    assert os.listdir(home.place_of_start("a", "r")) == ["x"] and os.listdir(tmp_path / ".under-way") == []


def test_a_start_directory_leaves_when_its_model_is_here(tmp_path: Path, bring: Callable[..., Path]) -> None:
    """With the next preload, or when its model is evicted; evicting one that is not here takes its start directory away."""
    over, young = start_of(tmp_path, "a@r", 10, 2 * START_STAYS_S), start_of(tmp_path, "b@r", 10, 0.0)
    bring("a")
    bring("b")
    assert not over.exists() and young.exists()
    alone = start_of(tmp_path, "c@r", 10, 0.0)
    home = Home(tmp_path)
    assert home.evict("b") == "r" and home.evict("c", "r") == "r"
    assert not young.exists() and not alone.exists()
    with pytest.raises(ModelMissing):
        home.evict("c", "r")
