"""Which releases of vLLM the connector is made for."""

from __future__ import annotations

import re

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
