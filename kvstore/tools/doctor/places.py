"""Who owns what, and may the caller's engine and daemon use it: data directory, socket, arena, descriptors, port."""

from __future__ import annotations

import http.client
import json
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

from kvstore.constants import DATA_DIR_MARK_BYTES_MAX
from kvstore.daemon.data_dir import LOCK, MARK
from kvstore.daemon.disks.filesystem import nearest_there
from kvstore.daemon.listening import Listen, parse_listen
from kvstore.tools.doctor.findings import Case, Finding, Level, is_ours, user_name
from tiers.reading import Unreadable, read_json

DOCTOR_ANSWER_S = 3.0  # for the port of the web, and for each question to a bucket
_SILENT = "…"
DOCTOR_SPARE_FILES = 256  # descriptors that a daemon needs besides its connections


def instance_of(data_dir: Path) -> str | None:
    """Whose data directory it is, without touching it; None where that cannot be read."""
    try:
        content = read_json(data_dir / MARK, DATA_DIR_MARK_BYTES_MAX, dict[str, object])
        return str(content["instance"])
    except (Unreadable, KeyError):
        return None


def data_directory(case: Case) -> Iterator[Finding]:
    """Can a daemon of this user use it, and nobody else write into it?"""
    path = case.data_dir
    if path is None:
        return
    try:
        status = path.stat()
        names = os.listdir(path)
    except FileNotFoundError:
        there = nearest_there(path)
        if case.status is not None:
            return  # the daemon knows it, and says so below
        if os.access(there, os.W_OK):
            yield Finding("data directory", "ok", f"{path} is not there yet")
        else:
            yield Finding(
                "data directory",
                "problem",
                f"{path} is not there, and {user_name(os.geteuid())} may not make it in {there}",
                f"make it as root: install -d -m 700 -o {user_name(os.geteuid())} {path}",
            )
        return
    except NotADirectoryError:
        yield Finding("data directory", "problem", f"{path} is no directory", "set another data_dir")
        return
    except PermissionError:
        yield _foreign(case, path)
        return
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o022:
        found = f"others may write to {path} (mode {mode:o}): no daemon starts in it"
        yield Finding("data directory", "problem", found, f"chmod go-w {path}")
    elif foreign := sorted(set(names) - {LOCK, MARK + ".tmp"}) if MARK not in names else []:
        found = f"{path} is not empty and not ours: it holds {foreign[0]!r}"
        yield Finding("data directory", "problem", found, "set another data_dir")
    elif os.geteuid() not in (0, status.st_uid):
        yield _foreign(case, path)
    else:
        yield Finding("data directory", "ok", f"{path}, of {user_name(status.st_uid)}")


def _foreign(case: Case, path: Path) -> Finding:
    owner = user_name(nearest_there(path).stat().st_uid)
    found = f"{path} belongs to {owner}, and you are {user_name(os.geteuid())}"
    level: Level = "note" if case.status is not None else "warning"
    return Finding(
        "data directory", level, found, f"run this and the daemon as {owner}, or set another data_dir"
    )


def socket(case: Case) -> Iterator[Finding]:
    """Does a daemon answer, and may the engine of this user ask it?"""
    try:
        owner = case.socket.stat().st_uid
    except OSError:
        owner = None
    if case.status is not None:
        yield Finding(
            "socket", "ok", f"{case.socket}, of {user_name(owner) if owner is not None else 'nobody'}"
        )
        return
    if owner is not None and os.geteuid() not in (0, owner):
        found = f"{case.socket} belongs to {user_name(owner)}, and you are {user_name(os.geteuid())}"
        who = " or ".join(dict.fromkeys((user_name(owner), "root")))
        yield Finding("socket", "problem", found, f"run engine and command as {who}")
        return
    pid = _holder(case)
    if pid is not None:
        found = f"pid {pid} runs, and does not answer at {case.socket}: {case.unreachable}"
        action = "does it serve another socket_path? Else its log says why; it may be stopped with kill -9"
        yield Finding("socket", "problem", found, action)
        return
    yield Finding("socket", "note", case.unreachable, "if it should run: kvstore serve, or name its --socket")


def _holder(case: Case) -> int | None:
    """The daemon that has the data directory, by what is written in its lock; the lock itself is not touched."""
    if case.data_dir is None:
        return None
    try:
        text = (case.data_dir / LOCK).read_text(errors="replace").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and is_ours(int(text), case.proc) else None


def descriptors(case: Case) -> Iterator[Finding]:
    """One for each connection, and some for files."""
    connections = case.config.door.connections_max if case.config is not None else 0
    soft, who = (
        resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "this shell",
    )  # a daemon raises it as far as it may
    if case.pid is not None:
        try:
            text = (case.proc / str(case.pid) / "limits").read_text()
        except OSError:
            return
        words = next(line for line in text.splitlines() if line.startswith("Max open files")).split()
        soft, who = int(words[3]) if words[3].isdigit() else resource.RLIM_INFINITY, "the daemon"
    if soft != resource.RLIM_INFINITY and soft < connections + DOCTOR_SPARE_FILES:
        found = f"{who} may have {soft} open files; {connections} connections may come"
        yield Finding("open files", "warning", found, "ulimit -n 65536, or LimitNOFILE=65536 in the unit")
    else:
        yield Finding("open files", "ok", "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,}")


def web(case: Case) -> Iterator[Finding]:
    """Does the web of this daemon answer at its port, or somebody else?"""
    if case.config is None or not case.config.web.listen or case.config.web_tls is not None:
        return  # under certificates it would want to see one of ours
    listen = parse_listen(case.config.web.listen)
    if not listen.port:
        return
    who, pid = _who_answers(listen), _holder(case)
    if who == _SILENT and (case.status is not None or pid is not None):
        action = "is `kvstore web` stopped, or without CPU? Else another program has the port: ss -ltnp"
        yield Finding("web", "warning", f"{listen} is open, and nobody answers there: no metrics", action)
    elif case.status is None:
        its = instance_of(case.data_dir) if case.data_dir is not None else None
        if pid is not None and who in (its or "kvstore", "kvstore"):  # with its last figures
            yield Finding("web", "ok", f"http://{listen}/ answers, for pid {pid}")
        elif who is not None:
            found = f"{listen} is taken already: a daemon that starts has no metrics"
            yield Finding("web", "warning", found, "set another web.listen, or end what listens there")
        else:
            yield Finding("web", "ok", f"{listen} is free")
    elif who == case.status["daemon"]["instance"]:
        yield Finding("web", "ok", f"http://{listen}/ answers")
    elif who is None:
        action = "its log says why; `kvstore config get web.listen` says which address it has"
        yield Finding("web", "warning", f"nothing answers at http://{listen}/: no metrics", action)
    else:
        found = f"{listen} is taken by {'another kvstore' if who else 'another program'}: no metrics of this daemon"
        yield Finding("web", "warning", found, "set another web.listen")


def _who_answers(listen: Listen) -> str | None:
    """The instance whose web this is, "" for another program, None for nobody, _SILENT for who says nothing."""
    anywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 where to ask one that listens everywhere
    host = anywhere.get(listen.host, listen.host)
    connection = http.client.HTTPConnection(host, listen.port, timeout=DOCTOR_ANSWER_S)
    try:
        try:
            connection.connect()
        except OSError:
            return None
        connection.request("GET", "/live.json")
        told = json.loads(connection.getresponse().read(1 << 22))
        return str((told["live"] or {}).get("instance", "kvstore"))
    except TimeoutError:
        return _SILENT
    except (OSError, ValueError, KeyError, TypeError, AttributeError, http.client.HTTPException):
        return ""
    finally:
        connection.close()
