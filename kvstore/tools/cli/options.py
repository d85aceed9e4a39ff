"""Options that several commands share: which configuration, which socket, which output."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.errors import StartError
from kvstore.tools.cli import FAILED, NOT_FOUND, USAGE, CliError
from kvstore.units import exact_bytes, exact_duration, parse_bytes, parse_duration

if TYPE_CHECKING:
    from kvstore.daemon.config.config_sources import Loaded
    from tiers.errors import OpenError

N = TypeVar("N", int, float)


def add_config_arguments(parser: argparse.ArgumentParser, *outputs: str) -> None:
    """--config, --data-dir, --socket and --set: everything that shapes the configuration. outputs: of -o, where there is one."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="configuration file (default: $KVSTORE_CONFIG, else /etc/kvstore/kvstore.toml if it is there)",
    )
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="same as --set data_dir=DIR")
    parser.add_argument("--socket", type=Path, metavar="PATH", help="same as --set socket_path=PATH")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set one key, e.g. dram.capacity_bytes=64GiB; may be given several times",
    )
    if outputs:
        add_output_argument(parser, *outputs)


# Of --node: the option, what kvstore.remote.Node calls it, and what it is.
NODE_FILES = {
    "node_ca": ("ca", "who signs its certificate, in PEM (default: the authorities of this system)"),
    "node_cert": ("certificate", "our certificate, in PEM"),
    "node_key": ("key", "the key of it"),
    "node_token_file": ("token_file", "a bearer token; read again when it changes"),
}


def add_node_arguments(parser: argparse.ArgumentParser, *here: str) -> None:
    """--node and what goes with it. here: what is about this machine besides the configuration, and does not go with it."""
    group = parser.add_argument_group("another node, over gRPC")
    group.add_argument("--node", metavar="HOST:PORT", help="of this node, in place of the daemon here")
    for name, (_, text) in NODE_FILES.items():
        option = "--" + name.replace("_", "-")
        group.add_argument(option, metavar="FILE", help=f"{text} (also $KVSTORE_{name.upper()})")
    here = (*here, "config", "data_dir", "socket", "set", "regions")
    parser.set_defaults(not_of_a_node=[action for action in parser._actions if action.dest in here])


def is_of_node(args: argparse.Namespace) -> bool:
    """Whether --node is given. Raises CliError where something goes with it that does not, or without it."""
    given = [name for name in ("node", *NODE_FILES) if getattr(args, name, None)]
    if given and given[0] != "node":
        raise CliError(
            f"{args.called}: --{given[0].replace('_', '-')} needs --node HOST:PORT", exit_code=USAGE
        )
    for action in args.not_of_a_node if given else ():
        if getattr(args, action.dest) != action.default:
            what = action.option_strings[0] if action.option_strings else action.metavar
            raise CliError(f"{args.called}: {what} does not go with --node", exit_code=USAGE)
    return bool(given)


def node_files(args: argparse.Namespace) -> dict[str, Any]:
    """Certificates and token, by what kvstore.remote.Node calls them."""
    return {
        word: getattr(args, name) or os.environ.get(f"KVSTORE_{name.upper()}")
        for name, (word, _) in NODE_FILES.items()
    }


def add_output_argument(parser: argparse.ArgumentParser, *choices: str) -> None:
    """-o: the first choice is the default."""
    parser.add_argument(
        "-o",
        "--output",
        choices=choices,
        default=choices[0],
        help=f"form of the output (default {choices[0]})",
    )


def names(option: str, given: Iterable[str], known: Collection[str]) -> list[str]:
    """The words of an option that takes names, with commas or several times. option: "report: --by".

    Raises CliError for the first that is not known.
    """
    words = [word.strip() for text in given for word in text.split(",")]
    for word in words:
        if word not in known:
            raise CliError(f"{option} {word or '(nothing)'}: known are {', '.join(known)}", exit_code=USAGE)
    return words


def duration(option: str, text: str, least_s: float, most_s: float, also: str = "") -> float:
    """The seconds of an option that takes a time. option: "top: --interval". also: words that it takes. Raises CliError."""
    return _within(option, text, (parse_duration, exact_duration), least_s, most_s, also)


def size(option: str, text: str, least: int, most: int, also: str = "") -> int:
    """The bytes of an option that takes a size. option: "warm: --budget". Raises CliError."""
    return _within(option, text, (parse_bytes, exact_bytes), least, most, also)


def _within(
    option: str, text: str, form: tuple[Callable[[str], N], Callable[[N], str]], least: N, most: N, also: str
) -> N:
    parse, written = form
    try:
        given = parse(text)
    except ValueError as error:
        raise CliError(f"{option} {text}: {error}{also}", exit_code=USAGE) from error
    if not least <= given <= most:
        raise CliError(f"{option} {text}: allowed are {written(least)} to {written(most)}", exit_code=USAGE)
    return given


def load_config(args: argparse.Namespace, **more: str | None) -> Loaded:
    """The configuration these arguments ask for. more: of flags of a command, by their keys with __ for the point. Raises CliError
    with every problem in it."""
    from kvstore.daemon.config.config_sources import ConfigError, load

    absolute = {"data_dir": ("--data-dir", args.data_dir), "socket_path": ("--socket", args.socket)}
    flags = {key: (flag, str(path.absolute())) for key, (flag, path) in absolute.items() if path is not None}
    for name, text in more.items():
        if text is not None:
            key = name.replace("__", ".")
            flags[key] = (f"--{key.rpartition('.')[2]}", text)
    try:
        return load(args.config, args.set, flags)
    except ConfigError as error:
        raise CliError(*error.problems, exit_code=NOT_FOUND if error.missing_file else USAGE) from error


def start_failure(error: StartError | OpenError) -> CliError:
    """What could not be opened, with the exit code that tells a supervisor whether to try again."""
    if isinstance(error, StartError) and error.is_missing:
        return CliError(str(error), exit_code=NOT_FOUND)
    return CliError(str(error), exit_code=FAILED if error.heals else USAGE)


def socket_path(args: argparse.Namespace) -> Path:
    """Where the daemon listens. With --socket no configuration is read at all."""
    if args.socket is not None:
        path: Path = args.socket
        return path.absolute()
    return load_config(args).config.socket_path
