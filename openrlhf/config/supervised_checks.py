"""Checks of the flags of the supervised commands against each other."""

import os
from collections.abc import Iterable, Iterator
from itertools import chain

from openrlhf.config import checks
from openrlhf.config.checks import Rule, Unread, needs
from openrlhf.config.command import Explicit, Problem, remark
from openrlhf.config.sections import ImagesConfig, RowTemplateConfig
from openrlhf.config.supervised import (
    DPOConfig,
    KDConfig,
    KTOConfig,
    PRMConfig,
    RMConfig,
    SFTConfig,
    SupervisedConfig,
)
from openrlhf.errors import ErrorCode
from openrlhf.mesh import Mesh


def sft_problems(config: SFTConfig | KDConfig, explicit: Explicit) -> list[Problem]:
    return _supervised(
        config,
        explicit,
        checks.broken(config, PRETRAIN),
        _responses(config, explicit),
        checks.unread(config, explicit, PRETRAIN_UNREAD),
    )


def rm_problems(config: RMConfig, explicit: Explicit) -> list[Problem]:
    return _supervised(config, explicit)


def prm_problems(config: PRMConfig, explicit: Explicit) -> list[Problem]:
    return _supervised(
        config, explicit, checks.required(config, "data.placeholder_token"), _reward_tokens(config)
    )


def dpo_problems(config: DPOConfig, explicit: Explicit) -> list[Problem]:
    return _supervised(config, explicit, checks.broken(config, (NO_DROPOUT,)))


def kto_problems(config: KTOConfig, explicit: Explicit) -> list[Problem]:
    return _supervised(config, explicit, checks.broken(config, (NO_DROPOUT,)), _responses(config, explicit))


def kd_problems(config: KDConfig, explicit: Explicit) -> list[Problem]:
    return [*checks.required(config, "teacher.model_name_or_path"), *sft_problems(config, explicit)]


def _supervised(config: SupervisedConfig, explicit: Explicit, *own: Iterable[Problem]) -> list[Problem]:
    """Lists the problems of the flags that all supervised commands share, and a command's `own` problems."""
    launched = os.environ.get("WORLD_SIZE", "")
    ds, num_ranks = config.ds, max(1, int(launched)) if launched.isdecimal() else 1
    models = [role for role in ("model", "ref", "teacher") if hasattr(config, role)]
    has_template, has_images = (isinstance(config.data, kind) for kind in (RowTemplateConfig, ImagesConfig))
    mesh = Mesh.within(num_ranks, sequence=ds.ring_attn_size, tensor=ds.tensor_parallel_size)
    return checks.first_of_each(
        [
            *checks.modelscope(config),
            *checks.required(config, "model.model_name_or_path", "data.dataset"),
            *checks.local_models(config, *(f"{role}.model_name_or_path" for role in models)),
            *checks.local_datasets(config, ("data.dataset", "data.dataset_probs"), ("eval.dataset", None)),
            *(checks.template(config, explicit) if has_template else ()),
            *(checks.broken(config, checks.IMAGE_ROWS) if has_images else ()),
            *chain.from_iterable(own),
            *checks.optimizer("", config, config.ds),
            *checks.batches(config, mesh.data, None, ""),
            *checks.backend(config),
            *checks.precision(config),
            *checks.secondary_partition(ds, {"run": num_ranks}),
            *checks.sequence_parallel(ds, {"run": num_ranks}, reads_images=config.data.reads_images),
            *checks.tensor_parallel(config, {"run": num_ranks}),
            *checks.four_bits(config.ds),
            *checks.broken(config, (BALANCE,)),
            *checks.outputs(config.ckpt, config.logger, config.train.hooks),
            *checks.unread(config, explicit, checks.COMMON_UNREAD + SUPERVISED_UNREAD),
        ]
    )


SUPERVISED_UNREAD = (
    *checks.optimizer_unread(),
    needs(
        "model.gradient_checkpointing_enable",
        "model.gradient_checkpointing_reentrant ds.activation_offload",
    ),
    needs("data.cache_enable", "data.cache_dir"),
    Unread(
        "model.freeze_visual_encoder",
        lambda c: not c.data.reads_images,
        "because the rows have no images (--data.max_images_per_prompt 0)",
    ),
    Unread("ds.enable_sleep", lambda c: True, "because nothing else uses the GPUs of supervised training"),
    checks.IMAGES_UNREAD,
    Unread("model.compute_fp32_loss_enable", lambda c: True, "because scores and losses are always fp32"),
    Unread(
        "model.margin_loss_enable",
        lambda c: c.model.loss_type == "logexp",
        "with model.loss_type logexp, which has no margin",
    ),
    Unread(
        "model.kd_temperature model.kd_loss_type",
        lambda c: c.model.kd_coef == 0,
        "with model.kd_coef 0, which leaves the teacher out",
    ),
    Unread(
        "model.label_smoothing",
        lambda c: c.model.ipo_enable,
        "with --model.ipo_enable, whose loss has no label smoothing",
    ),
)
PRETRAIN_UNREAD = (
    Unread(
        "data.input_template data.apply_chat_template",
        lambda c: c.model.pretrain_mode_enable,
        "with --model.pretrain_mode_enable, which reads data.input_key as plain text",
    ),
    Unread(
        "data.output_key",
        lambda c: c.model.pretrain_mode_enable and c.data.output_key is not None,
        "with --model.pretrain_mode_enable, which reads data.input_key as plain text",
    ),
)

BALANCE = Rule(
    "model.gradient_checkpointing_reentrant",
    lambda c: c.model.aux_loss_coef > 0 and c.model.gradient_checkpointing_reentrant,
    checks.HIDDEN_ROUTERS.format("model.aux_loss_coef"),
    ErrorCode.UNSUPPORTED,
)
NO_DROPOUT = Rule(
    "model.dropout_enable",
    lambda c: c.model.dropout_enable,
    "the policy must start equal to the reference, which has no dropout; remove it",
    ErrorCode.UNSUPPORTED,
)
PRETRAIN = (
    Rule(
        "data.max_images_per_prompt",
        lambda c: c.data.reads_images and c.model.pretrain_mode_enable,
        "model.pretrain_mode_enable reads plain text; remove one of the two",
    ),
    Rule(
        "data.multiturn",
        lambda c: c.data.multiturn and c.model.pretrain_mode_enable,
        "model.pretrain_mode_enable trains on all tokens; remove one of the two",
    ),
    Rule(
        "data.multiturn",
        lambda c: c.data.multiturn and not c.data.apply_chat_template,
        "needs rows with messages; add --data.apply_chat_template",
    ),
)


def _responses(config: SFTConfig | KTOConfig | KDConfig, explicit: Explicit) -> Iterator[Problem]:
    """Checks that something says where the prompt ends and what the response is."""
    data, key = config.data, "data.input_template"
    has_pretraining = not isinstance(config, KTOConfig)
    if data.apply_chat_template or (has_pretraining and config.model.pretrain_mode_enable):
        return
    if data.output_key is None:
        remedy = "name it, or use --data.apply_chat_template\n(the last message is the response)"
        remedy += " or --model.pretrain_mode_enable (loss on all tokens)" if has_pretraining else ""
        yield Problem(
            "data.output_key", f"the column of the response is not set: {remedy}", ErrorCode.MISSING_FLAG
        )
    if data.input_template is None and key not in explicit:
        yield remark(
            key,
            "no template marks where a prompt ends and its response begins (as in RL with these flags). Use\n"
            r"--data.apply_chat_template, or --data.input_template $'User: {}\nAssistant: ' in every command",
        )


def _reward_tokens(config: PRMConfig) -> Iterator[Problem]:
    key, tokens = "data.reward_tokens", config.data.reward_tokens or ()
    twice = next((token for token in tokens if tokens.count(token) > 1), None)
    if twice is not None:
        yield Problem(key, f"has {twice} twice; name each token once", ErrorCode.INVALID_VALUE)
    elif len(tokens) == 1:
        text = "a label is one of two or more tokens; name them all"
        yield Problem(key, text, ErrorCode.INVALID_VALUE)
