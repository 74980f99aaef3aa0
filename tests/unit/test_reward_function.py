import asyncio

import numpy as np
import pytest
import torch

from openrlhf.rollout.reward_function import RewardFunction, check_reward_file, read_rewards
from openrlhf.utils.agent import Reward, RewardError


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
    ],
)
def test_what_may_be_returned(answer, expected):
    assert read_rewards(answer, 2) == expected


@pytest.mark.parametrize("answer", [0.5, torch.tensor(0.5), torch.tensor([0.5]), {"rewards": 0.5}, [0.5]])
def test_one_sample_needs_no_list(answer):
    assert read_rewards(answer, 1) == [reward(0.5)]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ([1.0], "1 rewards for 2 samples"),
        ({"rewards": [1, 2, 3]}, "3 rewards for 2 samples"),
        ({"rewards": [1, 2], "scores": [1]}, "1 scores for 2 samples"),
        ({"rewards": [1, 2], "extra_logs": {"length": [1]}}, r"1 extra_logs\['length'\] for 2 samples"),
        ({"rewards": [1, 2], "extra_logs": [1, 2]}, "extra_logs that are not a dict"),
        ({"reward": [1, 2]}, "without 'rewards'; it has 'reward'"),
        ({}, "without 'rewards'; it has nothing"),
        ([1.0, float("nan")], "rewards that are not finite"),
        ({"rewards": [1, 2], "scores": [1, float("inf")]}, "scores that are not finite"),
        ([1.0, None], "rewards that are not numbers"),
        (["good", "bad"], "rewards that are not numbers"),
        ([1, 10**400], "rewards that are not numbers"),
        (torch.ones(2, 1), "rewards that are not numbers"),
        (None, "1 rewards for 2 samples"),
        ("11", "1 rewards for 2 samples"),
    ],
)
def test_what_may_not(answer, text):
    with pytest.raises(RewardError, match=text):
        read_rewards(answer, 2)


USER_FILE = """
import os, sys, time
from openrlhf.utils.agent import RewardError

class Unpicklable(Exception):
    def __init__(self, one, two):
        self.lock = open(os.devnull)

def reward_func(queries, prompts, labels):
    fate = labels[0]
    if fate == "hang":
        time.sleep(60)
    if fate == "crash":
        os._exit(7)
    if fate == "exit":
        sys.exit("enough")
    if fate == "raise":
        raise KeyError("no such answer")
    if fate == "unpicklable":
        raise Unpicklable(1, 2)
    if fate == "refuse":
        raise RewardError("the judge is out")
    if fate == "nan":
        return [float("nan")]
    if fate == "two":
        return [1.0, 2.0]
    return {"rewards": [len(queries[0]) - len(prompts[0])], "extra_logs": {"pid": os.getpid()}}
"""


@pytest.fixture(scope="module")
def function(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "user_reward.py"
    path.write_text(USER_FILE)
    function = RewardFunction(str(path), timeout=1)
    yield function
    function.close()


def call(function, label, query="prompt and answer", prompt="prompt"):
    async def ask():
        return await function(query, prompt, label)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("fate", "text"),
    [
        ("raise", r"reward_func raised:\n(.|\n)*user_reward.py.*\n(.|\n)*KeyError: 'no such answer'"),
        ("unpicklable", r"reward_func raised:\n(.|\n)*Unpicklable"),
        ("exit", r"reward_func raised:\n(.|\n)*SystemExit: enough"),
        ("refuse", "^the judge is out$"),
        ("hang", r"user_reward.py: reward_func took longer than --reward.timeout 1 s"),
        ("crash", r"user_reward.py: reward_func's process died with exit code 7"),
        ("nan", r"rewards that are not finite: \[nan\]"),
        ("two", "2 rewards for 1 samples"),
    ],
)
def test_a_call_fails_alone(function, fate, text):
    with pytest.raises(RewardError, match=text):
        call(function, fate)
    assert call(function, "fine").reward == len(" and answer")


def test_calls_side_by_side(tmp_path):
    """Two workers; the failure of one call does not touch the others."""
    path = tmp_path / "user_reward.py"
    path.write_text(USER_FILE)
    function = RewardFunction(str(path), timeout=1, num_workers=2)

    async def ask():
        fates = ["fine", "hang", "fine", "raise", "fine"]
        calls = [function("x" * i, "", fate) for i, fate in enumerate(fates)]
        return await asyncio.gather(*calls, return_exceptions=True)

    answers = asyncio.run(ask())
    function.close()
    assert [a.reward if isinstance(a, Reward) else type(a) for a in answers] == [
        0.0,
        RewardError,
        2.0,
        RewardError,
        4.0,
    ]


def test_a_file_that_cannot_be_imported(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import no_such_package\ndef reward_func(queries, prompts, labels): return [1.0]\n")
    function = RewardFunction(str(path), timeout=5)
    for _ in range(2):
        with pytest.raises(RewardError, match=r"broken.py could not be imported:\n(.|\n)*no_such_package"):
            call(function, "")
    function.close()


@pytest.mark.parametrize(
    "source",
    [
        "def reward_func(queries, prompts, labels): return [1]",
        "def reward_func(queries, prompts, labels, **kwargs): return [1]",
        "from elsewhere import reward_func",
        "from elsewhere import judge as reward_func",
        "reward_func = lambda queries, prompts, labels: [1]",
        "raise SystemExit  # it is not run\ndef reward_func(queries, prompts, labels): return [1]",
    ],
)
def test_files_that_may_be_reward_files(tmp_path, source):
    path = tmp_path / "reward.py"
    path.write_text(source)
    check_reward_file(str(path), "--reward.remote_url")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("def reward(queries): pass\nLIMIT = 3", "has no reward_func (it defines LIMIT, reward)"),
        ("", "has no reward_func (it defines no function)"),
        ("class reward_func: pass", "has no reward_func (it defines no function)"),
        ("x = 1\ndef reward_func(queries:\n    return", "line 2:"),
        ("async def reward_func(queries, prompts, labels): return [1]", "has no reward_func"),
    ],
)
def test_files_that_cannot(tmp_path, source, text):
    path = tmp_path / "reward.py"
    path.write_text(source)
    with pytest.raises(ValueError, match=r"--reward\.remote_url") as error:
        check_reward_file(str(path), "--reward.remote_url")
    assert str(error.value).startswith(f"--reward.remote_url {path}: ")
    assert text in str(error.value)
    assert len(str(error.value).splitlines()) <= 3
    if "has no" in text:
        assert "Define `def reward_func(queries, prompts, labels)`" in str(error.value)


def test_a_function_that_takes_keywords(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("def reward_func(queries, prompts, labels, **kwargs): return [len(kwargs)]")
    function = RewardFunction(str(path), timeout=5)
    assert call(function, "").reward == 0
    function.close()
