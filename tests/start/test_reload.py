"""SIGHUP, and exit codes that a supervisor goes by."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.test_service import HASHES, hits, put
from tests.running import TIMEOUT_S, Daemon, Place, kvstore

Serve = Callable[..., Daemon]


def wait_logged(daemon: Daemon, text: str, times: int = 1) -> None:
    give_up_s = time.monotonic() + TIMEOUT_S
    while daemon.log().count(text) < times:
        assert time.monotonic() < give_up_s and daemon.process.poll() is None, daemon.log()
        time.sleep(0.05)


def price(place: Place) -> float:
    done = kvstore("report", "--socket", place.socket, "-o", "json")
    return float(json.loads(done.stdout)["gpu_hour_price"])


def test_a_hangup_applies_what_can_change(place: Place, serve: Serve) -> None:
    """Log level, price and write budget are in force at once; what needs a restart is named, and what is held stays."""
    file = place.path / "kvstore.toml"
    before = "[report]\ngpu_hour_price = 1.0\n[nvme]\nwrite_bytes_per_day = 2147483648\n"
    file.write_text(before)
    daemon = serve(place, *place.with_nvme(), f"--config={file}")
    put(place.socket)
    file.write_text(
        'stop_timeout_s = 3\n[log]\nlevel = "warning"\n[report]\ngpu_hour_price = 2.5\n'
        '[nvme]\nwrite_bytes_per_day = "4GiB"\n[engine]\nio_threads = 7\n'
    )
    daemon.process.send_signal(signal.SIGHUP)
    wait_logged(daemon, "engine.io_threads is still 4: another value needs a restart")
    for line in ("log.level is warning now", "engine.io_threads is still 4"):
        assert line in daemon.log()
    assert price(place) == 2.5
    status = json.loads(kvstore("status", "--socket", place.socket, "-o", "json").stdout)
    assert status["write_budget"]["write_bytes_per_day"] == 4 << 30
    assert hits(place.socket) == len(HASHES)
    file.write_text(before.replace("1.0", "2.0") + '[log]\nlevel = "warning"\n')
    daemon.process.send_signal(signal.SIGHUP)
    give_up_s = time.monotonic() + TIMEOUT_S
    while price(place) != 2.0:
        assert time.monotonic() < give_up_s
    assert "gpu_hour_price is 2.0 now" not in daemon.log()  # level info is not logged any more
    file.write_text(before.replace("1.0", "3.0") + '[log]\nlevel = "info"\n')
    daemon.process.send_signal(signal.SIGHUP)
    wait_logged(daemon, "report.gpu_hour_price is 3.0 now")
    file.write_text("[report]\ngpu_hour_price = 3.0\n")
    daemon.process.send_signal(signal.SIGHUP)
    wait_logged(daemon, "nvme.write_bytes_per_day is still 2 GiB: from no limit to one, and back,")
    assert daemon.stop() == 0


def test_a_wrong_file_changes_nothing(place: Place, serve: Serve) -> None:
    """The daemon goes on with what it has, and says what is wrong."""
    file = place.path / "kvstore.toml"
    file.write_text("[report]\ngpu_hour_price = 1.0\n")
    daemon = serve(place, *place.arguments, f"--config={file}")
    for text in ("[report]\ngpu_hour_price = -1\n", "[repotr\n", "[report]\nprice = 3\n"):
        file.write_text(text)
        before = daemon.log().count("nothing was changed")
        daemon.process.send_signal(signal.SIGHUP)
        wait_logged(daemon, "nothing was changed", before + 1)
    file.unlink()
    daemon.process.send_signal(signal.SIGHUP)
    wait_logged(daemon, "no such configuration file")
    assert price(place) == 1.0
    assert "Traceback" not in daemon.log() and daemon.stop() == 0


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["fsck", "--offline", "--data-dir", "/nope"], 3, "data_dir /nope: not found"),
        (["serve", "--data-dir", "/nope/x"], 3, "data_dir /nope/x: /nope is not there"),
        (["serve", "--data-dir", "/proc/x"], 2, "data_dir /proc/x: "),
        (["report", "--html", "/nope/x.html"], 3, "--html /nope/x.html: no such directory"),
        (["arena", "rm"], 2, "arena rm: which?"),
        (["arena", "ls", "x"], 2, "arena ls: takes no INSTANCE"),
        (["arena", "rm", "nosuch"], 3, "arena rm: nosuch: no such arena"),
    ],
)
def test_exit_codes_are_those_of_the_manual(words: list[str], code: int, says: str) -> None:
    """Not found is 3, what cannot heal is 2; one line each."""
    done = kvstore(*words)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr and done.stderr.count("\n") == 1


def test_the_unit_does_not_repeat_what_cannot_heal() -> None:
    """systemd is told of both codes, and how a reload is asked for."""
    unit = (Path(__file__).parents[2] / "deploy" / "kvstore.service").read_text()
    assert "RestartPreventExitStatus=2 3\n" in unit
    assert "ExecReload=/bin/kill -HUP $MAINPID\n" in unit
