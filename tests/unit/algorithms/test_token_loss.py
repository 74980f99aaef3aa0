import math

import pytest
import torch
from torch import Tensor

from openrlhf.algorithms.token_loss import label_cross_entropy


def logits_of(*rows: list[float]) -> Tensor:
    """Returns logits of distributions, each with its own constant added."""
    return torch.tensor(rows, dtype=torch.float64).log() + torch.arange(1.0, len(rows) + 1)[:, None]


def test_hard_labels_by_hand():
    logits = logits_of([0.5, 0.25, 0.25], [0.1, 0.2, 0.7])
    losses = label_cross_entropy(logits, torch.tensor([1, 2]))
    assert losses.tolist() == pytest.approx([math.log(4), -math.log(0.7)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probabilities_by_hand(dtype):
    logits = logits_of([0.8, 0.2], [0.8, 0.2], [0.8, 0.2], [0.5, 0.5])
    losses = label_cross_entropy(logits, torch.tensor([1.0, 0.0, 0.25, 0.3], dtype=dtype))
    expected = [-math.log(0.8), -math.log(0.2), -0.25 * math.log(0.8) - 0.75 * math.log(0.2), math.log(2)]
    assert losses.dtype == torch.float64
    assert losses.tolist() == pytest.approx(expected)


def test_the_loss_of_a_probability_is_least_where_the_model_says_the_same():
    logits = logits_of([0.3, 0.7]).requires_grad_()
    label_cross_entropy(logits, torch.tensor([0.3], dtype=torch.float64)).sum().backward()
    assert logits.grad.abs().max() < 1e-12


def test_certain_probabilities_are_hard_labels():
    torch.manual_seed(0)
    logits, hard = torch.randn(6, 2), torch.tensor([0, 1, 1, 0, 1, 0])
    soft = (hard == 0).float()
    torch.testing.assert_close(label_cross_entropy(logits, soft), label_cross_entropy(logits, hard))


@pytest.mark.parametrize("label", [torch.tensor([0, 1]), torch.tensor([0.25, 0.75])], ids=["hard", "soft"])
def test_logits_far_apart_stay_finite(label):
    logits = torch.tensor([[1e4, -1e4], [1e4, -1e4]], requires_grad=True)
    losses = label_cross_entropy(logits, label)
    losses.sum().backward()
    expected = [0.0, 2e4] if not label.is_floating_point() else [1.5e4, 0.5e4]
    assert losses.tolist() == pytest.approx(expected)
    assert logits.grad.isfinite().all()


def test_without_actions_the_sum_is_zero_with_a_gradient():
    logits = torch.zeros(0, 2, requires_grad=True)
    for labels in (torch.zeros(0, dtype=torch.long), torch.zeros(0)):
        loss = label_cross_entropy(logits, labels).sum()
        loss.backward()
        assert loss.item() == 0
    assert logits.grad is not None
