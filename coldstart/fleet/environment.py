"""What an engine's compile caches depend on: the facts of this environment, by which caches are chosen.

It is looked at without importing the engine, which takes seconds of the minute. It is a guess on the safe side: the engine has
a key of its own, which nobody can know before it has started. What is equal here and is not for the engine costs a compilation,
never a wrong result; `kvstore model env --check` says so afterwards.
"""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from coldstart.errors import ModelError
from tiers.reading import Unreadable, read_text

_FILE_BYTES_MAX: Final = 1 << 20
_SAID: Final = r"^(?:__version__ = )?{word}\b[^=\n]*= *['\"]([^'\"\n]{{1,200}})['\"]"
# What decides what is compiled. Of VLLM_* all but places, doors, logs and secrets, of which no digest leaves this machine either.
_DECIDES: Final = re.compile(r"(VLLM|TORCH|TORCHINDUCTOR|TRITON|NCCL|CUDA)_[A-Z0-9_]+")
_DECIDES_NOT: Final = re.compile(
    r"(CUDA_VISIBLE_DEVICES|CUDA_HOME|VLLM_ENABLE_STARTUP_PLAN|VLLM_PLUGINS|VLLM_DO_NOT_TRACK)"
    r"|VLLM_(LOG|MEDIA|IMAGE|AUDIO|VIDEO|HTTP|RPC|DP|USAGE|NO_USAGE|NIXL)_?.*|NCCL_(DEBUG|SOCKET|IB).*"
    r"|.*_(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?|PORT|HOST|IP|ADDR|ROOT|DIR|PATH|URL|LEVEL|TIMEOUT\w*)"
)


def facts(
    directory: str, tensor: int, pipeline: int, device: str, environ: Mapping[str, str]
) -> dict[str, str]:
    """For `Manifest.about`. directory: from which the engine loads the model: it is in the engine's own key. tensor, pipeline:
    parallel sizes. device: the name of the accelerators, "" without. Raises ModelError where there is no engine."""
    return {
        "engine": "vllm",
        "engine version": _said("vllm", "_version.py", "version"),
        "torch": _said("torch", "version.py", "__version__"),
        "cuda": _said("torch", "version.py", "cuda", or_else="none"),
        "device": device or _processor(),
        "python": platform.python_version(),
        "tensor parallel": str(tensor),
        "pipeline parallel": str(pipeline),
        "directory": directory,
        "environment": environment_digest(environ),
    }


def environment_digest(environ: Mapping[str, str]) -> str:
    """Of the variables that decide what is compiled."""
    kept = sorted(
        f"{name}={value}"
        for name, value in environ.items()
        if _DECIDES.fullmatch(name) and not _DECIDES_NOT.fullmatch(name)
    )
    return hashlib.sha256("\0".join(kept).encode(errors="surrogateescape")).hexdigest()[:32]


def _said(package: str, file: str, word: str, or_else: str = "") -> str:
    """What a package says in a small file of its own, without being imported. Raises ModelError."""
    spec = find_spec(package)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        try:
            text = read_text(Path(place, file), _FILE_BYTES_MAX)
        except Unreadable:
            continue
        if found := re.search(_SAID.format(word=word), text, re.MULTILINE):
            return found[1]
    if or_else and spec is not None:
        return or_else
    raise ModelError(
        f"{package} is not installed in this Python, or does not say its version: run it where the engine runs"
    )


def _processor() -> str:
    """Compiled code is of its instructions."""
    try:
        lines = dict(
            line.split("\t", 1)
            for line in read_text(Path("/proc/cpuinfo"), 16 << 20).splitlines()
            if "\t" in line
        )
    except Unreadable:
        return platform.machine()
    flags = " ".join(sorted(lines.get("flags", lines.get("Features", "")).split()))
    return f"{platform.machine()} {hashlib.sha256(flags.encode()).hexdigest()[:16]}"
