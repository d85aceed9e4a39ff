"""How the connector reaches the daemon: one function, so that tests can put another store there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _open(socket_path: str, timeout_s: float, label: str) -> Any:
    from kvstore.client import Client

    return Client(socket_path, timeout_s=timeout_s, label=label)


open_client: Callable[[str, float, str], Any] = _open  # a kvstore.client.Client; connects at its first call
