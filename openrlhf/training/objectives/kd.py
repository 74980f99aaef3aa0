"""The objective of knowledge distillation on the answers of a dataset."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from openrlhf.algorithms.distillation import Divergence, LinearHead
from openrlhf.algorithms.reductions import token_mean
from openrlhf.models.student import TeacherTargets
from openrlhf.rows import LossNorm, PackedRow


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationObjective:
    """The loss (1 - coef) NLL + coef T^2 KL. NLL and KL are means over the step's actions.

    Dividing the logits by T scales the gradient of the KL by 1 / T^2, for which the factor T^2 compensates:
    https://arxiv.org/abs/1503.02531.
    """

    teacher: Callable[[PackedRow], Tensor]
    """Returns the teacher's hidden states (A, H), see `models.student.TeacherModel`."""
    teacher_head: LinearHead
    coef: float
    temperature: float = 1.0
    kind: Divergence = "forward_kl"

    def __call__(self, model: Callable, batch: PackedRow, norm: LossNorm) -> tuple[Tensor, dict[str, Tensor]]:
        """`model` is a `models.student.StudentModel`, possibly wrapped by an engine."""
        teacher_targets = TeacherTargets(self.teacher(batch), self.teacher_head)
        scores = model(batch, teacher_targets=teacher_targets, temperature=self.temperature, kind=self.kind)
        nll = token_mean(-scores.log_probs, norm)
        divergence = token_mean(scores.divergence, norm)
        loss = (1 - self.coef) * nll + self.coef * self.temperature**2 * divergence
        metrics = {"kd/loss": loss.detach(), "kd/nll": nll.detach(), "kd/kl": divergence.detach()}
        return loss, metrics
