"""Placement, as checks, `--print_plan` and Ray read it."""

import re
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import refusals
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from openrlhf.backends.offload import DeviceMemory, optimizer_loaded
from openrlhf.backends.vllm.engine import memory_fraction
from openrlhf.cluster import roles
from openrlhf.cluster.engine_memory import EngineMemory, ExclusiveDevices, free_fraction
from openrlhf.cluster.layout import (
    ENGINES,
    Device,
    Layout,
    RoleLayout,
    compute_layout,
    described,
    resource_problems,
)
from openrlhf.config.commands import PPO
from openrlhf.config.parse import parse
from openrlhf.config.ppo import (
    ActorConfig,
    AdvantageConfig,
    AlgoConfig,
    CriticConfig,
    KLConfig,
    PPOConfig,
    PPOTeacherConfig,
    RefConfig,
    RewardConfig,
    TrainConfig,
    VllmConfig,
)
from openrlhf.errors import ErrorCode
from openrlhf.loop.machines import plan, resolve
from openrlhf.mesh import Mesh
from openrlhf.observability.startup import StartClock

COUNTS = st.integers(1, 4)


@st.composite
def configs(draw: st.DrawFn) -> PPOConfig:
    """Draws any roles, of any size, together or apart, with engines that fit colocation where there is
    one."""
    actors, size, together = draw(COUNTS) * draw(COUNTS), draw(COUNTS), draw(st.booleans())
    if together:
        size = draw(st.sampled_from([n for n in range(1, actors + 1) if actors % n == 0]))
    stages = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    return PPOConfig(
        actor=ActorConfig(num_gpus_per_node=actors),
        critic=CriticConfig(num_gpus_per_node=draw(COUNTS)),
        ref=RefConfig(num_gpus_per_node=draw(COUNTS)),
        reward=RewardConfig(
            model_name_or_path=draw(st.sampled_from([None, "one"])), num_gpus_per_node=draw(COUNTS)
        ),
        teacher=PPOTeacherConfig(
            model_name_or_path=draw(st.sampled_from([None, "one"])), num_gpus_per_node=draw(COUNTS)
        ),
        vllm=VllmConfig(
            num_engines=None if together else draw(COUNTS),
            tensor_parallel_size=size // stages,
            pipeline_parallel_size=stages,
        ),
        algo=AlgoConfig(
            advantage=AdvantageConfig(estimator=draw(st.sampled_from(["gae", "rloo"]))),
            kl=KLConfig(init_coef=draw(st.sampled_from([0.0, 0.1]))),
        ),
        train=TrainConfig(
            colocate_all=together,
            colocate_actor_ref=draw(st.booleans()),
            colocate_critic_reward=draw(st.booleans()),
        ),
    )


CLUSTERS = st.lists(st.integers(0, 16), min_size=1, max_size=6).filter(any).map(described)


@settings(deadline=None)
@given(config=configs(), nodes=CLUSTERS)
def test_a_run_that_fits_has_a_place_for_everything_and_one_that_does_not_is_told_why(config, nodes):
    if resource_problems(config, nodes):
        with refused(ErrorCode.RESOURCES):
            compute_layout(config, nodes)
        return
    layout = compute_layout(config, nodes)
    assert layout.roles.keys() == {*config.placements, ENGINES}
    every_rank_has_a_device_of_the_cluster(layout)
    nothing_is_promised_twice(layout)
    for role, place in layout.roles.items():
        assert all(len({device.node for device in group}) == 1 for group in place.tensor_groups)
        for other in layout.companions(role):
            assert layout.roles[other].devices == place.devices
            assert layout.roles[other].first == place.first


def every_rank_has_a_device_of_the_cluster(layout: Layout) -> None:
    for place in layout.roles.values():
        assert len(place.devices) == len(set(place.devices)) == place.mesh.size
        assert all(0 <= device.gpu < layout.nodes[device.node] for device in place.devices)


def nothing_is_promised_twice(layout: Layout) -> None:
    """Checks that a GPU has the ranks of one home, whose shares are at most the whole of it."""
    homes, shares = {}, Counter()
    for role, place in layout.roles.items():
        for device in place.devices:
            assert homes.setdefault(device, layout.home(role)) == layout.home(role)
            shares[device] += layout.gpu_claim(role)
    assert all(share <= 1 + 1e-9 for share in shares.values())
    assert len(homes) == sum(layout.bundles)


@settings(deadline=None)
@given(config=configs(), nodes=CLUSTERS)
def test_each_role_has_bundles_of_its_own_that_hold_its_ranks(config: PPOConfig, nodes: list) -> None:
    if resource_problems(config, nodes):
        return
    layout = compute_layout(config, nodes)
    asked = []
    for role, place in layout.roles.items():
        if place.colocated_with is None:
            size = layout.bundles[place.first]
            assert size == (config.vllm.num_gpus if role == ENGINES else 1)
            asked += range(place.first, place.first + place.mesh.size // size)
    assert sorted(asked) == list(range(len(layout.bundles)))


def test_the_actor_has_a_node_of_its_own_where_there_is_room() -> None:
    """Engines of two GPUs come first; the references fill their node up, and the actors have the other."""
    config = PPOConfig(
        actor=ActorConfig(num_gpus_per_node=4),
        ref=RefConfig(num_gpus_per_node=2),
        vllm=VllmConfig(num_engines=1, tensor_parallel_size=2),
        algo=AlgoConfig(advantage=AdvantageConfig(estimator="rloo")),
    )
    layout = compute_layout(config, described([4, 4]))
    assert layout.roles[ENGINES].devices == (Device(0, 0), Device(0, 1))
    assert layout.roles["ref"].devices == (Device(0, 2), Device(0, 3))
    assert layout.roles["actor"] == RoleLayout(
        mesh=Mesh(data=4),
        colocated_with=None,
        offload="",
        size_flags="--ds.tensor_parallel_size",
        first=2,
        devices=tuple(Device(1, gpu) for gpu in range(4)),
    )
    assert layout.bundles == (1, 1, 1, 1, 1, 1, 2)


def test_an_engine_that_shared_gpus_would_tear_apart_is_refused() -> None:
    """6 of 8 actors are on one node, so the second of two engines of 4 would be on two."""
    config = PPOConfig(
        actor=ActorConfig(num_gpus_per_node=8),
        vllm=VllmConfig(tensor_parallel_size=4),
        train=TrainConfig(colocate_all=True),
    )
    (problem,) = resource_problems(config, described([6, 6]))
    assert (problem.flag, problem.value) == ("--vllm.tensor_parallel_size", "4")
    assert re.search(r"\b6, 2\b.*--actor\.num_gpus_per_node\b", problem.text)
    assert resource_problems(config, described([8])) == []


def test_the_stages_of_an_engine_are_on_one_node() -> None:
    """Two engines have two stages of two GPUs; a node of 6 has room for one, and one of 3 for none."""
    vllm = VllmConfig(num_engines=2, tensor_parallel_size=2, pipeline_parallel_size=2)
    config = PPOConfig(
        actor=ActorConfig(num_gpus_per_node=4),
        vllm=vllm,
        algo=AlgoConfig(advantage=AdvantageConfig(estimator="rloo"), kl=KLConfig(init_coef=0)),
    )
    layout = compute_layout(config, described([6, 6]))
    assert layout.roles[ENGINES].tensor_groups == [tuple(Device(n, gpu) for gpu in range(4)) for n in (0, 1)]
    (problem,) = resource_problems(config, described([7, 3, 2]))
    assert problem.flag == "--vllm.tensor_parallel_size x --vllm.pipeline_parallel_size"
    assert problem.value == "4" and "1 of 2 engines" in problem.text


WITHOUT_GPUS = PPOConfig(
    actor=ActorConfig(num_nodes=2, num_gpus_per_node=2),
    ref=RefConfig(num_gpus_per_node=1),
    vllm=VllmConfig(num_engines=3, tensor_parallel_size=2),
    algo=AlgoConfig(advantage=AdvantageConfig(estimator="rloo")),
)


def test_without_gpus_ranks_and_engines_are_spread_over_the_nodes_with_cores() -> None:
    """The head of a cluster may have no cores. An engine is on one node."""
    layout = compute_layout(WITHOUT_GPUS, [{"CPU": 0}, {"CPU": 4}, {"CPU": 4}])
    assert not layout.on_gpu and layout.bundles == ()
    nodes = {role: [device.node for device in place.devices] for role, place in layout.roles.items()}
    assert nodes == {"actor": [1, 1, 2, 2], "ref": [1], ENGINES: [1, 1, 1, 1, 2, 2]}
    assert all(place.offload == "" for place in layout.roles.values())


def test_of_one_machine_without_gpus_everything_is_there() -> None:
    layout = compute_layout(WITHOUT_GPUS, [{"CPU": 6}])
    assert {device.node for place in layout.roles.values() for device in place.devices} == {0}


# ---- --print_plan

RUN = "--actor.model_name_or_path a/b --data.prompt_dataset c/d --reward.remote_url http://h:1/r"


def printed(capsys: pytest.CaptureFixture, flags: str) -> tuple[int | str | None, str, str]:
    with pytest.raises(SystemExit) as stop:
        parse(PPO, f"{RUN} {flags}".split(), resolve=resolve, plan=plan)
    said = capsys.readouterr()
    return stop.value.code, said.out, said.err


def test_a_plan_for_a_cluster_that_is_described(capsys: pytest.CaptureFixture) -> None:
    code, out, err = printed(
        capsys,
        "--print_plan 2x8 --algo.advantage.estimator rloo --train.colocate_all --actor.num_nodes 2 "
        "--vllm.tensor_parallel_size 4 --vllm.enable_sleep --ds.enable_sleep --ref.offload",
    )
    assert code == 0 and "not set" not in err
    head, *rows, _ = [re.split("  +", line) for line in out.splitlines()]
    assert head == ["role", "ranks", "node", "devices", "shared with", "claim", "offloaded by"]
    assert rows[:2] == [["actor", "8", n, "0-7", "ref, engines", "0.2", "--ds.enable_sleep"] for n in "01"]
    assert rows[2:4] == [["ref", "8", n, "0-7", "actor, engines", "0.2", "--ref.offload"] for n in "01"]
    assert rows[4:] == [
        ["engines", "8", n, "0-3, 4-7", "actor, ref", "-", "--vllm.enable_sleep"] for n in "01"
    ]
    assert re.findall(r"\d+", out.splitlines()[-1]) == ["16", "16", "2"]


def test_ranks_that_nobody_counted_are_those_of_the_described_cluster(capsys: pytest.CaptureFixture) -> None:
    code, out, err = printed(capsys, "--print_plan 1x4 --train.colocate_all")
    assert code == 0 and ": --actor.num_gpus_per_node 4\n" in err
    assert re.findall(r"\d+", out.splitlines()[-1]) == ["4", "4", "1"]


def test_without_a_gpu_processes_share_the_cores(capsys: pytest.CaptureFixture) -> None:
    code, out, _ = printed(capsys, "--print_plan 1x0 --algo.advantage.estimator rloo")
    assert code == 0 and re.findall(r"\d+", out.splitlines()[-1]) == ["3"]
    code, out, _ = printed(capsys, "--print_plan 2x0 --train.colocate_all --actor.num_nodes 2")
    rows = [line.split()[:4] for line in out.splitlines()[1:-1]]
    assert code == 0 and rows == [
        [role, "1", node, "cores"] for role in ("actor", "critic", "ref", "engines") for node in "01"
    ]


def test_a_plan_that_does_not_fit_is_a_problem_like_others(capsys: pytest.CaptureFixture) -> None:
    code, out, err = printed(capsys, "--print_plan 1x2 --algo.advantage.estimator rloo --vllm.num_engines 3")
    (refusal,) = refusals.printed(err)
    assert (code, out, refusal.code) == (2, "", ErrorCode.RESOURCES) and "needs 7 GPUs" in err
    code, out, err = printed(capsys, "--print_plan 2by8 --actor.adam.lr fast")
    assert (code, out) == (2, "")
    places = {refusal.place: refusal.code for refusal in refusals.printed(err)}
    assert places == dict.fromkeys(("--print_plan 2by8", "--actor.adam.lr fast"), ErrorCode.INVALID_VALUE)


def plans() -> list[tuple[str, str]]:
    """Returns (flags, table) of each plan that the page shows."""
    page = (Path(__file__).parents[3] / "docs" / "clusters.md").read_text()
    return re.findall(r"(--print_plan \dx8.*)\n```\n\n((?: {4}.*\n)+)", page)


@pytest.mark.parametrize(("flags", "shown"), plans(), ids=[flags[13:16] for flags, _ in plans()])
def test_the_plan_of_the_page_is_what_is_printed(flags, shown, capsys):
    assert printed(capsys, flags)[:2] == (0, textwrap.dedent(shown))


# ---- engines that sleep


class Sleeper:
    """Optimizer that logs its calls to `log`."""

    def __init__(self, log: list) -> None:
        self.offload, self.reload = lambda: log.append("offload"), lambda: log.append("reload")


def calls_of(log: list) -> Callable[..., SimpleNamespace]:
    """Returns a stand-in for the calls of all engines, which logs them."""

    def call(method: str, *tags: list[str]) -> SimpleNamespace:
        log.append((method, *tags[0]) if tags else method)
        return SimpleNamespace(result=dict)

    return call


def test_a_step_wakes_what_its_phases_need() -> None:
    log: list = []
    engines = EngineMemory(calls_of(log), sleep=True)
    engines.sleep()
    for _ in range(2):
        engines.wake(["weights"])
        log.append("sync")
        engines.wake()
        log.append("generate")
        engines.sleep()
        with optimizer_loaded(Sleeper(log), True):
            log.append("update")
    step = [("wake", "weights"), "sync", ("wake", "kv_cache"), "generate", "sleep"]
    assert log == ["sleep", *[*step, "reload", "update", "offload"] * 2]


def test_a_sleeping_engine_is_not_asked_again() -> None:
    log: list = []
    engines = EngineMemory(calls_of(log), sleep=True)
    for _ in range(2):
        engines.sleep()
    assert log == ["sleep"]


def test_without_sleep_everyone_stays() -> None:
    log: list = []
    engines = EngineMemory(calls_of(log), sleep=False)
    engines.wake(["weights"])
    engines.wake()
    engines.sleep()
    with optimizer_loaded(Sleeper(log), False):
        pass
    assert log == []


@pytest.mark.parametrize(("shared", "waits"), [(True, [[], ["a"], ["b"]]), (False, [[], [], []])])
def test_models_on_the_same_gpus_wait_for_each_other(shared: bool, waits: list) -> None:
    devices, seen = ExclusiveDevices(shared=shared), []
    for name in "abc":
        devices.run(lambda after, name=name: seen.append(after) or [name])
    assert seen == waits


def test_engines_make_room_before_a_model_computes() -> None:
    devices, log = ExclusiveDevices(shared=True), []
    devices.release = lambda: log.append("rest")
    for name in "ab":
        devices.run(lambda after, name=name: log.append(name) or [name])
    assert log == ["rest", "a", "rest", "b"]


GIB = 2**30


def test_engines_take_of_what_the_models_leave() -> None:
    """The figures are those of the fullest GPU: 20 of 80 GiB, and in them 15 of weights."""
    models = {
        "policy": [DeviceMemory(30 * GIB, 40 * GIB, 80 * GIB), DeviceMemory(45 * GIB, 20 * GIB, 80 * GIB)],
        "reference": [DeviceMemory(15 * GIB, 40 * GIB, 80 * GIB)],
    }
    assert free_fraction(models, 15 * GIB) == 0.25
    assert memory_fraction(0.95, 0.25) == 0.95 * 0.25 and memory_fraction(0.2, 0.25) == 0.2
    assert memory_fraction(0.98, None) == 0.98
    with refused(ErrorCode.RESOURCES, flag="--train.colocate_all") as refusal:
        free_fraction(models, 20 * GIB)
    for figure in ("20.0 GiB of each GPU", "policy 45.0 GiB", "reference 15.0 GiB", "20.0 GiB of 80.0 GiB"):
        assert figure in refusal.value.text
    assert "--ref.offload" in refusal.value.text


class Started:
    """Group of models, or the engines, that logs to `log` when it starts and when it has started."""

    log: ClassVar[list] = []

    def __init__(self, config: PPOConfig, bundles: str, *rest: object, **more: object) -> None:
        self.name, self.workers, self.members = bundles, [], []

    def start(self, *given: object) -> SimpleNamespace:
        self.log.append((self.name, *(given if self.name == ENGINES else ())))
        return SimpleNamespace(result=lambda: self.log.append(f"{self.name} started"))

    def memory(self) -> list[DeviceMemory]:
        return [DeviceMemory(30 * GIB, 20 * GIB, 80 * GIB)]

    def weight_bytes(self) -> int:
        return 15 * GIB

    def sleep_between(self) -> None:
        self.log.append("give way")


@pytest.mark.parametrize(
    ("shares", "on_gpu", "order"),
    [
        # vLLM measures the memory that others leave free on its GPUs
        (True, True, ["actor", "ref", "actor started", "ref started", (ENGINES, 0.25), "engines started"]),
        (False, True, [(ENGINES,), "actor", "ref", "engines started", "actor started", "ref started"]),
        (True, False, [(ENGINES,), "actor", "ref", "engines started", "actor started", "ref started"]),
    ],
)
def test_engines_start_last_where_models_share_their_gpus(monkeypatch, shares, on_gpu, order):
    for group in ("EnginePool", "PolicyRanks", "FrozenRanks"):
        monkeypatch.setattr(roles, group, Started)
    monkeypatch.setattr(roles, "Board", SimpleNamespace)
    monkeypatch.setattr(roles.ray, "put", lambda texts: texts)
    monkeypatch.setattr(Started, "log", [])
    config = PPOConfig(train=TrainConfig(colocate_all=shares))
    roles.start_roles(config, {name: name for name in ("actor", "ref", ENGINES)}, on_gpu, 8, 8, None)
    told = [step if step[0] == ENGINES or "started" in step else step[0] for step in Started.log[:-1]]
    assert told == order and Started.log[-1] == "give way"


def test_a_start_that_fails_ends_the_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has failed keeps the others waiting for ever."""

    def get(refs: list[str], timeout: float) -> None:
        if "failed" in refs:
            raise RuntimeError("out of memory")

    clock = StartClock()
    monkeypatch.setattr(roles.ray, "wait", lambda refs, timeout: ([refs[0]], refs[1:]))
    monkeypatch.setattr(roles.ray, "get", get)
    starts = {
        "engines": [SimpleNamespace(refs=["engine"])],
        "models": [SimpleNamespace(refs=["failed", "waits"])],
    }
    with pytest.raises(RuntimeError, match="out of memory"):
        roles._wait_for(starts, 0.0, clock)
    assert clock.stages.keys() == {"engines"}
