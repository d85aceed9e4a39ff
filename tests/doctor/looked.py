"""What the doctor says, by what was looked at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvstore.daemon.config.config import Config
from kvstore.tools.doctor.examine import Check
from kvstore.tools.doctor.findings import Case, Finding
from tests.running import kvstore

NOW_S = 1_795_100_523.0
Findings = list[dict[str, str]]


def doctor(*arguments: str | Path, code: int, **extra: str) -> Findings:
    """What the command found; it ended with this exit code and without a word on stderr."""
    done = kvstore("doctor", "-o", "json", *arguments, **extra)
    assert (done.returncode, done.stderr) == (code, ""), (done.stdout, done.stderr)
    return findings(done.stdout)


def findings(text: str) -> Findings:
    answer: dict[str, Any] = json.loads(text)
    assert set(answer) == {"ok", "problems", "warnings", "notes", "findings"}
    for finding in answer["findings"]:
        assert set(finding) == {"check", "level", "found", "action"}
        assert finding["found"] and "\n" not in finding["found"] + finding["action"]
        assert bool(finding["action"]) == (finding["level"] != "ok"), finding
    return answer["findings"]  # type: ignore[no-any-return]


def of(found: Findings, check: str, level: str = "") -> list[str]:
    """What was found there, on this level or on any."""
    return [f["found"] for f in found if f["check"] == check and level in ("", f["level"])]


def case(path: Path, **changes: Any) -> Case:
    """A case that is all made up; nothing of this machine is in it but what a check asks the kernel itself."""
    config = Config.model_validate({"data_dir": str(path), **changes.pop("settings", {})})
    values: dict[str, Any] = {"config": config, "unreachable": "nobody there", **changes}
    return Case(path / "s", lambda: NOW_S, **values)


def only(check: Check, looked_at: Case) -> Finding:
    """The one thing that a check finds."""
    (found,) = _all(check, looked_at)
    return found


def levels(check: Check, looked_at: Case) -> list[str]:
    return [finding.level for finding in _all(check, looked_at)]


def _all(check: Check, looked_at: Case) -> Iterator[Finding]:
    return check(looked_at)
