"""Checks of a run before it loads a model."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import refused
from transformers import Qwen3Config

from openrlhf.checkpoint import of_models
from openrlhf.checkpoint.folder import CheckpointFolder
from openrlhf.checkpoint.of_models import build_run_fingerprint, check_space
from openrlhf.checkpoint.start import (
    DAY,
    check_output,
    check_places,
    choose_checkpoint,
    continuing,
    find_start_day,
    move_old_checkpoints,
)
from openrlhf.config.commands import PPO, SFT
from openrlhf.config.parse import parse
from openrlhf.config.ppo import (
    ActorConfig,
    AdvantageConfig,
    AlgoConfig,
    CriticConfig,
    EvalConfig,
    PPOCkptConfig,
    PPOConfig,
    TrainConfig,
)
from openrlhf.config.sections import (
    CkptConfig,
    DeepSpeedConfig,
    LoggerConfig,
    LoraConfig,
    ScorerDeepSpeedConfig,
)
from openrlhf.config.supervised import SFTConfig, SFTDataConfig, SFTModelConfig
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.text import Calendar


def test_a_finished_model_is_written_over_by_its_own_run_or_when_asked(tmp_path: Path) -> None:
    config = SFTConfig(ckpt=CkptConfig(output_dir=str(tmp_path), load_enable=True))
    check_output(config, resumes=False)  # there is no model yet
    (tmp_path / "config.json").touch()
    check_output(config, resumes=True)
    where = {"flag": "--ckpt.output_dir", "value": tmp_path}
    with refused(ErrorCode.NOT_WRITABLE, **where) as refusal:  # a resume that found no checkpoint
        check_output(config, resumes=False)
    assert "--ckpt.overwrite" in refusal.value.text
    check_output(SFTConfig(ckpt=CkptConfig(output_dir=str(tmp_path), overwrite=True)), resumes=False)


def test_the_chosen_checkpoint_belongs_to_the_finished_model(tmp_path: Path, capsys) -> None:
    (tmp_path / "config.json").touch()
    config = SFTConfig(ckpt=CkptConfig(output_dir=str(tmp_path), load_enable=True))
    of: Any = lambda tag: SimpleNamespace(choose=lambda found: (tag, ["a line"]), path="ckpt")
    found: Any = SimpleNamespace(skipped=["global_step3: damaged"])
    assert choose_checkpoint(config, of("global_step2"), found) == "global_step2"
    printed = capsys.readouterr()
    assert printed.out == "a line\n"
    assert printed.err == "--ckpt.load_enable: in ckpt: global_step3: damaged\n"
    with refused(ErrorCode.NOT_WRITABLE, flag="--ckpt.output_dir", value=tmp_path):
        choose_checkpoint(config, of(None), None)


@pytest.mark.parametrize("saved", [True, False])
def test_a_critic_is_looked_for_where_one_will_be_written(tmp_path: Path, saved: bool) -> None:
    (tmp_path / "policy_critic").mkdir()
    (tmp_path / "policy_critic" / "adapter_config.json").touch()
    config = PPOConfig(
        ckpt=PPOCkptConfig(output_dir=f"{tmp_path}/policy"),
        critic=CriticConfig(save_value_network=saved),
        algo=AlgoConfig(advantage=AdvantageConfig(estimator="gae")),
    )
    where = {"flag": "--critic.save_value_network", "value": f"{tmp_path}/policy_critic"}
    with refused(ErrorCode.NOT_WRITABLE, **where) if saved else nullcontext():
        check_output(config, resumes=False)


def test_a_model_that_a_run_reads_is_never_written_over(tmp_path, monkeypatch):
    """The name of the folder does not matter: an adapter would remove the weights that it needs."""
    (tmp_path / "base").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "base" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    model = SFTModelConfig(model_name_or_path="base")
    config = SFTConfig(model=model, ckpt=CkptConfig(output_dir=f"{tmp_path}/other/../base/", overwrite=True))
    for resumes in (True, False):
        where = {"flag": "--ckpt.output_dir", "value": config.ckpt.output_dir}
        with refused(ErrorCode.CONFLICT, **where, told="--model.model_name_or_path"):
            check_output(config, resumes=resumes)
    check_output(SFTConfig(model=model, ckpt=CkptConfig(output_dir="new")), resumes=False)


def test_a_place_that_refuses_files_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = SFTConfig(ckpt=CkptConfig(output_dir=f"{tmp_path}/file/model"))
    with pytest.raises(UsageError) as refusal:
        check_places(config)
    assert refusal.value.code is ErrorCode.NOT_WRITABLE
    assert (refusal.value.flag, refusal.value.value) == ("--ckpt.output_dir", f"{tmp_path}/file/model")
    check_places(SFTConfig(ckpt=CkptConfig(output_dir=f"{tmp_path}/a/b")))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_is_told_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match=os.strerror(errno.ENOSPC)) as refusal:
        check_places(SFTConfig(ckpt=CkptConfig(output_dir=str(tmp_path))))
    assert refusal.value.code is ErrorCode.NOT_WRITABLE


@pytest.mark.parametrize(
    ("flags", "is_used"),
    [({}, False), ({"save_steps": 0}, False), ({"save_steps": 1}, True), ({"load_enable": True}, True)],
)
def test_a_folder_of_checkpoints_is_used_by_runs_that_read_or_write_them(flags: dict, is_used: bool) -> None:
    assert CkptConfig(**flags).is_used == is_used


MILLION = 1_000_000


def sft(ds: dict | None = None, **ckpt: object) -> Callable[[str], SFTConfig]:
    ds = {"param_dtype": "fp32"} | (ds or {})
    return lambda folder: SFTConfig(
        ckpt=CkptConfig(**{"output_dir": folder, "save_steps": 2} | ckpt), ds=DeepSpeedConfig(**ds)
    )


def ppo(**sections: object) -> Callable[[str], PPOConfig]:
    return lambda folder: PPOConfig(
        ckpt=PPOCkptConfig(output_dir=folder, save_steps=2),
        ds=ScorerDeepSpeedConfig(param_dtype="fp32"),
        algo=AlgoConfig(advantage=AdvantageConfig(estimator="gae")),
        **sections,
    )


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        # A million parameters have 16 bytes each in float32 at ZeRO stage 2. Three saves, and the model.
        (sft(), 3 * 16 + 4),
        (sft(save_steps=-1), 4),
        (sft(max_num=1), 2 * 16 + 4),
        (sft(save_hf=True), 3 * (16 + 4) + 4),
        (sft(save_hf=True, disable_ds=True), 3 * 4 + 4),
        (sft({"lora": LoraConfig(rank=8)}), 3 * 1.6 + 0.4),
        (ppo(), 3 * (16 + 16) + 4),
        (
            ppo(
                critic=CriticConfig(save_value_network=True),
                train=TrainConfig(enable_ema=True),
                eval=EvalConfig(steps=2),
            ),
            (3 + 1) * (16 + 16 + 4) + 4 + 4,
        ),
    ],
)
def test_a_run_that_does_not_fit_the_disk_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable, expected: float
) -> None:
    trained = lambda ds: MILLION // 10 if ds.lora.rank else MILLION
    size = SimpleNamespace(parameters=MILLION, trained=trained, scorer=lambda: size)
    monkeypatch.setattr("openrlhf.models.sizes.model_size", lambda path, flag, **options: size)
    disk = SimpleNamespace(free=expected * MILLION)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    config = make(f"{tmp_path}/new")
    folder = CheckpointFolder(config.ckpt.folder, config.ckpt)
    check_space(config, folder, total_steps=7)
    disk.free -= 1
    flag = "--ckpt.path" if config.ckpt.save_steps > 0 else "--ckpt.output_dir"
    with refused(ErrorCode.NOT_WRITABLE, flag=flag):
        check_space(config, folder, total_steps=7)


def test_a_model_whose_size_is_unknown_names_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    size = SimpleNamespace(parameters=MILLION, trained=lambda ds: MILLION, scorer=lambda: size)
    monkeypatch.setattr(
        "openrlhf.models.sizes.model_size", lambda path, flag, **options: asked.append((flag, path)) or size
    )
    config = ppo(actor=ActorConfig(model_name_or_path="a"), critic=CriticConfig(model_name_or_path="c"))("")
    assert list(of_models._sizes(config)) == ["policy", "critic"]
    assert asked == [("--actor.model_name_or_path", "a"), ("--critic.model_name_or_path", "c")]


def test_what_adapters_and_scalar_heads_write(tmp_path: Path) -> None:
    """At a matrix of (out, in), adapters of rank 2 have matrices of (2, in) and (out, 2). A critic has a
    head of 16 weights instead of one over 60 tokens."""
    config = Qwen3Config(
        vocab_size=60, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    attention = (16 + 16) + 2 * (8 + 16) + (16 + 16)
    lora = LoraConfig(rank=2)
    sizes = _sizes_of(tmp_path, lora=lora)
    adapters = 2 * (attention + 3 * (16 + 24))
    assert sizes["policy"] == (14 * adapters, 2 * adapters)
    assert sizes["critic"] == (14 * (adapters + 16), 2 * (adapters + 16))
    few = _sizes_of(tmp_path, lora=replace(lora, target_modules=("q_proj",)))
    assert few["policy"] == (14 * 2 * (16 + 16), 2 * 2 * (16 + 16))
    whole = _sizes_of(tmp_path)
    assert whole["policy"].export - whole["critic"].export == 2 * (60 - 1) * 16


def _sizes_of(folder: Path, **ds: object) -> dict[str, of_models._Sizes]:
    """Returns the sizes of a run in bf16, whose policy and critic are the model in `folder`."""
    model = {"model_name_or_path": str(folder)}
    config = ppo(actor=ActorConfig(**model), critic=CriticConfig(**model))("")
    return of_models._sizes(replace(config, ds=ScorerDeepSpeedConfig(param_dtype="bf16", **ds)))


def test_the_folder_of_tensorboard_is_tried_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    logger = LoggerConfig(tensorboard_dir=f"{tmp_path}/file/curves")
    with refused(ErrorCode.NOT_WRITABLE, flag="--logger.tensorboard_dir", value=logger.tensorboard_dir):
        check_places(SFTConfig(ckpt=CkptConfig(output_dir=f"{tmp_path}/new"), logger=logger))


@pytest.mark.parametrize(("save_steps", "tag", "moves"), [(1, None, 1), (-1, None, 0), (1, "a", 0)])
def test_checkpoints_of_an_earlier_run_make_room_for_new_ones(capsys, save_steps, tag, moves):
    folder: Any = SimpleNamespace(set_aside=lambda: ["moved"], ckpt=CkptConfig(save_steps=save_steps))
    move_old_checkpoints(folder, tag)
    assert capsys.readouterr().out == "moved\n" * moves


def test_the_cache_folder_is_tried_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    data = SFTDataConfig(cache_dir=f"{tmp_path}/file/cache")
    with refused(ErrorCode.NOT_WRITABLE, flag="--data.cache_dir"):
        check_places(SFTConfig(ckpt=CkptConfig(output_dir=f"{tmp_path}/new"), data=data))


@pytest.mark.parametrize(("make", "model"), [(sft(), ""), (ppo(), "_actor/")])
def test_a_resumed_run_writes_the_date_of_its_start(tmp_path, monkeypatch, make, model):
    """An older checkpoint and a damaged one record none; those set aside, and copies of users, do not
    count."""
    config = make(str(tmp_path))
    root = tmp_path / "ckpt"
    config = replace(config, ckpt=replace(config.ckpt, path=str(root), load_enable=True))
    monkeypatch.setattr(Calendar, "today", date(2100, 1, 1))
    assert find_start_day(config) == date(2100, 1, 1)
    recorded = build_run_fingerprint(config, SimpleNamespace(name="sft"), {}, {}).as_dict()
    monkeypatch.setattr(Calendar, "today", date(2100, 1, 2))
    other = recorded | {"contents": {DAY: "1999-01-01"}}
    origins = {"global_step8": "{", "global_step10": "{}", "global_step9": {"origin": recorded}}
    origins |= {"global_step11": {"origin": recorded | {"contents": {}}}}
    others = ("previous/001/global_step99", "global_step_good", "global_step9-2")
    for name, origin in {**origins, **{key: {"origin": other} for key in others}}.items():
        folder = root / model / name
        folder.mkdir(parents=True)
        (folder / "origin.json").write_text(origin if isinstance(origin, str) else json.dumps(origin))
    assert find_start_day(config) == date(2100, 1, 1)
    assert find_start_day(replace(config, ckpt=replace(config.ckpt, load_enable=False))) == date(2100, 1, 2)


@pytest.mark.parametrize(("command", "folder"), [(SFT, "ckpt"), (PPO, "ckpt/_actor")])
def test_a_resume_goes_on_in_the_run_folder_of_its_checkpoint(tmp_path, monkeypatch, command, folder):
    monkeypatch.chdir(tmp_path)
    flag = "--actor" if command is PPO else "--model"
    (tmp_path / "model").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"input": "a", "output": "b"}\n')
    model, tag = "model", Path(folder, "global_step3")
    given = f"{flag}.model_name_or_path {model} --ckpt.output_dir ckpt --ckpt.path ckpt"
    given += " --data.prompt_dataset rows.jsonl --reward.remote_url http://localhost:1" * (command is PPO)
    given += " --data.dataset rows.jsonl --data.output_key output" * (command is SFT)
    run_dir = lambda more="": continuing(parse(command, f"{given} {more}".split())).run_dir
    own = run_dir("--ckpt.load_enable")
    assert own not in (run_dir("--ckpt.load_enable"), "ckpt/runs/first")  # no checkpoint: a name of its own
    tag.mkdir(parents=True)
    origin = {"command": command.name, "flags": {"logger.wandb.run_name": "first"}, "contents": {}}
    (tag / "origin.json").write_text(json.dumps({"origin": origin, "written": ""}))
    assert run_dir("--ckpt.load_enable") == "ckpt/runs/first"
    assert run_dir() != "ckpt/runs/first"
    assert run_dir("--ckpt.load_enable --logger.wandb.run_name mine") == "ckpt/runs/mine"
    assert run_dir("--ckpt.load_enable --logger.run_dir here") == "here"
    (tag / "origin.json").write_text("{")  # damaged: told when it is loaded
    assert run_dir("--ckpt.load_enable") != "ckpt/runs/first"
