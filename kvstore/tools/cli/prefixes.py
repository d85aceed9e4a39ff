"""Asking a daemon: prefixes, namespaces and tenants on the command line, and what is printed of the answer."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.constants import STATUS_TIMEOUT_S, TENANT_CHARS_MAX
from kvstore.tools.cli import FAILED, NOT_FOUND, UNREACHABLE, USAGE, CliError
from kvstore.tools.cli.options import add_config_arguments, add_node_arguments, is_of_node, socket_path
from kvstore.tools.cli.output import print_json
from kvstore.units import printable

if TYPE_CHECKING:
    from kvstore.client import Client
    from kvstore.errors import ClientError
    from kvstore.tools.cli.nodes import Far

T = TypeVar("T")

WHOLE_DIGITS = 64  # of a block hash, as vLLM has it …
SHORT_DIGITS = (16, 32)  # … and as others may
PREFIXES_NAMED = 3  # of several that begin alike
_EXIT_CODES = {"not_found": NOT_FOUND, "bad_request": USAGE}


def ask(
    args: argparse.Namespace, command: str, question: Callable[[Any], Any], timeout_s: float | None = None
) -> Any:
    """The daemon's answer to one question, or, with --node, that of another node. Raises CliError with the exit code that fits the refusal."""
    if is_of_node(args):
        from kvstore.tools.cli.nodes import asked_of_node

        return asked_of_node(args, command, question)
    from kvstore.client import Client

    path: Path = socket_path(args)

    def asked() -> Any:
        if timeout_s is not None:  # a daemon that hangs is known of sooner
            with Client(path, STATUS_TIMEOUT_S, label="kvstore cli", attach=False) as client:
                client.ping()
        with Client(path, timeout_s or STATUS_TIMEOUT_S, label="kvstore cli", attach=False) as client:
            return question(client)

    return asked_of_daemon(command, asked)


def asked_of_daemon(command: str, work: Callable[[], T]) -> T:
    """Run something with the daemon. Raises CliError with the exit code that fits the refusal."""
    from kvstore.errors import Refused, Unavailable

    try:
        return work()
    except (Unavailable, Refused) as error:
        raise failure_of(command, error) from error


def failure_of(command: str, error: ClientError) -> CliError:
    """What is said of a daemon that was asked."""
    from kvstore.errors import Refused

    if isinstance(error, Refused):
        return CliError(f"{command}: {error.message}", exit_code=_EXIT_CODES.get(error.code, FAILED))
    return CliError(f"{error}{_hint(error)}", exit_code=UNREACHABLE)


def is_nobody(error: BaseException | None) -> bool:
    """Whether a daemon could not be reached because none runs, and not because it hangs, or may not be asked."""
    return error is not None and isinstance(error.__cause__, (FileNotFoundError, ConnectionRefusedError))


def _hint(error: Exception) -> str:
    """What to do about a daemon that cannot be reached."""
    if is_nobody(error):
        return ": is it running? Start it with kvstore serve, or name its socket with --socket"
    if isinstance(error.__cause__, PermissionError):
        return ": only root and the user that it runs as may ask it"
    if isinstance(error.__cause__, TimeoutError):
        return "; kvstore doctor says whether it hangs, and what to do"
    return ""


def add_arguments_for(parser: argparse.ArgumentParser, prefix: str = "", tenant: bool = False) -> None:
    """What a rule is about, the socket, and the form of the output.

    prefix: "" without PREFIX, "?" where it may be left out, "1" where not. The hash of a prefix's last block
    names everything before it, too.
    """
    if prefix:
        parser.add_argument(
            "prefix",
            metavar="PREFIX",
            nargs="?" if prefix == "?" else None,
            default="",
            help="hash of the last block of the prefix, in hex, or a unique beginning of it",
        )
    parser.add_argument(
        "--namespace",
        default="",
        metavar="DIGEST",
        help="beginning of the namespace's digest, as `kvstore status` shows it (for a prefix: default all "
        "that hold it; else the only one)",
    )
    if tenant:
        parser.add_argument("--tenant", type=tenant_name, metavar="NAME", help="all namespaces of it")
    add_config_arguments(parser, "text", "json")
    add_node_arguments(parser)


def tenant_name(text: str) -> str:
    """The type of an argument that names a tenant."""
    if len(text) > TENANT_CHARS_MAX:
        raise argparse.ArgumentTypeError(
            f"{len(text)} characters, at most {TENANT_CHARS_MAX} are allowed: {printable(text[:40])}…"
        )
    return text


def require_beginning(command: str, text: str) -> None:
    """Raises CliError for what cannot be a block hash, nor the beginning of one."""
    if not re.fullmatch("[0-9a-fA-F]{4,128}", text):
        raise CliError(
            f"{command}: prefix {printable(text)}: not a block hash in hex, nor the beginning of one (4 to 128 digits)",
            exit_code=USAGE,
        )


def find_prefix(client: Client | Far, command: str, text: str, namespace: str = "") -> bytes:
    """The block hash that PREFIX names, whole or by a unique beginning. Raises CliError, Unavailable, Refused."""
    found = client.find_prefixes(text.lower(), namespace)
    if len(found) == 1:
        return bytes.fromhex(found[0])
    if not found:
        raise CliError(f"{command}: prefix {text}: no known prefix begins so", exit_code=NOT_FOUND)
    digits = next(n for n in range(10, 129) if len({name[:n] for name in found}) == len(found))
    told = [f"{name[:digits]}{'…' if len(name) > digits else ''}" for name in found[:PREFIXES_NAMED]]
    more = " and others" if len(found) > PREFIXES_NAMED else ""
    raise CliError(
        f"{command}: prefix {text}: may be any of {', '.join(told)}{more}: give more digits", exit_code=USAGE
    )


def whole_or_found(args: argparse.Namespace, command: str, text: str) -> bytes:
    """The block hash that PREFIX names, for a command that needs no daemon: a beginning is one that the daemon of this node
    completes; what it does not know is taken as a whole hash where it is as long as one. Raises CliError."""
    require_beginning(command, text)
    if len(text) >= WHOLE_DIGITS and len(text) % 2 == 0:
        return bytes.fromhex(text)
    try:
        found: bytes = ask(args, command, lambda client: find_prefix(client, command, text))
    except CliError as error:
        if error.exit_code in (NOT_FOUND, UNREACHABLE) and len(text) in SHORT_DIGITS:
            told = f"kvstore: {command}: prefix {text}: no daemon here knows it; taken as a whole hash"
            print(told, file=sys.stderr)
            return bytes.fromhex(text)
        if error.exit_code != UNREACHABLE:
            raise
        raise CliError(
            f"{command}: prefix {text}: a beginning is looked up at the daemon of this node, and that does not answer: "
            "give the whole hash",
            exit_code=USAGE,
        ) from error
    return found


def namespace_of(command: str, args: argparse.Namespace) -> str:
    """The beginning of a digest. Raises CliError."""
    text: str = args.namespace.lower()
    if len(text) > 32 or any(digit not in "0123456789abcdef" for digit in text):
        raise CliError(
            f"{command}: --namespace {args.namespace}: not a digest in hex (at most 32 digits)",
            exit_code=USAGE,
        )
    return text


def subject(args: argparse.Namespace, namespaces: list[str]) -> str:
    """What a rule is about that is no prefix: a tenant, or else the one namespace."""
    if args.tenant is not None:
        return f"tenant {printable(args.tenant) or '(none)'}"
    return f"namespace {short(namespaces)}"


def warn_of_tenant(client: Client, command: str, tenant: str | None) -> None:
    """A rule for a tenant that nobody has seen is in force all the same; perhaps its name is mistyped."""
    if tenant is None:
        return
    known = {space["fields"].get("tenant", "") for space in client.list_namespaces()}
    if tenant not in known:
        close = difflib.get_close_matches(tenant, known - {""}, 1)
        hint = f"; did you mean {printable(close[0])}?" if close else ""
        name = printable(tenant) or "(none)"
        print(f"kvstore: {command}: nothing of tenant {name} is known here now{hint}", file=sys.stderr)


def confirm(args: argparse.Namespace, done: str, facts: dict[str, object], namespaces: list[str]) -> None:
    """Print what is in force now: a line for people, the facts for programs."""
    if args.output == "json":
        print_json({**facts, "namespaces": namespaces})
        return
    is_said = not namespaces or f"namespace {short(namespaces)}" in done
    print(done if is_said else f"{done} (namespace {short(namespaces)})")


def short(namespaces: list[str]) -> str:
    """Digests as they are shown."""
    return ", ".join(digest[:12] for digest in namespaces)
