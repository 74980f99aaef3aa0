"""A fork of a run: what it copies, records and refuses."""

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from fake_supervised import trainer_of
from fake_trainer import config_of, fit
from fake_trainer import trainer_of as rl_trainer_of
from refusals import refused
from test_checkpoints import save

from openrlhf.checkpoint.folder import CheckpointFolder
from openrlhf.checkpoint.fork import find_or_fork
from openrlhf.checkpoint.run_fingerprint import RunFingerprint
from openrlhf.checkpoint.start import DAY, check_places, find_start_day
from openrlhf.config.checks import outputs
from openrlhf.config.commands import PPO, SFT
from openrlhf.config.fields import with_values
from openrlhf.config.ppo import KLConfig, PPOConfig
from openrlhf.config.supervised import SFTConfig
from openrlhf.errors import ErrorCode
from openrlhf.observability.run_folder import RunFolder

DATA = {"--data.dataset": "8 samples", "--data.prompt_dataset": "8 prompts"}


def config(path: Path, type_: type = SFTConfig, **flags) -> SFTConfig | PPOConfig:
    values = {
        "ckpt.output_dir": str(path),
        "ckpt.save_steps": 2,
        "ckpt.load_enable": "ckpt__fork_from" in flags,
    }
    return with_values(type_(), values | {key.replace("__", "."): value for key, value in flags.items()})


def checkpoints(of: SFTConfig | PPOConfig, contents: dict[str, str] = DATA) -> CheckpointFolder:
    is_rl = isinstance(of, PPOConfig)
    others = [f"{of.ckpt.folder}/_critic"] if isinstance(of, PPOConfig) and of.uses_critic else []
    origin = RunFingerprint.of((PPO if is_rl else SFT).name, of, contents)
    return CheckpointFolder(of.ckpt.folder + "/_actor" * is_rl, of.ckpt, others, origin)


def fork(of: SFTConfig | PPOConfig, own: CheckpointFolder, total_steps: int = 8) -> str | None:
    """Starts a run, and returns the checkpoint with which it begins."""
    return own.choose(find_or_fork(of, own, total_steps))[0]


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A run's checkpoint folder, with steps 2 and 4."""
    for step in (2, 4):
        save(checkpoints(config(tmp_path / "other")), f"global_step{step}", metric=0.5)
    return tmp_path / "other/checkpoints"


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_a_fork_is_a_checkpoint_of_the_new_run(tmp_path: Path, other: Path, capsys) -> None:
    before = snapshot(other)
    new = config(tmp_path / "new", ckpt__fork_from=str(other / "global_step4"), adam__lr=0.5)
    own = checkpoints(new)
    assert fork(new, own) == "global_step4"
    assert capsys.readouterr().out.splitlines() == [
        f"note: a fork of {other}/global_step4, step 4:",
        "  --adam.lr was 5e-06, is 0.5",
    ]
    record = {
        "from": f"{other}/global_step4",
        "step": 4,
        "data_from": 0,
        "changed": {"--adam.lr": {"was": "5e-06", "now": "0.5"}},
    }
    saved = json.loads((own.path / "global_step4/origin.json").read_text())
    assert saved["fork"] == record and saved["origin"]["flags"]["adam.lr"] == 0.5
    assert own.changed == record["changed"]
    assert snapshot(other) == before
    folder = RunFolder.create(tmp_path / "run", config_yaml="", argv=["test"], resume=False)
    folder.write_fork(own.fork)
    assert json.loads((folder.path / "fork.json").read_text()) == record
    again = RunFolder.create(tmp_path / "run", config_yaml="", argv=["test"], resume=False)
    again.write_fork({})
    assert not (folder.path / "fork.json").exists()


def test_a_fork_that_is_started_again_goes_on(tmp_path: Path, other: Path) -> None:
    """Also without --ckpt.fork_from, and if the checkpoint that was forked is gone."""
    place = str(other / "global_step4")
    new = config(tmp_path / "new", ckpt__fork_from=place, adam__lr=0.5)
    fork(new, own := checkpoints(new))
    fork(new, again := checkpoints(new))  # it ended before its first checkpoint
    assert again.changed == own.changed
    save(own, "global_step6")
    os.rename(other, tmp_path / "moved")
    for flags in ({"ckpt__fork_from": place}, {}):
        later = config(tmp_path / "new", ckpt__load_enable=True, adam__lr=0.5, **flags)
        check_places(later)
        resumed = checkpoints(later)
        assert fork(later, resumed) == "global_step6"
        assert resumed.fork == own.fork and resumed.changed is None


@pytest.mark.parametrize("of", ["another run", "the same run", "another fork"])
def test_a_fork_never_mixes_with_other_checkpoints(tmp_path: Path, other: Path, of: str) -> None:
    place = tmp_path / "new"
    if of == "another run":
        save(checkpoints(config(place)), "global_step7")
    if of == "the same run":
        place = other.parent
    if of == "another fork":
        fork(new := config(place, ckpt__fork_from=str(other / "global_step2")), checkpoints(new))
    new = config(place, ckpt__fork_from=str(other / "global_step4"))
    before = snapshot(place)
    with refused(ErrorCode.CONFLICT, flag="--ckpt.fork_from", value=other / "global_step4") as told:
        fork(new, checkpoints(new))
    assert "--ckpt.output_dir" in told.value.text and snapshot(place) == before


def test_a_fork_does_not_overwrite_a_model(tmp_path: Path, other: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new/config.json").write_text("{}")
    (tmp_path / "new/model.safetensors").write_bytes(b"weights")
    new = config(tmp_path / "new", ckpt__fork_from=str(other / "global_step4"))
    with refused(ErrorCode.NOT_WRITABLE, flag="--ckpt.output_dir", value=str(tmp_path / "new")):
        fork(new, checkpoints(new))


def test_any_sound_checkpoint_is_forked_the_best_one_too(tmp_path: Path, other: Path) -> None:
    save(checkpoints(config(tmp_path / "other")), "best_global_step3")
    for name, step in (("best_global_step3", 3), ("global_step2", 2)):
        new = config(tmp_path / name, ckpt__fork_from=f"{other}/{name}/")
        check_places(new)
        assert fork(new, checkpoints(new)) == f"global_step{step}"
    (other / "global_step4/weights").write_bytes(b"1" * 10_000)
    new = config(tmp_path / "new", ckpt__fork_from=f"{other}/global_step4")
    with refused(ErrorCode.DAMAGED_CHECKPOINT, flag="--ckpt.fork_from", value=other / "global_step4") as told:
        fork(new, checkpoints(new))
    assert "weights has changed" in told.value.text and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("place", "exists"), [("global_step5", False), ("", False), ("", True)], ids=["gone", "folder", "later"]
)
def test_what_is_no_checkpoint_is_refused_before_anything_starts(tmp_path, other, place, exists):
    new = config(tmp_path / "new", ckpt__fork_from=f"{other}/{place}")
    if exists:  # a start that failed has made the folder
        Path(new.ckpt.folder).mkdir(parents=True)
    with refused(ErrorCode.NOT_FOUND, flag="--ckpt.fork_from", value=f"{other}/{place}") as told:
        check_places(new)
    assert "global_step{N}" in told.value.text


def test_a_fork_needs_the_flag_with_which_it_resumes(tmp_path: Path, other: Path) -> None:
    new = config(tmp_path / "new", ckpt__fork_from=f"{other}/global_step4", ckpt__load_enable=False)
    [problem] = outputs(new.ckpt, new.logger, None)
    assert (problem.key, problem.fatal) == ("ckpt.fork_from", True)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"optim": "muon"}, "--optim was adam, is muon"),
        ({"ds.lora.rank": 4}, "--ds.lora.rank was 0, is 4"),
        ({"train.backend": "torch"}, "--train.backend was deepspeed, is torch"),
    ],
)
def test_settings_that_shape_tensors_are_refused_by_name(tmp_path, other, flags, named):
    new = with_values(config(tmp_path / "new", ckpt__fork_from=str(other / "global_step4")), flags)
    with refused(ErrorCode.OTHER_RUN, flag="--ckpt.fork_from", value=other / "global_step4") as told:
        fork(new, checkpoints(new))
    assert named in told.value.text and not (tmp_path / "new").exists()


def test_a_checkpoint_of_another_user_is_not_copied(tmp_path: Path, other: Path, monkeypatch) -> None:
    """Its copy would belong to this user, and be read."""
    owner = os.stat(other).st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    monkeypatch.setattr("openrlhf.files.os.stat", foreign(os.stat, owner + 1000))
    new = config(tmp_path / "new", ckpt__fork_from=str(other / "global_step4"))
    with refused(ErrorCode.UNREADABLE, flag="--ckpt.fork_from", value=other / "global_step4"):
        fork(new, checkpoints(new))


def foreign(stat, owner: int):
    """Returns `os.stat` with another owner."""
    return lambda *args, **options: os.stat_result(
        (*(found := stat(*args, **options))[:4], owner, *found[5:])
    )


def test_other_models_and_commands_are_refused(tmp_path: Path, other: Path) -> None:
    place, model = other / "global_step4", "--model.model_name_or_path"
    new = config(tmp_path / "new", ckpt__fork_from=str(place))
    own = checkpoints(new)
    own.fingerprint = RunFingerprint.of("dpo", new, DATA)
    with refused(ErrorCode.OTHER_RUN, flag="--ckpt.fork_from", value=place) as told:
        fork(new, own)
    assert "the command was sft, is dpo" in told.value.text
    with refused(ErrorCode.INVALID_VALUE, flag="--ckpt.fork_from", value=place, told="ends after step 4"):
        fork(new, checkpoints(new), total_steps=4)
    save(checkpoints(config(tmp_path / "other"), {model: "checksum 1"}), "global_step4")
    with refused(ErrorCode.OTHER_RUN, flag="--ckpt.fork_from", value=place) as told:
        fork(new, checkpoints(new, {model: "checksum 2"}))
    assert f"{model} was checksum 1, is checksum 2" in told.value.text
    (place / "manifest.json").unlink()
    (place / "origin.json").unlink()
    with refused(ErrorCode.DAMAGED_CHECKPOINT, flag="--ckpt.fork_from", value=place) as told:
        fork(new, checkpoints(new))
    assert "an older release" in told.value.text and not (tmp_path / "new").exists()


@pytest.mark.parametrize(("before", "now"), [("gae", "gae"), ("gae", "rloo"), ("rloo", "gae")])
def test_a_fork_may_drop_a_critic_and_gains_none(tmp_path: Path, before: str, now: str) -> None:
    of = partial(config, type_=PPOConfig)
    save(checkpoints(of(tmp_path / "other", algo__advantage__estimator=before)), "global_step2")
    place = tmp_path / "other/checkpoints/_actor/global_step2"
    new = of(tmp_path / "new", algo__advantage__estimator=now, ckpt__fork_from=str(place))
    if before == "gae":
        own = checkpoints(new)
        assert fork(new, own) == "global_step2"
        assert [folder.is_dir() for folder in own.folders] == [True] * (2 if now == "gae" else 1)
        return
    with refused(ErrorCode.DAMAGED_CHECKPOINT, flag="--ckpt.fork_from", value=place) as told:
        fork(new, checkpoints(new))
    assert "_critic: manifest.json is missing" in told.value.text and "has a critic" in told.value.text


def test_a_setting_that_an_earlier_version_did_not_record_is_told(tmp_path, other, capsys):
    file = other / "global_step2/origin.json"
    saved = json.loads(file.read_text())
    del saved["origin"]["flags"]["adam.betas"], saved["manifest_format"]
    file.write_text(json.dumps(saved))
    (other / "global_step2/manifest.json").unlink()
    fork(new := config(tmp_path / "new", ckpt__fork_from=f"{other}/global_step2"), checkpoints(new))
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  written by another version, so these could not be compared: --adam.betas"
    ]


def test_templates_write_the_date_of_the_run_that_is_forked(tmp_path: Path) -> None:
    save(checkpoints(config(tmp_path / "other"), {DAY: "2020-02-20"}), "global_step2")
    new = config(tmp_path / "new", ckpt__fork_from=f"{tmp_path}/other/checkpoints/global_step2")
    assert str(find_start_day(new)) == "2020-02-20"


@pytest.mark.parametrize(("data", "first"), [("10 samples", 4), ("10 other samples", 0)])
def test_other_data_begins_at_its_first_row(tmp_path: Path, data: str, first: int) -> None:
    """Steps are counted on, and a second fork and a resume stay at their rows."""
    whole, disk = trainer_of(tmp_path / "whole", {}), {}
    whole.fit()
    trainer_of(tmp_path / "other", disk, save_steps=4, max_steps=4).fit()
    loads = {"load_enable": True, "fork_from": f"{tmp_path}/other/ckpt/global_step4"}
    new = trainer_of(tmp_path / "new", disk, save_steps=1, data=data, **loads)
    fork(new.config, new.checkpoints, total_steps=9)
    new = trainer_of(tmp_path / "new", disk, save_steps=1, load_enable=True, max_steps=6, data=data)
    assert new.checkpoints.choose()[0] and new.step == 4
    new.fit()
    later = trainer_of(tmp_path / "new", disk, save_steps=1, load_enable=True, data=data)
    later.checkpoints.choose()
    later.fit()
    assert new.engine.mini_batches + later.engine.mini_batches == whole.engine.mini_batches[first : first + 5]
    assert later.step == 9


@pytest.mark.parametrize("flag", [None, "--actor.adam.lr", "--algo.kl.init_coef", "--data.prompt_dataset"])
def test_a_fork_samples_with_its_own_settings(tmp_path: Path, flag: str | None) -> None:
    """Samples of the other run that wait for their step are sampled again, of the same prompts; with other
    prompts the first one comes first. Without a difference nothing does."""
    of = config_of(tmp_path, save_steps=1, best_metric_key="none")
    of = replace(of, rollout=replace(of.rollout, vllm_generate_batch_size=4))
    of = replace(of, algo=replace(of.algo, kl=KLConfig(init_coef=0.1, target=0.01)))
    fit(first := rl_trainer_of(tmp_path / "other", of, total_steps=1))
    saved = first.policy.saved
    saved["global_step1"]["best_metric"] = 0.75
    waiting = [group.prompt.prompt_id for group in saved["global_step1"]["collector"]["groups"]]
    assert len(waiting) == 2
    record = {"step": 1, "data_from": int(flag == "--data.prompt_dataset")}
    record["changed"] = {flag: {}} if flag else {}
    new = rl_trainer_of(
        tmp_path / "new", of, total_steps=2, resume="global_step1", saved=saved, fork=record, eval_prompts=()
    )
    assert new.best_metric is None
    assert (new.kl.coef == 0.1) is (flag == "--algo.kl.init_coef")
    fit(new)
    sampled = [call for call in new.policy.calls if call.startswith("generate")]
    beginning = [call for call in first.policy.calls if call.startswith("generate")]
    again = beginning if record["data_from"] else [f"generate {waiting}"]
    assert sampled == ([] if flag is None else again)
