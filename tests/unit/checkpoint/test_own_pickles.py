"""Checkpoint files may contain known types only; code of any other type is not run."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from records import trajectory
from refusals import refused

from openrlhf.checkpoint import pickles
from openrlhf.checkpoint.dcp import TorchReader
from openrlhf.errors import ErrorCode
from openrlhf.types import Image, Nuclei, Prompt, PromptGroup


class Malicious:
    def __init__(self, folder: Path) -> None:
        self.command = f"touch {folder}/owned"

    def __reduce__(self) -> tuple:
        return os.system, (self.command,)


def test_what_a_run_saves_is_loaded(tmp_path: Path) -> None:
    prompt = Prompt(
        prompt_id=3, text="é", label={"a": [1, None]}, images=(Image("a.png", b"1"),), num_tokens=2
    )
    group = PromptGroup(prompt=prompt, trajectories=[trajectory(actions=(2, 3)), trajectory(actions=(4,))])
    state = {
        "collector": {"groups": [group], "under_way": [prompt]},
        "estimator": {"mean": np.float64(0.5), "of": torch.ones(2), "seen": (1, "a", {2}), "x": np.arange(3)},
    }
    torch.save(state, tmp_path / "state.pt")
    found = pickles.load(tmp_path / "state.pt")
    assert found["collector"]["under_way"] == [prompt]
    (other,) = found["collector"]["groups"]
    for one, two in zip(group.trajectories, other.trajectories, strict=True):
        assert one.token_ids.tolist() == two.token_ids.tolist() and one.outcome is two.outcome
        assert one.rollout_log_probs.dtype == two.rollout_log_probs.dtype
    assert found["estimator"]["mean"] == 0.5 and found["estimator"]["seen"] == (1, "a", {2})
    assert found["estimator"]["x"].tolist() == [0, 1, 2]


def test_an_object_that_could_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"step": 1, "more": Malicious(tmp_path)}, tmp_path / "state.pt")
    with refused(ErrorCode.DAMAGED_CHECKPOINT, flag="--ckpt.path", value=tmp_path / "state.pt") as told:
        pickles.load(tmp_path / "state.pt")
    assert "system" in told.value.text and told.value.text.count("\n") < 3
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("make", [Malicious, lambda folder: os.path.join, lambda folder: Path.unlink])
def test_the_list_of_contents_of_torch_is_read_without_running_code(tmp_path: Path, make) -> None:
    dcp.save({"a": torch.ones(3), "b.c": torch.zeros(2, 2)}, checkpoint_id=tmp_path, no_dist=True)
    found = {"a": torch.zeros(3), "b.c": torch.ones(2, 2)}
    dcp.load(found, storage_reader=TorchReader(tmp_path), no_dist=True)
    assert found["a"].tolist() == [1.0] * 3 and found["b.c"].sum() == 0
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"x": make(tmp_path)}))
    with refused(ErrorCode.DAMAGED_CHECKPOINT, flag="--ckpt.path", value=tmp_path / ".metadata"):
        TorchReader(tmp_path).read_metadata()
    assert not (tmp_path / "owned").exists()


def test_nuclei_are_read_by_the_name_that_they_had(tmp_path: Path) -> None:
    Nuclei.__qualname__ = "KeptSets"
    try:
        torch.save(Nuclei.for_all_tokens(3), tmp_path / "state.pt")
    finally:
        Nuclei.__qualname__ = "Nuclei"
    loaded = pickles.load(tmp_path / "state.pt")
    assert type(loaded) is Nuclei and loaded.counts.tolist() == [0, 0, 0]
