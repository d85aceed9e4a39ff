"""What of the engine's configuration does not matter to the bytes of KV: everything else is in the namespace.

A field that is not listed here separates engines, so a field of vLLM's next release that was not judged yet makes the
store cold, and never wrong. A field is listed only for one of these reasons. Where the model's own code reads it
(`connectors/vllm/identity/model_sources.py`) it counts all the same: fields of `ASKED`, and keys of config.json.
"""

from __future__ import annotations

TOKENS = "decides which tokens a text is, and a block's hash is of tokens"
OUTPUT = "decides what is made of hidden states once KV is written"
BATCH = "decides which tokens are computed together, as differs from step to step within one engine"
MEMORY = "how much memory there is, and so how many blocks and requests"
PLACE = "where processes run, how they meet and how long they wait"
REPORT = "what is logged, measured and traced"
NAME = "a name or a place: what lies there is digested"
RESOLVED = "by now it is in other fields, which count"
HASHED = "is in the engine's block hashes"
FACTS = "the ranks say what came of it: layout, specs and pieces of their blocks"
BUILT = "made while the model is built or compiled, from fields that count"
HERE = "decides where requests and blocks go, not what they hold"

ASKED = frozenset({"ModelConfig", "MultiModalConfig"})

# Fields by class. A subclass has those of its bases.
FIELDS: dict[str, dict[str, str]] = {
    "VllmConfig": {
        REPORT: "observability_config logging_config profiler_config watchdog_config",
        HERE: "kv_transfer_config kv_events_config",
        OUTPUT: "structured_outputs_config reasoning_config watermark_config aux_output_config",
        PLACE: "instance_id shutdown_timeout",
        RESOLVED: "optimization_level performance_mode",
    },
    "ModelConfig": {
        NAME: "model model_weights served_model_name revision code_revision hf_config_path config_format hf_token "
        "_hf_config_revision trust_remote_code",
        TOKENS: "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init",
        OUTPUT: "seed max_logprobs logprobs_mode return_sampling_mask use_fp64_gumbel logits_processors "
        "generation_config override_generation_config io_processor_plugin enable_trace_replay",
        PLACE: "renderer_num_workers allowed_local_media_path allowed_media_domains",
        MEMORY: "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph "
        "enable_cumem_allocator enable_nccl_comm_suspend max_model_len original_max_model_len spec_target_max_model_len",
        HASHED: "enable_prompt_embeds",
        RESOLVED: "hf_overrides allow_deprecated_quantization config_updated",
        BUILT: "_model_info",
    },
    "MultiModalConfig": {
        HASHED: "mm_hasher_algorithm enable_mm_embeds",
        TOKENS: "interleave_mm_strings",
        MEMORY: "limit_per_prompt mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb "
        "skip_mm_profiling mm_ipc_gpu_memory_gb",
        PLACE: "mm_tensor_ipc mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin",
    },
    "CacheConfig": {
        MEMORY: "gpu_memory_utilization num_gpu_blocks num_gpu_blocks_override num_cpu_blocks kv_cache_memory_bytes "
        "kv_cache_size_tokens kv_cache_max_concurrency",
        HERE: "enable_prefix_caching kv_offloading_size kv_offloading_backend simple_cpu_offload_num_blocks "
        "prefix_cache_retention_interval prefix_match_unit enable_mamba_shared_prefix_checkpoint",
        HASHED: "hash_block_size cache_hit_alignment_tokens",
        FACTS: "kv_cache_layout user_specified_block_size effective_attention_block_size _block_size_resolved",
    },
    "ParallelConfig": {
        PLACE: "rank data_parallel_rank data_parallel_rank_local data_parallel_index data_parallel_size_local "
        "data_parallel_master_ip data_parallel_rpc_port data_parallel_master_port data_parallel_backend "
        "data_parallel_external_lb data_parallel_hybrid_lb dp_sync_interval disable_nccl_for_dp_synchronization "
        "_data_parallel_master_port_list _coord_store_port _api_process_count _api_process_rank master_addr "
        "master_port node_rank nnodes numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids "
        "distributed_timeout_seconds cpu_distributed_timeout_seconds distributed_executor_backend placement_group "
        "ray_workers_use_nsight ray_runtime_env enable_shm_tensor_arena enable_fault_tolerance fault_tolerance_config",
        MEMORY: "max_parallel_loading_workers enable_ep_weight_filter",
        OUTPUT: "enable_batch_sharded_sampling",
    },
    "EPLBConfig": {REPORT: "log_balancedness log_balancedness_interval"},
    "SchedulerConfig": {
        BATCH: "max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs policy watermark "
        "long_prefill_token_threshold long_prefill_token_threshold_adaptive disable_chunked_mm_input "
        "max_num_encoder_input_tokens prefill_schedule_interval scheduler_reserve_full_isl async_scheduling",
        MEMORY: "max_num_queued_reqs max_num_queued_tokens encoder_cache_size",
        OUTPUT: "stream_interval",
        FACTS: "disable_hybrid_kv_cache_manager",
    },
    "DeviceConfig": {PLACE: "device"},
    "LoadConfig": {
        NAME: "load_format download_dir",
        MEMORY: "safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size device "
        "pt_load_map_location",
        REPORT: "use_tqdm_on_load",
    },
    "KernelConfig": {MEMORY: "enable_jit_warmup enable_cutedsl_warmup"},
    "LoRAConfig": {MEMORY: "max_cpu_loras"},
    "CompilationConfig": {
        REPORT: "debug_dump_path compilation_time encoder_compilation_time",
        PLACE: "cache_dir local_cache_dir compile_cache_save_format",
        BUILT: "traced_files static_forward_context static_all_moe_layers enabled_custom_ops disabled_custom_ops "
        "cudagraph_num_of_warmups",
        BATCH: "cudagraph_capture_sizes max_cudagraph_capture_size compile_ranges_endpoints",
    },
    "SpeculativeConfig": {
        NAME: "model revision code_revision draft_load_config",
        RESOLVED: "quantization max_model_len",
        BUILT: "target_model_config target_parallel_config",
        OUTPUT: "rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length",
    },
    "ECTransferConfig": {PLACE: "engine_id ec_ip ec_port ec_buffer_device ec_buffer_size"},
    "QuantizationConfig": {BUILT: "packed_modules_mapping"},
    "OnlineQuantizationConfig": {REPORT: "online_quantization_time", BUILT: "quantized_layers"},
}

# Keys of a model's config.json, and of the configurations within it. All hold unless the model's own code reads them.
KEYS: dict[str, str] = {
    NAME: "_name_or_path name_or_path _commit_hash transformers_version",
    OUTPUT: "eos_token_id pad_token_id bos_token_id sep_token_id forced_bos_token_id forced_eos_token_id "
    "suppress_tokens begin_suppress_tokens output_attentions output_hidden_states return_dict use_return_dict "
    "id2label label2id problem_type",
    HERE: "use_cache",
}

# Speculation without a model has no KV of its own.
DRAFTLESS = frozenset({"ngram", "ngram_gpu", "suffix"})

# Variables of vLLM's environment.
VARIABLES: dict[str, str] = {
    PLACE: "CUDA_VISIBLE_DEVICES LOCAL_RANK LD_LIBRARY_PATH CUDA_HOME VLLM_CACHE_ROOT VLLM_CONFIG_ROOT VLLM_XLA_CACHE_PATH "
    "VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_MEDIA_CACHE VLLM_MEDIA_CACHE_MAX_SIZE_MB "
    "VLLM_MEDIA_CACHE_TTL_HOURS VLLM_RPC_BASE_PATH VLLM_LORA_RESOLVER_CACHE_DIR VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR "
    "VLLM_NCCL_SO_PATH VLLM_CUDART_SO_PATH VLLM_NCCL_INCLUDE_PATH VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME "
    "VLLM_PROCESS_NAME_PREFIX VLLM_HOST_IP VLLM_LOOPBACK_IP VLLM_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE "
    "VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_NIXL_SIDE_CHANNEL_HOST "
    "VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT VLLM_P2P_SIDE_CHANNEL_HOST "
    "VLLM_P2P_SIDE_CHANNEL_PORT VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S VLLM_P2P_MAX_PEERS "
    "VLLM_WORKER_MULTIPROC_METHOD VLLM_ENABLE_V1_MULTIPROCESSING VLLM_ENGINE_READY_TIMEOUT_S "
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS VLLM_KEEP_ALIVE_ON_ENGINE_DEATH "
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_HTTP_MAX_REQUEST_BODY_SIZE VLLM_IMAGE_FETCH_TIMEOUT VLLM_VIDEO_FETCH_TIMEOUT "
    "VLLM_AUDIO_FETCH_TIMEOUT VLLM_MEDIA_FETCH_MAX_RETRIES VLLM_MEDIA_LOADING_THREAD_COUNT "
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_API_KEY VLLM_SERVER_DEV_MODE VLLM_DISABLE_COMPILE_CACHE "
    "VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_ENABLE_STARTUP_PLAN VLLM_RAY_BUNDLE_INDICES VLLM_RAY_DP_PACK_STRATEGY "
    "VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RAY_EXTRA_ENV_VARS_TO_COPY VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY "
    "VLLM_RAY_PER_WORKER_GPUS VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_OMP_THREADS_BIND VLLM_GPU_NIC_PCIE_MAPPING "
    "VLLM_NIC_SELECTION_VARS VLLM_USE_SPINLOOP_EXT VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_MQ_MAX_CHUNK_BYTES_MB "
    "VLLM_RUST_FRONTEND_PATH VLLM_USE_RUST_FRONTEND VLLM_USE_RUST_BENCH VLLM_SKIP_P2P_CHECK "
    "S3_ACCESS_KEY_ID S3_SECRET_ACCESS_KEY S3_ENDPOINT_URL VLLM_FASTSAFETENSORS_QUEUE_SIZE "
    "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT VLLM_MOONCAKE_BOOTSTRAP_PORT VLLM_MOONCAKE_CONNECTOR_TIMEOUT "
    "VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO VLLM_MOONCAKE_LOAD_RECV_THREADS MOONCAKE_PREFERRED_SEGMENT "
    "MOONCAKE_REQUESTER_LOCAL_HOSTNAME",
    MEMORY: "VLLM_CPU_KVCACHE_SPACE VLLM_XGRAMMAR_CACHE_MB VLLM_V1_USE_OUTLINES_CACHE "
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_ENABLE_CUDAGRAPH_GC VLLM_ALLOW_LONG_MAX_MODEL_LEN",
    REPORT: "VLLM_LOGGING_LEVEL VLLM_LOGGING_PREFIX VLLM_LOGGING_STREAM VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_COLOR "
    "VLLM_CONFIGURE_LOGGING VLLM_LOG_STATS_INTERVAL VLLM_LOG_BATCHSIZE_INTERVAL VLLM_LOG_MODEL_INSPECTION "
    "VLLM_DISABLE_LOG_LOGO VLLM_REQUEST_BODY_LOG_LEVEL VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_MOONCAKE_STORE_TIER_LOG "
    "VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK VLLM_USAGE_SOURCE VLLM_USAGE_STATS_SERVER VLLM_RINGBUFFER_WARNING_INTERVAL "
    "VLLM_DEBUG_DUMP_PATH VLLM_DEBUG_MFU_METRICS VLLM_DEBUG_WORKSPACE VLLM_TRACE_FUNCTION VLLM_GC_DEBUG "
    "VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_NVTX_SCOPES_FOR_PROFILING NO_COLOR FORCE_COLOR VERBOSE "
    "VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL VLLM_IMAGE_TAG VLLM_DOCKER_BUILD_CONTEXT MAX_JOBS "
    "NVCC_THREADS CMAKE_BUILD_TYPE VLLM_SKIP_VERSION_SUFFIX VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX",
    NAME: "VLLM_USE_MODELSCOPE VLLM_MODEL_REDIRECT_PATH VLLM_LORA_RESOLVER_HF_REPO_LIST VLLM_ALLOW_RUNTIME_LORA_UPDATING "
    "VLLM_SKIP_MODEL_NAME_VALIDATION",
    TOKENS: "VLLM_USE_FASTOKENS VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_CHAT_TEMPLATE_FUEL VLLM_SYSTEM_START_DATE "
    "VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS VLLM_ENABLE_COHERE_API",
    OUTPUT: "VLLM_USE_FLASHINFER_SAMPLER VLLM_XPU_USE_SAMPLER_KERNEL VLLM_MAX_N_SEQUENCES VLLM_MAX_STOP_STRINGS "
    "VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_MAX_COMPLETION_PROMPTS "
    "VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENFORCE_STRICT_TOOL_CALLING "
    "VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS VLLM_REGEX_COMPILATION_TIMEOUT_S "
    "VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_DISABLE_REQUEST_ID_RANDOMIZATION",
    HERE: "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS VLLM_USE_SIMPLE_KV_OFFLOAD",
    FACTS: "VLLM_KV_CACHE_LAYOUT",
}  # fmt: skip


def reasons(table: dict[str, str]) -> dict[str, str]:
    """Of a table above: each name and why it is in it."""
    return {name: reason for reason, names in table.items() for name in names.split()}


FIELD_REASONS = {kind: reasons(table) for kind, table in FIELDS.items()}
KEY_REASONS = reasons(KEYS)
VARIABLE_REASONS = reasons(VARIABLES)
