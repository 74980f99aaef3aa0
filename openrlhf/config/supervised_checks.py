"""Checks of the flags of the supervised commands against each other."""

import os
from collections.abc import Iterable, Iterator
from itertools import chain

from openrlhf.config import checks
from openrlhf.config.command import Explicit, Problem, remark
from openrlhf.config.owned_options import owned_options
from openrlhf.config.sections import ImagesConfig, RowTemplateConfig
from openrlhf.config.supervised import (
    DPOConfig,
    DPOModelConfig,
    KDConfig,
    KDModelConfig,
    KTOConfig,
    PRMConfig,
    RMModelConfig,
    SFTConfig,
    SupervisedConfig,
)
from openrlhf.errors import ErrorCode
from openrlhf.mesh import Mesh


def sft_problems(config: SFTConfig | KDConfig, explicit: Explicit) -> list[Problem]:
    return supervised_problems(
        config,
        explicit,
        _pretraining(config),
        _responses(config, explicit),
        checks.remark_ignored(config, explicit, _pretraining_ignored(config)),
    )


def prm_problems(config: PRMConfig, explicit: Explicit) -> list[Problem]:
    return supervised_problems(
        config, explicit, checks.required(config, "data.placeholder_token"), _reward_tokens(config)
    )


def dpo_problems(config: DPOConfig, explicit: Explicit) -> list[Problem]:
    return supervised_problems(config, explicit, _no_dropout(config))


def kto_problems(config: KTOConfig, explicit: Explicit) -> list[Problem]:
    return supervised_problems(config, explicit, _no_dropout(config), _responses(config, explicit))


def kd_problems(config: KDConfig, explicit: Explicit) -> list[Problem]:
    return [*checks.required(config, "teacher.model_name_or_path"), *sft_problems(config, explicit)]


def supervised_problems(
    config: SupervisedConfig, explicit: Explicit, *own: Iterable[Problem]
) -> list[Problem]:
    """Lists the problems of the flags that all supervised commands share, and a command's `own` problems."""
    launched = os.environ.get("WORLD_SIZE", "")
    ds, num_ranks = config.ds, max(1, int(launched)) if launched.isdecimal() else 1
    models = [role for role in ("model", "ref", "teacher") if hasattr(config, role)]
    mesh = Mesh.within(num_ranks, sequence=ds.ring_attn_size, tensor=ds.tensor_parallel_size)
    return checks.first_of_each(
        [
            *checks.modelscope(config),
            *checks.required(config, "model.model_name_or_path", "data.dataset"),
            *checks.local_models(config, *(f"{role}.model_name_or_path" for role in models)),
            *checks.local_datasets(config, ("data.dataset", "data.dataset_probs"), ("eval.dataset", None)),
            *(checks.template(config, explicit) if isinstance(config.data, RowTemplateConfig) else ()),
            *(checks.image_rows(config) if isinstance(config.data, ImagesConfig) else ()),
            *chain.from_iterable(own),
            *checks.optimizer("", config, config.ds),
            *checks.batches(config, mesh.data, None, ""),
            *checks.backend(config),
            *owned_options(config),
            *checks.precision(config),
            *checks.secondary_partition(ds, {"run": num_ranks}),
            *checks.sequence_parallel(ds, {"run": num_ranks}, reads_images=config.data.reads_images),
            *checks.tensor_parallel(config, {"run": num_ranks}),
            *checks.four_bits(config.ds),
            *_balance(config),
            *checks.outputs(config.ckpt, config.logger, config.train.hooks),
            *checks.remark_ignored(config, explicit, _ignored(config)),
        ]
    )


NEEDS = {
    "model.gradient_checkpointing_enable": ("model.gradient_checkpointing_reentrant ds.activation_offload"),
    "data.cache_enable": "data.cache_dir",
}
"""Flags of supervised commands that need another one, as `checks.NEEDS`."""


def _ignored(config: SupervisedConfig) -> Iterator[checks.IgnoredFlags]:
    """Yields flags of supervised commands without effect."""
    model = config.model
    yield from checks.common_ignored(config)
    yield from checks.optimizer_ignored(config)
    if not config.data.reads_images:
        why = "because the rows have no images (--data.max_images_per_prompt 0)"
        yield "model.freeze_visual_encoder", why
    yield "ds.enable_sleep", "because nothing else uses the GPUs of supervised training"
    if isinstance(config.data, RowTemplateConfig):
        yield from checks.template_ignored(config)
    if isinstance(config.data, ImagesConfig):
        yield from checks.needs(config, {"data.max_images_per_prompt": checks.IMAGE_FLAGS})
    if isinstance(model, RMModelConfig):
        yield "model.compute_fp32_loss_enable", "because scores and losses are always fp32"
        if model.loss_type == "logexp":
            yield "model.margin_loss_enable", "with model.loss_type logexp, which has no margin"
    if isinstance(model, KDModelConfig) and model.kd_coef == 0:
        keys = "model.kd_temperature model.kd_loss_type"
        yield keys, "with model.kd_coef 0, which leaves the teacher out"
    if isinstance(model, DPOModelConfig) and model.ipo_enable:
        yield "model.label_smoothing", "with --model.ipo_enable, whose loss has no label smoothing"
    yield from checks.needs(config, NEEDS)


def _pretraining_ignored(config: SFTConfig | KDConfig) -> Iterator[checks.IgnoredFlags]:
    if config.model.pretrain_mode_enable:
        why = "with --model.pretrain_mode_enable, which reads data.input_key as plain text"
        yield "data.input_template data.apply_chat_template", why
        if config.data.output_key is not None:
            yield "data.output_key", why


def _pretraining(config: SFTConfig | KDConfig) -> Iterator[Problem]:
    """Checks the flags of continued pre-training, and data.multiturn."""
    data, pretrains = config.data, config.model.pretrain_mode_enable
    if data.reads_images and pretrains:
        text = "model.pretrain_mode_enable reads plain text; remove one of the two"
        yield Problem("data.max_images_per_prompt", text)
    if data.multiturn and pretrains:
        text = "model.pretrain_mode_enable trains on all tokens; remove one of the two"
        yield Problem("data.multiturn", text)
    if data.multiturn and not data.apply_chat_template:
        yield Problem("data.multiturn", "needs rows with messages; add --data.apply_chat_template")


def _balance(config: SupervisedConfig) -> Iterator[Problem]:
    if config.model.aux_loss_coef > 0 and config.model.gradient_checkpointing_reentrant:
        text = checks.HIDDEN_ROUTERS.format("model.aux_loss_coef")
        yield Problem("model.gradient_checkpointing_reentrant", text, ErrorCode.UNSUPPORTED)


def _no_dropout(config: DPOConfig | KTOConfig) -> Iterator[Problem]:
    if config.model.dropout_enable:
        text = "the policy must start equal to the reference, which has no dropout; remove it"
        yield Problem("model.dropout_enable", text, ErrorCode.UNSUPPORTED)


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
