"""The `kvstore` command: one module a command, found by name, imported only when it is used.

    kvstore status -o json
            │
            └─▶ COMMANDS["status"] ─▶ import kvstore.tools.cli.commands.status ─▶ add_arguments(parser), run(args)

Adding a command is one line in HEADINGS and one module with two functions:

    def add_arguments(parser: argparse.ArgumentParser) -> None
    def run(args: argparse.Namespace) -> int          # the exit code

Data goes to stdout, everything else to stderr. Exit codes: 0 ok, 1 failed, 2 wrong usage
or configuration, 3 not found, 4 no daemon answers. What a user can get wrong is raised as
CliError and printed as one line; a traceback means a bug of ours. So is a stdout that is closed or
full; only of a reader that had enough nothing is said.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from kvstore.tools.cli.streams import harmless_streams, leave

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

OK, FAILED, USAGE, NOT_FOUND, UNREACHABLE = 0, 1, 2, 3, 4
INTERRUPTED = 130  # 128 + SIGINT, as shells have it

# By heading, in the order in which they are shown.
HEADINGS = {
    "run": {
        "serve": "run the daemon",
        "mirror": "copy into this region what the rules say, from all others",
        "web": "serve metrics, health and a live page of a running daemon",
        "grpc": "serve the gRPC API of a running daemon, for other services",
    },
    "look": {
        "ping": "whether a daemon answers, who it is, and how fast",
        "status": "what a running daemon holds: tiers, sessions, namespaces, hits",
        "top": "what a running daemon does, live: rates, hits, tiers, latencies, who asks",
        "clients": "who is connected to a running daemon, what each does; hang up on one",
        "slow": "the last requests that took long, whose they were and why",
        "report": "what the cache gave back, by tier, model, tenant, hour, and why not when it did not",
        "explain": "where a prompt would hit, block by block, and why not",
        "disks": "the NVMe directories of this node: which disks they are, how they are; accept or forget one",
        "doctor": "whether this machine is fit for the cache, the daemon is well, and what to do where not",
        "fsck": "check that index, memory and disks agree; verify and repair stored records",
    },
    "keep and drop": {
        "retention": "what is pinned, what expires, and who may hold how much",
        "pin": "keep a prefix from being evicted",
        "unpin": "let a pinned prefix be evicted again",
        "ttl": "drop blocks so long after they were stored: of a prefix, a namespace, a tenant",
        "quota": "how many bytes a namespace or a tenant may hold in each tier",
        "prefetch": "load a prefix into the DRAM of this node, from its NVMe or the region's bucket",
        "clear": "drop what this node's tiers hold of a prefix, a namespace, a tenant, or everything",
        "arena": "which arenas lie in memory, and giving one back",
    },
    "regions": {
        "region": "regions and their buckets: made ready, how far mirrors are, whether all is there; erasing in all of them",
        "warm": "copy into a region what it lacks, and preload its daemons with what is most valuable",
    },
    "models": {"model": "models in a region's bucket and on this node: published, preloaded, loaded"},
    "settings": {
        "config": "the settings in force and those of a file: get, set, diff, show, check, init; the systemd unit",
        "completion": "print what a shell needs to complete these commands and their options",
        "version": "versions of kvstore and of what it runs on",
        "help": "this overview, or the options of one command",
    },
    "try": {
        "record": "write down the requests that engines ask for, for replay: lengths and what they share, no names",
        "replay": "what each eviction policy would have hit on recorded traffic",
        "bench": "what this machine does with our tiers, beside its limits",
    },
}
COMMANDS = {name: summary for commands in HEADINGS.values() for name, summary in commands.items()}


# What the connector does without, and our packages import by themselves (pyproject.toml).
_NEEDED = frozenset(
    {
        *("aiohttp", "cryptography", "obstore", "prometheus_client", "pydantic", "rich", "rocksdict"),
        *("shtab", "uvloop", "zmq", "zstandard"),
    }
)


# Of which nothing is a value: a tenant without a name, a setting that is turned off.
_MAY_BE_EMPTY = frozenset({"tenant", "salt", "value", "access"})
PATH_BYTES_MAX, NAME_BYTES_MAX = 4095, 255  # of the kernel
WORD_CHARS_MAX = 400  # of one word in a line for people; a longer one is cut in its middle


class CliError(Exception):
    """Something the user can put right. Printed line by line, without a traceback."""

    def __init__(self, *problems: str, exit_code: int = FAILED) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems
        self.exit_code = exit_code


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, with the nearest valid word."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._negative_number_matcher = re.compile(r"-[\d.]")  # "-1h" is a wrong time, and no option

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Refuses what no argument can be: nothing, and what the kernel takes for no path."""
        given = arg_strings[:1] if action.nargs == argparse.PARSER else arg_strings
        if action.dest not in _MAY_BE_EMPTY and any(not text.strip() for text in given):
            raise argparse.ArgumentError(action, "is empty")
        found = super()._get_values(action, arg_strings)
        if action.type is Path and action.dest != "socket":
            for text in given:
                _require_path(action, text)
        return found

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; what it does not know is refused here, where its options are known, with the nearest one."""
        found, left = super().parse_known_args(args, namespace)
        if left:
            known = [option for action in self._actions for option in action.option_strings]
            close = difflib.get_close_matches(left[0].partition("=")[0], known, 1)
            hint = f": did you mean {close[0]}?" if close else ""
            self.error(f"unrecognized arguments: {' '.join(left)}{hint}")
        return found, left

    def error(self, message: str) -> NoReturn:
        command = self.prog.removeprefix("kvstore ")
        raise CliError(f"{command}: {message} (see {self.prog} --help)", exit_code=USAGE)

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """As anything else is printed: argparse itself is silent where stdout cannot be written."""
        print(self.format_help(), end="", file=file)


def _require_path(action: argparse.Action, text: str) -> None:
    names = map(len, map(os.fsencode, text.split("/")))
    if len(os.fsencode(text)) > PATH_BYTES_MAX or max(names) > NAME_BYTES_MAX:
        allowed = f"{PATH_BYTES_MAX} bytes, {NAME_BYTES_MAX} between two slashes"
        raise argparse.ArgumentError(action, f"{text}: too long for a path: allowed are {allowed}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Entry point of the `kvstore` script."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stderr is None:  # closed: print() would take stdout in its place
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 needed until the process ends
    if sys.stdout is None:
        return _say(CliError("stdout is closed; where it is not wanted, redirect it to /dev/null"))
    if isinstance(sys.stdout, io.TextIOWrapper):  # the name of a file may be no text
        sys.stdout.reconfigure(errors="backslashreplace")
    if arguments is None and words and words[0] not in HEADINGS["run"]:  # which end in an order of their own
        signal.signal(signal.SIGTERM, _end)
        sys.unraisablehook = _not_lost
    os.umask(os.umask(0o077) | 0o002)  # nothing that we make may be written by everybody
    with harmless_streams():
        return _main(words)


def _end(number: int, frame: FrameType | None) -> None:
    """SIGTERM is as Control-C: what a command has made for itself is removed. Whoever started us may ignore SIGINT."""
    how = signal.getsignal(signal.SIGINT)
    (how if callable(how) else signal.default_int_handler)(number, frame)


def _not_lost(found: sys.UnraisableHookArgs) -> None:
    """A signal that came in a finalizer (an import has some), where Python drops what is raised, comes again in a moment."""
    if not issubclass(found.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(found)
        return
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.01)


def _main(words: list[str]) -> int:
    try:
        if words[:1] == ["--child"]:
            from kvstore.tools.cli import child

            child.begin()
            del words[0]
        return _told(words)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) had enough
        leave(sys.stdout)
        return FAILED
    except OSError as error:
        if _can_write():
            raise
        leave(sys.stdout)
        return _say(CliError(f"cannot write to stdout: {error.strerror}"))


def _told(words: list[str]) -> int:
    """Run the command, say what was wrong; everything for stdout has left us."""
    try:
        code = _run(words)
    except Exception as error:
        if (failure := _failure_of(error, words)) is None:
            raise
        code = _say(failure)
    sys.stdout.flush()
    return code


def _failure_of(error: Exception, words: list[str]) -> CliError | None:
    """Every failure that is known, where no command says it in words of its own; None for a bug of ours."""
    if isinstance(error, CliError):
        return error
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in _NEEDED:
        return CliError(
            f"{words[0]}: needs {error.name}, which the connector alone does without: this is its small "
            "install; pip install its checkout or wheel in an environment of its own, and that has the command"
        )
    if isinstance(error, ImportError) and str(error.path).endswith(
        ".so"
    ):  # of its machine, as a limit of memory
        return CliError(f"{words[0]}: a library cannot be loaded: {error}")
    from coldstart.errors import ModelError, ModelMissing
    from kvstore.errors import ConfigError, StartError
    from replication.errors import ReplicationError
    from tiers.errors import ObjectUnavailable, OpenError, TierError

    if isinstance(error, (StartError, OpenError)):
        missing = isinstance(error, StartError) and error.is_missing
        code = FAILED if error.heals else USAGE  # tells a supervisor whether to try again
        code = NOT_FOUND if missing else code
    elif isinstance(error, ConfigError):
        code = NOT_FOUND if error.missing_file else USAGE
    elif isinstance(error, ModelError):
        code = NOT_FOUND if isinstance(error, ModelMissing) else FAILED
    elif isinstance(error, (ReplicationError, TierError)):
        code = UNREACHABLE if isinstance(error, ObjectUnavailable) else FAILED
    elif isinstance(error, OSError) and error.filename is not None:  # of a path, wherever it was met
        code = USAGE if isinstance(error, _NO_FILES) else FAILED
        code = NOT_FOUND if isinstance(error, FileNotFoundError) else code
        return CliError(f"{os.fsdecode(error.filename)}: {error.strerror}", exit_code=code)
    elif isinstance(error, FileNotFoundError) and not _is_somewhere():
        return CliError("the directory that you are in does not exist any more", exit_code=NOT_FOUND)
    else:
        return None
    return CliError(*getattr(error, "problems", (str(error),)), exit_code=code)


_NO_FILES = (PermissionError, NotADirectoryError, IsADirectoryError)
_LONG_WORD = re.compile(rf"(\S{{{WORD_CHARS_MAX // 2}}})\S{{{WORD_CHARS_MAX // 2},}}(\S{{40}})")
_CUT = r"\1…\2"


def _say(error: CliError) -> int:
    from kvstore.units import REPLACED

    for problem in error.problems:
        line = problem.replace("\n", REPLACED)  # of a name: what is wrong stands on one line
        print(f"kvstore: {_LONG_WORD.sub(_CUT, line)}", file=sys.stderr)
    return error.exit_code


def _is_somewhere() -> bool:
    try:
        return bool(os.getcwd())
    except FileNotFoundError:
        return False


def _can_write() -> bool:
    """Whether stdout takes one more character: else an OSError was about it, and no bug of ours."""
    try:
        print(flush=True)
    except OSError:
        return False
    return True


def _run(words: list[str]) -> int:
    command = words[0] if words else ""
    if command not in COMMANDS:
        return _no_command(words)
    if (wrong := next((word for word in words if "\0" in word), None)) is not None:
        raise CliError(f"{command}: {wrong}: a NUL character is not allowed", exit_code=USAGE)
    module = module_of(command)
    try:
        args = parser_of(command).parse_args(words[1:])
    except SystemExit:  # --help, and there it is
        return OK
    for name, text in _not_utf8(args):
        raise CliError(f"{command}: argument {name}: not valid UTF-8: {text}", exit_code=USAGE)
    outcome = "failed"
    try:
        code = int(module.run(args))
        outcome = f"exit code {code}" if code else "ok"
    finally:
        if command in ("warm", "region", "model"):
            from kvstore.tools.cli import auditing

            auditing.note(args, words[1:], outcome)
    return code


def parser_of(command: str) -> Parser:
    """What reads the arguments of one of COMMANDS."""
    module = module_of(command)
    names_files = any(place in str(module.__doc__) for place in ("docs/", "deploy/"))
    parser = Parser(
        prog=f"kvstore {command}",
        description=module.__doc__,
        epilog=f"docs/ and deploy/ are in {shared()}" if names_files else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(called=command)
    module.add_arguments(parser)
    return parser


def module_of(command: str) -> ModuleType:
    """What has its arguments and its work: `unpin` is of the same as `pin`."""
    return importlib.import_module(f"kvstore.tools.cli.commands.{command.removeprefix('un')}")


def shared() -> str:
    """The directory of docs/ and deploy/: in the package where it was installed, around it in a checkout."""
    package = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 2))
    installed = os.path.join(package, "share")
    return installed if os.path.isdir(installed) else os.path.dirname(package)


def _not_utf8(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Names of arguments and what can be shown of them. A path may be any bytes, as for the kernel."""
    for name, value in vars(args).items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not _is_utf8(text):
                shown = os.fsencode(text).decode(errors="backslashreplace")
                yield name.replace("_", "-"), shown


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)  # what Python makes of other bytes


def _no_command(words: list[str]) -> int:
    first = words[0] if words else ""
    if first in ("-h", "--help"):
        print(overview())
        return OK
    if first in ("-V", "--version"):
        from kvstore import __version__

        print(f"kvstore {__version__}")
        return OK
    if not first:
        raise CliError("no command (kvstore --help lists them)", exit_code=USAGE)
    raise unknown_command(first)


def unknown_command(word: str) -> CliError:
    """It is no command, nor an option that stands in place of one."""
    if word.startswith("-"):
        return CliError(
            f"unknown option {word}: options stand behind a command (kvstore --help lists them)",
            exit_code=USAGE,
        )
    close = difflib.get_close_matches(word, COMMANDS, 1)
    hint = f"did you mean {close[0]}?" if close else "kvstore --help lists what there is"
    return CliError(f"unknown command {word}: {hint}", exit_code=USAGE)


def overview() -> str:
    """All commands, a line each, under their headings."""
    width = max(map(len, COMMANDS))
    lines = [
        line
        for heading, commands in HEADINGS.items()
        for line in ("", f"{heading}:", *(f"  {name:<{width}}  {text}" for name, text in commands.items()))
    ]
    return "\n".join(
        [
            "usage: kvstore COMMAND [options]     (kvstore COMMAND --help lists the options)",
            "",
            "A KV-cache daemon for inference engines, and the tools to look after it.",
            *lines,
            "",
            "exit codes: 0 ok, 1 failed, 2 wrong usage or configuration, 3 not found, 4 no daemon answers",
            f"to read on (docs/), and files to deploy it with (deploy/): {shared()}",
        ]
    )
