"""Others that load safetensors files, with the same files and the same bucket: each a way of benchmarks.coldstart.

    safetensors        `load_file`, cold                      fastsafetensors    to memory, no GPU, cold
    runai, runai_s3    SafetensorsStreamer, cold; from S3     vllm_cached        vLLM's default iterator, from the page cache, copied

Those that map files have read nothing yet when they give tensors: of theirs a byte of every page is looked at. All hold what they
have read only as long as its time runs. This module imports nothing of ours but how a way is run: a peer may have an
environment of its own.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from benchmarks.coldstart.child import Facts, Work, serve

PAGE_BYTES = 4096


def safetensors(facts: Facts) -> Work:
    import torch
    from safetensors.torch import load_file

    def load() -> None:
        for path in _weights(facts):
            for tensor in load_file(path).values():
                int(tensor.view(torch.uint8).flatten()[::PAGE_BYTES].sum())

    return _timed(load)


def runai(facts: Facts) -> Work:
    return _streamed([str(path) for path in _weights(facts)])


def runai_s3(facts: Facts) -> Work:
    import runai_model_streamer_s3  # noqa: F401 - a package of its own

    return _streamed([f"{facts['plain']}/{path.name}" for path in _weights(facts)])


def _streamed(paths: list[str]) -> Work:
    from runai_model_streamer import SafetensorsStreamer

    def load() -> None:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(paths)
            for _ in streamer.get_tensors():
                pass

    return _timed(load)


def fastsafetensors(facts: Facts) -> Work:
    import torch
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    kib, threads = int(os.environ["BUFFER_KIB"]), int(os.environ["THREADS"])

    def load() -> None:
        loader = SafeTensorsFileLoader(
            SingleGroup(), torch.device("cpu"), bbuf_size_kb=kib, max_threads=threads, nogds=True
        )
        loader.add_filenames({0: [str(path) for path in _weights(facts)]})
        buffers = loader.copy_files_to_device()
        for name in list(buffers.key_to_rank_lidx):
            buffers.get_tensor(name)
        buffers.close()
        loader.close()

    return _timed(load)


def vllm_cached(facts: Facts) -> Work:
    import torch
    from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

    paths = [str(path) for path in _weights(facts)]

    def work() -> float:
        for path in paths:
            Path(path).read_bytes()
        target = torch.zeros(facts["size_bytes"], dtype=torch.uint8) + 1  # touched
        began_s, at = time.perf_counter(), 0
        for _, tensor in safetensors_weights_iterator(paths, use_tqdm_on_load=False):
            content = tensor.view(torch.uint8).flatten()
            target[at : at + len(content)].copy_(content)
            at += len(content)
        size_bytes: int = facts["size_bytes"]
        return (time.perf_counter() - began_s) * size_bytes / at

    return work


def _timed(load: Any) -> Work:
    def work() -> float:
        began_s = time.perf_counter()
        load()
        return time.perf_counter() - began_s

    return work


def _weights(facts: Facts) -> list[Path]:
    return sorted(Path(facts["revision"]).glob("*.safetensors"))


if __name__ == "__main__":
    serve(
        {
            "safetensors": safetensors,
            "runai": runai,
            "runai_s3": runai_s3,
            "fastsafetensors": fastsafetensors,
            "vllm_cached": vllm_cached,
        }
    )
