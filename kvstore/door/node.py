"""What the door needs of the daemon around the engine, which stands above it."""

from __future__ import annotations

from typing import Any, Protocol

from kvstore.protocol import answers
from kvstore.steps import Steps


class Settings(Protocol):
    """The daemon's settings."""

    def told(self, name: str) -> list[dict[str, Any]]:
        """Of one key, of a section, or ("") of all. Raises BadRequest."""

    def change(self, key: str, text: str) -> dict[str, Any]:
        """Another value from now on. Raises BadRequest, with nothing changed."""


class Node(Protocol):
    """The daemon around the engine, as far as it is asked about itself. docs/cli.md names the fields."""

    @property
    def settings(self) -> Settings:
        """Those in force."""

    def report(self) -> answers.Status:
        """The answer to Status."""

    def totals(self, since_s: float, skip: int, until_s: float) -> answers.Report:
        """The answer to Report."""

    def live_steps(self, minutes_since_s: float) -> Steps[answers.Live]:
        """The answer to Live."""
