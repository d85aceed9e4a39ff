"""The news of a region, as one process reads them: with one small conditional request every few seconds.

    news ─▶ look ─▶ the same: it grows older │ another one: the keeper lives │ none, or damaged: nobody is known to keep

Ages are of our own clock and of what we have seen: nobody's clock is believed. What an earlier keeper writes when it wakes up is no
news, unless nothing else comes: then the region was put back to an earlier state.
"""

from __future__ import annotations

from typing import Final

from replication.errors import Damaged
from replication.formats.keeping import NEWS, NEWS_BYTES_MAX, News, decode_news
from replication.problems import Problems
from replication.waits import passed_s
from tiers.bucket.objects import Objects
from tiers.errors import ObjectDamaged, ObjectMissing, ObjectRefused

LEASE_S: Final = 45.0  # without a sign of life a keeper is taken for dead


class NewsReader:
    """Of one region. latest: None while there are none that can be believed. changed_s: when they changed last, as `passed_s`."""

    def __init__(self, objects: Objects, problems: Problems) -> None:
        self.latest: News | None = None
        self.changed_s = passed_s()
        self._objects = objects
        self._problems = problems
        self._e_tag = ""
        self._term = 0  # the highest one that was seen

    @property
    def is_fresh(self) -> bool:
        return self.latest is not None and passed_s() - self.changed_s < LEASE_S

    async def look(self) -> None:
        """Raises ObjectUnavailable."""
        try:
            found = await self._objects.get_if_changed(NEWS, self._e_tag, NEWS_BYTES_MAX)
            if found is None:
                return
            content, self._e_tag = found
            self.tell(decode_news(content))
        except ObjectMissing:
            self.latest, self._e_tag = None, ""
        except (Damaged, ObjectDamaged, ObjectRefused) as error:
            self.latest = None
            self._problems.note(NEWS, str(error))
        else:
            self._problems.over(NEWS)

    def tell(self, news: News) -> None:
        """These are there now."""
        if news.term < self._term and passed_s() - self.changed_s < LEASE_S:
            return
        self.latest, self.changed_s, self._term = news, passed_s(), news.term

    @property
    def term(self) -> int:
        """The highest one that was seen."""
        return self._term
