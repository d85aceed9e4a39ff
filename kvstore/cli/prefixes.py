"""Asking a daemon: prefixes, namespaces and tenants on the command line, and what is printed of the answer."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore.cli import FAILED, NOT_FOUND, UNREACHABLE, USAGE, CliError
from kvstore.cli.options import add_config_arguments, add_output_argument, socket_path
from kvstore.cli.output import print_json, printable
from kvstore.constants import STATUS_TIMEOUT_S, TENANT_CHARS_MAX

_EXIT_CODES = {"not_found": NOT_FOUND, "bad_request": USAGE}


def ask(
    args: argparse.Namespace, command: str, question: Callable[[Any], Any], timeout_s: float | None = None
) -> Any:
    """The daemon's answer to one question. Raises CliError with the exit code that fits the refusal."""
    from kvstore.client import Client, Refused, Unavailable

    path: Path = socket_path(args)
    try:
        with Client(path, timeout_s or STATUS_TIMEOUT_S, label="kvstore cli", attach=False) as client:
            return question(client)
    except Unavailable as error:
        raise CliError(str(error), exit_code=UNREACHABLE) from error
    except Refused as error:
        code = _EXIT_CODES.get(error.code, FAILED)
        raise CliError(f"{command}: {error.message}", exit_code=code) from error


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
            help="hash of the last block of the prefix, in hex",
        )
    parser.add_argument(
        "--namespace",
        default="",
        metavar="DIGEST",
        help="beginning of the namespace's digest, as `kvstore status` shows it (for a prefix: default all "
        "that hold it; else the only one)",
    )
    if tenant:
        parser.add_argument("--tenant", type=_tenant, metavar="NAME", help="every namespace of this tenant")
    add_config_arguments(parser)
    add_output_argument(parser, "text", "json")


def _tenant(text: str) -> str:
    if len(text) > TENANT_CHARS_MAX:
        raise argparse.ArgumentTypeError(
            f"{len(text)} characters, at most {TENANT_CHARS_MAX} are allowed: {printable(text[:40])}…"
        )
    return text


def prefix_hash(command: str, text: str) -> bytes:
    """The block hash that PREFIX names. Raises CliError."""
    try:
        block_hash = bytes.fromhex(text)
    except ValueError:
        block_hash = b""
    if not 8 <= len(block_hash) <= 64:
        raise CliError(
            f"{command}: prefix {text}: not a block hash in hex (16 to 128 digits)", exit_code=USAGE
        )
    return block_hash


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
    return f"namespace {_short(namespaces)}"


def confirm(args: argparse.Namespace, done: str, facts: dict[str, object], namespaces: list[str]) -> None:
    """Print what is in force now: a line for people, the facts for programs."""
    if args.output == "json":
        print_json({**facts, "namespaces": namespaces})
        return
    is_said = not namespaces or f"namespace {_short(namespaces)}" in done
    print(done if is_said else f"{done} (namespace {_short(namespaces)})")


def _short(namespaces: list[str]) -> str:
    return ", ".join(digest[:12] for digest in namespaces)
