"""Models: published into a region's bucket, preloaded on nodes, loaded by engines, verified on every hop.

files ─cut─▶ chunks + manifest in the bucket ─preload─▶ files on NVMe, slabs of the arena ─load─▶ tensors of an engine

For anyone's Python: `coldstart.open_model(name)` (coldstart/disk/reading.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coldstart.disk.reading import open_model

__all__ = ["open_model"]


def __getattr__(name: str) -> Any:
    """Imported when it is used: engines import what else is here, and have no need of it."""
    if name != "open_model":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from coldstart.disk.reading import open_model

    return open_model
