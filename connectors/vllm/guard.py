"""The one place where a failure of ours is turned into "nothing happened" for the engine.

vLLM calls hooks from its scheduler and from its workers; an exception there stops the engine, and in one worker of several
it hangs the others. So every hook is wrapped here: what goes wrong is counted, logged once per hook and kind, and answered
with a value that makes the engine go on as if it had no connector.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

from vllm.logger import init_logger

from kvstore.client import ClientError, Unavailable

logger = init_logger("vllm.kvstore")

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def guarded(otherwise: Callable[..., Any]) -> Callable[[_Hook], _Hook]:
    """Wrap a method of an object that has `guard: Guard`; on failure answer `otherwise(self, *args)`."""

    def wrap(hook: _Hook) -> _Hook:
        @functools.wraps(hook)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - this is the one place
                self.guard.note(hook.__name__, error)
                return otherwise(self, *args, **kwargs)

        return call  # type: ignore[return-value]  # same signature as the hook

    return wrap


def nothing(*_: Any, **__: Any) -> None:
    """The answer of hooks that answer nothing."""


class Guard:
    """Counts failures through `count`. Each kind is logged once; what is the daemon's, once until it answers again."""

    def __init__(self, count: Callable[[str], None]) -> None:
        self._count = count
        self._seen: set[tuple[str, type[BaseException]]] = set()
        self._away_s: float | None = None  # since when the daemon does not answer
        self._failed = 0  # calls since then

    def note(self, where: str, error: BaseException) -> None:
        """One failure, anywhere in the connector. A daemon that is away is no error of ours."""
        kind = (where, type(error))
        first = kind not in self._seen
        self._seen.add(kind)
        if isinstance(error, Unavailable):
            self._failed += 1
            if self._away_s is None:
                self._away_s = time.monotonic()
        if isinstance(error, ClientError):
            self._count("unavailable" if isinstance(error, Unavailable) else "refused")
            if first:
                logger.warning("kvstore: %s: %s", where, error)
            return
        self._count("hook_errors")
        if first:
            logger.error("kvstore: %s failed; the engine goes on without it", where, exc_info=error)

    def look(self, connected: bool) -> None:
        """Called in every step: a daemon that is back is said to be, and what it fails from now on is said again."""
        if self._away_s is None or not connected:
            return
        away_s = time.monotonic() - self._away_s
        logger.info(
            "kvstore: the daemon answers again, after %d failed calls in %.1f s", self._failed, away_s
        )
        self._away_s, self._failed = None, 0
        self._seen = {kind for kind in self._seen if not issubclass(kind[1], ClientError)}

    def say_once(self, text: str) -> None:
        """A warning that is worth one line in the log."""
        kind = (text, Warning)
        if kind not in self._seen:
            self._seen.add(kind)
            logger.warning("kvstore: %s", text)
