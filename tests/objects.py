"""Stores of objects for tests: one in memory, one with faults from a seed, and a real S3 server.

    FaultyObjects ─▶ any Objects          S3Server: moto, in a process of its own
      delay │ fail │ lose the answer │ do it later, or twice │ cut off │ flip a bit

Time and sleep are the running loop's, so all of it works under a virtual clock.
"""

from __future__ import annotations

import asyncio
import http.client
import random
import re
import subprocess
import sys
import threading
from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from tests.running import TIMEOUT_S
from tiers.bucket.object_options import ObjectOptions
from tiers.bucket.objects import Bytes, ObjectInfo, Objects, Range
from tiers.checksum import digest
from tiers.errors import ObjectDamaged, ObjectError, ObjectMissing, ObjectUnavailable

_names = count()


class MemoryObjects(Objects):
    """Objects in a dict, for simulations. As in S3, equal contents have equal ETags.

    `stored` may be looked at and damaged by tests.
    """

    def __init__(
        self,
        where: str = "",
        clock: Callable[[], float] = lambda: asyncio.get_running_loop().time(),
        page_names: int = 1000,
    ) -> None:
        """clock: unix seconds, for `modified_s`; the loop's time if none is given. page_names: how many names a page of `list` has at most."""
        self.where = where or f"memory {next(_names)}"
        self.stored: dict[str, bytes] = {}
        self._modified_s: dict[str, float] = {}
        self._e_tags: dict[str, tuple[bytes, str]] = {}  # of contents as they were when somebody asked
        self._names: list[str] = []  # in order
        self._clock = clock
        self._page_names = page_names

    async def put(self, name: str, content: Bytes, only_new: bool = False) -> bool:
        await asyncio.sleep(0)
        if name not in self.stored:
            insort(self._names, name)
        elif only_new:
            return False
        self.stored[name] = bytes(content)
        self._modified_s[name] = self._clock()
        return True

    async def get(self, name: str) -> memoryview:
        await asyncio.sleep(0)
        return memoryview(self._found(name))

    async def get_if_changed(
        self, name: str, e_tag: str, size_bytes_max: int
    ) -> tuple[memoryview, ObjectInfo] | None:
        if name in self.stored and e_tag and self._info(name).e_tag == e_tag:
            await asyncio.sleep(0)
            return None
        content = await self.get_within(name, size_bytes_max)
        return content, self._info(name)

    async def get_ranges(self, name: str, ranges: Sequence[Range]) -> Sequence[memoryview]:
        await asyncio.sleep(0)
        content = memoryview(self._found(name))
        if any(end > len(content) for _, end in ranges):
            raise ObjectDamaged(f"{self.where}: {name}: ends after {len(content)} bytes")
        return [content[start:end] for start, end in ranges]

    async def head(self, name: str) -> ObjectInfo:
        await asyncio.sleep(0)
        self._found(name)
        return self._info(name)

    async def list(self, prefix: str, after: str = "") -> AsyncIterator[Sequence[ObjectInfo]]:
        assert not prefix or prefix.endswith("/"), prefix
        last = max(after, prefix)
        while True:
            await asyncio.sleep(0)
            start = bisect_right(self._names, last)
            names = [
                name for name in self._names[start : start + self._page_names] if name.startswith(prefix)
            ]
            if names:
                yield list(map(self._info, names))
            if len(names) < self._page_names:
                return
            last = names[-1]

    async def folders(self, prefix: str) -> Sequence[str]:
        await asyncio.sleep(0)
        found, at = [], bisect_left(self._names, prefix)
        while at < len(self._names) and self._names[at].startswith(prefix):
            folder, slash, _ = self._names[at][len(prefix) :].partition("/")
            if slash:
                found.append(folder)
                at = bisect_left(self._names, f"{prefix}{folder}0", lo=at)  # "0" comes right behind "/"
            else:
                at += 1
        return sorted(found)

    async def delete(self, names: Sequence[str]) -> None:
        await asyncio.sleep(0)
        for name in names:
            if self.stored.pop(name, None) is not None:
                del self._names[bisect_left(self._names, name)]

    def _found(self, name: str) -> bytes:
        if name not in self.stored:
            raise ObjectMissing(f"{self.where}: {name}: there is no such object")
        return self.stored[name]

    def _info(self, name: str) -> ObjectInfo:
        content = self.stored[name]
        known = self._e_tags.get(name)
        if known is None or known[0] is not content:
            known = self._e_tags[name] = content, digest(content).hex()
        return ObjectInfo(name, len(content), known[1], self._modified_s[name])


@dataclass
class Faults:
    """What goes wrong: shares from 0 to 1 of the calls, drawn anew for each call and each page of a list.

    failed: not done, and said so. hung: not done, and said so after `hang_s`. Of changes only: lost: done, but
    said to have failed; late: said to have failed, and done up to `late_s` later; twice: done, and once more up to `late_s`
    later, with the old content; rotten: what is put is stored with a flipped bit or cut off. Of reads only:
    truncated: `get` returns less, `get_ranges` fails; flipped: one bit of one part. delay_s: each call takes up
    to so long, half of them before it is done and half before its answer comes, so calls under way at the same time are done
    in any order, and answers are old. refuse: every call raises this.
    """

    failed: float = 0.0
    hung: float = 0.0
    lost: float = 0.0
    late: float = 0.0
    twice: float = 0.0
    rotten: float = 0.0
    truncated: float = 0.0
    flipped: float = 0.0
    delay_s: float = 0.0
    late_s: float = 60.0
    hang_s: float = 3600.0
    refuse: ObjectError | None = None


class _Call(NamedTuple):
    """number: of the call; answer_s: how long its answer takes."""

    number: int
    answer_s: float


class FaultyObjects(Objects):
    """Any store, with faults. `faults` may be changed at any time. requests: how often each method was called, a page of
    a list counting once; injected: how often each fault was; of these, reordered: a call that ended after one that had begun
    later; overtaken: what was done late or twice, behind a later change of the same thing."""

    def __init__(self, inner: Objects, chance: random.Random, faults: Faults | None = None) -> None:
        self.where = inner.where
        self.inner = inner
        self.faults = faults or Faults()
        self.requests: Counter[str] = Counter()
        self.injected: Counter[str] = Counter()
        self._chance = chance
        self._later: set[asyncio.Task[None]] = set()
        self._going = asyncio.Event()
        self._going.set()
        self._begun = self._latest_ended = 0  # calls
        self._changed: Counter[str] = Counter()  # by name, how often

    def suspend(self) -> None:
        """As SIGSTOP would whoever asks: what is under way is done, and answered, when it goes on."""
        self._going.clear()

    def go_on(self) -> None:
        self._going.set()

    async def settle(self) -> None:
        """Wait for what is done late."""
        while self._later:
            await asyncio.wait(self._later)

    async def put(self, name: str, content: Bytes, only_new: bool = False) -> bool:
        call = await self._begin("put", name)
        kept = bytes(content)
        if self._happens("rotten"):
            kept = self._damaged(kept)

        async def work() -> bool:
            return await self.inner.put(name, kept, only_new)

        done = await self._change(work, [name])
        await self._end(call)
        return done

    async def delete(self, names: Sequence[str]) -> None:
        call = await self._begin("delete", f"{len(names)} objects")
        kept = list(names)

        async def work() -> bool:
            await self.inner.delete(kept)
            return True

        await self._change(work, kept)
        await self._end(call)

    async def get(self, name: str) -> memoryview:
        call = await self._begin("get", name)
        content = await self.inner.get(name)
        await self._end(call)
        if len(content) and self._happens("truncated"):
            return content[: self._chance.randrange(len(content))]
        return self._flipped([content])[0]

    async def get_if_changed(
        self, name: str, e_tag: str, size_bytes_max: int
    ) -> tuple[memoryview, ObjectInfo] | None:
        call = await self._begin("get", name)
        found = await self.inner.get_if_changed(name, e_tag, size_bytes_max)
        await self._end(call)
        if found is None:
            return None
        content, info = found
        if len(content) and self._happens("truncated"):
            return content[: self._chance.randrange(len(content))], info
        return self._flipped([content])[0], info

    async def get_ranges(self, name: str, ranges: Sequence[Range]) -> Sequence[memoryview]:
        call = await self._begin("get_ranges", name)
        parts = await self.inner.get_ranges(name, ranges)
        await self._end(call)
        if self._happens("truncated"):
            raise self._failure(name, "was cut off")
        return self._flipped(parts)

    async def head(self, name: str) -> ObjectInfo:
        call = await self._begin("head", name)
        info = await self.inner.head(name)
        await self._end(call)
        return info

    async def list(self, prefix: str, after: str = "") -> AsyncIterator[Sequence[ObjectInfo]]:
        call = await self._begin("list", prefix)
        async for page in self.inner.list(prefix, after):
            await self._end(call)
            yield page
            call = await self._begin("list", prefix)

    async def folders(self, prefix: str) -> Sequence[str]:
        call = await self._begin("folders", prefix)
        found = await self.inner.folders(prefix)
        await self._end(call)
        return found

    def _happens(self, fault: str) -> bool:
        share: float = getattr(self.faults, fault)
        if not share or self._chance.random() >= share:
            return False
        self.injected[fault] += 1
        return True

    def _failure(self, name: str, what: str) -> ObjectUnavailable:
        return ObjectUnavailable(f"{self.where}: {name}: {what} (injected)")

    async def _begin(self, method: str, name: str) -> _Call:
        self.requests[method] += 1
        self._begun += 1
        number = self._begun
        delay_s = self._chance.random() * self.faults.delay_s
        answer_s = delay_s if delay_s and self._chance.random() < 0.5 else 0.0
        if delay_s > answer_s:
            await asyncio.sleep(delay_s)
        await self._going.wait()
        if self.faults.refuse is not None:
            raise self.faults.refuse
        if self._happens("hung"):
            await asyncio.sleep(self.faults.hang_s)
            raise self._failure(name, "hung")
        if self._happens("failed"):
            raise self._failure(name, "failed")
        return _Call(number, answer_s)

    async def _end(self, call: _Call) -> None:
        if call.answer_s:
            await asyncio.sleep(call.answer_s)
        await self._going.wait()
        self.injected["reordered"] += call.number < self._latest_ended
        self._latest_ended = max(self._latest_ended, call.number)

    async def _change(self, work: Callable[[], Awaitable[bool]], names: Sequence[str]) -> bool:
        late, lost, twice = map(self._happens, ("late", "lost", "twice"))
        self._changed.update(names)
        if late:
            self._do_later(work, names)
            raise self._failure(" ".join(names[:1]), "timed out")
        done = await work()
        if twice:
            self._do_later(work, names)
        if lost:
            raise self._failure(" ".join(names[:1]), "the answer was lost")
        return done

    def _do_later(self, work: Callable[[], Awaitable[bool]], names: Sequence[str]) -> None:
        delay_s = self._chance.random() * self.faults.late_s
        changed = [self._changed[name] for name in names]

        async def later() -> None:
            await asyncio.sleep(delay_s)
            self.injected["overtaken"] += changed != [self._changed[name] for name in names]
            try:
                await work()
            except ObjectError:
                pass  # nobody waits for it any more

        task = asyncio.ensure_future(later())
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    def _flipped(self, parts: Sequence[memoryview]) -> Sequence[memoryview]:
        if not self._happens("flipped") or not any(map(len, parts)):
            return parts
        index = self._chance.choice([index for index, part in enumerate(parts) if len(part)])
        changed = list(parts)
        changed[index] = memoryview(flip(changed[index], self._chance.randrange(8 * len(changed[index]))))
        return changed

    def _damaged(self, content: bytes) -> bytes:
        if not content:
            return content
        if self._chance.random() < 0.5:
            return content[: self._chance.randrange(len(content))]
        return flip(content, self._chance.randrange(8 * len(content)))


def flip(content: bytes | memoryview, bit: int) -> bytes:
    """The same with one bit changed."""
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


class S3Server:
    """moto's S3 on a free port of this machine, in a process of its own. It believes any key. Buckets are made by `make_bucket`."""

    def __init__(self, lines: int | None = 20) -> None:
        """lines: of its log that are kept; None: all."""
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._said = self.process.stderr
        assert self._said is not None
        found = None
        while found is None and (line := self._said.readline()):
            found = re.search(r"Running on http://127\.0\.0\.1:(\d+)", line)
        assert found is not None, "moto did not start"
        self.port = int(found[1])
        self.last: deque[str] = deque(maxlen=lines)  # of its log, in which every request has a line
        threading.Thread(target=self.last.extend, args=(self._said,), daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def options(self, **more: Any) -> ObjectOptions:
        """What its buckets are opened with."""
        key = {"access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}
        return ObjectOptions(endpoint=self.endpoint, allow_http=True, **{**key, **more})

    def make_bucket(self, name: str) -> None:
        assert self.process.poll() is None, f"moto has ended: {self.process.returncode}, {list(self.last)}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        try:
            connection.request("PUT", f"/{name}")
            assert connection.getresponse().status == 200
        finally:
            connection.close()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT_S)
