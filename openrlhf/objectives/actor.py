"""The policy's objective in PPO and its relatives."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from openrlhf.algos.correction import CORRECTIONS
from openrlhf.algos.kl import approx_kl
from openrlhf.algos.policy_loss import clipped_loss, sequence_log_ratio, token_log_ratio
from openrlhf.algos.reduce import sample_mean, token_mean
from openrlhf.config.choices import ISCorrectionType, KLEstimator, PolicyLossType
from openrlhf.config.ppo import ActorConfig, AlgoConfig
from openrlhf.types import ExperienceRow, LossNorm, present


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """Everything that differs between policy losses."""

    log_ratio: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(log_probs (A,), old_log_probs (A,), counts (B,)) -> (A,)"""
    share: Callable[[Tensor, Tensor, LossNorm], Tensor]
    """(loss (A,), counts (B,), norm) -> ()"""


POLICY_LOSSES: dict[PolicyLossType, PolicyLoss] = {
    "ppo": PolicyLoss(log_ratio=token_log_ratio, share=lambda loss, counts, norm: token_mean(loss, norm)),
    "gspo": PolicyLoss(log_ratio=sequence_log_ratio, share=sample_mean),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorObjective:
    """share(w * clipped loss) + kl_coef * share(KL to the reference) - entropy_coef * share(entropy)

    The ratio pi / pi_prox, the correction w of the sampler's mismatch and the mean over actions are those of
    `loss_type`: of tokens in `ppo`, of sequences in `gspo`. So in `gspo` w is made of the sequence's ratio
    pi_prox / pi_behave, and one sequence is clipped, weighted or dropped as a whole.
    """

    loss_type: PolicyLossType = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    correction: ISCorrectionType | None = None
    correction_low: float = 0.5
    correction_high: float = 5.0
    kl_coef: float = 0.0
    """0 leaves the KL out of the loss."""
    kl_estimator: KLEstimator = "k1"
    entropy_coef: float | None = None
    """None does not compute the entropy, 0 only reports it. It is that of the tempered distribution."""
    temperature: float = 1.0

    @classmethod
    def from_config(cls, actor: ActorConfig, algo: AlgoConfig, temperature: float, kl_coef: float) -> Self:
        """`kl_coef` is the coefficient as the controller has it now."""
        advantage = algo.advantage
        clip_low, clip_high = actor.clip_range
        correction_low, correction_high = advantage.is_correction_threshold
        return cls(
            loss_type=actor.policy_loss_type,
            clip_low=clip_low,
            clip_high=clip_high,
            dual_clip=actor.dual_clip,
            correction=advantage.is_correction_type if advantage.is_correction_enable else None,
            correction_low=correction_low,
            correction_high=correction_high,
            kl_coef=kl_coef if algo.kl.use_loss else 0.0,
            kl_estimator=algo.kl.estimator,
            entropy_coef=actor.entropy_coef,
            temperature=temperature,
        )

    def __call__(
        self, model: Callable, batch: ExperienceRow, norm: LossNorm
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`model` is a `models.policy.PolicyModel`, possibly wrapped by an engine."""
        kind, counts = POLICY_LOSSES[self.loss_type], batch.row.num_actions
        scores = model(batch.row, temperature=self.temperature, with_entropy=self.entropy_coef is not None)
        log_ratio = kind.log_ratio(scores.log_probs, batch.old_log_probs, counts)
        policy_loss, clipped = clipped_loss(
            log_ratio,
            batch.advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
        metrics = {
            "policy/ppo_kl": token_mean(batch.old_log_probs - scores.log_probs, norm),
            "policy/clip_fraction": token_mean(clipped.float(), norm),
        }
        if self.correction is not None:
            mismatch = kind.log_ratio(batch.old_log_probs, batch.rollout_log_probs, counts)
            correct = CORRECTIONS[self.correction]
            weights = correct(mismatch, counts, self.correction_low, self.correction_high)
            policy_loss = policy_loss * weights
            metrics["policy/is_weight_mean"] = token_mean(weights, norm)
            metrics["policy/is_masked_fraction"] = token_mean((weights == 0).float(), norm)

        loss = metrics["policy/loss"] = kind.share(policy_loss, counts, norm)
        if self.kl_coef > 0:
            kl = approx_kl(scores.log_probs, present(batch.ref_log_probs), self.kl_estimator)
            metrics["policy/kl_loss"] = kind.share(kl, counts, norm)
            loss = loss + self.kl_coef * metrics["policy/kl_loss"]
        if scores.entropy is not None:
            metrics["policy/entropy"] = kind.share(scores.entropy, counts, norm)
        if self.entropy_coef:
            loss = loss - self.entropy_coef * metrics["policy/entropy"]
        return loss, {name: value.detach() for name, value in metrics.items()}
