"""What the command gets and where it writes: arguments that are no text, a stdout that is full or closed."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.constants import TENANT_CHARS_MAX
from kvstore.tools import cli
from tests.cli.terminal import STYLE, on_terminal
from tests.running import ROOT, TIMEOUT_S, environment, kvstore


def shell(script: str, *arguments: str | Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """A line of bash in which `kvstore` is the command, with what only a shell can redirect."""
    command = f'kvstore() {{ "{sys.executable}" -m kvstore "$@"; }}; {script}'
    return subprocess.run(
        ["bash", "-c", command, "bash", *map(str, arguments)],
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=TIMEOUT_S,
        env=environment(**extra),
        cwd=ROOT,
    )


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "hash_ids": [1, 2]}\n')
    return path


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["explain", "--tokens", "1,2", "--salt", "\udcff"], r"argument salt: not valid UTF-8: \xff"),
        (
            ["explain", "--tokens", "1,2", "--hash-seed", "\udcff"],
            r"argument hash-seed: not valid UTF-8: \xff",
        ),
        (["explain", "a\udcffb"], r"argument prompt: not valid UTF-8: a\xffb"),
        (["quota", "--tenant", "\udcff", "--dram", "1GiB"], r"argument tenant: not valid UTF-8: \xff"),
        (["ttl", "24h", "--tenant", "\udcff\udcfe"], r"argument tenant: not valid UTF-8: \xff\xfe"),
        (["config", "check", "--set", "region=\udcff"], r"argument set: not valid UTF-8: region=\xff"),
        (["replay", "--policy", "\udcff", "t"], r"argument policy: not valid UTF-8: \xff"),
        (["config", "\udcff"], r"argument VERB: invalid choice: '\udcff'"),
        (["\udcff"], r"unknown command \udcff"),
    ],
)
def test_an_argument_that_is_no_text_is_wrong_usage(arguments: list[str], says: str) -> None:
    """Named in a line that can be printed, before anybody is asked."""
    done = kvstore(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_path_may_be_any_bytes(tmp_path: Path) -> None:
    """Files are named by bytes: configuration, socket and data directory are taken as they are."""
    file = tmp_path / "\udcff.toml"
    file.write_text('region = "here"\n')
    done = kvstore("config", "show", "-o", "json", "--config", file, "--data-dir", tmp_path / "\udcfe")
    values = json.loads(done.stdout)["values"]
    assert values["region"] == {"value": "here", "source": "file", "where": f"{file}:1"}
    assert values["data_dir"]["value"] == f"{tmp_path}/\udcfe"
    assert kvstore("status", "--socket", tmp_path / "\udcff").returncode == 4
    assert kvstore("config", "check", "--config", tmp_path / "\udcfd").returncode == 3


@pytest.mark.parametrize("words", [["ttl", "24h"], ["quota", "--dram", "1GiB"]])
def test_a_tenant_is_as_long_as_is_allowed(tmp_path: Path, words: list[str]) -> None:
    """A longer name is wrong usage, told without a word of the protocol; the longest goes to the daemon."""
    done = kvstore(*words, "--tenant", "x" * (TENANT_CHARS_MAX + 1), "--socket", tmp_path / "s")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "argument --tenant: 1025 characters, at most 1024 are allowed: xxx" in done.stderr
    assert kvstore(*words, "--tenant", "x" * TENANT_CHARS_MAX, "--socket", tmp_path / "s").returncode == 4


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["version", "config show", "--help", "status --help", "replay $1 -o json"])
def test_a_full_stdout_is_said(trace: Path, words: str, unbuffered: str) -> None:
    """Data that could not be written is a failure in one line, whenever it is noticed."""
    done = shell(f"kvstore {words} >/dev/full", trace, PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if not line.startswith("replay: ")]
    assert said == ["kvstore: cannot write to stdout: No space left on device"]


@pytest.mark.parametrize("words", ["version", "config show", "config check", "--help", "status --help"])
def test_a_closed_stdout_is_said(words: str) -> None:
    """Nothing is done when nobody would learn of it."""
    done = shell(f"kvstore {words} >&-")
    assert done.returncode == 1
    assert done.stderr == "kvstore: stdout is closed; where it is not wanted, redirect it to /dev/null\n"


def test_a_closed_stderr_leaves_stdout_alone(trace: Path) -> None:
    """Progress and problems are for stderr: without one they go nowhere."""
    done = shell("kvstore replay $1 -o json 2>&-", trace)
    assert done.returncode == 0
    assert json.loads(done.stdout)["trace"]["requests"] == 1
    done = shell("kvstore sttaus 2>&-")
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_stderr_changes_no_exit_code(trace: Path, unbuffered: str) -> None:
    """What cannot be said is not said, and nothing of it comes to stdout."""
    for words, code in (
        ("replay $1 -o json", 0),
        ("sttaus", 2),
        ("replay /nowhere/x", 3),
        ("ping --socket /nowhere/x", 4),
    ):
        done = shell(f"kvstore {words} 2>/dev/full", trace, PYTHONUNBUFFERED=unbuffered)
        assert (done.returncode, bool(done.stdout)) == (code, code == 0)


@pytest.mark.parametrize(
    "words", [["replay"], ["ping", "--socket"], ["status", "--config"], ["help"], ["model", "show"]]
)
def test_a_name_with_a_line_feed_is_said_on_one_line(words: list[str], tmp_path: Path) -> None:
    """Whoever reads stderr line by line reads all of it."""
    done = kvstore(*words, tmp_path / "a\nb")
    assert (done.returncode in (2, 3, 4), done.stderr.count("\n")) == (True, 1)
    assert "a\ufffdb" in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["config show", "--help", "status --help", "version"])
def test_a_reader_that_had_enough_hears_nothing(words: str, unbuffered: str) -> None:
    """A closed pipe ends the command quietly, with exit code 1."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "kvstore", *words.split()],
            stdout=pipe,
            stderr=subprocess.PIPE,
            timeout=TIMEOUT_S,
            env=environment(PYTHONUNBUFFERED=unbuffered),
        )
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_bug_of_ours_is_not_blamed_on_stdout() -> None:
    """An OSError of anything else stays what it is while stdout can be written."""
    script = (
        "import kvstore.tools.cli as cli\n"
        "def broken(words): raise OSError(5, 'Input/output error')\n"
        "cli._run = broken\n"
        "cli.main([])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment(), cwd=ROOT
    )
    assert done.returncode == 1
    assert "OSError: [Errno 5]" in done.stderr and "cannot write" not in done.stderr


@pytest.mark.parametrize(
    ("number", "code"), [(errno.EACCES, 2), (errno.ENOTDIR, 2), (errno.ENOENT, 3), (errno.EIO, 1)]
)
def test_a_path_that_cannot_be_looked_at_is_no_bug(
    number: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Below a folder that is shut, on a disk that fails: wherever it is met, one line with the path and what is wrong."""

    def broken(words: list[str]) -> int:
        raise OSError(number, os.strerror(number), "/shut/x")

    monkeypatch.setattr(cli, "_run", broken)
    assert cli.main(["x"]) == code
    assert capsys.readouterr() == ("", f"kvstore: /shut/x: {os.strerror(number)}\n")


@pytest.mark.parametrize("of_sigint", ["-", "''"])
def test_sigterm_is_as_control_c(tmp_path: Path, of_sigint: str) -> None:
    """What a command has made for itself is removed, also where whoever started it in the background ignores SIGINT."""
    script = f'trap {of_sigint} INT; exec "{sys.executable}" -m kvstore bench --only dram --dir "$1"'
    running = subprocess.Popen(
        ["bash", "-c", script, "bash", str(tmp_path)], stderr=subprocess.PIPE, text=True, env=environment()
    )
    while not any(tmp_path.iterdir()) and running.poll() is None:
        time.sleep(0.01)  # the time limit is pytest's
    running.terminate()
    _, said = running.communicate(timeout=TIMEOUT_S)
    # Where it comes while Python runs a string (a dataclass is made of one), Python ends itself by SIGINT: 130 for a shell.
    assert running.returncode in (130, -signal.SIGINT) and not list(tmp_path.iterdir())
    assert all(line.startswith("bench: ") for line in said.splitlines())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_a_finalizer_is_not_lost(number: signal.Signals) -> None:
    """Python drops what is raised there."""
    script = (
        "import signal, sys, time\n"
        "import kvstore.tools.cli as cli\n"
        "class Dropped:\n"
        f"    def __del__(self): signal.raise_signal({number:d})\n"
        "def run(words):\n"
        "    Dropped()\n"
        "    time.sleep(1000)\n"
        "cli._run = run\n"
        "sys.argv = ['kvstore', 'bench']\n"
        "sys.exit(cli.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment(),
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_stdout_of_few_characters_escapes_the_others() -> None:
    """Text that an old locale cannot show is written all the same."""
    done = kvstore("report", "--help", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    done = shell("kvstore ttl --help", PYTHONIOENCODING="ascii")
    assert (done.returncode, "\\u2026" in done.stdout) == (0, True)


def test_a_closed_stdin_is_said() -> None:
    """`explain -` has nothing to read there."""
    done = shell("kvstore explain - <&-")
    assert (done.returncode, done.stderr) == (2, "kvstore: explain: -: stdin is closed\n")


@pytest.mark.parametrize("term", ["", "unknown", "dumb"])
def test_a_terminal_of_which_nothing_is_known(trace: Path, term: str) -> None:
    """It gets the same lines, without a single style."""
    words = ["replay", trace, "--policy", "lru"]
    code, plain = on_terminal(120, *words, term=term, with_styles=True)
    assert code == 0 and "\x1b" not in plain
    code, styled = on_terminal(120, *words, with_styles=True)
    assert code == 0 and STYLE.search(styled)
