"""The objective of DPO, IPO and cDPO."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from openrlhf.algorithms.preference.dpo import dpo_loss
from openrlhf.algorithms.preference.ipo import ipo_loss
from openrlhf.rows import LossNorm, PairRow
from openrlhf.training.objectives.reference import Reference, answer_log_probs, reference_log_probs


def pair_log_probs(model: Callable, batch: PairRow) -> Tensor:
    """Returns the summed log-probs of the chosen and the rejected answer of each pair, (P, 2)."""
    return batch.by_pair(answer_log_probs(model, batch.row))


@dataclass(frozen=True, kw_only=True, slots=True)
class DPOObjective:
    """The mean over pairs of `dpo_loss` or `ipo_loss`, plus `nll_coef` times the mean over pairs of the
    chosen answer's mean negative log-likelihood."""

    beta: float
    ipo: bool = False
    label_smoothing: float = 0.0
    nll_coef: float = 0.0
    reference: Reference | None = None
    """Function that computes reference log-probs; not needed if they are precomputed."""

    def __call__(self, model: Callable, batch: PairRow, norm: LossNorm) -> tuple[Tensor, dict[str, Tensor]]:
        """`model` is a `models.policy.PolicyModel`, possibly wrapped by an engine."""
        ref = reference_log_probs(batch.ref_log_probs, self.reference, batch.row)
        log_probs = answer_log_probs(model, batch.row)
        ratios = batch.by_pair(log_probs) - batch.by_pair(ref)
        h = ratios[:, 0] - ratios[:, 1]
        losses = (
            ipo_loss(h, beta=self.beta)
            if self.ipo
            else dpo_loss(h, beta=self.beta, label_smoothing=self.label_smoothing)
        )
        lengths = batch.by_pair(batch.row.num_actions)[:, 0].clamp(min=1)
        nll = (-batch.by_pair(log_probs)[:, 0] / lengths).sum() / norm.num_sequences
        loss = losses.sum() / norm.num_sequences + self.nll_coef * nll
        rewards = self.beta * ratios.detach()
        mean = lambda x: x.sum() / norm.num_sequences
        metrics = {
            "dpo/loss": loss.detach(),
            "dpo/accuracy": mean(h > 0),
            "dpo/chosen_reward": mean(rewards[:, 0]),
            "dpo/rejected_reward": mean(rewards[:, 1]),
            "dpo/chosen_nll": nll.detach(),
        }
        return loss, metrics
