"""The registry of namespaces: what it keeps, what it gives up, what it refuses."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from kvstore.errors import NamespaceConflict, UnknownNamespace
from kvstore.index import forest, namespaces
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.protocol.residency_bits import IN_DRAM
from tests.engine.fakes import SteppedIo
from tiers.checksum import pack_columns
from tiers.files import replace_in_parts
from tiers.namespace_spec import NamespaceSpec

COLUMNS = pack_columns([1024] * 4)


def spec(number: int, record_bytes: int = 4096, columns: bytes = b"") -> NamespaceSpec:
    return NamespaceSpec(number.to_bytes(16, "big"), record_bytes, 32, 16, {"model": str(number)}, columns)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "NAMESPACES_MAX", 4)


def test_names_survive_a_restart(tmp_path: Path) -> None:
    """What was saved is there again, with its readable fields."""
    registry = NamespaceRegistry(tmp_path / "names.json")
    registry.register(spec(1, columns=COLUMNS))
    content = registry.snapshot()
    assert content is not None
    registry.save(content)
    assert registry.snapshot() is None
    assert [n.spec for n in NamespaceRegistry(tmp_path / "names.json")] == [spec(1, columns=COLUMNS)]


@pytest.mark.parametrize("count", [0, 1, 32, 33, 100])
def test_names_are_saved_in_small_parts(tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making all of a large file at once would hold the event loop; in parts it is the same file."""
    monkeypatch.setattr(namespaces, "NAMESPACES_MAX", 200)
    registry = NamespaceRegistry(tmp_path / "names.json")
    for number in range(count):
        registry.register(spec(number))
    registry.changed = True
    content = registry.snapshot()
    assert content is not None
    sizes = []

    def looked_at(path: Path, parts: Iterable[tuple[int, bytes]]) -> None:
        found = list(parts)
        sizes.extend(len(part) for _, part in found)
        replace_in_parts(path, found)

    monkeypatch.setattr(namespaces, "replace_in_parts", looked_at)
    registry.save(content)
    one_bytes = len(msgspec.json.encode(spec(count))) + 1
    assert max(sizes) <= namespaces.NAMESPACES_PART * one_bytes + 1
    assert msgspec.json.decode((tmp_path / "names.json").read_bytes(), type=list[NamespaceSpec]) == content
    assert [n.spec for n in NamespaceRegistry(tmp_path / "names.json")] == [spec(n) for n in range(count)]


def test_names_that_could_not_be_saved_are_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that was full for a while: nobody is told that a restart knows them, until it does."""
    registry, io = NamespaceRegistry(tmp_path / "names.json"), SteppedIo()
    registry.register(spec(1))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(namespaces, "replace_in_parts", full)
        for now_s in range(3):
            registry.keep(io, float(now_s))
            io.run()
            assert not registry.is_saved
    registry.keep(io, namespaces.NAMESPACES_RETRY_S)
    io.run()
    assert registry.is_saved
    assert [n.spec for n in NamespaceRegistry(tmp_path / "names.json")] == [spec(1)]


def test_a_damaged_file_loses_names_only(tmp_path: Path) -> None:
    """A registry that cannot be read starts empty, and records bring their namespace back."""
    (tmp_path / "names.json").write_text("{")
    registry = NamespaceRegistry(tmp_path / "names.json")
    found = registry.found(spec(1).digest + b"h" * 32, 4096, COLUMNS)
    assert found is not None and found.as_dict()["columns"] == 4
    assert registry.register(spec(1, columns=COLUMNS)) is found
    assert found.spec.fields == {"model": "1"}


def test_empty_namespaces_make_room(tmp_path: Path) -> None:
    """A full registry gives up what holds nothing, longest unasked first, and never what has blocks."""
    registry = NamespaceRegistry()
    made = [registry.register(spec(number)) for number in range(4)]
    forest.arrived(made[0], b"h" * 32, b"", IN_DRAM)
    registry.register(spec(9))
    assert registry.get(made[0].id) is made[0]
    with pytest.raises(UnknownNamespace):
        registry.get(made[1].id)
    assert len(registry) == 4


def test_too_many_with_blocks_are_refused() -> None:
    """When every namespace holds blocks a new one is refused, and a record of one is not adopted."""
    registry = NamespaceRegistry()
    for number in range(4):
        forest.arrived(registry.register(spec(number)), b"h" * 32, b"", IN_DRAM)
    with pytest.raises(NamespaceConflict):
        registry.register(spec(9))
    assert registry.found(spec(9).digest + b"h" * 32, 4096) is None


def test_another_record_size_is_a_conflict() -> None:
    """One digest has one record size, for as long as somebody uses it."""
    registry = NamespaceRegistry()
    registry.used(registry.register(spec(1)))
    with pytest.raises(NamespaceConflict):
        registry.register(spec(1, record_bytes=8192))


def test_other_columns_are_a_conflict() -> None:
    """One digest has one layout of its records, also where the number of columns is the same."""
    registry = NamespaceRegistry()
    registry.used(registry.register(spec(1, columns=COLUMNS)))
    for columns in (b"", pack_columns([1023, 1024, 1024, 1025])):
        assert registry.found(spec(1).digest + b"h" * 32, 4096, columns) is None
        with pytest.raises(NamespaceConflict, match=r"columns=4\*1024, not .* columns=1\*") as refused:
            registry.register(spec(1, columns=columns))
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "other", [spec(1, 8192), spec(1, columns=COLUMNS), NamespaceSpec(spec(1).digest, 4096, 16)]
)
@pytest.mark.parametrize("restarted", [False, True])
def test_an_abandoned_one_is_in_nobody_s_way(tmp_path: Path, other: NamespaceSpec, restarted: bool) -> None:
    """A digest that was registered with other sizes, by somebody who left and stored nothing, is registered anew, also
    after a start; not while it is used, or holds or awaits a block."""
    path = tmp_path / "names.json"
    registry = NamespaceRegistry(path)
    abandoned = registry.register(spec(1))
    registry.used(abandoned)
    with pytest.raises(NamespaceConflict):
        registry.register(other)
    registry.let_go(abandoned)
    if restarted:
        content = registry.snapshot()
        assert content is not None
        registry.save(content)
        registry = NamespaceRegistry(path)
    namespace = registry.register(other)
    assert namespace.spec == other and len(registry) == 1 and registry.of_key(other.digest) is namespace
    for fill in (namespace.writing.add, lambda h: forest.arrived(namespace, h, b"", IN_DRAM)):
        fill(b"h" * namespace.hash_bytes)
        with pytest.raises(NamespaceConflict):
            registry.register(spec(1))
        namespace.writing.clear()


def test_unused_namespaces_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that hold nothing and that everybody has let go, the last ones are remembered."""
    monkeypatch.setattr(namespaces, "NAMESPACES_UNUSED_MAX", 2)
    monkeypatch.setattr(namespaces, "NAMESPACES_MAX", 100)
    registry = NamespaceRegistry()
    made = [registry.register(spec(number)) for number in range(8)]
    forest.arrived(made[0], b"h" * 32, b"", IN_DRAM)
    for namespace in made:
        registry.used(namespace)
    registry.used(made[1])
    for namespace in made:
        registry.let_go(namespace)
    assert [n.digest for n in registry] == [spec(number).digest for number in (0, 1, 6, 7)]
    registry.used(made[6])
    for number in (10, 11):
        passing = registry.register(spec(number))
        registry.used(passing)
        registry.let_go(passing)
    assert [n.digest for n in registry] == [spec(number).digest for number in (0, 1, 6, 10, 11)]


def test_an_ended_one_stays_ended(tmp_path: Path) -> None:
    """Rows of an ended namespace are not adopted, in this life or the next, unless it was registered again; the file
    keeps so many of them and no more."""
    path = tmp_path / "names.json"
    registry = NamespaceRegistry(path)

    def restarted() -> NamespaceRegistry:
        content = registry.snapshot()
        assert content is not None
        registry.save(content)
        return NamespaceRegistry(path)

    def is_adopted(number: int) -> bool:
        return registry.found(spec(number).digest + b"h" * 32, 4096) is not None

    for number in range(3):
        registry.end(registry.register(spec(number)).id)
        assert registry.ended() is None  # it had no blocks
    registry.register(spec(3))
    registry = restarted()
    assert [n.spec for n in registry] == [spec(3)]
    assert [is_adopted(number) for number in range(4)] == [False, False, False, True]
    registry.register(spec(1))
    registry = restarted()
    assert [is_adopted(number) for number in range(4)] == [False, True, False, True]
    for number in range(10, 10 + namespaces.NAMESPACES_ENDED_MAX):
        registry.end(registry.register(spec(number)).id)
        assert registry.ended() is None
    registry = restarted()
    assert [is_adopted(number) for number in (2, 10)] == [True, False]
