"""Recorder: requests, as a daemon answers them, become lines of a trace, which `kvstore.tools.replay.trace` reads.

    Recorded ─▶ take ─▶ held, until its output has come ─▶ one line, in the order of asking ─▶ file
                 │
                 └─▶ block hash ─▶ the next number: who has the file knows which prompts begin alike, and no more

Nothing that names a prompt, a model or a tenant gets further than `take`. Hashes are known here by 64 bits of
a digest with a salt that is never written: two different blocks among a hundred million get the same number once
in four thousand recordings.

Invariant: the file holds whole lines; after kill -9 the last one may be cut off.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

import msgspec
import xxhash

from kvstore.protocol.frames import Asked, Recorded

# Without news of a request, or since it came: then its line is written.
RECORD_QUIET_S, RECORD_HOLD_S = (10.0, 60.0)


class WrittenLine(msgspec.Struct):
    """One request, as it is written."""

    timestamp: int  # ms
    input_length: int
    output_length: int
    hash_ids: list[int]
    block_tokens: int
    block_bytes: int


class Held:
    """A line that is not written yet. number: in its recording; news_s: when something of it was stored. open: there
    may be more news of it."""

    __slots__ = ("came_s", "line", "news_s", "number", "open")

    def __init__(self, number: int, line: WrittenLine, now_s: float, is_open: bool) -> None:
        self.number = number
        self.line = line
        self.came_s = self.news_s = now_s
        self.open = is_open

    def is_ready(self, now_s: float) -> bool:
        return not self.open or now_s - self.news_s >= RECORD_QUIET_S or now_s - self.came_s >= RECORD_HOLD_S


class TraceFile:
    """Whole lines, readable by its owner only. Raises OSError."""

    def __init__(self, path: Path) -> None:
        """path: of a new file."""
        self.size_bytes = 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, lines: bytes) -> None:
        """All of it, or, where the disk is full, nothing."""
        end = self.size_bytes
        left = memoryview(lines)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            os.ftruncate(self._fd, end)
            raise
        self.size_bytes += len(lines)

    def close(self) -> None:
        os.close(self._fd)


class Recorder:
    """begun_s: when the recording began, by the clock of `now_s`. requests_max: further ones are not written."""

    def __init__(self, file: TraceFile, begun_s: float, requests_max: int | None = None) -> None:
        self.file = file
        self.requests = self.input_tokens = self.output_tokens = self.block_refs = 0
        self.lost_requests = 0
        self._begun_s, self._requests_max = begun_s, requests_max
        self._salt = int.from_bytes(os.urandom(8), "little")
        self._ids: dict[int, int] = {}
        self._held: deque[Held] = deque()
        self._waiting: dict[int, Held] = {}  # for news of their output, by number
        self._last_ms = 0
        self._ahead_s: float | None = None  # our clock, of the daemon's
        self._lost = 0  # of this connection

    @property
    def is_full(self) -> bool:
        return self._requests_max is not None and self.requests >= self._requests_max

    @property
    def unique_blocks(self) -> int:
        return len(self._ids)

    def take(self, recorded: Recorded, now_s: float) -> None:
        """What the daemon has answered. Writes what is ready. Raises OSError."""
        if self._ahead_s is None:
            self._ahead_s = now_s - recorded.now_s
        for asked in recorded.requests:
            if self.is_full:
                break
            self._hold(asked, now_s)
        for number, tokens in recorded.stored:
            held = self._waiting.get(number)
            if held is not None:
                held.line.output_length = max(0, tokens - held.line.input_length)
                held.news_s = now_s
        self.lost_requests += recorded.lost - self._lost
        self._lost = recorded.lost
        self.write(now_s)

    def write(self, now_s: float, all_of_it: bool = False) -> None:
        """Write the lines at the front that are ready. Raises OSError; what was not written is held still."""
        encode = msgspec.json.encode
        ready = 0
        while ready < len(self._held) and (all_of_it or self._held[ready].is_ready(now_s)):
            ready += 1
        if not ready:
            return
        lines = [encode(self._held[at].line) + b"\n" for at in range(ready)]
        self.file.write(b"".join(lines))
        for _ in range(ready):
            held = self._held.popleft()
            self.output_tokens += held.line.output_length
            self._waiting.pop(held.number, None)

    def disconnected(self) -> None:
        """The daemon is gone: there will be no news of these requests, and the next one counts anew."""
        for held in self._waiting.values():
            held.open = False
        self._waiting.clear()
        self._ahead_s, self._lost = None, 0

    def _hold(self, asked: Asked, now_s: float) -> None:
        at_s = asked.at_s + (self._ahead_s or 0.0) - self._begun_s
        self._last_ms = max(self._last_ms, round(1000 * at_s))
        ids = self._numbers(asked)
        line = WrittenLine(self._last_ms, asked.tokens, 0, ids, asked.block_tokens, asked.block_bytes)
        held = Held(asked.number, line, now_s, asked.open)
        self._held.append(held)
        if asked.open:
            self._waiting[asked.number] = held
        self.requests += 1
        self.input_tokens += asked.tokens
        self.block_refs += len(ids)

    def _numbers(self, asked: Asked) -> list[int]:
        """Of a prompt's blocks; up to one that it names twice: a trace has each once, as a prefix does."""
        hashes, size, known = asked.hashes, asked.hash_bytes, self._ids
        salt = xxhash.xxh3_64_intdigest(asked.space, self._salt)
        digest = xxhash.xxh3_64_intdigest
        numbers = [
            known.setdefault(digest(hashes[at : at + size], salt), len(known))
            for at in range(0, len(hashes), size)
        ]
        if len(set(numbers)) < len(numbers):
            seen: set[int] = set()
            first = next(at for at, n in enumerate(numbers) if n in seen or seen.add(n))  # type: ignore[func-returns-value]
            return numbers[:first]
        return numbers
