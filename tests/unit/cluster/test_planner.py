"""`--placement auto`: on any cluster everything has its place; nothing is torn apart or idles without
reason."""

import math
import re
from typing import Any

import pytest
import refusals
from hypothesis import given, settings
from hypothesis import strategies as st
from test_layout import printed
from transformers import LlamaConfig

from openrlhf.cluster.layout import (
    ENGINES,
    Layout,
    Nodes,
    compute_layout,
    described,
    resource_problems,
    total,
)
from openrlhf.cluster.planner import least_tensor_parallel_size, suitable_flags
from openrlhf.config.command import Source
from openrlhf.config.fields import find_change, with_values
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.resume import Change
from openrlhf.errors import ErrorCode
from openrlhf.loop.machines import resolve

CLUSTERS = st.one_of(
    st.tuples(st.integers(1, 8), st.sampled_from([1, 2, 4, 8])).map(lambda shape: [shape[1]] * shape[0]),
    st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
)
"""GPUs of each node: up to 64, alike or not."""


@st.composite
def runs(draw: st.DrawFn) -> PPOConfig:
    """Draws any models, sampling at its own time or while models train, engines of any size."""
    samples = draw(st.sampled_from([1, 12, 64, 128, 1000]))
    return with_values(
        PPOConfig(placement="auto"),
        {
            "algo.advantage.estimator": draw(st.sampled_from(["gae", "rloo"])),
            "algo.kl.init_coef": draw(st.sampled_from([0.0, 0.1])),
            "reward.model_name_or_path": draw(st.sampled_from([None, "one"])),
            "teacher.model_name_or_path": draw(st.sampled_from([None, "one"])),
            "train.async_enable": draw(st.booleans()),
            "train.batch_size": samples,
            "rollout.batch_size": samples,
            "vllm.tensor_parallel_size": draw(st.sampled_from([1, 1, 2, 4, 3])),
            "vllm.pipeline_parallel_size": draw(st.sampled_from([1, 1, 1, 2])),
            "ds.ring_attn_size": draw(st.sampled_from([1, 1, 1, 2])),
            "ds.tensor_parallel_size": draw(st.sampled_from([1, 1, 2])),
        },
    )


def planned(config: PPOConfig, nodes: Nodes, explicit: tuple[str, ...] = ()) -> PPOConfig:
    return with_values(config, suitable_flags(config, explicit, nodes, config.vllm.tensor_parallel_size))


def actor_suits(config: PPOConfig, nodes: Nodes, count: int) -> bool:
    """Says whether the run would fit with so many GPUs of the actor, and engines on the same."""
    size, whole = config.vllm.num_gpus, with_values(config, {"train.colocate_all": True})
    whole = with_values(whole, {"actor.num_nodes": 1, "actor.num_gpus_per_node": count})
    share = config.ds.ring_attn_size * config.ds.tensor_parallel_size
    divides = count % share == 0 and config.train.batch_size % (count // share) == 0
    return divides and count % size == 0 and not resource_problems(whole, nodes)


@settings(deadline=None, max_examples=300)
@given(config=runs(), gpus=CLUSTERS)
def test_on_any_cluster_everything_has_its_place(config: PPOConfig, gpus: list[int]) -> None:
    nodes, size = described(gpus), config.vllm.num_gpus
    share = config.ds.ring_attn_size * config.ds.tensor_parallel_size
    needed = max(2 * share, share + size)
    tensor = config.ds.tensor_parallel_size
    if tensor > 1 and (len({*gpus}) > 1 or gpus[0] % math.lcm(tensor, size)):
        return  # Ray fills up nodes rank by rank, and may tear a group apart
    if max(gpus) < max(size, tensor) or (config.train.async_enable and sum(gpus) < needed):
        return  # there is nothing to choose
    if not config.train.async_enable and not any(
        actor_suits(config, nodes, n) for n in range(1, sum(gpus) + 1)
    ):
        return
    chosen = planned(config, nodes)
    layout = compute_layout(chosen, nodes)  # it fits
    assert layout.roles.keys() == {*config.placements, ENGINES}
    for role, place in layout.roles.items():
        assert len(place.devices) == place.mesh.size > 0, role
        assert all(len({device.node for device in group}) == 1 for group in place.tensor_groups), role
    models = {place.devices for role, place in layout.roles.items() if role != ENGINES}
    assert len(models) == 1, "the models share their GPUs"
    assert chosen.actor.num_gpus % share == 0
    assert config.train.batch_size % chosen.data_parallel_size == 0
    no_gpu_idles_without_a_reason(chosen, layout, nodes)


def no_gpu_idles_without_a_reason(config: PPOConfig, layout: Layout, nodes: Nodes) -> None:
    gpus, used, size = total(nodes, "GPU"), sum(layout.bundles), config.vllm.num_gpus
    if not config.train.async_enable:
        assert layout.roles[ENGINES].devices == layout.roles["actor"].devices
        assert not any(actor_suits(config, nodes, count) for count in range(used + 1, gpus + 1))
        assert config.vllm.enable_sleep and config.ds.enable_sleep
        return
    assert not config.vllm.enable_sleep and not config.ds.enable_sleep
    assert config.actor.num_gpus <= max(1, gpus // 2)
    more = with_values(config, {"vllm.num_engines": config.num_engines + 1})
    assert resource_problems(more, nodes), "another engine would have fitted"
    assert gpus - used < size or layout.roles[ENGINES].mesh.data == sum(n // size for n in layout.nodes)


@pytest.mark.parametrize(
    ("gpus", "is_async", "flags"),
    [
        # No GPU: a process for each role, which share the cores, and nothing sleeps.
        ([0], False, {"actor.num_gpus_per_node": 1, "train.colocate_all": True}),
        ([0, 0], True, {"actor.num_gpus_per_node": 1, "train.colocate_all": True}),
        ([1], False, {"actor.num_gpus_per_node": 1, "train.colocate_all": True, **(
            SLEEP := {"vllm.enable_sleep": True, "ds.enable_sleep": True})}),
        ([2], True, {"actor.num_gpus_per_node": 1, "train.colocate_all": True, "vllm.num_engines": 1}),
        ([8], False, {"train.colocate_all": True, **SLEEP}),
        ([8], True, {"actor.num_gpus_per_node": 4, "train.colocate_all": True, "vllm.num_engines": 4}),
        ([8, 8], True, {"train.colocate_all": True, "vllm.num_engines": 8}),
        ([8, 8, 8, 8], False, {"actor.num_nodes": 4, "train.colocate_all": True, **SLEEP}),
        # 12 ranks would not have the same number of 128 sequences.
        ([8, 4], False, {"train.colocate_all": True, **SLEEP}),
    ],
)  # fmt: skip
def test_the_same_command_on_other_clusters(gpus: list[int], is_async: bool, flags: dict) -> None:
    config = with_values(PPOConfig(placement="auto"), {"train.async_enable": is_async})
    assert suitable_flags(config, (), described(gpus)) == flags


@pytest.mark.parametrize(
    ("said", "flags"),
    [
        ({"actor.num_gpus_per_node": 2}, {"actor.num_nodes": 4}),
        ({"actor.num_nodes": 2}, {"actor.num_gpus_per_node": 4}),
        ({"actor.num_gpus_per_node": 2, "actor.num_nodes": 1}, {}),
        ({"vllm.tensor_parallel_size": 4, "vllm.num_engines": 1}, {"actor.num_gpus_per_node": 4}),
        ({"ds.tensor_parallel_size": 2, "train.batch_size": 64}, {}),
        ({"ds.tensor_parallel_size": 3, "train.batch_size": 64}, {"actor.num_gpus_per_node": 6}),
        ({"vllm.enable_sleep": False}, {"ds.enable_sleep": True}),
        ({"ds.enable_sleep": False}, {}),
        ({"ds.adam_offload": True}, {}),
        ({"ds.zero_stage": 0}, {}),
        ({"train.async_enable": True, "vllm.num_engines": 2}, {"actor.num_gpus_per_node": 4}),
        (
            {"train.async_enable": True, "actor.num_gpus_per_node": 2},
            {"actor.num_nodes": 2, "vllm.num_engines": 4},
        ),
        (
            {"train.async_enable": True, "actor.num_gpus_per_node": 2, "actor.num_nodes": 1},
            {"vllm.num_engines": 6},
        ),
    ],
)
def test_what_somebody_set_stays(said: dict[str, Any], flags: dict[str, Any]) -> None:
    """The cluster has 8 GPUs; the rest is chosen around the user's value."""
    config = with_values(PPOConfig(placement="auto"), said)
    chosen = suitable_flags(config, said, described([8]))
    assert not chosen.keys() & said.keys()
    assert resource_problems(with_values(config, chosen), described([8])) == []
    sizes = {key: value for key, value in chosen.items() if key != "train.colocate_all"}
    sleeps = "vllm.enable_sleep" not in said and not config.train.async_enable
    moves = not said.keys() & {"ds.enable_sleep", "ds.adam_offload", "ds.zero_stage"}
    expected = flags | ({"vllm.enable_sleep": True} if sleeps else {})
    expected |= {"ds.enable_sleep": True} if moves and not config.train.async_enable else {}
    assert chosen["train.colocate_all"] and sizes == expected


def test_engines_are_as_large_as_their_weights() -> None:
    """40 of 80 bytes are for weights."""
    assert [least_tensor_parallel_size(n, 80) for n in (1, 40, 41, 80, 81, 400)] == [1, 1, 2, 2, 4, 16]
    chosen = suitable_flags(PPOConfig(placement="auto"), (), described([8]), 4)
    assert chosen["vllm.tensor_parallel_size"] == 4
    assert compute_layout(with_values(PPOConfig(), chosen), described([8])).roles[ENGINES].mesh.data == 2


def test_placement_learns_nothing() -> None:
    """A run may resume on another cluster, so every flag of placement may change between checkpoints."""
    for gpus, is_async in [([0], False), ([1], False), ([4], True), ([8, 8], False)]:
        config = with_values(PPOConfig(placement="auto"), {"train.async_enable": is_async})
        for key in suitable_flags(config, (), described(gpus), 2):
            assert find_change(PPOConfig, key).change is Change.FREE, key
    assert find_change(PPOConfig, "placement").change is Change.FREE


# ---- on a command line


def test_what_is_chosen_is_shown_as_flags_that_choose_the_same(capsys: pytest.CaptureFixture) -> None:
    flags = "--algo.advantage.estimator rloo --rollout.n_samples_per_prompt 2 --train.async_enable"
    code, out, err = printed(capsys, f"{flags} --placement auto --print_plan 2x4")
    assert code == 0 and re.findall(r"\d+", out.splitlines()[-1]) == ["8", "8", "2"]
    (chosen,) = re.findall("note: auto-selected for this hardware or model: (.*)\n", err)
    assert "--vllm.num_engines 4" in chosen and "The run needs" not in err
    assert printed(capsys, f"{flags} {chosen} --print_plan 2x4")[1] == out


def test_gpus_without_work_are_told(capsys: pytest.CaptureFixture) -> None:
    """There are 12 GPUs, and a batch that divides among 8."""
    group = "--algo.advantage.estimator rloo --rollout.n_samples_per_prompt 2"
    flags = f"{group} --placement auto --print_plan 1x8 1x4"
    idle = "note: --placement auto: 4 of 12 GPUs stay idle\n"
    assert idle in printed(capsys, flags)[2]
    assert "stay idle" not in printed(capsys, f"{flags} --train.batch_size 96 --rollout.batch_size 96")[2]


def test_async_on_one_gpu_is_refused(capsys: pytest.CaptureFixture) -> None:
    code, _, err = printed(capsys, "--placement auto --train.async_enable --print_plan 1x1")
    (refusal,) = refusals.printed(err)
    assert (code, refusal.code, refusal.place) == (2, ErrorCode.RESOURCES, "--train.async_enable")


def test_the_size_of_an_engine_comes_from_the_model_and_the_gpu(tmp_path, monkeypatch):
    """Embedding and head 2 x 8 x 4, a layer 4 x 4 x 4 + 3 x 4 x 6, norms 3 x 4: 212 numbers of 2 bytes."""
    sizes = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1}
    LlamaConfig(**sizes, num_attention_heads=2).save_pretrained(tmp_path)
    monkeypatch.setattr("openrlhf.cluster.launch.available_nodes", lambda: [{"GPU": 8, "CPU": 2}])
    config = with_values(PPOConfig(placement="auto"), {"actor.model_name_or_path": str(tmp_path)})
    for memory, size in [(848, None), (847, 2), (424, 2), (423, 4)]:
        monkeypatch.setattr("openrlhf.loop.machines.gpu_bytes", lambda memory=memory: memory)
        assert resolve(config, {}).get("vllm.tensor_parallel_size") == size
        assert "vllm.tensor_parallel_size" not in resolve(config, {"vllm.tensor_parallel_size": Source()})


def test_nothing_is_asked_of_a_model_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openrlhf.loop.machines.gpu_bytes", lambda: None)
    monkeypatch.setattr("openrlhf.cluster.launch.available_nodes", lambda: [{"CPU": 2}])
    chosen = resolve(PPOConfig(placement="auto"), {})
    assert chosen == {"actor.num_gpus_per_node": 1, "train.colocate_all": True}
