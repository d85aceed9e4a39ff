"""Bulk copy: `juicefs sync` brings many packs of a source near, ahead of the jobs that copy them one by one.

    source, packs/ ── juicefs sync ──▶ <directory>/packs/ ── job: every byte compared ──▶ put at home ─▶ announced
         ╰───────────── job: what was not fetched, or is not what was announced ─────────▶ put at home ─▶ announced

It only makes things faster. What it fetched is believed as little as what a network brings; what it did not fetch, the job
copies from the source as always; it sees no bucket but the source's, and writes into no bucket at all.

* Its directory is emptied at each start, and away at the end: what a kill leaves, whole packs or half ones (`.….tmp`), is
  used by nobody.
* The program ends with this process, however that ends, and with all its children when it takes too long.
* No credentials are in an argument list, or in a message.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from replication import tied
from replication.constants import (
    BULK_BYTES_PER_S_MIN,
    BULK_DISK_FREE_BYTES_MIN,
    BULK_SAID_BYTES_MAX,
    BULK_START_S_MAX,
    COMPLAINT_CHARS_MAX,
    KIB,
    MIB,
)
from replication.errors import BulkCopyFailed, BulkCopyRefused
from replication.juicefs import Address, Juicefs, address, complaint, copied, find_juicefs
from tiers.errors import ObjectRefused
from tiers.object_options import ObjectOptions
from tiers.object_store import open_objects
from tiers.objects import Objects
from tiers.packs import PACKS

log = logging.getLogger("replication.bulk_copy")


class BulkCopy:
    """Of one source. fetched: what was brought, under the names that it has there."""

    def __init__(self, program: Juicefs, place: Address, directory: Path, fetched: Objects) -> None:
        self.fetched = fetched
        self._program = program
        self._place = place
        self._directory = directory

    async def fetch(self, names: Sequence[str], size_bytes: int) -> int:
        """Bring these packs; returns how many came. size_bytes: of all of them.

        Raises BulkCopyFailed, after which some of them may be there, too. Ends when the program has ended, also when it
        is cancelled.
        """
        self._check_room(size_bytes)
        source = self._place.directory
        if source and not await asyncio.to_thread(os.path.isdir, source):  # it would make it
            raise BulkCopyFailed(f"{source}: there is no such directory")
        below = [name.removeprefix(PACKS) for name in names]
        list_file = self._directory / "names"
        try:
            list_file.write_text("".join(f"{name}\n" for name in below))
        except OSError as error:
            raise BulkCopyFailed(f"{list_file}: {error.strerror}") from error
        words = self._program.sync(self._place, PACKS, below, str(list_file))
        status, said = await self._run(words, BULK_START_S_MAX + size_bytes / BULK_BYTES_PER_S_MIN)
        count = copied(said)
        if status != 0 or count is None:
            reason = complaint(said)[:COMPLAINT_CHARS_MAX] or "it did not say that it ended"
            raise BulkCopyFailed(f"juicefs sync: exit code {status}: {reason}")
        if not count:
            raise BulkCopyFailed(f"juicefs sync: it found none of {len(names)} packs in {self._place.url}")
        return count

    def close(self) -> None:
        """Remove what was brought."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def _check_room(self, size_bytes: int) -> None:
        needed = size_bytes + BULK_DISK_FREE_BYTES_MIN
        try:
            free = shutil.disk_usage(self._directory).free
        except OSError as error:
            raise BulkCopyFailed(f"{self._directory}: {error.strerror}") from error
        if free < needed:
            raise BulkCopyFailed(f"{self._directory}: {free // MIB} MiB are free, needed are {needed // MIB}")

    async def _run(self, words: Sequence[str], limit_s: float) -> tuple[int, str]:
        """Exit code, and the end of what it said. Raises BulkCopyFailed where it cannot be started, or hangs."""
        leash = [sys.executable, "-I", "-S", tied.__file__, str(os.getpid())]
        try:
            process = await asyncio.create_subprocess_exec(
                *leash,
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                cwd=self._directory,
                env={**os.environ, **dict(self._place.environment), "TMPDIR": str(self._directory)},
                start_new_session=True,
            )
        except OSError as error:
            raise BulkCopyFailed(f"{words[0]}: {error.strerror}") from error
        said = bytearray()
        try:
            async with asyncio.timeout(limit_s):
                assert process.stderr is not None
                while piece := await process.stderr.read(64 * KIB):
                    said += piece
                    del said[:-BULK_SAID_BYTES_MAX]
                status = await process.wait()
        except TimeoutError:
            raise BulkCopyFailed(f"juicefs sync: not done within {limit_s:.0f} s") from None
        finally:
            await _end(process)
        return status, said.decode(errors="replace")


async def open_bulk_copy(url: str, options: ObjectOptions, directory: Path) -> BulkCopy:
    """Of the store that we open with this URL and these options. directory: of our own, emptied now.

    Raises BulkCopyRefused where there is no program that can do it.
    """
    shutil.rmtree(directory, ignore_errors=True)  # what an earlier life left, even if it cannot be used now
    place = address(url, options, PACKS, os.environ)
    program = await find_juicefs()
    try:
        (directory / PACKS).mkdir(parents=True, mode=0o700)
        fetched = open_objects(f"file://{quote(str(directory))}", ObjectOptions())
    except OSError as error:
        raise BulkCopyRefused(f"{directory}: {error.strerror}") from error
    except ObjectRefused as error:
        raise BulkCopyRefused(str(error)) from error
    log.info("bulk copies by juicefs", extra={"version": program.version, "source": place.url})
    return BulkCopy(program, place, directory, fetched)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill its session, if it has not ended, and wait for it."""
    if process.returncode is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended just now
    is_cancelled = False
    while process.returncode is None:
        try:
            await process.wait()
        except asyncio.CancelledError:
            is_cancelled = True  # it ends in milliseconds
    if is_cancelled:
        raise asyncio.CancelledError
