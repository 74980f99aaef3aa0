"""Ranks that share rows compute what one rank computes of whole rows.

The ranks are threads; their gradients are averaged as DeepSpeed does. Everything is float64, except norms,
heads of judges and scores of attention that are computed one by one, which are float32 in every model.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from architectures import tiny_config
from refusals import refused
from test_policy import CAPPED, SHAPE
from torch import Tensor

from openrlhf.algorithms.distillation import LinearHead
from openrlhf.backends.base import Objective
from openrlhf.config.choices import SequenceParallelMode
from openrlhf.errors import ErrorCode
from openrlhf.models.attention import PACKED
from openrlhf.models.backbone import RowModel, get_row_layout, hidden_states
from openrlhf.models.checkpoint_layout import CLASSIFIER_HEAD
from openrlhf.models.dropout import enable_checkpointing
from openrlhf.models.policy import PolicyModel
from openrlhf.models.process_reward import ProcessRewardModel
from openrlhf.models.scorer import ScoreModel, ValueModel
from openrlhf.models.self_check import resolve_row_layout
from openrlhf.models.sequence_parallel import Cut, SequenceParallel, cut
from openrlhf.models.student import StudentModel, TeacherModel, linear_head
from openrlhf.rows import (
    ExperienceRow,
    LossNorm,
    PackedRow,
    Pair,
    PairRow,
    Sample,
    Steps,
    StepsRow,
    UnpairedExample,
    UnpairedRow,
)
from openrlhf.training.objectives.balanced import BalancedObjective
from openrlhf.training.objectives.critic import CriticObjective
from openrlhf.training.objectives.dpo import DPOObjective
from openrlhf.training.objectives.kd import DistillationObjective
from openrlhf.training.objectives.kto import KTOObjective
from openrlhf.training.objectives.policy import PolicyObjective
from openrlhf.training.objectives.prm import ProcessObjective
from openrlhf.training.objectives.rm import RewardObjective
from openrlhf.training.objectives.sft import SFTObjective

LENGTHS = (5, 23, 2, 11)
"""Lengths of the sequences, 41 tokens: a slice of 2 ranks ends in the second sequence, of 4 in the second and
the last, and is padded."""
NORM = LossNorm(40.0, 8.0)


# ---- by hand


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 4, Cut((4,), (4,), slice(0, 4))),
        (4, 8, Cut((1, 1, 2), (5, 1, 2), slice(0, 8))),
        (8, 12, Cut((4,), (6,), slice(6, 12))),
        (12, 16, Cut((1, 2, 1), (7, 2, 1), slice(6, 16))),
        (0, 16, Cut((5, 1, 7, 2, 1), (5, 1, 7, 2, 1), slice(0, 16))),
    ],
)
def test_what_of_a_row_is_in_a_slice(start: int, end: int, expected: Cut) -> None:
    """The sequences are at 0-5, 5-6, 6-13, 13-15 and 15-16."""
    assert cut((5, 1, 7, 2, 1), start, end) == expected


def sharing(mode: SequenceParallelMode = "auto", heads_at_a_time: int = 1) -> SequenceParallel:
    group = dist.group.WORLD
    assert group is not None
    return SequenceParallel(group=group, mode=mode, heads_at_a_time=heads_at_a_time)


def row_of(*lengths: int) -> PackedRow:
    return PackedRow.of(
        [Sample(token_ids=torch.arange(3, n + 3), action_mask=torch.arange(n) >= 1) for n in lengths]
    )


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "filled", "slices"),
    [
        ((3, 2), 2, (3, 2, 3), [[0, 1, 1, 2], [2, 0, 1, 0]]),
        ((3, 5), 2, (3, 5), [[0, 1, 3, 4], [2, 0, 1, 2]]),
        ((2,), 4, (2, 6), [[0, 5], [1, 4], [0, 3], [1, 2]]),
        ((1,), 3, (1, 5), [[0, 4], [0, 3], [1, 2]]),
    ],
)
def test_slices_are_equal_and_what_fills_them_up_is_a_sequence(threads, lengths, num_ranks, filled, slices):
    def positions() -> tuple[tuple[int, ...], list[int], int]:
        row = sharing().padded(row_of(*lengths))
        return row.lengths, sharing().own(row.position_ids).tolist(), row.num_tokens

    found = threads(num_ranks, positions)
    assert found == [(filled, mine, sum(lengths) - len(lengths)) for mine in slices]


def test_where_the_actions_of_a_slice_are(threads: Callable) -> None:
    """The row has 11 tokens, padded to 12: chunks of 3, of which the first rank of two has the first and the
    last."""
    places = torch.tensor([1, 2, 3, 5, 6, 9, 10])
    found = threads(2, lambda: [x.tolist() for x in sharing().locate(places, 11)])
    assert found == [[[0, 1, 5, 6], [1, 2, 3, 4]], [[2, 3, 4], [0, 2, 3]]]


def test_gathering_is_differentiated_as_the_sum_over_ranks(threads: Callable) -> None:
    """The loss of rank r is L_r = (r + 1) sum_i i w_i over the gathered w: of sum_r L_r the i-th derivative
    is 3 i. The first of two ranks has the first and the last of four."""

    def gradient() -> tuple[list[float], list[float], float]:
        rank = dist.get_rank()
        x = torch.tensor([1.0, 2.0]) + 2 * rank
        x.requires_grad_()
        whole = sharing().gathered(x)
        ((rank + 1) * (torch.arange(4) * whole).sum()).backward()
        return whole.tolist(), x.grad.tolist(), float(sharing().summed(x.detach().sum()))

    assert threads(2, gradient) == [([1, 3, 4, 2], [0, 9], 10), ([1, 3, 4, 2], [3, 6], 10)]


def test_some_heads_of_the_whole_row_and_back(threads: Callable) -> None:
    """Four heads, two tokens on each of two ranks, the first and the last and those between; token i of head
    h is 10 h + i."""

    def exchanged() -> tuple[list, list]:
        own = (10 * torch.arange(4)[:, None] + sharing().own(torch.arange(4))).float()[..., None]
        whole = sharing().whole_row(own)
        return whole[..., 0].tolist(), sharing().all_heads(whole.transpose(0, 1))[..., 0].tolist()

    assert threads(2, exchanged) == [
        ([[0, 1, 2, 3], [10, 11, 12, 13]], [[0, 10, 20, 30], [3, 13, 23, 33]]),
        ([[20, 21, 22, 23], [30, 31, 32, 33]], [[1, 11, 21, 31], [2, 12, 22, 32]]),
    ]


@pytest.mark.parametrize(
    ("mode", "num_heads", "num_kv", "expected"),
    [
        ("auto", 8, 8, True),
        ("auto", 8, 2, True),  # each head is on two ranks
        ("auto", 24, 6, True),  # each head is on two ranks, so that a rank has three
        ("auto", 6, 6, False),
        ("auto", 12, 6, True),
        ("auto", 6, 2, False),
        ("ulysses", 8, 2, True),
        ("allgather", 8, 8, False),
        ("ring", 8, 8, False),
    ],
)
def test_when_heads_are_divided_among_four(threads, mode, num_heads, num_kv, expected):
    assert threads(4, lambda: sharing(mode).splits_heads(num_heads, num_kv)) == [expected] * 4


def test_heads_that_do_not_divide_are_refused(threads: Callable) -> None:
    def divide() -> None:
        with refused(ErrorCode.CONFLICT, flag="--ds.sequence_parallel_mode", value="ulysses"):
            sharing("ulysses").splits_heads(6, 3)

    threads(4, divide)


# ---- models


MOE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "num_experts": 6}
ARCHITECTURES = {
    "qwen3": hf.Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "gpt2": hf.GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1),
    "mistral, window of 8": hf.MistralConfig(**SHAPE, sliding_window=8),
    "gemma2, capped attention": hf.Gemma2Config(**SHAPE, **CAPPED, attn_logit_softcapping=1.5),
    "gpt-oss, sinks": hf.GptOssConfig(**SHAPE, sliding_window=8, num_local_experts=4, num_experts_per_tok=2),
    "deepseek, latent attention": hf.DeepseekV3Config(
        **{k: v for k, v in SHAPE.items() if k not in ("head_dim", "num_key_value_heads")},
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=6,
        first_k_dense_replace=2,
    ),
    "qwen3 moe": hf.Qwen3MoeConfig(**SHAPE, **MOE),  # pyrefly: ignore[unexpected-keyword]
}
ROUNDING = 1e-6
"""Absolute error of sums of some hundred terms of at most the largest gradient's size, each rounded to 2^-24
of it."""


def language_model(
    config: hf.PreTrainedConfig, kind: Any = hf.AutoModelForCausalLM, attention: str = PACKED
) -> hf.PreTrainedModel:
    config = copy.deepcopy(config)
    torch.manual_seed(1)
    options = {"attn_implementation": attention, "experts_implementation": "eager"}
    return kind.from_config(config, **options).double().eval()


def scorer(config: hf.PreTrainedConfig) -> hf.PreTrainedModel:
    config = copy.deepcopy(config)
    config.num_labels, config.value_head_prefix = 1, CLASSIFIER_HEAD
    return language_model(config, hf.AutoModelForSequenceClassification)


def samples(seed: int = 0) -> list[Sample]:
    random = torch.Generator().manual_seed(seed)
    made = []
    for length in LENGTHS:
        mask = torch.rand(length, generator=random) < 0.6
        mask[0], mask[-1] = False, True
        made.append(Sample(token_ids=torch.randint(3, 61, (length,), generator=random), action_mask=mask))
    return made


def scored(seed: int = 0) -> list[Sample]:
    """Returns samples with the last token as the only action."""
    return [replace(s, action_mask=torch.arange(s.length) == s.length - 1) for s in samples(seed)]


def noise(row: PackedRow, seed: int) -> Tensor:
    return 0.1 * torch.randn(row.num_tokens, generator=torch.Generator().manual_seed(seed)).double()


def experiences(made: list[Sample] | None = None) -> ExperienceRow:
    row = PackedRow.of(made or samples())
    return ExperienceRow(
        row=row,
        old_log_probs=-4 + noise(row, 1),
        advantages=10 * noise(row, 2),
        returns=noise(row, 3),
        rollout_log_probs=-4 + noise(row, 4),
        ref_log_probs=-4 + noise(row, 5),
        values=noise(row, 6),
        likely_ids=row.token_ids[row.actions][:, None] // torch.tensor([1, 2, 3]),
        likely_log_probs=-2 + noise(row, 7)[:, None] * torch.tensor([1.0, -2.0, 3.0]),
    )


def pairs(made: list[Sample]) -> PairRow:
    known = torch.tensor([-3.0, -5.0]).double()
    a, b, c, d = made
    return PairRow.of(
        [Pair(chosen=a, rejected=b, ref_log_probs=known), Pair(chosen=c, rejected=d, ref_log_probs=known)]
    )


def unpaired() -> UnpairedRow:
    return UnpairedRow.of(
        [
            UnpairedExample(
                sample=s,
                mismatched=m,
                desirable=i % 2 == 0,
                ref_log_probs=torch.tensor([-3.0, -4.0]).double(),
            )
            for i, (s, m) in enumerate(zip(samples(0), samples(1), strict=True))
        ]
    )


def steps() -> StepsRow:
    return StepsRow.of([Steps(sample=s, labels=s.token_ids[s.action_mask]) for s in samples()])


def distillation(module: RowModel) -> Objective:
    """Distils from a teacher that shares the student's rows."""
    teacher = copy.deepcopy(TEACHER)
    get_row_layout(teacher.model).sharing = get_row_layout(module.model).sharing
    head = LinearHead(*(x if not isinstance(x, Tensor) else x.detach() for x in linear_head(teacher.model)))
    return DistillationObjective(teacher=teacher, teacher_head=head, coef=0.4, temperature=2.0)


Q = ARCHITECTURES["qwen3"]
policy = partial(language_model, Q)
TEACHER = TeacherModel(language_model(hf.LlamaConfig(**SHAPE)))
PPO = PolicyObjective(kl_coef=0.1, kl_estimator="k3", entropy_coef=0.01, correction="tis", temperature=0.7)
OBJECTIVES: dict[str, tuple[Callable, Callable, Callable]] = {
    # model, row, module -> objective
    "sft": (lambda: PolicyModel(policy()), lambda: PackedRow.of(samples()), lambda m: SFTObjective()),
    "ppo": (lambda: PolicyModel(policy()), experiences, lambda m: PPO),
    "gspo": (lambda: PolicyModel(policy()), experiences, lambda m: PolicyObjective(loss_type="gspo")),
    "centered": (
        lambda: PolicyModel(policy()),
        experiences,
        lambda m: PolicyObjective(centers_scores=True, correction="tis"),
    ),
    "balance": (
        lambda: PolicyModel(language_model(ARCHITECTURES["qwen3 moe"])),
        experiences,
        lambda m: BalancedObjective(objective=PPO, coef=0.3),
    ),
    "critic": (lambda: ValueModel(scorer(Q)), experiences, lambda m: CriticObjective(value_clip=0.2)),
    "rm": (lambda: ScoreModel(scorer(Q)), lambda: pairs(scored()), lambda m: RewardObjective()),
    "prm": (lambda: ProcessRewardModel(policy()), steps, lambda m: ProcessObjective()),
    "dpo": (
        lambda: PolicyModel(policy()),
        lambda: pairs(samples()),
        lambda m: DPOObjective(beta=0.1, nll_coef=0.1),
    ),
    "kto": (lambda: PolicyModel(policy()), unpaired, lambda m: KTOObjective(beta=0.1, kl=0.3)),
    "kd": (lambda: StudentModel(policy()), lambda: PackedRow.of(samples()), distillation),
}


def passed(module: RowModel, row: Any, objective_of: Callable) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns (metrics, gradients) of two rows, the second one without actions, as DeepSpeed averages
    them."""
    objective, metrics = objective_of(module), {}
    for part in (row, row.empty()):
        loss, found = objective(module, part, NORM)
        loss.backward()
        metrics = {name: metrics.get(name, 0) + x.detach() for name, x in found.items()}
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    if dist.is_initialized():
        for gradient in gradients.values():
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
    return metrics, gradients


def on_ranks(
    threads: Callable, module: RowModel, row: Any, objective_of: Callable, num_ranks: int, *mode: Any
) -> list:
    def part() -> Any:
        own = copy.deepcopy(module)
        get_row_layout(own.model).sharing = sharing(*mode)
        return passed(own, row, objective_of)

    return threads(num_ranks, part)


def check_equal(found: list, expected: tuple) -> None:
    largest = max(float(g.abs().max()) for g in expected[1].values())
    assert largest > 1e-2
    for metrics, gradients in found:
        assert gradients.keys() == expected[1].keys()
        torch.testing.assert_close(metrics, expected[0], atol=ROUNDING, rtol=0, check_dtype=False)
        torch.testing.assert_close(gradients, expected[1], atol=ROUNDING * max(1, largest), rtol=0)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.few(5)
def test_every_objective(threads: Callable, name: str) -> None:
    build, row, objective_of = OBJECTIVES[name]
    module, row = build(), row()
    expected = passed(copy.deepcopy(module), row, objective_of)
    for num_ranks in (2, 3):  # heads divide among two
        check_equal(on_ranks(threads, module, row, objective_of, num_ranks), expected)


KINDS = ((4, "ulysses", 1), (2, "allgather", 1), (3, "allgather", 2), (2, "ring", 1), (4, "ring", 1))
"""(ranks, mode, heads at a time)"""


@pytest.mark.parametrize(
    ("name", "num_ranks", "mode", "heads"),
    [
        # fast runs have every kind with the first architecture, and every architecture with one kind
        pytest.param(name, *kind, marks=() if at == 0 or at % 5 == i else pytest.mark.processes)
        for at, name in enumerate(ARCHITECTURES)
        for i, kind in enumerate(KINDS)
    ],
)
def test_every_kind_of_attention(threads, name, num_ranks, mode, heads):
    module, row = PolicyModel(language_model(ARCHITECTURES[name])), experiences()
    expected = passed(copy.deepcopy(module), row, lambda m: PPO)
    check_equal(on_ranks(threads, module, row, lambda m: PPO, num_ranks, mode, heads), expected)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_common_prefixes_are_read_once_by_ranks_that_exchange_heads(threads: Callable, name: str) -> None:
    """The last sample and one more begin like the second, so that the tree has a padded slice."""
    made = samples()
    made[3].token_ids[:9] = made[1].token_ids[:9]
    made.append(replace(made[1], token_ids=torch.cat([made[1].token_ids[:-5], made[3].token_ids[-5:]])))
    module, row = PolicyModel(language_model(ARCHITECTURES[name])), experiences(made)
    expected = passed(copy.deepcopy(module), row, lambda m: PPO)
    get_row_layout(module.model).shares_prefixes = True
    check_equal(on_ranks(threads, module, row, lambda m: PPO, 2, "ulysses"), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", ["ulysses", "allgather", "ring"])
def test_layers_that_are_computed_again(threads, mode, reentrant):
    """With gradient checkpointing ranks meet in the backward pass too."""
    module, row = PolicyModel(policy()), experiences()
    expected = passed(copy.deepcopy(module), row, lambda m: PPO)
    enable_checkpointing(module.model, reentrant=reentrant, dropout=True)
    module.train()
    check_equal(on_ranks(threads, module, row, lambda m: PPO, 2, mode), expected)


@pytest.mark.parametrize(("mode", "most"), [("ulysses", 0.27), ("allgather", 0.30), ("ring", 0.26)])
def test_a_rank_keeps_its_share_of_the_activations(threads, mode, most):
    """Four ranks keep a quarter each; beside that, in every mode but the ring, a copy of the rank's keys, of
    which there are 2 heads, or the keys of the others."""
    module, row = PolicyModel(policy()), row_of(*[50] * 20)

    def kept(module: RowModel) -> int:
        """Returns the bytes that a pass keeps for the backward pass, beside the weights."""
        found = {}

        def keep(x: Tensor) -> Tensor:
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            states = hidden_states(module.model, row)  # the variable keeps the pass's memory alive
        assert states.requires_grad
        weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
        return sum(size for place, size in found.items() if place not in weights)

    def part() -> int:
        own = copy.deepcopy(module)
        get_row_layout(own.model).sharing = sharing(mode)
        return kept(own)

    assert max(threads(4, part)) < most * kept(module)


# ---- the check of a loaded model


def resolved(module: RowModel) -> None:
    """Checks a model whose rows the ranks share."""
    own = copy.deepcopy(module).float()
    get_row_layout(own.model).sharing = sharing()
    resolve_row_layout(lambda: own(), own)


def test_a_model_that_computes_slices_right_passes(threads: Callable) -> None:
    module = PolicyModel(policy())
    threads(2, lambda: resolved(module))


@pytest.mark.parametrize(
    "model",
    [
        lambda: language_model(Q, attention="sdpa"),
        lambda: language_model(tiny_config("jamba"), attention="sdpa"),
    ],
    ids=["attention that only sees its slice", "a state that runs along the row"],
)
def test_every_rank_refuses_a_model_that_computes_slices_wrong(threads: Callable, model: Callable) -> None:
    module = PolicyModel(model())

    def check() -> str:
        with refused(ErrorCode.UNSUPPORTED, flag="--ds.ring_attn_size", value=2) as refusal:
            resolved(module)
        return refusal.value.text

    first, second = threads(2, check)
    assert first == second and type(module.model).__name__ in first
