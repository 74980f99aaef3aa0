"""The policy's objective in PPO and related algorithms."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from torch import Tensor

from openrlhf.algorithms.centering import centering
from openrlhf.algorithms.corrections import CORRECTIONS
from openrlhf.algorithms.corrections.base import Correction, SamplerMismatch
from openrlhf.algorithms.kl import approx_kl, unbiased_gradient
from openrlhf.algorithms.log_ratio import LOG_RATIOS
from openrlhf.algorithms.policy_losses import POLICY_LOSSES
from openrlhf.algorithms.policy_losses.base import PolicyLoss, RowView
from openrlhf.algorithms.proximal import PROXIMAL_POLICIES
from openrlhf.algorithms.reductions import AGGREGATIONS, token_mean
from openrlhf.algorithms.staleness import staleness_weights
from openrlhf.config.ppo import (
    ISCorrectionType,
    KLEstimator,
    LossAggregation,
    PolicyLossType,
    PPOConfig,
    ProximalPolicyName,
)
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.rows import ExperienceRow, LossNorm
from openrlhf.types import not_none

IS_METRICS = "policy/is_weight_mean", "policy/is_masked_fraction"
STALENESS_METRICS = "policy/staleness_weight_mean", "policy/staleness_masked_fraction"


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyObjective:
    """The loss mean(w * v * surrogate) + kl_coef * mean(KL to the reference) - entropy_coef * mean(entropy).

    The surrogate is the policy loss `loss_type`, w the off-policy correction and v the weight of stale
    actions. Ratios are per token in `ppo` and `cispo`, and per sequence in `gspo`. In `gspo`, w is computed
    from the sequence's ratio pi_prox / pi_behave and v from its mean staleness, so a sequence is clipped,
    weighted or dropped as a whole. All three means are reduced by `aggregation`.

    With `centers_scores`, the surrogate of an action is w * loss + A * C, with C of `centering`.

    With the proximal policy `recomputed`, a row without `old_log_probs` belongs to a step with a single
    update, in which pi_prox equals the policy.
    """

    loss_type: PolicyLossType | type[PolicyLoss] = "ppo"
    aggregation: LossAggregation | None = None
    """Aggregation of the actions' losses. None: the default of `loss_type`."""
    longest_response: float = 1.0
    """Divisor of the aggregation `constant_length`, in actions."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    correction: ISCorrectionType | Correction | None = None
    correction_low: float = 0.5
    correction_high: float = 5.0
    correction_of_sequences: tuple[float, float] | None = None
    """Bounds of the sequence ratio in seq-mask-tis. None: the token bounds."""
    proximal_policy: ProximalPolicyName = "recomputed"
    centers_scores: bool = False
    """Subtract the sampler's expected score, see `centering`; for losses whose gradient is -A * grad log pi
    at the ratio 1, and corrections that are functions of a token's ratio."""
    staleness_decay: float = 1.0
    max_staleness: int | None = None
    """Staleness beyond which v is 0. None: no limit."""
    kl_coef: float = 0.0
    """Coefficient of the KL in the loss. 0: no KL."""
    kl_estimator: KLEstimator = "k1"
    kl_to_sampler: bool = False
    """Whether the KL is KL(sampler || policy) instead of KL(policy || reference)."""
    kl_unbiased_gradient: bool = False
    """See `unbiased_gradient`."""
    entropy_coef: float | None = None
    """Coefficient of the entropy at `temperature`. 0: the entropy is only reported; None: it is not
    computed."""
    temperature: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the selected classes. Options of other classes are ignored."""
    seen: list[Tensor] | None = None
    """Optional list to which the (A,) policy log-probs of each row are appended."""

    @classmethod
    def from_config(cls, config: PPOConfig, kl_coef: float, seen: list[Tensor] | None = None) -> Self:
        """Builds the objective from the flags. `kl_coef`: the KL controller's current coefficient."""
        actor, algo, advantage = config.actor, config.algo, config.algo.advantage
        clip_low, clip_high = actor.clip_range
        correction_low, correction_high = advantage.correction_bounds
        return cls(
            loss_type=actor.policy_loss_type,
            aggregation=actor.loss_aggregation,
            longest_response=config.longest_response,
            clip_low=clip_low,
            clip_high=clip_high,
            dual_clip=actor.dual_clip,
            correction=advantage.is_correction_type if advantage.is_correction_enable else advantage.gate,
            correction_low=correction_low,
            correction_high=correction_high,
            correction_of_sequences=advantage.is_correction_sequence_threshold,
            proximal_policy=advantage.proximal_policy,
            centers_scores=advantage.score_centering_top_k > 0,
            staleness_decay=advantage.staleness_decay,
            max_staleness=advantage.max_token_staleness,
            kl_coef=kl_coef if algo.kl.use_loss else 0.0,
            kl_estimator=algo.kl.estimator,
            kl_to_sampler=algo.kl.ref == "rollout",
            kl_unbiased_gradient=algo.kl.unbiased_gradient,
            entropy_coef=actor.entropy_coef,
            temperature=config.rollout.temperature,
            options=algo.options,
            seen=seen,
        )

    def __call__(
        self, model: Callable, batch: ExperienceRow, norm: LossNorm
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`model` is a `models.policy.PolicyModel`, possibly wrapped by an engine."""
        surrogate, counts = POLICY_LOSSES[self.loss_type].of(self.options), batch.row.num_actions
        log_ratio = LOG_RATIOS[surrogate.ratio]
        aggregation = AGGREGATIONS[self.aggregation or surrogate.aggregation()]
        items = not_none(batch.prompts) if aggregation.by_prompt else counts
        contribution = lambda x: aggregation.of(x, items, norm, self.longest_response)
        with_entropy = self.entropy_coef is not None or surrogate.needs_entropy
        likely = {"likely": _likely_ids(batch)} if self.centers_scores else {}
        output = model(batch.row, temperature=self.temperature, with_entropy=with_entropy, **likely)
        now = output.log_probs.detach()
        if self.seen is not None:
            self.seen.append(now)
        proximal = PROXIMAL_POLICIES[self.proximal_policy].of(self.options)(
            now, batch.old_log_probs, batch.rollout_log_probs, batch.staleness
        )
        policy_loss, at_low, at_high = surrogate(
            RowView(
                log_probs=output.log_probs,
                log_ratio=log_ratio(output.log_probs, proximal, counts),
                advantages=batch.advantages,
                counts=counts,
                clip_low=self.clip_low,
                clip_high=self.clip_high,
                dual_clip=self.dual_clip,
                proximal_log_probs=proximal,
                old_log_probs=batch.old_log_probs,
                rollout_log_probs=batch.rollout_log_probs,
                staleness=batch.staleness,
                entropy=output.entropy,
                norm=norm,
            )
        )
        metrics = {
            "policy/ppo_kl": token_mean(proximal - output.log_probs, norm),
            "policy/clip_fraction": token_mean((at_low | at_high).float(), norm),
            "policy/clip_low_fraction": token_mean(at_low.float(), norm),
            "policy/clip_high_fraction": token_mean(at_high.float(), norm),
        }

        def weighted(loss: Tensor, weights: Tensor, mean: str, masked: str) -> Tensor:
            metrics[mean] = token_mean(weights, norm)
            metrics[masked] = token_mean((weights == 0).float(), norm)
            return loss * weights

        if self.correction is not None:
            weights = self._correct(batch, proximal, batch.rollout_log_probs, surrogate.ratio)
            policy_loss = weighted(policy_loss, weights, *IS_METRICS)
        if self.centers_scores:  # with the correction's weights, so it comes after them
            policy_loss = policy_loss + self._centering(batch, not_none(output.likely), norm, metrics)
        if batch.staleness is not None and (self.staleness_decay < 1 or self.max_staleness is not None):
            limits = self.staleness_decay, self.max_staleness
            weights = staleness_weights(batch.staleness, counts, *limits, surrogate.ratio)
            policy_loss = weighted(policy_loss, weights, *STALENESS_METRICS)
        loss = metrics["policy/loss"] = contribution(policy_loss)
        if self.kl_coef > 0:
            kl = self._kl(batch, output.log_probs, proximal)
            metrics["policy/kl_loss"] = contribution(kl)
            loss = loss + self.kl_coef * metrics["policy/kl_loss"]
        if output.entropy is not None:
            metrics["policy/entropy"] = token_mean(output.entropy, norm)
        if self.entropy_coef:
            loss = loss - self.entropy_coef * contribution(not_none(output.entropy))
        return loss, {name: value.detach() for name, value in metrics.items()}

    def _kl(self, batch: ExperienceRow, log_probs: Tensor, proximal: Tensor) -> Tensor:
        """Returns the estimate of the KL at each action, (A,)."""
        if self.kl_to_sampler:  # the sampler's own samples, so its log-probs come first
            return approx_kl(batch.rollout_log_probs, log_probs, self.kl_estimator)
        reference = not_none(batch.ref_log_probs)
        kl = approx_kl(log_probs, reference, self.kl_estimator)
        if not self.kl_unbiased_gradient:
            return kl
        old = proximal if batch.old_log_probs is None else batch.old_log_probs
        return unbiased_gradient(kl, log_probs, reference, old)

    def _centering(
        self, batch: ExperienceRow, likely: Tensor, norm: LossNorm, metrics: dict[str, Tensor]
    ) -> Tensor:
        """Returns A * C of each action, (A,), and adds its metrics."""
        sampler, correct = not_none(batch.likely_log_probs), lambda p, q: self._correct(batch, p, q)
        weigh = None if self.correction is None else correct
        coefs = centering(likely.detach(), sampler, weigh, batch.row.log_masses)
        metrics["policy/centered_mass"] = token_mean(sampler.exp().sum(-1), norm)
        metrics["policy/centering_shift"] = token_mean(coefs.abs().sum(-1), norm)
        return batch.advantages * (coefs * likely).sum(-1)

    def _correct(
        self,
        batch: ExperienceRow,
        log_probs: Tensor,
        sampler: Tensor,
        ratio: Literal["token", "sequence"] = "token",
    ) -> Tensor:
        """Returns the weights of the off-policy correction, in the shape of `log_probs` and `sampler`."""
        counts, correct = batch.row.num_actions, not_none(self.correction)
        if not isinstance(correct, Correction):
            correct = CORRECTIONS[correct].of(self.options)
        return correct(
            SamplerMismatch(
                log_ratio=LOG_RATIOS[ratio](log_probs, sampler, counts),
                counts=counts,
                log_probs=log_probs,
                rollout_log_probs=sampler,
                bounds=(self.correction_low, self.correction_high),
                sequence_bounds=self.correction_of_sequences,
                staleness=batch.staleness,
            )
        )


def _likely_ids(batch: ExperienceRow) -> Tensor:
    if batch.likely_ids is None:
        text = "the samples lack the sampler's likely tokens: it did not record them, or did not sample these"
        raise UsageError(
            ErrorCode.INVALID_VALUE, f"{text}; set 0", flag="--algo.advantage.score_centering_top_k"
        )
    return batch.likely_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenGradient:
    """The loss sum(g * log_probs), whose gradient with respect to the log-probs is g, the batch's column
    `advantages`. So a loss that was computed elsewhere, from the log-probs of the whole batch, reaches the
    weights however batch and model are distributed over ranks."""

    temperature: float

    def __call__(
        self, model: Callable, batch: ExperienceRow, norm: LossNorm
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`model` is a `models.policy.PolicyModel`, possibly wrapped by an engine."""
        return (batch.advantages * model(batch.row, temperature=self.temperature).log_probs).sum(), {}
