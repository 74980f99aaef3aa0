"""Values that reward functions and servers may return, and files whose import does not end."""

import asyncio

import numpy as np
import pytest
import torch

from openrlhf.agents.base import Reward, RewardError
from openrlhf.rewards import function
from openrlhf.rewards.process import RewardProcess
from openrlhf.rewards.values import read_rewards


def reward(value, score=None, **logs):
    return Reward(reward=value, score=value if score is None else score, extra_logs=logs)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"rewards": [1, 2.5]}, [reward(1.0), reward(2.5)]),
        ([1, 0], [reward(1.0), reward(0.0)]),
        ((True, False), [reward(1.0), reward(0.0)]),
        (torch.tensor([1.0, 2.0]), [reward(1.0), reward(2.0)]),
        (np.array([1, 2]), [reward(1.0), reward(2.0)]),
        ([torch.tensor(1.0), np.float32(2)], [reward(1.0), reward(2.0)]),
        ({"rewards": [1, 2], "scores": [0, 1]}, [reward(1.0, 0.0), reward(2.0, 1.0)]),
        ({"rewards": [1, 2], "scores": None, "extra_logs": None}, [reward(1.0), reward(2.0)]),
        ({"rewards": torch.ones(2), "scores": torch.zeros(2)}, [reward(1.0, 0.0)] * 2),
        ({"rewards": [1, 2], "extra_logs": {"a": [3, 4]}}, [reward(1.0, a=3.0), reward(2.0, a=4.0)]),
        ({"rewards": [1, 2], "extra_logs": {"a": 5}}, [reward(1.0, a=5.0), reward(2.0, a=5.0)]),
        ({"rewards": [1, 2], "extra_logs": {"a": torch.tensor(5)}}, [reward(1.0, a=5.0), reward(2.0, a=5.0)]),
        ({"rewards": [1, 2], "extra_logs": {"a": torch.ones(1)}}, [reward(1.0, a=1.0), reward(2.0, a=1.0)]),
        ({"rewards": [1, 2], "extra_logs": {"a": [True, False]}}, [reward(1.0, a=1.0), reward(2.0, a=0.0)]),
        (
            {"rewards": [1, 2], "extra_logs": {"a": np.array([3, 4])}},
            [reward(1.0, a=3.0), reward(2.0, a=4.0)],
        ),
        ({"rewards": [1, 2], "extra_logs": {"a": np.bool_(True)}}, [reward(1.0, a=1.0), reward(2.0, a=1.0)]),
        ({"rewards": [1, 2], "extra_logs": {"a": True}}, [reward(1.0, a=1.0), reward(2.0, a=1.0)]),
        (
            {"rewards": torch.ones(2, 1), "extra_logs": {"a": torch.tensor([[3], [4]])}},
            [reward(1.0, a=3.0), reward(1.0, a=4.0)],
        ),
        ([[1], (2,)], [reward(1.0), reward(2.0)]),
        (torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True), [reward(1.0), reward(2.0)]),
    ],
)
def test_what_may_be_returned(answer, expected):
    assert read_rewards(answer, 2) == expected


def test_texts_of_judges_are_those_of_their_samples():
    texts = {"judge": ["right", None], "version": "judge-2", "said": np.array(["a", "b"]), "nothing": None}
    first, second = read_rewards({"rewards": [1, 2], "extra_texts": texts}, 2)
    assert first.extra_texts == {"judge": "right", "version": "judge-2", "said": "a"}
    assert second.extra_texts == {"version": "judge-2", "said": "b"}


@pytest.mark.parametrize("answer", [0.5, torch.tensor(0.5), torch.tensor([[0.5]]), {"rewards": 0.5}, [0.5]])
def test_one_sample_needs_no_list(answer):
    assert read_rewards(answer, 1) == [reward(0.5)]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ([1.0], "1 rewards for 2 samples"),
        ({"rewards": [1, 2, 3]}, "3 rewards for 2 samples"),
        ({"rewards": [1, 2], "scores": [1]}, "1 scores for 2 samples"),
        ({"rewards": [1, 2], "extra_logs": {"length": [1] * 3}}, r"3 extra_logs\['length'\] for 2 samples"),
        ({"rewards": [1, 2], "extra_logs": {"length": None}}, r"extra_logs\['length'\] that are not numbers"),
        (
            {"rewards": [1, 2], "extra_logs": {"length": "long"}},
            r"extra_logs\['length'\] that are not numbers",
        ),
        ({"rewards": [1, 2], "extra_logs": [1, 2]}, "extra_logs that are not a dict"),
        ({"rewards": [1, 2], "extra_texts": "good"}, "extra_texts that are not a dict"),
        ({"rewards": [1, 2], "extra_texts": {"a": ["good"]}}, r"1 extra_texts\['a'\] for 2 samples"),
        ({"rewards": [1, 2], "extra_texts": {"a": [1, 2]}}, r"extra_texts\['a'\] that are not texts"),
        ({"rewards": [1, 2], "extra_texts": {"a": 5}}, r"extra_texts\['a'\] that are not texts"),
        ({"reward": [1, 2]}, "without 'rewards'; it has 'reward'"),
        ({}, "without 'rewards'; it has nothing"),
        ([1.0, float("nan")], "rewards that are not finite"),
        ([1.0, -1e39], "rewards that are not finite"),  # in float32, in which advantages are computed
        ({"rewards": [1, 2], "scores": [1, float("inf")]}, "scores that are not finite"),
        ([1.0, None], "rewards that are not numbers"),
        (["good", "bad"], "rewards that are not numbers"),
        ([1, 10**400], "rewards that are not numbers"),
        (torch.ones(2, 2), "rewards that are not numbers"),
        (torch.ones(1, 2), "1 rewards for 2 samples"),
        (None, "1 rewards for 2 samples"),
        ("11", "1 rewards for 2 samples"),
    ],
)
def test_a_wrong_return_value_is_refused(answer, text):
    with pytest.raises(RewardError, match=text):
        read_rewards(answer, 2)


def test_an_import_that_takes_long_is_remarked_upon(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(RewardProcess):
        async def ready(self) -> None:
            assert (self.reference, self.timeout, self._process) == ("judge.py", 0.01, None)
            await asyncio.sleep(60)

    monkeypatch.setattr(function, "RewardProcess", Slow)
    remark = function.check_reward_file("judge.py", "--reward.remote_url", limit=0.01)
    assert remark.startswith("--reward.remote_url judge.py: ") and "0.01 s" in remark
