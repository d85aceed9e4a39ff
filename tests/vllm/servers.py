"""vLLM's OpenAI servers, and a proxy before two of them, as processes of their own on this machine.

    ask ─▶ proxy ─┬─ 1. prefill (max_tokens = 1) ─▶ server
                  ╰─ 2. decode ───────────────────▶ server

The proxy is one of vLLM's own examples, from its source distribution. Prompts are token ids, answers too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.command import free_port
from benchmarks.errors import BenchError

HOST = "127.0.0.1"
START_S_MAX = 600.0
STOP_S_MAX = 30.0
ANSWER_S_MAX = 300.0
LOOK_AGAIN_S = 0.2
LOG_CHARS = 4000
KV_BYTES = 32 << 20
ROOT = Path(__file__).parents[2]
PROXY = ROOT / ".cache/vllm-0.32.0/tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"


class ServerError(BenchError):
    """A server did not start, ended, or answered something else than what it was asked for."""


@dataclass(slots=True)
class Answer:
    """tokens: what was generated. cached: prompt tokens that were not computed."""

    tokens: list[int]
    cached: int = 0


class Server:
    """A process that serves HTTP. `wait` before it is asked."""

    def __init__(self, name: str, scratch: Path, words: list[str], path: str, **environment: str) -> None:
        """path: answers 200 once it is ready."""
        self.name, self.port = name, free_port()
        self._path, self._log = path, scratch / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *words, "--port", str(self.port)],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
                process_group=0,  # killed whole; a session of its own is scheduled as a group, beside which the daemon's starves
            )

    def wait(self) -> None:
        """Until it is ready. Raises ServerError."""
        deadline_s = time.monotonic() + START_S_MAX
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                raise ServerError(f"{self.name} ended: {self.log()[-LOG_CHARS:]}")
            try:
                self.get(self._path)
                return
            except (urllib.error.URLError, OSError):
                time.sleep(LOOK_AGAIN_S)
        raise ServerError(f"{self.name} was not ready in {START_S_MAX:g} s: {self.log()[-LOG_CHARS:]}")

    def get(self, path: str) -> str:
        """The text that lies there. Raises URLError, OSError."""
        with urllib.request.urlopen(f"http://{HOST}:{self.port}{path}", timeout=ANSWER_S_MAX) as answer:
            text: str = answer.read().decode()
        return text

    def ask(self, prompt: list[int], max_tokens: int, replica: int | None = None) -> Answer:
        """Greedy tokens after this prompt, streamed. replica: the one of data parallel ones that is asked. Raises ServerError."""
        answer = Answer([])
        usage = {"include_usage": True}
        for line in self._post(prompt, max_tokens, replica, stream=True, stream_options=usage):
            _read(line, answer)
        if len(answer.tokens) != max_tokens:
            raise ServerError(f"{self.name}: {len(answer.tokens)} of {max_tokens} tokens came")
        return answer

    def transfer_params(self, prompt: list[int], **more: Any) -> Any:
        """The `kv_transfer_params` of an answer of one token. Raises ServerError."""
        return json.loads(b"".join(self._post(prompt, 1, **more))).get("kv_transfer_params")

    def _post(
        self, prompt: list[int], max_tokens: int, replica: int | None = None, **more: Any
    ) -> Iterator[bytes]:
        body = {
            "model": "model",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }
        chosen = {} if replica is None else {"X-data-parallel-rank": str(replica)}
        request = urllib.request.Request(
            f"http://{HOST}:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"} | chosen,
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S_MAX) as lines:
                yield from lines
        except (urllib.error.URLError, OSError) as error:
            raise ServerError(f"{self.name}: {error}: {self.log()[-LOG_CHARS:]}") from error

    def counters(self, prefix: str) -> dict[str, float]:
        """Prometheus counters whose names begin so, without that beginning and `_total`; summed over labels."""
        sums: dict[str, float] = {}
        for line in self.get("/metrics").splitlines():
            if line.startswith(prefix):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0].removeprefix(prefix).removesuffix("_total")
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def log(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """With everything that it started."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, 9)
                self._process.wait()


def api_server(
    name: str, scratch: Path, model: Path, transfer: dict[str, Any] | None, words: tuple[str, ...] = ()
) -> Server:
    """vLLM's server of a model, on CPU. transfer: its KV connector, or none."""
    options = ["--kv-transfer-config", json.dumps(transfer)] if transfer is not None else []
    return Server(
        name,
        scratch,
        [
            *(
                "-m",
                "vllm.entrypoints.openai.api_server",
                "--model",
                str(model),
                "--served-model-name",
                "model",
            ),
            *("--host", HOST, "--dtype", "float32", "--block-size", "32", "--enforce-eager"),
            *("--kv-cache-memory-bytes", str(KV_BYTES), "--disable-uvicorn-access-log"),
            "--enable-prompt-tokens-details",
            *options,
            *words,
        ],
        "/health",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS="1",
        OMP_WAIT_POLICY="PASSIVE",  # the threads of an idle engine must not spin on another's cores
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        VLLM_LOGGING_LEVEL="WARNING",
    )


def proxy(name: str, scratch: Path, prefill: Server, decode: Server) -> Server:
    """vLLM's own example of a proxy. Raises ServerError where its source is not."""
    if not PROXY.exists():
        raise ServerError(f"{PROXY.relative_to(ROOT)} is missing: run `make vllm-source`")
    ports = ["--prefiller-ports", str(prefill.port), "--decoder-ports", str(decode.port)]
    hosts = ["--host", HOST, "--prefiller-hosts", HOST, "--decoder-hosts", HOST]
    return Server(name, scratch, [str(PROXY), *hosts, *ports], "/healthcheck")


def _read(line: bytes, answer: Answer) -> None:
    """One line of a stream of events."""
    if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
        return
    event = json.loads(line[6:])
    for choice in event.get("choices", ()):
        answer.tokens += choice.get("token_ids") or []
    details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
    answer.cached = details.get("cached_tokens") or answer.cached
