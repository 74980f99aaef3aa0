"""The commands of `openrlhf`, declared for `parse`."""

from typing import Any

from openrlhf.config import old_flags, supervised_checks
from openrlhf.config.command import Command
from openrlhf.config.inference import BatchInferenceConfig, ChatConfig
from openrlhf.config.inference_checks import batch_inference_problems, chat_problems
from openrlhf.config.lora_combiner import LoraCombinerConfig, lora_combiner_problems
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.ppo_checks import ppo_placement_problems, ppo_problems
from openrlhf.config.serve_rm import ServeRMConfig, serve_rm_problems
from openrlhf.config.supervised import DPOConfig, KDConfig, KTOConfig, PRMConfig, RMConfig, SFTConfig


def _command(name: str, config_type: Any, summary: str, problems: Any = None) -> Command:
    """Declares a command with the earlier flags, and unless given the checks, that are named after it."""
    return Command(
        name=name,
        config_type=config_type,
        summary=summary,
        old_flags=getattr(old_flags, name.upper()),
        problems=problems or getattr(supervised_checks, f"{name}_problems"),
    )


SFT = _command("sft", SFTConfig, "Supervised fine-tuning: trains a model on prompts and responses.")
RM = _command("rm", RMConfig, "Reward model: learns from pairs of answers to score the better one higher.")
PRM = _command("prm", PRMConfig, "Process reward model: learns to score every step of a solution.")
DPO = _command(
    "dpo", DPOConfig, "Direct preference optimization (DPO, IPO, cDPO): trains a policy on pairs of answers."
)
KTO = _command(
    "kto", KTOConfig, "Kahneman-Tversky optimization: trains a policy on single answers that are good or bad."
)
KD = _command("kd", KDConfig, "Knowledge distillation: trains a student model to imitate a teacher.")
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
BATCH_INFERENCE = _command(
    "batch_inference",
    BatchInferenceConfig,
    "Batch inference: answers the prompts of a dataset, or scores its answers, and writes one file.",
    batch_inference_problems,
)
CHAT = _command(
    "chat",
    ChatConfig,
    "Chat with a model, on a terminal or through a pipe with one message per line.",
    chat_problems,
)
SERVE_RM = _command(
    "serve_rm", ServeRMConfig, "Serve a reward model over HTTP, for --reward.remote_url.", serve_rm_problems
)
LORA_COMBINER = _command(
    "lora_combiner", LoraCombinerConfig, "Merge a LoRA adapter into its base model.", lora_combiner_problems
)

COMMANDS = (SFT, RM, PRM, DPO, KTO, KD, PPO, BATCH_INFERENCE, CHAT, SERVE_RM, LORA_COMBINER)
"""All commands, in the order of the documentation."""
