"""A daemon's blocks and its stream without sockets, and subscribers whose messages are lost when the test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from examples.kv_events.mirror import Held, Mirror, Wants
from kvstore.events.answers import Answer, FullState, Replay
from kvstore.events.journal import Journal, held
from kvstore.events.stream import Stream, Writer
from kvstore.events.wire import END, TIERS, Frames, HashForm, hash_values
from kvstore.index import forest
from kvstore.index.block import Namespace
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from tiers.namespace_spec import NamespaceSpec


def space(number: int = 0, **fields: str) -> Namespace:
    return Namespace(number, NamespaceSpec(bytes([number + 1]) * 16, 4096, 32, 16, fields))


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Shelf:
    """Blocks of some namespaces that come and go, each written down; and what is published of them."""

    def __init__(
        self,
        spaces: int = 2,
        form: HashForm = "bytes",
        kept_bytes_max: int = 1 << 20,
        waiting_max: int = 1 << 20,
        first: int = 1000,
    ) -> None:
        self.spaces = [space(number) for number in range(spaces)]
        self.form = form
        self.waiting_max = waiting_max
        self.kept_bytes_max = kept_bytes_max
        self.clock_s = 0.0
        self.mirrors: list[Follower] = []
        self.asked: deque[Callable[[], None]] = deque()  # of the engine's thread
        self.start(first)

    def start(self, first: int) -> None:
        """A life of the daemon begins: what is in the index is adopted."""
        self.journal = Journal(self.waiting_max)
        self.stream = Stream(Writer(self.form, lambda: 0.0), "t", self.kept_bytes_max, first, self._send)
        self.asked.clear()
        for changes in held(self.spaces):
            for change in changes:
                blocks = change.namespace.blocks
                self.journal.came(change.bit, [blocks[block_hash] for block_hash in change.hashes])

    def come(self, number: int, block: int, bit: int) -> None:
        blocks = self.spaces[number].blocks
        known = blocks.get(name(block))
        if known is None or not known.where & bit:
            self.journal.came(bit, [forest.arrived(self.spaces[number], name(block), b"", bit)])

    def go(self, number: int, block: int, bit: int) -> None:
        known = self.spaces[number].blocks.get(name(block))
        if known is not None and known.where & bit:
            forest.left([known], bit)
            self.journal.left(bit, [known])

    def publish(self) -> None:
        if (taken := self.journal.take()) is not None:
            self.stream.publish(taken)

    def truth(self) -> Held:
        found: Held = {}
        for one in self.spaces:
            for bit in (IN_DRAM, IN_NVME):
                if hashes := [block.hash for block in one.blocks.values() if block.where & bit]:
                    found[TIERS[bit], one.digest.hex()] = set(hash_values(hashes, self.form))
        return found

    def answer_to(self, request: bytes) -> Answer:
        if request == END:
            ask, wake = self.asked.append, self._wake
            return FullState(b"", self.clock_s, self.stream, lambda: held(self.spaces), ask, wake)
        return Replay(b"", self.clock_s, self.stream, int.from_bytes(request, "big"))

    def read_slice(self) -> None:
        """The engine's thread has a moment."""
        if self.asked:
            self.asked.popleft()()

    def _wake(self) -> None:
        """Nobody sleeps here."""

    def _send(self, frames: Frames) -> None:
        for mirror in self.mirrors:
            mirror.hear(frames)


class Follower:
    """A subscriber of a shelf. deaf: messages of the stream are lost."""

    def __init__(self, shelf: Shelf) -> None:
        self.mirror = Mirror()
        self.deaf = False
        self.heard = -1  # the last number
        self.asked_for_all = self.asked_for_some = 0
        self._shelf = shelf
        self._answer: Answer | None = None
        shelf.mirrors.append(self)

    def hear(self, frames: Frames) -> None:
        if not self.deaf:
            assert frames[0] == b"t"
            self.heard = int.from_bytes(frames[1], "big")
            self.mirror.live(self.heard, frames[2])

    def take(self) -> None:
        """One message of the answer that it waits for, if there is one; ask, if it must."""
        if self.mirror.wants is Wants.NOTHING:
            return
        if self._answer is None:
            request = self.mirror.request()
            self.asked_for_all += request == END
            self.asked_for_some += request != END
            self._answer = self._shelf.answer_to(request)
        self._shelf.clock_s += 1.0
        frames = self._answer.front(self._shelf.clock_s)
        if frames is None:
            return
        self._answer.sent()
        if self.mirror.answer(frames[1], frames[2]):
            assert self._answer.is_done
            self._answer = None

    def lose_answer(self) -> None:
        """The connection is cut."""
        self._answer = None

    def catch_up(self) -> None:
        """Until nothing is missing."""
        for _ in range(100_000):
            if self.mirror.wants is Wants.NOTHING:
                return
            self._shelf.read_slice()
            self.take()
        raise AssertionError("it asks for ever")
