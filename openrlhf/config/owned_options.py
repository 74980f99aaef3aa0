"""Options of other libraries that flags of this package decide, so that they cannot be passed through."""

from collections.abc import Iterator, Mapping
from typing import Any

from openrlhf.config.command import Problem
from openrlhf.config.fields import flag_values, flat
from openrlhf.config.pass_through import PassThrough
from openrlhf.errors import ErrorCode

NO_CODE = "code from the hub is never run"
PROCESSES = "openrlhf places and starts the processes of engines"
ADAPTERS = "use --ds.lora.rank and --vllm.lora_sync"
SAMPLING = "use the flags rollout.*"
IMAGES = "use --data.max_images_per_prompt"
SPECULATION = "use --vllm.speculative"
TOKENS = "engines read and write token ids of the run's model"
VLLM_OWN = {
    "model": "use model_name_or_path",
    "model_weights": "use model_name_or_path",
    "hf_config_path": "use model_name_or_path",
    "revision": "name a folder in model_name_or_path",
    "code_revision": NO_CODE,
    "trust_remote_code": NO_CODE,
    "hf_token": "use the variable HF_TOKEN, because the flag would be recorded",
    **dict.fromkeys(("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init"), TOKENS),
    **dict.fromkeys(("runner", "convert"), "engines only generate"),
    "load_format": "an engine loads the model's files, or waits for the first weight sync",
    "dtype": "use --ds.param_dtype",
    "max_model_len": "use --data.max_len, or in chat and batch_inference the lengths of prompt and response",
    "seed": "use --train.seed",
    "tensor_parallel_size": "use --vllm.tensor_parallel_size",
    "pipeline_parallel_size": "use --vllm.pipeline_parallel_size",
    "data_parallel_size": "use --vllm.num_engines",
    **dict.fromkeys(("distributed_executor_backend", "worker_cls", "nnodes", "node_rank"), PROCESSES),
    **dict.fromkeys(("master_addr", "master_port", "device_ids"), PROCESSES),
    "worker_extension_cls": "it receives the weight syncs",
    "weight_transfer_config": "use --vllm.sync_backend",
    "enable_prefix_caching": "use --vllm.enable_prefix_caching",
    "enable_return_routed_experts": "use --algo.router_replay",
    "enforce_eager": "use --vllm.enforce_eager",
    "enable_sleep_mode": "use --vllm.enable_sleep",
    "gpu_memory_utilization": "use --vllm.gpu_memory_utilization",
    "kv_cache_memory_bytes": "use --vllm.kv_cache_gb",
    "enable_chunked_prefill": "it is off on CPUs, where it would change the samples of a seed, and on on GPUs",
    "limit_mm_per_prompt": IMAGES,
    "language_model_only": IMAGES,
    "mm_device_do_normalize": "a weight sync sends no statistics of pixels",
    "logprobs_mode": "training reads the log-probs of the sampling distribution",
    "max_logprobs": "use --rollout.max_kept_tokens",
    "generation_config": SAMPLING,
    "override_generation_config": SAMPLING,
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), SPECULATION),
    **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank", "lora_target_modules"), ADAPTERS),
    "disable_log_stats": "metrics of sampling come from the samples",
    "use_tqdm_on_load": "openrlhf shows the progress",
}
BATCH = "use --train.batch_size and --train.micro_batch_size"
ACCUMULATES = "openrlhf sets the boundary of each optimizer step itself"
OPTIMIZER = "use the flags optim, adam.* and muon.*"
BUCKETS = "use --ds.bucket_mb"
COMPUTES = "openrlhf's models do it themselves"
DEEPSPEED_OWN = {
    "train_batch_size": BATCH,
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": ACCUMULATES,
    "managed_gradient_accumulation": ACCUMULATES,
    "gradient_clipping": "use max_norm",
    "optimizer": OPTIMIZER,
    "zero_allow_untested_optimizer": OPTIMIZER,
    "zero_force_ds_cpu_optimizer": OPTIMIZER,
    "scheduler": "use lr_scheduler",
    **dict.fromkeys(("bf16.enabled", "fp16.enabled", "amp", "torch_autocast"), "use --ds.param_dtype"),
    "data_types.grad_accum_dtype": "use --ds.grad_accum_dtype",
    "zero_optimization.stage": "use --ds.zero_stage",
    "zero_optimization.zero_hpz_partition_size": "use --ds.zpg",
    "zero_optimization.overlap_comm": "use --ds.overlap_comm",
    "zero_optimization.reduce_bucket_size": BUCKETS,
    "zero_optimization.allgather_bucket_size": BUCKETS,
    "zero_optimization.offload_optimizer": "use --ds.adam_offload",
    "tensor_parallel": "use --ds.tensor_parallel_size",
    "sequence_parallel_size": "use --ds.ring_attn_size",
    "activation_checkpointing": "use gradient_checkpointing_enable and --ds.activation_offload",
    "compile": "see --ds.deepcompile",
    **dict.fromkeys(("pipeline", "curriculum_learning", "data_efficiency"), COMPUTES),
    "seed": "use --train.seed",
    "checkpoint": "use the flags ckpt.*",
}
QUANTIZED = "use --ds.load_in_4bit"
FOLDER = "name a folder in model_name_or_path, or set Hugging Face's variables"
PLACED = "openrlhf places the model on its ranks"
MODEL_OWN = {
    **dict.fromkeys(("dtype", "torch_dtype"), "use --ds.param_dtype"),
    "attn_implementation": "use --ds.attn_implementation",
    "experts_implementation": "use --ds.experts_implementation",
    **dict.fromkeys(("quantization_config", "load_in_4bit", "load_in_8bit"), QUANTIZED),
    **dict.fromkeys(("revision", "cache_dir", "token", "local_files_only", "force_download"), FOLDER),
    **dict.fromkeys(("subfolder", "variant", "gguf_file"), FOLDER),
    **dict.fromkeys(("device_map", "max_memory", "tp_plan", "tp_size", "offload_folder"), PLACED),
    "trust_remote_code": NO_CODE,
    **dict.fromkeys(("config", "state_dict", "output_loading_info", "key_mapping"), "openrlhf sets it"),
    "architectures": "the files of the model decide it",
    "model_type": "the files of the model decide it",
    "num_labels": "a reward model and a critic have one score",
    "value_head_prefix": "use --ds.value_head_prefix",
}
OWNED = {"engine_args": VLLM_OWN, "config": DEEPSPEED_OWN, "model_kwargs": MODEL_OWN}
"""Maps the last part of a flag to the options that other flags decide, each with its remedy."""


def owned_options(config: Any) -> Iterator[Problem]:
    """Refuses options of another library that a flag decides, or this package."""
    for key, given in flag_values(config).items():
        if isinstance(given, PassThrough) and (lines := _owned(given, OWNED[key.rpartition(".")[2]])):
            text = "; ".join(f"{name} is not passed through: {remedy}" for name, remedy in lines)
            yield Problem(key, text, ErrorCode.UNSUPPORTED)


def _owned(given: Mapping[str, Any], own: Mapping[str, str]) -> list[tuple[str, str]]:
    names = flat(given)
    return [
        (option, remedy)
        for option, remedy in own.items()
        if any(name == option or name.startswith(option + ".") for name in names)
    ]
