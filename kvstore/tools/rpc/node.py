"""The daemon as the gRPC process asks it: requests of the local socket, over connections that are made anew when they are lost.

    quick ──▶ one connection for all: a request behind the other, answers in the same order
    slow  ──▶ a connection of its own, for as long as it takes: nobody waits behind it

A daemon that is started again costs its clients here a wait: what was asked is asked again, until the deadline. All that is
asked may be asked twice.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvstore.client.connection import Connection
from kvstore.errors import Internal, Refused, Unavailable
from kvstore.protocol import frames

CONNECT_S = 5.0  # for one try to connect
AGAIN_S_MIN, AGAIN_S_MAX = 0.05, 0.5  # between two tries; doubles
WAITING_MAX = 1024  # quick requests whose answers did not come yet

T = TypeVar("T")


class Node:
    """One daemon. For one event loop."""

    def __init__(self, socket_path: Path) -> None:
        self.socket_path = socket_path
        self._quick: Line | None = None
        self._connecting = asyncio.Lock()

    async def ask(self, request: frames.Request, until: float, kind: type[T], slow: bool = False) -> T:
        """The daemon's answer, of this kind. until: monotonic. Raises Refused, Unavailable, TimeoutError."""
        pause_s = AGAIN_S_MIN
        while True:
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    answer = await (self._slowly(request) if slow else self._quickly(request))
                break
            except Unavailable:
                if time.monotonic() + pause_s > until:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, AGAIN_S_MAX)
        if isinstance(answer, frames.Error):
            raise Refused(answer.code, answer.message)
        if not isinstance(answer, kind):
            raise Internal(f"the daemon answers {type(answer).__name__}")
        return answer

    async def report(self, request: frames.Request, until: float, slow: bool = False) -> Any:
        """The document that some requests are answered with. Raises as `ask`."""
        return (await self.ask(request, until, frames.StatusReport, slow)).report

    async def pages(self, name: str, make: Callable[[int], frames.Request], until: float) -> Any:
        """A document with a list that comes in several answers. Raises as `ask`."""
        document = dict(await self.report(make(0), until))
        while document[f"{name}_left"]:
            more = await self.report(make(len(document[name])), until)
            if not more[name]:
                break
            document = {**more, name: document[name] + more[name]}
        return document

    async def settings(self, until: float) -> dict[str, Any]:
        """The daemon's settings in force, by key. Raises as `ask`."""
        told = (await self.report(frames.GetSettings(""), until))["settings"]
        return {one["key"]: one["value"] for one in told}

    def close(self) -> None:
        if self._quick is not None:
            self._quick.close()

    async def _quickly(self, request: frames.Request) -> frames.Answer:
        line = self._quick
        if line is None or line.is_lost:
            async with self._connecting:
                if self._quick is None or self._quick.is_lost:
                    self._quick = await self._connected()
                line = self._quick
        return await line.ask(request)

    async def _slowly(self, request: frames.Request) -> frames.Answer:
        line = await self._connected()
        try:
            return await line.ask(request)
        finally:
            line.close()

    async def _connected(self) -> Line:
        """Raises Unavailable, Refused."""
        loop = asyncio.get_running_loop()
        greeted = await asyncio.to_thread(self._greeted)
        _, line = await loop.create_unix_connection(Line, sock=greeted.hand_over())
        return line

    def _greeted(self) -> Connection:
        return Connection(
            str(self.socket_path),
            "kvstore grpc",
            attach=False,
            writable=False,
            deadline=time.monotonic() + CONNECT_S,
            door="grpc",
        )


class Line(asyncio.Protocol):
    """One connection that was greeted."""

    def __init__(self) -> None:
        self.is_lost = False
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[asyncio.Future[frames.Answer]] = deque()
        self._came = bytearray()

    async def ask(self, request: frames.Request) -> frames.Answer:
        """Raises Unavailable."""
        if self.is_lost or self._transport is None or len(self._waiting) >= WAITING_MAX:
            raise Unavailable(
                "kvstore daemon: the connection was lost" if self.is_lost else "kvstore daemon: too busy"
            )
        answer: asyncio.Future[frames.Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        self._transport.write(frames.encode_frame(request))
        return await answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- what the event loop calls --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # of a stream

    def data_received(self, data: bytes) -> None:
        self._came += data
        try:
            while (size := self._whole()) and self._waiting:
                with memoryview(self._came) as came:
                    answer = frames.answer_decoder.decode(came[frames.HEADER_BYTES : size])
                del self._came[:size]
                waiting = self._waiting.popleft()
                if not waiting.done():  # or nobody waits for it any more
                    waiting.set_result(answer)
        except (ValueError, msgspec.MsgspecError):
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_exception(Unavailable("kvstore daemon: the connection was lost"))

    def _whole(self) -> int:
        """The bytes of the first frame that came, if it is whole. Raises ValueError where it claims too much."""
        if len(self._came) < frames.HEADER_BYTES:
            return 0
        size: int = frames.HEADER.unpack_from(self._came)[0]
        if size > frames.FRAME_BYTES_MAX:
            raise ValueError(f"answer of {size} bytes")
        size += frames.HEADER_BYTES
        return size if len(self._came) >= size else 0
