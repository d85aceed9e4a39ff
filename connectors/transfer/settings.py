"""What an operator may set: the keys of `kv_connector_extra_config`.

    {"kv_connector": "KVStoreConnector", "kv_connector_module_path": "connectors.vllm",
     "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
     "kv_connector_extra_config": {"kvstore_socket": "/run/kvstore/kvstore.sock", "load": "async"}}

A wrong setting stops the engine at its start and says which key, which value and what is
allowed; `docs/vllm.md` has the table for people.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from connectors import constants as limits
from connectors.constants import GIB, MIB, SYNC_WAIT_S_MAX
from kvstore.client import default_socket

LOOKUP_TIMEOUT_S = 0.1  # the scheduler waits inside a step: what a missing daemon may cost, once
LOAD_TIMEOUT_S = 3.0  # from the step that asks for a load to its last byte, slower tiers included
SAVE_TIMEOUT_S = 1.0  # one call of the save thread: what a hanging daemon keeps finished blocks occupied
TIMEOUT_S_MIN, TIMEOUT_S_MAX = 0.001, 60.0
LOAD_THREADS = 2
LOAD_THREADS_MAX = 16
SAVE_QUEUE_BYTES = 1 * GIB  # saves waiting for their copy; beyond it blocks are skipped and counted
SAVE_QUEUE_BYTES_MIN = 1 * MIB
NEAREST_NAME_CUTOFF = 0.6
if not LOOKUP_TIMEOUT_S < SYNC_WAIT_S_MAX <= LOAD_TIMEOUT_S <= TIMEOUT_S_MAX:
    raise AssertionError("a lookup is shorter than a synchronous load, and that shorter than any load")
if not TIMEOUT_S_MIN < LOOKUP_TIMEOUT_S:
    raise AssertionError("the default timeouts are allowed")
if SAVE_QUEUE_BYTES_MIN > SAVE_QUEUE_BYTES:
    raise AssertionError("the default save queue is allowed")


class SettingError(ValueError):
    """A key of kv_connector_extra_config is unknown, or its value is not allowed."""

    def __init__(self, key: str, value: object, allowed: str) -> None:
        super().__init__(f"kv_connector_extra_config: {key} = {value!r}: allowed is {allowed}")


@dataclass(slots=True, frozen=True)
class Settings:
    """Every key with its default.

    kvstore_socket: the daemon's socket; by default where the daemon of this user listens. load: "async" (between
    the steps of the engine) or "sync" (inside a step). lookup_timeout_s: what a lookup may cost inside a step.
    load_timeout_s: from asking to the last byte; what is missing then is computed. save_timeout_s: one call of a background
    save. still_writing_wait_s: how long a request waits for the next blocks that another engine is storing; 0: not at all.
    save_queue_bytes: saves waiting for their copy; beyond it blocks are skipped. load_threads: loads at the same time.
    tenant: other tenants never see these blocks. model_digest: names the weights, instead of hashing their files.
    cache_dir: where digests of weight files are remembered.
    """

    kvstore_socket: str = field(default_factory=default_socket)
    load: str = "async"
    lookup_timeout_s: float = LOOKUP_TIMEOUT_S
    load_timeout_s: float = LOAD_TIMEOUT_S
    save_timeout_s: float = SAVE_TIMEOUT_S
    still_writing_wait_s: float = limits.STILL_WRITING_WAIT_S
    save_queue_bytes: int = SAVE_QUEUE_BYTES
    load_threads: int = LOAD_THREADS
    tenant: str = ""
    model_digest: str = ""
    cache_dir: str = ""


def read_settings(extra: Mapping[str, Any]) -> Settings:
    """Check and complete the keys. Raises SettingError."""
    known = [setting.name for setting in fields(Settings)]
    for key, value in extra.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=NEAREST_NAME_CUTOFF)
            hint = f"did you mean {near[0]}? " if near else ""
            raise SettingError(key, value, f"not a key; {hint}the keys are {', '.join(known)}")
    settings = Settings(**{key: _checked(key, value) for key, value in extra.items()})
    if settings.lookup_timeout_s > settings.load_timeout_s:
        raise SettingError("lookup_timeout_s", settings.lookup_timeout_s, "at most load_timeout_s")
    return settings


_NUMBERS: dict[str, tuple[type, float, float]] = {
    **dict.fromkeys(
        ("lookup_timeout_s", "load_timeout_s", "save_timeout_s"), (float, TIMEOUT_S_MIN, TIMEOUT_S_MAX)
    ),
    "still_writing_wait_s": (float, 0, TIMEOUT_S_MAX),
    "save_queue_bytes": (int, SAVE_QUEUE_BYTES_MIN, 1 << 50),
    "load_threads": (int, 1, LOAD_THREADS_MAX),
}


def _checked(key: str, value: Any) -> Any:
    if key in _NUMBERS:
        kind, least, most = _NUMBERS[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise SettingError(key, value, f"a number from {least:g} to {most:g}")
        return kind(value)
    if key == "load" and value not in ("async", "sync"):
        raise SettingError(key, value, "'async' or 'sync'")
    if not isinstance(value, str):
        raise SettingError(key, value, "a string")
    if key == "kvstore_socket" and not Path(value).is_absolute():
        raise SettingError(key, value, "an absolute path")
    if key == "cache_dir" and value and not Path(value).is_absolute():
        raise SettingError(key, value, "an absolute path, or empty for the user's cache directory")
    return value
