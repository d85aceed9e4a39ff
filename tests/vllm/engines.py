"""Real engines for tests: processes of their own that are given orders (see `engine_process.py`)."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.running import ROOT, environment

START_TIMEOUT_S = 600
BLOCK_TOKENS = 32
PATIENT = {
    "lookup_timeout_s": 5,
    "load_timeout_s": 30,
    "save_timeout_s": 30,
}  # for machines that are busy with other tests


Adapter = tuple[Any, ...]  # arguments of a LoRARequest: name, number within an engine, directory, …


@dataclass
class Generated:
    """tokens: by prompt. cached: prompt tokens that were not computed. ends: why each stopped."""

    tokens: list[list[int]]
    cached: list[int]
    ends: list[str]
    seconds: float


def ours(socket: Path, role: str = "kv_both", extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """vLLM's configuration of our connector, as an engine's only one or as a child of MultiConnector."""
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "connectors.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kvstore_socket": str(socket), **PATIENT, **(extra or {})},
    }


class EngineHost:
    """One process; `start` replaces its engine."""

    def __init__(self, model: Path, directory: Path, **extra: str) -> None:
        self.model = model
        self.errors = directory / f"engine-{id(self)}.log"
        self.hub = directory / "cache" / "huggingface" / "hub"  # where it looks for models by name
        self._stderr = open(self.errors, "w")  # noqa: SIM115 - open for as long as the process
        settings = {"XDG_CACHE_HOME": str(directory / "cache"), **extra}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.engine_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            cwd=ROOT,
            env=environment(**settings),
            process_group=0,  # killed whole; a session of its own is scheduled as a group, beside which the daemon's starves
        )

    def start(
        self,
        socket: Path | None,
        role: str = "kv_both",
        extra: dict[str, Any] | None = None,
        module: str = "connectors.vllm",
        **options: Any,
    ) -> None:
        """A new engine; without a socket, one without a connector. module: where vLLM imports it from."""
        settings: dict[str, Any] = {
            "model": str(self.model),
            "dtype": "float32",
            "enforce_eager": True,
            "kv_cache_memory_bytes": 32 << 20,
            "max_model_len": 2048,
            "block_size": BLOCK_TOKENS,
            "disable_log_stats": False,
            **options,
        }
        if socket is not None:
            connector = {**ours(socket, role, extra), "kv_connector_module_path": module}
            settings["kv_transfer_config"] = connector
        is_patient = {**PATIENT, **(extra or {})}["save_timeout_s"] >= PATIENT["save_timeout_s"]
        order = {"do": "start", "options": settings, "step_wait_s": 30 if is_patient else 1}
        self.order(order, START_TIMEOUT_S)

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int = 16,
        salt: str = "",
        timeout_s: float = 300,
        adapter: Adapter | None = None,
        images: list[int] | None = None,
        identifiers: list[str] | None = None,
    ) -> Generated:
        """images: for each prompt the seed of its picture. identifiers: what the user calls it."""
        order: dict[str, Any] = {"prompts": prompts, "max_tokens": max_tokens, "salt": salt}
        if adapter is not None:
            order["adapter"] = adapter
        if images is not None:
            order["images"] = images
        if identifiers is not None:
            order["identifiers"] = identifiers
        return Generated(**self.order({"do": "generate", **order}, timeout_s))

    def finish_saves(self) -> None:
        """Until vLLM holds no blocks any more for what is being saved."""
        deadline = time.monotonic() + 60
        while self.pending():
            assert time.monotonic() < deadline, self.log()[-4000:]
            self.generate([[1, 2, 3]], max_tokens=2)
        assert self.metrics().get("hook_errors", 0) == 0

    def metrics(self) -> dict[str, float]:
        return self.order({"do": "metrics"}, 20)

    def pending(self) -> int:
        """Requests whose blocks vLLM still holds: those that run, and those whose saves are under way."""
        return int(self.order({"do": "pending"}, 20)["requests"])

    def sibling_counts(self) -> dict[str, int]:
        return self.order({"do": "sibling_counts"}, 20)

    def fill_gap(self, name: str) -> None:
        self.order({"do": "fill_gap", "name": name}, 120)

    def call_workers(self, method: str) -> None:
        self.order({"do": "call_workers", "method": method}, 120)

    def core(self, call: str, **arguments: Any) -> None:
        """Call a method of vLLM's EngineCore."""
        self.order({"do": "core", "call": call, "arguments": arguments}, 120)

    def reset_prefix(self) -> None:
        self.order({"do": "reset_prefix"}, 20)

    def spoil(self) -> None:
        self.order({"do": "spoil"}, 20)

    def break_loads(self, at: int) -> None:
        self.order({"do": "break_loads", "at": at}, 20)

    def mend(self) -> None:
        self.order({"do": "mend"}, 20)

    def stop(self) -> None:
        self.order({"do": "stop"}, 30)

    def order(self, order: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self.send(order)
        return self.answer(timeout_s)

    def send(self, order: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        assert readable, f"no answer within {timeout_s} s: {self.errors.read_text()[-4000:]}"
        line = self.process.stdout.readline()
        assert line, f"the engine's process ended: {self.errors.read_text()[-4000:]}"
        answer: dict[str, Any] = json.loads(line)
        assert "error" not in answer, f"{answer['error']}\n{self.errors.read_text()[-4000:]}"
        return answer

    def log(self) -> str:
        return self.errors.read_text()

    def kill(self) -> None:
        """At once, with everything it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        for stream in (self.process.stdin, self.process.stdout, self._stderr):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:
                pass
