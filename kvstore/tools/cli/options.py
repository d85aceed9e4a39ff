"""Options that several commands share: which configuration, which socket, which output."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

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
