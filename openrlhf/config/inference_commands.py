"""The commands that use trained models, declared for `parse`."""

from openrlhf.config import old_flags
from openrlhf.config.command import Command
from openrlhf.config.inference import BatchInferenceConfig, ChatConfig
from openrlhf.config.inference_checks import batch_inference_problems, chat_problems
from openrlhf.config.lora_combiner import LoraCombinerConfig, lora_combiner_problems
from openrlhf.config.serve_rm import ServeRMConfig, serve_rm_problems

BATCH_INFERENCE = Command(
    name="batch_inference",
    config_type=BatchInferenceConfig,
    summary="Batch inference: answers the prompts of a dataset, or scores its answers, and writes one file.",
    old_flags=old_flags.BATCH_INFERENCE,
    problems=batch_inference_problems,
)
CHAT = Command(
    name="chat",
    config_type=ChatConfig,
    summary="Chat with a model, on a terminal or through a pipe with one message per line.",
    old_flags=old_flags.CHAT,
    problems=chat_problems,
)
SERVE_RM = Command(
    name="serve_rm",
    config_type=ServeRMConfig,
    summary="Serve a reward model over HTTP, for --reward.remote_url.",
    old_flags=old_flags.SERVE_RM,
    problems=serve_rm_problems,
)
LORA_COMBINER = Command(
    name="lora_combiner",
    config_type=LoraCombinerConfig,
    summary="Merge a LoRA adapter into its base model.",
    old_flags=old_flags.LORA_COMBINER,
    problems=lora_combiner_problems,
)
