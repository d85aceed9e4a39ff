"""Unsaved times: what is to be written to `stored_times.sqlite`, within a limit.

    note ──▶ times, by block ── beyond EXPIRY_UNSAVED_MAX ──▶ namespaces to be written anew
                │ a few thousand a job                          │ a few thousand a job, as they are then
                ▼                                               ▼
              file ◀────────────────────────────────────────────┴─ then: what the file has too much

While the file cannot be written, times are not piled up without end: they are let go, and the
namespaces that they are of are written as a whole when writing works again.

What must hold at every moment, for a kill may come: a row of a block that is held is no younger
than the block. So rows are never deleted before the new ones are there. They are replaced first,
a slice at a time, and then the file is read in pages to find rows of what is not held any more. Until
the new rows are all there, the file does not say that it is complete (`Changes.saved_s`). A row left
behind by a block that went makes it older than it is, if it comes back and the daemon is killed before
its new time is written; never younger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from kvstore.constants import EXPIRY_FORGOTTEN_MAX, EXPIRY_ROWS_PER_SAVE, EXPIRY_UNSAVED_MAX
from kvstore.stored_times import Changes, Row

Walk = Iterator[Row | None]  # all times of a namespace; None for a block without one


class Unsaved:
    """Times to be written, times to be deleted, and namespaces to be forgotten."""

    def __init__(self) -> None:
        self.forgotten: dict[bytes, None] = {}
        self._times: dict[tuple[bytes, bytes], int | None] = {}
        self._dirty: set[bytes] = set()  # namespaces that these may be of
        self._anew: dict[bytes, Walk | None] = {}  # to be written as a whole: its rest; None: all of it
        self._prune: dict[bytes, bytes] = {}  # written anew: the file is compared up to this block hash

    def __len__(self) -> int:
        return len(self._times)

    def __bool__(self) -> bool:
        return bool(self._times or self._anew or self.forgotten)

    @property
    def anew(self) -> int:
        """Namespaces that are to be written as a whole."""
        return len(self._anew)

    def note(self, digest: bytes, block_hash: bytes, stored_s: int | None) -> None:
        """The block has this time now; None: it is not held any more."""
        if self._anew and self._anew.get(digest, self) is None:
            return  # written with all the others, as it is then
        self._times[digest, block_hash] = stored_s
        self._dirty.add(digest)
        if len(self._times) > EXPIRY_UNSAVED_MAX:
            for dirty in self._dirty:
                self.write_anew(dirty)
            self._times.clear()
            self._dirty.clear()

    def write_anew(self, digest: bytes) -> None:
        """Write all times of this namespace, when there is time for it, and not one by one until then."""
        self._anew[digest] = None
        self._prune.pop(digest, None)

    def forget(self, digest: bytes) -> None:
        """The namespace has no TTL any more: its rows go."""
        self._anew.pop(digest, None)
        self._prune.pop(digest, None)
        self._forget_later(digest)

    def _forget_later(self, digest: bytes) -> None:
        self.forgotten[digest] = None
        while len(self.forgotten) > EXPIRY_FORGOTTEN_MAX:
            del self.forgotten[next(iter(self.forgotten))]

    def take(
        self,
        walk_of: Callable[[bytes], Walk | None],
        is_ruled: Callable[[bytes], bool],
        has_row: Callable[[bytes], bool],
        is_last: bool,
    ) -> tuple[Changes, bool]:
        """What is to be written now, a bounded number of rows unless they are the last; and whether that is all,
        but for times of what is gone.

        walk_of: all times of a namespace, None if they are not all known yet. has_row: see `Expiry.changes`.
        """
        rows: list[Row] = []
        later: dict[tuple[bytes, bytes], int | None] = {}
        for key in list(self._times if is_last else islice(self._times, EXPIRY_ROWS_PER_SAVE)):
            stored_s = self._times.pop(key)
            if stored_s is None and has_row(key[0] + key[1]):
                later[key] = None
            elif is_ruled(key[0]):
                rows.append((*key, stored_s))
        if not self._times:
            self._dirty = {digest for digest, _ in later}
        anew = self._take_anew(rows, walk_of, is_last)
        forgotten = [digest for digest in self.forgotten if not is_ruled(digest)]
        self.forgotten.clear()
        is_all = not (self._times or self._anew)
        self._times.update(later)
        return Changes(rows, forgotten, None, anew), is_all

    def _take_anew(
        self, rows: list[Row], walk_of: Callable[[bytes], Walk | None], is_last: bool
    ) -> list[bytes]:
        """Append rows of namespaces that are written anew; answers of which."""
        taken: list[bytes] = []
        left = EXPIRY_ROWS_PER_SAVE - len(rows)  # blocks to look at
        for digest, walk in list(self._anew.items()):
            if left <= 0 and not is_last:
                break
            rest = walk if walk is not None else walk_of(digest)
            if rest is None:
                continue
            self._anew[digest] = rest
            looks = list(rest if is_last else islice(rest, left))
            rows += filter(None, looks)
            taken.append(digest)
            left -= len(looks)
            if is_last or left > 0:
                del self._anew[digest]
                self._prune[digest] = b""
        return taken

    def not_saved(self, changes: Changes) -> None:
        """They could not be written: with the next ones, then."""
        for digest in changes.anew:
            self.write_anew(digest)
        for digest, block_hash, stored_s in changes.rows:
            if (digest, block_hash) not in self._times:
                self.note(digest, block_hash, stored_s)
        for digest in changes.forgotten:
            self._forget_later(digest)

    # -- what the file has too much --

    def to_prune(self) -> tuple[bytes, bytes] | None:
        """The namespace whose rows are to be compared, and behind which block hash."""
        if len(self._times) >= EXPIRY_ROWS_PER_SAVE:
            return None
        return next(iter(self._prune.items()), None)

    def pruned(self, digest: bytes, page: list[bytes], is_held: Callable[[bytes], bool]) -> None:
        """These are the next rows in the file: those of what is not held go."""
        if digest not in self._prune:
            return
        if len(page) < EXPIRY_ROWS_PER_SAVE:
            del self._prune[digest]
        else:
            self._prune[digest] = page[-1]
        for block_hash in page:
            if not is_held(block_hash):
                self.note(digest, block_hash, None)
