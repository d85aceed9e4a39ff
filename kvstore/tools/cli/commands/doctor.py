"""Is this machine fit for the cache, is the daemon well, and what is to be done where not? Changes nothing.

  kvstore doctor                       one line for each thing that was looked at; the daemon may be up or down
  kvstore doctor --disks               also measure each NVMe directory for a few seconds: 256 MiB are written, nothing is left
  kvstore doctor --bundle FILE.tar.gz  also pack what a helper needs to see, without secrets; names of models and
                                       tenants are replaced unless --names
  kvstore doctor -o json               for programs; docs/cli.md lists the fields

Levels: ok; note: better otherwise; warning: something will miss, be slow or fail later; problem: it does not work as it is.
Run it as the daemon's user, or as root. Exit code 0 without problems, 1 with.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.tools.cli import FAILED, NOT_FOUND, OK, USAGE, CliError
from kvstore.tools.cli.options import add_config_arguments, load_config
from kvstore.tools.cli.output import is_terminal, print_json, wrapped
from kvstore.tools.cli.streams import drawing, has_colours
from kvstore.units import plural, printable

if TYPE_CHECKING:
    from kvstore.tools.doctor.bundle import Asked
    from kvstore.tools.doctor.findings import Case, Finding

_COLOURS = {"ok": "32", "note": "36", "warning": "33", "problem": "1;31"}
_LEVEL_WIDTH, _CHECK_WIDTH = 8, 19
_INDENT, _WIDE = _LEVEL_WIDTH + 1 + _CHECK_WIDTH + 1, 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, "text", "json")
    parser.add_argument("--disks", action="store_true", help="measure the NVMe directories, too")
    parser.add_argument("--bundle", type=Path, metavar="FILE", help="pack what a helper needs to see")
    parser.add_argument(
        "--names", action="store_true", help="with --bundle: names of models and tenants as they are"
    )


def run(args: argparse.Namespace) -> int:
    from kvstore.tools.doctor.examine import examine

    if args.names and args.bundle is None:
        raise CliError("doctor: --names is for --bundle", exit_code=USAGE)
    if args.bundle is not None:
        _check_place(args.bundle)
    case, asked = _case(args)
    findings = []
    for finding in examine(case):
        findings.append(finding)
        if args.output == "text":
            _print(finding)
    counts = Counter(finding.level for finding in findings)
    answer = {
        "ok": not counts["problem"],
        "problems": counts["problem"],
        "warnings": counts["warning"],
        "notes": counts["note"],
        "findings": [asdict(finding) for finding in findings],
    }
    if args.output == "json":
        print_json(answer)
    else:
        said = (plural(counts[level], level) for level in ("problem", "warning", "note") if counts[level])
        print(", ".join(said) or "nothing to do")
    if args.bundle is not None:
        _pack(args, case, answer, asked)
    return FAILED if counts["problem"] else OK


def _case(args: argparse.Namespace) -> tuple[Case, Asked]:
    """What is looked at. A wrong configuration is something to find, too."""
    from kvstore.client import Client
    from kvstore.constants import STATUS_TIMEOUT_S
    from kvstore.daemon.config.config_sources import chosen_file
    from kvstore.errors import ClientError, ConfigError
    from kvstore.protocol.places import default_socket
    from kvstore.tools.doctor.bundle import Asked
    from kvstore.tools.doctor.findings import Case

    loaded, come_from = None, ""
    problems: tuple[str, ...] = ()
    try:
        loaded = load_config(args)
        come_from = _come_from(loaded)
    except ConfigError as error:
        problems = tuple(error.problems)
    file = chosen_file(args.config, os.environ)[0]
    config = loaded.config if loaded is not None else None
    socket = args.socket or (config.socket_path if config is not None else Path(default_socket()))
    socket = Path(socket).absolute()
    status, unreachable, asked = None, "", Asked()
    try:
        with Client(socket, STATUS_TIMEOUT_S, label="kvstore doctor", attach=False) as client:
            status = client.status()
            if args.bundle is not None:
                asked = Asked(client.report(0.0), client.retention(), client.settings())
    except ClientError as error:
        unreachable = str(error)
    except OSError as error:
        unreachable = f"{socket}: {error.strerror}"
    case = Case(socket, time.time, config, tuple(problems), come_from, status, unreachable, args.disks, file)
    return case, asked


def _come_from(loaded: Any) -> str:
    """Where the settings come from, in words."""
    counts = Counter(given.source for given in loaded.given.values())
    words = {"file": f"from {loaded.file}", "env": "from the environment", "flag": "from options"}
    said = [f"{counts[source]} {words[source]}" for source in words if counts[source]]
    nothing = f"{loaded.file}, which sets nothing" if loaded.file else "no file: all are defaults"
    return ", ".join(said) or nothing


def _check_place(path: Path) -> None:
    """Asked before the work. Raises CliError."""
    if path.is_symlink() or path.exists():
        raise CliError(f"doctor: --bundle {path}: is there already, and is not written over", exit_code=USAGE)
    if not path.absolute().parent.is_dir():
        raise CliError(f"doctor: --bundle {path}: no directory {path.absolute().parent}", exit_code=NOT_FOUND)


def _pack(args: argparse.Namespace, case: Case, answer: dict[str, Any], asked: Asked) -> None:
    from kvstore.tools.doctor.bundle import pack

    try:
        members = pack(args.bundle, case, answer, asked, with_names=args.names)
    except OSError as error:
        raise CliError(f"doctor: --bundle {args.bundle}: {error.strerror}", exit_code=FAILED) from error
    print(f"{args.bundle}: {plural(len(members), 'file')}", file=sys.stderr)
    for name, size_bytes in members.items():
        print(f"  {name} ({size_bytes:,} bytes)", file=sys.stderr)
    hidden = "" if args.names else "; models and tenants have other names in it"
    print(f"secrets were taken out{hidden}; look through it before you send it", file=sys.stderr)


def _print(finding: Finding) -> None:
    """One line in a pipe; on a terminal as wide as that, in colours."""
    word, check = f"{finding.level:<{_LEVEL_WIDTH}}", f"{finding.check:<{_CHECK_WIDTH}}"
    if not is_terminal():
        todo = f"  -> {finding.action}" if finding.action else ""
        print(printable(f"{word} {check} {finding.found}{todo}"), flush=True)
        return
    indent = _INDENT if shutil.get_terminal_size().columns >= _WIDE else 2
    line, *lines = wrapped(f"{word} {check} {finding.found}", indent)
    if has_colours():
        line = f"\033[{_COLOURS[finding.level]}m{line[:_LEVEL_WIDTH]}\033[0m{line[_LEVEL_WIDTH:]}"
    print(line, file=drawing(sys.stdout))
    lines += wrapped(f"{' ' * indent}→ {finding.action}", indent + 2) if finding.action else []
    print(*lines, sep="\n", end="\n" * bool(lines), flush=True)
