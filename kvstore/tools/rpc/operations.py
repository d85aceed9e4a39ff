"""Operations: work of minutes or hours that a call begins, as a child process that runs our own command.

    begin ─▶ kvstore --child model preload NAME …  ── stderr ─▶ progress ─▶ who watches
                        │ ends                     ── stdout ─▶ document_json
                        ├─ exit code 0                       ─▶ DONE
                        ├─ after `cancel` (SIGTERM, SIGKILL) ─▶ CANCELLED
                        └─ else                              ─▶ FAILED: its last line of error is `problem`

    ask   ─▶ the same for what takes a moment: its document, or a refusal by its exit code; given up with the call

A process of its own, because it may need gigabytes, cores and a Rust runtime, and its crash is nobody else's. It inherits no
descriptor of ours and none of our settings: what it needs of those is asked of the daemon, and stands in its arguments. None
outlives us: each ends with its stdin. Bounded are: how many run, how many ended ones are remembered, what is kept of each.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import IO, Any, Final, cast

from kvstore.daemon.beside.children import reason_of, start_child
from kvstore.errors import BadRequest, Failed, LimitExceeded, NotFound, Unavailable
from kvstore.security.principals import Access
from kvstore.tools.rpc.calls import ACCESS, Call
from kvstore.units import plural, printable
from kvstore.v1.types_pb2 import Operation
from replication.problems import Problems
from replication.tasks import Tasks
from tiers.together import Group

OPERATIONS_MAX: Final = 8  # under way
ASKED_MAX: Final = 4  # short ones, at once
SHARE_MAX: Final = 3 / 4  # of both, of one who asks
OPERATIONS_KEPT: Final = 32  # that have ended
DOCUMENT_BYTES_MAX: Final = 3 << 20  # below what gRPC clients take of one message, unless they say otherwise
LINE_CHARS_MAX: Final = 1000
KILL_AFTER_S: Final = 10.0  # since it was asked to end
CLOSE_S: Final = 1.0  # for their ends, at ours
SETTINGS_S: Final = 10.0  # that the daemon has, to say what they have to know
LOOK_S: Final = 0.01  # between looks whether it is gone that has closed its pipes
READ_BYTES: Final = 1 << 16

# What our commands have to know of the daemon's settings.
_FOR_COMMANDS: Final = (
    *("data_dir", "socket_path", "region", "regions_file", "models.dir", "models.nvme_bytes"),
    *("durable.storage_gb_month_price", "durable.put_million_price", "durable.copy_gb_price"),
)
_LOCAL: Final = frozenset({"pin", "unpin", "evict", "load", "--local"})  # what needs no region
_COMPLAINT: Final = "kvstore: "  # as the command begins what it says of itself
_REFUSALS: Final = {2: BadRequest, 3: NotFound, 4: Unavailable}  # by exit code


class Work:
    """One command that a call asks for, from its start to its end. told: how it is."""

    def __init__(self, call: Call, subject: str, words: list[str]) -> None:
        self.told = Operation(id=secrets.token_hex(8), method=call.method, subject=subject)
        self.told.state = Operation.STATE_RUNNING
        self.told.begun.GetCurrentTime()
        self.is_cancelled = False
        self.who = str(call.principal)
        self._words = [sys.executable, "-P", "-m", "kvstore", "--child", *words]
        self._process: subprocess.Popen[bytes] | None = None
        self._complaint = self._line = ""
        self._changed = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        return self.told.state != Operation.STATE_RUNNING

    async def run(self) -> None:
        """Until it has ended. Cancelled, it ends the process. Raises nothing of the world's."""
        told, code, document = self.told, 1, b""
        try:
            if not self.is_cancelled:
                code, document = await self._ran()
        except OSError as error:
            self._complaint = f"cannot start a process: {error.strerror}"
        if len(document) > DOCUMENT_BYTES_MAX:
            code, document = code or 1, b""
            self._complaint = f"its document has more than {DOCUMENT_BYTES_MAX} bytes"
        told.document_json, told.exit_code = document.decode(errors="replace").strip(), max(0, code)
        told.ended.GetCurrentTime()
        if not code:
            told.state = Operation.STATE_DONE
        elif self.is_cancelled:
            told.state = Operation.STATE_CANCELLED
        else:
            seen = "the document says why" if document else self._line or reason_of(code)
            told.state, told.problem = Operation.STATE_FAILED, self._complaint or seen
        self._tell()

    async def states(self) -> AsyncIterator[Operation]:
        """How it is now, and whenever that has changed, until it has ended."""
        is_last = False
        while not is_last:
            changed, is_last = self._changed, self.has_ended
            yield self.told
            if not is_last:
                await changed.wait()

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Ask it to end, and whatever it has started. Idempotent, returns at once."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, how)

    async def _ran(self) -> tuple[int, bytes]:
        """Exit code, and document. Raises OSError."""
        self._process = process = start_child(self._words, subprocess.PIPE, subprocess.PIPE, apart=True)
        assert process.stdin and process.stdout and process.stderr, "pipes"
        try:
            with reading(process.stdout) as output, reading(process.stderr) as errors:
                async with Group() as group:
                    document = group.begin(self._document(output))
                    group.begin(self._lines(errors))
            while (code := process.poll()) is None:
                await asyncio.sleep(LOOK_S)
            return code, document.result()
        finally:
            self.end()
            process.stdin.close()

    async def _document(self, pipe: asyncio.StreamReader) -> bytes:
        content = b""
        while data := await pipe.read(READ_BYTES):
            if len(content) > DOCUMENT_BYTES_MAX:
                self.end()
            else:
                content += data
        return content

    async def _lines(self, pipe: asyncio.StreamReader) -> None:
        rest = b""
        while data := await pipe.read(READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[-READ_BYTES:]
            for line in filter(None, lines):
                text = printable(line.decode(errors="replace"))[:LINE_CHARS_MAX]
                self._line = self.told.progress = text.removeprefix(_COMPLAINT)
                self._complaint = self._line if self._line != text else self._complaint
                self._tell()

    def _tell(self) -> None:
        old, self._changed = self._changed, asyncio.Event()
        old.set()


class Operations:
    """Those of this process. For one event loop."""

    def __init__(self, settings: Callable[[float], Awaitable[Mapping[str, Any]]]) -> None:
        """settings: asks the daemon for those in force, until a deadline (monotonic)."""
        self.settings = settings
        self._works: dict[str, Work] = {}  # in the order in which they began
        self._asked: Counter[str] = Counter()  # by who asks
        self._tasks = Tasks(Problems("operations"))

    async def begin(self, call: Call, subject: str, words: list[str]) -> Operation:
        """Raises LimitExceeded, Failed, NotAllowed, and what asking the daemon raises."""
        work = await self._work(call, subject, words)
        underway = Counter(one.who for one in self._works.values() if not one.has_ended)
        _require_room(underway, work.who, OPERATIONS_MAX, "operation")
        self._works[work.told.id] = work
        ended = [name for name, one in self._works.items() if one.has_ended]
        for name in ended[: max(0, len(ended) - OPERATIONS_KEPT)]:
            del self._works[name]
        self._tasks.begin(call.method, work.run())
        return work.told

    async def ask(self, call: Call, words: list[str]) -> str:
        """The document of a command that takes a moment. Raises as `begin`, and what its exit code says."""
        who = str(call.principal)
        _require_room(self._asked, who, ASKED_MAX, "short call")
        self._asked[who] += 1
        try:
            work = await self._work(call, "", words)
            async with asyncio.timeout(call.left_s):
                await work.run()
        finally:
            self._asked -= Counter([who])
        told = work.told
        if told.state == Operation.STATE_FAILED and not told.document_json:
            raise _REFUSALS.get(told.exit_code, Failed)(told.problem)
        return told.document_json

    def newest(self, call: Call) -> list[Operation]:
        """All that are known, without documents, those that began last first."""
        found = []
        for work in reversed(self._works.values()):
            found.append(Operation())
            found[-1].CopyFrom(work.told)
            found[-1].ClearField("document_json")
        return found

    def get(self, call: Call, name: str) -> Work:
        """Raises NotFound."""
        if name not in self._works:
            raise NotFound(f"operation {printable(name[:64])}: not known here")
        return self._works[name]

    def cancel(self, call: Call, name: str) -> Operation:
        """Idempotent; nothing happens to one that has ended. Raises NotFound, NotAllowed."""
        work = self.get(call, name)
        call.principal.require(cast(Access, ACCESS[work.told.method]), f"cancelling {work.told.method}")
        if not work.has_ended and not work.is_cancelled:
            work.is_cancelled = True
            work.end()
            asyncio.get_running_loop().call_later(KILL_AFTER_S, partial(work.end, signal.SIGKILL))
        return work.told

    async def close(self) -> None:
        """End all: they are asked to, and end with us in any case."""
        for work in self._works.values():
            work.end()
        if tasks := self._tasks.all:
            await asyncio.wait(tasks, timeout=CLOSE_S)
        await self._tasks.close()

    async def _work(self, call: Call, subject: str, words: list[str]) -> Work:
        settings = await self.settings(min(call.until, time.monotonic() + SETTINGS_S))
        if not settings["regions_file"] and not _LOCAL & set(words):
            raise Failed("regions_file is not set: this node is in no region")
        options = [f"--set={key}={settings[key]}" for key in _FOR_COMMANDS]
        return Work(call, subject, [*words, "--config=/dev/null", *options])


def _require_room(underway: Counter[str], who: str, most: int, what: str) -> None:
    """For one more of who asks. Raises LimitExceeded."""
    of_one_max = max(1, int(most * SHARE_MAX))
    if underway.total() >= most or underway[who] >= of_one_max:
        raise LimitExceeded(f"{plural(most, what)} at a time are allowed, {of_one_max} of one who asks")


@contextlib.contextmanager
def reading(pipe: IO[bytes]) -> Iterator[asyncio.StreamReader]:
    """The end of a pipe, closed behind it. By a descriptor that is ours alone: uvloop's transports close that of a file twice, and the
    second time it may be another thread's."""
    reader, loop, fd = asyncio.StreamReader(), asyncio.get_running_loop(), pipe.fileno()
    os.set_blocking(fd, False)

    def come() -> None:
        with contextlib.suppress(BlockingIOError):
            if data := os.read(fd, READ_BYTES):
                reader.feed_data(data)
            else:
                loop.remove_reader(fd)
                reader.feed_eof()

    loop.add_reader(fd, come)
    try:
        yield reader
    finally:
        loop.remove_reader(fd)
        pipe.close()
