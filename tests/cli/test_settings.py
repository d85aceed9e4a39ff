"""kvstore config get, set and diff: what is in force, where it comes from, and changing it while serving."""

from __future__ import annotations

import json
import mmap
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client, Refused
from kvstore.daemon.config.config import keys
from tests.cli.test_service import HASHES, RECORD_BYTES, namespace, put
from tests.running import TIMEOUT_S, Daemon, Place, kvstore

Serve = Callable[..., Daemon]


def got(place: Place, *name: str) -> dict[str, dict[str, Any]]:
    done = kvstore("config", "get", *name, "-o", "json", "--socket", place.socket)
    assert done.returncode == 0, done.stderr
    return {row.pop("key"): row for row in json.loads(done.stdout)["settings"]}


def changed(place: Place, key: str, value: str) -> dict[str, Any]:
    done = kvstore("config", "set", key, value, "-o", "json", "--socket", place.socket)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_every_setting_is_told_with_its_source(place: Place, serve: Serve) -> None:
    """All keys, each with the layer that it comes from; of a section, and of one key."""
    file = place.path / "kvstore.toml"
    file.write_text("[engine]\nio_threads = 3\n")
    serve(place, *place.arguments, f"--config={file}", KVSTORE_REPORT__CURRENCY="EUR")
    rows = got(place)
    assert list(rows) == list(keys())
    assert rows["engine.io_threads"] == {
        "value": 3,
        "source": "file",
        "where": f"{file}:2",
        "changeable": False,
    }
    assert rows["report.currency"] == {
        "value": "EUR",
        "source": "env",
        "where": "KVSTORE_REPORT__CURRENCY",
        "changeable": True,
    }
    assert (rows["data_dir"]["value"], rows["data_dir"]["source"]) == (str(place.data_dir), "flag")
    assert (rows["log.level"]["value"], rows["log.level"]["source"]) == ("info", "default")
    assert list(got(place, "log")) == ["log.level", "log.format"]
    assert list(got(place, "log.level")) == ["log.level"]
    table = kvstore("config", "get", "engine", "--socket", place.socket).stdout
    assert f"engine.io_threads            3          restart  {file}:2" in table
    assert '"128MiB"' in kvstore("config", "get", "durable.bytes_per_s", "--socket", place.socket).stdout


def test_a_setting_is_in_force_until_a_reload(place: Place, serve: Serve) -> None:
    """What is set is told, logged and effective at once; SIGHUP puts back what the layers say."""
    daemon = serve(place, *place.arguments, KVSTORE_REPORT__GPU_HOUR_PRICE="2")
    told = changed(place, "report.gpu_hour_price", "3.5")
    assert told == {
        "key": "report.gpu_hour_price",
        "before": 2.0,
        "value": 3.5,
        "source": "set",
        "where": "kvstore config set",
        "file": "/etc/kvstore/kvstore.toml",
        "variable": "KVSTORE_REPORT__GPU_HOUR_PRICE",
        "source_before": "env",
        "where_before": "KVSTORE_REPORT__GPU_HOUR_PRICE",
    }
    assert got(place, "report.gpu_hour_price")["report.gpu_hour_price"]["source"] == "set"
    report = json.loads(kvstore("report", "-o", "json", "--socket", place.socket).stdout)
    assert report["gpu_hour_price"] == 3.5
    said = kvstore("config", "set", "log.level", "warning", "--socket", place.socket)
    assert 'log.level is "warning" now (was "info"), until a restart' in said.stdout
    assert '/etc/kvstore/kvstore.toml: [log] level = "warning"' in said.stdout and not said.stderr
    assert "log.level is warning now: kvstore config set" in daemon.log(), (
        "what it says less of is said before"
    )
    daemon.process.send_signal(signal.SIGHUP)
    give_up_s = time.monotonic() + TIMEOUT_S
    while got(place, "log.level")["log.level"]["source"] != "default":
        assert time.monotonic() < give_up_s
    row = got(place, "report.gpu_hour_price")["report.gpu_hour_price"]
    assert (row["value"], row["source"]) == (2.0, "env")
    assert daemon.stop() == 0


def test_limits_of_the_door_change_while_serving(place: Place, serve: Serve) -> None:
    """Fewer leases on a connection that is open; a prefill rate that break-even uses; a share of pins that they fit."""
    serve(place)
    put(place.socket)
    with Client(place.socket, timeout_s=10) as client:
        space = namespace(client)
        one, two = [bytes([1]) * 32], [bytes([2]) * 32]
        with client.acquire(space, one), client.acquire(space, two):
            changed(place, "door.leases_max", "2")
            with pytest.raises(Refused, match="2 open leases on one connection are allowed"):
                client.acquire(space, one)
            changed(place, "door.leases_max", "3")
            client.acquire(space, one).release()
    assert kvstore("pin", "01" * 32, "--socket", place.socket).returncode == 0
    done = kvstore("config", "set", "retention.pinned_share_max", "0.001", "--socket", place.socket)
    assert done.returncode == 2 and "pins hold more than that already" in done.stderr
    assert changed(place, "retention.pinned_share_max", "0.6")["value"] == 0.6
    assert changed(place, "engine.prefill_tokens_per_s", "100")["value"] == 100.0


def test_a_stray_write_is_found_while_serving(place: Place, serve: Serve) -> None:
    """Somebody writes into a block of another engine, in shared memory: a sample of hits, changed to be all of them, finds it;
    the log names the block, and `status` counts it."""
    daemon = serve(place)
    put(place.socket)
    with Client(place.socket, timeout_s=10) as client:
        space = namespace(client)
        path = client.status()["arena"]["path"]
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as arena:
            at = arena.find(bytes([7]) * RECORD_BYTES)
            arena[at + 5_000] = 0
        assert changed(place, "dram.verify_share", "1")["value"] == 1.0
        deadline = time.monotonic() + TIMEOUT_S
        while client.status()["counters"]["corrupt_dram"] == 0:
            assert time.monotonic() < deadline, "nothing was found"
            client.acquire(space, HASHES).release()
            time.sleep(0.05)
        into = [bytearray(RECORD_BYTES) for _ in HASHES]
        assert client.get(space, HASHES, into) in (7, 20)  # NVMe may have it
        assert bytes(into[6]) == bytes([6]) * RECORD_BYTES
    said = "has not the bytes that were committed"
    while said not in daemon.log():  # a thread writes it
        assert time.monotonic() < deadline, "nothing was logged"
        time.sleep(0.05)
    (line,) = (line for line in daemon.log().splitlines() if said in line)
    assert HASHES[7].hex() in line and '"level": "error"' in line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["config", "set", "log.level", "loud"],
            "config set: log.level = \"loud\": should be 'debug', 'info'",
        ),
        (
            ["config", "set", "log.levle", "info"],
            "config set: unknown key log.levle: did you mean log.level?",
        ),
        (["config", "set", "log", "info"], "config set: unknown key log: known are "),
        (
            ["config", "set", "engine.io_threads", "5"],
            "config set: engine.io_threads: another value needs a restart",
        ),
        (
            ["config", "set", "nvme.write_bytes_per_day", "3GiB"],
            "from no limit to one, and back, needs a restart",
        ),
        (
            ["config", "set", "report.gpu_hour_price", "nan"],
            'config set: report.gpu_hour_price = "nan": allowed are 0 to',
        ),
        (
            ["config", "set", "report.currency", "x" * 9000],
            "config set: VALUE: 9000 characters, at most 8192 are allowed",
        ),
        (["config", "set", "k" * 2000, "1"], "config set: KEY: 2000 characters, at most 1024 are allowed"),
        (["config", "set", "report.currency", "\x1b[2J\n" * 5], "config set: report.currency = "),
        (["config", "get", "logg"], "config get: unknown key logg: "),
        (["config", "set", "log.level"], "config set: the following arguments are required: VALUE"),
    ],
)
def test_what_is_wrong_is_one_line_and_changes_nothing(one: Place, words: list[str], says: str) -> None:
    """Exit code 2, one line that names key, value and what is allowed."""
    before = got(one)
    done = kvstore(*words, "--socket", one.socket)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr and done.stderr.count("\n") == 1 and "\x1b" not in done.stderr
    assert got(one) == before


@pytest.fixture
def one(place: Place, serve: Serve) -> Place:
    serve(place)
    return place


def test_an_engine_cannot_change_settings(one: Place) -> None:
    """Only a connection without the arena, as that of the command, is heard."""
    with Client(one.socket, timeout_s=10) as client, pytest.raises(Refused, match="without the arena"):
        client.change_setting("log.level", "debug")


def test_diff_says_what_waits(place: Place, serve: Serve, tmp_path: Path) -> None:
    """What the file says otherwise than the daemon does: what waits for a reload, for a restart, and what the command line of the
    daemon wins over; nothing where all is as in force. The file is the one that the daemon has read."""
    file = tmp_path / "kvstore.toml"
    file.write_text('stop_timeout_s = 3\n[log]\nlevel = "info"\n')
    serve(place, *place.arguments, f"--config={file}", "--set=door.leases_max=77")

    def differences(*words: str | Path) -> dict[str, tuple[Any, Any, str]]:
        done = kvstore("config", "diff", "-o", "json", "--socket", place.socket, *words)
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert document["file"] == str(file)
        return {
            row["key"]: (row["file"], row["in_force"], row["waits_for"]) for row in document["differences"]
        }

    assert differences() == {}
    assert kvstore("config", "set", "log.level", "warning", "--socket", place.socket).returncode == 0
    file.write_text(
        'stop_timeout_s = 5\n[log]\nlevel = "info"\n[engine]\nio_threads = 3\n[door]\nleases_max = 99\n'
    )
    assert (
        differences("--config", file)
        == differences()
        == {
            "stop_timeout_s": (5.0, 3.0, "reload"),
            "log.level": ("info", "warning", "reload"),
            "engine.io_threads": (3, 4, "restart"),
            "door.leases_max": (99, 77, "nothing"),
        }
    )
    shown = kvstore("config", "diff", "--socket", place.socket).stdout
    assert str(file) in shown and "engine.io_threads" in shown and "restart" in shown
    file.write_text("[log]\nlevel = 7\n")
    done = kvstore("config", "diff", "--socket", place.socket)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (
        2,
        "",
        1,
    ) and "log.level" in done.stderr
