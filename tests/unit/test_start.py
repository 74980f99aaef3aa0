"""Checks of a run before it loads a model."""

import errno
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from refusals import refused

from openrlhf.config.ppo import AdvantageConfig, AlgoConfig, CriticConfig, PPOCkptConfig, PPOConfig
from openrlhf.config.sections import CkptConfig, DeepSpeedConfig
from openrlhf.config.supervised import SFTConfig, SFTModelConfig
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.training.checkpoints import CheckpointFolder
from openrlhf.training.start import check_output, check_places, check_space


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


def test_a_model_that_a_run_reads_is_never_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of the folder does not matter: an adapter would remove the weights that it needs."""
    (tmp_path / "base").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "base" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    model = SFTModelConfig(model_name_or_path="base")
    config = SFTConfig(model=model, ckpt=CkptConfig(output_dir=f"{tmp_path}/other/../base/", overwrite=True))
    for resumes in (True, False):
        where = {"flag": "--ckpt.output_dir", "value": config.ckpt.output_dir}
        with refused(ErrorCode.CONFLICT, **where) as refusal:
            check_output(config, resumes=resumes)
        assert "--model.model_name_or_path" in refusal.value.text
    check_output(SFTConfig(model=model, ckpt=CkptConfig(output_dir="new")), resumes=False)


def test_a_place_that_refuses_files_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = SFTConfig(ckpt=CkptConfig(output_dir=f"{tmp_path}/file/model"))
    with pytest.raises(UsageError) as refusal:
        check_places(config)
    text = str(refusal.value)
    assert text.startswith(f"--ckpt.output_dir {tmp_path}/file/model: cannot be written to: Not a directory.")
    check_places(SFTConfig(ckpt=CkptConfig(output_dir=f"{tmp_path}/a/b")))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_is_told_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="No space left on device") as refusal:
        check_places(SFTConfig(ckpt=CkptConfig(output_dir=str(tmp_path))))
    assert refusal.value.code is ErrorCode.NOT_WRITABLE


@pytest.mark.parametrize(("free", "is_refused"), [(47_000_000, True), (49_000_000, False)])
def test_checkpoints_that_do_not_fit_the_disk_are_told_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, is_refused: bool
) -> None:
    """A million parameters have 16 bytes each in float32 at ZeRO stage 2, and 3 saves are made."""
    monkeypatch.setattr("openrlhf.models.loading.weight_bytes", lambda path, **options: 4_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    ckpt = CkptConfig(output_dir=f"{tmp_path}/new", save_steps=2)
    config = SFTConfig(ckpt=ckpt, ds=DeepSpeedConfig(param_dtype="fp32"))
    with pytest.raises(UsageError) if is_refused else nullcontext() as refusal:
        check_space(config, CheckpointFolder(ckpt.folder, ckpt), total_steps=7)
    if refusal:
        error = refusal.value
        assert (error.code, error.flag, error.value) == ("not-writable", "--ckpt.path", ckpt.folder)
        assert "3 checkpoints of about 0.016 GB" in error.text
