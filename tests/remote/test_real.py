"""Against a real daemon: the same answers as here, and no failed request over restarts and kills."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import remote
from kvstore.client import Client, Unavailable
from kvstore.remote import Namespace, Node, Selector
from kvstore.remote.places import OPTIONS, service_config
from kvstore.tools.cli import main
from tests.remote.servicer import Asked
from tests.rpc.serving import Serving, child_of, serving, target_of, until
from tests.running import Place, daemons

COLUMNS = (96 << 10, 32 << 10)
RECORD_BYTES = sum(COLUMNS)
SPACE = Namespace(bytes(range(16)), RECORD_BYTES, 32, 16, {"model": "org/model", "tenant": ""}, COLUMNS)
HASHES = [bytes([number]) * 32 for number in range(6)]
RECORDS = [os.urandom(RECORD_BYTES) for _ in HASHES]
DIGEST = SPACE.digest.hex()[:8]
CHANGING = {
    "age_s",
    "idle_s",
    "now_s",
    "uptime_s",
    "round_trip_s",
    "until_s",
    "since_s",
    "lookups",
    "sessions",
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(Place(tmp_path_factory.mktemp("remote"))) as found:
        yield found


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_records_go_in_and_out(served: Serving, kind: str) -> None:
    """What is stored over gRPC is held for the local client, and comes back over gRPC; a miss is an answer."""
    node = Asked(kind, served.target)
    hashes = [one[:31] + kind[:1].encode() for one in HASHES]
    node.register_namespace(SPACE)
    assert SPACE in node.namespaces()
    assert node.lookup(SPACE, hashes).held_blocks == 0
    assert node.put_records(SPACE, hashes, RECORDS).blocks == 6
    found = node.lookup(SPACE, hashes)
    assert (found.blocks, found.held_blocks, found.held_bytes) == (6, 6, 6 * RECORD_BYTES)
    assert [(run.blocks, run.tier) for run in found.runs] == [(6, "dram")]
    came = node.get_records(SPACE, [*hashes, b"x" * 32])
    assert [(index, bytes(record)) for index, record in came] == list(enumerate(RECORDS))
    with Client(served.place.socket) as client:
        space = client.namespace(SPACE.digest, RECORD_BYTES, 32, 16, dict(SPACE.fields), columns=COLUMNS)
        assert client.lookup([space], hashes) == 6
    with pytest.raises(remote.NotFound):
        node.lookup(Selector(model="nobody's"), hashes)
    assert node.caller().may
    node.close()


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    code = main([*words, "-o", "json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if captured.out else captured.err.count("\n")


def steady(document: Any) -> Any:
    """Without what differs from one moment to the next."""
    if isinstance(document, dict):
        return {name: steady(value) for name, value in document.items() if name not in CHANGING}
    return [steady(one) for one in document] if isinstance(document, list) else document


def settled(served: Serving) -> bool:
    """What a report says of each model and tenant, as of a few seconds ago, is what is held now."""
    with Client(served.place.socket) as client:
        status = client.status()
    told, held = (
        [
            sum(row[field] for row in status[name])
            for field in ("blocks", "dram_bytes", "asked_blocks", "hit_blocks")
        ]
        for name in ("holdings", "namespaces")
    )
    return told == held


READ = [
    "retention", "config get", "config get log.level", "fsck", "report", "report --by minute", f"explain --prefix {HASHES[2].hex()}",
    "pin ffffffff", "config get no.such", "config set no.such 1", f"clear --prefix {HASHES[3].hex()} --dry-run", "explain --prefix eeeeeeee",
    "ttl 1h --namespace eeeeeeee", "clear --namespace 0 --dry-run", "clear --namespace e --dry-run", "explain --tokens 1,2,3 --namespace 00", "clear --namespace eeeeeeee --yes", "explain --tokens 1,2,3 --model nobody",
]  # fmt: skip
# What is done before, here and there, so that both find the same.
CHANGED = {
    f"pin {HASHES[2].hex()[:8]}": "",
    f"unpin {HASHES[2].hex()}": f"pin {HASHES[2].hex()}",
    "ttl 1h --tenant acme": "ttl off --tenant acme",
    "ttl off --tenant acme": "ttl 1h --tenant acme",
    "ttl never --tenant acme": "ttl 1h --tenant acme",
    f"quota --namespace {DIGEST} --dram 1MiB": f"quota --namespace {DIGEST} --dram none",
    f"quota --namespace {DIGEST} --dram none": f"quota --namespace {DIGEST} --dram 1MiB",
    "config set log.level warning": "config set log.level info",
}


@pytest.mark.parametrize("words", [*READ, *CHANGED])
def test_commands_say_the_same(
    served: Serving, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    """-o json of another node's daemon is what it is at the node itself, and so is the exit code."""
    monkeypatch.setenv("KVSTORE_CONFIG", "")
    with Node(served.target) as node:
        node.register_namespace(SPACE)
        node.put_records(SPACE, HASHES, RECORDS)
    if words.startswith("report"):
        until(lambda: settled(served), "a report says what is held now")
    socket = ["--socket", str(served.place.socket)]
    answers = []
    for place in (socket, ["--node", served.target]):
        if before := CHANGED.get(words):
            assert main([*before.split(), *socket]) in (0, 3)
            capsys.readouterr()
        answers.append(said([*words.split(), *place], capsys))
    assert answers[1][0] == answers[0][0]
    assert steady(answers[1][1]) == steady(answers[0][1])


def test_status_ping_and_top(
    served: Serving, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the node, as tables and as documents."""
    monkeypatch.setenv("KVSTORE_CONFIG", "")
    code, status = said(["status", "--node", served.target], capsys)
    assert code == 0 and status["daemon"]["pid"] == served.daemon.process.pid
    code, ping = said(["ping", "--node", served.target], capsys)
    assert (code, ping["node"], ping["pid"]) == (0, served.target, served.daemon.process.pid)
    for words in (["status"], ["ping"], ["retention"], ["top", "--once"], ["report"], ["config", "get"]):
        assert main([*words, "--node", served.target]) == 0, words
        assert capsys.readouterr().out.count("\n") >= 1
    assert main(["status", "--node", "127.0.0.1:1", "--node-token-file", "/none"]) == 3
    assert "/none: no such file" in capsys.readouterr().err


class Asking:
    """Lookups, rules and records without end, by threads of their own."""

    def __init__(self, target: str, socket: Path) -> None:
        self.node, self.engine = Node(target, timeout_s=60), Client(socket)
        self.failed: list[Exception] = []
        self.done = [0, 0, 0, 0]
        self._over = threading.Event()
        space = self.engine.namespace(SPACE.digest, RECORD_BYTES, 32, 16, dict(SPACE.fields), columns=COLUMNS)
        work = (
            lambda: self.node.lookup(SPACE, HASHES),
            lambda: list(self.node.get_records(SPACE, HASHES)),
            self.node.rules,
            lambda: self._as_engine(space),
        )
        self._threads = [threading.Thread(target=self._ask, args=(n, one)) for n, one in enumerate(work)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int, ask: Callable[[], Any]) -> None:
        while not self._over.is_set() and not self.failed:
            try:
                ask()
                self.done[number] += 1
            except Exception as error:  # noqa: BLE001 told by the test
                self.failed.append(error)

    def _as_engine(self, space: Any) -> None:
        """An engine makes its namespace known again as soon as there is a daemon, and takes what fails as a miss."""
        with contextlib.suppress(Unavailable):
            self.engine.lookup([space], HASHES)
        self._over.wait(0.1)

    def has_asked(self) -> Callable[[], bool]:
        """Whether each of them has done five more since now."""
        before = list(self.done)
        return lambda: bool(self.failed) or all(d >= b + 5 for d, b in zip(self.done, before, strict=True))

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self.node.close()
        self.engine.close()
        assert not self.failed, self.failed[0]


def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as always, over more seconds: a machine that is busy with other tests starts a process in many seconds."""
    config = ("grpc.service_config", service_config(multiplier=4.0, pause_s_max=12.0))
    monkeypatch.setattr(
        "kvstore.remote.node.OPTIONS", [config if option[0] == config[0] else option for option in OPTIONS]
    )
    monkeypatch.setattr("kvstore.remote.calls.PAUSE_S", 0.5)


def test_no_request_fails_over_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gRPC process killed -9 is started again; a daemon killed -9 and started again, too: clients wait, none fails."""
    patient(monkeypatch)
    with serving(Place(tmp_path), "dram.slab_bytes=4MiB") as served, Node(served.target) as node:
        port = served.target.rpartition(":")[2]
        node.register_namespace(SPACE)
        node.put_records(SPACE, HASHES, RECORDS)
    words = [*Place(tmp_path).arguments, f"--set=grpc.listen=127.0.0.1:{port}"]
    with daemons(tmp_path) as start:
        daemon = start(Place(tmp_path), *words)
        asking = Asking(target_of(daemon), Place(tmp_path).socket)
        until(asking.has_asked(), "all have asked")
        os.kill(child_of(daemon), signal.SIGKILL)
        until(asking.has_asked(), "all go on after the gRPC process was killed")
        daemon.stop(signal.SIGKILL)
        daemon = start(Place(tmp_path), *words)
        until(asking.has_asked(), "all go on after the daemon was killed")
        daemon.stop()
        daemon = start(Place(tmp_path), *words)
        until(asking.has_asked(), "all go on after the daemon was restarted")
        asking.end()
