"""What is built and installed: the wheel, the source, and the command from it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from kvstore.tools.cli import COMMANDS
from tests.running import ROOT, environment

BUILD_S_MAX = 120
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
IMPORTED = {"kvstore", "coldstart", "tiers", "replication", "connectors"}  # docs/install.md names them


def build(source: Path, into: Path) -> tuple[Path, Path]:
    """The wheel and the source distribution of a tree, built offline with what is installed."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(into)],
        cwd=source,
        check=True,
        capture_output=True,
        timeout=BUILD_S_MAX,
    )
    (wheel,) = into.glob("*.whl")
    (sdist,) = into.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with the wheel; what it depends on is borrowed from ours."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=BUILD_S_MAX
    )
    python = venv / "bin/python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(built[0])],
        check=True,
        timeout=BUILD_S_MAX,
    )  # fmt: skip
    (site,) = (venv / "lib").glob("python*/site-packages")
    # A plain line: a .pth file in there, that of the editable project, is not followed.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def ran(python: Path, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """The installed command, outside of the checkout."""
    bare = {name: value for name, value in environment(**extra).items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(python.parent / "kvstore"), *words],
        cwd=python.parent,
        env=bare,
        capture_output=True,
        text=True,
        timeout=BUILD_S_MAX,
    )


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_has_what_is_imported_and_nothing_else(built: tuple[Path, Path]) -> None:
    """Four packages, each marked as typed, and the metadata: no tests, no caches, nothing recorded, no link."""
    wheel, _ = built
    tops = {name.split("/")[0] for name in names(wheel)}
    metadata = {name for name in tops if name.endswith(".dist-info")}
    assert tops - metadata == IMPORTED
    assert len(metadata) == 1
    assert {f"{package}/py.typed" for package in IMPORTED} <= names(wheel)
    parts = {part for name in names(wheel) for part in name.split("/")}
    assert not parts & {"tests", "benchmarks", ".cache", "__pycache__", ".venv", ".git", "traces"}
    assert wheel.stat().st_size < 4 << 20


def test_every_file_of_the_packages_is_in_the_wheel(built: tuple[Path, Path]) -> None:
    """Data of packages too: pages, the sample configuration, documents, files to deploy it with."""
    ours = {
        path.relative_to(ROOT).as_posix()
        for package in IMPORTED
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    shared = {
        f"kvstore/share/{path.relative_to(ROOT).as_posix()}"
        for place in ("docs", "deploy")
        for path in (ROOT / place).rglob("*")
        if path.is_file()
    }
    missing = (ours | shared) - names(built[0])
    assert not missing, sorted(missing)


def test_the_metadata_is_that_of_the_project(built: tuple[Path, Path]) -> None:
    """Name, licence, extras; and the command and vLLM's plugin are found under the old name."""
    with zipfile.ZipFile(built[0]) as archive:
        (root,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        metadata = archive.read(f"{root}/METADATA").decode()
        points = archive.read(f"{root}/entry_points.txt").decode()
        assert f"{root}/licenses/LICENSE" in archive.namelist()
    head = metadata.split("\n\n")[0].splitlines()
    assert f"Name: {PROJECT['name']}" in head
    assert "License-Expression: Apache-2.0" in head
    extras = {line.removeprefix("Provides-Extra: ") for line in head if line.startswith("Provides-Extra")}
    assert extras == set(PROJECT["optional-dependencies"])
    assert "kvstore = kvstore.tools.cli:main" in points
    assert "kvstore = connectors.vllm_plugin:register" in points


def test_the_source_builds_the_same_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Built again, from the source distribution in another directory, the wheel is the same to the byte."""
    wheel, sdist = built
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    assert not list(tree.rglob("__pycache__")) + list(tree.glob(".cache*")) + list(tree.glob("*/traces"))
    assert (tree / "requirements/base.lock").is_file() and (tree / "tests/conftest.py").is_file()
    again, _ = build(tree, tmp_path / "dist")
    assert hashlib.sha256(again.read_bytes()).digest() == hashlib.sha256(wheel.read_bytes()).digest()


def test_every_command_of_the_installed_wheel_answers(installed: Path) -> None:
    """Each command prints its help, with the place where the documents that it names are."""
    share = Path(ran(installed, "--help").stdout.rpartition("deploy it with (deploy/): ")[2].strip())
    assert share.parts[-2:] == ("kvstore", "share")
    assert installed.parent.parent in share.parents
    assert (share / "deploy/kvstore.service").is_file() and (share / "docs/cli.md").is_file()
    code = (
        "import contextlib, io, json, sys\n"
        "from kvstore.tools.cli import COMMANDS, main\n"
        "said = {}\n"
        "for command in COMMANDS:\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "        code = main([command, '--help'])\n"
        "    said[command] = [code, out.getvalue()]\n"
        "import kvstore\n"
        "json.dump([kvstore.__file__, said], sys.stdout)\n"
    )
    done = subprocess.run(
        [str(installed), "-I", "-c", code], capture_output=True, text=True, check=True, timeout=BUILD_S_MAX
    )
    where, said = json.loads(done.stdout)
    assert Path(where).is_relative_to(installed.parent.parent)
    assert set(said) == set(COMMANDS)
    for command, (exit_code, text) in said.items():
        assert exit_code == 0 and f"usage: kvstore {command}" in text, command
        if "docs/" in text or "deploy/" in text:
            assert f"docs/ and deploy/ are in {share}" in text, command


def test_the_installed_wheel_writes_its_sample_and_serves(installed: Path, tmp_path: Path) -> None:
    """`config init` needs no checkout, and what it wrote is valid and what deploy/ has."""
    file = tmp_path / "kvstore.toml"
    done = ran(installed, "config", "init", "--config", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    assert file.read_bytes() == (ROOT / "deploy/kvstore.toml").read_bytes()
    checked = ran(installed, "config", "check", "--config", str(file))
    assert (checked.returncode, checked.stderr) == (0, "")
    assert ran(installed, "version").stdout.startswith("kvstore ")
