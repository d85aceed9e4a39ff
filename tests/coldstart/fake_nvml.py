"""A double of nvidia-ml-py: a directory for PYTHONPATH whose `pynvml` has two devices, one of which says little."""

from __future__ import annotations

from pathlib import Path

GIB = 1 << 30
SOURCE = """
class NVMLError(Exception): pass
class _Some:
    def __init__(self, **said): self.__dict__.update(said)
def nvmlInit():
    if not {driver}: raise NVMLError("no driver")
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetName(handle): return ("NVIDIA H100", b"NVIDIA GRID")[handle]
def nvmlDeviceGetUUID(handle): return ("GPU-aaaa-1", "GPU-bbbb-2")[handle]
def nvmlDeviceGetMemoryInfo(handle): return _Some(total=80 << 30, free={free_bytes})
def _only_the_first(handle, said):
    if handle: raise NVMLError("not supported")
    return said
def nvmlDeviceGetMaxPcieLinkGeneration(handle): return _only_the_first(handle, 5)
def nvmlDeviceGetCurrPcieLinkWidth(handle): return _only_the_first(handle, 16)
def nvmlDeviceGetPciInfo(handle): return _only_the_first(handle, _Some(busId="00000000:17:00.0"))
"""


def fake_nvml(directory: Path, free_bytes: int = 64 * GIB, driver: bool = True) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "pynvml.py").write_text(SOURCE.format(free_bytes=free_bytes, driver=driver))
    return directory
