"""One vLLM engine in a process of its own, asked over stdin. Started by miss_overhead.

    argv[1]  {"model": …, "kv_transfer_config": {…} or null, …}
    stdin    {"prompts": [[token, …], …], "output_tokens": n}, one JSON object a line; its end is ours
    stdout   {"ready": true}, then {"seconds": …} for each request

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
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=request["output_tokens"], ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": tokens} for tokens in request["prompts"]]
        started = time.perf_counter()
        engine.generate(prompts, sampling, use_tqdm=False)
        print(json.dumps({"seconds": time.perf_counter() - started}), file=answers, flush=True)
    engine.llm_engine.engine_core.shutdown()
    return 0


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
