"""What a client gets when all is well."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import xxhash

from kvstore import client as client_module
from kvstore.client import Client, Refused, Unavailable
from kvstore.client.connection import Connection
from kvstore.protocol import frames
from kvstore.protocol.residency_bits import IN_DRAM
from tests.door.conftest import RECORD_BYTES, check, hashes_of, records_of, space_of
from tests.door.daemon import MIB, Daemon
from tiers import copying
from tiers.constants import SLOT_BYTES_MIN


def test_round_trip(daemon: Daemon, client: Client) -> None:
    """What was put is found by lookup, and get copies exactly those bytes."""
    space, hashes, records = space_of(client), hashes_of(40), records_of(40)
    assert client.lookup([space], hashes) == 0
    assert client.put(space, hashes, b"", records) == 40
    assert client.put(space, hashes, b"", records) == 0
    assert client.lookup([space], hashes) == 40
    into = [bytearray(RECORD_BYTES) for _ in hashes]
    assert client.get(space, hashes, into) == 40
    assert [bytes(buffer) for buffer in into] == records
    assert client.residency(space, hashes[:2]) == bytes([IN_DRAM] * 2)
    assert check(daemon.socket_path) == []
    assert daemon.call(lambda: daemon.engine.sessions[0].leases) == {}


def test_get_stops_at_the_first_miss(client: Client) -> None:
    """A get over a gap answers the blocks before it."""
    space, hashes, records = space_of(client), hashes_of(4), records_of(4)
    client.put(space, hashes[:2], b"", records[:2])
    client.put(space, hashes[3:], hashes[2], records[3:])
    assert client.get(space, hashes, [bytearray(RECORD_BYTES) for _ in hashes]) == 2


def test_lookup_needs_every_namespace(client: Client) -> None:
    """A block counts only if all the namespaces that were asked for hold it."""
    first, second, hashes = space_of(client, "a"), space_of(client, "b"), hashes_of(5)
    client.put(first, hashes, b"", records_of(5))
    client.put(second, hashes[:3], b"", records_of(3))
    assert client.lookup([first, second], hashes) == 3


def test_a_prompt_without_a_whole_block_may_be_told(client: Client) -> None:
    """There is nothing to look up; the daemon counts its tokens, and answers that nothing is held."""
    assert client.lookup([space_of(client)], [], tokens=7) == 0


def test_put_larger_than_one_lease(client: Client) -> None:
    """A put that no single lease may hold is split, and the parents stay right across the split."""
    space, hashes = space_of(client, record_bytes=MIB), hashes_of(10)
    records = records_of(10, MIB)
    assert client.put(space, hashes, b"", records) == 10
    assert client.lookup([space], hashes) == 10


def test_full_arena_takes_a_leading_run(daemon: Daemon, client: Client) -> None:
    """Where all slots are being written, reserve answers at once, with fewer slots and `full`."""
    space = space_of(client, record_bytes=MIB)
    with client.reserve(space, hashes_of(12)) as lease:
        assert lease.full
        assert [slot.index for slot in lease.slots] == list(range(8))  # half of the arena per connection
    assert daemon.call(daemon.arena.stats).used_bytes == 0


def test_write_lease(daemon: Daemon, client: Client) -> None:
    """Committed indexes are stored, the others aborted; views are where `arena` says they are."""
    space, hashes = space_of(client), hashes_of(3)
    lease = client.reserve(space, hashes)
    arena = client.arena
    for slot, record in zip(lease.slots, records_of(3), strict=True):
        slot.view[:] = record
        assert bytes(arena.view(slot.offset, RECORD_BYTES)) == record
    digest = xxhash.xxh3_128_digest(records_of(3)[0])
    assert lease.commit({0: digest}) == 1
    assert client.lookup([space], hashes) == 1
    with pytest.raises(Refused):
        lease.commit()
    with client.reserve(space, hashes) as again:
        assert [slot.index for slot in again.slots] == [1, 2]
    assert client.lookup([space], hashes) == 1


def test_read_lease_sees_a_slot_that_was_taken_back(daemon: Daemon, client: Client) -> None:
    """`valid` turns false when the slot was freed under a reader whose connection was lost."""
    space, hashes = space_of(client), hashes_of(2)
    client.put(space, hashes, b"", records_of(2))
    lease = client.acquire(space, hashes)
    assert lease.valid()
    slots = [slot.view.readonly for slot in lease.slots if slot is not None]
    assert slots == [True, True]

    def take_back() -> None:
        (connection,) = daemon.door.connections
        connection.abort()
        block = daemon.engine.namespaces.get(0).blocks[hashes[1]]
        daemon.engine.blocks.left_dram(block)

    daemon.call(take_back)
    assert not lease.valid()
    assert lease.valid_count() == 1
    lease.release()


def test_get_does_not_count_what_changed_under_it(
    daemon: Daemon, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot that is taken back while get copies out of it ends the answer before that block."""
    space, hashes = space_of(client), hashes_of(3)
    client.put(space, hashes, b"", records_of(3))

    def take_back() -> None:
        (connection,) = daemon.door.connections
        connection.abort()
        daemon.engine.blocks.left_dram(daemon.engine.namespaces.get(0).blocks[hashes[2]])

    copy = copying.copy

    def interrupted(*arguments: Any) -> None:
        copy(*arguments)
        daemon.call(take_back)

    monkeypatch.setattr(copying, "copy", interrupted)
    assert client.get(space, hashes, [bytearray(RECORD_BYTES) for _ in hashes]) == 2


def test_threads_share_a_client(daemon: Daemon) -> None:
    """Eight threads that put and get through one client each read back their own bytes."""
    client = Client(daemon.socket_path, timeout_s=30.0)
    space = space_of(client)
    failures: list[str] = []

    def work(name: str) -> None:
        hashes, into = hashes_of(4, name), [bytearray(RECORD_BYTES) for _ in range(4)]
        records = [os.urandom(RECORD_BYTES) for _ in range(4)]
        for _ in range(5):
            client.put(space, hashes, b"", records)
            if client.get(space, hashes, into) != 4 or [bytes(b) for b in into] != records:
                failures.append(name)

    threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert daemon.call(lambda: len(daemon.door.connections)) == 1
    client.close()


def test_wrong_buffers_are_refused_before_sending(daemon: Daemon, client: Client) -> None:
    """Buffers or hashes of a wrong size raise Refused, and no lease stays open."""
    space, hashes = space_of(client), hashes_of(2)
    with pytest.raises(Refused, match="buffer"):
        client.put(space, hashes, b"", [b"short", b"short"])
    with pytest.raises(Refused, match="buffers"):
        client.put(space, hashes, b"", [bytes(RECORD_BYTES)])
    with pytest.raises(Refused, match="hash"):
        client.lookup([space], [b"short"])
    client.put(space, hashes, b"", records_of(2))
    with pytest.raises(Refused, match="cannot be copied"):
        client.get(space, hashes, records_of(2))
    assert daemon.call(lambda: daemon.engine.sessions[0].leases) == {}


def test_without_the_arena(daemon: Daemon) -> None:
    """A client that did not attach can ask, and lease slots for others, but not copy; it uses up no owner."""
    with Client(daemon.socket_path, timeout_s=20, attach=False) as tool:
        space = space_of(tool)
        assert tool.status()["door"]["attached"] == 0
        assert tool.lookup([space], hashes_of(3)) == 0
        for call in (tool.reserve, tool.acquire):
            with pytest.raises(Refused, match="not_attached"):
                call(space, hashes_of(1))
        assert daemon.call(lambda: daemon.engine.sessions) == []


def test_only_tools_check_the_books(daemon: Daemon, client: Client, caplog: pytest.LogCaptureFixture) -> None:
    """A check, which holds up everybody, is refused to engines; for a tool it is made, and its time logged."""
    caplog.set_level(logging.INFO, "kvstore.door")
    client.lookup([space_of(client)], hashes_of(1))
    with pytest.raises(Refused, match="bad_request: check: only for a connection without the arena"):
        client.check()
    assert check(daemon.socket_path) == []
    assert any("audit done in" in line for line in caplog.messages)


def test_namespace_conflict(client: Client) -> None:
    """The same digest with another record size, or with other columns, is refused by name."""
    used = space_of(client)
    client.lookup([used], hashes_of(1))
    for other in (space_of(client, record_bytes=4096), space_of(client, columns=[16 << 10] * 4)):
        with pytest.raises(Refused, match=r"namespace_conflict.*columns=1\*65536, not"):
            client.lookup([other], hashes_of(1))


def test_columns_that_cannot_be_are_refused_before_sending(client: Client) -> None:
    """Sizes that do not add up, or are cut in too many ways, are told at once."""
    with pytest.raises(Refused, match="columns of 4 bytes together: they must add up to 65536"):
        space_of(client, columns=[1, 3])
    with pytest.raises(Refused, match="9 runs of equal sizes: at most 8 are allowed"):
        space_of(client, columns=[1, 2] * 4 + [RECORD_BYTES - 12])


@pytest.mark.parametrize("size", [RECORD_BYTES, 400 << 10])
def test_records_of_columns_have_true_checksums(daemon: Daemon, client: Client, size: int) -> None:
    """Whether put hashes or a commit does; with a digest of the whole record instead, the bytes are not believed."""
    space = space_of(client, "several", size, columns=[size // 4] * 3 + [size // 8] * 2)
    hashes, records = hashes_of(5), [os.urandom(size) for _ in range(5)]
    assert client.put(space, hashes[:3], b"", records[:3]) == 3
    for at, sums in ((3, None), (4, {0: xxhash.xxh3_128_digest(records[4])})):
        with client.reserve(space, hashes[at : at + 1], hashes[at - 1]) as lease:
            lease.slots[0].view[:] = records[at]
            assert lease.commit(sums) == 1
    into = [bytearray(size) for _ in hashes]
    assert client.get(space, hashes, into) == 5 and into == records

    def verified() -> list[bool]:
        blocks = next(iter(daemon.engine.namespaces)).blocks
        return [daemon.arena.verify(blocks[block_hash].slot) for block_hash in hashes]

    assert daemon.call(verified) == [True] * 4 + [False]
    (report,) = client.status()["namespaces"]
    assert (report["columns"], report["record_bytes"]) == (5, size)


def test_closed_client(client: Client) -> None:
    """After close every call raises Unavailable."""
    client.ping()
    client.close()
    assert not client.connected
    with pytest.raises(Unavailable):
        client.ping()


def test_without_a_descriptor_the_daemon_is_unavailable(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has too many files open is told so as of any other failure: an engine catches no OSError."""

    def full(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("socket.socket", full)
    with pytest.raises(Unavailable, match="Too many open files"):
        Connection(str(daemon.socket_path), "test", False, False, time.monotonic() + 60)


@pytest.mark.parametrize("size", [0, 1, 4096, copying.PIECE_BYTES, copying.PIECE_BYTES + 1, 3 * MIB + 7])
def test_copy_and_digest(size: int) -> None:
    """The digest of a copy is that of the whole record, however many pieces and threads it took."""
    sources = [os.urandom(size) for _ in range(5)]
    targets = [bytearray(size) for _ in sources]
    pairs = [(memoryview(target), source) for target, source in zip(targets, sources, strict=True)]
    assert copying.copy_and_digest(pairs) == [xxhash.xxh3_128_digest(source) for source in sources]
    assert [bytes(target) for target in targets] == sources


def test_a_helper_thread_failure_reaches_the_caller() -> None:
    """An error inside a copy is raised to the caller, and later copies work."""
    sources = [bytes(MIB) for _ in range(8)]
    pairs = [(memoryview(bytearray(MIB)), source) for source in sources]

    def fail(position: int) -> None:
        if position == 5:
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        copying.copy(pairs, fail)
    copying.copy(pairs)


def test_limits_agree() -> None:
    """The client's own lease limit is the one of the wire, which it does not import."""
    assert client_module.LEASE_HASHES_MAX == frames.LEASE_HASHES_MAX


def imported(module: str) -> set[str]:
    """Names of all modules that importing it in a new process loads."""
    script = f"import sys; before = set(sys.modules); import {module}; print(*set(sys.modules) - before)"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(answer.stdout.split())


def test_import_is_light() -> None:
    """Importing the client (20 ms on a quiet machine) loads less than half as many modules as importing asyncio, all of
    them of the standard library, xxhash and ours. Modules are counted, because times are another machine's."""
    modules = imported("kvstore.client")
    assert len(modules) < len(imported("asyncio")) / 2
    foreign = {name.partition(".")[0] for name in modules} - set(sys.stdlib_module_names)
    start_up = {"__main__", "sitecustomize", "_distutils_hack"}
    assert {name for name in foreign if not name.startswith("__editable__")} - start_up == {
        "kvstore",
        "tiers",
        "xxhash",
    }
    assert client_module.SLOT_BYTES_MIN == SLOT_BYTES_MIN


def test_a_prompt_of_less_than_a_block_counts(daemon: Daemon, client: Client) -> None:
    """It has no whole block to look up; its tokens are in the accounts all the same."""
    assert client.lookup([space_of(client)], [], ticket=7, tokens=5) == 0
    (row,) = client.report(0)["rows"]
    assert row["lookups"] == 1 and row["tokens"]["partial_block"] == 5


def test_a_silly_prefill_rate_does_not_make_totals_infinite(daemon: Daemon, client: Client) -> None:
    """Seconds saved stay a finite number, so that the totals of all other days can be read again."""
    space = space_of(client)
    client.put(space, hashes_of(2), b"", records_of(2))
    assert client.lookup([space], hashes_of(2), tokens=64, prefill_tokens_per_s=1e-320) == 2
    (row,) = client.report(0)["rows"]
    assert row["tokens"]["dram"] == 32 and row["prefill_s_saved"] == 0.0
