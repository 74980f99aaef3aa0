"""Common prefixes of a row are found, and losses and gradients equal those of rows that are read whole."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from architectures import tiny_config, tiny_model
from common_prefixes import families, sharing_from_one_token
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from torch import Tensor

from openrlhf.data.packing import partition
from openrlhf.data.related import parts_of_related, rows_of_related
from openrlhf.errors import ErrorCode
from openrlhf.models.attention import PACKED
from openrlhf.models.backbone import get_row_layout
from openrlhf.models.experts import recorded_balance
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.models.prefixes import Branches, prefix_tree
from openrlhf.models.router_replay import Replay
from openrlhf.models.self_check import read_one_by_one, resolve_row_layout, why_not_shared
from openrlhf.rows import PackedRow, Sample

QWEN: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}


def tree(*sequences: Sequence[int]):
    ids = np.array([token for sequence in sequences for token in sequence])
    return prefix_tree(ids[:, None], [len(sequence) for sequence in sequences])


def row_of(*sequences: Sequence[int]) -> PackedRow:
    tensors = [torch.tensor(sequence) for sequence in sequences]
    return PackedRow.of([Sample(token_ids=x, action_mask=torch.arange(len(x)) > 0) for x in tensors])


# ---- by hand


def test_a_branch_of_a_branch() -> None:
    found = tree([1, 2, 3, 4, 5], [9, 9], [1, 2, 3, 4, 6, 7, 8], [1, 2, 3, 4, 6, 7, 5])
    assert found is not None
    assert found.own.tolist() == [5, 2, 3, 1]
    assert found.places.tolist() == [0, 1, 2, 3, 4, 5, 6, 11, 12, 13, 20]
    assert found.index.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 7, 8, 9, 0, 1, 2, 3, 7, 8, 10]
    branches = Branches.of(found, (5, 2, 7, 7), 0, torch.device("cpu"))
    assert branches.keys.lengths == (5, 2, 7, 7)
    assert branches.runs == [(0, 0, 7), (0, 7, 4), (7, 11, 3), (0, 14, 4), (7, 18, 2), (10, 20, 1)]


def test_equal_sequences_and_beginnings_of_others_have_no_tokens_of_their_own() -> None:
    found = tree([1, 2, 3, 4, 5, 6], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6])
    assert found is not None
    assert found.own.tolist() == [6, 0, 0]
    assert found.index.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    assert Branches.of(found, (6, 4, 6), 2, torch.device("cpu")).keys.lengths == (6, 2)


@pytest.mark.parametrize(
    "sequences",
    [
        [[1, 2, 3, 4, 5]],
        [[1, 2, 3, 4, 5], [2, 2, 3, 4, 5]],
        [[1, 2, 3, 9, 9], [1, 2, 3, 8, 8]],
        [[1, 2, 3], [1, 2, 3]],
        [[1, 2, 3, 4, *range(50)], [1, 2, 3, 4, *range(9, 59)]],
    ],
)
def test_where_little_is_in_common_the_row_is_read_whole(sequences: list) -> None:
    assert tree(*sequences) is None


def test_tokens_of_other_experts_are_other_tokens() -> None:
    cells = np.array([[1, 0], [2, 0], [3, 0], [4, 0], [5, 0], [1, 0], [2, 0], [3, 0], [4, 0], [5, 1]])
    found = prefix_tree(cells, [5, 5])
    assert found is not None and found.own.tolist() == [5, 1]


# ---- any tree


@given(families())
def test_the_tree_is_that_of_the_prefixes(sequences: list) -> None:
    """The tree has each different prefix once, as its last token in the first sequence that has it."""
    with sharing_from_one_token():
        found = tree(*sequences)
    nodes: dict[tuple, int] = {}
    expected = [nodes.setdefault(p, len(nodes)) for s in sequences for p in accumulate((x,) for x in s)]
    if len(nodes) == len(expected):
        assert found is None or found.index.tolist() == expected
        return
    assert found is not None and found.index.tolist() == expected
    assert len(found.places) == len(nodes)


def losses_and_gradients(policy: PolicyModel, row: PackedRow, *, shared: bool) -> tuple[Tensor, Tensor]:
    get_row_layout(policy.model).shares_prefixes = shared
    policy.zero_grad()
    log_probs = policy(row).log_probs
    random = torch.Generator().manual_seed(2)
    weights = 0.5 + torch.rand(len(log_probs), generator=random, dtype=torch.float64)
    (log_probs * weights).sum().backward()
    gradients = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
    return log_probs.detach(), torch.cat(gradients)


def check_equal(policy: PolicyModel, row: PackedRow, rounding: float) -> None:
    expected = losses_and_gradients(policy, row, shared=False)
    found = losses_and_gradients(policy, row, shared=True)
    for x, y in zip(found, expected, strict=True):
        assert (x - y).norm() <= rounding * y.norm() + 1e-12


@pytest.fixture
def qwen() -> PolicyModel:
    return small_qwen()


def small_qwen(**options: Any) -> PolicyModel:
    torch.manual_seed(0)
    config = hf.Qwen3Config(**QWEN, **options)
    return PolicyModel(hf.AutoModelForCausalLM.from_config(config, attn_implementation=PACKED)).eval()


PRODUCTS = 30
"""Products of matrices that a gradient passes: 7 in each of two layers and one in the head, forward and
backward."""


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, PRODUCTS * 2.0**-24), (torch.float64, 1e-6)])
def test_any_tree_gives_the_same_losses_and_gradients(qwen, dtype, rounding):
    """Each product rounds by 2^-24 of its result. If these errors are independent, a gradient differs by
    sqrt(2 * 30) 2^-24 = 5e-7, and by more if they have one direction, as in rows of few tokens. Norms,
    rotations and log-probs are float32 in every model, also in float64."""
    policy = qwen.to(dtype)

    @settings(max_examples=25, deadline=None)
    @given(families())
    def check(sequences: list) -> None:
        with sharing_from_one_token():
            if sum(map(len, sequences)) > len(sequences):  # it has actions
                check_equal(policy, row_of(*sequences), rounding)

    check()


RELATED = (
    [*range(5, 25), 7, 7],
    [*range(30, 37)],
    [*range(5, 25), 9, *range(40, 48)],
    [*range(5, 25), 9, *range(40, 45), 3],
    [*range(5, 20)],
    [*range(5, 25), 9, *range(40, 48)],
)
"""A prompt that is longer than the windows, with a branch of a branch, a beginning and equal sequences."""


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss", "qwen2_moe", "cohere2", "deepseek_v3"])
def test_windows_caps_sinks_and_experts(model_type: str) -> None:
    torch.manual_seed(0)
    model = tiny_model(tiny_config(model_type))
    model.set_attn_implementation(PACKED)
    check_equal(PolicyModel(model).eval(), row_of(*RELATED), 5e-6)


def test_the_balance_of_experts_counts_every_token_of_the_row() -> None:
    model = tiny_model(tiny_config("mixtral"))
    model.set_attn_implementation(PACKED)
    policy, row, found = PolicyModel(model).eval(), row_of(*RELATED), []
    for shared in (False, True):
        get_row_layout(model).shares_prefixes = shared
        policy.zero_grad()
        with recorded_balance(policy) as losses:
            policy(row)
        losses[0].backward()
        router = [p.grad for name, p in model.named_parameters() if "gate.weight" in name]
        found.append((losses[0].detach(), torch.cat([x.flatten() for x in router if x is not None])))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-7)


def count_tokens(policy: PolicyModel) -> list[int]:
    """Returns a list to which every pass adds its number of tokens."""
    counts: list[int] = []
    embed = policy.model.get_input_embeddings()
    embed.register_forward_hook(lambda module, args, output: counts.append(output.shape[1]))
    return counts


@pytest.mark.parametrize("same", [True, False])
def test_siblings_that_were_routed_otherwise_are_read_whole(same: bool) -> None:
    model = tiny_model(tiny_config("mixtral"))
    model.set_attn_implementation(PACKED)
    policy, reading = PolicyModel(model).eval(), get_row_layout(model)
    reading.replay, reading.shares_prefixes = Replay(model), True
    row = row_of(RELATED[0], RELATED[2])
    routing = torch.zeros(len(row.token_ids), *reading.replay.shape, dtype=torch.uint8)
    routing[..., 1] = 1
    if not same:
        routing[row.lengths[0] :, 0] = routing[row.lengths[0] :, 0].flip(-1)
    counts = count_tokens(policy)
    policy(replace(row, routing=routing))
    assert counts == [len(row.token_ids) - (20 if same else 0)]
    check_equal(policy, replace(row, routing=routing), 2e-6)


def test_a_model_with_active_dropout_reads_whole_rows() -> None:
    policy = small_qwen(attention_dropout=0.1)
    resolve_row_layout(policy, policy)
    counts, row = count_tokens(policy), row_of(RELATED[0], RELATED[2])
    policy.train()(row)
    policy.eval()(row)
    assert counts == [len(row.token_ids), len(row.token_ids) - 20]


# ---- what a model proves when it is loaded


def test_a_model_that_passes_the_check_shares(qwen: PolicyModel) -> None:
    resolve_row_layout(qwen, qwen)
    assert get_row_layout(qwen.model).shares_prefixes
    get_row_layout(qwen.model).share_prefixes = "false"
    resolve_row_layout(qwen, qwen)
    assert not get_row_layout(qwen.model).shares_prefixes


def test_a_model_that_reads_one_by_one_shares_nothing(qwen: PolicyModel) -> None:
    resolve_row_layout(qwen, qwen)
    read_one_by_one(qwen.model)
    counts = count_tokens(qwen)
    qwen(row_of([5] * 9, [5] * 9))
    assert counts == [9, 9]


def test_true_refuses_a_model_that_cannot(tmp_path) -> None:
    model = tiny_model(tiny_config("stablelm"))
    model.save_pretrained(tmp_path)
    policy = PolicyModel(load_causal_lm(str(tmp_path), flag="--model", dtype="fp32", attention="auto"))
    get_row_layout(policy.model).share_prefixes = "true"
    with refused(ErrorCode.UNSUPPORTED, flag="--ds.share_prefixes", value="true"):
        resolve_row_layout(policy, policy)


def misplaced(self: Branches, x: Tensor) -> Tensor:
    return x.index_select(2, self.places).roll(1, 2)


def without_sums(self: Branches, x: Tensor) -> Tensor:
    """Breaks the backward pass: only the last key of each token returns its gradient."""
    last = torch.zeros_like(self.places).scatter_reduce(
        0, self.places, torch.arange(len(self.places)), "amax"
    )
    is_last = last[self.places] == torch.arange(len(self.places))
    found = x.index_select(2, self.places)
    return torch.where(is_last[:, None], found, found.detach())


@pytest.mark.parametrize("repeated", [misplaced, without_sums])
def test_the_check_finds_wrong_keys_and_gradients(qwen: PolicyModel, monkeypatch, repeated: Any) -> None:
    assert not why_not_shared(lambda question: question().detach(), qwen.model)
    monkeypatch.setattr(Branches, "repeated", repeated)
    assert "differ" in why_not_shared(lambda question: question().detach(), qwen.model)


# ---- rows and ranks

PROMPTS = ([*range(20, 30)], [*range(40, 60)])


def samples_of_prompts(num_samples: int = 4) -> list[list[int]]:
    """Returns samples of the prompts in turns, the i-th with an answer of i + 1 tokens."""
    return [PROMPTS[i % 2] + [100 + i] * (i + 1) for i in range(2 * num_samples)]


def laid(sequences: list[list[int]], **options: Any) -> list[list[int]] | None:
    ids = np.concatenate([np.array(s) for s in sequences])
    return rows_of_related(ids, [len(s) for s in sequences], **options)


def test_samples_of_a_prompt_get_one_row() -> None:
    rows = laid(samples_of_prompts(), max_tokens=None, max_sequences=4)
    assert rows is not None
    assert [sorted(row) for row in rows] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_a_row_counts_a_common_prefix_once_and_its_keys_and_values_as_an_eighth() -> None:
    sequences = samples_of_prompts()
    of_second = 48  # 20 + 2 + 4 + 6 + 8, and three repetitions of 20 / 8
    rows = laid(sequences, max_tokens=of_second, max_sequences=1)
    assert rows is not None
    assert [sorted(row) for row in rows] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    rows = laid(sequences, max_tokens=of_second - 1, max_sequences=1)
    assert rows is not None and len(rows) == 3


def test_a_prefix_longer_than_the_budget_is_alone_in_its_row() -> None:
    assert laid([[*range(90), 1], [*range(90), 2]], max_tokens=50, max_sequences=1) == [[0], [1]]


@pytest.mark.parametrize(
    ("sequences", "options"),
    [
        ([[*range(9)], [*range(10, 19)]], {"max_tokens": None, "max_sequences": 2}),
        ([[*range(9)], [*range(9)]], {"max_tokens": None, "max_sequences": 1}),
    ],
)
def test_rows_stay_where_sharing_does_not_pay(sequences: list, options: dict) -> None:
    assert laid(sequences, **options) is None


def test_ranks_get_whole_prompts_if_none_then_has_more_to_read() -> None:
    sequences = [prompt + [100 + i] * 5 for i in range(4) for prompt in PROMPTS]
    ids = np.concatenate([np.array(s) for s in sequences])
    lengths = [len(s) for s in sequences]
    assert sorted(parts_of_related(ids, lengths, 2)) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    unrelated = np.arange(sum(lengths))
    assert parts_of_related(unrelated, lengths, 2) == partition(lengths, 2)


@given(families(), st.integers(1, 4), st.integers(1, 30))
def test_every_sequence_is_in_one_row_and_one_part(sequences: list, k: int, budget: int) -> None:
    ids, lengths = np.concatenate([np.array(s) for s in sequences]), [len(s) for s in sequences]
    everything = [*range(len(sequences))]
    with sharing_from_one_token():
        parts = parts_of_related(ids, lengths, k)
        rows = [
            rows_of_related(ids, lengths, max_tokens=budget, max_sequences=1),
            rows_of_related(ids, lengths, max_tokens=None, max_sequences=k),
        ]
    assert len(parts) == k
    for found in (parts, *(x for x in rows if x is not None)):
        assert sorted(i for group in found for i in group) == everything
