"""What documents, messages and advice tell somebody to type is there: commands, verbs and options."""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from kvstore.tools.cli import COMMANDS, parser_of

ROOT = Path(__file__).parents[2]
PLACES = (
    "kvstore/",
    "replication/",
    "coldstart/",
    "tiers/",
    "connectors/",
    "docs/",
    "deploy/",
    "examples/",
    "README",
)
ENDS = r'[^\n`"\'<>;()]*'  # of a command within a text


def texts() -> Iterator[tuple[str, str]]:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.split():
        if name.startswith(PLACES) and Path(name).suffix in (
            ".py",
            ".md",
            ".toml",
            ".service",
            ".js",
            ".yml",
            ".yaml",
        ):
            yield name, re.sub(r'"\s*\n\s*f?"|\\\n\s*', " ", (ROOT / name).read_text())


@cache
def parser(command: str) -> argparse.ArgumentParser:
    return parser_of(command)


def options(of: argparse.ArgumentParser, words: list[str]) -> set[str]:
    """Those that may stand behind these words."""
    getattr(of, "fill", lambda: None)()
    found = {option for action in of._actions for option in action.option_strings}
    for action in of._actions:
        if isinstance(action, argparse._SubParsersAction):
            chosen = (
                [action.choices[words[0]]]
                if words and words[0] in action.choices
                else action.choices.values()
            )
            found.update(*(options(below, words[1:]) for below in chosen))
    return found


def test_every_option_that_is_named_exists() -> None:
    """`kvstore COMMAND … --option`, wherever it is written, is an option of that command."""
    wrong = []
    for name, text in texts():
        for command, rest in re.findall(rf"kvstore ([a-z]+)\b({ENDS})", text):
            words = re.findall(r"[^\s|\[\],]+", rest.partition(" #")[0])
            named = {word.partition("=")[0].rstrip(".,:") for word in words if word.startswith("--")} - {"--"}
            if command in COMMANDS and named and (left := named - options(parser(command), words)):
                wrong.append(f"{name}: kvstore {command}{rest}: {left}")
    assert not wrong
