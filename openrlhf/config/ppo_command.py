"""The command of reinforcement learning, declared for `parse`."""

from openrlhf.config import old_flags
from openrlhf.config.command import Command
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.ppo_checks import ppo_placement_problems, ppo_problems

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
