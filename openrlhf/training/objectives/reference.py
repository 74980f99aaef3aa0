"""Summed log-probs of answers under the policy and its reference, for DPO and KTO."""

from collections.abc import Callable

import torch
from torch import Tensor

from openrlhf.algorithms.reductions import segment_sum
from openrlhf.rows import PackedRow

Reference = Callable[[PackedRow], Tensor]
"""Function from a row to the log-probs (A,) of a frozen model."""


def answer_log_probs(model: Callable, row: PackedRow) -> Tensor:
    """Returns the sum of log-probs over each sequence's actions, (B,). `model` is a
    `models.policy.PolicyModel`."""
    return segment_sum(model(row, temperature=1.0, with_entropy=False).log_probs, row.num_actions)


def reference_log_probs(known: Tensor | None, reference: Reference | None, row: PackedRow) -> Tensor:
    """Returns the reference log-probs of each sequence, (B,): `known` if they are precomputed, else computed
    with `reference`."""
    if known is not None:
        return known
    assert reference is not None  # commands build one unless log-probs are precomputed
    with torch.no_grad():
        return segment_sum(reference(row), row.num_actions)
