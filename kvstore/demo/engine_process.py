"""What runs inside an engine process of the demo: vLLM with our connector, asked over stdin.

    stdin   {job} then {"prompts": […], "output_tokens": n} …, one JSON object a line; its end is ours
    stdout  {"event": "imported"}, {"event": "ready"}, {"event": "answered", …} …

Whatever vLLM prints goes to stderr: the real stdout is moved aside before anything is imported.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO

from kvstore.demo import constants as c

COUNTERS = ("vllm:kvstore_", "vllm:prompt_tokens_cached_by_source")


def main() -> int:
    """Serve one engine until stdin ends; the exit code."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    import vllm

    _say(answers, event="imported")
    line = sys.stdin.readline()
    if not line:
        return 0
    job = json.loads(line)
    engine = _make(vllm, job)
    _yield_while_loading(engine)
    _ask(engine, vllm, job["warm_up"], c.OUTPUT_TOKENS)
    _finish(engine)
    _say(answers, event="ready")
    for line in sys.stdin:
        request = json.loads(line)
        before = _counters(engine)
        replies = [_ask(engine, vllm, prompt, request["output_tokens"]) for prompt in request["prompts"]]
        _finish(engine)
        after = _counters(engine)
        grown = {name: after[name] - before.get(name, 0.0) for name in after}
        _say(answers, event="answered", replies=replies, counters=grown)
    engine.llm_engine.engine_core.shutdown()
    return 0


def _make(vllm: Any, job: dict[str, Any]) -> Any:
    return vllm.LLM(
        model=job["model"],
        dtype=job["dtype"],
        block_size=c.BLOCK_TOKENS,
        max_model_len=c.POSITIONS_MAX,
        kv_cache_memory_bytes=job["kv_bytes"],
        max_num_seqs=1,
        enforce_eager=True,
        disable_log_stats=False,
        kv_transfer_config={
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "connectors.vllm",
            "kv_role": job["role"],
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": job["extra"],
        },
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
            time.sleep(c.ENGINE_YIELD_S)
        return outputs, has_computed

    core.step_fn = step_and_yield


def _ask(engine: Any, vllm: Any, prompt: str, output_tokens: int) -> dict[str, Any]:
    greedy = vllm.SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    [output] = engine.generate([prompt], greedy, use_tqdm=False)
    return {
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "ttft_ms": output.metrics.first_token_latency * 1e3,
        "tokens": list(output.outputs[0].token_ids),
    }


def _finish(engine: Any) -> None:
    """Step on until the connector has stored what it still holds back: `generate` stops at the last token."""
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    deadline = time.monotonic() + c.ENGINE_FINISH_S_MAX
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


def _say(answers: TextIO, **message: object) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
