"""The sockets: vLLM's replay protocol, endpoints that cannot be had, peers that do not read or say nonsense."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from examples.kv_events.subscriber import Subscriber
from kvstore.errors import StartError
from kvstore.events import publisher as module
from kvstore.events.journal import Journal, held
from kvstore.events.publisher import Publisher, Settings
from kvstore.events.wire import END, Batch, BlockStored, sequence_bytes
from kvstore.index import forest
from kvstore.protocol.residency_bits import IN_DRAM
from tests.events.following import wait_until
from tests.events.simulated import name, space

TIMEOUT_MS = 60_000


class Node:
    """A publisher over one namespace; the engine's thread is the test's, with another one for slices."""

    def __init__(self, directory: Path, **changed: Any) -> None:
        self.endpoint, self.replay = f"ipc://{directory}/e", f"ipc://{directory}/r"
        settings: dict[str, Any] = {
            "endpoint": self.endpoint,
            "connects": False,
            "replay_endpoint": self.replay,
            "topic": "kv@node",
            "hash_form": "bytes",
            "replay_bytes": 1 << 20,
        }
        self.space = space()
        self.journal = Journal()
        self.guard = threading.Lock()
        self.publisher = Publisher(
            Settings(**settings | changed), self.journal, lambda: held([self.space]), lambda: 1000.0
        )
        self.numbers = itertools.count()

    def open(self) -> Node:
        self.publisher.open(self.on_engine)
        return self

    def on_engine(self, work: Callable[[], None]) -> None:
        with self.guard:
            work()

    def store(self, count: int) -> None:
        """That many more blocks, in one batch of their own."""
        with self.guard:
            for number in itertools.islice(self.numbers, count):
                self.journal.came(IN_DRAM, [forest.arrived(self.space, name(number), b"", IN_DRAM)])
        before = self.status("stored_blocks")
        self.publisher.pass_on()
        wait_until(lambda: self.status("stored_blocks") == before + count)

    def status(self, field: str) -> Any:
        return self.publisher.status()[field]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(**changed: Any) -> Node:
        made.append(Node(tmp_path, **changed))
        return made[-1].open()

    yield make
    for node in made:
        node.publisher.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def asked(peer: zmq.Socket[bytes], start: bytes) -> list[tuple[bytes, int, Batch]]:
    """What vLLM's own example of a subscriber would read: replies until the end marker."""
    peer.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
    peer.send_multipart([b"", start])
    found: list[tuple[bytes, int, Batch]] = []
    while True:
        empty, topic, sequence, payload = peer.recv_multipart()
        assert empty == b""
        if sequence == (-1).to_bytes(8, "big", signed=True):
            assert (topic, payload) == (b"", b"")
            return found
        found.append((topic, int.from_bytes(sequence, "big"), msgspec.msgpack.decode(payload, type=Batch)))


def test_a_replay_is_vllms(nodes: Callable[..., Node], context: Any) -> None:
    """Asked from a sequence, the kept batches from it on come as they were published, then the end marker."""
    node = nodes()
    live = context.socket(zmq.SUB)
    live.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
    live.connect(node.endpoint)
    live.subscribe("kv@")
    topic, first, _ = live.recv_multipart()
    assert topic == b"kv@node" and int.from_bytes(first, "big") >= 1_000_000_000
    for _ in range(3):
        node.store(2)
    dealer = context.socket(zmq.DEALER)
    dealer.connect(node.replay)
    replayed = asked(dealer, first)
    numbers = [number for _, number, _ in replayed]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert numbers[0] == int.from_bytes(first, "big") and {topic for topic, _, _ in replayed} == {b"kv@node"}
    blocks = [
        h for _, _, b in replayed for e in b.events if isinstance(e, BlockStored) for h in e.block_hashes
    ]
    assert blocks == [name(number) for number in range(6)]
    assert asked(dealer, sequence_bytes(numbers[-1] + 1_000_000)) == []
    assert len(asked(dealer, sequence_bytes(0))) >= len(replayed)
    assert node.status("replays") == 3


def test_everything_comes_with_one_number(nodes: Callable[..., Node], context: Any) -> None:
    """Asked from -1, all that is held comes behind AllBlocksCleared, with the last number before it was read."""
    node = nodes()
    node.store(5000)
    dealer = context.socket(zmq.DEALER)
    dealer.connect(node.replay)
    state = asked(dealer, END)
    assert {number for _, number, _ in state} == {state[0][1]}
    assert [type(event).__name__ for event in state[0][2].events] == ["AllBlocksCleared"]
    told = [
        h for _, _, b in state[1:] for e in b.events if isinstance(e, BlockStored) for h in e.block_hashes
    ]
    assert len(told) == len(set(told)) == 5000
    assert asked(dealer, sequence_bytes(state[0][1] + 1)) == [] or node.status("batches") > 0


@pytest.mark.parametrize(
    "request_", [[b""], [b"", b""], [b"", b"1234567"], [b"x", END], [b"", END, b""], [b"", b"123456789"]]
)
def test_nonsense_is_passed_over(nodes: Callable[..., Node], context: Any, request_: list[bytes]) -> None:
    """A request that is none gets no answer, and the next one does."""
    node = nodes()
    node.store(1)
    dealer = context.socket(zmq.DEALER)
    dealer.connect(node.replay)
    dealer.send_multipart(request_)
    assert len(asked(dealer, END)) == 2
    assert (node.status("full_states"), node.status("replays"), node.status("problem")) == (1, 0, "")


def test_a_request_that_is_too_large_ends_its_connection_only(
    nodes: Callable[..., Node], context: Any
) -> None:
    """Nobody fills our memory with one message, and others are answered."""
    node = nodes()
    bad, good = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    for peer in (bad, good):
        peer.connect(node.replay)
    bad.send_multipart([b"", bytes(1 << 20)])
    assert len(asked(good, END)) == 1
    assert node.status("problem") == ""


def test_a_peer_that_takes_nothing_costs_only_itself(
    nodes: Callable[..., Node], context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one does not take its answer, others are answered; then the rest of it is dropped."""
    monkeypatch.setattr(module, "EVENTS_STALLED_S", 2.0)
    monkeypatch.setattr(module, "EVENTS_QUEUED_MAX", 2)
    node = nodes(replay_bytes=64 << 20)
    for _ in range(40):
        node.store(4000)
    stuck, good = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    stuck.set_hwm(1)
    for peer in (stuck, good):
        peer.connect(node.replay)
    stuck.send_multipart([b"", sequence_bytes(0)])
    wait_until(lambda: node.status("replays") == 1)
    assert len(asked(good, sequence_bytes(0))) >= 40
    assert sum(len(batch.events) > 0 for _, _, batch in asked(good, END)) > 40
    wait_until(lambda: node.status("answers_lost") == 1)
    node.store(1)
    assert node.status("problem") == ""


def test_a_peer_that_goes_away_costs_nothing(nodes: Callable[..., Node], context: Any) -> None:
    """Whoever hangs up in the middle of an answer is forgotten."""
    node = nodes(replay_bytes=64 << 20)
    node.store(60_000)
    for _ in range(5):
        gone = context.socket(zmq.DEALER)
        gone.connect(node.replay)
        gone.send_multipart([b"", END])
        gone.close(linger=100)
    dealer = context.socket(zmq.DEALER)
    dealer.connect(node.replay)
    assert len(asked(dealer, END)) > 10
    assert node.status("problem") == ""


def test_a_subscriber_that_does_not_read_sees_a_gap_and_is_whole_again(
    nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its queue cannot hold is lost to it and held up nobody; then it asks, and has everything."""
    monkeypatch.setattr(module, "EVENTS_QUEUED_MAX", 10)
    monkeypatch.setattr("examples.kv_events.subscriber.RECEIVE_QUEUE_MESSAGES", 10)
    node = nodes()
    subscriber = Subscriber(node.endpoint, node.replay, topic="kv@node")
    wait_until(lambda: subscriber.step(0.01))
    before = subscriber.replays
    for _ in range(100):
        node.store(500)
    expected = {name(number) for number in range(100 * 500)}
    wait_until(lambda: subscriber.step(0.01) and subscriber.held["dram", "01" * 16] == expected)
    assert subscriber.replays > before
    subscriber.close()
    subscriber.close()


def test_endpoints_that_cannot_be_had_are_named(tmp_path: Path) -> None:
    """A port in use, an address of others and a file in the way stop the start with one line; the file stays."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=rf"^events.endpoint tcp://127.0.0.1:{port}: .*in use"):
            Node(tmp_path, endpoint=f"tcp://127.0.0.1:{port}").open()
    with pytest.raises(StartError, match=r"^events.endpoint tcp://192.0.2.1:5557: "):
        Node(tmp_path, endpoint="tcp://192.0.2.1:5557").open()
    file = tmp_path / "notes"
    file.write_text("mine")
    with pytest.raises(StartError, match=r"^events.replay_endpoint ipc://.*notes: something else"):
        Node(tmp_path, replay_endpoint=f"ipc://{file}").open()
    assert file.read_text() == "mine"


def test_it_connects_to_a_router(nodes: Callable[..., Node], context: Any) -> None:
    """Where a router binds, the daemon connects to it, and its blocks arrive there."""
    router = context.socket(zmq.SUB)
    router.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    router.subscribe("")
    node = nodes(endpoint=f"tcp://localhost:{port}", connects=True, replay_endpoint="")
    router.recv_multipart()
    node.store(3)
    while not (events := msgspec.msgpack.decode(router.recv_multipart()[2], type=Batch).events):
        pass
    assert isinstance(events[0], BlockStored) and len(events[0].block_hashes) == 3


def test_a_failure_of_the_publisher_is_told_and_harms_nobody(
    nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """When its thread fails, the status says why, and the journal stays bounded."""
    node = nodes()

    def fail(_: object) -> None:
        raise OSError("broken")

    monkeypatch.setattr(node.publisher._stream, "publish", fail)
    node.journal.came(IN_DRAM, [forest.arrived(node.space, name(1), b"", IN_DRAM)])
    node.publisher.pass_on()
    wait_until(lambda: node.status("problem") == "OSError: broken")
    node.publisher.pass_on()
    assert "no longer published" in caplog.text
