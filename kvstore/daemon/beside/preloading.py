"""Models that this node should have: the daemon starts `kvstore model preload` for each, one after the other.

    models.preload, and what is ordered for the region where models.orders is on
                   ─▶ kvstore model preload NAME --child ── JSON, a line a moment ──▶ how far it is: status
                          │ ends: 0 done; else why is logged, and it is started again after a pause that doubles
    daemon ── stdin (a pipe, never written) ──▶ ends with the daemon, however that ends; what was filled stays

A process of its own, because fetching as fast as a disk can write takes a core or two, and engines wait for our loop.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from typing import Final

from coldstart.disk.home import Said, said_in
from kvstore.daemon.beside.children import Child, Lines, in_force, reason_of
from kvstore.daemon.config.config import Config
from kvstore.protocol import answers
from kvstore.units import format_bytes
from replication.waits import within

PRELOAD_LOOK_S: Final = 0.25  # between two looks at what it says
PRELOAD_PAUSE_S_MIN, PRELOAD_PAUSE_S_MAX = 1.0, 300.0  # before those that failed are started again; doubles

log = logging.getLogger("kvstore.daemon.preloading")


class Preloads:
    """Of one daemon: those of models.preload, and those that are ordered."""

    def __init__(self, config: Config) -> None:
        self._options = in_force(config)
        self._states: dict[str, answers.Preload] = {name: _waiting(name) for name in config.models.preload}
        self._woken = asyncio.Event()
        self._child = Child()  # killed at a stop, it loses a chunk a stream

    def status(self) -> list[answers.Preload]:
        """The fields are documented in docs/cli.md."""
        return list(self._states.values())

    def order(self, name: str) -> answers.Preload:
        """Have this model here, too, whatever revision its name stands for now; its state, which changes as it comes."""
        state = self._states.setdefault(name, _waiting(name))
        if state["state"] in ("there", "failed"):
            state["state"] = "waiting"
        self._woken.set()
        return state

    async def run(self) -> None:
        """Until `end`."""
        pause_s = PRELOAD_PAUSE_S_MIN
        while not self._has_ended():
            self._woken.clear()
            due = [state for state in self._states.values() if state["state"] != "there"]
            failed = [state for state in due if not await self._preloaded(state)]
            await within(pause_s if failed else None, self._woken)
            pause_s = min(2 * pause_s, PRELOAD_PAUSE_S_MAX) if failed else PRELOAD_PAUSE_S_MIN

    def end(self) -> None:
        """Ask the one that runs to end; there is no other one from now on. Idempotent, returns at once."""
        self._woken.set()
        self._child.end()

    def reap(self) -> None:
        """After `end`, when the loop has nothing else to do: wait for it, kill it if it hangs."""
        self._child.reap()

    def _has_ended(self) -> bool:
        return not self._child.is_wanted

    async def _preloaded(self, state: answers.Preload) -> bool:
        """Whether it is there."""
        if self._has_ended():
            return False
        state["state"], state["attempts"] = "running", state["attempts"] + 1
        problem = await self._run(state)
        if self._has_ended():
            return False
        state["state"], state["problem"] = "failed" if problem else "there", problem
        if problem:
            log.warning("preloading %s failed: %s; it is tried again", state["model"], problem)
        else:
            came = ", ".join(f"{name} {format_bytes(size)}" for name, size in state["by_source"].items())
            log.info(
                "model %s is on this disk", state["model"], extra={"fetched": came or "nothing, it was here"}
            )
        return not problem

    async def _run(self, state: answers.Preload) -> str:
        """Why it failed; "" where it did not."""
        command = [
            sys.executable,
            "-P",
            "-m",
            "kvstore",
            "model",
            "preload",
            state["model"],
            "--child",
            *self._options,
        ]
        try:
            child = self._child.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        except OSError as error:
            return str(error)
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        said, complaints, why = Lines(child.stdout), Lines(child.stderr), b""
        while True:
            has_ended = child.poll() is not None
            for line in said.new():
                if (word := said_in(line)) is not None:
                    _note(state, word)
            why = next(filter(None, reversed(complaints.new())), why)
            if has_ended:
                break
            await asyncio.sleep(PRELOAD_LOOK_S)
        for pipe in (child.stdin, child.stdout, child.stderr):
            pipe.close()
        if child.returncode == 0:
            return ""
        return why.decode(errors="replace").strip().removeprefix("kvstore: ") or reason_of(child.returncode)


def _waiting(name: str) -> answers.Preload:
    return {
        "model": name,
        "state": "waiting",
        "bytes": 0,
        "left_bytes": 0,
        "bytes_per_s": 0,
        "by_source": {},
        "attempts": 0,
        "problem": "",
    }


def _note(state: answers.Preload, said: Said) -> None:
    state["bytes"], state["left_bytes"] = said.total_bytes, said.left_bytes
    state["bytes_per_s"], state["by_source"] = round(said.bytes_per_s), said.by_source
