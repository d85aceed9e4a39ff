"""The examples run as they are, each with a real daemon. Those with engines are in tests/vllm/test_examples.py."""

from __future__ import annotations

import json
import re
import select
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from kvstore.client import Client
from tests.running import ROOT, TIMEOUT_S, Daemon, Place, environment

EXAMPLES = ROOT / "examples"
Serve = Callable[..., Daemon]


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Run words as a process in the background; it is ended with the test."""
    running: list[subprocess.Popen[str]] = []

    def begin(*words: str | Path, **extra: str) -> subprocess.Popen[str]:
        running.append(
            subprocess.Popen(
                list(map(str, words)), stdout=subprocess.PIPE, text=True, env=environment(**extra)
            )
        )
        return running[-1]

    yield begin
    for process in running:
        process.terminate()
        process.communicate(timeout=TIMEOUT_S)


def finished(*words: str | Path, **extra: str) -> str:
    """stdout of a run that has to end well."""
    run = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, timeout=TIMEOUT_S, env=environment(**extra)
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def line_of(process: subprocess.Popen[str]) -> str:
    """Its next line on stdout, waited for."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
    assert readable, "it said nothing"
    return process.stdout.readline().strip()


def test_every_example_is_listed() -> None:
    """examples/README.md names each file and directory of the examples, and none that is not there."""
    listed = set(re.findall(r"\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text()))
    there = {path.name for path in EXAMPLES.iterdir() if not path.name.startswith((".", "__"))}
    assert listed == there - {"README.md"}


def test_client(place: Place, serve: Serve) -> None:
    """The first run stores every block of its prompt, the second finds and loads them all."""
    at = str(serve(place, *place.arguments, "--set=dram.capacity_bytes=96MiB").socket)
    words = (sys.executable, EXAMPLES / "client.py")
    assert finished(*words, KVSTORE_SOCKET_PATH=at).splitlines() == [
        "0 of 62 blocks are held",
        "0 loaded, 62 computed and stored",
    ]
    assert finished(*words, KVSTORE_SOCKET_PATH=at).splitlines() == [
        "62 of 62 blocks are held",
        "62 loaded, 0 computed and stored",
    ]


def test_client_without_a_daemon(place: Place) -> None:
    """Without a daemon it says so in a line and ends with 1."""
    run = subprocess.run(
        [sys.executable, EXAMPLES / "client.py"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment(KVSTORE_SOCKET_PATH=str(place.socket)),
    )
    assert (run.returncode, run.stderr) == (1, "") and run.stdout.startswith("no daemon")


def test_kv_events(place: Place, serve: Serve, start: Callable[..., subprocess.Popen[str]]) -> None:
    """It prints what is held when it comes, and again when that changes."""
    ends = [f"ipc://{place.path}/{name}" for name in ("e", "r")]
    settings = [f"--set=events.endpoint={ends[0]}", f"--set=events.replay_endpoint={ends[1]}"]
    daemon = serve(place, *place.arguments, *settings)
    follower = start(sys.executable, "-m", "examples.kv_events", *ends)
    assert line_of(follower) == "nothing"
    with Client(daemon.socket) as client:
        space = client.namespace(bytes(16), 16 << 10, 32, 16, {})
        assert client.put(space, [bytes([n]) * 32 for n in range(3)], b"", [bytes(16 << 10)] * 3) == 3
        while "3 blocks" not in (line := line_of(follower)):
            pass
    assert line == "dram 00000000: 3 blocks"


def test_replay_own_traffic(
    place: Place, serve: Serve, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Traffic that comes while it records is in its trace, and is replayed."""
    daemon = serve(place)
    trace = tmp_path / "trace.jsonl"
    script = start(
        EXAMPLES / "replay_own_traffic.sh",
        "5",
        TRACE=str(trace),
        KVSTORE=f"{sys.executable} -m kvstore",
        KVSTORE_SOCKET_PATH=str(daemon.socket),
    )
    with Client(daemon.socket, attach=False) as client:
        space = client.namespace(bytes(16), 16 << 10, 32, 16, {})
        ticket = 0
        while script.poll() is None and (not trace.exists() or trace.stat().st_size < 2000):
            ticket += 1
            hashes = [bytes([turn, ticket % 5 if turn > 3 else 0]) * 16 for turn in range(8)]
            client.lookup([space], hashes, ticket=ticket, tokens=128)
            time.sleep(0.01)
    printed, _ = script.communicate(timeout=TIMEOUT_S)
    assert script.returncode == 0, printed
    requests = [json.loads(line) for line in trace.read_text().splitlines()]
    assert sum(request.get("input_length") == 128 for request in requests) >= 5
    assert "kvstore" in printed and f"kept: {trace}" in printed


def test_run_sh_starts_three_and_leaves_none(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Two servers with the connector and a proxy that knows both are started; when one ends, the others do."""
    stub, told = tmp_path / "python", tmp_path / "told"
    stub.write_text(
        f'#!/bin/bash\necho "$$ $*" >> {told}\n'
        f'[[ "$1" = */proxy.py ]] && {{ while [ "$(wc -l < {told})" -lt 3 ]; do sleep 0.05; done; exit; }}\nexec sleep 600\n'
    )
    stub.chmod(0o755)
    script = start(EXAMPLES / "vllm_pd/run.sh", "MODEL", "--max-model-len", "99", PYTHON=str(stub))
    script.wait(TIMEOUT_S)
    lines = dict(reversed(line.split(" ", 1)) for line in told.read_text().splitlines())
    servers = [words for words in lines if "api_server" in words]
    assert len(lines) == 3 and len(servers) == 2
    assert all('"KVStoreConnector"' in words and words.endswith("--max-model-len 99") for words in servers)
    (proxy,) = set(lines) - set(servers)
    assert "--prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200" in proxy
    for pid in lines.values():
        assert not Path(f"/proc/{pid}").exists()


class Standing:
    """A server in the place of vLLM's: keeps what it was sent, and answers what it was told to."""

    def __init__(self, answer: bytes, content_type: str, status: int = 200) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        standing = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                standing.asked.append((self.path, json.loads(body)))
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def post(url: str, body: dict[str, Any]) -> tuple[int, bytes]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_the_proxy(start: Callable[..., subprocess.Popen[str]]) -> None:
    """The prefill server is asked for one token, and what it tells of its blocks goes with the unchanged request to the
    decode server, whose stream is the answer; a refusal of the prefill server is passed on; no server is a 502."""
    pytest.importorskip("aiohttp")
    told = {"kvstore": {"daemon": "d", "tokens": 64}}
    prefill = Standing(json.dumps({"kv_transfer_params": told}).encode(), "application/json")
    decode = Standing(b"data: one\n\ndata: [DONE]\n\n", "text/event-stream")
    refusing = Standing(b'{"error": "no such model"}', "application/json", 404)
    asked = {"model": "m", "prompt": "p", "max_tokens": 9, "min_tokens": 2, "stream": True}

    def proxied(*behind: str) -> str:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        process = start(
            sys.executable,
            EXAMPLES / "vllm_pd/proxy.py",
            "--port",
            str(port),
            "--prefill",
            behind[0],
            "--decode",
            behind[1],
        )
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline and process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        return f"http://127.0.0.1:{port}/v1/completions"

    try:
        status, answer = post(proxied(prefill.url, decode.url), asked)
        assert (status, answer) == (200, b"data: one\n\ndata: [DONE]\n\n")
        ((path, first),) = prefill.asked
        assert path == "/v1/completions" and first["kv_transfer_params"] == {"do_remote_decode": True}
        assert (first["max_tokens"], first["stream"], "min_tokens" in first) == (1, False, False)
        assert decode.asked == [("/v1/completions", {**asked, "kv_transfer_params": told})]
        assert post(proxied(refusing.url, decode.url), asked) == (404, b'{"error": "no such model"}')
        status, answer = post(proxied("http://127.0.0.1:9", decode.url), asked)
        assert status == 502 and b"behind the proxy" in answer
    finally:
        for server in (prefill, decode, refusing):
            server.close()
