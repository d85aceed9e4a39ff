"""The catalogue: what it says of blocks is what was announced, after any order of events, kills and damage."""

from __future__ import annotations

import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from replication.catalogue.catalogue import Catalogue, Counts
from replication.catalogue.filter import Filter
from replication.catalogue.rows import PREFIX_BYTES, Rows
from replication.errors import CatalogueBusy, CatalogueDamaged, CatalogueUnwritable
from replication.formats.announced import Announced
from replication.formats.segment import Segment
from tests.replication.durable import forget, hash_of, keys_of, pack_of, random_pack, spec_of
from tests.replication.memory_rows import MemoryRows
from tests.replication.virtual_loop import run
from tests.running import TIMEOUT_S

W = "00000000000000aa"
Reopen = Callable[[], Rows]


@pytest.fixture(params=["memory", "rocks"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reopen]:
    """Opens the same rows again, as a process does that was killed or closed."""
    content: dict[bytes, bytes] = {}
    opened: list[Rows] = []

    def again() -> Rows:
        if opened:
            opened.pop().close()
        rows = MemoryRows(content) if request.param == "memory" else Rows(tmp_path / "catalogue", "here")
        opened.append(rows)
        return rows

    yield again
    for rows in opened:
        rows.close()


def test_rows_are_a_sorted_table(reopen: Reopen) -> None:
    """Gets, prefixes, ranges, the last key, writes with deletes and renewal agree with a dict, before and after reopening."""
    chance, model, rows = random.Random(5), dict[bytes, bytes](), reopen()
    for step in range(300):
        keys = [
            chance.choice((b"k", b"l"))
            + bytes([chance.randrange(3)]) * (PREFIX_BYTES - 1)
            + bytes([chance.randrange(8)])
            for _ in range(6)
        ]
        keys += [b"p" + chance.randbytes(1), b"m"]
        puts, deletes = [(key, b"%d" % step) for key in keys[::2]], keys[1::3]
        rows.write(iter(puts), deletes)
        model |= dict(puts)
        for key in deletes:
            model.pop(key, None)
        if step == 150:
            rows.renew()
            model.clear()
        if step % 50 == 49:
            rows = reopen()
        assert rows.get([*keys, b"none"]) == [*map(model.get, keys), None] and rows.get([]) == []
        prefix = keys[0][:PREFIX_BYTES]
        assert rows.with_prefix(prefix) == sorted(key for key in model if key.startswith(prefix))
        start, end = sorted((chance.choice(keys), chance.choice([*keys, b"q"])))
        ordered = sorted((key, value) for key, value in model.items() if start <= key < end)
        limit = chance.randrange(1, 20)
        assert rows.scan(start, end, limit) == ordered[:limit]
        assert rows.keys(start, end, limit) == [key for key, _ in ordered][:limit]
        assert rows.last(start, end) == (ordered[-1][0] if ordered else None)


class Model:
    """What a catalogue must say, in dicts."""

    def __init__(self) -> None:
        self.packs: dict[bytes, Announced] = {}
        self.gone: dict[bytes, Announced] = {}
        self.now_s = 0.0
        self.positions: dict[str, int] = {}

    def forget(self, pack_id: bytes) -> bool:
        if pack_id in self.packs:
            self.gone[pack_id] = self.packs.pop(pack_id)
            return True
        return False

    def blocks(self) -> dict[bytes, list[Announced]]:
        """Who has a block, in the order of their arrival."""
        found: dict[bytes, list[Announced]] = {}
        for announced in self.packs.values():
            for key in keys_of(announced):
                found.setdefault(key, []).append(announced)
        return found

    def check(self, catalogue: Catalogue, chance: random.Random) -> None:
        blocks = self.blocks()
        assert [entry for chunk in catalogue.chunks() for entry in chunk] == list(self.packs.values())
        assert catalogue.positions == self.positions
        keys = [
            *blocks,
            *(spec_of(kind).digest + hash_of("never", size) for kind, size in enumerate((8, 20, 32))),
        ]
        chance.shuffle(keys)
        for key, spot in zip(keys, catalogue.find(keys), strict=True):
            assert (spot is not None) == (key in blocks) == catalogue.has(key[:16], key[16:])
            if spot is not None:
                assert spot.announced in blocks[key] and keys_of(spot.announced)[spot.index] == key
                first = blocks[key][0]
                assert catalogue.find([key]) == [(first, keys_of(first).index(key))]
        for announced in self.packs.values():
            assert [spot is not None for spot in catalogue.find(keys_of(announced))] == [
                True
            ] * announced.blocks
        packs = self.packs.values()
        now_s = chance.randrange(1100)
        over = [p for p in packs if 0 < p.kept_until_s < now_s]
        found = [one for some in catalogue.outlived(now_s + 0.5) for one in some]
        assert sorted(p.pack.id for p in found) == sorted(p.pack.id for p in over)
        assert [p.kept_until_s for p in found] == sorted(p.kept_until_s for p in over)
        assert catalogue.counts == Counts(
            len(packs), sum(p.blocks for p in packs), sum(p.pack.size_bytes for p in packs)
        )
        by_namespace: dict[bytes, int] = {}
        for announced in packs:
            digest = announced.pack.header.spec.digest
            by_namespace[digest] = by_namespace.get(digest, 0) + 1
        assert {spec.digest: counts.packs for spec, counts in catalogue.namespaces()} == by_namespace
        if catalogue.loaded:
            for key in keys:
                assert catalogue.held(key[:16], len(key) - 16, key[16:], 0) == (key in blocks)


@pytest.mark.parametrize("seed", range(12))
def test_a_catalogue_is_what_was_announced(reopen: Reopen, seed: int) -> None:
    """After any mix of segments, packs from elsewhere, jumps, forgotten packs, reopening and renewal, a catalogue says what
    a dict says: who has a block first, and when that one is forgotten, who has it next."""
    chance, model = random.Random(seed), Model()
    catalogue = Catalogue(reopen())
    for _ in range(120):
        dice = chance.random()
        if dice < 0.65:
            learn(catalogue, model, chance)
        elif dice < 0.85:
            pack_id = chance.choice([*model.packs, b"?" * 16])
            assert forget(catalogue, pack_id) == model.forget(pack_id)
        elif dice < 0.99:
            catalogue = Catalogue(reopen())
            if chance.random() < 0.7:
                run(catalogue.load())
        else:
            catalogue.renew()
            model = Model()
        if chance.random() < 0.3:
            model.check(catalogue, chance)
    run(catalogue.load())
    model.check(catalogue, chance)


def learn(catalogue: Catalogue, model: Model, chance: random.Random) -> None:
    """A segment, new or old, packs from elsewhere, or a jump: to catalogue and model."""
    entries = [random_pack(chance) for _ in range(chance.randrange(4))]
    writer = f"{chance.randrange(3):016x}"
    position = model.positions.get(writer, 0)
    kind = chance.choice(("segment", "segment", "segment", "old segment", "packs", "jump"))
    model.now_s += 1.0
    entries = [msgspec.structs.replace(entry, said_s=model.now_s) for entry in entries]
    if kind == "segment":
        catalogue.add(Segment(writer, position + 1, model.now_s, entries))
        model.positions[writer] = position + 1
    elif kind == "packs":
        catalogue.add_packs(entries)
    elif kind == "old segment":
        catalogue.add(Segment(writer, chance.randint(0, position), 0.0, entries))
        entries = []
    else:
        number = chance.randrange(40)
        catalogue.jump({writer: number, f"{3:016x}": 0})
        model.positions |= {writer: number} if number > position else {}
        entries = []
    for entry in entries:
        known = model.packs.setdefault(entry.pack.id, entry)
        before = model.gone.pop(entry.pack.id, known)
        lives = (before.kept_until_s, entry.kept_until_s)
        model.packs[entry.pack.id] = msgspec.structs.replace(
            known,
            origin=entry.origin and before.origin,
            kept_until_s=0 if 0 in lives else max(lives),
            said_s=model.now_s,
        )


def test_the_filter_is_exactly_what_the_rows_have() -> None:
    """Packs that come and go, before, while and after the filter is filled, leave neither too much nor too little in it."""
    for seed in range(20):
        chance, content = random.Random(seed), dict[bytes, bytes]()
        old = Catalogue(MemoryRows(content))
        packs = [pack_of([f"{seed} {n} {i}" for i in range(40)]) for n in range(60)]
        for pack in packs:
            old.add_packs([pack])
        for pack in packs[:10]:
            forget(old, pack.pack.id)
        catalogue = Catalogue(MemoryRows(content))
        present = set(range(10, 60))
        now_s = 0.0
        while not catalogue.loaded:
            catalogue._load_slice(chance.choice((1, 50, 500)))
            one = chance.randrange(60)
            now_s += 1
            if one in present:
                forget(catalogue, packs[one].pack.id)
            else:
                catalogue.add_packs([msgspec.structs.replace(packs[one], said_s=now_s)])
            present ^= {one}
        assert len(catalogue._filter) == 40 * len(present)
        for number, pack in enumerate(packs):
            header = pack.pack.header
            assert catalogue.held(header.spec.digest, 32, header.hashes, 0) == 40 * (number in present)


def test_held_is_the_end_of_the_prefix() -> None:
    """For any prefix and any start, `held` says where the durable prefix ends."""
    spec, blocks = spec_of(), 50
    hashes = b"".join(hash_of(n) for n in range(blocks))
    for durable in range(blocks + 1):
        catalogue = Catalogue(MemoryRows())
        if durable:
            catalogue.add_packs([pack_of(range(durable))])
        for start in range(blocks + 1):
            assert catalogue.held(spec.digest, 32, hashes, start) == max(start, durable)
        assert catalogue.held(spec_of(1).digest, 32, hashes, 0) == 0


def test_two_blocks_with_one_word_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that share all 64 bits by which they are looked for are found each in its own pack, also after one is gone."""
    monkeypatch.setattr("replication.catalogue.layout.digest", lambda block, seed: b"samesame")
    catalogue = Catalogue(MemoryRows())
    packs = [pack_of([n, f"{n}b"]) for n in range(5)]
    for pack in packs:
        catalogue.add_packs([pack])
    forget(catalogue, packs[0].pack.id)
    monkeypatch.setattr("replication.catalogue.layout.word", lambda row: 0)
    catalogue._loaded_partitions = 0  # the filter cannot deny what it was asked for by another digest
    for pack in packs[1:]:
        spots = catalogue.find(keys_of(pack)[::-1])
        assert [(spot.announced, spot.index) for spot in spots if spot] == [(pack, 1), (pack, 0)]
    assert catalogue.find(keys_of(packs[0])) == [None, None]


def test_segments_must_follow_each_other() -> None:
    """A segment that was passed over is a bug of the reader, and stops it."""
    catalogue = Catalogue(MemoryRows())
    catalogue.add(Segment(W, 1, 0.0, []))
    with pytest.raises(AssertionError, match="passed over"):
        catalogue.add(Segment(W, 3, 0.0, []))


def test_a_filter_is_a_set() -> None:
    """Words go in and out as of a set; no word that is in is ever denied, also to a thread that asks meanwhile."""
    chance, words, found = random.Random(1), Filter(), set[int]()
    stay = [chance.getrandbits(64) for _ in range(500)]
    words.add(stay)
    denied, is_over = [], threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            denied.extend(word for word in stay if word not in words)

    thread = threading.Thread(target=ask)
    thread.start()
    some = [chance.getrandbits(64) for _ in range(3000)]
    kept = [word >> 16 for word in (*stay, *some)]
    assert len(set(kept)) == len(kept)
    for _ in range(20_000):
        word = chance.choice(some)
        if chance.random() < 0.5:
            words.add([word, word])
            found.add(word)
        else:
            words.discard(word)
            found.discard(word)
    assert [word for word in some if word in words] == [word for word in some if word in found]
    assert len(words) == len(found) + len(stay)
    is_over.set()
    thread.join(TIMEOUT_S)
    assert not denied


def test_a_catalogue_of_another_region_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A directory that is the copy of one region is not taken for that of another one, and one line says so."""
    catalogue = Catalogue.open(tmp_path / "c", "acme/eu/1")
    catalogue.add(Segment(W, 1, 0.0, [pack_of([1])]))
    catalogue.close()
    other = Catalogue.open(tmp_path / "c", "acme/us/1")
    assert other.counts == Counts() and not other.positions
    other.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "another region" in caplog.text


def test_a_second_process_is_told_so(tmp_path: Path) -> None:
    """A catalogue that is open is not opened again, and above all not moved aside."""
    catalogue = Catalogue.open(tmp_path / "c", "here")
    catalogue.add(Segment(W, 1, 0.0, [pack_of([1])]))
    with pytest.raises(CatalogueBusy, match="another process"):
        Catalogue.open(tmp_path / "c", "here")
    assert catalogue.has(spec_of().digest, hash_of(1)) and not (tmp_path / "c.damaged").exists()
    catalogue.close()


@pytest.mark.parametrize("victim", ["*.sst", "MANIFEST-*", "CURRENT", "OPTIONS-*"])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_a_damaged_disk_costs_nothing_but_reading_again(tmp_path: Path, victim: str, how: str) -> None:
    """Whatever file is damaged, opening works or makes the catalogue anew, and what it says is true."""
    path = tmp_path / "c"
    catalogue = Catalogue.open(path, "here")
    packs = [pack_of([f"{n} {i}" for i in range(8)]) for n in range(50)]
    for number, pack in enumerate(packs, 1):
        catalogue.add(Segment(W, number, 0.0, [pack]))
    catalogue._rows._db.flush()  # type: ignore[attr-defined]  # into an SST file
    catalogue.close()
    for file in path.glob(victim):
        content = bytearray(file.read_bytes())
        for at in range(0, len(content), 97):
            content[at] ^= 0x55
        file.unlink()
        if how != "gone":
            file.write_bytes(content if how == "flipped" else content[: len(content) // 3])
    catalogue = Catalogue.open(path, "here")
    try:
        run(catalogue.load())
        found = sum(len(chunk) for chunk in catalogue.chunks())
        assert (found, catalogue.positions) in ((50, {W: 50}), (0, {}))
        assert all(None not in catalogue.find(keys_of(pack)) for pack in packs[:found])
    except CatalogueDamaged:
        catalogue.renew()
        assert catalogue.counts == Counts() and not catalogue.positions
    catalogue.add(Segment(W, catalogue.positions.get(W, 0) + 1, 0.0, [pack_of(["new"])]))
    assert catalogue.has(spec_of().digest, hash_of("new"))
    catalogue.close()


def test_a_disk_that_takes_no_more_damages_nothing(tmp_path: Path) -> None:
    """A catalogue that cannot be written has what was written, is read as before, and goes on where it was when it is opened again and
    there is room; nothing is moved aside, also by who opens it meanwhile."""
    path = tmp_path / "c"
    catalogue = Catalogue.open(path, "here")
    catalogue.add(said(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        other = Segment(W, 2, 0.0, [pack_of(["other"], spec_of(1))])
        for _ in range(2):
            with pytest.raises(CatalogueUnwritable, match="File too large"):
                catalogue.add(other)
        with pytest.raises(CatalogueUnwritable):
            catalogue.reopen()
        assert catalogue.positions == {W: 1} and len(list(catalogue.chunks())) == 1
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        catalogue.reopen()
        catalogue.add(other)
        catalogue.close()
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))
        with pytest.raises(CatalogueUnwritable):
            Catalogue.open(path, "here")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    catalogue = Catalogue.open(path, "here")
    assert [pack for chunk in catalogue.chunks() for pack in chunk] == [*said(1).entries, *other.entries]
    catalogue.close()
    assert [one.name for one in tmp_path.iterdir()] == ["c"]


def test_a_row_that_cannot_be_read_is_never_the_end(tmp_path: Path) -> None:
    """A block of a file that rots while everything else is well ends no walk through the rows as if there were no more: keys, rows,
    prefixes and the last key say that the catalogue is damaged, or are right."""
    rows = Rows(tmp_path / "rows", "here")
    chance = random.Random(4)
    said = sorted((b"k" + chance.randbytes(PREFIX_BYTES), chance.randbytes(60)) for _ in range(5000))
    rows.write(said)
    rows._db.flush()
    rows.close()
    [file] = (tmp_path / "rows").glob("*.sst")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x55
    file.write_bytes(content)
    rows = Rows(tmp_path / "rows", "here")
    for walk in (rows.keys, rows.scan):
        assert len(walk(b"k", b"l", 100)) == 100
        with pytest.raises(CatalogueDamaged, match="checksum"):
            walk(b"k", b"l", 5000)
    bad = 0
    for key, _ in said:
        try:
            assert rows.with_prefix(key[:PREFIX_BYTES]) == [key]
            assert rows.last(b"k", key + b"!") == key
        except CatalogueDamaged:
            bad += 1
    assert 0 < bad < 200
    rows.close()


KILLED = """
import sys
from pathlib import Path
from replication.catalogue.catalogue import Catalogue
from replication.formats.segment import Segment
from tests.replication.test_catalogue import W, said

catalogue = Catalogue.open(Path(sys.argv[1]), "here")
print("open", flush=True)
while True:
    catalogue.add(said(catalogue.positions.get(W, 0) + 1))
"""


def said(number: int) -> Segment:
    return Segment(
        W, number, 0.0, [pack_of([f"{number} {n} {i}" for i in range(5)]) for n in range(number % 4)]
    )


def test_kill_9_leaves_position_and_content_in_agreement(tmp_path: Path) -> None:
    """Killed ten times while it learns, a catalogue has every time all of the segments up to its position and nothing
    of the next one, and is never made anew."""
    chance, path, before = random.Random(3), tmp_path / "c", 0
    for _ in range(10):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        try:
            process.wait(chance.uniform(0.0, 0.05))
        except subprocess.TimeoutExpired:
            pass
        process.send_signal(signal.SIGKILL)
        process.wait(TIMEOUT_S)
        process.stdout.close()
        catalogue = Catalogue.open(path, "here")
        position = catalogue.positions.get(W, 0)
        assert position >= before
        packs = [entry for number in range(1, position + 1) for entry in said(number).entries]
        assert [entry for chunk in catalogue.chunks() for entry in chunk] == packs
        assert catalogue.counts.packs == len(packs)
        for pack in packs[-20:]:
            assert None not in catalogue.find(keys_of(pack))
        assert not any(
            catalogue.find([key for entry in said(position + 1).entries for key in keys_of(entry)])
        )
        catalogue.close()
        before = position
    assert before > 30 and not (tmp_path / "c.damaged").exists()
