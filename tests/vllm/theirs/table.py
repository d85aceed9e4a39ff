"""The table of vLLM's own tests: what is done with each that could be about a connector, and why.

    [reasons]                           # tests left out for these are tried, and must not pass
    partial = "a hit of part of a block …"
    [out_of_reach]                      # those for these are not tried
    model = "needs a model …"

    [[module]]
    path = "v1/core/test_x.py"          # below tests/ of vLLM's source
    run = ["test_a", "test_b[x] 0.33"]  # with ours; one word more where it is in that version only
    [[module.left_out]]
    why = "partial"
    tests = ["test_c"]

    [[modules]]                         # left out as a whole
    why = "…"
    paths = ["v1/kv_connector/unit/test_nixl_*.py"]

A test is named as a whole, or by one of its cases; the more exact name counts.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("table.toml")
VERSIONS = ("0.32", "0.33")
# A module with one of these words in it is in the table.
ABOUT_CONNECTORS = re.compile(
    r"kv_connector|KVConnector|kv_transfer_config|KVTransferConfig|kv_events|KVEvent"
)


class TableError(Exception):
    """The table is not well formed; the message says where."""


@dataclass(frozen=True)
class Entry:
    """One test of one module, or one case of it. why: the reason that it is left out; empty if it is run. tried: it is run
    all the same, and must not pass. asked: vLLM asks the class of ours, and calls no hook."""

    path: str
    test: str
    why: str = ""
    tried: bool = True
    asked: bool = False


class Table:
    """What the table says of one version. Raises TableError."""

    def __init__(self, version: str, path: Path = TABLE) -> None:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        self._version = version
        self._tried, self._out_of_reach = raw["reasons"], raw.get("out_of_reach", {})
        self._used: set[str] = set()
        self.entries: dict[tuple[str, str], Entry] = {}
        for module in raw["module"]:
            for entry in self._entries(module):
                if self.entries.setdefault((entry.path, entry.test), entry) is not entry:
                    raise TableError(f"{entry.path}: {entry.test} stands there twice")
        self._left_out = [glob for group in raw.get("modules", ()) for glob in group["paths"]]
        if unused := (self._tried.keys() | self._out_of_reach.keys()) - self._used:
            raise TableError(f"nothing is left out for {', '.join(sorted(unused))}")

    def _entries(self, module: dict[str, Any]) -> Iterator[Entry]:
        path = module["path"]
        for key in ("run", "run_asked"):
            for test in self._names(path, module.get(key, ())):
                yield Entry(path, test, asked=key == "run_asked")
        for group in module.get("left_out", ()):
            self._used.add(group["why"])
            why = self._tried.get(group["why"]) or self._out_of_reach.get(group["why"])
            if not why:
                raise TableError(f"{path}: left out for {group['why']}, which is no reason")
            for test in self._names(path, group["tests"]):
                yield Entry(path, test, why, tried=group["why"] in self._tried)

    def _names(self, path: str, names: list[str]) -> Iterator[str]:
        for name in names:
            test, _, only = name.rpartition(" ") if name.endswith(VERSIONS) else (name, "", "")
            if " " in test.split("[")[0]:
                raise TableError(f"{path}: {name}: the word after it must be one of {', '.join(VERSIONS)}")
            if only in ("", self._version):
                yield test

    @property
    def paths(self) -> list[str]:
        """The modules of which something is said test by test."""
        return list(dict.fromkeys(path for path, _ in self.entries))

    def entry(self, path: str, case: str) -> Entry | None:
        """What is said of a collected case, `Class::test[parameters]`; None if nothing is."""
        return self.entries.get((path, case)) or self.entries.get((path, case.partition("[")[0]))

    def undecided(self, tests: Path) -> list[str]:
        """Modules below vLLM's tests/ that could be about a connector and are not in the table."""
        known = set(self.paths)
        found = (path.relative_to(tests).as_posix() for path in sorted(tests.rglob("test_*.py")))
        return [
            path
            for path in found
            if path not in known
            and not any(fnmatch(path, glob) for glob in self._left_out)
            and ABOUT_CONNECTORS.search((tests / path).read_text(encoding="utf-8"))
        ]
