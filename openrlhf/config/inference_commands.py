"""The commands that use trained models, declared for `parse`."""

from openrlhf.config import old_flags
from openrlhf.config.command import Command
from openrlhf.config.inference import BatchInferenceConfig, ChatConfig
from openrlhf.config.inference_checks import batch_inference_problems, chat_problems
from openrlhf.config.lora_combiner import LoraCombinerConfig, lora_combiner_problems
from openrlhf.config.old_flags import OldFlag, renamed
from openrlhf.config.serve_rm import ServeRMConfig, serve_rm_problems

_ANSWERS: dict[str, OldFlag] = {
    **old_flags.TEMPLATES,
    **renamed("""
        model: pretrain=model_name_or_path
        data: max_len disable_fast_tokenizer
        rollout: max_new_tokens temperature top_p repetition_penalty greedy_sampling=greedy
        csft: enable_csft=enable csft_prompt=prompt
        vllm: tp_size=tensor_parallel_size
        train: seed
    """),
    **old_flags.PRECISION,
    **old_flags.KERNELS,
}

BATCH_INFERENCE = Command(
    name="batch_inference",
    config_type=BatchInferenceConfig,
    summary="Batch inference: answers the prompts of a dataset, or scores its answers, and writes one file.",
    old_flags={
        **_ANSWERS,
        **old_flags.HEAD,
        **renamed("""
            eval_task=task
            data: dataset dataset_probs dataset_split max_samples input_key output_key prompt_max_len
            rollout: best_of_n=n_samples_per_prompt rollout_batch_size=batch_size
            reward: normalize_reward=normalize_enable reward_template=template
            vllm: max_num_seqs enable_prefix_caching
            ds: zero_stage
            train: micro_batch_size full_determinism=full_determinism_enable
        """),
    },
    problems=batch_inference_problems,
)
CHAT = Command(
    name="chat",
    config_type=ChatConfig,
    summary="Chat with a model, on a terminal or through a pipe with one message per line.",
    old_flags=_ANSWERS
    | renamed("""
        ds: load_in_4bit
        rollout: engine
    """),
    problems=chat_problems,
)
SERVE_RM = Command(
    name="serve_rm",
    config_type=ServeRMConfig,
    summary="Serve a reward model over HTTP, for --reward.remote_url.",
    old_flags={
        **old_flags.HEAD,
        **renamed("""
            reward: reward_pretrain=model_name_or_path normalize_reward=normalize_enable
            data: max_len disable_fast_tokenizer
            ds: load_in_4bit packing_samples
        """),
        **old_flags.PRECISION,
        **old_flags.KERNELS,
    },
    problems=serve_rm_problems,
)
LORA_COMBINER = Command(
    name="lora_combiner",
    config_type=LoraCombinerConfig,
    summary="Merge a LoRA adapter into its base model.",
    old_flags=old_flags.PRECISION,
    problems=lora_combiner_problems,
)
