"""What runs inside an engine process of the demo: vLLM with our connector, asked through a pipe.

    demo  ◀── "imported"          vLLM is
          ── Job ──▶   ◀── "ready"     the engine is made and has answered a warm-up prompt
          ── (prompts, output tokens) ──▶   ◀── Run       again and again, until the demo closes the pipe

Whatever vLLM prints goes to the log.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from examples.demo.model import POSITIONS_MAX

OUTPUT_TOKENS = 24  # one alone would say too little about the KV behind it
BLOCK_TOKENS = 32  # vLLM on CPU takes multiples of 32
FINISH_S_MAX = 30.0  # for saves that are still under way after the last token
YIELD_S = 0.001  # as vLLM's engine process sleeps after a step that computed nothing
COUNTERS = ("vllm:kvstore_", "vllm:prompt_tokens_cached_by_source")
ENVIRONMENT = {  # offline, quiet and in one process
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(slots=True, frozen=True)
class Job:
    """What kind of engine. role: vLLM's kv_role; "": no connector. extra: the connector's settings. warm_up: a prompt of its own,
    and how many tokens it is answered with."""

    model: str
    extra: dict[str, str]
    role: str
    dtype: str
    kv_bytes: int
    warm_up: str
    warm_up_tokens: int = OUTPUT_TOKENS
    load_format: str = "auto"


@dataclass(slots=True, frozen=True)
class Reply:
    """One request. ttft_ms: arrival to first token."""

    prompt_tokens: int
    ttft_ms: float
    tokens: list[int]


@dataclass(slots=True, frozen=True)
class Run:
    """Replies in the order of the prompts, and how much each vLLM counter grew meanwhile."""

    replies: list[Reply]
    counters: dict[str, float]


def serve(pipe: Connection, log_path: Path) -> None:
    """Serve one engine until the pipe is closed."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    os.environ.update(ENVIRONMENT)
    import vllm

    pipe.send("imported")
    with contextlib.suppress(EOFError):
        job = pipe.recv()
        engine = _make(vllm, job)
        _yield_while_loading(engine)
        _run(engine, vllm, [job.warm_up], job.warm_up_tokens)
        pipe.send("ready")
        with contextlib.suppress(EOFError):
            while True:
                pipe.send(_run(engine, vllm, *pipe.recv()))
        engine.llm_engine.engine_core.shutdown()


def _make(vllm: Any, job: Job) -> Any:
    connector = {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "connectors.vllm",
        "kv_role": job.role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": job.extra,
    }
    return vllm.LLM(
        model=job.model,
        load_format=job.load_format,
        dtype=job.dtype,
        block_size=BLOCK_TOKENS,
        max_model_len=POSITIONS_MAX,
        kv_cache_memory_bytes=job.kv_bytes,
        max_num_seqs=1,
        enforce_eager=True,
        disable_log_stats=False,
        kv_transfer_config=connector if job.role else None,
    )


def _yield_while_loading(engine: Any) -> None:
    """Give loads the interpreter between steps that computed nothing, as vLLM's own engine process does.

    vLLM leaves this out when the engine runs in the caller's process: it would then spin while the
    connector's thread waits 5 ms for the interpreter again and again, and a load of 2 ms takes 200.
    """
    core = engine.llm_engine.engine_core.engine_core
    step = core.step_fn

    def step_and_yield() -> Any:
        outputs, has_computed = step()
        if not has_computed:
            time.sleep(YIELD_S)
        return outputs, has_computed

    core.step_fn = step_and_yield


def _run(engine: Any, vllm: Any, prompts: list[str], output_tokens: int) -> Run:
    before = _counters(engine)
    replies = [_ask(engine, vllm, prompt, output_tokens) for prompt in prompts]
    _finish(engine)
    return Run(replies, {name: value - before.get(name, 0.0) for name, value in _counters(engine).items()})


def _ask(engine: Any, vllm: Any, prompt: str, output_tokens: int) -> Reply:
    greedy = vllm.SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    [output] = engine.generate([prompt], greedy, use_tqdm=False)
    return Reply(
        prompt_tokens=len(output.prompt_token_ids),
        ttft_ms=output.metrics.first_token_latency * 1e3,
        tokens=list(output.outputs[0].token_ids),
    )


def _finish(engine: Any) -> None:
    """Step on until the connector has stored what it still holds back: `generate` stops at the last token."""
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    deadline = time.monotonic() + FINISH_S_MAX
    while scheduler.has_requests() and time.monotonic() < deadline:
        engine.llm_engine.step()


def _counters(engine: Any) -> dict[str, float]:
    """vLLM's Prometheus counters that have to do with cached tokens; a source is part of the name."""
    totals: dict[str, float] = {}
    for metric in engine.get_metrics():
        if metric.name.startswith(COUNTERS):
            source = metric.labels.get("source")
            name = f"{metric.name}:{source}" if source else metric.name
            totals[name] = totals.get(name, 0.0) + metric.value
    return totals
