"""One way of moving a model's bytes, in a process of its own that says how long it took.

    parent                                      child
      words, environment ─────────────────────▶ imports, opens             ▶ ready, or what is not installed
      go ─────────────────────────────────────▶ touches memory, moves it   ▶ seconds

Memory that a virtual machine has not touched lately comes from its host, ten times slower than it is filled: so as much as a
way may need is touched and given back before its time begins.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchError

ROOT = Path(__file__).parents[2]
LOG_CHARS = 2000
Facts = Mapping[str, Any]
Work = Callable[[], float]  # the seconds that count


class Child:
    """missing: the package that it lacks; then it does nothing."""

    def __init__(
        self, python: str, module: str, way: str, facts: Facts, environment: Mapping[str, str]
    ) -> None:
        self._way = way
        self._log = Path(facts["scratch"]) / f"{way}.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [python, "-m", f"benchmarks.coldstart.{module}", way, json.dumps(facts)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            )  # fmt: skip
        self.missing = str(self._answer().get("missing", ""))

    def go(self) -> float:
        """Seconds. Raises BenchError."""
        assert self._process.stdin is not None
        print("go", file=self._process.stdin, flush=True)
        return float(self._answer()["seconds"])

    def close(self) -> None:
        """Idempotent."""
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"{self._way}: {self._log.read_text(errors='replace')[-LOG_CHARS:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def serve(ways: Mapping[str, Callable[[Facts], Work]]) -> None:
    """The child's side: the way and the facts are its arguments."""
    way, facts = sys.argv[1], json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    try:
        work = ways[way](facts)
    except ImportError as error:
        print(json.dumps({"missing": error.name or str(error)}), file=answers, flush=True)
        return
    print(json.dumps({}), file=answers, flush=True)
    for _ in sys.stdin:
        touch(facts["size_bytes"])
        print(json.dumps({"seconds": work()}), file=answers, flush=True)


def touch(size_bytes: int) -> None:
    """Have the host give so much memory, and leave it to whoever asks next: on huge pages, for small ones are not where rings are."""
    with mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, size_bytes, mmap.PAGESIZE):
            memory[at] = 1
