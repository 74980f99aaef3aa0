"""Computes the load-balancing loss of mixtures of experts: how evenly a model's routers use their experts.
Freezes routers."""

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from openrlhf.errors import ErrorCode, UsageError
from openrlhf.models.backbone import RowModel, get_backbone, get_row_layout
from openrlhf.models.configurations import has_experts, load_config, names_beside_model, without_weights
from openrlhf.models.prefixes import Branches
from openrlhf.models.vision import freeze

BALANCE_LOSS = "load_balancing_loss_func"
"""Name of transformers' load-balancing loss in the file of an architecture that has one."""


@contextmanager
def recorded_balance(module: RowModel) -> Iterator[list[Tensor]]:
    """Records the load-balancing loss, (), of every row that `module` reads within the context.

    The loss is E sum_e f_e p_e over E experts. f_e is the mean number of times that a token is routed to
    expert e, and p_e the expert's mean probability, both over all tokens of the row and all layers. The loss
    is top_k if all experts are used evenly, and larger otherwise. It is that of the Switch Transformer,
    https://arxiv.org/abs/2101.03961, as transformers computes it for the architecture. If gradients are
    enabled when the context is entered, rows that are read without gradients are skipped.
    """
    losses: list[Tensor] = []
    trees: list[Branches | None] = []  # of each pass
    passes: list[Sequence[Tensor]] = []  # (L, E) router logits of each layer, of each pass for the row
    model = module.model
    balance_loss = getattr(sys.modules[type(model).__module__], BALANCE_LOSS)  # check_experts has found it
    top_k = model.config.get_text_config().num_experts_per_tok
    with_grad = torch.is_grad_enabled()

    def ask(backbone: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        trees.append(getattr(kwargs.get("packing"), "branches", None))
        return args, kwargs | {"output_router_logits": True}

    def collect(backbone: nn.Module, args: tuple, output: Any) -> None:
        passes.append(output.router_logits)

    def record(module: nn.Module, args: tuple, output: Any) -> None:
        if torch.is_grad_enabled() == with_grad:
            num_tokens = len(args[0].token_ids)  # later tokens are those of dummy passes
            # A token of a common prefix counts as often as it is in the row.
            of_row = slice(num_tokens) if trees[0] is None else trees[0].of_row[:num_tokens]
            layers = (torch.cat(layer) for layer in zip(*passes, strict=True))
            sharing = get_row_layout(model).sharing
            logits = tuple((sharing.gathered(x) if sharing else x)[of_row] for x in layers)
            losses.append(balance_loss(logits, logits[0].shape[-1], top_k))
        passes.clear()
        trees.clear()

    hooks = (
        get_backbone(model).register_forward_pre_hook(ask, with_kwargs=True),
        get_backbone(model).register_forward_hook(collect),
        module.register_forward_hook(record),
    )
    try:
        yield losses
    finally:
        for hook in hooks:
            hook.remove()


def check_experts(path: str, flag: str, coef_flag: str) -> None:
    """Raises UsageError if the model at `path` has no experts, or another load-balancing loss than
    `recorded_balance` computes, which `coef_flag` requires. Loads no weights."""
    config = load_config(path, flag)
    balance_loss = names_beside_model(config).get(BALANCE_LOSS, lambda: 0.0)
    is_usual = [*inspect.signature(balance_loss).parameters][1:3] == ["num_experts", "top_k"]
    if not (is_usual and has_experts(path, flag)):
        text = f"this {config.model_type} has no experts for a balance loss.\nRemove {coef_flag}."
        raise UsageError(ErrorCode.UNSUPPORTED, text, flag=flag, value=path)


def freeze_routers(model: nn.Module) -> None:
    """Freezes the routers, so that the experts of a token change only with what the routers read."""
    for module in model.modules():
        if _is_router(type(module).__name__):
            freeze(module.parameters())


def check_routers(path: str, flag: str, freeze_flag: str) -> None:
    """Raises UsageError if the model at `path` has no routers that `freeze_routers` finds. Loads no
    weights."""
    config = load_config(path, flag)
    modules = without_weights(path, flag, images=False).modules() if names_beside_model(config) else ()
    if not any(_is_router(type(module).__name__) for module in modules):
        text = f"no routers are known in this {config.model_type}.\nRemove {freeze_flag}."
        raise UsageError(ErrorCode.UNSUPPORTED, text, flag=flag, value=path)


def _is_router(class_name: str) -> bool:
    return class_name.endswith("Router")
