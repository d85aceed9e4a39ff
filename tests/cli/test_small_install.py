"""The connector's small install, `--no-deps` and two packages: what the command says there."""

from __future__ import annotations

import subprocess
import sys

from kvstore.tools.cli import _NEEDED, COMMANDS, HEADINGS
from tests.running import ROOT, TIMEOUT_S, environment

# Runs several commands in one process in which only what the connector needs can be imported.
SCRIPT = """
import sys
sys.modules.update(dict.fromkeys({blocked!r}))
from kvstore.tools.cli import main
for words in {commands!r}:
    print(words[0], main(words), flush=True)
    print("---", file=sys.stderr, flush=True)
"""


def ran(commands: list[list[str]]) -> tuple[list[str], list[str]]:
    """Of each, its name with the exit code, and what it said."""
    script = SCRIPT.format(blocked=sorted(_NEEDED), commands=commands)
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=ROOT,
        timeout=TIMEOUT_S,
    )
    codes = [line for line in done.stdout.splitlines() if line.rpartition(" ")[0] in COMMANDS]
    if len(commands) == 1:
        return codes, [done.stderr.replace("---\n", "")]  # a thread may write behind it
    return codes, done.stderr.split("---\n")[:-1]


def test_a_command_that_needs_more_says_so() -> None:
    """One line each that names what is missing and what to do, exit code 1, no traceback; help works all the same."""
    together = [
        *(["ping"], ["top"], ["doctor"], ["config", "show"], ["arena", "ls"], ["region", "ls"]),
        *(["warm", "eu"], ["model", "ls"], ["status"], ["fsck", "--offline"], ["completion", "bash"]),
    ]
    alone = [[[name]] for name in ("serve", "web", "mirror")]  # these hand their output to a thread
    for commands in (together, *alone):
        codes, said = ran(commands)
        assert codes == [f"{words[0]} 1" for words in commands]
        for words, text in zip(commands, said, strict=True):
            assert text.count("\n") == 1 and text.startswith(f"kvstore: {words[0]}: needs "), text
            assert "pip install its checkout or wheel" in text
    assert ran([["help"], ["version"], ["pin", "--help"]])[0] == ["help 0", "version 0", "pin 0"]
    assert set(COMMANDS) == {name for commands in HEADINGS.values() for name in commands}
