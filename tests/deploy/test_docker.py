"""The Dockerfile: sound by its linter, and given everything that it builds from and nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.running import ROOT, TIMEOUT_S

DOCKERFILE = ROOT / "deploy/docker/Dockerfile"
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent))


def instructions() -> list[tuple[str, str]]:
    """Its instructions: the word and the rest, lines that go on put together."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line.strip())]


def given(name: str) -> bool:
    """Whether .dockerignore lets a path of the checkout through; later lines win."""
    is_given = True
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.removeprefix("!")
        if not line or line.startswith("#"):
            continue
        regex = re.escape(pattern).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if re.fullmatch(f"{regex}(/.*)?", name):
            is_given = line.startswith("!")
    return is_given


@pytest.mark.skipif(HADOLINT is None, reason="hadolint has no binary for this machine")
def test_the_linter_finds_nothing() -> None:
    """hadolint has nothing to say, not even in its lowest severity."""
    done = subprocess.run(
        [str(HADOLINT), "--failure-threshold", "style", str(DOCKERFILE)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_it_is_given_what_it_copies_and_what_the_wheel_is_made_of() -> None:
    """.dockerignore lets through the locks, every package, and all that goes into the wheel; no environment, no tests, no git."""
    copied = [
        word
        for op, rest in instructions()
        if op == "COPY" and "--from" not in rest
        for word in rest.split()[:-1]
    ]
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]
    wheel = tool["build"]["targets"]["wheel"]
    rooms = [name for name in wheel["packages"] if (ROOT / name).is_dir()]
    needed = [
        *copied,
        *(f"{room}/__init__.py" for room in rooms),
        *wheel["force-include"],
        "pyproject.toml",
        "README.md",
        "LICENSE",
    ]
    assert [name for name in needed if name != "." and not given(name)] == []
    assert all((ROOT / name).exists() for name in needed)
    kept = [
        ".venv/bin/python",
        ".git/config",
        ".cache/x",
        "tests/conftest.py",
        "kvstore/__pycache__/x.pyc",
        "benchmarks/scale.py",
        "dist/x",
    ]
    assert [name for name in kept if given(name)] == []


def test_it_runs_as_a_user_and_is_stopped_and_asked_the_right_way() -> None:
    """Never root, SIGTERM, and a health check that asks the daemon itself."""
    last = instructions()[max(n for n, (word, _) in enumerate(instructions()) if word == "FROM") :]
    said = dict(last)
    assert said["USER"].split(":")[0].isdigit() and said["USER"] != "0:0"
    assert said["STOPSIGNAL"] == "SIGTERM"
    assert said["HEALTHCHECK"].endswith('CMD ["kvstore", "ping"]')
    assert (said["ENTRYPOINT"], said["CMD"]) == ('["kvstore"]', '["serve"]')
    uid = said["USER"].split(":")[0]
    assert uid in (ROOT / "deploy/kubernetes/daemonset.yaml").read_text(encoding="utf-8")
