"""The command line without a daemon: what is said about wrong words, and the small commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.daemon.config.config_sources import load
from kvstore.tools.cli import COMMANDS, main, module_of
from tests.running import ROOT, environment, kvstore


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["sttaus"], "unknown command sttaus: did you mean status?"),
        (
            ["--verbose"],
            "unknown option --verbose: options stand behind a command (kvstore --help lists them)",
        ),
        ([], "no command (kvstore --help lists them)"),
        (
            ["status", "--socket-path"],
            "status: unrecognized arguments: --socket-path: did you mean --socket? (see kvstore status",
        ),
        (["status", "-o", "yaml"], "status: argument -o/--output: invalid choice: 'yaml'"),
        (["web", "--listen=127.0.0.1:1", "--child=x,json", "--socket=s"], "web: --child x,json: "),
        (["web", "--listen=127.0.0.1:1", "--child=info,y", "--socket=s"], "web: --child info,y: "),
        (["config", "shwo"], "config: argument VERB: invalid choice: 'shwo'"),
        (["config", "check", "--set", "dram.huge=1"], "--set dram.huge=1: unknown key dram.huge: "),
        (["serve", "--set", "dram.capacity_bytes=3GB"], "unit 'GB' is ambiguous: write GiB"),
    ],
)
def test_a_wrong_word_is_one_line_and_exit_code_2(arguments: list[str], says: str) -> None:
    """Wrong usage says in one line what is wrong; nothing goes to stdout; no traceback."""
    done = kvstore(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert done.stderr.startswith("kvstore: ")
    assert done.stderr.count("\n") == 1


def test_a_missing_configuration_file_is_not_found(tmp_path: Path) -> None:
    """--config of a file that is not there: exit code 3."""
    done = kvstore("serve", "--config", tmp_path / "kvstore.toml")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == f"kvstore: {tmp_path}/kvstore.toml: no such configuration file\n"


@pytest.mark.parametrize(
    "words", [["status", "--socket", "x.sock"], ["config", "check", "--config", "x.toml"]]
)
def test_a_directory_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """A relative path in a directory that somebody has removed meanwhile: one line, exit code 3."""
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    here.rmdir()
    assert main(words) == 3
    assert capsys.readouterr().err == "kvstore: the directory that you are in does not exist any more\n"


def test_an_unknown_variable_stops_every_command_that_reads_settings() -> None:
    """A mistyped environment variable is refused by name."""
    done = kvstore("config", "check", KVSTORE_DRAM__CAPACITY="1GiB")
    assert done.returncode == 2
    assert done.stderr == (
        "kvstore: environment: unknown variable KVSTORE_DRAM__CAPACITY: "
        "did you mean KVSTORE_DRAM__CAPACITY_BYTES?\n"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    """Each registered command exists, and its --help starts with its own usage."""
    done = kvstore(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: kvstore {command}")
    assert (module_of(command).__doc__ or "").splitlines()[0] in done.stdout


def test_the_overview_lists_every_command() -> None:
    """kvstore --help is complete."""
    done = kvstore("--help")
    assert done.returncode == 0
    assert all(f"  {name} " in done.stdout and summary in done.stdout for name, summary in COMMANDS.items())


def test_version_tells_what_it_runs_on() -> None:
    """version -o json has the documented fields."""
    done = kvstore("version", "-o", "json")
    answer = json.loads(done.stdout)
    assert set(answer) == {"kvstore", "python", "kernel", "packages"}
    assert set(answer["packages"]) == {"msgspec", "xxhash", "uvloop", "vllm", "torch"}
    assert answer["packages"]["msgspec"].count(".") == 2


@pytest.mark.parametrize("command", ["version", "--help", "status --help"])
def test_small_commands_load_nothing_heavy(command: str) -> None:
    """Asking for a version or for help imports neither engine, settings nor rich."""
    script = (
        "import sys; from kvstore.tools.cli import main\n"
        f"try: main({command.split()!r})\nexcept SystemExit: pass\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment(), cwd=ROOT
    )
    assert done.returncode == 0
    assert not {"pydantic", "rich", "vllm", "torch"} & set(eval(done.stderr))


def test_config_show_tells_the_source_of_each_value(tmp_path: Path) -> None:
    """Value, layer, and where in it; for programs."""
    file = tmp_path / "kvstore.toml"
    file.write_text('[nvme]\ndirectories = ["/mnt/a"]\n')
    done = kvstore(
        "config", "show", "-o", "json", "--config", file, "--data-dir", tmp_path, KVSTORE_LOG__LEVEL="debug"
    )
    answer = json.loads(done.stdout)
    assert answer["file"] == str(file)
    values = answer["values"]
    assert values["nvme.directories"] == {"value": ["/mnt/a"], "source": "file", "where": f"{file}:2"}
    assert values["log.level"] == {"value": "debug", "source": "env", "where": "KVSTORE_LOG__LEVEL"}
    assert values["data_dir"] == {"value": str(tmp_path), "source": "flag", "where": "--data-dir"}
    assert values["dram.prefault"] == {"value": True, "source": "default", "where": "default"}


def test_what_config_show_prints_is_a_configuration(tmp_path: Path) -> None:
    """The TOML form, saved to a file, gives the same settings again."""
    sets = [
        "--set",
        "dram.capacity_bytes=3GiB",
        "--set",
        "nvme.directories=/mnt/a,/mnt/b",
        "--set",
        "dram.prefault=off",
    ]
    done = kvstore("config", "show", *sets)
    file = tmp_path / "kvstore.toml"
    file.write_text(done.stdout)
    assert (
        load(file, environment={}).config == load(None, sets[1::2], environment={"KVSTORE_CONFIG": ""}).config
    )


def test_a_closed_pipe_is_no_traceback() -> None:
    """`kvstore config show | head -1` ends quietly."""
    command = (
        f"{sys.executable} -m kvstore config show | head -n 1; {sys.executable} -m kvstore version | true"
    )
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=environment(), cwd=ROOT
    )
    assert "Traceback" not in done.stderr
    assert done.stdout.startswith("data_dir = ")


def test_no_daemon_is_exit_code_4(tmp_path: Path) -> None:
    """status and fsck say which socket nobody answers at."""
    for arguments in (["status"], ["status", "-o", "json"], ["fsck"]):
        done = kvstore(*arguments, "--socket", tmp_path / "s")
        assert (done.returncode, done.stdout) == (4, "")
        assert str(tmp_path / "s") in done.stderr
        assert done.stderr.count("\n") == 1
