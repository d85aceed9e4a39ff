"""How large the arena becomes: by what is free, what is allowed, what was asked for, and what is there already."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from kvstore.daemon.config.config import Dram
from kvstore.daemon.config.sizing import plan_arena
from kvstore.daemon.last_run import LastRun
from kvstore.errors import MemoryShort, StartSettingError
from tests.tiers.trees import MIB, Tree
from tiers.constants import MEMORY_HEADROOM_BYTES
from tiers.dram.arena import open_arena
from tiers.dram.pages import arena_name
from tiers.errors import SettingError

INSTANCE = "test"
HEADROOM_BYTES = 16 * MIB


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A machine of 1 GiB, of which 200 MiB are free."""
    (tmp_path / "shm").mkdir()
    return Tree(tmp_path, 1024 * MIB, 200 * MIB)


def settings(tree: Tree, capacity: str, **more: Any) -> Dram:
    return Dram(
        **{"capacity_bytes": capacity, "slab_bytes": 2 * MIB, "directory": tree.proc.parent / "shm", **more}
    )


def planned(tree: Tree, dram: Dram, **more: Any) -> int:
    """The capacity that is decided on, in bytes."""
    return plan_arena(dram, INSTANCE, HEADROOM_BYTES, proc=tree.proc, **more).layout.capacity_bytes


def leave(tree: Tree, capacity_bytes: int) -> Path:
    """What an earlier daemon leaves; all of it has its memory."""
    path = tree.proc.parent / "shm" / arena_name(INSTANCE)
    open_arena(path, capacity_bytes, 2 * MIB).close()
    return path


def test_auto_is_a_quarter_of_what_is_free(tree: Tree) -> None:
    """Of the tightest limit, less what stays free; whole slabs."""
    assert planned(tree, settings(tree, "auto")) == (200 - 16) // 4 * MIB
    tree.v2("/")
    tree.group2(".", 100 * MIB, 20 * MIB)
    assert planned(tree, settings(tree, "auto")) == (80 - 16) // 4 * MIB


def test_auto_takes_a_slab_where_a_quarter_is_less(tree: Tree) -> None:
    """A small machine has a small cache, not none."""
    tree.available(1024 * MIB, 22 * MIB)
    assert planned(tree, settings(tree, "auto")) == 2 * MIB


def test_a_small_auto_arena_has_small_slabs(tree: Tree, caplog: pytest.LogCaptureFixture) -> None:
    """Four for each size of records that is known, as far as the largest fits; four while none is. It says so. They stay as
    they are while there are as many as sizes; a size that is asked for has the slabs that are asked for."""
    tree.available(1024 * MIB, 272 * MIB)  # a quarter: one slab of 64 MiB
    dram = settings(tree, "auto", slab_bytes=64 * MIB)

    def slabs(dram: Dram = dram, **more: Any) -> tuple[int, int]:
        layout = plan_arena(dram, INSTANCE, HEADROOM_BYTES, proc=tree.proc, **more).layout
        return layout.slab_count, layout.slab_bytes // MIB

    with caplog.at_level(logging.INFO):
        assert slabs() == (4, 16)
    assert caplog.messages == [
        'dram.slab_bytes = 64MiB: too large for an arena of 64MiB: its slabs are of 16MiB (dram.capacity_bytes: "auto")'
    ]
    assert slabs(sizes=[1 * MIB, 2 * MIB]) == (8, 8)
    assert slabs(sizes=range(1, 13)) == (32, 2)  # none is smaller
    assert slabs(sizes=[1, 2, 3, 12 * MIB]) == (4, 16)  # the largest fits
    assert slabs(settings(tree, "64MiB", slab_bytes=64 * MIB), sizes=[1, 2, 3, 4]) == (1, 64)
    path = tree.proc.parent / "shm" / arena_name(INSTANCE)
    open_arena(path, 64 * MIB, 16 * MIB).close()
    for sizes in ([], [1, 2, 3, 4]):
        assert slabs(sizes=sizes) == (4, 16)
    assert slabs(sizes=[1, 2, 3, 4, 5]) == (32, 2)
    assert slabs(settings(tree, "64MiB", slab_bytes=64 * MIB)) == (1, 64)


def test_auto_keeps_the_arena_that_is_there(tree: Tree) -> None:
    """What is free changes from start to start; the arena does not, so that it is adopted."""
    leave(tree, 64 * MIB)
    for available in (600, 100, 20):
        tree.available(1024 * MIB, available * MIB)
        assert planned(tree, settings(tree, "auto")) == 64 * MIB


def test_what_fits_is_taken_as_asked(tree: Tree) -> None:
    """With its table, and with what stays free."""
    assert planned(tree, settings(tree, "176MiB")) == 176 * MIB
    assert planned(tree, settings(tree, "177MiB")) == 176 * MIB  # whole slabs


@pytest.mark.parametrize(
    ("capacity", "kind"), [("200MiB", MemoryShort), ("900MiB", MemoryShort), ("1GiB", StartSettingError)]
)
def test_what_does_not_fit_is_refused_in_a_line(tree: Tree, capacity: str, kind: type[Exception]) -> None:
    """What would fit is said; whether trying again may help depends on the machine, not on the moment."""
    with pytest.raises(kind) as caught:
        planned(tree, settings(tree, capacity))
    line = str(caught.value)
    assert line == (
        f"dram.capacity_bytes = {capacity}: of the 1 GiB of this machine 200 MiB are free and 16 MiB are to "
        'stay free; at most 178MiB would fit; set that, or dram.when_short = "shrink"'
    )
    assert planned(tree, settings(tree, "178MiB")) == 178 * MIB  # as it says
    with pytest.raises(MemoryShort):
        planned(tree, settings(tree, "180MiB"))


def test_a_group_too_small_for_it_is_a_wrong_setting(tree: Tree) -> None:
    """However much the machine has free, the limit stays: `heals` says that a restart does not help."""
    tree.v1("/pod")
    tree.group1("pod", 100 * MIB, 10 * MIB)
    with pytest.raises(StartSettingError, match=r"of the 100 MiB of cgroup /pod 90 MiB are free") as caught:
        planned(tree, settings(tree, "128MiB"))
    assert not caught.value.heals and not isinstance(caught.value, MemoryShort)


def test_shrink_takes_what_fits_and_keeps_it(tree: Tree, caplog: pytest.LogCaptureFixture) -> None:
    """Cut down with one warning; at the next start the smaller arena is adopted, not replaced."""
    dram = settings(tree, "1GiB", when_short="shrink")
    with caplog.at_level(logging.WARNING):
        assert planned(tree, dram) == 178 * MIB
    assert [record.message.rpartition("; ")[2] for record in caplog.records] == [
        "at most 178MiB would fit: the arena is smaller"
    ]
    leave(tree, 40 * MIB)
    assert planned(tree, dram) == 40 * MIB


def test_nothing_fits(tree: Tree) -> None:
    """Where not one slab has room, neither "auto" nor "shrink" starts without memory."""
    tree.available(1024 * MIB, 17 * MIB)
    for dram in (settings(tree, "auto"), settings(tree, "1GiB", when_short="shrink")):
        with pytest.raises((MemoryShort, StartSettingError), match="not even one slab of 2MiB would fit"):
            planned(tree, dram)


def test_an_arena_that_is_there_needs_no_memory(tree: Tree) -> None:
    """It is adopted however little is free: a warm restart on a full node."""
    leave(tree, 64 * MIB)
    tree.available(1024 * MIB, 9 * MIB)
    assert planned(tree, settings(tree, "64MiB")) == 64 * MIB


def test_an_arena_beyond_the_limit_is_not_adopted(tree: Tree) -> None:
    """A daemon that was moved into a smaller group is told, not killed."""
    path = leave(tree, 64 * MIB)
    tree.v2("/")
    tree.group2(".", 70 * MIB, 20 * MIB)
    with pytest.raises(StartSettingError, match="of the 70 MiB of cgroup /"):
        planned(tree, settings(tree, "64MiB"))
    assert path.exists()  # a start that fails changes nothing
    assert planned(tree, settings(tree, "64MiB", when_short="shrink")) < 64 * MIB


def test_an_arena_that_leaves_no_room_to_live_is_given_back(
    tree: Tree, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the daemon itself would be killed, records go first; one warning says so."""
    path = leave(tree, 64 * MIB)
    tree.available(1024 * MIB, 7 * MIB)
    with caplog.at_level(logging.WARNING), pytest.raises(MemoryShort):
        planned(tree, settings(tree, "64MiB"))
    assert not path.exists() and not path.with_suffix(".table").exists()
    (record,) = caplog.records
    assert record.message.startswith("this machine has 7 MiB left: the arena of an earlier daemon (6")


def test_an_arena_of_other_settings_makes_room_for_the_new_one(tree: Tree) -> None:
    """What it holds counts as free, because it is replaced."""
    leave(tree, 100 * MIB)
    assert planned(tree, settings(tree, "250MiB")) == 250 * MIB
    with pytest.raises(MemoryShort):
        planned(tree, settings(tree, "300MiB"))


def test_a_damaged_table_stops_no_start(tree: Tree) -> None:
    """The arena is planned anew; opening replaces the damaged one."""
    path = leave(tree, 32 * MIB)
    with path.with_suffix(".table").open("r+b") as file:
        file.seek(20)
        file.write(b"\xff" * 8)
    plan = plan_arena(settings(tree, "32MiB"), INSTANCE, HEADROOM_BYTES, proc=tree.proc)
    layout = plan.layout
    arena = open_arena(plan.path, layout.capacity_bytes, layout.slab_bytes, layout.slot_bytes_min)
    assert not arena.adopted
    arena.close(unlink=True)


def test_a_directory_that_cannot_be_used_is_named(tree: Tree) -> None:
    """Huge pages that are not there, a directory that is none."""
    with pytest.raises(StartSettingError, match=r"dram.directory .*none: not a directory"):
        planned(tree, settings(tree, "32MiB", directory=tree.proc / "none"))
    with pytest.raises(SettingError, match=r"huge_pages is on, but 3[0-9.]* MiB of huge pages"):
        planned(tree, settings(tree, "32MiB", huge_pages="on"))


# -- after an OOM kill --


def test_a_clean_stop_is_no_kill(tree: Tree, tmp_path: Path) -> None:
    """Others may be killed while we serve; a daemon that stops in good order was not."""
    run = LastRun(tmp_path / "serving.json", tree.proc)
    run.begin()
    tree.killed(5)
    run.end()
    after = LastRun(tmp_path / "serving.json", tree.proc)
    assert (after.was_killed, after.headroom_bytes) == (False, MEMORY_HEADROOM_BYTES)


def test_kill_9_is_no_oom_kill(tree: Tree, tmp_path: Path) -> None:
    """A crash costs no memory."""
    LastRun(tmp_path / "serving.json", tree.proc).begin()
    assert not LastRun(tmp_path / "serving.json", tree.proc).was_killed


def test_each_oom_kill_leaves_more_to_others(tree: Tree, tmp_path: Path) -> None:
    """So that starts do not end the same way for ever: twice as much each time, half the limit at most."""
    headrooms = []
    for kills in range(1, 5):
        run = LastRun(tmp_path / "serving.json", tree.proc)
        headrooms.append(run.headroom_bytes // MIB)
        run.begin()
        tree.killed(kills)
    assert headrooms == [128, 256, 512, 512]
    run = LastRun(tmp_path / "serving.json", tree.proc)
    run.begin()
    run.end()
    assert LastRun(tmp_path / "serving.json", tree.proc).headroom_bytes == MEMORY_HEADROOM_BYTES


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"{}", b'{"boot_id": "another", "oom_kills": 0, "headroom_bytes": 9}']
)
def test_a_hint_that_cannot_be_read_is_none(tree: Tree, tmp_path: Path, content: bytes) -> None:
    """Damaged, or of another boot: a start as any other."""
    (tmp_path / "serving.json").write_bytes(content)
    tree.killed(7)
    run = LastRun(tmp_path / "serving.json", tree.proc)
    assert (run.was_killed, run.headroom_bytes) == (False, MEMORY_HEADROOM_BYTES)


def test_after_an_oom_kill_a_start_is_smaller_and_not_refused(tmp_path: Path, tree: Tree) -> None:
    """The setting worked until memory ran out: less is taken, whatever dram.when_short says."""
    dram = settings(tree, "180MiB")
    LastRun(tmp_path / "serving.json", tree.proc).begin()
    assert LastRun(tmp_path / "serving.json", tree.proc).asks(dram) == dram
    tree.killed(1)
    dram = LastRun(tmp_path / "serving.json", tree.proc).asks(dram)
    plan = plan_arena(dram, INSTANCE, 2 * HEADROOM_BYTES, proc=tree.proc)
    assert plan.layout.capacity_bytes == 162 * MIB
