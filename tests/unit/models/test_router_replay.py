"""Routers that replay the experts that the sampler chose: by hand, and with the same bits where the choice is
their own."""

import asyncio
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers as hf
from architectures import ALL, tiny_config, tiny_model
from fake_engine import Engine
from records import trajectory
from refusals import refused
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from vllm import SamplingParams as VLLMParams

from openrlhf.backends.vllm.engine import _set_routing
from openrlhf.backends.vllm.on_cpu import routing as vllm_routing
from openrlhf.backends.vllm.on_cpu.routing import RoutingRecorder
from openrlhf.cluster.rank_groups import CriticRanks, FrozenRanks, PolicyRanks
from openrlhf.completions import SamplingParams
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.models.attention import PACKED
from openrlhf.models.backbone import get_backbone, get_row_layout
from openrlhf.models.dropout import enable_checkpointing
from openrlhf.models.policy import PolicyModel
from openrlhf.models.router_replay import ROUTER, Replay, check_replay
from openrlhf.models.self_check import resolve_row_layout
from openrlhf.models.sequence_parallel import SequenceParallel
from openrlhf.rollout.recorder import RecordingEngine
from openrlhf.rollout.trajectories import chosen_turns, trajectories
from openrlhf.rows import PackedRow
from openrlhf.types import Batch, Episode, Prompt, PromptGroup, Turn, not_none, own_choice

FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "glm4_moe", "qwen2_moe")
OWN = 255

# ---- routers, by hand


class Layer(nn.Module):
    """Layer of a model that has nothing but routers."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router

    def forward(self, hidden: Tensor) -> Any:
        return self.router(hidden)


def router_of(kind: Any, **more: Any) -> tuple[nn.Module, Layer]:
    """Makes a model of one layer, whose four experts have logits of 0, log 2, log 3 and log 4 where the
    hidden state is 1."""
    sizes = {"hidden_size": 1, "num_experts_per_tok": 2, "num_local_experts": 4}
    layer = Layer(kind(SimpleNamespace(**sizes, **more)))
    layer.router.weight = nn.Parameter(torch.tensor([[1.0], [2.0], [3.0], [4.0]]).log())
    model = nn.Module()
    model.layers = nn.ModuleList([layer])
    Replay(model)  # pyrefly: ignore[bad-argument-type]
    return model, layer


def routing(*tokens: list[int]) -> Tensor:
    """Returns the routing of a model of one layer."""
    return torch.tensor(tokens, dtype=torch.uint8)[:, None]


def test_the_choice_is_given_and_weights_are_the_routers() -> None:
    """The probabilities are 1/10 to 4/10. Of the experts 0 and 3 the weights are 1/5 and 4/5, and those of
    experts 2 and 3, the router's own choice, 3/7 and 4/7."""
    _, layer = router_of(MixtralTopKRouter)
    hidden = torch.ones(3, 1)
    _, weights, chosen = layer(hidden, routing=routing([0, 3], [3, 0], [OWN, OWN]))
    assert chosen.tolist() == [[0, 3], [3, 0], [3, 2]]
    torch.testing.assert_close(weights, torch.tensor([[1 / 5, 4 / 5], [4 / 5, 1 / 5], [4 / 7, 3 / 7]]))
    # d/dl of w = e^l0 / (e^l0 + e^l3): w (1 - w) for l0, the negative for l3, nothing for the others
    weights[0, 0].backward()
    expected = torch.tensor([[0.16], [0.0], [0.0], [-0.16]])
    torch.testing.assert_close(not_none(layer.router.weight.grad), expected)
    assert layer(hidden)[2].tolist() == [[3, 2]] * 3


def test_groups_and_biases_of_deepseek_only_choose() -> None:
    """The sigmoids of 0, log 2, log 3 and log 4 are 1/2, 2/3, 3/4 and 4/5. The router's own choice has
    experts of one group, and the bias moves it there; neither changes a weight."""
    options = {"routed_scaling_factor": 2.0, "n_group": 2, "topk_group": 1, "norm_topk_prob": True}
    _, layer = router_of(DeepseekV3TopkRouter, **options)
    layer.router.e_score_correction_bias.copy_(torch.tensor([1.0, 1.0, 0.0, 0.0]))
    _, weights, chosen = layer(torch.ones(2, 1), routing=routing([0, 3], [OWN, OWN]))
    assert chosen[0].tolist() == [0, 3] and sorted(chosen[1].tolist()) == [0, 1]
    torch.testing.assert_close(weights[0], 2 * torch.tensor([0.5, 0.8]) / 1.3)
    torch.testing.assert_close(weights[1].sort().values, 2 * torch.tensor([1 / 2, 2 / 3]) / (7 / 6))


def test_gpt_oss_divides_by_those_that_were_given() -> None:
    _, layer = router_of(GptOssTopKRouter)
    _, weights, chosen = layer(torch.ones(1, 1), routing=routing([1, 2]))
    assert chosen.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, torch.tensor([[2 / 5, 3 / 5]]))


# ---- models


def policy_of(model_type: str) -> PolicyModel:
    config = tiny_config(model_type)
    model = tiny_model(config)
    model.set_attn_implementation(PACKED)
    model.set_experts_implementation("eager")
    get_row_layout(model).replay = Replay(model)
    return PolicyModel(model)


LENGTHS = (9, 5, 2)


def row(seed: int = 0) -> PackedRow:
    random = torch.Generator().manual_seed(seed)
    sampled = [
        trajectory(token_ids=torch.randint(3, 61, (length,), generator=random).numpy()) for length in LENGTHS
    ]
    return PackedRow.from_batch(Batch.of(sampled))


def chosen_by(policy: PolicyModel, row: PackedRow) -> Tensor:
    """Returns (N, M, K) the choices of its own routers."""
    replay = not_none(get_row_layout(policy.model).replay)
    chosen = torch.full((len(row.token_ids), *replay.shape), OWN, dtype=torch.uint8)
    hooks = []
    layers: Any = get_backbone(policy.model).layers
    for index, layer in enumerate(layers):
        for router in (m for m in layer.modules() if ROUTER.search(type(m).__name__)):

            def keep(router: nn.Module, args: tuple, output: tuple, index: int = index) -> None:
                chosen[:, index] = next(x for x in output if not x.is_floating_point()).to(torch.uint8)

            hooks.append(router.register_forward_hook(keep))
    with torch.no_grad():
        policy(row)
    for hook in hooks:
        hook.remove()
    return chosen


def others(policy: PolicyModel, row: PackedRow) -> Tensor:
    """Returns (N, M, K) the first experts, for every token."""
    layers, top_k = not_none(get_row_layout(policy.model).replay).shape
    return torch.arange(top_k, dtype=torch.uint8).expand(len(row.token_ids), layers, top_k)


def passed(policy: PolicyModel, row: PackedRow) -> tuple[Tensor, list[Tensor | None]]:
    """Returns log-probs, and the gradients of their sum."""
    policy.zero_grad()
    log_probs = policy(row).log_probs
    log_probs.sum().backward()
    return log_probs.detach(), [p.grad for p in policy.parameters()]


def check_same(found: tuple, expected: tuple) -> None:
    assert torch.equal(found[0], expected[0])
    for one, other in zip(found[1], expected[1], strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.few(3)
def test_their_own_choice_gives_the_same_bits(model_type: str) -> None:
    policy = policy_of(model_type)
    expected = passed(policy, row())
    own = chosen_by(policy, row())
    assert (own != OWN).any()
    check_same(passed(policy, replace(row(), routing=own)), expected)
    nothing_known = torch.full_like(own, OWN)
    check_same(passed(policy, replace(row(), routing=nothing_known)), expected)
    other, _ = passed(policy, replace(row(), routing=others(policy, row())))
    assert (other - expected[0]).abs().max() > 0.01
    routers = [m for m in policy.modules() if ROUTER.search(type(m).__name__)]
    assert all(float(m.weight.grad.abs().max()) > 0 for m in routers)
    check_same(passed(policy, row()), expected)  # a row without routing is not replayed


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ALL)
def test_every_architecture_replays_or_is_refused(model_type: str) -> None:
    config = tiny_config(model_type)
    try:
        check_replay(config, "--actor.model_name_or_path", "m")
    except ValueError:
        return
    policy = policy_of(model_type) if tiny_model(config)._can_set_attn_implementation() else None
    if policy is None:
        return
    layout = get_row_layout(policy.model)
    try:
        resolve_row_layout(policy, policy)
    except UsageError as error:
        assert model_type == "longcat_flash", error  # it chooses among more experts than it has
        assert error.flag == "--algo.router_replay"
        return
    assert layout.replay is not None and layout.replay.choices
    with torch.no_grad():
        expected = policy(row()).log_probs
        other = policy(replace(row(), routing=others(policy, row()))).log_probs
    assert (other - expected).abs().max() > 1e-3


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_chooses_alike(reentrant: bool) -> None:
    policy = policy_of("qwen3_moe")
    replayed = replace(row(), routing=others(policy, row()))
    expected = passed(policy, replayed)
    enable_checkpointing(policy.model, reentrant=reentrant, dropout=False)
    policy.train()
    found = passed(policy, replayed)
    torch.testing.assert_close(found[0], expected[0])
    for one, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_sequence_at_a_time_has_its_own_part(checkpointing: bool) -> None:
    policy = policy_of("mixtral")
    random = torch.Generator().manual_seed(1)
    choices = torch.rand(16, 4, 4, generator=random).argsort(-1)[..., :2].to(torch.uint8)
    replayed = replace(row(), routing=choices)
    expected = passed(policy, replayed)
    get_row_layout(policy.model).packed = False
    policy.model.set_attn_implementation("eager")
    if checkpointing:
        enable_checkpointing(policy.model, reentrant=False, dropout=False)
        policy.train()
    found = passed(policy, replayed)
    # Sums of some hundred terms, in whatever order, err by 2^-24 each, of gradients of up to some tens.
    torch.testing.assert_close(found[0], expected[0], atol=1e-4, rtol=1e-4)
    for one, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


def test_ranks_that_share_a_row_have_their_slices(threads: Any) -> None:
    plain = policy_of("qwen3_moe").double()
    replayed = replace(row(), routing=others(plain, row()))
    with torch.no_grad():
        expected = plain(replayed).log_probs
    policies = [policy_of("qwen3_moe").double() for _ in range(3)]

    def part() -> Tensor:
        policy = policies[dist.get_rank()]
        get_row_layout(policy.model).sharing = SequenceParallel(
            group=dist.group.WORLD, mode="auto", heads_at_a_time=1
        )
        with torch.no_grad():
            return policy(replayed).log_probs

    for found in threads(3, part):  # 16 tokens, padded to 18
        torch.testing.assert_close(found, expected)


def test_a_model_without_replayable_routers_is_refused(tmp_path: Any) -> None:
    for model_type in ("qwen3", "phimoe", "jamba"):  # no experts, other routers
        with refused(ErrorCode.UNSUPPORTED, flag="--algo.router_replay"):
            check_replay(tiny_config(model_type), "--actor.model_name_or_path", "m")
    grouped = hf.DeepseekV2Config(topk_method="group_limited_greedy")
    with refused(ErrorCode.UNSUPPORTED, flag="--algo.router_replay"):
        check_replay(grouped, "--actor.model_name_or_path", "m")
    for model_type in FAMILIES:
        check_replay(tiny_config(model_type), "--actor.model_name_or_path", "m")


def test_a_model_whose_layers_are_not_told_is_refused_once_loaded(monkeypatch: Any, tmp_path: Any) -> None:
    monkeypatch.setenv("OPENRLHF_CACHE", str(tmp_path))
    policy = policy_of("qwen3_moe")
    resolve_row_layout(policy, policy)
    not_none(get_row_layout(policy.model).replay).choices[2].sizes = [7, 2]
    for kept in (tmp_path / "packing").iterdir():
        kept.unlink()
    with refused(ErrorCode.UNSUPPORTED, flag="--algo.router_replay", told="layers [2]"):
        resolve_row_layout(policy, policy)


# ---- from the engine to rows


def experts(*numbers: int) -> np.ndarray:
    """Returns a (L, 2, 1) routing that differs between tokens."""
    return np.array([[[n], [n]] for n in numbers], np.uint8)


def turn(prompt: list[int], actions: list[int], of_tokens: np.ndarray | None) -> Turn:
    return Turn(
        prompt_ids=np.array(prompt, np.int32),
        action_ids=np.array(actions, np.int32),
        log_probs=np.full(len(actions), -1, np.float32),
        weight_versions=np.array([[0, len(actions)]], np.int32),
        finish_reason="stop",
        seed=0,
        routing=of_tokens,
    )


def first_experts(of_tokens: np.ndarray | None) -> list[int]:
    return not_none(of_tokens)[:, 0, 0].tolist()


FIRST = turn([1, 2], [5, 6], experts(1, 2, 3, OWN))
SECOND = turn([1, 2, 5, 6, 8], [7, 9], experts(11, 12, 13, 14, 15, 16, OWN))
"""Turn that continues the first one, and has read its tokens too."""


def episode(*turns: Turn) -> Episode:
    return Episode(
        prompt=Prompt(prompt_id=0, text="?"), sample_index=0, turns=list(turns), seed=0, reward=1.0, score=1.0
    )


def test_a_token_stays_with_the_experts_that_first_read_it() -> None:
    (t,) = trajectories(episode(FIRST, SECOND))
    assert first_experts(t.routing) == [1, 2, 3, 14, 15, 16, OWN]
    (t,) = trajectories(episode(replace(FIRST, routing=None), SECOND))
    assert first_experts(t.routing) == [11, 12, 13, 14, 15, 16, OWN]
    (t,) = trajectories(episode(FIRST, replace(SECOND, routing=None)))
    assert first_experts(t.routing) == [1, 2, 3, OWN, OWN, OWN, OWN]
    (t,) = trajectories(episode(replace(FIRST, routing=None)))
    assert t.routing is None


def test_tokens_that_a_user_chose_keep_theirs() -> None:
    token_ids = np.array([1, 2, 5, 6, 8, 7, 9], np.int32)
    turns, read = chosen_turns(token_ids, [(2, 4), (6, 7)], [FIRST, SECOND])
    assert read
    (t,) = trajectories(episode(*turns))
    assert first_experts(t.routing) == [1, 2, 3, 14, 15, 16, OWN]
    elsewhere = np.array([4, 4, 4, 5, 6], np.int32)
    turns, read = chosen_turns(elsewhere, [(3, 5)], [FIRST])
    assert not read and turns[0].routing is None


class Routed(Engine):
    def output(self, index: int, token_ids: list[int], params: VLLMParams) -> Any:
        answer = super().output(index, token_ids, params)
        answer.routed_experts = experts(3, 4)
        return answer


GIVEN = SamplingParams(stop_token_ids=[2])


def test_the_recorder_adds_the_token_that_nobody_has_read() -> None:
    recording = RecordingEngine(Routed([5, 6]), (0,), GIVEN)
    asyncio.run(recording.generate([1], SamplingParams()))
    assert first_experts(recording.turns[0].routing) == [3, 4, OWN]
    recording = RecordingEngine(Engine([5, 6]), (0,), GIVEN)
    asyncio.run(recording.generate([1], SamplingParams()))
    assert recording.turns[0].routing is None


def test_batches_groups_and_rows_keep_it_with_its_tokens() -> None:
    known = trajectory(actions=(4, 3), routing=experts(1, 2, OWN))
    unknown = trajectory(actions=(5,), sample_index=1)
    group = PromptGroup(prompt=known.prompt, trajectories=[unknown, known])
    arrived = pickle.loads(pickle.dumps(group)).trajectories
    assert [first_experts(t.routing) for t in arrived] == [[OWN, OWN], [1, 2, OWN]]
    batch = Batch.of([known, unknown, known]).select([1, 2])
    assert first_experts(batch.routing) == [OWN, OWN, 1, 2, OWN]
    rows = not_none(PackedRow.from_batch(batch).routing)
    assert rows.shape == (5, 2, 1) and rows.dtype == torch.uint8
    assert Batch.of([unknown]).routing is None and PackedRow.from_batch(Batch.of([unknown])).routing is None


def test_only_the_policy_is_told() -> None:
    batch = Batch.of([trajectory(actions=(4, 3), routing=experts(1, 2, OWN))])
    groups: dict[Any, bool] = {PolicyRanks: True, CriticRanks: False, FrozenRanks: False}
    for group, is_told in groups.items():
        ranks = group.__new__(group)
        assert (ranks.select(batch, [0]).routing is not None) == is_told


@pytest.mark.parametrize(("num_experts", "dtype"), [(255, np.uint8), (256, np.int16), (300, np.int16)])
def test_a_number_beyond_all_experts_means_the_routers_own_choice(num_experts: int, dtype: Any) -> None:
    found = np.array([[[num_experts - 1]]], np.uint8 if num_experts <= 256 else np.uint16)
    answer = SimpleNamespace(index=0, routed_experts=found)
    output: Any = SimpleNamespace(outputs=[answer, SimpleNamespace(index=1, routed_experts=None)])
    _set_routing(output, {1: (found.tobytes(), found.dtype.name, found.shape)}, num_experts)
    for answer in output.outputs:
        assert answer.routed_experts.dtype == dtype and answer.routed_experts.item() == num_experts - 1
        assert answer.routed_experts.item() < own_choice(answer.routed_experts)


# ---- inside vLLM's worker


class Runner:
    """Runner with two blocks of four tokens for each of two requests; the experts of a step are the tokens
    that it reads."""

    max_num_tokens, vllm_config, model = 16, None, None

    def __init__(self) -> None:
        self.read = np.zeros(0, np.uint8)
        tables = np.array([[1, 0], [1, 3]])
        block_table = SimpleNamespace(block_size=4, block_table=SimpleNamespace(np=tables))
        self.kv_cache_config = SimpleNamespace(num_blocks=4, kv_cache_groups=[])
        self.query_start_loc = SimpleNamespace(np=np.zeros(3, int))
        self.input_batch = SimpleNamespace(
            block_table=[block_table], req_ids=[], num_computed_tokens_cpu=np.zeros(2, int)
        )

    def execute_model(self, step: Any) -> str:
        self.input_batch.req_ids = list(step.requests)
        counts = [len(tokens) for _, tokens in step.requests.values()]
        self.query_start_loc.np[1 : len(counts) + 1] = np.cumsum(counts)
        self.input_batch.num_computed_tokens_cpu[: len(counts)] = [s for s, _ in step.requests.values()]
        self.read = np.array([t for _, tokens in step.requests.values() for t in tokens], np.uint8)
        return "output"


def test_a_worker_says_whose_tokens_were_read(monkeypatch: Any) -> None:
    runner = Runner()
    capturer = SimpleNamespace(
        snapshot_routing_data=lambda count: torch.from_numpy(runner.read[:count])[:, None, None]
    )
    monkeypatch.setattr(vllm_routing, "RoutedExpertsCapturer", lambda *_: capturer)
    monkeypatch.setattr(vllm_routing, "bind_routed_experts_capturer", lambda *_: None)
    recorder = RoutingRecorder(runner)

    def step(**requests: tuple[int, list[int]]) -> None:
        total = sum(len(tokens) for _, tokens in requests.values())
        work = SimpleNamespace(requests=requests, total_num_scheduled_tokens=total)
        assert runner.execute_model(work) == "output"

    def taken(name: str) -> dict[int, list[int]]:
        found = recorder.take(name)
        return {
            i: np.frombuffer(data, dtype).reshape(shape)[:, 0, 0].tolist()
            for i, (data, dtype, shape) in found.items()
        }

    step(a_=(0, [1, 2, 3, 4, 5]))
    step(a_=(5, [6]), b_=(4, [15, 16]))  # its first block is one of the other request's
    step()
    step(a_=(0, [21, 22, 23, 24, 25, 26, 27]))  # it starts over
    assert taken("a_") == {0: [1, 2, 3, 4, 5, 6, 27]}
    assert taken("b_") == {0: [1, 2, 3, 4, 15, 16]}
    assert taken("a_") == taken("b_") == {}
    step(**{"0_c-1": (0, [7]), "1_c-2": (0, [8, 9])})
    assert taken("c") == {0: [7], 1: [8, 9]}
