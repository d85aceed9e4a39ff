"""A proxy in front of an S3 server that does what networks and stores do: passes on, hangs, answers 503, flips bits, cuts off."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading

_PIECE_BYTES = 64 * 1024
_EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
_ANSWERS = {
    "503": b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
    "expired": b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"
    % (len(_EXPIRED), _EXPIRED),
}


class Proxy:
    """mode: "pass", "expired" (403 ExpiredToken), "hang", "deaf" (only answers hang), "503", "away" (nobody answers), "flip" (a bit of each larger piece of an answer) or "cut". delay_s:
    how much later each piece of a request goes on. Both may change at any time. bytes_per_s: of a direction, all connections
    together; 0: as fast as it can."""

    def __init__(self, port: int, seed: int = 0, bytes_per_s: float = 0.0) -> None:
        self.mode = "pass"
        self.delay_s = 0.0
        self.flipped = 0
        self._to = port
        self._bytes_per_s = bytes_per_s
        self._free_s = [0.0, 0.0]  # when a direction has passed on all that it took: requests, answers
        self._chance = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop
        ).result(10)
        self.port: int = self._server.sockets[0].getsockname()[1]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._hang_up(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _hang_up(self) -> None:
        self._server.close()
        await asyncio.sleep(0)  # who was let in just now is served by a task of its own
        while served := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in served:
                task.cancel()
            await asyncio.gather(*served, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            if (answer := _ANSWERS.get(self.mode)) is not None:
                await reader.read(1)
                writer.write(answer)
                await writer.drain()
                writer.close()
                return
            if self.mode == "away":
                writer.close()
                return
            try:
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
            except OSError:  # nobody is there: nor are we
                writer.close()
                return
            await asyncio.gather(self._pump(reader, far_writer, False), self._pump(far_reader, writer, True))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: bool) -> None:
        try:
            while piece := await reader.read(_PIECE_BYTES):
                if self._bytes_per_s:
                    await self._pace(len(piece), answers)
                if self.delay_s and not answers:
                    await asyncio.sleep(self.delay_s)
                while self.mode == "hang" or (self.mode == "deaf" and answers):
                    await asyncio.sleep(0.05)
                if self.mode in (*_ANSWERS, "away", "cut"):
                    break
                if self.mode == "flip" and answers and len(piece) > 4096:
                    damaged = bytearray(piece)
                    damaged[self._chance.randrange(2048, len(piece))] ^= 1 << self._chance.randrange(8)
                    piece, self.flipped = bytes(damaged), self.flipped + 1
                writer.write(piece)
                await writer.drain()
        finally:
            writer.close()

    async def _pace(self, size_bytes: int, answers: bool) -> None:
        """Until so much more has gone through this direction."""
        now_s = self._loop.time()
        self._free_s[answers] = max(now_s, self._free_s[answers]) + size_bytes / self._bytes_per_s
        await asyncio.sleep(self._free_s[answers] - now_s)
