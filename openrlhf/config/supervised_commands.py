"""The supervised commands, declared for `parse`."""

from openrlhf.config import old_flags, supervised_checks
from openrlhf.config.command import Command
from openrlhf.config.old_flags import OldFlag, renamed, switch, value
from openrlhf.config.supervised import DPOConfig, KDConfig, KTOConfig, PRMConfig, RMConfig, SFTConfig

_SUPERVISED: dict[str, OldFlag] = {
    **old_flags.TRAINING,
    **renamed("""
        model: pretrain=model_name_or_path gradient_checkpointing=gradient_checkpointing_enable
        model: gradient_checkpointing_use_reentrant=gradient_checkpointing_reentrant aux_loss_coef
        data: dataset dataset_probs dataset_split
        adam: learning_rate=lr adam_betas=betas l2=weight_decay
    """),
    "train_split": OldFlag(ignored="--data.dataset_split chooses the split"),
}
_SFT = {
    **_SUPERVISED,
    **old_flags.TEMPLATES,
    **old_flags.MOLT,
    **old_flags.molt_model("model"),
    **old_flags.removed("muon.weight_decay: Muon has that of --adam.weight_decay"),
    "data.train_on_last_turn_only": switch("data.multiturn", "false"),
    **renamed("""
        data: input_key output_key multiturn
        model: pretrain_mode=pretrain_mode_enable
    """),
}
_PAIRS = {
    **_SUPERVISED,
    **old_flags.TEMPLATES,
    **renamed("data: prompt_key chosen_key rejected_key"),
}


SFT = Command(
    name="sft",
    config_type=SFTConfig,
    summary="Supervised fine-tuning: trains a model on prompts and responses.",
    old_flags=_SFT,
    problems=supervised_checks.sft_problems,
)
RM = Command(
    name="rm",
    config_type=RMConfig,
    summary="Reward model: learns from pairs of answers to score the better one higher.",
    old_flags={
        **_PAIRS,
        **old_flags.HEAD,
        "loss": value("model.loss_type", "logexp"),  # every word but sigmoid meant it
        "loss sigmoid": value("model.loss_type", "sigmoid"),
        **renamed("model: margin_loss=margin_loss_enable compute_fp32_loss=compute_fp32_loss_enable"),
    },
    problems=supervised_checks.supervised_problems,
)
PRM = Command(
    name="prm",
    config_type=PRMConfig,
    summary="Process reward model: learns to score every step of a solution.",
    old_flags=_SUPERVISED | renamed("data: input_key label_key placeholder_token reward_tokens"),
    problems=supervised_checks.prm_problems,
)
DPO = Command(
    name="dpo",
    config_type=DPOConfig,
    summary="Direct preference optimization (DPO, IPO, cDPO): trains a policy on pairs of answers.",
    old_flags={
        **_PAIRS,
        **renamed("""
            ref: ref_pretrain=model_name_or_path ref_offload=offload
            model: beta ipo=ipo_enable label_smoothing nll_loss_coef
        """),
        **old_flags.removed(
            "loss_type: DPO's is sigmoid; --model.ipo_enable and --model.label_smoothing change it"
        ),
    },
    problems=supervised_checks.dpo_problems,
)
KTO = Command(
    name="kto",
    config_type=KTOConfig,
    summary="Kahneman-Tversky optimization: trains a policy on single answers that are good or bad.",
    old_flags={
        **_SUPERVISED,
        **old_flags.TEMPLATES,
        **renamed("""
            data: input_key output_key label_key
            ref_: offload
            model: beta desirable_loss_weight undesirable_loss_weight
        """),
        "vanilla_loss": OldFlag(
            bare=True, removed="kto has no loss on pairs; use `openrlhf dpo`, or rows with a label"
        ),
    },
    problems=supervised_checks.kto_problems,
)
KD = Command(
    name="kd",
    config_type=KDConfig,
    summary="Knowledge distillation: trains a student model to imitate a teacher.",
    old_flags={
        **_SFT,
        **renamed("""
            teacher: teacher_model=model_name_or_path teacher_offload=offload
            model: kd_coef
        """),
    },
    problems=supervised_checks.kd_problems,
)
