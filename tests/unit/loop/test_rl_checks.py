"""Checks of RL runs that need the models, the users' files or the number of prompts."""

import json
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from openrlhf.config.ppo import (
    ActorConfig,
    CriticConfig,
    PPOConfig,
    PromptDataConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
    VllmConfig,
)
from openrlhf.config.supervised import KDConfig, KDDataConfig, SFTModelConfig, TeacherConfig
from openrlhf.data.prompt_sampler import PromptDataset
from openrlhf.data.sources import rows_digest
from openrlhf.errors import ErrorCode
from openrlhf.loop import rl_command
from openrlhf.loop.rl_checks import check_engines, check_policy_learns, check_users_files
from openrlhf.loop.rl_command import RLRun, _run_fingerprint
from openrlhf.loop.supervised.kd import DistillationTask
from openrlhf.tasks.tiny_model import tiny_chat_model
from openrlhf.tasks.tiny_vision_model import tiny_vision_model
from openrlhf.training.rl_data import PRETRAIN_FLAG, RLData
from openrlhf.types import Prompt


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_chat_model(tmp_path_factory.mktemp("checks") / "model"))


def test_a_policy_must_learn_in_some_step() -> None:
    """Eight prompts are four steps of two."""
    sizes: dict[str, Any] = {"rollout": RolloutConfig(batch_size=2), "train": TrainConfig(batch_size=2)}
    check_policy_learns(PPOConfig(critic=CriticConfig(freezing_steps=3), **sizes), 8)
    config = PPOConfig(critic=CriticConfig(freezing_steps=4), **sizes)
    with refused(ErrorCode.CONFLICT, flag="--critic.freezing_steps", value=4) as told:
        check_policy_learns(config, 8)
    assert "the run has only 4 steps, " in told.value.text


def test_the_engines_of_a_run_divide_the_policys_heads(model: str) -> None:
    config = PPOConfig(actor=ActorConfig(model_name_or_path=model))
    check_engines(config, on_cpu=False)
    config = PPOConfig(actor=ActorConfig(model_name_or_path=model), vllm=VllmConfig(tensor_parallel_size=7))
    with refused(ErrorCode.UNSUPPORTED, flag="--actor.model_name_or_path", value=model):
        check_engines(config, on_cpu=False)


@pytest.mark.parametrize(
    ("sections", "flag"),
    [
        ({"train": TrainConfig(agent_func_path="agent.py")}, "--train.agent_func_path"),
        ({"reward": RewardConfig(remote_url="reward.py")}, "--reward.remote_url"),
    ],
)
def test_a_users_file_is_checked_under_its_flag(sections: dict, flag: str) -> None:
    asked: list[tuple] = []
    check_users_files(PPOConfig(**sections), lambda *arguments: asked.append(arguments))
    ((name, _, *arguments),) = asked
    assert name == arguments[-1] == flag and arguments[-2].endswith(".py")


def test_a_teacher_must_read_images_as_the_student_does(tmp_path: Path) -> None:
    own, other = tiny_vision_model(tmp_path / "own"), tiny_vision_model(tmp_path / "other")
    task = DistillationTask(
        KDConfig(
            model=SFTModelConfig(model_name_or_path=str(own)),
            teacher=TeacherConfig(model_name_or_path=str(other)),
            data=KDDataConfig(max_images_per_prompt=1),
        )
    )
    task.check_models()
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (path := other / name).exists():
            path.write_text(path.read_text().replace('"patch_size": 14', '"patch_size": 28'))
    with refused(ErrorCode.INVALID_MODEL, flag="--teacher.model_name_or_path", value=other, told=str(own)):
        task.check_models()


def test_the_origin_of_a_run_tells_its_data_apart(model: str, tmp_path: Path) -> None:
    """The texts' checksum is that of the split that the run reads."""
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"input": split}) + "\n")
    config = PPOConfig(
        actor=ActorConfig(model_name_or_path=model),
        data=PromptDataConfig(pretrain_dataset=str(tmp_path), pretrain_split="test"),
        reward=RewardConfig(remote_url="http://127.0.0.1:1/reward"),
    )
    prompts = PromptDataset([Prompt(prompt_id=i, text=str(i)) for i in range(3)])
    contents = _run_fingerprint(config, RLData(prompts, prompts, None, None)).contents
    digest = rows_digest(str(tmp_path), flag=PRETRAIN_FLAG, split="test")[:16]
    assert digest != rows_digest(str(tmp_path), flag=PRETRAIN_FLAG, split="train")[:16]
    assert contents[PRETRAIN_FLAG] == f"checksum {digest}"
    assert contents["--data.prompt_dataset"] == f"3 prompts (checksum {prompts.digest()[:16]})"
    assert "--actor.model_name_or_path" in contents and "--critic.model_name_or_path" in contents


def test_a_run_prepares_everything_and_trains(monkeypatch, model, tmp_path):
    """The cluster is a stand-in; it is left whether or not the training ends well."""
    calls: list[Any] = []
    note = lambda name, answer=None: lambda *_, **named: calls.append(name) or answer
    monkeypatch.chdir(tmp_path)
    for module, name, answer in (
        (rl_command, "stop_ray", None),
        (rl_command, "check_resources", "layout"),
        (rl_command, "place", "places"),
        (rl_command, "check_disks", None),
        (rl_command, "catch_signals", None),
        (rl_command, "build_data", RLData(PromptDataset([Prompt(prompt_id=0, text="a")]), (), None, None)),
        (rl_command, "publish", None),
    ):
        monkeypatch.setattr(module, name, note(name, answer))
    monkeypatch.setattr(rl_command, "start_ray", lambda backends: calls.append(("start_ray", *backends)))
    monkeypatch.setattr(rl_command.Calendar, "today", rl_command.Calendar.today)
    trained: list[RLRun] = []
    monkeypatch.setattr(RLRun, "train", lambda run: trained.append(run))
    config = PPOConfig(actor=ActorConfig(model_name_or_path=model))
    rl_command.run(config, ["--x"])
    (run,) = trained
    assert (run.config, run.argv, run.layout, run.places) == (config, ["--x"], "layout", "places")
    assert len(run.data.prompts) == 1 and run.tag is None
    assert calls == [
        ("start_ray", "deepspeed", "vllm"),
        *("catch_signals", "check_resources", "place", "check_disks", "build_data"),
        *("stop_ray", "publish"),
    ]
    calls.clear()
    monkeypatch.setattr(RLRun, "train", lambda run: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rl_command.run(config)
    assert calls[-1] == "stop_ray"
