"""Print the systemd unit of a daemon.

  kvstore config unit | sudo tee /etc/systemd/system/kvstore.service
  sudo systemctl enable --now kvstore

It starts the kvstore that printed it, as the user kvstore; let User= be the one that the engine runs as (docs/install.md). The units of a
mirror and of several daemons are in deploy/.
"""

from __future__ import annotations

import argparse
import os
import re
import sys

from kvstore.tools.cli import OK, shared

DEFAULT = "/opt/kvstore/bin/kvstore"  # what the unit in deploy/ starts


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none of its own."""


def run_verb(_: argparse.Namespace) -> int:
    path = os.path.join(shared(), "deploy", "kvstore.service")
    with open(path, encoding="utf-8") as file:
        unit = file.read()
    print(
        re.sub(rf"^(Exec\w+=){re.escape(DEFAULT)}\b", rf"\g<1>{_program()}", unit, flags=re.MULTILINE), end=""
    )
    return OK


def _program() -> str:
    """The script of this environment, as systemd wants it: absolute, and with what it would take for something else doubled."""
    found = os.path.join(os.path.dirname(os.path.abspath(sys.executable)), "kvstore")
    return found.replace("%", "%%") if os.access(found, os.X_OK) else DEFAULT
