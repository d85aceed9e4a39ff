"""Opening an NVMe directory: what is refused, and that what is refused stays untouched."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiers.factories import content, key, record
from tiers.base import Get, Put
from tiers.constants import NVME_ROW_BYTES_EST
from tiers.direct import DiskIO
from tiers.errors import BusyError, NotOursError, OpenError, VersionError
from tiers.nvme import NvmeTier, capacity_for, repair
from tiers.rows import Rows

SLAB_BYTES = 1 << 20
CAPACITY_BYTES = capacity_for(3, SLAB_BYTES)
SIZE = 20_000


class NoDirect(DiskIO):
    """A file system without O_DIRECT."""

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(path, flags)


def opened(*paths: Path) -> NvmeTier:
    return NvmeTier(paths, CAPACITY_BYTES, SLAB_BYTES)


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def hits(tier: NvmeTier, count: int) -> int:
    """How many of the first records are hits; each with the right bytes."""
    into = [bytearray(SIZE) for _ in range(count)]
    answers = tier.get([(key(n), memoryview(view)) for n, view in enumerate(into)])
    found = [n for n, (answer, _) in enumerate(answers) if answer is Get.HIT]
    assert all(into[n] == content(n, SIZE) for n in found)
    return len(found)


def open_and_scan(directory: Path) -> None:
    tier = opened(directory)
    try:
        list(tier.scan())
    finally:
        tier.close()


def used(directory: Path, count: int = 30) -> Path:
    """A closed directory that holds some records."""
    tier = opened(directory)
    assert set(tier.put([record(n, SIZE) for n in range(count)])) == {Put.STORED}
    tier.close()
    return directory


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    """While one process has a directory open, another gets BusyError; after its end the directory opens."""
    code = (
        "import sys; from pathlib import Path; from tiers.nvme import NvmeTier\n"
        f"tier = NvmeTier([Path(sys.argv[1])], {CAPACITY_BYTES}, {SLAB_BYTES}); print('open', flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "disk")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        with pytest.raises(BusyError, match="another process"):
            opened(tmp_path / "disk")
        process.kill()
    opened(tmp_path / "disk").close()


def test_the_same_process_is_refused_too(tmp_path: Path) -> None:
    """Two tiers of one process cannot share a directory, and the refused one closes its others."""
    tier = opened(tmp_path / "a")
    with pytest.raises(BusyError):
        opened(tmp_path / "b", tmp_path / "a")
    opened(tmp_path / "b").close()
    tier.close()


@pytest.mark.parametrize("marker", [None, b"{}", b"not json", b'{"magic": "other", "version": 1}', b"[]"])
def test_a_foreign_directory_is_untouched(tmp_path: Path, marker: bytes | None) -> None:
    """A directory with somebody else's files raises NotOursError, and not one byte in it changes."""
    (tmp_path / "photos").write_bytes(b"dear")
    if marker is not None:
        (tmp_path / "kvstore.json").write_bytes(marker)
    before = contents(tmp_path)
    with pytest.raises(NotOursError, match=r"kvstore\.json"):
        opened(tmp_path)
    assert contents(tmp_path) == before


def test_another_version_is_untouched(tmp_path: Path) -> None:
    """A directory of another format version raises VersionError, naming both, and does not change."""
    marker = used(tmp_path) / "kvstore.json"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "version": 2}))
    before = contents(tmp_path)
    with pytest.raises(VersionError, match="version 2; this program reads 1"):
        opened(tmp_path)
    assert contents(tmp_path) == before


def test_a_claim_cut_short_is_taken_up_again(tmp_path: Path) -> None:
    """A crash between lock and marker leaves a directory that still counts as empty."""
    (tmp_path / "lock").touch()
    (tmp_path / "kvstore.json.tmp").write_bytes(b'{"mag')
    (tmp_path / "lost+found").mkdir()
    tier = opened(tmp_path)
    assert tier.put([record(0, SIZE)]) == [Put.STORED]
    tier.close()


def test_another_slab_size_stops_and_says_what_to_do(tmp_path: Path) -> None:
    """A directory keeps the slab size it was made with: another setting names both and loses nothing."""
    used(tmp_path)
    with pytest.raises(OpenError, match=r"slab_bytes = 2097152, but it was made with 1048576"):
        NvmeTier([tmp_path], 4 << 21, 2 << 20)
    tier = opened(tmp_path)
    assert hits(tier, 30) == 30
    tier.close()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"capacity_bytes": SLAB_BYTES}, "capacity_bytes"),
        ({"slab_bytes": 1000}, "slot_bytes_min"),
        ({"slab_bytes": SLAB_BYTES + 1}, "slab_bytes"),
        ({"slot_bytes_min": 5000}, "slot_bytes_min"),
    ],
)
def test_wrong_settings_name_key_and_value(tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    """A setting that cannot work raises OpenError with its name, and makes no directory."""
    arguments: dict[str, Any] = {"capacity_bytes": CAPACITY_BYTES, "slab_bytes": SLAB_BYTES, **settings}
    with pytest.raises(OpenError, match=named):
        NvmeTier([tmp_path / "disk"], **arguments)
    assert not (tmp_path / "disk").exists()


def test_an_unusable_path_is_one_clear_error(tmp_path: Path) -> None:
    """A path that is a file raises OpenError that names it."""
    (tmp_path / "file").touch()
    with pytest.raises(OpenError, match="file"):
        opened(tmp_path / "file")


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    """Nobody else may read what is cached: directories 0700, slabs 0600."""
    directory = used(tmp_path / "disk")
    modes = {path: path.stat().st_mode & 0o777 for path in (directory, directory / "rows")}
    assert set(modes.values()) == {0o700}
    assert {path.stat().st_mode & 0o777 for path in directory.glob("*.*")} == {0o600}


def test_o_direct_on_demands_it(tmp_path: Path) -> None:
    """direct = "on" refuses a file system without O_DIRECT, "off" never uses it."""
    tier = NvmeTier([tmp_path], CAPACITY_BYTES, SLAB_BYTES, "off")
    assert not tier.directories[0].direct
    assert tier.put([record(0, SIZE)]) == [Put.STORED] and hits(tier, 1) == 1
    tier.close()
    disk = NoDirect()
    with pytest.raises(OpenError, match='direct is "on"'):
        NvmeTier([tmp_path], CAPACITY_BYTES, SLAB_BYTES, "on", io=disk)
    NvmeTier([tmp_path], CAPACITY_BYTES, SLAB_BYTES, io=disk).close()


def test_disk_use_stays_within_the_capacity(tmp_path: Path) -> None:
    """A full directory of smallest records uses no more slab bytes than given, with a row's room to each."""
    tier = opened(tmp_path)
    number = 0
    while tier.put([record(number, 10)]) == [Put.STORED]:
        number += 1
    stats = tier.stats()
    slabs = sum(path.stat().st_size for path in tmp_path.glob("slab-*"))
    assert slabs == stats.capacity_bytes == stats.used_bytes
    assert slabs + number * NVME_ROW_BYTES_EST <= CAPACITY_BYTES
    tier.close()


def break_current(rows: Path) -> None:
    (rows / "CURRENT").write_text("garbage")


def break_manifest(rows: Path) -> None:
    next(rows.glob("MANIFEST*")).write_bytes(os.urandom(100))


def break_table(rows: Path) -> None:
    table = max(rows.glob("*.sst"), key=lambda path: path.stat().st_size)
    data = bytearray(table.read_bytes())
    data[200:240] = os.urandom(40)
    table.write_bytes(data)


@pytest.mark.parametrize("breaking", [break_current, break_manifest, break_table])
def test_damaged_rocksdb_is_one_error_and_repair_loses_nothing_silently(
    tmp_path: Path, breaking: object
) -> None:
    """Damaged rows raise OpenError in one line; repair keeps them aside, and the directory works again."""
    used(tmp_path)
    assert callable(breaking)
    breaking(tmp_path / "rows")
    damaged = contents(tmp_path / "rows")
    with pytest.raises(OpenError) as caught:
        open_and_scan(tmp_path)
    assert "\n" not in str(caught.value) and "fsck --repair" in str(caught.value)
    done = repair(tmp_path)
    assert done.kept_at is not None
    kept = contents(done.kept_at)
    assert all(kept[name] == data for name, data in damaged.items() if name.endswith(".sst"))
    tier = opened(tmp_path)
    assert len(list(tier.scan())) == done.rows == hits(tier, 30) == (0 if breaking is break_table else 30)
    assert tier.check() == []
    assert tier.put([record(n, SIZE) for n in range(30)]) == [Put.STORED] * 30
    assert hits(tier, 30) == 30
    tier.close()


def test_repair_salvages_around_the_damage(tmp_path: Path) -> None:
    """One damaged block costs its own rows: those before and after it are salvaged."""
    rows = Rows(tmp_path)
    value = bytes(28)
    for number in range(3000):
        rows._db.put(b"key-%06d" % number, value)
    rows.close()
    table = max(tmp_path.glob("*.sst"), key=lambda path: path.stat().st_size)
    data = bytearray(table.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 8] = os.urandom(8)
    table.write_bytes(data)
    rows = Rows(tmp_path)
    with pytest.raises(OpenError):
        rows.chunk(None, 5000)
    salvaged = [key for key, _raw in rows.salvage()]
    rows.close()
    assert 1500 < len(salvaged) < 3000 and len(set(salvaged)) == len(salvaged)
    assert b"key-000000" in salvaged and b"key-002999" in salvaged


def test_repair_leaves_sound_rows_alone(tmp_path: Path) -> None:
    """Repairing what is not broken counts its rows and moves nothing."""
    used(tmp_path)
    done = repair(tmp_path)
    assert (done.rows, done.kept_at) == (30, None)
    assert not list(tmp_path.glob("rows.*"))


def test_a_scan_left_half_way_blocks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan that is not finished keeps no lock: the tier stores, closes and opens again."""
    monkeypatch.setattr("tiers.nvme_directory.NVME_SCAN_ROWS", 4)
    tier = opened(used(tmp_path))
    scan = tier.scan()
    next(scan)
    assert tier.put([record(50, SIZE)]) == [Put.STORED]
    assert len(list(scan)) in (29, 30)
    unfinished = tier.scan_rows()
    next(unfinished)
    assert tier.check() == []
    tier.close()
    again = opened(tmp_path)
    assert hits(again, 30) == 30 and sorted(again.scan_rows()) == sorted(
        (item.key, item.parent, item.size_bytes) for item in again.scan()
    )
    assert again.check() == []
    again.close()
    with pytest.raises(OpenError, match="closed"):
        list(unfinished)
