"""What a daemon would start with, and whether that is valid.

  kvstore config show                  TOML, each line with a comment saying where it comes from
  kvstore config show -o json          the same for programs
  kvstore config check                 silent and 0 when valid; one line per problem otherwise, of the file of regions, too

Exit code 0, 2 for what is not valid, 3 where a file that is named is missing.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kvstore.tools.cli import OK
from kvstore.tools.cli.commands.config import as_written
from kvstore.tools.cli.options import add_config_arguments, load_config
from kvstore.tools.cli.output import present

if TYPE_CHECKING:
    from kvstore.daemon.config.config import Config


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, "toml", "json")


def run_verb(args: argparse.Namespace) -> int:
    from kvstore.daemon.config.config import keys, plain, value_of
    from kvstore.daemon.config.config_sources import Given

    loaded = load_config(args)
    if args.verb == "check":
        return _check(loaded.config)
    default = Given(None, "default", "default")
    given = {key: loaded.given.get(key, default) for key in keys()}
    values = {key: plain(value_of(loaded.config, key)) for key in given}
    rows = {
        key: {"value": value, "source": given[key].source, "where": given[key].where}
        for key, value in values.items()
    }
    document = {"file": str(loaded.file) if loaded.file else None, "values": rows}
    return present(args, document, lambda _: _print_toml(rows))


def _check(config: Config) -> int:
    """What other files the settings name. Raises RegionsFileError."""
    if config.regions_file:
        from kvstore.daemon.regional import require_regions

        require_regions(config)
    return OK


def _print_toml(rows: dict[str, dict[str, Any]]) -> None:
    """A file that `--config` takes back, giving exactly this configuration."""
    section = ""
    for key, row in rows.items():
        table, _, name = key.rpartition(".")
        if table != section:
            section = table
            print(f"\n[{table}]")
        print(f"{name} = {as_written(key, row['value'])}  # {row['where']}")
