"""The flags of tasks: where they are written, and what a task's prompts see of the configuration."""

import json

import pytest

from openrlhf.checkpoint.run_fingerprint import RunFingerprint, compare
from openrlhf.config.commands import PPO
from openrlhf.config.fields import find_flag, flag_values, with_values
from openrlhf.config.parse import parse, to_yaml
from openrlhf.config.ppo import PPOConfig

YAML = """
rollout.batch_size: 8
train.batch_size: 8
tasks:
  openai/gsm8k:
    quota: 6
    temperature: 0.7
  chat: {quota: 2, reward: "http://judge:8000/score", kl-coef: 0, estimator: null}
"""
TASKS = {
    "tasks.openai_gsm8k.quota": 6,
    "tasks.openai_gsm8k.temperature": 0.7,
    "tasks.chat.quota": 2,
    "tasks.chat.reward": "http://judge:8000/score",
    "tasks.chat.kl_coef": 0.0,
    "tasks.chat.estimator": None,
}


def of_tasks(config: PPOConfig) -> dict:
    return {key: value for key, value in flag_values(config).items() if key.startswith("tasks.")}


def test_tasks_are_blocks_of_a_file_or_flags(say, tmp_path):
    """A task has the name of its datasource, with _ for what no flag's name has. The configuration that a run
    prints is read as the same one."""
    (tmp_path / "run.yaml").write_text(YAML)
    config, _ = say(PPO, f"--config {tmp_path / 'run.yaml'}")
    assert of_tasks(config) == TASKS
    by_flags, _ = say(
        PPO, "--rollout.batch_size 8 --train.batch_size 8 " + " ".join(f"--{k} {v}" for k, v in TASKS.items())
    )
    assert of_tasks(by_flags) == TASKS
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert of_tasks(parse(PPO, ["--config", str(tmp_path / "again.yaml")]).config) == TASKS
    changed, _ = say(PPO, f"--config {tmp_path / 'run.yaml'} --tasks.chat.kl_coef 0.1")
    assert of_tasks(changed) == TASKS | {"tasks.chat.kl_coef": 0.1}


def test_a_source_has_the_values_of_its_task_and_else_those_of_the_run():
    config = with_values(PPOConfig(), {"rollout.temperature": 0.9, "reward.remote_url": "r.py"} | TASKS)
    assert config.task_values("quota") == {"openai_gsm8k": 6, "chat": 2}
    found = [config.for_source(name) for name in ("openai_gsm8k", "chat", "other")]
    assert [c.rollout.temperature for c in found] == [0.7, 0.9, 0.9]
    assert [c.reward.remote_url for c in found] == ["r.py", "http://judge:8000/score", "r.py"]
    assert config.temperature("openai_gsm8k") == 0.7 and config.temperature("chat") == 0.9
    assert config.reward_functions == {"reward.remote_url": "r.py"} and config.agents == {}


@pytest.mark.parametrize(
    ("changes", "differences", "remarks"),
    [
        ({"tasks.chat.quota": 3}, ["--tasks.chat.quota was 2, is 3"], []),
        ({"tasks.chat.reward": "http://b/x"}, [], ["rewards before and after cannot be compared"]),
        ({"tasks.other.temperature": 0.5}, ["other.temperature"], ["could not be compared"]),
        ({}, [], []),
    ],
)
def test_what_a_resumed_run_may_change(changes, differences, remarks):
    def fingerprint(config: PPOConfig) -> RunFingerprint:
        found = RunFingerprint.of("ppo", config, {"--tasks": ", ".join(sorted(config.tasks))})
        return RunFingerprint(**json.loads(json.dumps(found.as_dict())), config_type=PPOConfig)

    before = with_values(PPOConfig(), TASKS)
    found = compare(fingerprint(before), fingerprint(with_values(before, changes)))
    for texts, expected in ((found.differences, differences), (found.remarks, remarks)):
        assert len(texts) == len(expected)
        assert all(part in text for part, text in zip(expected, texts, strict=True))


def test_flags_of_tasks_are_found_by_any_name():
    flag = find_flag(PPOConfig, "tasks.anything.quota")
    assert flag is not None and (flag.key, flag.name) == ("tasks.anything.quota", "quota")
    assert find_flag(PPOConfig, "tasks.anything.other") is find_flag(PPOConfig, "tasks.quota") is None
