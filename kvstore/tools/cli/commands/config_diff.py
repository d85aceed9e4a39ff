"""What the configuration file says otherwise than the running daemon does, and what each difference waits for.

  kvstore config diff                  the file is --config, else the one that the daemon has read
  kvstore config diff -o json          for programs

  waits for   reload     SIGHUP, or systemctl reload kvstore
              restart    it cannot change while the daemon serves
              nothing    the daemon's environment or command line, named under "from", wins over the file

Exit code 0 whether there are differences or not, 2 for a file that is not valid, 3 where it is missing, 4 when no daemon answers.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.tools.cli.commands.config import as_written
from kvstore.tools.cli.options import add_config_arguments
from kvstore.tools.cli.output import present, print_table
from kvstore.tools.cli.prefixes import ask

if TYPE_CHECKING:
    from kvstore.daemon.config.config_sources import Loaded

_WINS = ("env", "flag")  # over the file


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, "table", "json")


def run_verb(args: argparse.Namespace) -> int:
    from kvstore.daemon.config.config import plain, value_of

    in_force: list[dict[str, Any]] = ask(args, args.called, lambda client: client.settings(""))
    read = (one["where"].rpartition(":")[0] for one in in_force if one["source"] == "file")
    loaded = _of_file(args.config or next(map(Path, read), None))
    rows = []
    for one in in_force:
        key, wins = one["key"], one["source"] in _WINS
        said = plain(value_of(loaded.config, key))
        if said != one["value"] and (key in loaded.given or not wins):
            waits_for = "nothing" if wins else "reload" if one["changeable"] else "restart"
            row = {"key": key, "file": said, "in_force": one["value"], "where": one["where"]}
            rows.append({**row, "waits_for": waits_for})
    file = str(loaded.file) if loaded.file else None
    return present(args, {"file": file, "differences": rows}, _print)


def _of_file(named: Path | None) -> Loaded:
    """What a daemon would take from the file and from nowhere else. Raises ConfigError."""
    from kvstore.daemon.config.config_sources import ENV_FILE, load

    return load(named, environment={ENV_FILE: os.environ.get(ENV_FILE, "")})


def _print(document: dict[str, Any]) -> None:
    file = document["file"] or "the defaults (there is no file)"
    if not document["differences"]:
        print(f"{file}: as in force")
        return
    rows = [
        (
            one["key"],
            as_written(one["key"], one["file"]),
            as_written(one["key"], one["in_force"]),
            one["waits_for"],
            one["where"],
        )
        for one in document["differences"]
    ]
    print_table(file, ["key", "file", "in force", "waits for", "from"], rows, ("from",))
