"""The small commands around the others: help, ping, completion, a sample configuration; and hints where words are wrong."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.client import Client
from kvstore.daemon.config.config import Config
from kvstore.daemon.config.config_sources import load
from kvstore.tools.cli import COMMANDS, main
from kvstore.units import plural
from tests.running import ROOT, Daemon, Place, environment, kvstore

Serve = Callable[..., Daemon]


def test_help_is_of_a_command() -> None:
    """`kvstore help pin` is `kvstore pin --help`, `kvstore help` the overview; a wrong word has its nearest one."""
    assert kvstore("help", "pin").stdout == kvstore("pin", "--help").stdout != ""
    assert kvstore("help").stdout == kvstore("--help").stdout != ""
    assert kvstore("help", "config", "set").stdout == kvstore("config", "set", "--help").stdout != ""
    done = kvstore("help", "pni")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvstore: unknown command pni: did you mean pin?\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["status", "--sokcet"], "status: unrecognized arguments: --sokcet: did you mean --socket? (see "),
        (
            ["quota", "--tennant=a"],
            "quota: unrecognized arguments: --tennant=a: did you mean --tenant? (see ",
        ),
        (["pin", "abcdef", "--zzzzzz"], "pin: unrecognized arguments: --zzzzzz (see kvstore pin --help)"),
    ],
)
def test_a_wrong_option_has_its_nearest_one(words: list[str], says: str) -> None:
    """One line, exit code 2; nothing is guessed where nothing is near."""
    done = kvstore(*words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert says in done.stderr


def completed(script: Path, *words: str) -> list[str]:
    """What bash offers for the last word."""
    ask = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_kvstore; printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["bash", "-c", ask, "bash", script, "kvstore", *words],
        capture_output=True,
        text=True,
        env=environment(),
    )
    return done.stdout.split()


def test_bash_completes_commands_options_and_choices(tmp_path: Path) -> None:
    """The script is enough by itself: every command, every option of one, and the words that an option allows."""
    script = tmp_path / "kvstore.bash"
    script.write_text(kvstore("completion", "bash").stdout)
    assert set(completed(script, "")) == set(COMMANDS)
    assert completed(script, "unp") == ["unpin"]
    assert completed(script, "clear", "--dry") == ["--dry-run"]
    assert completed(script, "status", "-o", "") == ["table", "json"]
    assert completed(script, "config", "i") == ["init"]
    assert set(completed(script, "help", "p")) == {"ping", "pin", "prefetch"}
    assert "publish" in completed(script, "model", "")
    assert completed(script, "model", "verify", "--de") == ["--deep"]


def test_zsh_and_fish_have_a_script_and_others_are_refused() -> None:
    """They name every option, too; a shell for which there is none is a wrong word."""
    done = kvstore("completion", "zsh")
    assert (
        done.returncode == 0 and done.stdout.startswith("#compdef kvstore\n") and "--dry-run" in done.stdout
    )
    assert "-l dry-run" in kvstore("completion", "fish").stdout
    assert kvstore("completion", "csh").returncode == 2


def test_ping_says_who_answers(place: Place, serve: Serve) -> None:
    """Socket, version, pid, instance, uptime and round trip, in words and in the fields of the manual; 4 and a hint once
    nobody answers."""
    daemon = serve(place)
    done = kvstore("ping", "-o", "json", "--socket", place.socket)
    answer = json.loads(done.stdout)
    text = (ROOT / "docs" / "cli.md").read_text()
    block = text.partition("## kvstore ping")[2].partition("```json")[2].partition("```")[0]
    assert set(json.loads(block)) == set(answer)
    assert answer["pid"] == daemon.process.pid and answer["socket"] == str(place.socket)
    assert 0 < answer["round_trip_s"] < 5 and answer["uptime_s"] >= 0
    with Client(place.socket, attach=False, timeout_s=30) as client:
        assert answer["instance"] == client.status()["daemon"]["instance"]
    line = kvstore("ping", "--socket", place.socket)
    assert line.returncode == 0 and f" at {place.socket}: pid {daemon.process.pid}, " in line.stdout
    daemon.stop()
    for command in ("ping", "status", "retention"):
        done = kvstore(command, "--socket", place.socket)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (4, "", 1)
        assert (
            f"{place.socket}: No such file or directory: is it running? Start it with kvstore serve"
            in done.stderr
        )


def test_a_tenant_that_nobody_has_seen_is_warned_of(place: Place, serve: Serve) -> None:
    """Quota and ttl are set all the same, and one line on stderr says so, with the nearest name; none for a known one, and
    none where a rule is removed."""
    serve(place)
    with Client(place.socket, timeout_s=30, label="engine") as client:
        space = client.namespace(b"a" * 16, 100_000, 32, 16, {"model": "m", "tenant": "acme"})
        assert client.put(space, [b"h" * 32], b"", [bytes(100_000)]) == 1
    for words in (["quota", "--dram", "1GiB"], ["ttl", "1h"]):
        done = kvstore(*words, "--tenant", "amce", "--socket", place.socket)
        assert done.returncode == 0 and done.stdout.startswith("tenant amce")
        warning = f"kvstore: {words[0]}: nothing of tenant amce is known here now; did you mean acme?\n"
        assert done.stderr == warning
    for words in (["quota", "--dram", "1GiB", "--tenant", "acme"], ["ttl", "off", "--tenant", "amce"]):
        done = kvstore(*words, "--socket", place.socket)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_sample_configuration_is_written_once(tmp_path: Path) -> None:
    """It is the commented file of deploy/, it is valid, and what is there already is never written over."""
    file = tmp_path / "kvstore.toml"
    done = kvstore("config", "init", "--config", file)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"wrote {file}\n", "")
    assert file.read_text() == (ROOT / "deploy" / "kvstore.toml").read_text()
    assert kvstore("config", "check", "--config", file).returncode == 0
    file.write_text("mine")
    done = kvstore("config", "init", "-o", "json", KVSTORE_CONFIG=str(file))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"kvstore: config init: {file}: is there already, and is not written over\n"
    assert file.read_text() == "mine"
    done = kvstore("config", "init", "--config", tmp_path / "no" / "such.toml")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    os.symlink(tmp_path / "elsewhere", tmp_path / "link.toml")
    assert kvstore("config", "init", "--config", tmp_path / "link.toml").returncode == 1
    assert not (tmp_path / "elsewhere").exists()


def test_a_sample_of_a_user_works_for_that_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the data directory and the socket are a user's own, the sample leaves both to be found, and says where that is."""
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    monkeypatch.setattr("kvstore.protocol.places._may_write", lambda path: path.startswith(str(tmp_path)))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    file = tmp_path / "kvstore.toml"
    assert main(["config", "init", "--config", str(file)]) == 0
    assert f'\n# data_dir = "{tmp_path}/state/kvstore"\n' in file.read_text()
    loaded = load(file, environment={})
    assert loaded.config == Config() and {"data_dir", "socket_path"}.isdisjoint(loaded.given)


def test_numbers_agree_with_their_nouns() -> None:
    """1 problem, 2 problems."""
    assert [plural(n, "problem") for n in (0, 1, 2, 1234)] == [
        "0 problems",
        "1 problem",
        "2 problems",
        "1,234 problems",
    ]
