"""The watch on all processes of a run: which they are, how long each may hang, and what happens then."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from refusals import refused

from openrlhf.backends.offload import DeviceMemory
from openrlhf.cluster import roles as module
from openrlhf.cluster import watchdog as watching
from openrlhf.cluster.pending import Answer
from openrlhf.cluster.roles import Roles
from openrlhf.config.ppo import PPOConfig, RolloutConfig, TrainConfig
from openrlhf.config.sections import LoggerConfig
from openrlhf.errors import ErrorCode


def member(name: str) -> Any:
    return SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: name), name=name)


class Board:
    """Takes the place of the entries in Ray's store: no process has ever beaten."""

    cleared = 0

    def read_beat(self, actor: str) -> None:
        return None

    def read_draining(self) -> dict[str, int]:
        return {}

    def ask_for_stacks(self) -> None:
        pass

    def clear(self) -> None:
        Board.cleared += 1


@pytest.fixture
def roles(monkeypatch: pytest.MonkeyPatch) -> Roles:
    engines = [member("engine 0"), member("engine 1")]
    pool: Any = SimpleNamespace(members=engines, watched=[engines[0], None], given_up=[], closed=[])
    pool.give_up = lambda index, member, reason: pool.given_up.append((index, member.name, reason))
    pool.close = lambda: pool.closed.append(True)
    monkeypatch.setattr(module, "Board", Board)
    monkeypatch.setattr(watching, "STACKS_WAIT", 0.0)
    policy: Any = SimpleNamespace(workers=[member("rank 0"), member("rank 1")])
    return Roles(rollout=pool, policy=policy, critic=SimpleNamespace(workers=[member("critic")]))


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(ray, "kill", lambda process: found.append(process.name))
    return found


def config_of(folder: Path) -> PPOConfig:
    return PPOConfig(
        logger=LoggerConfig(run_dir=str(folder / "run")),
        rollout=RolloutConfig(engine_timeout=100),
        train=TrainConfig(rank_timeout=900),
    )


def test_a_hanging_engine_is_given_up_and_a_hanging_rank_ends_the_run(
    roles: Roles, killed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    now = [0.0]
    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: now[0]))
    watchdog = roles.watchdog(config_of(tmp_path))
    for now[0], engines in ((0.0, 0), (99.0, 0), (101.0, 1)):
        watchdog.look()
        assert (len(roles.rollout.given_up), killed) == (engines, []), now
    assert roles.rollout.given_up[0][:2] == (0, "engine 0")
    for now[0], ranks in ((899.0, 0), (901.0, 3)):
        watchdog.look()
        assert len(killed) == ranks
    assert killed == ["rank 0", "rank 1", "critic"]
    said = capsys.readouterr().err
    stacks = tmp_path / "run" / "stacks.txt"
    assert f"The run ends. Stacks of all processes: {stacks}" in said and "has not started for 901 s" in said
    assert "== engine 0\n" in stacks.read_text() and "== rank 1 of policy\n" in stacks.read_text()


def test_a_hanging_rank_is_killed_if_its_stacks_cannot_be_written(roles, killed, tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: now[0]))
    (tmp_path / "run").write_text("no folder")
    watchdog = roles.watchdog(config_of(tmp_path))
    watchdog.look()
    now[0] = 901.0
    with pytest.raises(OSError):
        watchdog.look()
    assert killed == ["rank 0"]


def test_a_process_that_hangs_while_it_loads_is_killed(roles, killed, tmp_path, monkeypatch):
    """The engines, too: no other engine can take their place yet."""
    now = [0.0]
    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: now[0]))
    watchdog = roles.watchdog(config_of(tmp_path), starting=True)
    for now[0] in (0.0, 899.0, 901.0):
        watchdog.look()
        assert len(killed) == (5 if now[0] > 900 else 0)


def test_the_end_of_a_run_ends_all_its_processes(roles: Roles, killed: list[str]) -> None:
    before = Board.cleared
    roles.end()
    assert killed == ["engine 0", "engine 1", "rank 0", "rank 1", "critic"]
    assert roles.rollout.closed == [True] and Board.cleared == before + 1
    assert [process.name for process in roles.members] == killed


def test_engines_get_what_models_leave_of_the_fullest_gpu(roles: Roles) -> None:
    """The weights of 8 GiB are split between two GPUs."""
    for group, free in ((roles.policy, [40, 20]), (roles.critic, [30])):
        group.memory = lambda free=free: [DeviceMemory(held=0, free=gb << 30, total=80 << 30) for gb in free]
    roles.policy.weight_bytes = lambda: 8 << 30
    assert roles.free_fraction(2) == 0.25
    roles.policy.weight_bytes = lambda: 60 << 30
    with refused(ErrorCode.RESOURCES, flag="--train.colocate_all") as told:
        roles.free_fraction(2)
    assert "weights take 30.0 GiB" in told.value.text and "critic 0.0 GiB" in told.value.text


def test_the_peak_of_memory_is_the_highest_of_all_processes(roles: Roles) -> None:
    for group in (roles.policy, roles.critic):
        for i, worker in enumerate(group.workers):
            worker.peak_memory = SimpleNamespace(remote=lambda i=i: Answer({"update": (i + 1) << 30}))
    called = []
    answers = SimpleNamespace(result=lambda: {0: {"generate": 5 << 30}})
    roles.rollout.engines = SimpleNamespace(call=lambda name: called.append(name) or answers)
    assert roles.peak_memory().result() == {"memory/generate_gb": 5.0, "memory/update_gb": 2.0}
    assert called == ["peak_memory"]
