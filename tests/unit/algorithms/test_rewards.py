import torch

from openrlhf.algorithms.rewards import overlong_penalty, stop_properly_penalty


def test_overlong():
    rewards = torch.full((5,), 1.0)
    lengths = torch.tensor([10, 80, 85, 100, 200])
    # the last 20 of 100 tokens: nothing up to 80, 5/20 of 2 at 85, all of 2 at 100 and no more beyond
    penalised = overlong_penalty(rewards, lengths, max_new_tokens=100, buffer_len=20, factor=2.0)
    assert penalised.tolist() == [1, 1, 0.5, -1, -1]


def test_stop_properly():
    rewards, truncated = torch.tensor([4.0, 4.0, -4.0]), torch.tensor([False, True, True])
    assert stop_properly_penalty(rewards, truncated, coef=0.25).tolist() == [4, 1, -1]
    assert stop_properly_penalty(rewards, truncated, coef=0.0).tolist() == [4, 0, 0]
    assert stop_properly_penalty(rewards, truncated, coef=-0.5).tolist() == [4, -0.5, -0.5]
