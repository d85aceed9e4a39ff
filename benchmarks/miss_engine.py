"""One vLLM engine in a process of its own, asked over stdin. Started by miss_overhead.

    argv[1]  {"model": …, "kv_transfer_config": {…} or null, …}
    stdin    {"prompts": [[token, …], …], "output_tokens": n, "connected": true}, one object a line; "reset": true
             empties vLLM's own prefix cache before
    stdout   {"ready": true}, then {"seconds": …, "cpu_seconds": …, "cached": […]} for each request: the second of the
             engine's thread, the third the prompt tokens that were not computed

An engine that was started with a connector can do without it for a request ("switches": true when
started, and "connected": false): scheduler and worker then find none, as in an engine that never had one, and the memory,
the weights and the layout of the KV stay the same. It is switched between requests only. That
reaches into vLLM's internals, and stops with an AttributeError where they are other ones.

Whatever vLLM prints goes to stderr: the real stdout is moved aside before anything is imported.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> int:
    """Serve until stdin ends; the exit code."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    import vllm

    job = json.loads(sys.argv[1])
    engine = _make(vllm, job)
    switch = Switch(engine) if job["switches"] else None
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=request["output_tokens"], ignore_eos=True, detokenize=False
        )
        if switch is not None:
            switch.turn(request["connected"])
        prompts = [{"prompt_token_ids": tokens} for tokens in request["prompts"]]
        if request.get("reset") and not engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache: blocks are in use")
        started, cpu_started = time.perf_counter(), time.thread_time()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        answer = {
            "seconds": time.perf_counter() - started,
            "cpu_seconds": time.thread_time() - cpu_started,
            "cached": [output.num_cached_tokens for output in outputs],
        }
        print(json.dumps(answer), file=answers, flush=True)
    if switch is not None:
        switch.turn(True)  # so that it is shut down
    engine.llm_engine.engine_core.shutdown()
    return 0


class Switch:
    """Puts the connector's two halves where vLLM looks for them, or None."""

    def __init__(self, engine: Any) -> None:
        from vllm.distributed.kv_transfer import kv_transfer_state

        self._scheduler = engine.llm_engine.engine_core.engine_core.scheduler
        self._worker = kv_transfer_state
        self._halves = (self._scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT)

    def turn(self, connected: bool) -> None:
        scheduler_half, worker_half = self._halves if connected else (None, None)
        self._scheduler.connector = scheduler_half
        self._worker._KV_CONNECTOR_AGENT = worker_half


def _make(vllm: Any, job: dict[str, Any]) -> Any:
    options = {"kv_transfer_config": job["kv_transfer_config"]} if job["kv_transfer_config"] else {}
    return vllm.LLM(
        model=job["model"],
        load_format="dummy",  # weights made on the spot, random, from a seed
        skip_tokenizer_init=True,
        dtype="bfloat16",
        block_size=job["block_tokens"],
        max_model_len=job["positions_max"],
        kv_cache_memory_bytes=job["kv_bytes"],
        max_num_seqs=job["concurrency"],
        enforce_eager=True,
        enable_prefix_caching=True,
        **options,
    )


if __name__ == "__main__":
    sys.exit(main())
