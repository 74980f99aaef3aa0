"""The commands that exist, as `parse` wants them."""

from openrlhf.config.checks import ppo_problems, sft_problems
from openrlhf.config.old_flags import PPO_OLD_FLAGS, SFT_OLD_FLAGS
from openrlhf.config.parse import Command
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import SFTConfig

SFT = Command(
    name="sft",
    config_type=SFTConfig,
    summary="Supervised fine-tuning: trains a model on prompts and responses.",
    old_flags=SFT_OLD_FLAGS,
    problems=sft_problems,
)
PPO = Command(
    name="ppo",
    config_type=PPOConfig,
    summary="Reinforcement learning (PPO, REINFORCE++, RLOO, GRPO, Dr. GRPO) with Ray, vLLM and DeepSpeed.",
    old_flags=PPO_OLD_FLAGS,
    problems=ppo_problems,
)
