"""The nodes of the daemon's region, as each has said itself in the bucket: what `kvstore region nodes` prints.

A process of its own asks, for what reads buckets is large: while somebody looks, and once a minute at most.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Final

import msgspec

NODES_S: Final = 60.0  # between two looks at the bucket: a list, and a small object of each node
NODES_ANSWER_S: Final = 30.0


class Nodes:
    """Of one region; of none where there is no name. For one event loop."""

    def __init__(self, region: str = "", regions_file: str = "") -> None:
        self._words = ("region", "nodes", region, f"--regions={regions_file}", "-o", "json") if region else ()
        self._known: dict[str, Any] = {"nodes": [], "problem": ""}
        self._next_s = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    def newest(self) -> dict[str, Any]:
        """What was found last, at once, and somebody looks again where that is due. docs/cli.md has the fields of `nodes`; problem: why
        it is not known, or not all of it."""
        loop = asyncio.get_running_loop()
        if self._words and loop.time() >= self._next_s and (self._asking is None or self._asking.done()):
            self._next_s = loop.time() + NODES_S
            self._asking = loop.create_task(self._ask())
        return self._known

    def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()

    async def _ask(self) -> None:
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "kvstore", *self._words),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            self._known = {**self._known, "problem": f"no process can be started: {error.strerror}"}
            return
        told, said = b"", b"no answer in time"
        try:
            async with asyncio.timeout(NODES_ANSWER_S):
                told, said = await process.communicate()
            found = msgspec.json.decode(told)
            unread = [f"{one['writer']} cannot be read: {one['problem']}" for one in found["unread"]]
            more = f" (and {len(unread) - 1} more)" if len(unread) > 1 else ""
            self._known = {"nodes": found["nodes"], "problem": f"node {unread[0]}{more}" if unread else ""}
        except (TimeoutError, msgspec.DecodeError):
            why = said.decode(errors="replace").strip() or f"it ended with exit code {process.returncode}"
            self._known = {**self._known, "problem": why}
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
