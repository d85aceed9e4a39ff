"""A daemon that `kvstore top` looks at, alone or beside others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.constants import STATUS_TIMEOUT_S

if TYPE_CHECKING:
    from kvstore.errors import ClientError
    from kvstore.protocol import answers


class Watched:
    """A daemon that is looked at. document: that of `-o json`, {} before there are two answers of one life of it. error: why it does
    not answer, None where it does."""

    def __init__(self, path: str) -> None:
        from kvstore.client import Client

        self.path, self.document = path, dict[str, Any]()
        self.error: ClientError | None = None
        self._client = Client(path, STATUS_TIMEOUT_S, label="kvstore top", attach=False)
        self._old: answers.Live | None = None

    @property
    def away(self) -> str:
        return str(self.error) if self.error is not None else ""

    def look(self) -> None:
        """Ask once more; with its minutes where there was an answer before: their clock is the daemon's. Raises nothing."""
        from kvstore.client import ClientError
        from kvstore.protocol.frames import NO_MINUTES
        from kvstore.tools.web.figures import MINUTES_BACK_S, figures, is_same_life

        old = self._old
        try:
            new = self._client.live(NO_MINUTES if old is None else max(0.0, old["now_s"] - MINUTES_BACK_S))
        except ClientError as error:
            self.error = error
            return
        self.error, self._old = None, new
        if old is not None and is_same_life(old, new):
            self.document = figures(old, new)

    def close(self) -> None:
        self._client.close()
