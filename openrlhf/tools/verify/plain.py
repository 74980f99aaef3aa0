"""Computes loss and gradient with transformers' own model, loaded separately, one sequence at a time."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openrlhf.api import Sample
from openrlhf.tools.reference.objectives import PlainLoss

PlainOutput = Callable[[Any, Sample], Tensor]
"""Function (model, sequence) -> output, as described at `PlainLoss.loss`."""


class PlainGradient(NamedTuple):
    """Loss and gradient of a plain model."""

    loss: float
    loss_added: float
    """Sum over all outputs of |output d loss / d output|: the terms of the loss before they cancel."""
    gradients: dict[str, Tensor]
    """Gradient of each weight, in float32 on the CPU."""
    added: dict[str, float]
    """Sum over the sequences of the norm of each one's part of the gradient. Rounding errors are relative to
    it: where parts cancel, it is larger than the norm of their sum."""


def plain_gradient(model: Any, plain: PlainLoss, output: PlainOutput) -> PlainGradient:
    """Computes the loss of all sequences, and its gradient one sequence at a time.

    The first pass computes all outputs without gradients; differentiating the formula gives the weight
    d loss / d output of each. The second pass adds up the gradients of the weighted outputs, so that only one
    sequence's activations are in memory."""
    with torch.no_grad():
        outputs = [output(model, sample).double() for sample in plain.sequences]
    with torch.enable_grad():
        leaves = [each.requires_grad_() for each in outputs]
        loss = plain.loss(leaves)
        weights = torch.autograd.grad(loss, leaves, allow_unused=True)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros(p.shape, dtype=torch.float32) for name, p in trained.items()}
    added = dict.fromkeys(trained, 0.0)
    for sample, weight in zip(plain.sequences, weights, strict=True):
        if weight is None or not weight.any():
            continue
        value = output(model, sample)
        parts = torch.autograd.grad(
            (value * weight.to(value)).sum(), list(trained.values()), allow_unused=True
        )
        for name, part in zip(trained, parts, strict=True):
            if part is not None:
                total[name] += part.float().cpu()
                added[name] += float(part.float().norm())
    terms = sum(
        float((leaf.detach() * weight).abs().sum())
        for leaf, weight in zip(leaves, weights, strict=True)
        if weight is not None
    )
    return PlainGradient(loss.item(), terms, total, added)
