"""All commands of `openrlhf` that have a configuration."""

from openrlhf.config.inference_commands import BATCH_INFERENCE, CHAT, LORA_COMBINER, SERVE_RM
from openrlhf.config.ppo_command import PPO
from openrlhf.config.supervised_commands import DPO, KD, KTO, PRM, RM, SFT

COMMANDS = (SFT, RM, PRM, DPO, KTO, KD, PPO, BATCH_INFERENCE, CHAT, SERVE_RM, LORA_COMBINER)
"""All commands, in the order of the documentation."""
