"""Text from elsewhere steers no terminal, whichever command shows it; what commands draw themselves they still can."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client import Client
from kvstore.tools.cli import COMMANDS, CliError, main
from kvstore.tools.cli.nodes import _follow
from kvstore.tools.cli.output import print_json, print_table, progress_bars, say
from kvstore.tools.cli.streams import Harmless, drawing, harmless_streams
from kvstore.units import harmless, printable
from replication.formats.mirror_state import MIRROR_STATE_FORMAT, Failure, MirrorState
from tests.cli.terminal import on_terminal
from tests.region.regions import init, regions_file
from tests.running import TIMEOUT_S, Daemon, Place, environment, kvstore

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\u2066\x7f\r"
HARMFUL = frozenset("\x1b\x07\x9b\u202e\u2066\x7f\r\x00\u2028")


@given(st.text(st.characters(exclude_categories=["Cs"])), st.booleans())
def test_nothing_harmful_comes_through(text: str, is_error: bool) -> None:
    """Whatever is printed: what could steer a terminal is replaced, a character by a character, all else is as it was."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), harmless_streams():
        print(text, file=sys.stderr if is_error else sys.stdout)
    shown = (err if is_error else out).getvalue()
    assert shown == harmless(text) + "\n" and len(shown) == len(text) + 1
    assert not HARMFUL & set(shown)
    assert all(a == b or not a.isprintable() for a, b in zip(text, shown, strict=False))
    assert "\n" not in printable(text)


@given(st.dictionaries(st.text(), st.text(st.characters(exclude_categories=["Cs"]))))
def test_json_is_harmless_and_exact(document: dict[str, str]) -> None:
    """A program reads back what was said; a terminal sees no control."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), harmless_streams():
        print_json(document)
    assert json.loads(out.getvalue()) == document
    assert not HARMFUL & set(out.getvalue())


def test_what_we_draw_comes_through() -> None:
    """Only who asks for the stream below gets it; a stream that is not wrapped is its own."""
    below = io.StringIO()
    assert drawing(below) is below
    drawing(Harmless(below)).write("\x1b[1m")  # type: ignore[arg-type]
    assert below.getvalue() == "\x1b[1m"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Work:
    """At a node that calls itself, and what it does, whatever it likes. on: the terminal where both are to be seen before it is over."""

    state = SimpleNamespace(method=f"/{HOSTILE}[bold]method", progress="")

    def __init__(self, on: Terminal) -> None:
        self._on = on

    def watch(self) -> Iterator[SimpleNamespace]:
        for word in ("method", "progress"):
            give_up_s = time.monotonic() + TIMEOUT_S
            while f"[bold]{word}" not in self._on.getvalue():
                assert time.monotonic() < give_up_s, self._on.getvalue()
                time.sleep(0.01)
            yield SimpleNamespace(method="", progress=f"{HOSTILE}[bold]progress")


def test_what_is_drawn_has_harmless_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, where what we draw goes past the wrapped streams: titles, names of columns and cells of tables, bars, and the
    line about work at another node. Markup in them is text, and a line feed begins no line."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "400")
    out, err = Terminal(), Terminal()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), harmless_streams():  # type: ignore[type-var]
        for word in ("title", "column", "cell"):
            print_table(f"{HOSTILE}[bold]{word}", [f"{HOSTILE}[bold]{word}"], [[f"{HOSTILE}[bold]{word}"]])
        say(f"{HOSTILE}one\nline")
        with progress_bars() as show:
            show(f"{HOSTILE}[bold]bar", 1, 2)
        _follow(Work(err))  # type: ignore[arg-type]
    for text in (out.getvalue(), err.getvalue()):
        drawn = re.sub(
            r"\x1b\[[?0-9;]*[A-KSTfhlm]", "", text.replace("\x1b[2J", "owned")
        )  # styles, the cursor
        assert "owned\ufffd\ufffd[2J" in drawn and "[bold]" in drawn
        assert not (HARMFUL - {"\r"}) & {*drawn}, drawn
    assert "one\ufffdline\n" in out.getvalue()


def test_every_command_runs_behind_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What any command prints, raises or is refused for."""

    class Hostile:
        __doc__ = "hostile"

        @staticmethod
        def add_arguments(_parser: object) -> None: ...

        @staticmethod
        def run(_args: object) -> int:
            print(HOSTILE)
            print_table(HOSTILE, [HOSTILE], [[HOSTILE]])
            print(HOSTILE, file=sys.stderr)
            raise CliError(HOSTILE)

    monkeypatch.setattr("kvstore.tools.cli.module_of", lambda _command: Hostile)
    for command in COMMANDS:
        assert main([command]) == 1
        assert main([command, HOSTILE]) == 2
        told = capsys.readouterr()
        assert "owned" in told.out and told.err.count("owned") >= 2
        assert not HARMFUL & {*told.out, *told.err}


def test_a_bucket_does_not_write_on_a_terminal(
    place: Place, serve: Callable[..., Daemon], tmp_path: Path
) -> None:
    """What mirrors, orders and daemons left in a bucket, and what clients call themselves: in a pipe, on a terminal, as JSON."""
    file = regions_file(tmp_path, "na", "eu", rules='[[rules]]\nfrom = ["na"]\nto = ["eu"]\n')
    init(file, "na", "eu")
    state = MirrorState(
        source="na", identity="i", at_s=time.time(), problem=HOSTILE, failed=1,
        failures=(Failure(HOSTILE, HOSTILE, 1, 1.0),), lost_packs=(HOSTILE,),
    )  # fmt: skip
    mirrors = tmp_path / "eu" / "mirrors"
    mirrors.mkdir(exist_ok=True)
    (mirrors / "na").write_bytes(MIRROR_STATE_FORMAT.seal(state))
    serve(place, *place.arguments, f"--set=regions_file={file}", "--set=region=eu")
    with Client(place.socket, timeout_s=10, label=HOSTILE) as client:
        fields = {"model": HOSTILE, "tenant": HOSTILE}
        space = client.namespace(b"b" * 16, 4096, 32, 16, fields)
        assert client.put(space, [b"h" * 32], b"", [b"x" * 4096]) == 1
        client.lookup([space], [b"h" * 32], ticket=1, tokens=16)
        for words in (
            ["status", "--socket", place.socket], ["report", "--socket", place.socket], ["retention", "--socket", place.socket],
            ["region", "status", "--regions", file], ["warm", "eu", "--dry-run", "--regions", file],
            ["top", "--once", "--socket", place.socket], ["explain", "--prefix", b"h".hex() * 32, "--socket", place.socket],
            ["region", "status", "--regions", file, "-o", "json"], ["status", "--socket", place.socket, "-o", "json"],
        ):  # fmt: skip
            done = kvstore(*words)
            assert not HARMFUL & {*done.stdout, *done.stderr}, words
            if words[-1] != "json":
                _, shown = on_terminal(100, *words)
                assert not (HARMFUL - {"\r"}) & set(shown), words


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_line_of_the_log_is_harmless(form: str) -> None:
    """What others wrote into a fact of a line; JSON is exact all the same."""
    script = (
        "import logging, sys; from kvstore import logs; logs.configure('info', sys.argv[1]); "
        "logging.getLogger('x').warning(sys.argv[2], extra={'reason': sys.argv[2], 'why': ValueError(sys.argv[2])})"
    )
    words = [sys.executable, "-c", script, form, HOSTILE]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment(), check=True
    )
    assert "owned" in done.stderr and not HARMFUL & set(done.stderr)
    if form == "json":
        assert json.loads(done.stderr)["reason"] == HOSTILE
