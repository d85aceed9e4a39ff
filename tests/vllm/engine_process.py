"""A process that runs vLLM engines, one after the other, on orders from a test: JSON lines in, JSON lines out.

An engine in a process that has had one before starts in half a second instead of ten; each is
a new one all the same (weights, KV cache, connector). The orders:

    {"do": "start", ...}      keyword arguments for the engine; step_wait_s: what a load may hold up a step;
                              ten times as long may a start wait
    {"do": "generate", ...}   prompts (token ids), max_tokens, salt, adapter of LoRA (name, number, directory), images (for each
                              prompt the seed of its picture), identifiers (what it is called) → tokens, cached, seconds
    {"do": "metrics"}         the connector's Prometheus counters that are not zero, and a few of vLLM's
    {"do": "pending"}         requests whose blocks vLLM still holds
    {"do": "sibling_counts"}  what a KeeperConnector of this engine did
    {"do": "core", "call": name, "arguments": {}}  a method of vLLM's EngineCore: pause, sleep, new weights
    {"do": "reset_prefix"}    forget the local prefix cache
    {"do": "fill_gap", "name": function of `cpu_gaps`}, before the start; {"do": "call_workers", "method": of theirs}
    {"do": "spoil"}, {"do": "break_loads", "at": block}, {"do": "mend"}
    {"do": "stop"}
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
    TQDM_DISABLE="1",
)


class Host:
    """At most one engine at a time."""

    def __init__(self) -> None:
        self.engine: Any = None
        self._has_started = False
        self._undo: Any = lambda: None

    def start(self, order: dict[str, Any]) -> dict[str, Any]:
        from vllm import LLM

        from connectors import constants
        from connectors.vllm import spaces

        if not self._has_started:
            _make_starts_cheap()
            self._has_started = True
        constants.SYNC_WAIT_S_MAX = order["step_wait_s"]
        constants.RANKS_WAIT_S = spaces.WEIGHTS_START_WAIT_S = 10 * order["step_wait_s"]
        self.stop({})
        begun = time.monotonic()
        self.engine = LLM(**order["options"])
        return {"seconds": time.monotonic() - begun}

    def generate(self, order: dict[str, Any]) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        from tests.vllm.models import picture

        sampling = SamplingParams(temperature=0, max_tokens=order["max_tokens"], ignore_eos=True)
        prompts: list[dict[str, Any]] = [{"prompt_token_ids": tokens} for tokens in order["prompts"]]
        for prompt in prompts:
            if order.get("salt"):
                prompt["cache_salt"] = order["salt"]
        for prompt, seed in zip(prompts, order.get("images", []), strict=False):
            prompt["multi_modal_data"] = {"image": picture(seed)}
        for prompt, identifier in zip(prompts, order.get("identifiers", []), strict=False):
            prompt["multi_modal_uuids"] = {"image": [identifier]}
        adapter = LoRARequest(*order["adapter"]) if "adapter" in order else None
        begun = time.monotonic()
        outputs = self.engine.generate(prompts, sampling, lora_request=adapter, use_tqdm=False)
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "ends": [output.outputs[0].finish_reason for output in outputs],
            "seconds": time.monotonic() - begun,
        }

    def metrics(self, order: dict[str, Any]) -> dict[str, Any]:
        named = {metric.name: getattr(metric, "value", 0) for metric in self.engine.get_metrics()}
        wanted = (
            "vllm:kvstore_",
            "vllm:num_preemptions",
            "vllm:external_prefix_cache_hits",
            "vllm:spec_decode_",
        )
        return {
            name.removeprefix("vllm:kvstore_").removeprefix("vllm:"): value
            for name, value in named.items()
            if name.startswith(wanted)
        }

    def pending(self, order: dict[str, Any]) -> dict[str, Any]:
        return {"requests": len(self.engine.llm_engine.engine_core.engine_core.scheduler.requests)}

    def sibling_counts(self, order: dict[str, Any]) -> dict[str, Any]:
        from tests.vllm.siblings.keeper import COUNTS

        return dict(COUNTS)

    def fill_gap(self, order: dict[str, Any]) -> dict[str, Any]:
        from tests.vllm import cpu_gaps

        getattr(cpu_gaps, order["name"])()
        return {}

    def call_workers(self, order: dict[str, Any]) -> dict[str, Any]:
        self.engine.collective_rpc(order["method"])
        return {}

    def core(self, order: dict[str, Any]) -> dict[str, Any]:
        core = self.engine.llm_engine.engine_core.engine_core
        getattr(core, order["call"])(**order["arguments"])
        return {}

    def reset_prefix(self, order: dict[str, Any]) -> dict[str, Any]:
        return {"reset": self.engine.reset_prefix_cache()}

    def spoil(self, order: dict[str, Any]) -> dict[str, Any]:
        """What loads bring is noise from now on, as if somebody had stored it with a good checksum."""
        import numpy as np

        from kvstore.client.leases import GrantedSlots

        true_init = GrantedSlots.__init__

        def init(slots: Any, arena: Any, lock: Any, *arguments: Any) -> None:
            true_init(slots, arena, lock, *arguments)
            if lock is None:
                noise = np.random.default_rng(1).standard_normal
                slots.views = [
                    memoryview(noise(len(view) // 4, dtype=np.float32).tobytes()) for view in slots.views
                ]

        GrantedSlots.__init__ = init  # type: ignore[method-assign]
        self._undo = lambda: setattr(GrantedSlots, "__init__", true_init)
        return {}

    def break_loads(self, order: dict[str, Any]) -> dict[str, Any]:
        """Loads stop at this block of a request from now on."""
        from connectors.transfer.copies import Loads

        true_copy = Loads._copy

        def copy(loads: Any, line: Any, task: Any) -> int:
            return min(order["at"], true_copy(loads, line, task))

        Loads._copy = copy  # type: ignore[method-assign]
        self._undo = lambda: setattr(Loads, "_copy", true_copy)
        return {}

    def mend(self, order: dict[str, Any]) -> dict[str, Any]:
        """Undo `spoil` or `break_loads`."""
        self._undo()
        return {}

    def stop(self, order: dict[str, Any]) -> dict[str, Any]:
        if self.engine is not None:
            self.engine.llm_engine.engine_core.shutdown()
            self.engine = None
            gc.collect()
            _true_freeze()  # what is left is vLLM itself
        return {}


_true_freeze = gc.freeze


def _make_starts_cheap() -> None:
    """Without what vLLM does once more for each engine of a process: look at all objects of its modules, to collect
    garbage (five times) and to replace kernels of Triton, and import itself in a process to look at a model's class."""
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    registry._run_in_subprocess = lambda look: look()
    gc.freeze = gc.unfreeze = lambda: None  # `Host.stop` does
    once = functools.cache(current_platform.register_triton_kernel_overrides)
    type(current_platform).register_triton_kernel_overrides = staticmethod(once)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the engine prints is no answer
    host = Host()
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = getattr(host, order["do"])(order)
        except Exception as error:  # noqa: BLE001 - the test is told
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
