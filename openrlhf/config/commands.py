"""The commands of `openrlhf`, declared for `parse`."""

from openrlhf.config import old_flags, supervised_checks
from openrlhf.config.command import Command
from openrlhf.config.inference import BatchInferenceConfig, ChatConfig
from openrlhf.config.inference_checks import batch_inference_problems, chat_problems
from openrlhf.config.lora_combiner import LoraCombinerConfig, lora_combiner_problems
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.ppo_checks import ppo_placement_problems, ppo_problems
from openrlhf.config.serve_rm import ServeRMConfig, serve_rm_problems
from openrlhf.config.supervised import (
    DPOConfig,
    KDConfig,
    KTOConfig,
    PRMConfig,
    RMConfig,
    SFTConfig,
    SupervisedConfig,
)


def _supervised(name: str, config_type: type[SupervisedConfig], summary: str) -> Command:
    """Declares a supervised command, with the earlier flags and the checks that are named after it."""
    return Command(
        name=name,
        config_type=config_type,
        summary=summary,
        old_flags=getattr(old_flags, name.upper()),
        problems=getattr(supervised_checks, f"{name}_problems"),
    )


SFT = _supervised("sft", SFTConfig, "Supervised fine-tuning: trains a model on prompts and responses.")
RM = _supervised("rm", RMConfig, "Reward model: learns from pairs of answers to score the better one higher.")
PRM = _supervised("prm", PRMConfig, "Process reward model: learns to score every step of a solution.")
DPO = _supervised(
    "dpo", DPOConfig, "Direct preference optimization (DPO, IPO, cDPO): trains a policy on pairs of answers."
)
KTO = _supervised(
    "kto", KTOConfig, "Kahneman-Tversky optimization: trains a policy on single answers that are good or bad."
)
KD = _supervised("kd", KDConfig, "Knowledge distillation: trains a student model to imitate a teacher.")
PPO = Command(
    name="ppo",
    config_type=PPOConfig,
    summary="Reinforcement learning (PPO, REINFORCE++, RLOO, GRPO, Dr. GRPO) with Ray, vLLM and DeepSpeed.",
    old_flags=old_flags.PPO,
    problems=ppo_problems,
    placed=ppo_placement_problems,
    selected=lambda config: config.selected,
    variables={
        "rollout.max_concurrent_episodes": "OPENRLHF_ASYNC_NUM_TASKS",
        "train.async_queue_size": "OPENRLHF_ASYNC_QUEUE_SIZE",
    },
    has_plan=True,
)
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

COMMANDS = (SFT, RM, PRM, DPO, KTO, KD, PPO, BATCH_INFERENCE, CHAT, SERVE_RM, LORA_COMBINER)
"""All commands, in the order of the documentation."""
