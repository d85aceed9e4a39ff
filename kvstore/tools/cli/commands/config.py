"""Show the effective configuration with the source of each value, check it, or write a sample of it.

kvstore config show                  TOML, each line with a comment saying where it comes from
kvstore config show -o json          the same for programs
kvstore config check                 silent and 0 when valid; one line per problem otherwise, of the file of regions, too
kvstore config init                  write the sample, with every key, its default and what it does, to the file that
                                     the others read: --config, else $KVSTORE_CONFIG, else /etc/kvstore/kvstore.toml

What is there already is never written over.
"""

from __future__ import annotations

import argparse
import os
from importlib import resources
from typing import TYPE_CHECKING, Any

from kvstore.tools.cli import FAILED, NOT_FOUND, OK, USAGE, CliError
from kvstore.tools.cli.commands.get import as_written
from kvstore.tools.cli.options import add_config_arguments, load_config
from kvstore.tools.cli.output import present

if TYPE_CHECKING:
    from kvstore.daemon.config.config import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("show", "check", "init"))
    add_config_arguments(parser, "toml", "json")


def run(args: argparse.Namespace) -> int:
    if args.action == "init":
        return _init(args)

    from kvstore.daemon.config.config import keys, plain, value_of
    from kvstore.daemon.config.config_sources import Given

    loaded = load_config(args)
    if args.action == "check":
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
    """What other files the settings name. Raises CliError."""
    if config.regions_file:
        from kvstore.daemon.config.regions_file import RegionsFileError
        from kvstore.daemon.regional import require_regions

        try:
            require_regions(config)
        except RegionsFileError as error:
            raise CliError(*error.problems, exit_code=USAGE) from error
    return OK


def _init(args: argparse.Namespace) -> int:
    """Write the sample. Raises CliError."""
    from kvstore.daemon.config.config import DEFAULT_FILE
    from kvstore.daemon.config.config_sources import chosen_file

    path, _ = chosen_file(args.config, os.environ)
    path = path.absolute()
    sample = resources.files("kvstore.daemon").joinpath("kvstore.toml").read_bytes()
    try:
        if path.parent == DEFAULT_FILE.parent:
            path.parent.mkdir(exist_ok=True)
        with open(path, "xb") as file:
            file.write(sample)
    except FileExistsError as error:
        raise CliError(f"config: {path}: is there already, and is not written over") from error
    except FileNotFoundError as error:
        raise CliError(f"config: {path}: no directory {path.parent}", exit_code=NOT_FOUND) from error
    except OSError as error:
        raise CliError(f"config: {path}: {error.strerror}", exit_code=FAILED) from error
    return present(args, {"file": str(path)}, lambda _: print(f"wrote {path}"))


def _print_toml(rows: dict[str, dict[str, Any]]) -> None:
    """A file that `--config` takes back, giving exactly this configuration."""
    section = ""
    for key, row in rows.items():
        table, _, name = key.rpartition(".")
        if table != section:
            section = table
            print(f"\n[{table}]")
        print(f"{name} = {as_written(key, row['value'])}  # {row['where']}")
