"""A file for somebody who is to help: what the doctor found, what the daemon says, the system below. Without secrets.

    doctor.json  status.json  report.json  retention.json  settings.json  regions.json  environment.json
    versions.json  log.txt  meminfo.txt  cgroup.txt  mounts.txt  limits.txt

Everything goes through one scrubber (kvstore/tools/doctor/scrub.py), but for what only the kernel and we write. No prompt, no KV bytes and no file of a model is ever in
one: the daemon itself does not know them. Mode 0600; what is there is not written over.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from kvstore.constants import MIB
from kvstore.daemon.config.config import keys, plain, value_of
from kvstore.tools.doctor.findings import Case, read_text
from kvstore.tools.doctor.scrub import Scrubber, names_in, names_in_log, secrets_in, secrets_of
from tiers.dram import memory_limits

BUNDLE_LOG_LINES = 2000
BUNDLE_MEMBER_BYTES_MAX = 8 * MIB  # of one file in it
BUNDLE_COMMAND_S = 10.0  # for journalctl

_UNITS = ("kvstore", "kvstore-mirror")
_OF_THE_KERNEL = ("meminfo", "limits")  # in which nobody else writes


@dataclass(frozen=True, slots=True)
class Asked:
    """What else the daemon was asked; None where none answered."""

    report: Mapping[str, Any] | None = None
    retention: Mapping[str, Any] | None = None
    settings: list[dict[str, Any]] | None = None


def pack(
    path: Path, case: Case, answer: Mapping[str, Any], asked: Asked, *, with_names: bool = False
) -> dict[str, int]:
    """Write it; the members with their bytes. Raises OSError."""
    documents, texts = _documents(case, answer, asked), _texts(case)
    of_daemon = _environment_of(case)
    hidden = {"versions": None, "file": _parsed(case.config_file) if case.config_file is not None else None}
    secrets = {*secrets_of(os.environ), *secrets_of(of_daemon), *secrets_in({**documents, **hidden})}
    spaces = _parsed(case.data_dir / "namespaces.json", json.loads) if case.data_dir is not None else None
    names = [*names_in([*documents.values(), spaces]), *names_in_log(texts.get("log", ""))]
    scrubber = Scrubber(secrets, kept=[name for _, name in names]) if with_names else Scrubber(secrets, names)
    members = {
        f"{name}.json": json.dumps(scrubber.document(document), indent=1, ensure_ascii=False)
        for name, document in documents.items()
    }
    members["versions.json"] = json.dumps(documents["versions"], indent=1)
    members["environment.json"] = json.dumps(scrubber.environment({**os.environ, **of_daemon}), indent=1)
    members |= {
        f"{name}.txt": text if name in _OF_THE_KERNEL else scrubber.text(text) for name, text in texts.items()
    }
    return _write(path, members, case.clock())


def _write(path: Path, members: Mapping[str, str], now_s: float) -> dict[str, int]:
    packed = io.BytesIO()
    sizes = {}
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in members.items():
            content = text.encode(errors="backslashreplace")[-BUNDLE_MEMBER_BYTES_MAX:]
            entry = tarfile.TarInfo(f"kvstore-doctor/{name}")
            entry.size, entry.mtime, entry.mode = len(content), int(now_s), 0o600
            archive.addfile(entry, io.BytesIO(content))
            sizes[entry.name] = len(content)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(packed.getbuffer())
    except OSError:
        path.unlink()
        raise
    return sizes


def _documents(case: Case, answer: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    """What is JSON in it, as it is."""
    found: dict[str, Any] = {"doctor": answer, "versions": _versions()}
    told = {"status": case.status, "report": asked.report, "retention": asked.retention}
    found |= {name: document for name, document in told.items() if document is not None}
    if asked.settings is not None:
        found["settings"] = {each["key"]: each["value"] for each in asked.settings}
    elif case.config is not None:
        found["settings"] = {key: plain(value_of(case.config, key)) for key in keys()}
    if case.config is not None and case.config.regions_file:
        found["regions"] = _parsed(Path(case.config.regions_file))
    return found


def _parsed(path: Path, parse: Callable[[str], Any] = tomllib.loads) -> Any:
    try:
        if not path.is_file() or path.stat().st_size > BUNDLE_MEMBER_BYTES_MAX:
            return {"could not be read": "no file, or too large"}
        return parse(path.read_text(errors="replace"))
    except (OSError, ValueError, RecursionError) as error:
        return {"could not be read": type(error).__name__}


def _versions() -> dict[str, Any]:
    from kvstore import __version__

    packages = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    uname = os.uname()
    return {
        "kvstore": __version__,
        "system": f"{uname.sysname} {uname.release} {uname.machine}",
        "distribution": read_text(Path("/etc/os-release")).splitlines()[:2],
        "packages": dict(sorted(packages.items())),
    }


def _environment_of(case: Case) -> dict[str, str]:
    """Of the daemon's process, where we may read it."""
    if case.pid is None:
        return {}
    pairs = (line.partition("=") for line in read_text(case.proc / str(case.pid) / "environ").split("\0"))
    return {name: value for name, _, value in pairs if name}


def _texts(case: Case) -> dict[str, str]:
    process = case.proc / (str(case.pid) if case.pid is not None else "self")
    limits = "\n".join(map(str, memory_limits.limits(case.proc, process.name)))
    texts = {
        "log": _log(),
        "meminfo": read_text(case.proc / "meminfo"),
        "cgroup": f"{read_text(process / 'cgroup')}\n{limits}",
        "mounts": read_text(process / "mounts"),
        "limits": read_text(process / "limits"),
    }
    return {name: text for name, text in texts.items() if text}


def _log() -> str:
    """The last lines of our units, where systemd keeps them for us."""
    units = [f"--unit={unit}" for unit in _UNITS]
    words = [
        "journalctl",
        *units,
        f"--lines={BUNDLE_LOG_LINES}",
        "--no-pager",
        "--quiet",
        "--output=short-iso",
    ]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=BUNDLE_COMMAND_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace")
