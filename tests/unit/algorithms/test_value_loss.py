import torch

from openrlhf.algorithms.value_loss import clipped_value_loss


def test_by_hand():
    values = torch.tensor([1.0, 3.0, 3.0], requires_grad=True)
    old_values = torch.tensor([1.0, 1.0, 1.0])
    returns = torch.tensor([3.0, 4.0, 1.0])
    loss, clipped = clipped_value_loss(values, old_values, returns, clip=0.5)
    # (1-3)^2 / 2;  max((3-4)^2, (1.5-4)^2) / 2;  max((3-1)^2, (1.5-1)^2) / 2
    assert loss.tolist() == [2, 3.125, 2]
    assert clipped.tolist() == [False, True, False]
    loss.sum().backward()
    # 1 - 3;  the clipped branch is constant in the value;  3 - 1
    assert values.grad.tolist() == [-2, 0, 2]
