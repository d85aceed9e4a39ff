"""Options that several commands share: which configuration, which socket, which output."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.constants import SOCKET_PATH_BYTES_MAX
from kvstore.tools.cli import NOT_FOUND, USAGE, CliError
from kvstore.units import exact_bytes, exact_duration, parse_bytes, parse_duration

if TYPE_CHECKING:
    from kvstore.daemon.config.config_sources import Loaded

N = TypeVar("N", int, float)
DAYS_MAX = 3650


def add_config_argument(parser: argparse.ArgumentParser) -> None:
    """--config alone."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="configuration file (default: $KVSTORE_CONFIG, else /etc/kvstore/kvstore.toml if it is there)",
    )


def add_config_arguments(parser: argparse.ArgumentParser, *outputs: str) -> None:
    """--config, --data-dir, --socket and --set: everything that shapes the configuration. outputs: of -o, where there is one."""
    add_config_argument(parser)
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
    """Certificates and token, by what kvstore.remote.Node calls them. Raises CliError."""
    files = {name: getattr(args, name) or os.environ.get(f"KVSTORE_{name.upper()}") for name in NODE_FILES}
    for path in filter(None, files.values()):
        if not os.path.lexists(path):
            raise CliError(f"{args.called}: {path}: no such file", exit_code=NOT_FOUND)
    return {NODE_FILES[name][0]: path for name, path in files.items()}


def add_output_argument(parser: argparse.ArgumentParser, *choices: str) -> None:
    """-o: the first choice is the default."""
    parser.add_argument(
        "-o",
        "--output",
        choices=choices,
        default=choices[0],
        help=f"form of the output (default {choices[0]})",
    )


def whole(least: int, most: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number."""

    def parse(text: str) -> int:
        if not re.fullmatch("[0-9]{1,18}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text}: allowed are whole numbers from {least} to {most}")
        return int(text)

    return parse


def days(text: str) -> float:
    """The type of an argument that is a number of days."""
    number = float(text) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text) else 0.0
    if not 0 < number <= DAYS_MAX:
        raise argparse.ArgumentTypeError(f"{text}: allowed are more than 0, up to {DAYS_MAX}")
    return number


def model_name(text: str) -> str:
    """The type of an argument that names a model, NAME or NAME@REVISION."""
    from replication.formats.manifests import is_model_name

    if text and not all(map(is_model_name, text.split("@", 1))):
        each = "each of up to 96 of a-z 0-9 . _ -, the first one a letter or a digit"
        raise argparse.ArgumentTypeError(f"{text}: allowed are NAME and NAME@REVISION, {each}")
    return text


def add_model_name(parser: argparse.ArgumentParser, **about: Any) -> None:
    """The positional argument of a command that is about one model."""
    parser.add_argument("name", type=model_name, **about)


def plain_name(text: str) -> str:
    """The type of an argument that names a model, or a revision, alone."""
    if "@" in text:
        raise argparse.ArgumentTypeError(f"{text}: allowed is a name without @")
    return model_name(text)


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
    """The configuration these arguments ask for. more: of flags of a command, by their keys with __ for the point. Raises ConfigError
    with every problem in it."""
    from kvstore.daemon.config.config_sources import load

    absolute = {"data_dir": ("--data-dir", args.data_dir), "socket_path": ("--socket", args.socket)}
    flags = {key: (flag, str(path.absolute())) for key, (flag, path) in absolute.items() if path is not None}
    for name, text in more.items():
        if text is not None:
            key = name.replace("__", ".")
            flags[key] = (f"--{key.rpartition('.')[2]}", text)
    return load(args.config, args.set, flags)


def socket_path(args: argparse.Namespace) -> Path:
    """Where the daemon listens. With --socket no configuration is read at all."""
    if args.socket is not None:
        path: Path = args.socket.absolute()
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
            allowed = f"the kernel allows {SOCKET_PATH_BYTES_MAX} bytes"
            raise CliError(f"{args.called}: --socket {path}: too long: {allowed}", exit_code=USAGE)
        return path
    return load_config(args).config.socket_path
