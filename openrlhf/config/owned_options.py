"""Options of other libraries that flags of this package decide, so that they cannot be passed through."""

from collections.abc import Iterator
from typing import Any

from openrlhf.config.command import Problem
from openrlhf.config.fields import flag_values, flat
from openrlhf.config.pass_through import PassThrough
from openrlhf.errors import ErrorCode

ENGINE_ARGS = """
    use model_name_or_path: model model_weights hf_config_path
    name a folder in model_name_or_path: revision
    code from the hub is never run: trust_remote_code code_revision
    use the variable HF_TOKEN, because flags are recorded: hf_token
    engines read and write token ids: tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init
    engines only generate: runner convert
    an engine loads the model's files, or waits for the first weight sync: load_format
    use --ds.param_dtype: dtype
    use the flags of lengths, such as --data.max_len: max_model_len
    use --train.seed: seed
    use the flag of this name: tensor_parallel_size pipeline_parallel_size enable_prefix_caching
    use the flag of this name: enforce_eager gpu_memory_utilization
    use --vllm.num_engines: data_parallel_size
    openrlhf starts the processes of engines: distributed_executor_backend worker_cls worker_extension_cls
    openrlhf starts the processes of engines: nnodes node_rank master_addr master_port device_ids
    use --vllm.sync_backend: weight_transfer_config
    use --algo.router_replay: enable_return_routed_experts
    use --vllm.enable_sleep: enable_sleep_mode
    use --vllm.kv_cache_gb: kv_cache_memory_bytes
    it is on on GPUs, and would change the samples of a seed on CPUs: enable_chunked_prefill
    use --data.max_images_per_prompt: limit_mm_per_prompt language_model_only
    a weight sync sends no statistics of pixels: mm_device_do_normalize
    training reads the log-probs of the sampling distribution: logprobs_mode
    use --rollout.max_kept_tokens: max_logprobs
    use the flags rollout.*: generation_config override_generation_config
    use --vllm.speculative: speculative_config spec_method spec_model spec_tokens
    use --ds.lora.rank and --vllm.lora_sync: enable_lora max_loras max_lora_rank lora_target_modules
    openrlhf shows metrics and progress: disable_log_stats use_tqdm_on_load
"""
DEEPSPEED = """
    use --train.batch_size and --train.micro_batch_size: train_batch_size train_micro_batch_size_per_gpu
    openrlhf ends optimizer steps itself: gradient_accumulation_steps managed_gradient_accumulation
    use max_norm: gradient_clipping
    use the flags of optimizers: optimizer zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    use lr_scheduler: scheduler
    use --ds.param_dtype: bf16.enabled fp16.enabled amp torch_autocast
    use --ds.grad_accum_dtype: data_types.grad_accum_dtype
    use --ds.zero_stage: zero_optimization.stage
    use --ds.zpg: zero_optimization.zero_hpz_partition_size
    use --ds.overlap_comm: zero_optimization.overlap_comm
    use --ds.bucket_mb: zero_optimization.reduce_bucket_size zero_optimization.allgather_bucket_size
    use --ds.adam_offload: zero_optimization.offload_optimizer
    use --ds.tensor_parallel_size: tensor_parallel
    use --ds.ring_attn_size: sequence_parallel_size
    use gradient_checkpointing_enable and --ds.activation_offload: activation_checkpointing
    openrlhf does it itself: compile pipeline curriculum_learning data_efficiency checkpoint
    use --train.seed: seed
"""
MODEL_KWARGS = """
    use --ds.param_dtype: dtype torch_dtype
    use the flag of this name: attn_implementation experts_implementation
    use --ds.load_in_4bit: quantization_config load_in_4bit load_in_8bit
    name a folder in model_name_or_path: revision cache_dir token local_files_only force_download
    name a folder in model_name_or_path: subfolder variant gguf_file
    openrlhf places the model on its ranks: device_map max_memory tp_plan tp_size offload_folder
    code from the hub is never run: trust_remote_code
    openrlhf sets it: config state_dict output_loading_info key_mapping num_labels
    the files of the model decide it: architectures model_type
    use --ds.value_head_prefix: value_head_prefix
"""


def _read(table: str) -> dict[str, str]:
    """Reads lines `remedy: option ...` to option -> remedy."""
    lines = (line.strip().rpartition(": ") for line in table.strip().splitlines())
    return {option: remedy for remedy, _, options in lines for option in options.split()}


OWNED = {"engine_args": _read(ENGINE_ARGS), "config": _read(DEEPSPEED), "model_kwargs": _read(MODEL_KWARGS)}
"""Maps the last part of a flag to the options that other flags decide, each with its remedy."""


def owned_options(config: Any) -> Iterator[Problem]:
    """Refuses options of another library that a flag decides, or this package."""
    for key, given in flag_values(config).items():
        if not isinstance(given, PassThrough):
            continue
        names = tuple(f"{name}." for name in flat(given))
        own = OWNED[key.rpartition(".")[2]].items()
        if lines := [pair for pair in own if any(name.startswith(f"{pair[0]}.") for name in names)]:
            text = "; ".join(f"{option} is not passed through: {remedy}" for option, remedy in lines)
            yield Problem(key, text, ErrorCode.UNSUPPORTED)
