"""The commands of `openrlhf`, declared for `parse`."""

from openrlhf.config import old_flags, supervised_checks
from openrlhf.config.command import Command
from openrlhf.config.inference import BatchInferenceConfig, ChatConfig
from openrlhf.config.inference_checks import batch_inference_problems, chat_problems
from openrlhf.config.lora_combiner import LoraCombinerConfig, lora_combiner_problems
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.ppo_checks import ppo_placement_problems, ppo_problems
from openrlhf.config.serve_rm import ServeRMConfig, serve_rm_problems
from openrlhf.config.supervised import DPOConfig, KDConfig, KTOConfig, PRMConfig, RMConfig, SFTConfig

SFT = Command(
    name="sft",
    config_type=SFTConfig,
    summary="Supervised fine-tuning: trains a model on prompts and responses.",
    old_flags=old_flags.SFT,
    problems=supervised_checks.sft_problems,
)
RM = Command(
    name="rm",
    config_type=RMConfig,
    summary="Reward model: learns from pairs of answers to score the better one higher.",
    old_flags=old_flags.RM,
    problems=supervised_checks.rm_problems,
)
PRM = Command(
    name="prm",
    config_type=PRMConfig,
    summary="Process reward model: learns to score every step of a solution.",
    old_flags=old_flags.PRM,
    problems=supervised_checks.prm_problems,
)
DPO = Command(
    name="dpo",
    config_type=DPOConfig,
    summary="Direct preference optimization (DPO, IPO, cDPO): trains a policy on pairs of answers.",
    old_flags=old_flags.DPO,
    problems=supervised_checks.dpo_problems,
)
KTO = Command(
    name="kto",
    config_type=KTOConfig,
    summary="Kahneman-Tversky optimization: trains a policy on single answers that are good or bad.",
    old_flags=old_flags.KTO,
    problems=supervised_checks.kto_problems,
)
KD = Command(
    name="kd",
    config_type=KDConfig,
    summary="Knowledge distillation: trains a student model to imitate a teacher.",
    old_flags=old_flags.KD,
    problems=supervised_checks.kd_problems,
)
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
