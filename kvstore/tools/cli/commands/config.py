"""The settings: those that a running daemon works with, and those that one would start with.

  kvstore config get [KEY]             in force in the daemon that runs, where each comes from, and which may change while it serves
  kvstore config set KEY VALUE         give one of these another value, until the daemon restarts
  kvstore config diff                  what the file says otherwise than the daemon does, and what it waits for
  kvstore config show                  what a daemon would start with, with where each value comes from
  kvstore config check                 whether that is valid
  kvstore config init                  write a sample, with every key, its default and what it does
  kvstore config unit                  print the systemd unit of a daemon

`kvstore config VERB --help` tells the options of each.
"""

from __future__ import annotations

import argparse
from typing import Any

from kvstore.tools.cli.verbs import Verbs

VERBS = Verbs(
    "config",
    {
        "get": "the settings that a running daemon works with, and where they come from",
        "set": "give a setting of a running daemon another value, until it restarts",
        "diff": "what the file says otherwise than the running daemon does",
        "show": "what a daemon would start with, with where each value comes from",
        "check": "whether that is valid",
        "init": "write a sample, with every key, its default and what it does",
        "unit": "print the systemd unit of a daemon",
    },
    together={"check": "show"},
    of_nodes={"get": (), "set": ()},
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    VERBS.add_to(parser)


def run(args: argparse.Namespace) -> int:
    return VERBS.run(args)


def as_written(key: str, value: Any) -> str:
    """A value as it would stand in the file."""
    from kvstore.daemon.config.config_sources import written
    from kvstore.units import exact_bytes

    is_size = type(value) is int and "bytes" in key.rpartition(".")[2].split("_")
    return written(exact_bytes(value) if is_size else value)
