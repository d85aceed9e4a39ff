"""The settings in force, where each comes from, and changing one while serving.

    default ◀ file ◀ environment ◀ flags ─▶ in force ◀─ kvstore config set: until a restart, or SIGHUP
                                              │
                    what `kvstore config get` tells ◀╯

What is set by hand is written nowhere: the layers say what a daemon starts with, and reading them again (SIGHUP) puts back
what they say. So a setting that is tried out is gone after the next deployment, and never a surprise a year later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from kvstore.daemon.config.config import DEFAULT_FILE, Config, keys, plain, value_of
from kvstore.daemon.config.config_sources import Given, Loaded, nearest, parse_one, variable
from kvstore.daemon.config.reloading import CHANGEABLE, InForce, apply, carry_out, said
from kvstore.errors import BadRequest, ConfigError

log = logging.getLogger("kvstore.daemon.settings")

DEFAULT: Final = Given(None, "default", "default")
BY_HAND: Final = "kvstore config set"


class Settings:
    """Of one daemon. `parts` is there once it serves."""

    def __init__(self, loaded: Loaded) -> None:
        self.config = loaded.config
        self.parts: InForce | None = None
        self._given: Mapping[str, Given] = loaded.given
        self._file: Path | None = loaded.file
        self._wanted = loaded.config  # as the layers said when they were read last
        self.refusal = ""  # why they changed nothing then
        self.is_asked_again = False  # while layers are read: what is read may be older than a file is by now

    def shown(self, name: str) -> list[dict[str, Any]]:
        """What `kvstore config get` tells of one key, of a section, or ("") of all. Raises BadRequest."""
        known = list(keys())
        chosen = [key for key in known if not name or key == name or key.startswith(f"{name}.")]
        if not chosen:
            raise BadRequest(f"unknown key {name}: {nearest(name, known)}")
        return [
            {
                "key": key,
                "value": plain(value_of(self.config, key)),
                "source": self._of(key).source,
                "where": self._of(key).where,
                "changeable": key in CHANGEABLE,
            }
            for key in chosen
        ]

    def change(self, key: str, text: str) -> dict[str, Any]:
        """Another value from now on; what `kvstore config set` tells of it. Raises BadRequest, with nothing changed."""
        if key not in keys():
            raise BadRequest(f"unknown key {key}: {nearest(key, list(keys()))}")
        (before,) = self.shown(key)
        if key not in CHANGEABLE:
            raise BadRequest(
                f"{key}: another value needs a restart: write it to {self._place()} "
                "(kvstore config get lists what may change while serving)"
            )
        if self.parts is None:
            raise BadRequest("the daemon is starting")

        def say(new: Config) -> None:
            log.info("%s is %s now: %s", key, value_of(new, key), BY_HAND)

        try:
            self.config = carry_out(self.config, {key: parse_one(key, text)}, self.parts, say)
        except (ValueError, ConfigError) as error:
            raise BadRequest(str(error).removeprefix(f"{BY_HAND}: ")) from error
        given = Given(text, "set", BY_HAND)
        self._given = {**self._given, key: given}
        return {
            "key": key,
            "before": before["value"],
            "value": plain(value_of(self.config, key)),
            "source": given.source,
            "where": given.where,
            "file": self._place(),
            "variable": variable(key),
            "source_before": before["source"],
            "where_before": before["where"],
        }

    async def reload(self, load: Callable[[], Loaded]) -> None:
        """Read all layers again, and change what can be changed; once more where `is_asked_again`. One at a time. Never raises.

        load: blocks on the file; raises an Exception whose text says what is wrong.
        """
        self.is_asked_again = True
        while self.is_asked_again:
            self.is_asked_again = False
            await self._read(load)

    async def _read(self, load: Callable[[], Loaded]) -> None:
        try:
            wanted = await asyncio.to_thread(load)
        except Exception as error:  # noqa: BLE001 a daemon that serves goes on with what it has
            log.error("nothing was changed: %s", error)
            self.refusal = str(error)
            return
        if self.parts is None:
            return
        self._wanted, self.refusal = wanted.config, ""
        self.config = apply(self.config, wanted.config, self.parts)
        in_force = {key for key in keys() if value_of(self.config, key) == value_of(wanted.config, key)}
        self._given = {
            key: wanted.given.get(key, DEFAULT) if key in in_force else self._of(key) for key in keys()
        }
        self._file = wanted.file

    def waiting(self) -> Iterator[tuple[str, str, str]]:
        """Keys whose value waits for a restart: as the layers say it, and as it is in force. What was set by hand waits for nothing."""
        if self._wanted is self.config:
            return
        for key in keys():
            wanted, now = value_of(self._wanted, key), value_of(self.config, key)
            if wanted != now and self._of(key).source != "set":
                yield key, said(key, wanted), said(key, now)

    def _of(self, key: str) -> Given:
        return self._given.get(key, DEFAULT)

    def _place(self) -> str:
        return str(self._file or DEFAULT_FILE)
