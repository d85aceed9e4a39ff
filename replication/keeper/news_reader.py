"""The news of a region, as one process reads them: with one small conditional request every few seconds.

    news ─▶ look ─▶ the same: it grows older │ another one: the keeper lives │ none, or damaged: nobody is known to keep
              ╰─▶ heads: who has written what      Folders: has what lies there changed?      both: "look yourself" where nobody keeps

Ages are of our own clock and of what we have seen: nobody's clock is believed. What an earlier keeper writes when it wakes up is no
news, unless nothing else comes: then the region was put back to an earlier state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol

from replication.errors import Damaged
from replication.formats.keeping import NEWS, NEWS_FORMAT, News
from replication.problems import Problems
from replication.store_clock import StoreClock
from replication.waits import passed_s
from replication.watched import Watched
from tiers.bucket.objects import Objects
from tiers.errors import ObjectDamaged, ObjectMissing, ObjectRefused

LEASE_S: Final = 45.0  # without a sign of life a keeper is taken for dead
BELIEVED_S: Final = (
    25.0  # news of a keeper that beats every 15 s: then everybody looks himself, long before the lease ends
)
NEWS_INTERVAL_S: Final = 5.0  # between two looks at the news
SURE_S: Final = 300.0  # whatever the news say, everybody looks himself after so long


class Source(Protocol):
    """What says what is new in a region."""

    async def refresh(self) -> None:
        """Raises ObjectError."""

    def heads(self) -> Mapping[str, int] | None:
        """Of writers that wrote lately, up to which number; None: list them."""

    def digest(self, folder: str) -> bytes | None:
        """Changes when what lies in a folder does; None: list it."""


class NewsReader:
    """Of one region. latest: None while there are none that can be believed. changed_s: when they changed last, as `passed_s`. term:
    the highest one that was seen. over: the highest one that was given back. mirror_s: when they were a mirror's last, or began to be
    readable."""

    def __init__(self, objects: Objects, problems: Problems, clock: StoreClock | None = None) -> None:
        """clock: learns from them."""
        self.latest: News | None = None
        self.changed_s = self.mirror_s = passed_s()
        self.term = self.over = 0
        self._is_read = False  # the last look had an answer
        self._objects = objects
        self._problems = problems
        self._e_tag = ""
        self._refused = 0  # times in a row
        self._clock = clock
        self._looked_s = float("-inf")  # as `passed_s`: then those with this ETag were the latest
        self.told: Callable[[], None] = lambda: None  # called when heads have changed

    @property
    def fresh(self) -> News | None:
        """Those of a keeper that is alive."""
        return self.latest if passed_s() - self.changed_s < LEASE_S else None

    @property
    def mirror_silent_s(self) -> float:
        """For how long no mirror was seen to keep the region, which it does as long as it lives; 0 while nobody can know."""
        return passed_s() - self.mirror_s if self._is_read else 0.0

    @property
    def _believed(self) -> News | None:
        return self.latest if passed_s() - self.changed_s < BELIEVED_S else None

    def heads(self) -> Mapping[str, int] | None:
        news = self._believed
        return None if news is None else news.heads

    def digest(self, folder: str) -> bytes | None:
        news = self._believed
        return None if news is None else news.folders.get(folder)

    async def refresh(self) -> None:
        """Raises ObjectUnavailable."""
        begun_s, looked_s, self._looked_s = passed_s(), self._looked_s, float("-inf")
        is_read = False
        try:
            found = await self._objects.get_if_changed(NEWS, self._e_tag, NEWS_FORMAT.size_bytes_max)
            if found is not None:
                content, info = found
                if self._clock is not None:
                    self._clock.learn(
                        info.modified_s, looked_s if info.e_tag != self._e_tag else float("-inf")
                    )
                self._e_tag = info.e_tag
                self.tell(NEWS_FORMAT.unseal(content, NEWS))
            self._looked_s = begun_s
            self._problems.over(NEWS)
            self._refused = 0
            self._are_known()
            is_read = True
        except ObjectMissing:
            self.latest, self._e_tag, self._looked_s = None, "", begun_s
        except ObjectRefused as error:
            self.latest, self._e_tag = None, ""
            self._refused += 1
            if self._refused > 1 and not (isinstance(self._objects, Watched) and self._objects.is_failing):
                self._problems.note(NEWS, str(error))  # this object only: else it is the place
        except (Damaged, ObjectDamaged) as error:
            self.latest, self._e_tag = None, ""
            self._problems.note(NEWS, str(error))
        finally:
            self._is_read = is_read

    def _are_known(self) -> None:
        """They were read, or written by this process, which then need not read them."""
        if not self._is_read:
            self._is_read, self.mirror_s = True, passed_s()

    def tell(self, news: News) -> None:
        """These are there now."""
        self._are_known()
        if news.term < self.term and passed_s() - self.changed_s < LEASE_S:
            return
        before = self.latest
        self.latest, self.changed_s, self.term = None if news.is_over else news, passed_s(), news.term
        if news.is_over:
            self.over = news.term
            return
        if news.holder.is_mirror:
            self.mirror_s = self.changed_s
        if before is None or before.heads != news.heads:
            self.told()


class Folders:
    """Some folders of a region, for somebody who has to know what is in them."""

    def __init__(self, news: Source | None, *names: str) -> None:
        self._news = news
        self._names = names
        self._digests: list[bytes | None] = []
        self._listed: list[bytes | None] = []
        self._listed_s = float("-inf")

    def are_due(self, apart_s: float = 0.0) -> bool:
        """Whether they have to be listed: they have changed, or may have. apart_s: where no news say so, listed so far apart."""
        self._digests = [None if self._news is None else self._news.digest(name) for name in self._names]
        age_s = passed_s() - self._listed_s
        if None in self._digests:
            return age_s >= apart_s
        return self._digests != self._listed or age_s >= SURE_S

    def listed(self) -> None:
        """All of them were read, since `are_due` was asked."""
        self._listed, self._listed_s = self._digests, passed_s()
