"""Whatever lies on a node, or comes through its socket: each reader has one kind of error, and what is damaged costs what it says.

good file or frame ─▶ changed ─▶ reader ─▶ a value, or the one kind of error
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.commands.erased_file import ErasedFile
from kvstore.commands.uncleared import Uncleared
from kvstore.daemon.config.config_sources import load
from kvstore.daemon.config.regions_file import RegionsFileError, load_regions
from kvstore.daemon.last_run import LastRun, Serving
from kvstore.durable.demand import Demand
from kvstore.durable.demand_file import DemandFile
from kvstore.errors import ConfigError, ReplayError
from kvstore.health.write_budget import Ledger
from kvstore.health.write_budget_file import WriteBudgetFile
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.protocol import frames
from kvstore.retention.rules import Book, Pin, Quota, RuleFile, Ttl
from kvstore.tools.replay.trace import read
from replication.formats.sealed import seal
from replication.formats.tombstones import Tombstone
from tests.door.daemon import Daemon
from tests.fuzz.mutator import INPUTS, changed, nonsense
from tests.tiers.test_arena import make, store
from tiers.dram.arena_files import table_path
from tiers.errors import OpenError
from tiers.namespace_spec import NamespaceSpec
from tiers.nvme.device_home import read_marker

ROOT = Path(__file__).parents[2]
FUZZ = settings(
    max_examples=INPUTS,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
chances = st.integers(0, 1 << 62).map(random.Random)


class Format(NamedTuple):
    """name: of the file. read: as the daemon does, or a command; raises what it may."""

    name: str
    good: bytes
    read: Callable[[Path], object]
    errors: tuple[type[Exception], ...] = ()


BOOK = Book(
    pins=(Pin("ab" * 16, "cd" * 32, 1.0),),
    ttls=(Ttl(5.0, 1.0, tenant="a tenant"),),
    quotas=(Quota(1 << 30, None, 2.0, namespace="ab" * 16),),
)
DEMAND = Demand(8)
ERASED = seal(
    b"KVERASE1",
    [Tombstone(tenant="t", namespaces=(bytes(16),), block_hash=b"b", watched_until_s=9, serial=3)],
)
MARKER = b'{"magic": "kvstore nvme directory", "version": 3, "instance": "a", "slab_bytes": 4194304, "slot_bytes_min": 4096}'
FORMATS = [
    Format("kvstore.toml", (ROOT / "deploy" / "kvstore.toml").read_bytes(), lambda p: load(p, environment={}), (ConfigError,)),
    Format("regions.toml", (ROOT / "deploy" / "regions.toml").read_bytes(), load_regions, (RegionsFileError,)),
    Format("trace.jsonl", b'{"timestamp": 1, "hash_ids": [1, 2], "input_length": 700, "block_tokens": 512}\n' * 3, lambda p: read([p]), (ReplayError,)),
    Format("retention.json", msgspec.json.encode(BOOK), lambda p: RuleFile(p).read().require_fitting()),
    Format("namespaces.json", msgspec.json.encode([NamespaceSpec(b"d" * 16, 4096, 16, 16, {"model": "m"})] * 2), lambda p: list(NamespaceRegistry(p))),
    Format("serving.json", msgspec.json.encode(Serving("boot", 3, 1 << 30)), lambda p: LastRun(p).headroom_bytes),
    Format("write_budget.json", msgspec.json.encode(Ledger([(1.0, 5), (2.0, 6)], 7)), lambda p: WriteBudgetFile(p).open(1 << 30).spent_bytes),
    Format("demand.bin", DEMAND.snapshot(), lambda p: DemandFile(p, Demand(8)).open()),  # type: ignore[func-returns-value]
    Format("erased.bin", ERASED, ErasedFile),
    Format("uncleared.json", b'{"format": 1, "disks": {"a disk": ["", "abcd"]}}', lambda p: Uncleared(p).names("a disk", b"n")),
    Format("kvstore.json", MARKER, lambda p: read_marker(p.parent), (OpenError,)),
]  # fmt: skip


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_files(tmp_path: Path, kind: Format) -> None:
    """A value, or the one kind of error; the good one is read."""
    path = tmp_path / "here" / kind.name
    path.parent.mkdir()
    path.write_bytes(kind.good)
    kind.read(path)

    @FUZZ
    @given(chances, st.booleans())
    def run(chance: random.Random, is_whole: bool) -> None:
        content = changed(chance, kind.good)
        if is_whole and kind.name.endswith(".json"):
            content = msgspec.json.encode(nonsense(chance, msgspec.json.decode(kind.good)))
        for left in path.parent.iterdir():
            left.unlink()
        path.write_bytes(content)
        with suppress(*kind.errors):
            kind.read(path)

    run()


def test_the_table_of_an_arena(tmp_path: Path, shm: Path) -> None:
    """Damage to header, generations or rows: it is adopted without what is damaged, or made anew, and its books balance."""
    path = shm / f"kvstore-{'ab' * 16}.arena"
    first = make(path)
    for number in range(4):
        store(first, number)
    first.close()
    good = table_path(path).read_bytes()
    end = len(good.rstrip(b"\0")) + 200
    slabs = path.read_bytes()

    @FUZZ
    @given(chances, st.booleans())
    def run(chance: random.Random, keeps_length: bool) -> None:
        content = changed(chance, good[:end])
        content = (content[:end].ljust(end, b"\0") + good[end:]) if keeps_length else content
        for file, data in ((table_path(path), content), (path, slabs)):
            if not file.exists():
                file.touch(0o600)
            file.write_bytes(data)
        arena = make(path)
        try:
            assert arena.check() == []
            for slot, record in arena.adopted_slots():
                assert 0 < len(record.key) <= 80
                arena.verify(slot)
        finally:
            arena.close()

    run()


def _values() -> list[Any]:
    """A request of each kind that says something, as builtins."""
    digest = b"d" * 16
    requests = [
        frames.Register(digest, 4096, 16, 16, {"model": "m"}),
        frames.Lookup([0], b"h" * 32, 5),
        frames.Windows([(0, 16)], b"h" * 32, 16, 16, 32, 32),
        frames.Reserve(0, b"h" * 32, b""),
        frames.Acquire(0, b"h" * 32, 0),
        frames.Release(1),
        frames.Status(),
        frames.Live(5.0),
        frames.Retention(),
        frames.FindPrefixes("", "abcd"),
        frames.GetSettings(""),
        frames.Check(),
    ]
    return [
        msgspec.msgpack.decode(frames.encode_frame(request)[frames.HEADER_BYTES :]) for request in requests
    ]


def test_frames(tmp_path: Path, shm: Path) -> None:
    """Whatever a peer sends, the daemon answers or hangs up, serves the next one, and its books balance."""
    daemon = Daemon(tmp_path / "s", shm / "fuzz.arena", 4 << 20)
    values = _values()

    @FUZZ
    @given(chances, st.booleans())
    def run(chance: random.Random, is_frame: bool) -> None:
        sent = [_frame(chance, chance.choice(values), is_frame) for _ in range(chance.randrange(1, 4))]
        asyncio.run(_say(tmp_path / "s", sent))

    try:
        run()
        assert daemon.call(daemon.engine.check) == []
        assert asyncio.run(_say(tmp_path / "s", [frames.encode_frame(frames.Status())])) is not None
    finally:
        daemon.close()


def _frame(chance: random.Random, value: Any, is_frame: bool) -> bytes:
    payload = msgspec.msgpack.encode(nonsense(chance, value))
    whole = frames.HEADER.pack(len(payload)) + payload
    return whole if is_frame else changed(chance, whole)[: 1 << 20]


async def _say(path: Path, sent: list[bytes]) -> bytes | None:
    """Hello, these, and the end: the first answer to them, None where it hung up before."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(frames.encode_frame(frames.Hello(frames.PROTOCOL_VERSION, "fuzz")))
        size = frames.HEADER.unpack(await reader.readexactly(frames.HEADER_BYTES))[0]
        await reader.readexactly(size)
        writer.write(b"".join(sent))
        writer.write_eof()
        size = frames.HEADER.unpack(await reader.readexactly(frames.HEADER_BYTES))[0]
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, OSError):
        return None
    finally:
        writer.close()


@pytest.fixture
def shm() -> Iterator[Path]:
    """An empty directory in shared memory."""
    directory = Path(tempfile.mkdtemp(prefix="kvstore-test-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)
