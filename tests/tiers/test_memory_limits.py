"""How much memory may still be taken: the machine, and cgroups of both versions, nested and in containers."""

from __future__ import annotations

import os
from pathlib import Path

from tests.tiers.trees import MIB, NONE_V1, Tree
from tiers.dram import memory_limits
from tiers.dram.memory_limits import Limit, free_bytes, limits, memory_left, oom_kills

GIB = 1 << 30


def test_without_cgroups_the_machine_is_the_limit(tmp_path: Path) -> None:
    """MemAvailable is what may be taken, MemTotal what ever could be."""
    tree = Tree(tmp_path, 8 * GIB, 3 * GIB)
    assert limits(tree.proc) == [Limit("this machine", 8 * GIB, 3 * GIB)]


def test_the_tightest_group_of_version_2_counts(tmp_path: Path) -> None:
    """Ours has no limit, the one above has; page cache counts as free, and the headroom is left."""
    tree = Tree(tmp_path, 8 * GIB, 8 * GIB)
    tree.v2("/a/b")
    tree.group2("a/b", "max", 10 * MIB)
    tree.group2("a", 400 * MIB, 300 * MIB, cache_bytes=100 * MIB)
    assert limits(tree.proc)[1:] == [Limit("cgroup /a", 400 * MIB, 200 * MIB)]
    assert memory_left(72 * MIB, proc=tree.proc) and not memory_left(73 * MIB, proc=tree.proc)
    assert not memory_left(72 * MIB, headroom_bytes=129 * MIB, proc=tree.proc)
    tree.available(8 * GIB, 150 * MIB)
    assert not memory_left(72 * MIB, proc=tree.proc)


def test_memory_high_is_a_limit(tmp_path: Path) -> None:
    """Beyond it the kernel makes every allocation wait: as bad as an end."""
    tree = Tree(tmp_path, 8 * GIB, 8 * GIB)
    tree.v2("/")
    tree.group2(".", 800 * MIB, 100 * MIB, high=str(500 * MIB))
    assert limits(tree.proc)[1:] == [Limit("cgroup /", 500 * MIB, 400 * MIB)]


def test_groups_of_version_1_count(tmp_path: Path) -> None:
    """Also beside version 2, and with the kernel's number for "none"."""
    tree = Tree(tmp_path, 8 * GIB, 8 * GIB)
    tree.v1("/pod/box")
    tree.v2("/")
    tree.group1("pod/box", 400 * MIB, 300 * MIB, cache_bytes=50 * MIB)
    tree.group1("pod", 1 * GIB, 900 * MIB)
    tree.group1(".", NONE_V1, 7 * GIB)
    found = limits(tree.proc)[1:]
    assert found == [Limit("cgroup /pod/box", 400 * MIB, 150 * MIB), Limit("cgroup /pod", GIB, 124 * MIB)]
    assert free_bytes(tree.proc) == 124 * MIB


def test_a_limit_above_what_a_container_sees_counts(tmp_path: Path) -> None:
    """Version 1 says in a group's statistics which limit holds for it from above."""
    tree = Tree(tmp_path, 8 * GIB, 8 * GIB)
    tree.v1("/docker/abc", root="/docker/abc")
    tree.group1(".", NONE_V1, 100 * MIB, above=600 * MIB)
    assert limits(tree.proc)[1:] == [Limit("cgroup /", 600 * MIB, 500 * MIB)]


def test_a_container_finds_its_own_group(tmp_path: Path) -> None:
    """Whether the mount is a part of the tree, or /proc tells a path that nothing here has."""
    for number, (own, root) in enumerate([("/x/y", "/x"), ("/", "/"), ("/../z", "/"), ("/elsewhere", "/x")]):
        tree = Tree(tmp_path / str(number), 8 * GIB, 8 * GIB)
        tree.v2(own, root)
        tree.group2("y" if own == "/x/y" else ".", 400 * MIB, 100 * MIB)
        assert free_bytes(tree.proc) == 300 * MIB, own


def test_what_cannot_be_read_sets_no_limit(tmp_path: Path) -> None:
    """Nonsense and missing files are no limit, and no error."""
    assert limits(tmp_path) == []
    assert oom_kills(tmp_path) is None
    tree = Tree(tmp_path, 8 * GIB, 2 * GIB, oom_kills=3)
    tree.v2("/a")
    tree.group2("a", "nonsense", 1)
    (tree.proc / "self/mountinfo").write_text("nonsense\n")
    assert limits(tree.proc) == [Limit("this machine", 8 * GIB, 2 * GIB)]
    assert oom_kills(tree.proc) == 3


def test_a_mount_with_any_path_takes_no_limit_away(tmp_path: Path) -> None:
    """Paths of mounts need not be UTF-8."""
    tree = Tree(tmp_path, 8 * GIB, 8 * GIB)
    tree.v2("/a")
    tree.group2("a", 400 * MIB, 100 * MIB)
    table = tree.proc / "self/mountinfo"
    table.write_bytes(b"29 1 8:1 / /mnt/\xff\x85 rw - ext4 /dev/\xff rw\n" + table.read_bytes())
    assert free_bytes(tree.proc) == 300 * MIB


def test_a_group_that_is_over_its_limit_has_nothing_free(tmp_path: Path) -> None:
    """A limit that was lowered is no negative room."""
    tree = Tree(tmp_path, 8 * GIB, 8 * GIB)
    tree.v2("/")
    tree.group2(".", 100 * MIB, 300 * MIB)
    assert free_bytes(tree.proc) == 0 and not memory_left(1, 0, tree.proc)


def test_this_machine_is_read() -> None:
    """The real /proc: the machine's own limit is as large as its memory."""
    machine = limits()[0]
    assert machine.limit_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < machine.free_bytes <= machine.limit_bytes
    assert free_bytes(memory_limits.PROC) <= machine.limit_bytes
