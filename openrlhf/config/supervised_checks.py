"""Checks of the flags of the supervised commands against each other."""

import os
from collections.abc import Iterable, Iterator
from itertools import chain

from openrlhf.config import checks
from openrlhf.config.checks import Unread
from openrlhf.config.command import Explicit, Problem, remark
from openrlhf.config.supervised import (
    DPOConfig,
    KDConfig,
    KTOConfig,
    PRMConfig,
    RMConfig,
    SFTConfig,
    SupervisedConfig,
)
from openrlhf.mesh import Mesh


def sft_problems(config: SFTConfig, explicit: Explicit) -> list[Problem]:
    return _supervised(
        config,
        explicit,
        checks.template(config, explicit),
        checks.image_rows(config),
        _pretrained_images(config),
        _multiturn(config),
        _responses(config),
        _no_template(config, explicit),
        checks.unread(config, explicit, (*PRETRAIN_UNREAD, checks.IMAGES_UNREAD)),
    )


def rm_problems(config: RMConfig, explicit: Explicit) -> list[Problem]:
    return _supervised(
        config,
        explicit,
        checks.template(config, explicit),
        checks.image_rows(config),
        checks.unread(config, explicit, (*RM_UNREAD, checks.IMAGES_UNREAD)),
    )


def prm_problems(config: PRMConfig, explicit: Explicit) -> list[Problem]:
    return _supervised(
        config, explicit, checks.required(config, "data.placeholder_token"), _reward_tokens(config)
    )


def dpo_problems(config: DPOConfig, explicit: Explicit) -> list[Problem]:
    return _supervised(
        config,
        explicit,
        checks.local_models(config, "ref.model_name_or_path"),
        checks.template(config, explicit),
        checks.image_rows(config),
        _dropout(config),
        checks.unread(config, explicit, (*DPO_UNREAD, checks.IMAGES_UNREAD)),
    )


def kto_problems(config: KTOConfig, explicit: Explicit) -> list[Problem]:
    return _supervised(
        config,
        explicit,
        checks.local_models(config, "ref.model_name_or_path"),
        checks.template(config, explicit),
        _dropout(config),
        _responses(config),
        _no_template(config, explicit),
    )


def kd_problems(config: KDConfig, explicit: Explicit) -> list[Problem]:
    return _supervised(
        config,
        explicit,
        checks.required(config, "teacher.model_name_or_path"),
        checks.local_models(config, "teacher.model_name_or_path"),
        checks.template(config, explicit),
        checks.image_rows(config),
        _multiturn(config),
        _responses(config),
        _no_template(config, explicit),
        checks.unread(config, explicit, (*PRETRAIN_UNREAD, *KD_UNREAD, checks.IMAGES_UNREAD)),
    )


def _supervised(config: SupervisedConfig, explicit: Explicit, *own: Iterable[Problem]) -> list[Problem]:
    """Lists the problems of the flags that all supervised commands share, and a command's `own` problems."""
    ds, num_ranks = config.ds, int(os.environ.get("WORLD_SIZE", "1"))
    mesh = Mesh.within(num_ranks, sequence=ds.ring_attn_size, tensor=ds.tensor_parallel_size)
    return checks.first_of_each(
        [
            *checks.modelscope(config),
            *checks.required(config, "model.model_name_or_path", "data.dataset"),
            *checks.local_models(config, "model.model_name_or_path"),
            *checks.local_datasets(config, ("data.dataset", "data.dataset_probs"), ("eval.dataset", None)),
            *chain.from_iterable(own),
            *checks.optimizer("", config, config.ds),
            *checks.batches(config, mesh.data, None, ""),
            *checks.backend(config),
            *checks.precision(config),
            *checks.secondary_partition(ds, {"run": num_ranks}),
            *checks.sequence_parallel(ds, {"run": num_ranks}, reads_images=config.data.reads_images),
            *checks.tensor_parallel(config, {"run": num_ranks}),
            *checks.four_bits(config.ds),
            *_balance(config),
            *checks.outputs(config.ckpt, config.logger),
            *checks.unread(config, explicit, checks.COMMON_UNREAD + SUPERVISED_UNREAD),
        ]
    )


SUPERVISED_UNREAD = (
    *checks.optimizer_unread("", lambda c: c),
    Unread(
        keys=("model.gradient_checkpointing_reentrant", "ds.activation_offload"),
        when=lambda c: not c.model.gradient_checkpointing_enable,
        why="model.gradient_checkpointing_enable is off",
    ),
    Unread(
        keys=("data.cache_dir",),
        when=lambda c: not c.data.cache_enable,
        why="data.cache_enable is off",
    ),
    Unread(
        keys=("model.freeze_visual_encoder",),
        when=lambda c: not c.data.reads_images,
        why="the rows have no images (data.max_images_per_prompt)",
    ),
    Unread(
        keys=("ds.enable_sleep",), when=lambda c: True, why="supervised training shares its GPUs with nobody"
    ),
)

RM_UNREAD = (
    Unread(
        keys=("model.compute_fp32_loss_enable",),
        when=lambda c: True,
        why="scores and losses are always float32",
    ),
    Unread(
        keys=("model.margin_loss_enable",),
        when=lambda c: c.model.loss_type == "logexp",
        why="model.loss_type logexp has no margin",
    ),
)

PRETRAIN_UNREAD = (
    Unread(
        keys=("data.input_template", "data.apply_chat_template"),
        when=lambda c: c.model.pretrain_mode_enable,
        why="model.pretrain_mode_enable takes data.input_key as plain text",
    ),
    Unread(
        keys=("data.output_key",),
        when=lambda c: c.model.pretrain_mode_enable and c.data.output_key is not None,
        why="model.pretrain_mode_enable takes data.input_key as plain text",
    ),
)

KD_UNREAD = (
    Unread(
        keys=("model.kd_temperature", "model.kd_loss_type"),
        when=lambda c: c.model.kd_coef == 0,
        why="model.kd_coef 0 leaves the teacher out",
    ),
)

DPO_UNREAD = (
    Unread(
        keys=("model.label_smoothing",),
        when=lambda c: c.model.ipo_enable,
        why="model.ipo_enable has no label smoothing",
    ),
)


def _balance(config: SupervisedConfig) -> Iterator[Problem]:
    if config.model.aux_loss_coef > 0 and config.model.gradient_checkpointing_reentrant:
        yield Problem(
            "model.gradient_checkpointing_reentrant",
            "hides the routers from the balance loss (model.aux_loss_coef); remove one",
        )


def _dropout(config: DPOConfig | KTOConfig) -> Iterator[Problem]:
    if config.model.dropout_enable:
        yield Problem(
            "model.dropout_enable",
            "the policy would differ from its reference, which has none, before it learned anything; "
            "remove it",
        )


def _pretrained_images(config: SFTConfig) -> Iterator[Problem]:
    if config.data.reads_images and config.model.pretrain_mode_enable:
        yield Problem(
            "data.max_images_per_prompt",
            "contradicts model.pretrain_mode_enable, which takes plain text; remove one",
        )


def _multiturn(config: SFTConfig | KDConfig) -> Iterator[Problem]:
    if not config.data.multiturn:
        return
    if config.model.pretrain_mode_enable:
        yield Problem(
            "data.multiturn", "contradicts model.pretrain_mode_enable, which trains on all tokens; remove one"
        )
    elif not config.data.apply_chat_template:
        yield Problem("data.multiturn", "needs messages; add --data.apply_chat_template")


def _responses(config: SFTConfig | KTOConfig | KDConfig) -> Iterator[Problem]:
    if config.data.output_key is None and not config.data.apply_chat_template:
        others = "use --data.apply_chat_template\n(the last message is the response)"
        if not isinstance(config, KTOConfig):
            if config.model.pretrain_mode_enable:
                return
            others += " or --model.pretrain_mode_enable (loss on all tokens)"
        yield Problem("data.output_key", f"nothing says what the response is: name its column, or {others}")


def _no_template(config: SFTConfig | KTOConfig | KDConfig, explicit: Explicit) -> Iterator[Problem]:
    data, key = config.data, "data.input_template"
    is_plain = isinstance(config, KTOConfig) or not config.model.pretrain_mode_enable
    if is_plain and not data.apply_chat_template and data.input_template is None and key not in explicit:
        yield remark(
            key,
            "nothing stands between a prompt and its response, here as in RL; to mark them use\n"
            r"--data.apply_chat_template, or --data.input_template $'User: {}\nAssistant: ' in every command",
        )


def _reward_tokens(config: PRMConfig) -> Iterator[Problem]:
    key, tokens = "data.reward_tokens", config.data.reward_tokens or ()
    twice = next((token for token in tokens if tokens.count(token) > 1), None)
    if twice is not None:
        yield Problem(key, f"names {twice} twice; name each once")
    elif len(tokens) == 1:
        yield Problem(key, "a step's label is one of two or more; name them all")
