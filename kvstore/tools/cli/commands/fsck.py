"""Check that index, memory and disks agree: nothing lost, nothing handed out twice.

  kvstore fsck                         ask the running daemon to check itself
  kvstore fsck --offline               check the storage of a stopped daemon
  kvstore fsck --verify                offline: also read every record and compare its checksum
  kvstore fsck --repair                offline: also drop what is damaged: records and rows

Exit code 0 when sound (after the repair, if any), 1 when problems are left, 3 when there is no such data directory,
4 when no daemon answers.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvstore.constants import STATUS_TIMEOUT_S, require
from kvstore.tools.cli import FAILED, OK, UNREACHABLE, CliError
from kvstore.tools.cli.options import add_config_arguments, add_node_arguments, is_of_node, load_config
from kvstore.tools.cli.output import present, progress_bars
from kvstore.tools.cli.prefixes import ask
from kvstore.units import plural

if TYPE_CHECKING:
    from kvstore.daemon.fsck import Finding

CHECK_TIMEOUT_S = 120.0  # check() reads every row of every tier
require(STATUS_TIMEOUT_S < CHECK_TIMEOUT_S, "a check may take longer than a status")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, "text", "json")
    parser.add_argument(
        "--offline", action="store_true", help="open the storage itself; the daemon must be stopped"
    )
    parser.add_argument("--verify", action="store_true", help="read every record (means --offline)")
    parser.add_argument("--repair", action="store_true", help="drop what is damaged (means --offline)")
    add_node_arguments(parser, "offline", "verify", "repair")


def run(args: argparse.Namespace) -> int:
    is_online = is_of_node(args) or not (args.offline or args.verify or args.repair)
    return _online(args) if is_online else _offline(args)


def _online(args: argparse.Namespace) -> int:
    try:
        problems = ask(args, "fsck", lambda client: client.check(), CHECK_TIMEOUT_S)
    except CliError as error:
        if error.exit_code == UNREACHABLE:
            hint = "" if args.node else "; is it stopped? then use --offline"
            raise CliError(f"{error}{hint}", exit_code=UNREACHABLE) from error
        raise
    for problem in problems if args.output == "text" else ():
        print(problem)
    return _end(args, "online", problems, [])


def _offline(args: argparse.Namespace) -> int:
    from kvstore import logs
    from kvstore.daemon.fsck import examine

    config = load_config(args).config
    logs.configure("warning", "console")
    with progress_bars() as progress:
        findings = examine(config, args.verify, args.repair, progress)
    problems = [problem for finding in findings for problem in finding.problems]
    for finding in findings if args.output == "text" else ():
        _print(finding, args.verify)
    return _end(args, "offline", problems, [asdict(finding) for finding in findings])


def _end(args: argparse.Namespace, mode: str, problems: list[str], stores: list[dict[str, Any]]) -> int:
    document = {"mode": mode, "ok": not problems, "problems": problems, "stores": stores}
    present(args, document, lambda _: print(plural(len(problems), "problem") if problems else "sound"))
    return FAILED if problems else OK


def _print(finding: Finding, is_verified: bool) -> None:
    verified = f", {finding.verified} verified, {finding.corrupt} corrupt" if is_verified else ""
    print(f"{finding.store} {finding.path}: {finding.records} records{verified}")
    if finding.slabs:
        wrong = f", {finding.corrupt_slabs} corrupt" if is_verified else ""
        print(f"{finding.store} {finding.path}: {finding.slabs} slabs of models{wrong}")
    for repair in finding.repairs:
        print(f"  repaired: {repair}")
    for problem in finding.problems:
        print(f"  problem: {problem}")
