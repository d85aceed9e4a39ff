"""Operations: work of minutes or hours that a call begins, as a child process that runs our own command.

    begin ─▶ kvstore --child model preload NAME …  ── stderr ─▶ progress ─▶ who watches
                        │ ends                     ── stdout ─▶ document_json
                        ├─ exit code 0                      ─▶ DONE
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
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import IO, Any, Final, NamedTuple, cast

from google.protobuf.duration_pb2 import Duration

from kvstore.daemon.beside.children import reason_of, start_child
from kvstore.errors import BadRequest, Failed, LimitExceeded, NotAllowed, NotFound, RequestError, Unavailable
from kvstore.security.principals import Access
from kvstore.tools.rpc.calls import ACCESS, Call
from kvstore.units import exact_duration, plural, printable
from kvstore.v1.types_pb2 import Operation
from replication.problems import Problems
from replication.tasks import Tasks

OPERATIONS_MAX: Final = 8  # under way
ASKED_MAX: Final = 4  # short ones, at once
OPERATIONS_KEPT: Final = 64  # that have ended …
KEPT_BYTES_MAX: Final = 16 << 20  # … and of their documents
DOCUMENT_BYTES_MAX: Final = 3 << 20  # below what gRPC clients take of one message, unless they say otherwise
LINE_CHARS_MAX: Final = 1000
WORD_CHARS_MAX: Final = 1024
KILL_AFTER_S: Final = 10.0  # since it was asked to end
CLOSE_S: Final = 1.0  # for their ends, at ours
LOOK_S: Final = 0.01  # between looks whether it is gone that has closed its pipes
READ_BYTES: Final = 1 << 16
JSON: Final = "--output=json"

Settings = Mapping[str, Any]  # those in force, by key
_FOR_COMMANDS: Final = frozenset(
    {
        *("data_dir", "socket_path", "region", "regions_file", "models.dir", "models.nvme_bytes"),
        *("models.cache_key_file", "durable.storage_gb_month_price", "durable.put_million_price"),
        "durable.copy_gb_price",
    }
)
_COMPLAINT: Final = "kvstore: "  # as the command begins what it says of itself
_CODES: Final[dict[int, type[RequestError]]] = {2: BadRequest, 3: NotFound}  # exit codes
_UNREACHABLE: Final = 4


class Ended(NamedTuple):
    """code: its exit code, negative: the signal. problem: "" where it did all."""

    code: int
    document: str
    problem: str


class Child:
    """A command, from its start to its end. say: called with each line that tells how far it is."""

    def __init__(self, words: Sequence[str], say: Callable[[str], None] = lambda _: None) -> None:
        self._words = [sys.executable, "-P", "-m", "kvstore", "--child", *words]
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._is_too_long = False
        self._complaint = self._line = ""

    async def run(self) -> Ended:
        """Cancelled, it ends the process. Raises OSError where there is none to be had."""
        self._process = process = start_child(self._words, subprocess.PIPE, subprocess.PIPE, apart=True)
        assert process.stdin and process.stdout and process.stderr, "pipes"
        try:
            async with reading(process.stdout) as output, reading(process.stderr) as errors:
                async with asyncio.TaskGroup() as group:
                    document = group.create_task(self._document(output))
                    group.create_task(self._lines(errors))
            while (code := process.poll()) is None:
                await asyncio.sleep(LOOK_S)
            return self._ended(code, document.result())
        finally:
            self.end()
            process.stdin.close()

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Ask it to end, and whatever it has started. Idempotent, returns at once."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, how)

    def _ended(self, code: int, document: str) -> Ended:
        if self._is_too_long:
            return Ended(code or 1, "", f"its document has more than {DOCUMENT_BYTES_MAX} bytes")
        if not code:
            return Ended(code, document, "")
        died = reason_of(code)
        seen = f"{died}: the document says why" if document else self._line or died
        return Ended(code, document, self._complaint or seen)

    async def _document(self, pipe: asyncio.StreamReader) -> str:
        content = b""
        while data := await pipe.read(READ_BYTES):
            content += data
            if len(content) > DOCUMENT_BYTES_MAX:
                self._is_too_long, content = True, b""
                self.end()
        return content.decode(errors="replace").strip()

    async def _lines(self, pipe: asyncio.StreamReader) -> None:
        rest = b""
        while data := await pipe.read(READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[-READ_BYTES:]
            for line in filter(None, lines):
                self._take(printable(line.decode(errors="replace"))[:LINE_CHARS_MAX])

    def _take(self, line: str) -> None:
        self._line = line.removeprefix(_COMPLAINT)
        if line != self._line:
            self._complaint = self._line
        self._say(self._line)


class Work:
    """An operation, begun by a call."""

    def __init__(self, call: Call, subject: str, words: Sequence[str]) -> None:
        self.told = Operation(
            id=secrets.token_hex(8), method=call.method, subject=subject, state=Operation.STATE_RUNNING
        )
        self.told.begun.GetCurrentTime()
        self.is_cancelled = False
        self.child = Child(words, self._say)
        self._changed = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        return self.told.state != Operation.STATE_RUNNING

    @property
    def size_bytes(self) -> int:
        return len(self.told.document_json)

    async def run(self) -> None:
        """Until it has ended. Raises nothing of the world's."""
        try:
            ended = Ended(1, "", "") if self.is_cancelled else await self.child.run()
        except OSError as error:
            ended = Ended(1, "", f"cannot start a process: {error.strerror}")
        except asyncio.CancelledError:
            self._end(Operation.STATE_CANCELLED)
            raise
        self.told.document_json, self.told.problem = ended.document, ended.problem
        self.told.exit_code = max(0, ended.code)
        if self.is_cancelled and ended.code:
            self.told.problem = ""
            self._end(Operation.STATE_CANCELLED)
        else:
            self._end(Operation.STATE_FAILED if ended.code else Operation.STATE_DONE)

    async def states(self) -> AsyncIterator[Operation]:
        """How it is now, and whenever that has changed."""
        while True:
            changed = self._changed
            yield copied(self.told)
            if self.has_ended:
                return
            await changed.wait()

    def _say(self, line: str) -> None:
        self.told.progress = line
        self._tell()

    def _end(self, state: Operation.State.ValueType) -> None:
        self.told.state = state
        self.told.ended.GetCurrentTime()
        self._tell()

    def _tell(self) -> None:
        old, self._changed = self._changed, asyncio.Event()
        old.set()


class Operations:
    """Those of this process. For one event loop."""

    def __init__(self, settings: Callable[[float], Awaitable[Settings]]) -> None:
        """settings: asks the daemon for those in force, until a deadline (monotonic)."""
        self.settings = settings
        self._works: dict[str, Work] = {}  # in the order in which they began
        self._asked = 0
        self._tasks = Tasks(Problems("operations"))

    async def begin(self, call: Call, subject: str, *words: str, is_local: bool = False) -> Operation:
        """Begin what this call asks for. is_local: it needs no region. Raises LimitExceeded, Failed, and what asking the
        daemon raises."""
        options = await self._options(call, is_local)
        if sum(not work.has_ended for work in self._works.values()) >= OPERATIONS_MAX:
            raise LimitExceeded(f"{plural(OPERATIONS_MAX, 'operation')} at a time are allowed")
        work = Work(call, subject, [*words, *options])
        self._works[work.told.id] = work
        self._forget()
        self._tasks.begin(call.method, work.run())
        return copied(work.told)

    async def ask(self, call: Call, *words: str, is_local: bool = False) -> str:
        """The document of a command that takes a moment. Raises as `begin`, and what its exit code says."""
        if self._asked >= ASKED_MAX:
            raise LimitExceeded(f"{plural(ASKED_MAX, 'call')} of this kind at a time are allowed")
        self._asked += 1
        try:
            options = await self._options(call, is_local)
            async with asyncio.timeout(call.left_s):
                ended = await Child([*words, *options]).run()
        except OSError as error:
            raise Failed(f"cannot start a process: {error.strerror}") from error
        finally:
            self._asked -= 1
        if ended.code and not ended.document:
            if ended.code == _UNREACHABLE:
                raise Unavailable(ended.problem)
            raise _CODES.get(ended.code, Failed)(ended.problem)
        return ended.document

    async def _options(self, call: Call, is_local: bool) -> list[str]:
        """What every command has to know of the daemon's settings."""
        settings = await self.settings(call.until)
        if not is_local and not settings["regions_file"]:
            raise Failed("regions_file is not set: this node is in no region")
        known = {
            key: value
            for key, value in settings.items()
            if key in _FOR_COMMANDS or key.startswith("regions.")
        }
        return ["--config=/dev/null", *(f"--set={key}={value}" for key, value in known.items())]

    def newest(self, call: Call) -> list[Operation]:
        """All that are known, without documents, those that began last first."""
        if call.principal.tenant is not None:
            return []
        return [copied(work.told, with_document=False) for work in reversed(self._works.values())]

    def get(self, call: Call, name: str) -> Operation:
        """Raises NotFound."""
        return copied(self._work(call, name).told)

    def watch(self, call: Call, name: str) -> AsyncIterator[Operation]:
        """How it is now, and whenever that has changed, until it has ended. Raises NotFound."""
        return self._work(call, name).states()

    def cancel(self, call: Call, name: str) -> Operation:
        """Idempotent; nothing happens to one that has ended. Raises NotFound, NotAllowed."""
        work = self._work(call, name)
        call.principal.require(cast(Access, ACCESS[work.told.method]), f"cancelling {work.told.method}")
        if not work.has_ended and not work.is_cancelled:
            work.is_cancelled = True
            work.child.end()
            kill = partial(work.child.end, signal.SIGKILL)
            asyncio.get_running_loop().call_later(KILL_AFTER_S, kill)
        return copied(work.told)

    async def close(self) -> None:
        """End all: they are asked to, and end with us in any case."""
        for work in self._works.values():
            work.child.end()
        if tasks := self._tasks.all:
            await asyncio.wait(tasks, timeout=CLOSE_S)
        await self._tasks.close()

    def _work(self, call: Call, name: str) -> Work:
        if name not in self._works or call.principal.tenant is not None:
            raise NotFound(f"operation {printable(name[:64])}: not known here")
        return self._works[name]

    def _forget(self) -> None:
        """The oldest that have ended, beyond what is kept."""
        ended = [work for work in self._works.values() if work.has_ended]
        kept_bytes = sum(work.size_bytes for work in ended)
        while len(ended) > OPERATIONS_KEPT or kept_bytes > KEPT_BYTES_MAX:
            oldest = ended.pop(0)
            kept_bytes -= oldest.size_bytes
            del self._works[oldest.told.id]


@contextlib.asynccontextmanager
async def reading(pipe: IO[bytes]) -> AsyncIterator[asyncio.StreamReader]:
    """The end of a pipe, closed behind it."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        yield reader
    finally:
        transport.close()


def copied(operation: Operation, with_document: bool = True) -> Operation:
    """As it is now."""
    copy = Operation()
    copy.CopyFrom(operation)
    if not with_document:
        copy.ClearField("document_json")
    return copy


def require_all(call: Call) -> None:
    """Raises NotAllowed for who asks as a tenant: what is asked about is nobody's in particular."""
    if call.principal.tenant is not None:
        raise NotAllowed(f"{call.method}: not for who asks as a tenant, as {call.principal} does")


def span(name: str, given: Duration, least_s: float, most_s: float) -> str:
    """A time of a request as an argument of a command. Raises BadRequest."""
    seconds = given.seconds + given.nanos / 1e9
    if not least_s <= seconds <= most_s:
        allowed = f"{exact_duration(least_s)} to {exact_duration(most_s)}"
        raise BadRequest(f"{name}: {seconds:g} s: allowed are {allowed}")
    return f"{seconds:.9f}s"


def word(name: str, text: str) -> str:
    """A value of a request as an argument of a command, which is never an option. name: of the field. Raises BadRequest."""
    if not text or text.startswith("-") or len(text) > WORD_CHARS_MAX or not text.isprintable():
        raise BadRequest(
            f"{name}: {printable(text[:64]) or '(nothing)'}: allowed are 1 to {WORD_CHARS_MAX} printable characters, "
            'the first of which is not "-"'
        )
    return text
