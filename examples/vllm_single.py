"""One vLLM engine: a prompt is computed once, and comes back from the store when the engine has forgotten it.

    kvstore serve &
    python examples/vllm_single.py MODEL

Run it twice: the second run, a new engine, computes only the last, partial block. `vllm serve` takes the same
dictionary as JSON, after `--kv-transfer-config` (docs/vllm.md).
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault(
    "VLLM_ENABLE_V1_MULTIPROCESSING", "0"
)  # the engine in this process: its cache can be emptied

KV_TRANSFER = {
    "kv_connector": "KVStoreConnector",
    "kv_connector_module_path": "connectors.vllm",  # not needed where kvstore-llm is installed by pip
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
PROMPT = "You are a careful assistant. Answer with the numbers from the table, and name the line. " * 20


def main(model: str) -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(model, kv_transfer_config=KV_TRANSFER, enforce_eager=True, max_model_len=2048)
    sampling = SamplingParams(temperature=0.0, max_tokens=16)
    answers = []
    for run in ("first", "second"):
        (output,) = engine.generate([PROMPT], sampling, use_tqdm=False)
        answers.append(output.outputs[0].token_ids)
        print(
            f"{run}: {output.num_cached_tokens} of {len(output.prompt_token_ids or ())} prompt tokens were not computed"
        )
        engine.generate(["A few steps, in which the last blocks are saved."], sampling, use_tqdm=False)
        engine.reset_prefix_cache()  # vLLM's own cache: what comes back now comes from the store
    assert answers[0] == answers[1], "the answer is the same, loaded or computed"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: vllm_single.py MODEL")
    main(*sys.argv[1:])
