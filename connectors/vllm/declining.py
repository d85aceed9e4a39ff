"""A vLLM that the connector is not made for: why it is none of ours, and the connector that it gets, which does nothing.

The connector uses nothing but what vLLM's base class has had for long. Hooks that are not here, also those that a release
adds, do what the base class says, or nothing.
"""

from __future__ import annotations

import re
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

VLLM_FIRST, VLLM_LAST = (0, 32), (0, 33)  # releases of vLLM that the connector is made for, and tested with

_RELEASE = re.compile(r"v?(\d+)\.(\d+)(?!\d)")


def unsupported(version: object) -> str:
    """Why this version of vLLM is none of ours; empty where it is one. Builds of a release are that release: 0.33.0+cpu,
    0.33.1.dev7+g1a2b3c."""
    found = _RELEASE.match(version) if isinstance(version, str) else None
    if found is not None and VLLM_FIRST <= (int(found[1]), int(found[2])) <= VLLM_LAST:
        return ""
    first, last = (".".join(map(str, release)) for release in (VLLM_FIRST, VLLM_LAST))
    return f"vLLM {version or '(without a version)'} is outside of what this connector is made for ({first} to {last})"


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """No hit, nothing saved."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None


KVStoreConnector.__abstractmethods__ = frozenset()  # what a release asks for besides does nothing
