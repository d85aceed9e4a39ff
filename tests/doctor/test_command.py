"""`kvstore doctor` as a user has it: exit codes, what it prints, and that it changes nothing."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.client import Client
from kvstore.tools.doctor.examine import examine
from kvstore.tools.doctor.findings import Case, Finding
from tests.cli.terminal import on_terminal
from tests.doctor.looked import case, doctor, of
from tests.running import ROOT, Daemon, Place, kvstore

Serve = Callable[..., Daemon]


def put(place: Place, digest: bytes, **fields: str) -> None:
    """An engine that stores one block in a namespace of these fields."""
    with Client(place.socket, timeout_s=10, label="engine") as client:
        space = client.namespace(digest.ljust(16, b"."), 4096, 32, 16, fields)
        assert client.put(space, [b"h" * 32], b"", [b"x" * 4096]) == 1


def test_a_daemon_that_is_well(place: Place, serve: Serve) -> None:
    """With a daemon that serves, every check of it is ok, and the exit code is 0."""
    serve(place, *place.with_nvme())
    put(place, b"n", model="m")
    found = doctor(*place.with_nvme(), code=0)
    assert {f["level"] for f in found} <= {"ok", "note", "warning"}  # the machine's own swap, arenas
    for check in ("socket", "data directory", "daemon", "refused", "engines", "memory"):
        assert of(found, check, "ok"), (check, found)
    (said,) = of(found, f"disk {place.path / 'nvme0'}", "ok")
    assert "are ours" in said and said.count(", ") >= 3


def test_no_daemon_is_no_problem(place: Place) -> None:
    """Before the first start there is a note that nobody answers, and the exit code is 0."""
    found = doctor(*place.arguments, code=0)
    assert len(of(found, "socket", "note")) == 1
    assert of(found, "data directory") == [f"{place.data_dir} is not there yet"]


def test_a_daemon_that_hangs_is_named(place: Place, serve: Serve) -> None:
    """One that was stopped with a signal and still has the data directory is a problem, with its pid."""
    daemon = serve(place)
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        found = doctor(*place.arguments, code=1)
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    (said,) = of(found, "socket", "problem")
    assert said.startswith(f"pid {daemon.process.pid} runs, and does not answer at {place.socket}")


def test_nothing_is_changed(place: Place, serve: Serve) -> None:
    """Data directory, NVMe and arena of a stopped daemon have the same names, sizes and times afterwards, measured disks too."""

    def seen() -> dict[Path, tuple[int, int, int]]:
        paths = [p for p in sorted(place.path.rglob("*")) if "stderr" not in p.name]
        stats = {path: path.lstat() for path in [place.path, *paths]}
        return {path: (s.st_size, s.st_mtime_ns, s.st_mode) for path, s in stats.items()}

    daemon = serve(place, *place.with_nvme())
    put(place, b"n", model="m")
    assert daemon.stop() == 0
    before = seen()
    found = doctor("--disks", *place.with_nvme(), code=0)
    assert seen() == before
    assert len([f for f in found if "reads " in f["found"] and " MB/s, writes " in f["found"]]) == 2
    assert of(found, "arena", "ok")  # the one that was left is its own


def test_wrong_settings_are_findings(place: Place) -> None:
    """Each line of `config check` is a problem, and everything else is looked at all the same."""
    found = doctor("--set=dram.capacity_bytes=12GB", "--set=engine.polciy=lru", code=1)
    assert len(of(found, "settings", "problem")) == 2
    assert of(found, "memory", "ok") and of(found, "python", "ok")
    place.path.joinpath("broken.toml").write_text("[dram\n")
    (said,) = of(doctor(f"--config={place.path / 'broken.toml'}", code=1), "settings", "problem")
    assert "not valid TOML" in said


def test_a_port_that_is_taken(place: Place, serve: Serve) -> None:
    """Whoever else listens at web.listen is found, before a start and beside a daemon; its own web is ok."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(10)
        listen = f"--set=web.listen=127.0.0.1:{other.getsockname()[1]}"
        # It accepts nobody: the kernel connects, and no answer comes.
        (said,) = of(doctor(*place.arguments, listen, code=0), "web", "warning")
        assert "is taken already" in said
        serve(place)
        (said,) = of(doctor(*place.arguments, listen, code=0), "web", "warning")
        assert "nobody answers there" in said
    (said,) = of(doctor(*place.arguments, listen, code=0), "web", "warning")
    assert "nothing answers" in said


def test_an_arena_that_was_left(place: Place, serve: Serve) -> None:
    """The arena of a daemon whose data directory is not this one's is named with its bytes and the command that frees it."""
    daemon = serve(place)
    put(place, b"n", model="m")  # an empty arena goes at a stop
    daemon.stop()
    instance = json.loads((place.data_dir / "kvstore-data.json").read_text())["instance"]
    found = doctor(*place.arguments, f"--data-dir={place.path / 'other'}", code=0)
    (left,) = [f for f in found if f["check"] == "arena" and str(place.path) in f["found"]]
    assert left["level"] == "warning" and " MiB in " in left["found"]
    assert left["action"].endswith(f"kvstore arena rm {instance}")


def test_engines_that_share_nothing(place: Place, serve: Serve) -> None:
    """Two kinds of engines that differ in the hash seed only are found, as a note where they are gone; those of another dtype are
    not among them."""
    serve(place)
    same = {"model": "m", "dtype": "bf16", "hash": "sha256", "tenant": ""}
    put(place, b"a", **same, **{"hash seed": "1"})
    put(place, b"b", **{**same, "dtype": "fp16", "hash seed": "1"})
    assert not [found for found in of(doctor(*place.arguments, code=0), "engines") if "hash" in found]
    put(place, b"c", **same, **{"hash seed": "2"})
    found = doctor(*place.arguments, code=0)
    assert [each for each in of(found, "engines", "note") if "hash algorithm" in each] == [
        "2 kinds of engines of m differ in hash algorithm or seed only: they share nothing"
    ]


def test_a_check_that_fails_is_a_finding(tmp_path: Path) -> None:
    """A check that raises is one note, and the next one is heard."""

    def broken(_: Case) -> Iterator[Finding]:
        raise RuntimeError("what\na mess")

    def sound(_: Case) -> Iterator[Finding]:
        yield Finding("sound", "ok", "yes")

    found = list(examine(case(tmp_path), (broken, sound)))
    assert [(f.check, f.level, f.found) for f in found] == [
        ("broken", "note", "could not be looked at: what"),
        ("sound", "ok", "yes"),
    ]


@pytest.mark.parametrize("columns", [80, 60, 40])
def test_a_terminal_is_kept_to(place: Place, columns: int) -> None:
    """No line is wider than the terminal, but for paths and digests, which are never broken; what to do is there."""
    code, shown = on_terminal(columns, "doctor", *place.with_nvme())
    assert code == 0 and "→ " in shown
    wide = [line for line in shown.splitlines() if len(line) > columns]
    assert not [line for line in wide if len(line.removeprefix("→ ").split()) > 1], wide


def test_a_pipe_has_a_line_for_each(place: Place) -> None:
    """Without a terminal there are no colours, and each finding is one line."""
    done = kvstore("doctor", *place.arguments)
    assert "\033" not in done.stdout
    lines = done.stdout.splitlines()
    assert all(line.split()[0] in ("ok", "note", "warning", "problem") for line in lines[:-1])


def test_wrong_words(place: Place) -> None:
    """--names without --bundle, a bundle where there is no directory, and one over a file: one line each, nothing done."""
    assert kvstore("doctor", "--names").returncode == 2
    missing = kvstore("doctor", f"--bundle={place.path}/no/b.tar.gz")
    assert (missing.returncode, missing.stderr.count("\n"), missing.stdout) == (3, 1, "")
    (place.path / "b").write_text("mine")
    there = kvstore("doctor", f"--bundle={place.path}/b")
    assert (there.returncode, there.stderr.count("\n"), there.stdout) == (2, 1, "")
    assert (place.path / "b").read_text() == "mine"


def test_the_manual_names_all_fields(place: Place) -> None:
    """docs/cli.md has every field of the JSON."""
    text = (ROOT / "docs" / "cli.md").read_text().partition("## kvstore doctor")[2].partition("\n## ")[0]
    answer = json.loads(kvstore("doctor", "-o", "json", *place.arguments).stdout)
    for name in (*answer, *answer["findings"][0]):
        assert f"`{name}`" in text or f'"{name}"' in text, name
