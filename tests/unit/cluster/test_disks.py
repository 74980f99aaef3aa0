"""Files that nodes must find on their disks, for runs on nodes that share nothing, or one folder."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from openrlhf import files
from openrlhf.backends import distributed
from openrlhf.backends.distributed import machines_without
from openrlhf.cluster import disks
from openrlhf.cluster.disks import check_disks
from openrlhf.config.ppo import ActorConfig, CriticConfig, PPOConfig, PPOTeacherConfig
from openrlhf.config.sections import CkptConfig
from openrlhf.errors import ErrorCode, UsageError

PLACES = {
    "actor": ["b", "b", "c", "c"],
    "critic": ["a", "a", "d", "d"],
    "ref": ["b"],
    "teacher": ["e"],
    "engines": ["a", "f"],
}
"""Nodes of the ranks of each role. The run starts on node a."""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a folder that all nodes share; files outside of it exist on node a only."""
    monkeypatch.setattr(
        disks.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "a"), raising=False
    )
    monkeypatch.setattr(disks, "node_names", lambda: {node: f"node {node}" for node in "abcdef"})
    shared = tmp_path / "shared"
    shared.mkdir()

    def lacking(needs: list[disks.Need]) -> list[list[str]]:
        assert all(Path(need.file).exists() and "a" not in need.nodes for need in needs)
        return [[] if Path(need.file).is_relative_to(shared) else sorted(need.nodes) for need in needs]

    monkeypatch.setattr(disks, "_lacking", lacking)
    return shared


def problems(config: PPOConfig, places: dict[str, list[str]] = PLACES) -> list[str]:
    """Returns the first line of each problem."""
    try:
        check_disks(config, {role: SimpleNamespace(nodes=nodes) for role, nodes in places.items()})
    except UsageError as error:
        assert error.code == ErrorCode.NOT_FOUND
        return [line for line in str(error).splitlines() if line.startswith("--")]
    return []


def test_each_node_has_what_its_roles_read_and_write(cluster: Path, tmp_path: Path) -> None:
    for name in ("policy", "values", "teacher"):
        (tmp_path / name).mkdir()
    config = PPOConfig(
        actor=ActorConfig(model_name_or_path=f"{tmp_path}/policy"),
        critic=CriticConfig(model_name_or_path=f"{tmp_path}/values"),
        teacher=PPOTeacherConfig(model_name_or_path=f"{tmp_path}/teacher"),
        ckpt=CkptConfig(output_dir=f"{tmp_path}/out", save_steps=1),
    )
    assert problems(config) == [
        f"--actor.model_name_or_path {tmp_path}/policy: not on node b, node c, node d, node e, node f.",
        f"--critic.model_name_or_path {tmp_path}/values: not on node d.",
        f"--teacher.model_name_or_path {tmp_path}/teacher: not on node e.",
        f"--ckpt.output_dir {tmp_path}/out: not shared with node b, which writes the model.",
        f"--ckpt.path {tmp_path}/out/checkpoints: not shared with node b, node c, node d: parts of a "
        "checkpoint would be on several disks.",
    ]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []  # no marker file is left


def test_nothing_is_missing_of_a_shared_folder_and_the_hub(cluster: Path) -> None:
    config = PPOConfig(
        actor=ActorConfig(model_name_or_path="org/model"),
        ckpt=CkptConfig(output_dir=f"{cluster}/out", save_steps=1),
    )
    assert problems(config) == []


def test_without_checkpoints_only_the_first_rank_writes(cluster: Path, tmp_path: Path) -> None:
    config = PPOConfig(ckpt=CkptConfig(output_dir=f"{tmp_path}/out"))
    assert problems(config, {"actor": ["a", "b"], "engines": ["b"]}) == []
    assert len(problems(config, {"actor": ["b", "a"], "engines": ["b"]})) == 1


def test_copies_for_the_hub_have_no_parts(cluster: Path, tmp_path: Path) -> None:
    ckpt = CkptConfig(output_dir=f"{tmp_path}/out", save_steps=1, save_hf=True, disable_ds=True)
    assert problems(PPOConfig(ckpt=ckpt), {"actor": ["a", "b"], "engines": ["a"]}) == []


def test_of_one_node_nothing_is_asked(cluster: Path, tmp_path: Path) -> None:
    config = PPOConfig(ckpt=CkptConfig(output_dir=f"{tmp_path}/out", save_steps=1))
    assert problems(config, {"actor": ["a"], "engines": ["a"]}) == []
    assert not (tmp_path / "out").exists()


def test_all_ranks_know_which_machines_do_not_share_a_folder(threads, tmp_path, monkeypatch):
    """The last of three machines with a rank each has another disk."""
    monkeypatch.setattr(distributed.platform, "node", lambda: f"node-{dist.get_rank()}")
    seen = lambda mark: Path(mark).exists() and dist.get_rank() < 2
    monkeypatch.setattr(distributed, "appears", seen)
    assert threads(3, lambda: machines_without(f"{tmp_path}/ckpt")) == [["node-2"]] * 3
    assert threads(2, lambda: machines_without(f"{tmp_path}/ckpt")) == [[]] * 2
    assert [*tmp_path.iterdir()] == [tmp_path / "ckpt"] and not [*(tmp_path / "ckpt").iterdir()]


def test_what_is_new_on_a_network_file_system_may_come_late(tmp_path, monkeypatch):
    monkeypatch.setattr(files.time, "sleep", lambda seconds: (tmp_path / "late").touch())
    assert files.appears(tmp_path / "late")
    monkeypatch.setattr(files, "PATIENCE", 0)
    assert not files.appears(tmp_path / "never")
