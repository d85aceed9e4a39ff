"""Write a sample configuration: every key, its default and what it does.

  kvstore config init                  to the file that daemon and commands read: --config, else $KVSTORE_CONFIG, else
                                       /etc/kvstore/kvstore.toml

Where this user's data directory and socket are other ones than root's, the sample leaves both keys commented out, so that a daemon of this
user finds its own. What is there already is never written over: exit code 1; 3 where the directory is missing.
"""

from __future__ import annotations

import argparse
import os
from importlib import resources

from kvstore.tools.cli import NOT_FOUND, CliError
from kvstore.tools.cli.options import add_config_argument, add_output_argument
from kvstore.tools.cli.output import present

PER_USER = ("data_dir", "socket_path")  # keys whose defaults follow from who asks


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_argument(parser)
    add_output_argument(parser, "text", "json")


def run_verb(args: argparse.Namespace) -> int:
    """Write the sample. Raises CliError."""
    from kvstore.daemon.config.config import DEFAULT_FILE
    from kvstore.daemon.config.config_sources import chosen_file

    path, is_named = chosen_file(args.config, os.environ)
    path = path.absolute()
    try:
        if path.parent == DEFAULT_FILE.parent:
            path.parent.mkdir(exist_ok=True)
        with open(path, "x", encoding="utf-8") as file:
            file.write(_sample())
    except FileExistsError as error:
        raise CliError(f"{args.called}: {path}: is there already, and is not written over") from error
    except FileNotFoundError as error:
        raise CliError(f"{args.called}: {path}: no directory {path.parent}", exit_code=NOT_FOUND) from error
    except OSError as error:
        hint = "" if is_named else ": name a file of your own with --config FILE, or $KVSTORE_CONFIG"
        raise CliError(f"{args.called}: {path}: {error.strerror}{hint}") from error
    return present(args, {"file": str(path)}, lambda _: print(f"wrote {path}"))


def _sample() -> str:
    from kvstore.daemon.config.config import Config

    text = resources.files("kvstore.daemon").joinpath("kvstore.toml").read_text(encoding="utf-8")
    default = Config()
    for name in PER_USER:
        line = next(line for line in text.splitlines() if line.startswith(f"{name} = "))
        own = f'{name} = "{getattr(default, name)}"'
        if own != line:
            text = text.replace(f"{line}\n", f"# {own}\n")
    return text
