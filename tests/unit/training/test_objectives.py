import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from records import batch_of, trajectory
from refusals import refused
from torch import Tensor, nn

from openrlhf.algorithms.corrections import CORRECTIONS
from openrlhf.algorithms.corrections.gated import Gated
from openrlhf.algorithms.corrections.tis import TIS
from openrlhf.algorithms.logprobs import linear_log_probs
from openrlhf.algorithms.policy_losses import POLICY_LOSSES
from openrlhf.algorithms.policy_losses.ppo import PPO
from openrlhf.algorithms.proximal import PROXIMAL_POLICIES
from openrlhf.algorithms.proximal.recomputed import Recomputed
from openrlhf.algorithms.reductions import AGGREGATIONS
from openrlhf.config.ppo import ActorConfig, AdvantageConfig, AlgoConfig, KLConfig, PPOConfig, RolloutConfig
from openrlhf.errors import ErrorCode
from openrlhf.rows import ExperienceRow, LossNorm, PackedRow, Sample
from openrlhf.training.objectives.policy import PolicyObjective
from openrlhf.types import LIKELY, Batch, not_none

VOCAB = 7


class TokenScores(NamedTuple):
    log_probs: Tensor
    entropy: Tensor | None
    likely: Tensor | None = None


class Bigram(nn.Module):
    """Policy that looks at the previous token only: a real gradient in microseconds."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, 3, dtype=torch.float64)
        self.head = nn.Linear(3, VOCAB, bias=False, dtype=torch.float64)

    def forward(
        self,
        row: PackedRow,
        temperature: float,
        with_entropy: bool = False,
        summed: bool = False,
        likely: Tensor | None = None,
    ) -> TokenScores:
        actions = row.action_mask.nonzero()[:, 0]
        hidden = self.embedding(row.token_ids[actions - 1])
        log_probs, entropy = linear_log_probs(
            hidden, self.head.weight, row.token_ids[actions], scale=1 / temperature, with_entropy=with_entropy
        )
        of_likely = None
        if likely is not None:
            of_likely, _ = linear_log_probs(hidden, self.head.weight, likely, scale=1 / temperature)
        return TokenScores(log_probs.sum() if summed else log_probs, entropy, of_likely)


def fixed(log_probs, entropy=None):
    """Returns a policy with these log-probs, whatever it reads."""
    return lambda row, temperature, with_entropy: TokenScores(log_probs, entropy)


def row_of(counts, **fields) -> ExperienceRow:
    """Returns a row of sequences with these numbers of actions."""
    samples = [
        Sample(token_ids=torch.ones(1 + n, dtype=torch.long), action_mask=torch.tensor([False] + [True] * n))
        for n in counts
    ]
    zeros = torch.zeros(sum(counts))
    names = ("old_log_probs", "advantages", "returns", "rollout_log_probs")
    return ExperienceRow(row=PackedRow.of(samples), **(dict.fromkeys(names, zeros) | fields))


def random_batch(counts: Sequence[int], seed: int = 0, gaps: Sequence[list[int]] | None = None) -> Batch:
    """Returns sequences of prompt, actions, feedback, and one more action; or of no action at all. `gaps`:
    more feedback of each before its last action. The token right before an action stays, so a Bigram gives
    every action the probability that it has without gaps. Samplers are up to 4 updates behind."""
    samples, columns, staleness, prompts, likely = [], [], [], [], []
    for i, num_actions in enumerate(counts):
        random = torch.Generator().manual_seed(seed + i)
        mask = [False, False] + [True] * num_actions + [False] + [num_actions > 0]
        noise = torch.randn(5, sum(mask), generator=random, dtype=torch.float64)
        staleness.append(torch.randint(0, 5, (sum(mask),), generator=random, dtype=torch.int32))
        prompts += [i // 2] * sum(mask)
        likely.append(random_likely(sum(mask), random))
        token_ids = torch.randint(0, VOCAB, (len(mask),), generator=random).tolist()
        gap = gaps[i] if gaps else []
        samples.append(
            trajectory(
                token_ids=[*token_ids[:-2], *gap, *token_ids[-2:]],
                action_mask=[*mask[:-2], *[False] * len(gap), *mask[-2:]],
            )
        )
        columns.append(torch.stack([*(-2 + noise[:3] / 2), *noise[3:]]))
    names = ("rollout_log_probs", "log_probs", "ref_log_probs", "advantages", "returns")
    known = dict(zip(names, torch.cat(columns, dim=1).numpy(), strict=True))
    known["prompts"] = np.array(prompts, dtype=np.int32)
    known["likely"] = np.concatenate(likely)
    return batch_of(samples, **known, staleness=torch.cat(staleness).numpy())


def random_likely(num_actions: int, random: torch.Generator) -> np.ndarray:
    """Returns the three most likely tokens of a sampler, in order."""
    log_probs = torch.randn(num_actions, VOCAB, generator=random).log_softmax(-1)
    found, tokens = log_probs.topk(3), np.empty((num_actions, 3), LIKELY)
    tokens["id"], tokens["log_prob"] = found.indices, found.values
    return tokens


def norm_of(*rows: ExperienceRow) -> LossNorm:
    """Returns the totals of the rows of an optimizer step."""
    prompts = torch.cat([not_none(row.prompts) for row in rows])
    totals = torch.bincount(prompts, minlength=1)
    return LossNorm(sum(r.num_tokens for r in rows), sum(r.num_sequences for r in rows), totals)


def test_ppo_by_hand():
    log_probs = torch.log(torch.tensor([0.3, 0.1, 0.4]))
    batch = row_of(
        [2, 1],
        old_log_probs=torch.log(torch.tensor([0.2, 0.2, 0.4])),
        advantages=torch.tensor([1.0, 1.0, -2.0]),
    )
    loss, metrics = PolicyObjective()(fixed(log_probs), batch, LossNorm(10, 5))
    # ratios 1.5, 0.5, 1: -min(1.5, 1.2), -min(0.5, 0.8), 2; of ten tokens in the step
    assert loss.item() == pytest.approx((-1.2 - 0.5 + 2) / 10)
    assert metrics["policy/loss"].item() == pytest.approx(loss.item())
    assert metrics["policy/clip_fraction"].item() == pytest.approx(1 / 10)
    assert metrics["policy/ppo_kl"].item() == pytest.approx((math.log(2 / 3) + math.log(2)) / 10)
    assert metrics["policy/clip_high_fraction"].item() == pytest.approx(1 / 10)
    assert metrics["policy/clip_low_fraction"].item() == 0
    clips = {f"policy/clip_{name}" for name in ("fraction", "low_fraction", "high_fraction")}
    assert set(metrics) == {"policy/loss", "policy/ppo_kl"} | clips


def test_kl_and_entropy_terms():
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    entropy = torch.tensor([0.5, 1.5], requires_grad=True)
    batch = row_of([2], old_log_probs=log_probs.detach(), ref_log_probs=torch.tensor([-2.0, -2.0]))
    objective = PolicyObjective(kl_coef=0.5, kl_estimator="k2", entropy_coef=0.1)
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
    objective = PolicyObjective(correction="icepop", correction_low=0.5, correction_high=5.0)
    loss, metrics = objective(fixed(log_probs), batch, LossNorm(3, 2))
    # weights 2, 0 (8 is outside), 1; the dropped token still counts in the divisor
    assert loss.item() == pytest.approx(-(2 + 0 + 1) / 3)
    assert metrics["policy/is_weight_mean"].item() == pytest.approx(1.0)
    assert metrics["policy/is_masked_fraction"].item() == pytest.approx(1 / 3)
    loss.backward()
    assert log_probs.grad.tolist() == pytest.approx([-2 / 3, 0, -1 / 3])


def test_the_gate_is_built_from_the_flags_and_reads_the_proximal_policy():
    """The ratios of three tokens are e^0.5, 1 and e^-3: total variations .24, 0 and .35."""
    old, rollout = torch.tensor([-0.5, -1.0, -4.0]), torch.tensor([-1.0, -1.0, -1.0])
    batch = row_of([2, 1], old_log_probs=old, rollout_log_probs=rollout, advantages=torch.ones(3))
    advantage = AdvantageConfig(
        is_correction_level="token", is_correction_gating="tv", is_correction_threshold=(0.3,)
    )
    objective = PolicyObjective.from_config(PPOConfig(algo=AlgoConfig(advantage=advantage)), 0.0)
    loss, metrics = objective(fixed(old), batch, LossNorm(3, 2))
    assert loss.item() == pytest.approx(-(math.exp(0.5) + 1) / 3)
    assert metrics["policy/is_masked_fraction"].item() == pytest.approx(1 / 3)


def test_the_kl_to_the_sampler_runs_from_the_sampler():
    """exp(-d) - 1 + d with d = log sampler - log policy, whose gradient is policy / sampler - 1."""
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    batch = row_of([2], rollout_log_probs=torch.tensor([-2.0, -2.0]), advantages=torch.zeros(2))
    kl = KLConfig(use_loss=True, estimator="k3", ref="rollout")
    objective = PolicyObjective.from_config(PPOConfig(algo=AlgoConfig(kl=kl)), 0.5)
    loss, metrics = objective(fixed(log_probs), batch, LossNorm(2, 1))
    assert metrics["policy/kl_loss"].item() == pytest.approx((math.e - 1 - 1) / 2)
    loss.backward()
    assert log_probs.grad.tolist() == pytest.approx([0.5 * (math.e - 1) / 2, 0])


@pytest.mark.parametrize("old", [None, torch.tensor([-1.5, -2.0])])
def test_the_unbiased_gradient_of_the_kl_weighs_by_the_policy_before_the_update(old):
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    batch = row_of(
        [2], old_log_probs=old, ref_log_probs=torch.tensor([-2.0, -1.0]), advantages=torch.zeros(2)
    )
    kl = KLConfig(use_loss=True, estimator="k1", unbiased_gradient=True)
    loss, _ = PolicyObjective.from_config(PPOConfig(algo=AlgoConfig(kl=kl)), 0.5)(
        fixed(log_probs), batch, LossNorm(2, 1)
    )
    loss.backward()
    weight = 1 if old is None else math.exp(0.5)
    assert log_probs.grad.tolist() == pytest.approx([0.5 * weight / 2, -0.5 / 2])


def test_gspo_by_hand():
    log_probs = torch.log(torch.tensor([4.0, 1.0, 0.5]))
    batch = row_of([2, 1], advantages=torch.tensor([1.0, 3.0, -2.0]))
    loss, _ = PolicyObjective(loss_type="gspo", clip_high=9.0)(fixed(log_probs), batch, LossNorm(3, 2))
    # ratios sqrt(4 * 1) = 2 and 0.5: -2 * (1 + 3) / 2, and -min(0.5 * -2, 0.8 * -2) = 1.6; of two sequences
    assert loss.item() == pytest.approx((-4 + 1.6) / 2)


def test_gspo_drops_the_same_sequences_with_icepop_and_with_seq_mask_tis():
    """All tokens of a sequence have its one ratio, which is their geometric mean."""
    batch = ExperienceRow.of(random_batch((3, 1, 2, 5)))
    losses = [
        PolicyObjective(loss_type="gspo", correction=correction, correction_low=0.8, correction_high=1.2)(
            Bigram(), batch, LossNorm(15, 4)
        )
        for correction in ("icepop", "seq-mask-tis")
    ]
    assert losses[0] == losses[1]
    assert 0 < losses[0][1]["policy/is_masked_fraction"] < 1


def test_cispo_by_hand():
    log_probs = torch.log(torch.tensor([0.3, 0.1, 0.4])).requires_grad_()
    batch = row_of(
        [2, 1],
        old_log_probs=torch.log(torch.tensor([0.2, 0.2, 0.4])),
        rollout_log_probs=torch.log(torch.tensor([0.2, 0.1, 0.1])),
        advantages=torch.tensor([1.0, 1.0, -2.0]),
    )
    objective = PolicyObjective(loss_type="cispo", correction="tis", correction_high=3.0)
    loss, metrics = objective(fixed(log_probs), batch, LossNorm(3, 2))
    # ratios 1.5, 0.5, 1 -> weights 1.2, 0.8, 1; corrections 0.2/0.2, 0.2/0.1 and 0.4/0.1 cut to 3
    loss.backward()
    assert log_probs.grad.tolist() == pytest.approx([-1.2 / 3, -0.8 * 2 / 3, 2 * 3 / 3])
    assert loss.item() == pytest.approx((log_probs.grad * log_probs).sum().item(), abs=1e-6)
    assert metrics["policy/clip_low_fraction"].item() == pytest.approx(1 / 3)
    assert metrics["policy/clip_high_fraction"].item() == pytest.approx(1 / 3)
    assert metrics["policy/clip_fraction"].item() == pytest.approx(2 / 3)


def test_what_the_mean_is_over():
    """Loss, KL and entropy are computed by hand, over two sequences of 2 and 1 actions. The entropy that is
    reported is always the mean over actions."""
    log_probs = torch.tensor([-1.0, -1.0, -1.0])
    batch = row_of(
        [2, 1],
        old_log_probs=log_probs,
        ref_log_probs=torch.tensor([-2.0, -1.0, -3.0]),
        advantages=torch.tensor([1.0, 2.0, 4.0]),
    )
    entropy = torch.tensor([0.0, 3.0, 6.0])

    def parts(aggregation):
        objective = PolicyObjective(
            aggregation=aggregation, longest_response=10, kl_coef=0.5, kl_estimator="k2", entropy_coef=0.1
        )
        loss, metrics = objective(fixed(log_probs, entropy), batch, LossNorm(3, 2))
        assert metrics["policy/entropy"].item() == 3
        policy_loss, kl = (metrics[f"policy/{name}"].item() for name in ("loss", "kl_loss"))
        return pytest.approx([policy_loss, kl, (policy_loss + 0.5 * kl - loss.item()) / 0.1])

    # the ratio is 1, so the loss is -A; the KL is 1/2, 0, 2
    assert parts("token_mean") == [-7 / 3, 2.5 / 3, 9 / 3]
    assert parts("sample_mean") == [-(1.5 + 4) / 2, (0.25 + 2) / 2, (1.5 + 6) / 2]
    assert parts("constant_length") == [-7 / 20, 2.5 / 20, 9 / 20]
    assert parts(None) == [-7 / 3, 2.5 / 3, 9 / 3]


def test_gspo_corrects_with_the_ratio_of_the_sequence():
    batch = row_of(
        [2, 1], rollout_log_probs=-torch.log(torch.tensor([1.0, 9.0, 16.0])), advantages=torch.ones(3)
    )
    objective = PolicyObjective(loss_type="gspo", correction="tis", correction_high=5.0)
    loss, metrics = objective(fixed(torch.zeros(3)), batch, LossNorm(3, 2))
    # old / rollout is sqrt(1 * 9) = 3 for the first sequence, 16 cut to 5 for the second; new / old stays 1
    assert loss.item() == pytest.approx(-(3 + 5) / 2)
    assert metrics["policy/ppo_kl"].item() == 0
    dropped, _ = replace(objective, correction="icepop")(fixed(torch.zeros(3)), batch, LossNorm(3, 2))
    assert dropped.item() == pytest.approx(-3 / 2)


def ratios(*values):
    """Returns the log-probs of a sampler under which actions of probability 1 have these ratios policy /
    sampler."""
    return -torch.log(torch.tensor(values))


def test_the_clip_counts_from_the_proximal_policy():
    """pi / pi_old is 1.1 and pi / pi_behave 1.5, of an action that is four updates old."""
    batch = row_of(
        [1],
        old_log_probs=ratios(1.1),
        rollout_log_probs=ratios(1.5),
        advantages=torch.ones(1),
        staleness=torch.tensor([4]),
    )

    def of(proximal, **options):
        log_probs = torch.zeros(1, requires_grad=True)
        objective = PolicyObjective(proximal_policy=proximal, correction_low=0.1, **options)
        loss, _ = objective(fixed(log_probs), batch, LossNorm(1, 1))
        loss.backward()
        return pytest.approx(loss.item()), pytest.approx(log_probs.grad.item())

    assert of("recomputed") == (-1.1, -1.1)
    assert of("recomputed", correction="tis") == (-1.5, -1.5)  # 1.1 * 1.5 / 1.1
    assert of("rollout") == (-1.2, 0)  # beyond the bound
    # the ratio is 1.5^(1/4), within the bound; the weight is 1.5^(3/4)
    assert of("interpolated") == (-(1.5**0.25), -(1.5**0.25))
    assert of("interpolated", correction="tis") == (-1.5, -1.5)


def test_the_log_probs_of_the_policy_itself_are_kept_whatever_the_clip_counts_from():
    batch, model = ExperienceRow.of(random_batch((3, 2))), Bigram()
    for proximal in PROXIMAL_POLICIES:
        seen: list = []
        objective = PolicyObjective(proximal_policy=proximal, seen=seen)
        objective(model, replace(batch, old_log_probs=None), LossNorm(7, 2))
        assert [x.tolist() for x in seen] == [model(batch.row, 1.0).log_probs.tolist()]


def test_staleness_weighs_the_loss_of_an_action_by_hand():
    """Five actions that earn 1, 2, 4, 8 and 16, chosen by weights 0, 1, 3, 4 and 0 updates old, are weighted
    by 0.5^s, and by 0 beyond 3. All count in the divisor, and the KL keeps its weight."""
    log_probs = torch.zeros(5, requires_grad=True)
    batch = row_of(
        [3, 2],
        advantages=torch.tensor([1.0, 2, 4, 8, 16]),
        staleness=torch.tensor([0, 1, 3, 4, 0]),
        ref_log_probs=torch.full((5,), -1.0),
    )
    objective = PolicyObjective(
        staleness_decay=0.5, max_staleness=3, correction="tis", kl_coef=0.1, kl_estimator="k2"
    )
    loss, metrics = objective(fixed(log_probs), batch, LossNorm(5, 2))
    assert metrics["policy/loss"].item() == pytest.approx(-(1 + 2 / 2 + 4 / 8 + 0 + 16) / 5)
    assert metrics["policy/kl_loss"].item() == pytest.approx(1 / 2)
    assert metrics["policy/staleness_weight_mean"].item() == pytest.approx((1 + 1 / 2 + 1 / 8 + 0 + 1) / 5)
    assert metrics["policy/staleness_masked_fraction"].item() == pytest.approx(1 / 5)
    assert metrics["policy/is_weight_mean"].item() == 1
    loss.backward()
    of_kl = 0.1 * 1 / 5
    assert (log_probs.grad - of_kl).tolist() == pytest.approx([-1 / 5, -1 / 5, -0.5 / 5, 0, -16 / 5])


def test_gspo_weighs_sequences_by_their_mean_staleness():
    """The means are 1 and 2, whose weights 0.5 and 0.25 every action of the sequence has; a mean beyond 1
    drops the sequence."""
    batch = row_of([2, 2], advantages=torch.tensor([1.0, 3, 1, 1]), staleness=torch.tensor([0, 2, 1, 3]))
    objective = PolicyObjective(loss_type="gspo", staleness_decay=0.5)
    loss, _ = objective(fixed(torch.zeros(4)), batch, LossNorm(4, 2))
    assert loss.item() == pytest.approx(-(0.5 * 2 + 0.25 * 1) / 2)
    loss, metrics = replace(objective, max_staleness=1)(fixed(torch.zeros(4)), batch, LossNorm(4, 2))
    assert loss.item() == pytest.approx(-0.5 * 2 / 2)
    assert metrics["policy/staleness_masked_fraction"].item() == 0.5


def test_first_step_is_the_policy_gradient():
    """Before the first update the ratio is 1: no clipping, and the gradient is that of REINFORCE."""
    model, batch = Bigram(), ExperienceRow.of(random_batch((3, 5)))
    norm = norm_of(batch)
    old = model(batch.row, 0.7, False).log_probs
    loss, metrics = PolicyObjective(temperature=0.7)(model, replace(batch, old_log_probs=old.detach()), norm)
    assert metrics["policy/ppo_kl"].item() == metrics["policy/clip_fraction"].item() == 0
    grads = torch.autograd.grad(loss, list(model.parameters()))
    expected = torch.autograd.grad(-(old * batch.advantages).mean(), list(model.parameters()))
    torch.testing.assert_close(grads, expected)


OBJECTIVES = [
    PolicyObjective(
        loss_type=loss_type,
        aggregation=aggregation,
        longest_response=6,
        correction=correction,
        dual_clip=3.0 if kind.dual_clip else None,
        kl_coef=0.3,
        kl_estimator="k3",
        entropy_coef=0.1,
        temperature=0.8,
    )
    for loss_type, kind in POLICY_LOSSES.items()
    for aggregation in AGGREGATIONS
    for correction in (None, *CORRECTIONS)
]
OBJECTIVES += [
    replace(objective, proximal_policy=proximal, staleness_decay=0.5, max_staleness=3)
    for objective in OBJECTIVES
    for proximal, row in PROXIMAL_POLICIES.items()
    if objective.aggregation == "token_mean" and objective.correction == (None if row.is_sampler else "tis")
]


OBJECTIVES += [
    replace(o, centers_scores=True)
    for o in OBJECTIVES
    if o.loss_type in ("ppo", "cispo") and o.correction in (None, "tis") and o.proximal_policy == "recomputed"
]


def name_of(o: PolicyObjective) -> str:
    name = f"{o.loss_type}-{o.aggregation}-{o.correction}-{o.proximal_policy}-{o.staleness_decay}"
    return name + "-centered" * o.centers_scores


def run_on(objective, rows, norm):
    """Returns the gradients of a fresh policy, and metrics, added up over the rows."""
    model, totals = Bigram(), {}
    for row in rows:
        loss, metrics = objective(model, row, norm)
        loss.backward()
        totals = {name: totals.get(name, 0.0) + value.item() for name, value in metrics.items()}
    return [p.grad for p in model.parameters()], totals


def exactly(run):
    """Converts the result of `run_on` for a comparison to the bit."""
    gradients, totals = run
    return [gradient.tolist() for gradient in gradients], totals


def assert_same(found, expected):
    assert found[1] == pytest.approx(expected[1])
    for gradient, other in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(gradient, other)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=name_of)
def test_fresh_samples_of_a_faithful_sampler_are_on_policy_whatever_is_done_for_others(objective):
    """The results are equal to the bit: all three policies are the same, and nothing is stale."""
    batch = ExperienceRow.of(replace(random_batch((3, 0, 5)), staleness=None))
    batch = replace(batch, old_log_probs=batch.rollout_log_probs)
    norm = norm_of(batch)
    plain = replace(objective, proximal_policy="recomputed", staleness_decay=1.0, max_staleness=None)
    assert exactly(run_on(objective, [batch], norm)) == exactly(run_on(plain, [batch], norm))
    zeros = replace(batch, staleness=torch.zeros(batch.num_tokens, dtype=torch.int32))
    gradients, totals = run_on(objective, [zeros], norm)
    if objective.staleness_decay < 1:
        assert totals.pop("policy/staleness_weight_mean") == pytest.approx(1)
        assert totals.pop("policy/staleness_masked_fraction") == 0
    assert exactly((gradients, totals)) == exactly(run_on(plain, [batch], norm))


@pytest.mark.parametrize("loss_type", POLICY_LOSSES)
def test_a_decay_of_one_and_a_limit_that_nothing_exceeds_do_nothing(loss_type):
    batch, plain = ExperienceRow.of(random_batch((3, 0, 5))), PolicyObjective(loss_type=loss_type)
    norm = norm_of(batch)
    oldest = int(not_none(batch.staleness).max())
    (gradients, _), expected = (
        run_on(o, [batch], norm) for o in (replace(plain, max_staleness=oldest), plain)
    )
    assert exactly((gradients, {})) == exactly((expected[0], {}))
    (stricter, _), (weaker, _) = (
        run_on(replace(plain, **options), [batch], norm)
        for options in ({"max_staleness": 1}, {"staleness_decay": 0.5})
    )
    assert exactly((gradients, {})) not in (exactly((stricter, {})), exactly((weaker, {})))


@settings(max_examples=60)
@given(
    objective=st.sampled_from(OBJECTIVES),
    layout=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=4),
    knows_old=st.booleans(),
    seed=st.integers(0, 100),
    data=st.data(),
)
def test_the_loss_depends_on_actions_only(objective, layout, knows_old, seed, data):
    """Rows, the order of sequences and other tokens have no influence: shares and gradients add up to those
    of one row that holds the whole step."""
    counts = [n for row in layout for n in row]
    gaps = data.draw(st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=3), min_size=len(counts)))
    batch, moved = random_batch(counts, seed), random_batch(counts, seed, gaps)
    if not knows_old:
        batch, moved = (replace(b, log_probs=None) for b in (batch, moved))
    whole = ExperienceRow.of(batch)
    norm = norm_of(whole)
    expected = run_on(objective, [whole], norm)

    order = data.draw(st.permutations(range(len(counts))))
    rows, start = [whole.empty()], 0
    for sizes in layout:
        rows.append(ExperienceRow.of(moved.select(order[start : start + len(sizes)])))
        start += len(sizes)
    assert_same(run_on(objective, rows, norm), expected)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=name_of)
def test_in_a_step_of_one_update_old_log_probs_change_nothing(objective):
    """The policy before the update is the policy itself: rows without its log-probs have the same loss, the
    same gradient and the same metrics, and the log-probs are kept."""
    batch = ExperienceRow.of(random_batch((3, 0, 5)))
    norm = norm_of(batch)
    old = Bigram()(batch.row, objective.temperature, False).log_probs.detach()
    seen: list = []
    expected = run_on(objective, [replace(batch, old_log_probs=old)], norm)
    objective = replace(objective, seen=seen)
    assert_same(run_on(objective, [replace(batch, old_log_probs=None)], norm), expected)
    assert [log_probs.tolist() for log_probs in seen] == [old.tolist()]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=name_of)
def test_a_row_without_actions_costs_nothing_and_still_has_a_gradient(objective):
    model = Bigram()
    batch = ExperienceRow.of(random_batch([2])).empty()
    loss, metrics = objective(model, batch, norm_of(batch))
    loss.backward()
    assert loss.item() == 0
    assert {value.item() for value in metrics.values()} == {0.0}
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_from_config():
    config = PPOConfig(
        actor=ActorConfig(
            eps_clip_low_high=(0.1, 0.4),
            policy_loss_type="ppo",
            loss_aggregation="constant_length",
            entropy_coef=0.0,
            dual_clip=4.0,
        ),
        rollout=RolloutConfig(temperature=0.9, max_new_tokens=77),
        algo=AlgoConfig(
            kl=KLConfig(init_coef=0.02, use_loss=True, estimator="k3"),
            advantage=AdvantageConfig(
                is_correction_enable=True,
                is_correction_type="icepop",
                is_correction_threshold=(0.3, 3.0),
                is_correction_sequence_threshold=(0.99, 1.01),
                score_centering_top_k=8,
                proximal_policy="interpolated",
                staleness_decay=0.7,
                max_token_staleness=4,
            ),
            options={"tau": 2.0},
        ),
    )
    seen = [torch.zeros(1)]
    assert PolicyObjective.from_config(config, kl_coef=0.05, seen=seen) == PolicyObjective(
        loss_type="ppo",
        aggregation="constant_length",
        longest_response=77,
        clip_low=0.1,
        clip_high=0.4,
        dual_clip=4.0,
        correction="icepop",
        correction_low=0.3,
        correction_high=3.0,
        correction_of_sequences=(0.99, 1.01),
        proximal_policy="interpolated",
        centers_scores=True,
        staleness_decay=0.7,
        max_staleness=4,
        kl_coef=0.05,
        kl_estimator="k3",
        entropy_coef=0.0,
        temperature=0.9,
        options={"tau": 2.0},
        seen=seen,
    )


@pytest.mark.parametrize("loss_type", ["ppo", "cispo"])
@pytest.mark.parametrize("correction", [None, "tis", "icepop", Gated(level="token", mode="clip")])
def test_a_centered_loss_has_no_gradient_on_average(loss_type, correction):
    """The mean, over a sampler whose probabilities are all recorded, of the gradients of every sampled token
    is 0; without centering it is not."""
    torch.manual_seed(1)
    q = torch.randn(VOCAB).softmax(-1)
    order = q.argsort(descending=True)
    samples = [trajectory(token_ids=[1, token]) for token in range(VOCAB)]
    tokens = np.empty((VOCAB, VOCAB), LIKELY)
    tokens["id"], tokens["log_prob"] = order, q[order].log()
    columns = {"rollout_log_probs": q.log().numpy(), "likely": tokens, "advantages": -3 * q.numpy()}
    batch = ExperienceRow.of(replace(batch_of(samples), **columns))
    means = []
    for centers in (True, False):
        objective = PolicyObjective(
            loss_type=loss_type,
            correction=correction,
            correction_low=0.8,
            correction_high=1.2,
            centers_scores=centers,
        )
        # the sum over tokens of A = -3 q is that of an advantage of -3 under q
        gradients, metrics = run_on(objective, [batch], LossNorm(1, 1))
        means.append(max(float(gradient.abs().max()) for gradient in gradients))
        assert ("policy/centered_mass" in metrics) == centers
    # the advantages are float32; A C is a mean over them, and C the same for all
    assert means[0] < 1e-5 < 0.05 < means[1]


def test_samples_without_likely_tokens_cannot_be_centered():
    batch = ExperienceRow.of(replace(random_batch([2]), likely=None))
    with refused(ErrorCode.INVALID_VALUE, flag="--algo.advantage.score_centering_top_k"):
        PolicyObjective(centers_scores=True)(Bigram(), batch, norm_of(batch))


def test_a_loss_and_a_correction_see_the_whole_row_and_their_options(monkeypatch):
    views = {}

    class Loss(PPO):
        needs_entropy = True
        tau: float = 1.0

        def __call__(self, row):
            views["loss"] = self.tau, row
            return super().__call__(row)

    class Weights(TIS):
        tau: float = 1.0

        def __call__(self, gap):
            views["correction"] = self.tau, gap
            return super().__call__(gap)

    class Proximal(Recomputed):
        tau: float = 1.0

        def __call__(self, *policies):
            views["proximal"] = self.tau, policies
            return super().__call__(*policies)

    for kinds, kind in ((POLICY_LOSSES, Loss), (CORRECTIONS, Weights), (PROXIMAL_POLICIES, Proximal)):
        monkeypatch.setitem(kinds.ours, "seeing", kind)
    batch = row_of(
        [2, 1],
        old_log_probs=torch.tensor([-1.0, -1.5, -2.0]),
        rollout_log_probs=torch.tensor([-1.25, -1.5, -1.0]),
        advantages=torch.tensor([1.0, 2.0, 3.0]),
        staleness=torch.tensor([0, 1, 2]),
    )
    log_probs, entropy, norm = (
        torch.tensor([-3.0, -2.0, -1.0]),
        torch.tensor([0.5, 0.25, 0.0]),
        LossNorm(3, 2),
    )
    PolicyObjective(
        loss_type="seeing",
        clip_low=0.1,
        clip_high=0.4,
        dual_clip=5.0,
        correction="seeing",
        correction_low=0.3,
        correction_high=3.0,
        correction_of_sequences=(0.9, 1.1),
        proximal_policy="seeing",
        options={"tau": 2.0},
    )(fixed(log_probs, entropy), batch, norm)
    assert [tau for tau, _ in views.values()] == [2.0] * 3
    row, gap, policies = (views[name][1] for name in ("loss", "correction", "proximal"))
    assert row.log_probs is log_probs and row.entropy is entropy and row.norm is norm
    assert row.log_ratio.tolist() == [-2.0, -0.5, 1.0]  # to the proximal policy, which is the old one
    assert row.proximal_log_probs.tolist() == row.old_log_probs.tolist() == [-1.0, -1.5, -2.0]
    assert row.rollout_log_probs is batch.rollout_log_probs and row.advantages is batch.advantages
    assert row.staleness is gap.staleness is batch.staleness
    assert row.counts.tolist() == gap.counts.tolist() == [2, 1]
    assert (row.clip_low, row.clip_high, row.dual_clip) == (0.1, 0.4, 5.0)
    assert gap.log_ratio.tolist() == [0.25, 0.0, -1.0]
    assert (gap.bounds, gap.sequence_bounds) == ((0.3, 3.0), (0.9, 1.1))
    known = [log_probs, batch.old_log_probs, batch.rollout_log_probs, batch.staleness]
    assert [x.tolist() for x in policies] == [x.tolist() for x in known]


def test_from_config_leaves_out_what_is_off():
    objective = PolicyObjective.from_config(PPOConfig(), kl_coef=0.05)
    assert objective.kl_coef == 0  # the KL is in the reward
    assert objective.correction is None
    assert objective.entropy_coef is None
    assert objective.aggregation is None
    assert not objective.centers_scores
