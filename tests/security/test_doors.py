"""What a daemon refuses to open, what it writes down of admins, and what it never writes down."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client
from kvstore.daemon.config.config_sources import load
from kvstore.protocol import frames
from kvstore.security import audit
from kvstore.tools.doctor.certificates import certificates
from kvstore.tools.doctor.findings import Case
from tests.door.peer import Peer
from tests.running import Daemon, Place, kvstore
from tests.security.certificates import DAY, Authority, write
from tests.web.asked import child_of, until

WEB, GRPC = "--set=web.listen=0.0.0.0:0", "--set=grpc.listen=[::]:0"
TOKEN = "a-token-that-nobody-may-see"
ACCESS = f"""
[[grant]]
token_sha256 = "{hashlib.sha256(TOKEN.encode()).hexdigest()}"
label = "ci"
roles = ["admin"]
"""
Spoil = Callable[[dict[str, Path]], object]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    authority = Authority()
    access = tmp_path / "access.toml"
    access.write_text(ACCESS)
    found = write(tmp_path, *authority.signed(), authority.pem)
    return {**found._asdict(), "access": access}


def arguments(files: dict[str, Path]) -> list[str]:
    named = {"certificate": "certificate_file", "key": "key_file", "ca": "ca_file", "access": "access_file"}
    return [f"--set=security.{named[name]}={path}" for name, path in files.items()]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([WEB], "web.listen"),
        ([GRPC], "grpc.listen"),
        ([GRPC, "--set=security.plain=web,events"], "grpc.listen"),
        ([WEB, "--set=security.plain=events"], "web.listen"),
        (["--set=events.endpoint=tcp://*:5557"], "events.endpoint"),
        (["--set=events.endpoint=tcp://10.0.0.1:5557", "--set=security.plain=web"], "events.endpoint"),
        (["--set=security.plain=grpc"], "security.plain"),
        (["--set=security.key_file=/k"], "security.certificate_file"),
        (["--set=security.key_file=/k", "--set=security.ca_file=/c", WEB], "security.certificate_file"),
        (["--set=security.access_file=/nowhere/access.toml"], "/nowhere/access.toml: No such file"),
    ],
)
def test_a_door_that_would_be_open_to_all_is_not_opened(place: Place, words: list[str], said: str) -> None:
    """The daemon does not start, and says in one line which setting, and what is allowed; nothing was made."""
    done = kvstore("serve", *place.arguments, *words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert said in done.stderr and not place.data_dir.exists()


@pytest.mark.parametrize("door", ["web", "grpc"])
def test_a_door_that_is_opened_by_hand_has_the_same_rules(place: Place, door: str) -> None:
    """Whatever the flag says."""
    done = kvstore(door, "--listen=0.0.0.0:0", f"--socket={place.socket}")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert f"{door}.listen" in done.stderr and "security.certificate_file" in done.stderr


@pytest.mark.parametrize(
    ("name", "content", "mode", "said"),
    [
        ("key", None, 0o600, "tls.key: No such file"),
        ("key", b"x", 0o600, "tls.key: not in PEM"),
        ("key", b"", 0o644, "others may read the key"),
        ("ca", b"-----BEGIN CERTIFICATE-----", 0o600, "ca.crt"),
        ("access", b"[[grant]]\nrole = 1", 0o600, "access.toml: line 1: 'role'"),
    ],
)
def test_files_that_cannot_be_used_stop_a_start(
    place: Place, files: dict[str, Path], name: str, content: bytes | None, mode: int, said: str
) -> None:
    """One line, exit code 2, for the daemon; for `kvstore web` too where the file is its own."""
    files[name].unlink()
    if content is not None:
        files[name].write_bytes(content)
        files[name].chmod(mode)
    done = kvstore("serve", *place.arguments, WEB, *arguments(files))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert said in done.stderr


def test_doctor_looks_at_certificates_and_the_access_file(files: dict[str, Path]) -> None:
    """Good ones are one line, what a start would refuse is a problem, what clients would refuse a warning."""
    words = [word.removeprefix("--set=") for word in [WEB, *arguments(files)]]

    def found() -> tuple[str, str]:
        config = load(None, words, environment={"KVSTORE_CONFIG": ""}).config
        (finding,) = certificates(Case(Path("/nowhere"), lambda: 0.0, config))
        return finding.level, finding.found

    assert found()[0] == "ok"
    expired = Authority().signed(begins=-2 * DAY, ends=-DAY)
    for name, content in zip(("certificate", "key"), expired, strict=True):
        files[name].write_bytes(content)
    assert found()[0] == "warning" and "expired" in found()[1]
    ends = Authority().signed(begins=-300 * DAY, ends=5 * DAY)
    for name, content in zip(("certificate", "key"), ends, strict=True):
        files[name].write_bytes(content)
    assert found()[0] == "warning" and "clients refuse it from" in found()[1]
    files["access"].write_text("[[grant]]")
    assert found()[0] == "problem" and "access.toml: line 1" in found()[1]


def lines_of(text: str) -> list[dict[str, Any]]:
    """The audit in a log."""
    lines = [json.loads(line) for line in text.splitlines() if '"kvstore.audit"' in line]
    for line in lines:
        assert line.pop("logger") == "kvstore.audit" and line.pop("time").endswith("Z")
    return lines


def test_each_action_of_an_admin_has_one_line(place: Place, serve: Callable[..., Daemon]) -> None:
    """At any level of the log: who, what, and how it ended; what is asked again to go on has no second one; reading has none;
    what comes through another door has its line there; one who is gone before the answer has one."""
    daemon = serve(place, *place.arguments, "--set=log.level=error")
    with Client(place.socket, timeout_s=10) as client:
        fields = {"model": "m", "tenant": "acme"}
        client.lookup([client.namespace(b"d" * 16, 4096, 32, 16, fields)], [b"h" * 32], ticket=1, tokens=16)
        peer = Peer(place.socket)
        for request in (frames.Status(), frames.Ping(), frames.Record(), frames.Record()):
            peer.ask(request)
        peer.ask(frames.SetQuota("", "acme", 0, None))
        assert peer.code_of(frames.SetPin("ff", b"h" * 32, True)) == "not_found"
        door = Peer(place.socket, hello=False)
        door.socket.sendall(
            frames.encode_frame(
                frames.Hello(frames.PROTOCOL_VERSION, "kvstore grpc", attach=False, door="grpc")
            )
        )
        door.receive()
        assert isinstance(door.ask(frames.SetTtl("", b"", "acme", 60.0, True)), frames.StatusReport)
        done = kvstore("clear", "--tenant=acme", f"--socket={place.socket}", "--yes")
        assert done.returncode == 0, done.stderr
    daemon.stop()
    lines = lines_of(daemon.log())
    who = lines[0]["who"]
    assert who.startswith("pid ") and who.endswith(f"uid {os.getuid()}")
    told = [
        (line["door"], line["access"], line["action"], line["subject"], line["outcome"]) for line in lines
    ]
    assert told[:3] == [
        ("socket", "admin", "record", "", "ok"),
        ("socket", "admin", "setquota", "tenant=acme dram_bytes=0", "ok"),
        ("socket", "admin", "setpin", f"namespace=ff hash={(b'h' * 32).hex()} pinned=True", "not_found"),
    ]
    assert {line[2] for line in told[3:]} == {"clear"} and "tenant=acme" in told[-1][3]


def test_a_command_that_acts_on_a_bucket_itself_has_a_line_in_syslog(tmp_path: Path) -> None:
    """As JSON, once; where there is no syslog, nothing happens."""
    path = tmp_path / "log"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as syslog:
        syslog.bind(str(path))
        syslog.settimeout(10)
        try:
            audit.to_syslog(str(path))
            audit.note("cli", "uid 7", "admin", "erase", "--tenant acme\n\x1b[2J", "ok")
            line = syslog.recv(65536)
            audit.to_syslog(str(tmp_path / "none"))
            audit.note("cli", "uid 7", "admin", "erase", "", "ok")
        finally:
            audit.log.handlers, audit.log.propagate = [], True
    assert line.startswith(b"<86>{") and b"\n" not in line.rstrip(b"\0\n") and b"\x1b" not in line
    told = json.loads(line[4:].rstrip(b"\0"))
    assert (told["who"], told["subject"]) == ("uid 7", "--tenant acme\n\x1b[2J")


def test_callers_that_nobody_knows_fill_no_audit(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share one line a second, which says how many it stands for; lines of others are all there."""
    now_s = [1e9]
    monkeypatch.setattr(audit.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(audit, "_unknown", audit._Unknown())
    monkeypatch.setattr(audit.log, "propagate", True)
    caplog.set_level("INFO", "kvstore.audit")
    for second in range(3):
        now_s[0] = 1e9 + second * audit.UNKNOWN_S
        for number in range(1000):
            audit.note("grpc", "", "admin", "Erase", "", "UNAUTHENTICATED")
            if number % 500 == 0:
                audit.note("grpc", "operator", "admin", "Erase", "tenant=acme", "OK")
    told = [record.__dict__ for record in caplog.records]
    assert [one["subject"] for one in told if not one["who"]] == ["", *["999 more were left out before"] * 2]
    assert sum(one["who"] == "operator" for one in told) == 6


def test_no_key_and_no_token_is_shown_anywhere(
    place: Place, serve: Callable[..., Daemon], files: dict[str, Path], tmp_path: Path
) -> None:
    """Not in the command lines and environments of the daemon and its children, its log, its settings, an error, doctor's bundle;
    nor the token's hash."""
    key = "".join(files["key"].read_text().split("\n")[1:-2])
    daemon = serve(place, *place.arguments, "--set=log.level=debug", WEB, *arguments(files))
    pids = (daemon.process.pid, child_of(daemon))
    until(
        lambda: str(files["key"]) in Path(f"/proc/{pids[1]}/cmdline").read_text(),
        "the child runs its own program",
    )
    shown = [Path(f"/proc/{pid}/{what}").read_text() for pid in pids for what in ("cmdline", "environ")]
    bundle = tmp_path / "bundle.tar.gz"
    for words in (
        ["config", "show", *place.arguments, *arguments(files)],
        ["config", "get", f"--socket={place.socket}"],
        ["doctor", f"--bundle={bundle}", f"--socket={place.socket}"],
        ["status", f"--socket={place.socket}", "-o", "json"],
    ):
        done = kvstore(*words)
        shown += [done.stdout, done.stderr]
    files["key"].write_text(files["key"].read_text()[:-80])
    shown.append(kvstore("serve", *place.arguments, WEB, *arguments(files)).stderr)
    daemon.stop()
    shown.append(daemon.log())
    with tarfile.open(bundle) as packed:
        contents = [packed.extractfile(entry) for entry in packed]
        shown += [content.read().decode() for content in contents if content is not None]
    hashed = hashlib.sha256(TOKEN.encode()).hexdigest()
    for secret in (key[:40], key[-40:], TOKEN, hashed):
        assert not [text for text in shown if secret in text]
