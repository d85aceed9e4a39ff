"""What the door needs of the daemon around the engine, which stands above it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kvstore.errors import RequestError
from kvstore.protocol import answers
from kvstore.steps import Steps


class Settings(Protocol):
    """The daemon's settings."""

    def shown(self, name: str) -> list[dict[str, Any]]:
        """Of one key, of a section, or ("") of all. Raises BadRequest."""

    def change(self, key: str, text: str) -> dict[str, Any]:
        """Another value from now on. Raises BadRequest, with nothing changed."""


class Disks(Protocol):
    """The NVMe directories of the daemon."""

    def change(
        self, directory: str, accept: bool, done: Callable[[RequestError | None, dict[str, Any]], None]
    ) -> None:
        """Take what is there now (accept), or remember nothing of it. `done` is called with what became of it."""


class Node(Protocol):
    """The daemon around the engine, as far as it is asked about itself. docs/cli.md names the fields."""

    @property
    def settings(self) -> Settings:
        """Those in force."""

    @property
    def disks(self) -> Disks:
        """Those of the level of NVMe."""

    def report(self) -> answers.Status:
        """The answer to Status."""

    def totals_steps(self, since_s: float, skip: int, until_s: float) -> Steps[answers.Report]:
        """The answer to Report."""

    def live_steps(self, minutes_since_s: float) -> Steps[answers.Live]:
        """The answer to Live."""
