"""What the keeper of a region looks at for everybody: writers' heads, and the folders in which something new may lie.

    bell, every few seconds ─▶ it rang ─▶ folders listed ─▶ a digest of each ─▶ news
    heads, listed while writers write, and for LISTEN_S behind ─────────────────▶ news: who wrote up to which number

Whoever puts something into one of these folders rings. Writers ring when the news say that nobody listens. Where a bell was not
heard, everything is listed all the same after SURE_S: an idle region costs a few requests.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

import xxhash

from replication.formats.doubts import DOUBTS
from replication.formats.keeping import BELL, BELL_BYTES_MAX, STUCK
from replication.formats.orders import ORDERS
from replication.formats.tombstones import BEHIND, TOMBSTONES
from replication.keeper.news_reader import SURE_S
from replication.waits import passed_s
from tiers.bucket.objects import Objects
from tiers.errors import ObjectError

REMOVED: Final = "models/removed/"  # as replication/erasure/removed_models.py calls it
FOLDERS: Final = (TOMBSTONES, BEHIND, ORDERS, REMOVED, STUCK, DOUBTS)
LISTEN_S: Final = 600.0  # since somebody wrote; then writers ring
HEADS_LATE_S: Final = 60.0  # listed so long ago, they are not known any more
LISTEN_ON_S: Final = 60.0  # and heads are listed still, for those who have not read so

log = logging.getLogger("replication.watch")


class Watch:
    """Of one region. folders: a digest of each. heads: see `News`."""

    def __init__(self, objects: Objects) -> None:
        self.folders: dict[str, bytes] = {}
        self.heads: dict[str, int] = {}
        self._objects = objects
        self._e_tag = ""
        self._rings = 0
        self._heard = self._listed = -1  # when heads were asked for, and listed
        self._wrote_s = passed_s()
        self._folders_s = self._heads_s = float("-inf")

    @property
    def listens(self) -> bool:
        """Whether writers need not ring."""
        return passed_s() < self._wrote_s + LISTEN_S

    @property
    def known(self) -> dict[str, int] | None:
        """Heads, as far as they are to be believed now."""
        is_late = self._hears and passed_s() >= self._heads_s + HEADS_LATE_S
        return None if is_late else self.heads

    def asked(self) -> Mapping[str, int] | None:
        """By whoever lists heads: what there is; None: they are to be listed now."""
        self._heard = self._rings
        return None if self._hears else self.heads

    @property
    def _hears(self) -> bool:
        now_s = passed_s()
        is_busy = now_s < self._wrote_s + LISTEN_S + LISTEN_ON_S
        return self._listed != self._rings or is_busy or now_s >= self._heads_s + SURE_S

    def tell(self, heads: Mapping[str, int]) -> bool:
        """They were listed, and read as far as that is possible. Returns whether that is news."""
        was_late = self.known is None
        self._listed, self._heads_s = self._heard, passed_s()
        if heads == self.heads:
            return was_late
        self.heads, self._wrote_s = dict(heads), passed_s()
        return True

    async def look(self) -> bool:
        """Whether somebody rang, or it is time to look all the same. What cannot be listed has no digest."""
        begun_s = passed_s()
        rang = await self._listen()
        self._rings += rang
        if not rang and begun_s < self._folders_s + SURE_S:
            return False
        self.folders = {folder: digest for folder in FOLDERS if (digest := await self._digest(folder))}
        self._folders_s = begun_s
        return True

    async def _listen(self) -> bool:
        try:
            found = await self._objects.get_if_changed(BELL, self._e_tag, BELL_BYTES_MAX)
        except ObjectError:  # it hangs nowhere yet, or is no use
            found = None
        if found is None:
            return False
        self._e_tag = found[1].e_tag
        return True

    async def _digest(self, folder: str) -> bytes:
        """b"": nobody knows."""
        digest = xxhash.xxh3_128()
        try:
            async for page in self._objects.list(folder):
                for info in page:
                    digest.update(f"{info.name} {info.e_tag}\n".encode())
        except ObjectError as error:
            log.info("%s: not listed: %s", folder, error)
            return b""
        return digest.digest()
