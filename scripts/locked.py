"""Installs pinned packages into the environment that runs this: `VENV/bin/python scripts/locked.py REQUIREMENT… [-r FILE]…`.

By uv, which takes a quarter of pip's time, from the sources that pip is configured with. Where uv cannot be had, or fails, by pip.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

UV = "uv>=0.9"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def configured() -> dict[str, list[str]]:
    """What pip is told by its files and by the environment: values by key, those of the environment first. Raises
    CalledProcessError where pip cannot read them."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout
    found: dict[str, list[str]] = {}
    for name, _, value in (line.partition("=") for line in listed.splitlines()):
        found.setdefault(name.rpartition(".")[2], []).extend(str(ast.literal_eval(value)).split())
    return found


def sources() -> dict[str, str]:
    """pip's sources in uv's words. Whatever else pip is told is uv's to fail with. Raises CalledProcessError."""
    told = configured()
    lists = {"UV_EXTRA_INDEX_URL": " ".join(told.get("extra-index-url", []))}
    lists["UV_FIND_LINKS"] = ",".join(dict.fromkeys(told.get("find-links", [])))
    firsts = {"UV_DEFAULT_INDEX": "index-url", "UV_NO_INDEX": "no-index", "SSL_CERT_FILE": "cert"}
    ones = {name: told[key][0] for name, key in firsts.items() if key in told}
    ways = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # a pinned version may lie in any of them
    return {name: value for name, value in (lists | ones | ways).items() if value}


def by_uv(words: list[str]) -> bool:
    uv = Path(sys.executable).parent / "uv"
    if not uv.exists():
        subprocess.run([*PIP, "install", "-q", UV], stderr=subprocess.DEVNULL, check=False)
    if not uv.exists():
        return False
    command = [uv, "pip", "install", "-q", "--no-deps", "--python", sys.executable, *words]
    try:
        environment = {**os.environ, **sources()}
    except subprocess.CalledProcessError:  # pip says why
        return False
    return not subprocess.run(command, env=environment, stderr=subprocess.DEVNULL, check=False).returncode


def main() -> int:
    words = sys.argv[1:]
    if by_uv(words):
        return 0
    # Nothing is compiled before it is imported: that is half of the work, and most of it is never imported.
    return subprocess.run(
        [*PIP, "install", "-q", "--no-compile", "--no-deps", *words], check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
