"""Files that a user names and files of our own, whatever is in their place: a line for the first, no start for none of the second."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from kvstore.commands.erased_file import ErasedFile
from kvstore.commands.uncleared import Uncleared
from kvstore.daemon.config.config_sources import load
from kvstore.daemon.config.regions_file import RegionsFileError, load_regions
from kvstore.daemon.data_dir import hold
from kvstore.daemon.disks.known import Known
from kvstore.daemon.last_run import LastRun
from kvstore.durable.demand import Demand
from kvstore.durable.demand_file import DemandFile
from kvstore.errors import ConfigError, DataDirError, ReplayError, StartError
from kvstore.health.write_budget_file import WriteBudgetFile
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.ledger.totals import Totals
from kvstore.retention.rules import Book, RuleFile
from kvstore.tools.replay.trace import read
from tests.cli.test_service import HASHES, hits, put
from tests.running import Daemon, Place, kvstore
from tiers.errors import OpenError
from tiers.namespace_spec import NamespaceSpec
from tiers.nvme.device_home import read_marker
from tiers.reading import Unreadable, as_json, as_text, as_toml, read_bytes

Serve = Callable[..., Daemon]
DEEP = b"[" * 100_000
DEEP_TOML = b"a = " + b"[" * 100_000


def _write(content: bytes) -> Callable[[Path], None]:
    def put_there(path: Path) -> None:
        path.write_bytes(content)

    put_there.__name__ = f"{content[:12]!r}"
    return put_there


def _directory(path: Path) -> None:
    path.mkdir()


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


BAD = [
    _directory, _fifo, _endless, _loop, _huge,
    *(_write(content) for content in (
        b"", DEEP, DEEP_TOML, b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf", b'{"a": 1' * 10_000, b'{"magic": 1e999}',
        b"{\"format\": 1, \"pins\": [[[]]]}", b"null", b"[null, 5, {}]", b"9" * 10_000, b"a = " + b"9" * 10_000,
        b"\x00" * 100_000,
    )),
]  # fmt: skip


def problem(use: Callable[[], object], error: type[Exception]) -> str:
    """What it says, where it raises this; "" where it raises nothing."""
    try:
        use()
    except error as wrong:
        return str(wrong)
    return ""


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("put_there", BAD, ids=lambda put_there: put_there.__name__)
def test_files_that_a_user_names(tmp_path: Path, put_there: Callable[[Path], None]) -> None:
    """Each is one line, with the name of the file, however it is wrong; what is not wrong is an empty file."""
    path = tmp_path / "named"
    put_there(path)
    said = [
        problem(lambda: load(path, environment={}), ConfigError),
        problem(lambda: load_regions(path), RegionsFileError),
    ]
    assert all(path.name in text and "\n" not in text and len(text) < 1000 for text in said if text)
    if put_there is not _fifo:  # a trace may come through one
        with pytest.raises(ReplayError, match="named"):
            read([path])


@pytest.mark.parametrize("put_there", BAD, ids=lambda put_there: put_there.__name__)
def test_files_of_our_own(tmp_path: Path, put_there: Callable[[Path], None]) -> None:
    """Each reader starts over: what was in the file is lost, and nothing else."""
    path = tmp_path / "ours"
    for use in (
        lambda: RuleFile(path).read() == Book(),
        lambda: list(NamespaceRegistry(path)) == [],
        lambda: WriteBudgetFile(path).open(1 << 30) is not None,
        lambda: DemandFile(path, Demand(8)).open() is None,  # type: ignore[func-returns-value]
        lambda: LastRun(path).was_killed is False,
        lambda: Totals("", path) is not None,
    ):
        for left in path.parent.glob("ours*"):
            remove(left)
        put_there(path)
        assert use()


@pytest.mark.parametrize(
    ("number", "heals"), [(errno.EACCES, False), (errno.EIO, True), (errno.EMFILE, True)]
)
def test_what_may_be_sound_is_left_as_it_is(
    tmp_path: Path, number: int, heals: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of our own that cannot be read now ends a start, and nothing takes its place."""
    path = tmp_path / "ours"
    path.write_bytes(b"sound")
    files = sorted(tmp_path.iterdir())
    opens = os.open

    def fails(name: Any, *how: Any, **more: Any) -> int:
        if name == path:
            raise OSError(number, os.strerror(number), name)
        return opens(name, *how, **more)

    monkeypatch.setattr(os, "open", fails)
    uses: list[Callable[[], object]] = [
        lambda: RuleFile(path).read(),
        lambda: NamespaceRegistry(path),
        lambda: WriteBudgetFile(path).open(1 << 30),
        lambda: DemandFile(path, Demand(8)).open(),
        lambda: Known(path),
        lambda: Uncleared(path),
        lambda: ErasedFile(path),
    ]
    for use in uses:
        with pytest.raises(OpenError, match=f"{path}: {os.strerror(number)}: it may be sound") as said:
            use()
        assert said.value.heals == heals
        assert sorted(tmp_path.iterdir()) == files and path.read_bytes() == b"sound"


def test_a_mark_that_may_be_sound_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon would be a new instance, and its arena nobody's."""
    hold(tmp_path / "data").close()
    mark = tmp_path / "data" / "kvstore-data.json"
    before, opens = mark.read_bytes(), os.open

    def fails(name: Any, *how: Any, **more: Any) -> int:
        if name == mark:
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)
        return opens(name, *how, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fails)
        with pytest.raises(DataDirError, match=r"kvstore-data\.json: Input/output error") as said:
            hold(tmp_path / "data")
    assert said.value.heals and mark.read_bytes() == before


@pytest.mark.parametrize("put_there", BAD, ids=lambda put_there: put_there.__name__)
@pytest.mark.parametrize("with_table", [False, True])
def test_marks(tmp_path: Path, put_there: Callable[[Path], None], with_table: bool) -> None:
    """Of the data directory and of an NVMe directory: damaged or not ours, and never another exception."""
    for name, use in (
        ("kvstore-data.json", lambda: hold(tmp_path / "data", create=False)),
        ("kvstore.json", lambda: read_marker(tmp_path / "data")),
    ):
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        (tmp_path / "data").mkdir(mode=0o700)
        put_there(tmp_path / "data" / name)
        if with_table and name == "kvstore.json":
            (tmp_path / "data" / "slots.table").touch()
        with pytest.raises((StartError, OpenError)):
            use()


def test_names_of_namespaces_one_by_one(tmp_path: Path) -> None:
    """One that nobody could have registered is left out, and the others are there."""
    path = tmp_path / "namespaces.json"
    good = NamespaceSpec(b"d" * 16, 4096, 16, 16)
    bad = [
        NamespaceSpec(b"short", 4096, 16),
        NamespaceSpec(b"a" * 16, -1, 16),
        NamespaceSpec(b"b" * 16, 4096, 0),
        NamespaceSpec(b"c" * 16, 4096, 1 << 70),
        NamespaceSpec(b"e" * 16, 4096, 16, columns=b"\xff" * 7),
        NamespaceSpec(b"f" * 16, 4096, 16, block_tokens=-5),
    ]
    members = [msgspec.json.encode(spec) for spec in [*bad, good]] + [
        b"17",
        b'"x"',
        b'{"digest": 5}',
        DEEP[:100] + b"]" * 100,
    ]
    path.write_bytes(b"[" + b",".join(members) + b"]")
    assert [namespace.spec for namespace in NamespaceRegistry(path)] == [good]


@pytest.mark.parametrize("command", ["config", "regions", "trace"])
def test_a_byte_order_mark_is_no_content(tmp_path: Path, command: str) -> None:
    """Editors that begin every text with one are welcome."""
    path = tmp_path / "text"
    mark = b"\xef\xbb\xbf"
    if command == "config":
        path.write_bytes(mark + b'region = "here"\n')
        assert load(path, environment={}).config.region == "here"
    elif command == "regions":
        path.write_bytes(mark + b'deployment = "acme"\n[regions.na]\nurl = "s3://acme"\n')
        assert load_regions(path).deployment == "acme"
    else:
        path.write_bytes(mark + b'{"timestamp": 0, "hash_ids": [1, 2]}\n')
        assert len(read([path]).prompts) == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("read_trough = []", "regions.na.read_trough: unknown key: did you mean read_through?"),
        ("[[rules]]\nfrm = []", "rules[1].frm: unknown key: did you mean from?"),
        ("[mirrors]", "mirrors: unknown key: known are clock_skew_s, deployment, key_file, regions, rules"),
        ("[regions]\neu = 1", "regions.eu: is no table"),
    ],
)
def test_a_wrong_key_of_regions_has_its_nearest_one(line: str, says: str, tmp_path: Path) -> None:
    """As one of the configuration has; words are those of the file, not of our code."""
    path, na = tmp_path / "regions.toml", f'[regions.na]\nurl = "file://{tmp_path}"\n'
    path.write_text(
        'deployment = "acme"\n' + (f"{line}\n{na}" if line.startswith("[regions]") else na + line)
    )
    with pytest.raises(RegionsFileError) as raised:
        load_regions(path)
    assert raised.value.problems == (f"{path}: {says}",)


def test_one_line_of_the_command(tmp_path: Path) -> None:
    """No traceback, exit code 2, whatever was named."""
    (tmp_path / "deep").write_bytes(DEEP_TOML)
    for path in ("/dev/zero", tmp_path, tmp_path / "deep"):
        for words in (
            ["config", "check", "--config", path],
            ["region", "ls", "--regions", path],
            ["explain", f"@{path}"],
        ):
            done = kvstore(*words)
            assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), (words, done.stderr)
            assert done.stderr.startswith("kvstore: ")


def test_retention_nested_deeply_costs_the_rules(place: Place, serve: Serve) -> None:
    """The daemon starts without them, and the file is kept."""
    serve(place).stop()
    (place.data_dir / "retention.json").write_bytes(DEEP)
    daemon = serve(place)
    assert daemon.stop() == 0
    assert "pins, TTLs and quotas are lost" in daemon.log() and "Traceback" not in daemon.log()
    assert (place.data_dir / "retention.unreadable").read_bytes() == DEEP


def _emptied(table: Path) -> None:
    table.write_bytes(b"")


def _unlinked(table: Path) -> None:
    table.unlink()


def _linked(table: Path) -> None:
    table.rename(table.with_name("elsewhere"))
    table.symlink_to(table.with_name("elsewhere"))


def _made_a_directory(table: Path) -> None:
    table.unlink()
    table.mkdir()
    (table / "notes").write_text("mine")


def _made_a_fifo(table: Path) -> None:
    table.unlink()
    os.mkfifo(table, 0o600)


def _overwritten(table: Path) -> None:
    table.write_bytes(os.urandom(1000))


def _readable(table: Path) -> None:
    table.chmod(0o644)


@pytest.mark.parametrize(
    "damage", [_emptied, _unlinked, _linked, _made_a_directory, _made_a_fifo, _overwritten, _readable]
)
@pytest.mark.parametrize("of", ["table", "arena"])
def test_an_arena_that_is_none_is_replaced(
    place: Place, serve: Serve, damage: Callable[[Path], None], of: str
) -> None:
    """A cold start with a line in the log; what somebody put into a directory there is kept."""
    daemon = serve(place)
    put(place.socket)  # one with nothing in it goes at a stop
    daemon.stop()
    (path,) = (place.path / "shm").glob(f"kvstore-*.{of}")
    damage(path)
    daemon = serve(place)
    put(place.socket)
    assert hits(place.socket) == len(HASHES)
    assert daemon.stop() == 0 and "Traceback" not in daemon.log()
    kept = list((place.path / "shm").glob("*.unreadable-*/notes"))
    assert len(kept) == (damage is _made_a_directory)


@given(some.binary(max_size=4096) | some.text(max_size=1000).map(str.encode))
def test_parsers_have_one_error(content: bytes) -> None:
    """Any bytes at all: a value, or Unreadable."""
    path = Path("somewhere")
    for use in (
        lambda: as_json(path, content, Book),
        lambda: as_json(path, content, dict[str, object]),
        lambda: as_toml(path, as_text(path, content)),
    ):
        said = problem(use, Unreadable)
        assert not said or said.startswith("somewhere: ")


@given(
    some.recursive(
        some.none() | some.booleans() | some.floats() | some.integers() | some.text(),
        lambda inner: some.lists(inner) | some.dictionaries(some.text(), inner),
    )
)
def test_json_of_any_shape(value: object) -> None:
    """Whatever JSON can say: a value of the type, or Unreadable."""
    content = json.dumps(value).encode()
    for kind in (Book, list[NamespaceSpec], dict[str, object]):
        try:
            as_json(Path("x"), content, kind)
        except Unreadable:
            continue


def test_no_more_is_read_than_is_allowed(tmp_path: Path) -> None:
    """A file of exactly so many bytes is read, one more is refused without having been read."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * 1000)
    assert len(read_bytes(path, 1000)) == 1000
    with pytest.raises(Unreadable, match="too large: allowed are 999 bytes"):
        read_bytes(path, 999)
