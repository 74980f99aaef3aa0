import math
from dataclasses import replace
from typing import NamedTuple, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from openrlhf.algos.logprobs import linear_log_probs
from openrlhf.config import choices
from openrlhf.config.ppo import ActorConfig, AdvantageConfig, AlgoConfig, KLConfig
from openrlhf.objectives.actor import POLICY_LOSSES, ActorObjective
from openrlhf.objectives.sft import SFTObjective
from openrlhf.types import Credit, Experience, ExperienceRow, LossNorm, PackedRow, Sample, Scores

VOCAB = 7


class TokenScores(NamedTuple):
    log_probs: Tensor
    entropy: Tensor | None


class Bigram(nn.Module):
    """A policy that looks at the previous token only: a real gradient in microseconds."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, 3, dtype=torch.float64)
        self.head = nn.Linear(3, VOCAB, bias=False, dtype=torch.float64)

    def forward(self, row: PackedRow, temperature: float, with_entropy: bool) -> TokenScores:
        actions = row.action_mask.nonzero()[:, 0]
        hidden = self.embedding(row.token_ids[actions - 1])
        scores = linear_log_probs(
            hidden, self.head.weight, row.token_ids[actions], scale=1 / temperature, with_entropy=with_entropy
        )
        return TokenScores(*scores)


def fixed(log_probs, entropy=None):
    """A policy with these log-probs, whatever it reads."""
    return lambda row, temperature, with_entropy: TokenScores(log_probs, entropy)


def row_of(counts, **fields) -> ExperienceRow:
    """A row of sequences with these numbers of actions."""
    samples = [
        Sample(token_ids=torch.ones(1 + n, dtype=torch.long), action_mask=torch.tensor([False] + [True] * n))
        for n in counts
    ]
    zeros = torch.zeros(sum(counts))
    names = ("old_log_probs", "advantages", "returns", "rollout_log_probs")
    return ExperienceRow(row=PackedRow.of(samples), **(dict.fromkeys(names, zeros) | fields))


def random_experience(num_actions: int, seed: int) -> Experience:
    """Prompt, actions, feedback, and one more action; or no action at all."""
    random = torch.Generator().manual_seed(seed)
    mask = [False, False] + [True] * num_actions + [False] + [num_actions > 0]

    def noise(scale=1.0):
        return torch.randn(sum(mask), generator=random, dtype=torch.float64) * scale

    sample = Sample(
        token_ids=torch.randint(0, VOCAB, (len(mask),), generator=random),
        action_mask=torch.tensor(mask),
        rollout_log_probs=-2 + noise(0.5),
    )
    scores = Scores(log_probs=-2 + noise(0.5), ref_log_probs=-2 + noise(0.5))
    return Experience(sample=sample, scores=scores, credit=Credit(advantages=noise(), returns=noise()))


def test_ppo_by_hand():
    log_probs = torch.log(torch.tensor([0.3, 0.1, 0.4]))
    batch = row_of(
        [2, 1],
        old_log_probs=torch.log(torch.tensor([0.2, 0.2, 0.4])),
        advantages=torch.tensor([1.0, 1.0, -2.0]),
    )
    loss, metrics = ActorObjective()(fixed(log_probs), batch, LossNorm(10, 5))
    # ratios 1.5, 0.5, 1: -min(1.5, 1.2), -min(0.5, 0.8), 2; of ten tokens in the step
    assert loss.item() == pytest.approx((-1.2 - 0.5 + 2) / 10)
    assert metrics["policy/loss"].item() == pytest.approx(loss.item())
    assert metrics["policy/clip_fraction"].item() == pytest.approx(1 / 10)
    assert metrics["policy/ppo_kl"].item() == pytest.approx((math.log(2 / 3) + math.log(2)) / 10)
    assert set(metrics) == {"policy/loss", "policy/clip_fraction", "policy/ppo_kl"}


def test_kl_and_entropy_terms():
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    entropy = torch.tensor([0.5, 1.5], requires_grad=True)
    batch = row_of([2], old_log_probs=log_probs.detach(), ref_log_probs=torch.tensor([-2.0, -2.0]))
    objective = ActorObjective(kl_coef=0.5, kl_estimator="k2", entropy_coef=0.1)
    loss, metrics = objective(fixed(log_probs, entropy), batch, LossNorm(2, 1))
    # advantages are 0; KL (1 / 2 + 0) / 2; entropy (0.5 + 1.5) / 2
    assert metrics["policy/kl_loss"].item() == pytest.approx(0.25)
    assert metrics["policy/entropy"].item() == pytest.approx(1.0)
    assert loss.item() == pytest.approx(0.5 * 0.25 - 0.1 * 1.0)
    loss.backward()
    # coefficient * d / tokens, and -coefficient / tokens
    assert log_probs.grad.tolist() == pytest.approx([0.5 * 1 / 2, 0])
    assert entropy.grad.tolist() == pytest.approx([-0.05, -0.05])
    only_logged, metrics = replace(objective, kl_coef=0.0, entropy_coef=0.0)(
        fixed(log_probs.detach(), entropy), batch, LossNorm(2, 1)
    )
    assert only_logged.item() == 0
    assert metrics["policy/entropy"].item() == pytest.approx(1.0)
    assert not any(value.requires_grad for value in metrics.values())


def test_correction_weighs_the_loss_by_old_over_rollout():
    log_probs = torch.zeros(3, requires_grad=True)
    batch = row_of(
        [2, 1], rollout_log_probs=-torch.log(torch.tensor([2.0, 8.0, 1.0])), advantages=torch.ones(3)
    )
    objective = ActorObjective(correction="icepop", correction_low=0.5, correction_high=5.0)
    loss, metrics = objective(fixed(log_probs), batch, LossNorm(3, 2))
    # weights 2, 0 (8 is outside), 1; the dropped token still counts in the divisor
    assert loss.item() == pytest.approx(-(2 + 0 + 1) / 3)
    assert metrics["policy/is_weight_mean"].item() == pytest.approx(1.0)
    assert metrics["policy/is_masked_fraction"].item() == pytest.approx(1 / 3)
    loss.backward()
    assert log_probs.grad.tolist() == pytest.approx([-2 / 3, 0, -1 / 3])


def test_gspo_by_hand():
    log_probs = torch.log(torch.tensor([4.0, 1.0, 0.5]))
    batch = row_of([2, 1], advantages=torch.tensor([1.0, 3.0, -2.0]))
    loss, _ = ActorObjective(loss_type="gspo", clip_high=9.0)(fixed(log_probs), batch, LossNorm(3, 2))
    # ratios sqrt(4 * 1) = 2 and 0.5: -2 * (1 + 3) / 2, and -min(0.5 * -2, 0.8 * -2) = 1.6; of two sequences
    assert loss.item() == pytest.approx((-4 + 1.6) / 2)


def test_gspo_corrects_with_the_ratio_of_the_sequence():
    batch = row_of(
        [2, 1], rollout_log_probs=-torch.log(torch.tensor([1.0, 9.0, 16.0])), advantages=torch.ones(3)
    )
    objective = ActorObjective(loss_type="gspo", correction="tis", correction_high=5.0)
    loss, metrics = objective(fixed(torch.zeros(3)), batch, LossNorm(3, 2))
    # old / rollout is sqrt(1 * 9) = 3 for the first sequence, 16 cut to 5 for the second; new / old stays 1
    assert loss.item() == pytest.approx(-(3 + 5) / 2)
    assert metrics["policy/ppo_kl"].item() == 0
    dropped, _ = replace(objective, correction="icepop")(fixed(torch.zeros(3)), batch, LossNorm(3, 2))
    assert dropped.item() == pytest.approx(-3 / 2)


def test_first_step_is_the_policy_gradient():
    """Before the first update the ratio is 1: no clipping, and the gradient is that of REINFORCE."""
    model, batch = Bigram(), ExperienceRow.of([random_experience(n, n) for n in (3, 5)])
    norm = LossNorm(batch.num_tokens, batch.num_sequences)
    old = model(batch.row, 0.7, False).log_probs
    loss, metrics = ActorObjective(temperature=0.7)(model, replace(batch, old_log_probs=old.detach()), norm)
    assert metrics["policy/ppo_kl"].item() == metrics["policy/clip_fraction"].item() == 0
    grads = torch.autograd.grad(loss, list(model.parameters()))
    expected = torch.autograd.grad(-(old * batch.advantages).mean(), list(model.parameters()))
    torch.testing.assert_close(grads, expected)


OBJECTIVES = [
    ActorObjective(
        loss_type=loss_type,
        correction=correction,
        dual_clip=3.0,
        kl_coef=0.3,
        kl_estimator="k3",
        entropy_coef=0.1,
        temperature=0.8,
    )
    for loss_type in get_args(choices.PolicyLossType)
    for correction in (None, *get_args(choices.ISCorrectionType))
]


@settings(deadline=None, max_examples=40)
@given(
    objective=st.sampled_from(OBJECTIVES),
    layout=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=4),
    seed=st.integers(0, 100),
)
def test_the_loss_does_not_depend_on_the_rows(objective, layout, seed):
    """Shares and gradients of any packing add up to those of one row that holds the whole step."""
    counts = [n for row in layout for n in row]
    experiences = [random_experience(n, seed + i) for i, n in enumerate(counts)]
    whole = ExperienceRow.of(experiences)
    norm = LossNorm(whole.num_tokens, whole.num_sequences)
    rows, start = [whole.empty()], 0
    for sizes in layout:
        rows.append(ExperienceRow.of(experiences[start : start + len(sizes)]))
        start += len(sizes)
    together, apart = Bigram(), Bigram()
    expected, expected_metrics = objective(together, whole, norm)
    expected.backward()
    totals = dict.fromkeys(expected_metrics, 0.0)
    for row in rows:
        loss, metrics = objective(apart, row, norm)
        loss.backward()
        totals = {name: total + metrics[name].item() for name, total in totals.items()}
    assert totals == pytest.approx({name: value.item() for name, value in expected_metrics.items()})
    for p, q in zip(together.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: f"{o.loss_type}-{o.correction}")
def test_a_row_without_actions_costs_nothing_and_still_has_a_gradient(objective):
    model = Bigram()
    batch = ExperienceRow.of([random_experience(2, 0)]).empty()
    loss, metrics = objective(model, batch, LossNorm(0, 0))
    loss.backward()
    assert loss.item() == 0
    assert {value.item() for value in metrics.values()} == {0.0}
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_from_config():
    actor = ActorConfig(
        eps_clip_low_high=(0.1, 0.4), policy_loss_type="gspo", entropy_coef=0.0, dual_clip=4.0
    )
    algo = AlgoConfig(
        kl=KLConfig(init_coef=0.02, use_loss=True, estimator="k3"),
        advantage=AdvantageConfig(
            is_correction_enable=True, is_correction_type="icepop", is_correction_threshold=(0.3, 3.0)
        ),
    )
    assert ActorObjective.from_config(actor, algo, temperature=0.9, kl_coef=0.05) == ActorObjective(
        loss_type="gspo",
        clip_low=0.1,
        clip_high=0.4,
        dual_clip=4.0,
        correction="icepop",
        correction_low=0.3,
        correction_high=3.0,
        kl_coef=0.05,
        kl_estimator="k3",
        entropy_coef=0.0,
        temperature=0.9,
    )


def test_from_config_leaves_out_what_is_off():
    objective = ActorObjective.from_config(ActorConfig(), AlgoConfig(), temperature=1.0, kl_coef=0.05)
    assert objective.kl_coef == 0  # it is in the reward
    assert objective.correction is None
    assert objective.entropy_coef is None
    assert set(POLICY_LOSSES) == set(get_args(choices.PolicyLossType))


def test_sft_is_cross_entropy_on_the_marked_tokens():
    model = Bigram()
    batch = ExperienceRow.of([random_experience(3, 0), random_experience(4, 1)]).row
    loss, metrics = SFTObjective()(model, batch, LossNorm(batch.num_tokens, 2))
    logits = model.head(model.embedding(batch.token_ids[:-1]))
    labels = batch.token_ids[1:].masked_fill(~batch.action_mask[1:], -100)
    expected = nn.functional.cross_entropy(logits, labels)
    torch.testing.assert_close(loss, expected)
    assert metrics["sft/loss"].item() == loss.item()
    half, _ = SFTObjective()(model, batch, LossNorm(2 * batch.num_tokens, 4))
    torch.testing.assert_close(half, expected / 2)
