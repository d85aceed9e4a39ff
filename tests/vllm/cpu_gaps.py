"""What vLLM's CPU build lacks for some kinds of engines, filled in a test's engine process.

latent attention   Without AMX, prompts are computed in one piece: the prefill kernel reads nothing from the
                   cache. The decode kernel does, so here every token is a decode of its own:

                       request   tokens 5 6 7 of 8, blocks B  ─▶  three rows: lengths 6, 7, 8, blocks B

rotary positions   The kernel turns queries and keys that come with a dimension for heads (latent attention, LFM2)
                   otherwise in other batches. vLLM's own way in torch does not.

weights in sight   Weights are packed into objects of oneDNN. Accelerators compute with the tensors, and so does
                   torch's own linear layer.

FP8                The kernels that compute with weights in FP8 need AMX. Here they are spread out to the numbers of the
                   model, block by block with their scales, and torch's own linear layer computes with those.

pipeline stages    An eager engine makes no trial run, and only that gives later stages the buffers which
                   they receive into: they fail an assertion at the first request, with or without a connector.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any


def read_latent_prefixes() -> None:
    """Before the engine is made: prompts with latent attention may start in the middle."""
    import torch
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    class Rows(MLACommonMetadataBuilder[Any]):
        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            batch = common_attn_metadata
            tokens = batch.num_actual_tokens
            counts = batch.query_start_loc_cpu.diff()
            rows = torch.repeat_interleave(torch.arange(len(counts)), counts)
            after = batch.query_start_loc_cpu[1:][rows] - torch.arange(tokens)
            starts = torch.arange(tokens + 1, dtype=batch.query_start_loc.dtype)
            flat = replace(
                batch,
                num_reqs=tokens,
                max_query_len=1,
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=(batch.seq_lens[rows] - after + 1).to(batch.seq_lens.dtype),
                block_table_tensor=batch.block_table_tensor[rows],
            )
            return super().build(common_prefix_len, flat, fast_build)

    CPUMLABackend.get_builder_cls = staticmethod(lambda: Rows)
    true_check = CpuPlatform.check_and_update_config.__func__

    def check(cls: Any, vllm_config: Any) -> None:
        true_check(cls, vllm_config)
        vllm_config.scheduler_config.enable_chunked_prefill = True
        vllm_config.cache_config.enable_prefix_caching = True

    CpuPlatform.check_and_update_config = classmethod(check)


def rotate_in_torch() -> None:
    """Before the engine is made."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native


def keep_weights_in_sight() -> None:
    """Before the engine is made: layers compute with the weights in their tensors."""
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False


def compute_in_fp8() -> None:
    """Before the engine is made: linear layers whose weights are in FP8, with a scale for each block."""
    import torch
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel

    if torch.cpu._is_amx_tile_supported():
        return

    def linear(kernel: Any, layer: Any, x: Any, bias: Any = None, **_: Any) -> Any:
        params = kernel._get_layer_params(layer)
        scales = params.weight_scale if params.weight_scale_inv is None else params.weight_scale_inv
        for axis, step in enumerate(kernel.weight_group_shape):
            scales = scales.repeat_interleave(step, axis).narrow(axis, 0, params.weight.shape[axis])
        return torch.nn.functional.linear(x, (params.weight.float() * scales).to(x.dtype), bias)

    CPUFp8BlockScaledMMKernel.is_supported = classmethod(lambda cls, compute_capability=None: (True, None))
    CPUFp8BlockScaledMMKernel.process_weights_after_loading = lambda kernel, layer: None
    CPUFp8BlockScaledMMKernel.apply_weights = linear


class StageWorker:
    """Mixed into vLLM's workers (`worker_extension_cls`)."""

    model_runner: Any

    def make_stage_inputs(self) -> None:
        """After the engine is made: buffers for what the stage before sends."""
        from vllm.distributed import get_pp_group

        runner = self.model_runner
        if not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
