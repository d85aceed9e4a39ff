"""Whatever is wrong in a command, a setting or the environment: one line that says so, the right exit code, nothing left behind.

tests/cli/sweeping.py generates it from the parsers. A part of it here; all of it in `make soak` (SWEEP=1).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.client import Client
from kvstore.daemon.config.config import keys, value_of
from kvstore.daemon.config.config_sources import load, variable, written
from kvstore.errors import ConfigError
from tests.cli.sweeping import LINE_CHARS_MAX, OURS
from tests.running import Daemon, Place, environment

EVERY = int(os.environ.get("SWEEP", "0"))  # each n-th case
SWEEP_S = 1800
# Commands that a running daemon answers.
ASKING = (
    *("ping", "status", "top", "clients", "slow", "report", "explain", "disks", "fsck", "retention", "pin", "unpin", "ttl", "quota"),
    *("prefetch", "clear", "config get", "config set", "config diff", "record", "model load", "model unload", "doctor"),
)  # fmt: skip
TOML = (
    *("true", "-1", "0", "1.5", "nan", "-inf", "9" * 18, "9" * 400, "9" * 6000, '""', '" "', '"naïve-雪-🦙"', r'"a\u0000b"'),
    *(r'"\u001b[2Jx"', '"relative/x"', f'"{"x" * 5000}"', f'"/{"x/" * 3000}"', "[]", "[1]", '[""]', "[[]]", "{a = 1}"),
    *("1979-05-27", '"auto"', '"1GiB"', '"-1GiB"', '"99999999999TiB"', '"nan"', '"s3://x"', '"127.0.0.1:99999"', '"a,b"'),
)  # fmt: skip


def complaints(directory: Path, every: int, socket: str = "", *commands: str) -> list[str]:
    """Of a sweep in a process of its own, which may read no more than its user even where that is root."""
    mortal = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    prefix = mortal if os.geteuid() == 0 and shutil.which("setpriv") else []
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "tests.cli.sweeping", str(directory), socket, *commands],
        capture_output=True,
        text=True,
        timeout=SWEEP_S,
        env=environment(EVERY=str(every)),
    )
    assert done.returncode == 0, done.stderr
    *found, last = done.stdout.splitlines()
    assert json.loads(last)["cases"] > 1000 / every
    return found


def test_each_command_says_in_one_line_what_is_wrong(tmp_path: Path) -> None:
    """Of every command, option and argument: missing, empty, huge, of another kind, not there, not readable, a near name."""
    assert complaints(tmp_path, EVERY or 24) == []


def test_so_does_a_daemon_that_is_asked(place: Place, serve: Callable[..., Daemon], tmp_path: Path) -> None:
    """What only the daemon can know is refused by it, as soon and as clearly; and the daemon serves on."""
    serve(place)
    (tmp_path / "box").mkdir()
    assert complaints(tmp_path / "box", EVERY or 24, str(place.socket), *ASKING) == []
    with Client(place.socket, timeout_s=30, attach=False) as client:
        assert client.check() == []


def cases() -> Iterator[tuple[str, str]]:
    for number, key in enumerate(keys()):
        yield from ((key, text) for text in TOML[number % 5 :: 1 if EVERY else 5])


def test_a_wrong_setting_is_one_line_wherever_it_stands(tmp_path: Path) -> None:
    """In the file and in the environment, of every key: refused with key, place and what is allowed, or taken as it is written."""
    file, nobody = tmp_path / "kvstore.toml", {"KVSTORE_CONFIG": ""}
    for key, text in cases():
        section, _, name = key.rpartition(".")
        file.write_text(f"[{section}]\n{name} = {text}\n" if section else f"{name} = {text}\n")
        named = {variable(key): text.strip('"')} if "\\u0000" not in text else {}
        for given, source, where in ((file, {}, str(file)), (None, {**nobody, **named}, variable(key))):
            problems = problems_of(given, source, key)
            said = "\n".join(problems)
            assert len(said.splitlines()) == len(problems)
            assert not problems or where in said or said.startswith("default: ")  # what it needs beside it
            assert len(said) < LINE_CHARS_MAX + len(where) and not OURS.search(said), said


def problems_of(file: Path | None, environ: dict[str, str], key: str) -> list[str]:
    """None where it is taken, and can be written down again."""
    try:
        loaded = load(file, environment=environ)
    except ConfigError as error:
        return error.problems
    assert written(value_of(loaded.config, key))
    return []


@pytest.mark.parametrize(
    "words", [["ttl", "-1h", "--tenant", "a"], ["quota", "--tenant", "a", "--dram", "-1GiB"]]
)
def test_a_negative_number_is_a_value_and_no_option(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """What is wrong with it is said of it."""
    from kvstore.tools.cli import main

    assert main(words) == 2
    assert f"{next(word for word in words if word.startswith('-1'))}: not a " in capsys.readouterr().err
