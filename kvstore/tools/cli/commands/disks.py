"""The NVMe directories of this node: level, directory, file system, state, records, how full; and what was another disk.

  kvstore disks                        a row for each, of the daemon, or of the settings where none runs
  kvstore disks --accept DIRECTORY     what is there now is right: an empty directory, another disk
  kvstore disks --forget DIRECTORY     remember nothing of it: it is taken out of the settings, or taken as it is at the next start
  kvstore disks -o json                for programs; docs/cli.md lists the fields

The data directory remembers each directory: which disk it is, on which file system. One that was known and is gone, empty,
another one, or elsewhere is left alone, so that nothing is made on the file system below a disk that is not mounted. It is
used again as soon as its disk is back. A daemon that runs takes what is accepted at once.

Exit code 0 when all are well, or it is done; 1 when one is not, or it is in use; 3 when nothing is known of it; 4: the daemon hangs.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.tools.cli import FAILED, NOT_FOUND, OK, CliError
from kvstore.tools.cli.options import add_config_arguments, load_config
from kvstore.tools.cli.output import present, say
from kvstore.tools.cli.prefixes import ask, is_nobody
from kvstore.units import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.daemon.config.config import Config
    from kvstore.daemon.disks.known import Known
    from kvstore.protocol import answers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--accept", type=Path, metavar="DIRECTORY", help="what is there now is right")
    what.add_argument("--forget", type=Path, metavar="DIRECTORY", help="remember nothing of it")
    add_config_arguments(parser, "table", "json")


def run(args: argparse.Namespace) -> int:
    named, accept = args.accept or args.forget, args.accept is not None
    if named is None:
        return _list(args)
    directory = os.path.abspath(named)
    try:
        told = ask(args, "disks", lambda client: client.change_disk(directory, accept))
    except CliError as error:
        if not is_nobody(error.__cause__):
            raise
        told = _changed_offline(args, directory, accept)
    return present(args, {"directory": directory, "accepted": accept, **told}, _print_change)


def _list(args: argparse.Namespace) -> int:
    try:
        rows: list[answers.Disk] = ask(args, "disks", lambda client: client.status())["disks"]
    except CliError as error:
        if not is_nobody(error.__cause__):
            raise
        rows = list(_offline_rows(load_config(args).config))
    present(args, {"disks": rows}, _print)
    return FAILED if any(row["problem"] for row in rows) else OK


def _print(document: dict[str, Any]) -> None:
    from kvstore.tools.cli.commands.status import print_disks

    rows: list[answers.Disk] = document["disks"]
    if not rows:
        print("no NVMe directory is set")
        return
    print_disks(rows)
    for row in rows:
        if row["problem"] or row["todo"]:
            say(printable("; ".join(filter(None, (row["problem"], row["todo"])))))


def _print_change(told: dict[str, Any]) -> None:
    if told["accepted"]:
        when = "now" if told["now"] else "from the next start on"
        print(printable(f"{told['directory']} is taken as it is, {when}: on {told['on']}"))
    else:
        print(printable(f"{told['directory']} is forgotten"))


# -- where no daemon runs --


def _changed_offline(args: argparse.Namespace, directory: str, accept: bool) -> dict[str, Any]:
    from kvstore.daemon.data_dir import hold
    from kvstore.daemon.disks.known import Known

    config = load_config(args).config
    if accept and Path(directory) not in config.nvme.directories:
        raise CliError(f"disks: {directory}: is not one of nvme.directories", exit_code=NOT_FOUND)
    data_dir = hold(config.data_dir, create=False)
    try:
        known = Known(data_dir.disks_path)
        on = known.accept(Path(directory)).said if accept else ""
        if not accept and not known.forget(directory):
            raise CliError(f"disks: {directory}: nothing is remembered of it", exit_code=NOT_FOUND)
        known.save()
    except OSError as error:
        raise CliError(f"disks: {error.filename or directory}: {error.strerror}") from error
    finally:
        data_dir.close()
    return {"on": on, "now": False}


def _offline_rows(config: Config) -> Iterator[answers.Disk]:
    """As the next start will find them."""
    from kvstore.daemon.disks.known import Known
    from kvstore.daemon.disks.watch import unused_row

    known = Known(config.data_dir / "disks.json", may_write=False)
    directories = config.nvme.directories
    for number, path in enumerate(directories):
        level = f"nvme{number}" if len(directories) > 1 else "nvme"
        yield _offline_row(level, path, known, config.nvme.capacity_bytes)
    mine = set(map(str, directories))
    yield from (unused_row(row) for row in known.rows() if row.directory not in mine)


def _offline_row(level: str, path: Path, known: Known, capacity_bytes: int) -> answers.Disk:
    from kvstore.daemon.disks.watch import empty_row
    from kvstore.tools.doctor.apart import NoAnswer, apart

    row = empty_row(level, str(path), "", "ok" if path in known else "new", "", capacity_bytes)
    try:
        for said in apart(lambda: [_looked_at(path, known)]):
            row |= said
    except NoAnswer:
        row |= {"state": "silent", "problem": "does not answer", "todo": "look at dmesg, the disk, its mount"}
    except OSError as error:
        row |= {"state": "left alone", "problem": f"{error.strerror}", "todo": "mend what it names"}
    if row["problem"]:
        said = row["problem"].removeprefix(f"{level} ").removeprefix(f"{path}: ")
        row["problem"] = f"{level} {path}: {said}"
    return row


def _looked_at(path: Path, known: Known) -> dict[str, str]:
    from kvstore.daemon.disks.filesystem import file_system
    from kvstore.daemon.disks.known import NotItself
    from tiers.errors import OpenError

    on = file_system(path)
    found = {"device": on.source, "file_system": on.said}
    try:
        known.recognise(path)
    except OpenError as error:
        state = error.state if isinstance(error, NotItself) else "left alone"
        why = str(error).removeprefix(f"nvme directory {path}: ")
        todo = f"mount its disk; or kvstore disks --accept {path}, to take what is there now"
        return {
            **found,
            "state": state,
            "problem": why,
            "todo": todo if isinstance(error, NotItself) else "mend what it names",
        }
    return found
