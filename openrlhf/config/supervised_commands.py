"""The supervised commands, declared for `parse`."""

from openrlhf.config import old_flags, supervised_checks
from openrlhf.config.command import Command
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
