"""KV events as the settings of a daemon ask for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvstore.daemon.config.config import Config, binds
from kvstore.events.journal import Change, Journal

if TYPE_CHECKING:
    from kvstore.events.publisher import Publisher


def publisher_of(
    config: Config,
    journal: Journal | None,
    held: Callable[[], Iterator[list[Change]]],
    wall_clock: Callable[[], float],
) -> Publisher | None:
    """A publisher of this journal, not open yet; None where there is none."""
    if journal is None:
        return None
    from kvstore.events.publisher import Publisher, Settings

    e = config.events
    settings = Settings(e.endpoint, not binds(e.endpoint), e.replay_endpoint, e.topic, e.hash, e.replay_bytes)
    return Publisher(settings, journal, held, wall_clock)
