import os
import pickle
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from refusals import refused
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from openrlhf.checkpoint.folder import UNFINISHED, CheckpointFolder
from openrlhf.checkpoint.of_models import build_run_fingerprint
from openrlhf.checkpoint.run_fingerprint import RunFingerprint, compare
from openrlhf.config.commands import SFT
from openrlhf.config.sections import CkptConfig
from openrlhf.config.supervised import SFTConfig, TrainConfig
from openrlhf.errors import ErrorCode
from openrlhf.tasks.tiny_model import tiny_chat_model


@pytest.fixture
def write(tmp_path):
    """Returns a function that writes a checkpoint of some size, completes it, and returns the names that are
    left."""

    def write(folder: CheckpointFolder, tag: str, metric: float | None = None, **size: int) -> list[str]:
        save(folder, tag, metric, **size)
        return names(tmp_path)

    return write


def save(folder: CheckpointFolder, tag: str, metric: float | None = None, *, size: int = 10_000) -> None:
    """Saves a checkpoint of `size` bytes for each model of the run."""
    with folder.saving(tag, metric):
        for place in folder.folders:
            (place / UNFINISHED / tag).mkdir(parents=True)
            (place / UNFINISHED / tag / "weights").write_bytes(b"0" * size)


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if p.is_dir())


def folder(path: Path, **options) -> CheckpointFolder:
    return CheckpointFolder(str(path), CkptConfig(path=str(path), **options))


def test_the_oldest_goes_first(tmp_path, write):
    checkpoints = folder(tmp_path, max_num=2)
    write(checkpoints, "global_step9")
    write(checkpoints, "global_step10")
    assert write(checkpoints, "global_step11") == ["global_step10", "global_step11"]
    assert write(checkpoints, "global_step100") == ["global_step100", "global_step11"]


def test_the_worst_metric_goes_first_then_the_oldest(tmp_path, write):
    checkpoints = folder(tmp_path, max_num=3)
    write(checkpoints, "global_step1", 0.9)
    write(checkpoints, "global_step2", 0.2)
    write(checkpoints, "global_step3", 0.2)
    assert write(checkpoints, "global_step4", 0.1) == ["global_step1", "global_step3", "global_step4"]
    assert write(checkpoints, "global_step5") == ["global_step1", "global_step3", "global_step5"]
    # the new one stays whatever its metric; without a metric it is the next to go
    assert write(checkpoints, "global_step6", 0.0) == ["global_step1", "global_step3", "global_step6"]


def test_size_limit(tmp_path, write):
    checkpoints = folder(tmp_path, max_num=10, max_mem=3.8e-5)  # GB: of 10,000 bytes and a manifest
    for step in (1, 2, 3):
        write(checkpoints, f"global_step{step}")
    assert write(checkpoints, "global_step4") == ["global_step2", "global_step3", "global_step4"]
    # a single one that is too large is kept
    assert write(checkpoints, "global_step5", size=90_000) == ["global_step5"]


def test_the_old_ones_go_except_for_the_best(tmp_path, write):
    checkpoints = folder(tmp_path, max_num=10, max_age_hours=2)
    for step, metric in ((1, None), (2, 0.9), (3, 0.1), (4, None)):
        write(checkpoints, f"global_step{step}", metric)
    for step, hours in ((1, 3), (2, 3), (3, 3), (4, 1)):
        then = time.time() - hours * 3600
        os.utime(tmp_path / f"global_step{step}", (then, then))
    assert write(checkpoints, "global_step5") == ["global_step2", "global_step4", "global_step5"]
    without = folder(tmp_path, max_num=10)
    assert write(without, "global_step6") == [f"global_step{i}" for i in (2, 4, 5, 6)]


def test_old_ones_without_a_metric_go(tmp_path, write):
    checkpoints = folder(tmp_path, max_num=10, max_age_hours=2)
    write(checkpoints, "global_step1")
    os.utime(tmp_path / "global_step1", (0, 0))
    assert write(checkpoints, "global_step2") == ["global_step2"]


def test_latest_is_the_last_complete_one(tmp_path, write):
    checkpoints = folder(tmp_path)
    assert checkpoints.find().tag is None
    write(checkpoints, "global_step2")
    (tmp_path / "global_step4").mkdir()  # an earlier release was killed while it wrote this
    assert checkpoints.find().tag == "global_step2"
    write(checkpoints, "global_step4")
    assert checkpoints.find().tag == "global_step4"
    assert folder(tmp_path).find().tag == "global_step4"
    assert (tmp_path / "latest").read_text() == "global_step4"


def test_a_folder_that_does_not_exist_yet(tmp_path):
    assert folder(tmp_path / "later").find().tag is None


def test_the_best_is_kept_beside_the_others_and_is_not_resumed_from(tmp_path, write):
    checkpoints = folder(tmp_path, max_num=1)
    write(checkpoints, "global_step2")
    assert write(checkpoints, "best_global_step3", 0.5) == ["best_global_step3", "global_step2"]
    assert checkpoints.find().tag == "global_step2"
    assert write(checkpoints, "global_step4") == ["best_global_step3", "global_step4"]
    assert write(checkpoints, "best_global_step6", 0.7) == ["best_global_step6", "global_step4"]


@pytest.mark.parametrize("inside", ["", "_actor"])
def test_hugging_face_copies_go_with_their_checkpoints(tmp_path, inside):
    """Supervised trainers have both in one folder."""
    checkpoints = CheckpointFolder(str(tmp_path / inside), CkptConfig(path=str(tmp_path), max_num=2))
    for tag in ("global_step1", "best_global_step1", "global_step2", "global_step3", "best_global_step3"):
        (tmp_path / f"{tag}_hf").mkdir()
        save(checkpoints, tag)
    kept = ["best_global_step3", "global_step2", "global_step3"]
    assert [name for name in names(tmp_path / inside) if not name.endswith("_hf")] == kept
    assert sorted(p.name for p in tmp_path.glob("*_hf")) == [f"{tag}_hf" for tag in kept]


def test_copies_without_checkpoints_make_room_too(tmp_path):
    checkpoints = folder(tmp_path, max_num=2)
    for step in (8, 9, 10):
        with checkpoints.saving(f"global_step{step}"):
            (tmp_path / f"global_step{step}_hf").mkdir()
    assert names(tmp_path) == ["global_step10_hf", "global_step9_hf"]
    assert checkpoints.find().tag is None


def test_checkpoints_of_all_models_come_and_go_together(tmp_path):
    paths = [tmp_path / "_actor", tmp_path / "_critic"]
    ckpt = CkptConfig(path=str(tmp_path), max_num=1)
    checkpoints = CheckpointFolder(str(paths[0]), ckpt, [str(paths[1])])
    save(checkpoints, "global_step1")
    save(checkpoints, "best_global_step1", 0.5)
    save(checkpoints, "global_step2")
    save(checkpoints, "best_global_step2", 0.7)
    assert [names(path) for path in paths] == [["best_global_step2", "global_step2"]] * 2
    assert checkpoints.find().tag == "global_step2"


def test_the_universal_form_is_resumed_from_where_it_is_wanted_and_no_older(tmp_path):
    ckpt = CkptConfig(path=str(tmp_path), max_num=1)
    checkpoints, universal = (CheckpointFolder(str(tmp_path), ckpt, universal=on) for on in (False, True))
    assert universal.find().tag is None
    for step in (1, 2):
        save(checkpoints, f"global_step{step}")
        assert universal.find().tag == f"global_step{step}"
        if step == 1:
            (tmp_path / "global_step1_universal" / "zero").mkdir(parents=True)
            (tmp_path / "latest_universal").write_text("global_step1_universal\n")
            assert (checkpoints.find().tag, universal.find().tag) == (
                "global_step1",
                "global_step1_universal",
            )
    assert names(tmp_path) == ["global_step2"]  # the universal form is removed with its checkpoint
    (tmp_path / "latest_universal").write_text("global_step2_universal")
    assert universal.find() == (
        "global_step2",
        ["the file latest_universal names global_step2_universal, which does not exist"],
    )


def test_the_size_limit_counts_all_models(tmp_path):
    ckpt = CkptConfig(path=str(tmp_path), max_num=9, max_mem=3.8e-5)
    checkpoints = CheckpointFolder(str(tmp_path / "a"), ckpt, [str(tmp_path / "b")])
    for step in (1, 2):
        save(checkpoints, f"global_step{step}")
    assert names(tmp_path / "a") == names(tmp_path / "b") == ["global_step2"]


def run_of(path: Path, *, batch_size: int = 128, **ckpt) -> CheckpointFolder:
    """Returns the checkpoints of a run, in `path`/_actor and `path`/_critic."""
    config = CkptConfig(path=str(path), **ckpt)
    origin = RunFingerprint.of("sft", SFTConfig(train=TrainConfig(batch_size=batch_size)), {})
    return CheckpointFolder(str(path / "_actor"), config, [str(path / "_critic")], origin)


def test_a_resume_says_what_it_resumes_from(tmp_path):
    save(run_of(tmp_path, save_steps=2), "global_step2")
    tag, (line,) = run_of(tmp_path, load_enable=True).choose()
    assert tag == "global_step2"
    assert f"{tmp_path}/_actor/global_step2" in line


def test_a_resume_of_another_run_is_refused(tmp_path):
    save(run_of(tmp_path), "global_step2")
    place = tmp_path / "_actor/global_step2"
    with refused(ErrorCode.OTHER_RUN, flag="--ckpt.load_enable", value=place) as told:
        run_of(tmp_path, load_enable=True, batch_size=64).choose()
    assert re.search(r"^ *--train\.batch_size\b.*\b128\b.*\b64\b", told.value.text, re.MULTILINE)


def test_a_checkpoint_without_origin_is_resumed_with_a_warning(tmp_path):
    save(run_of(tmp_path), "global_step2")
    for name in ("origin.json", "manifest.json"):
        (tmp_path / "_actor/global_step2" / name).unlink()
    tag, (line, warning) = run_of(tmp_path, load_enable=True).choose()
    assert tag == "global_step2" and "global_step2" in line and warning


def test_nothing_to_resume(tmp_path):
    tag, (line,) = run_of(tmp_path, load_enable=True).choose()
    assert tag is None
    assert line.startswith(f"--ckpt.load_enable: {tmp_path}/_actor ")


def test_a_run_from_the_beginning_mentions_an_existing_checkpoint(tmp_path):
    assert run_of(tmp_path).choose() == (None, [])
    save(run_of(tmp_path), "global_step2")
    tag, (line,) = run_of(tmp_path, batch_size=64).choose()
    assert tag is None and "step 2, written 2" in line and "--ckpt.load_enable" in line


def test_checkpoints_of_another_run_are_set_aside_whole(tmp_path):
    """A run can still resume from the folder that is set aside, with the critic's checkpoints and the
    copies."""
    assert run_of(tmp_path).set_aside() == []
    for number in ("001", "002"):
        save(run_of(tmp_path), "global_step2")
        (tmp_path / "global_step2_hf").mkdir()
        (tmp_path / "notes.txt").touch()
        (line,) = run_of(tmp_path).set_aside()
        place = tmp_path / "previous" / number
        assert str(place) in line
        assert names(tmp_path) == ["previous"] and (tmp_path / "notes.txt").exists()
        assert names(place) == ["_actor", "_critic", "global_step2_hf"]
        assert run_of(place, load_enable=True).choose()[0] == "global_step2"


def test_the_last_message_names_the_checkpoint_and_how_to_resume(tmp_path):
    said = "nothing was saved: --ckpt.save_steps {0} saves a checkpoint every {0} steps"
    assert run_of(tmp_path).resume_hint() == said.format("N")
    checkpoints = run_of(tmp_path, save_steps=2)
    assert checkpoints.resume_hint() == said.format(2)
    save(checkpoints, "global_step2")
    assert checkpoints.resume_hint().partition(": ")[0].endswith(f" {tmp_path}/_actor/global_step2")
    assert run_of(tmp_path).resume_hint() == said.format("N")  # that checkpoint belongs to another run


def test_a_checkpoint_that_lists_more_than_tensors_is_damaged(tmp_path, write):
    """torch.distributed.checkpoint would unpickle it without limits."""
    checkpoints = folder(tmp_path)
    for step in (1, 2, 3):
        with checkpoints.saving(f"global_step{step}"):
            made = tmp_path / UNFINISHED / f"global_step{step}"
            dcp.save({"a": torch.ones(2)}, checkpoint_id=made, no_dist=True)
            if step == 3:
                contents = pickle.loads((made / ".metadata").read_bytes())
                contents.state_dict_metadata["a"] = BytesStorageMetadata()
                (made / ".metadata").write_bytes(pickle.dumps(contents))
    found = checkpoints.find()
    assert found.tag == "global_step2"
    (reason,) = found.skipped
    assert reason.startswith("global_step3: .metadata: ") and "a is no tensor" in reason


def test_what_cannot_be_removed_from_the_place_of_a_checkpoint_is_moved_aside(write, tmp_path, capsys):
    (tmp_path / "global_step2").write_text("no folder")
    assert write(folder(tmp_path), "global_step2") == ["global_step2"]
    assert (tmp_path / "global_step2.damaged").read_text() == "no folder"
    assert "global_step2 could not be removed: Not a directory." in capsys.readouterr().err


def test_a_model_whose_generation_config_alone_has_changed_is_the_same(tmp_path):
    model = tiny_chat_model(tmp_path / "model", seed=0)
    flag, config = "--model.model_name_or_path", SFTConfig()
    origin = lambda: build_run_fingerprint(config, SFT, {flag: [str(model)]}, {})
    before = origin()
    (model / "generation_config.json").write_text('{"temperature": 0.5}')
    differences, (remark,) = compare(before, origin())
    assert not differences and remark.startswith(flag)
    assert remark.endswith("only its generation_config.json has changed")
    old = replace(before, contents={flag: before.contents[flag]})  # of an earlier release
    assert len(compare(old, origin()).differences) == 1
    weights = load_file(model / "model.safetensors")
    save_file({name: weight + 1 for name, weight in weights.items()}, model / "model.safetensors")
    (difference,), remarks = compare(before, origin())
    assert difference.startswith(f"{flag} was ") and not remarks
