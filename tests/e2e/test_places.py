"""Placement by Ray on three nodes that it takes to have 6 GPUs each. The GPUs have names, as with
CUDA_VISIBLE_DEVICES=GPU-8932f937-..., and do not exist."""

import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import order
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from records import trajectory
from refusals import refused

from openrlhf.cluster import engine_pool, environment, placement, rank_groups, weight_check
from openrlhf.cluster.launch import available_nodes, check_resources, start_ray
from openrlhf.cluster.layout import ENGINES, compute_layout
from openrlhf.cluster.placement import Bundles, in_order, place
from openrlhf.cluster.roles import start_roles
from openrlhf.config.ppo import (
    ActorConfig,
    AdvantageConfig,
    AlgoConfig,
    CriticConfig,
    PPOConfig,
    PPOTeacherConfig,
    RefConfig,
    RewardConfig,
    TrainConfig,
    VllmConfig,
)
from openrlhf.device import visible_index
from openrlhf.errors import ErrorCode
from openrlhf.types import Batch, Prompt

NODES, GPUS = 3, 6
NOSET = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}


def name(node: int, gpu: int) -> str:
    return f"GPU-{node}{gpu}"


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Starts a cluster before the run sets its variables, without a core that could be claimed."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # sockets have short names
    options = {"num_cpus": 0, "num_gpus": GPUS, "object_store_memory": 100_000_000}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_num_workers_soft_limit", str(GPUS))  # idle workers stay, for the next test
        cluster = None
        for node in range(NODES):
            patch.setenv("CUDA_VISIBLE_DEVICES", ",".join(name(node, gpu) for gpu in range(GPUS)))
            if cluster is None:
                cluster = Cluster(True, head_node_args=options | {"include_dashboard": False})
            else:
                cluster.add_node(**options)
        patch.delenv("CUDA_VISIBLE_DEVICES")
        patch.setenv("RAY_ADDRESS", cluster.address)
        patch.setenv("NCCL_SOCKET_IFNAME", "ib0")
        patch.setenv("HF_TOKEN", "hf_secret")
        patch.setenv("https_proxy", "http://me:secret@proxy:3128")
        start_ray()
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        yield
        ray.shutdown()
        cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def config(
    actors: int = 1,
    refs: int | None = None,
    engines: int | None = None,
    size: int = 1,
    together: bool = False,
    everybody: bool = False,
    timeout: float | None = None,
) -> PPOConfig:
    """Builds a configuration. `everybody`: with all five models that a run may have."""
    other = "m" if everybody else None
    return PPOConfig(
        actor=ActorConfig(num_gpus_per_node=actors),
        ref=RefConfig(num_gpus_per_node=refs or actors),
        critic=CriticConfig(num_gpus_per_node=actors),
        reward=RewardConfig(model_name_or_path=other, num_gpus_per_node=actors),
        teacher=PPOTeacherConfig(model_name_or_path=other, num_gpus_per_node=actors),
        vllm=VllmConfig(num_engines=engines, tensor_parallel_size=size),
        algo=AlgoConfig(advantage=AdvantageConfig(estimator="gae" if everybody else "rloo")),
        train=TrainConfig(colocate_all=together, placement_timeout=timeout),
    )


@contextmanager
def placed(config: PPOConfig) -> Iterator[dict[str, Bundles]]:
    places = place(config, check_resources(config))
    try:
        yield places
    finally:
        remove_placement_group(places["actor"].group)


def where() -> tuple[str, str, str]:
    """Returns (node, GPU, visible GPUs) of the worker that it runs in."""
    (gpu,) = ray.get_gpu_ids()
    return ray.get_runtime_context().get_node_id(), str(gpu), os.environ["CUDA_VISIBLE_DEVICES"]


class Rank:
    def where(self) -> tuple[str, str]:
        return where()[:2]


def of_ranks(bundles: Bundles, **options) -> list[tuple[str, str, str]]:
    task = ray.remote(where)
    ranks = range(bundles.mesh.size)
    return ray.get([task.options(**bundles.options(rank), **options).remote() for rank in ranks])


def of_engine(bundles: Bundles, index: int, size: int) -> list[tuple[str, str]]:
    """Returns (node, GPU) of each of the engine's workers."""
    options, variables = bundles.engine_options(index, size)
    node = options["scheduling_strategy"].node_id
    return [(node, gpu) for gpu in variables["CUDA_VISIBLE_DEVICES"].split(",")]


@pytest.mark.slow
@pytest.mark.parametrize("size", [6, 2])
def test_an_engine_has_the_gpus_of_its_neighbours_in_order(size: int) -> None:
    """Ray's sort mixes up more than 16 bundles of one size: by its bundle numbers engines would be torn
    apart."""
    with placed(config(18, size=size, together=True)) as places:
        ranks = of_ranks(places["actor"])
        engines = [of_engine(places[ENGINES], i, size) for i in range(18 // size)]
        assert len(set(ranks)) == 18 and all(gpu == seen for _, gpu, seen in ranks)
        assert [place for engine in engines for place in engine] == [(node, gpu) for node, gpu, _ in ranks]
        assert all(len({node for node, _ in engine}) == 1 for engine in engines)


def test_a_worker_that_sees_all_gpus_of_its_node_finds_its_own(monkeypatch) -> None:
    with placed(config(3, together=True)) as places:
        for _, gpu, seen in of_ranks(places["actor"], runtime_env=NOSET):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
            assert gpu == name(int(gpu[4]), visible_index(gpu)) and seen.count(",") == GPUS - 1


@pytest.mark.parametrize(
    ("actors", "refs", "engines", "size"),
    [(3, 3, 2, 6), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(6, 4, 4, 2), (9, 5, 4, 1)])],
)
def test_roles_are_where_they_were_planned(actors: int, refs: int, engines: int, size: int) -> None:
    """Every role has the node that was planned for it, up to the names of the nodes."""
    wanted = config(actors, refs, engines, size)
    layout = compute_layout(wanted, available_nodes())
    with placed(wanted) as places:
        found = {role: [(node, gpu) for node, gpu, _ in of_ranks(places[role])] for role in ("actor", "ref")}
        found[ENGINES] = [place for i in range(engines) for place in of_engine(places[ENGINES], i, size)]
        told = {role: list(places[role].nodes) for role in found}
    assert told == {role: [node for node, _ in at] for role, at in found.items()}
    held = [place for places in found.values() for place in places]
    assert len(set(held)) == len(held) == actors + refs + engines * size
    for role, at in found.items():
        planned = [device.node for device in layout.roles[role].devices]
        pairs = set(zip(planned, (node for node, _ in at), strict=True))
        assert len(pairs) == len(set(planned)) == len({node for node, _ in at}), (role, pairs)


def test_five_models_and_an_engine_fit_on_a_gpu() -> None:
    """Models start in the order of a run: reward models, engines, then the others. No core is left to be
    claimed."""
    with placed(config(together=True, everybody=True)) as places:
        rank = ray.remote(Rank)
        create = lambda role: rank.options(**places[role].options(0)).remote()
        alive = [create("reward")]
        (engine,) = of_engine(places[ENGINES], 0, 1)
        alive += [create(role) for role in ("actor", "critic", "ref", "teacher")]
        assert ray.get([member.where.remote() for member in alive], timeout=60) == [engine] * 5


@contextmanager
def held_by_others(*counts: int) -> Iterator[None]:
    """Claims some GPUs of each node. Ray gives a node that is asked for if it is free, so placement groups
    that are still being removed must be gone."""
    ids = [node["NodeID"] for node in ray.nodes()]
    deadline = time.monotonic() + 60
    while ray.available_resources().get("GPU") != GPUS * len(ids):
        assert time.monotonic() < deadline, "GPUs are still held"
        time.sleep(0.1)
    groups = [
        placement_group([{"GPU": count}], "STRICT_PACK", f"run {i}", _soft_target_node_id=node)
        for i, (node, count) in enumerate(zip(ids, counts, strict=True))
    ]
    ray.get([group.ready() for group in groups])
    assert [placement_group_table(group)["bundles_to_node_id"][0] for group in groups] == ids
    try:
        yield
    finally:
        for group in groups:
            remove_placement_group(group)


def test_a_run_that_waits_says_what_is_missing_and_who_has_it(capsys, monkeypatch) -> None:
    monkeypatch.setattr(placement, "PATIENCE", 0)
    with (
        held_by_others(6, 6, 4),
        refused(ErrorCode.RESOURCES, flag="--train.placement_timeout", value=2.5) as refusal,
    ):
        place(wanted := config(2, 2, 2, 2, timeout=2.5), check_resources(wanted))
    needs = (
        "the run needs 8 GPUs (--actor.num_nodes x --actor.num_gpus_per_node = 2, --ref.num_nodes x "
        "--ref.num_gpus_per_node = 2, --vllm.num_engines x --vllm.tensor_parallel_size = 4, for an engine 2 "
        "of one node); of the cluster's 18, 2 are free"
    )
    free, held = refusal.value.text.removeprefix(needs).split(": ")
    assert sorted(free) == sorted(" (2, 0, 0 on the nodes)")
    assert sorted(held.rstrip(".").split(", ")) == ["run 0 holds 6", "run 1 holds 6", "run 2 holds 4"]
    first, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith(f"waiting: {needs}")


def test_a_busy_cluster_that_tears_an_engine_apart_is_refused() -> None:
    """The 6 free GPUs are 4 on one node and 2 on another."""
    wanted = config(6, size=3, together=True)
    of_size = {"flag": "--vllm.tensor_parallel_size", "value": 3}
    with held_by_others(2, 4, 6), refused(ErrorCode.RESOURCES, **of_size) as refusal:
        place(wanted, check_resources(wanted))
    assert "1 of 2 copies" in refusal.value.text


def test_processes_on_other_nodes_have_the_variables_of_the_run() -> None:
    """Processes see the GPUs of their node. Variables that Ray would write to its logs are passed in another
    way."""

    def variables(private: dict) -> list[str | None]:
        before = os.environ.get("HF_TOKEN")
        environment.enter(private)
        names = ("NCCL_SOCKET_IFNAME", "HF_TOKEN", "https_proxy", "CUDA_VISIBLE_DEVICES")
        return [before, *map(os.environ.get, names)]

    for i, node in enumerate(sorted(ray.nodes(), key=lambda node: node["NodeID"])):
        at = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = ray.remote(variables).options(num_cpus=0, scheduling_strategy=at)
        before, interface, token, proxy, gpus = ray.get(task.remote(environment.private()))
        assert (before, interface, token) == (None, "ib0", "hf_secret"), i
        assert proxy == "http://me:secret@proxy:3128" and str(gpus).startswith("GPU-")


def asleep_at(time: float, log: list[order.Event]) -> set[str]:
    """Returns the parts of the engine that are asleep at this time."""
    asleep: set[str] = set()
    for event in log:
        if event.who == "Engine" and event.end <= time:
            if event.what == "sleep":
                asleep = {"weights", "kv_cache"}
            elif event.what.startswith("wake"):
                asleep -= set(event.what.split()[1:])
    return asleep


def test_processes_that_share_a_gpu_take_turns(tmp_path, monkeypatch) -> None:
    """The processes of a run with all its models on one GPU take two steps, with the real controllers of
    engines and models: they follow the table of engine_memory.py."""
    monkeypatch.setattr(order, "LOG", tmp_path / "log")
    monkeypatch.setattr(rank_groups.PolicyRanks, "worker_class", order.Policy)
    monkeypatch.setattr(rank_groups.CriticRanks, "worker_class", order.Critic)
    monkeypatch.setattr(rank_groups.FrozenRanks, "worker_class", order.Reference)
    monkeypatch.setattr(engine_pool, "EngineActor", order.Engine)
    monkeypatch.setattr(weight_check, "build_run_probe", lambda _: [])
    monkeypatch.setattr(weight_check.WeightCheck, "limit", None)  # it would load the model's configuration
    monkeypatch.setattr(weight_check, "check_stored", lambda *_: 0.0)
    ray.cloudpickle.register_pickle_by_value(order)
    wanted = config(together=True)
    wanted = replace(
        wanted,
        algo=replace(wanted.algo, advantage=AdvantageConfig(estimator="gae")),
        vllm=replace(wanted.vllm, enable_sleep=True),
        ds=replace(wanted.ds, enable_sleep=True),
    )
    batch = Batch.of([trajectory(actions=(2, 3)), trajectory(actions=(4,))])
    with placed(wanted) as places:
        roles = start_roles(wanted, places, True, 8, 8, None)
        assert roles.critic and roles.reference
        try:
            roles.rollout.sync(roles.policy, 0).result()
            for step in (1, 2):
                roles.rollout.submit([Prompt(prompt_id=i, text="") for i in range(3)], "train")
                for _ in range(3):
                    roles.rollout.next_group("train", timeout=60)
                scoring = [model.forward(batch) for model in (roles.policy, roles.critic, roles.reference)]
                assert [list(scores.result()) for scores in scoring] == [[-1.0] * 3] * 3
                learning = [model.update(batch, [[[0, 1]]], 0.0) for model in (roles.critic, roles.policy)]
                for update in learning:
                    update.result()
                roles.rollout.sync(roles.policy, step).result()
            assert roles.peak_memory().result() == {"memory/generate_gb": 0.5, "memory/logprobs_gb": 1.0}
        finally:
            roles.end()
    log = order.events()
    counts = Counter((event.who, event.what) for event in log)
    assert counts["Engine", "run_group"] == 6 and counts["Policy", "send_weights"] == 3
    assert counts["Engine", "answer"] == 3  # all before the engine sleeps again
    assert counts["Policy", "update"] == counts["Critic", "update"] == counts["Reference", "forward"] == 2
    computing = [e for e in log if e.who != "Engine" and e.what in ("forward", "update")]
    for before, after in pairwise(computing):
        assert before.end <= after.start, (before, after)
    for event in log:
        asleep = asleep_at(event.start, log)
        if event in computing:
            assert asleep == {"weights", "kv_cache"}, event
        elif event.what in ("run_group", "answer"):
            assert not asleep, event
        elif event.what == "send_weights":
            assert asleep == {"kv_cache"}, event


def test_bundles_are_taken_node_by_node() -> None:
    """Ray filled three nodes in the order c, a, b: they hold two engines of 2 and three ranks; an engine and
    three ranks; a rank."""
    sizes = [1, 1, 1, 1, 1, 1, 1, 2, 2, 2]
    nodes = dict(enumerate("abacaccacc"))
    order = in_order(sizes, nodes)
    assert sorted(order) == list(range(10)) and [sizes[i] for i in order] == sizes
    assert "".join(nodes[i] for i in order) == "cccaaabcca"
