"""Knowledge distillation on given texts."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from openrlhf.algorithms.distillation import Divergence, LinearHead
from openrlhf.algorithms.reductions import token_mean
from openrlhf.algorithms.token_loss import negative_log_likelihood
from openrlhf.models.student import Lesson
from openrlhf.types import LossNorm, PackedRow


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationObjective:
    """(1 - coef) NLL + coef T^2 KL, both means over the step's actions.

    With logits divided by T the gradient of the KL shrinks by T^2, which the factor makes up for.
    https://arxiv.org/abs/1503.02531
    """

    teacher: Callable[[PackedRow], Tensor]
    """(A, H) hidden states, see `models.student.TeacherModel`."""
    teacher_head: LinearHead
    coef: float
    temperature: float = 1.0
    kind: Divergence = "forward_kl"

    def __call__(self, model: Callable, batch: PackedRow, norm: LossNorm) -> tuple[Tensor, dict[str, Tensor]]:
        """`model` is a `models.student.StudentModel`, possibly wrapped by an engine."""
        lesson = Lesson(self.teacher(batch), self.teacher_head)
        scores = model(batch, lesson=lesson, temperature=self.temperature, kind=self.kind)
        nll = token_mean(negative_log_likelihood(scores.log_probs), norm)
        divergence = token_mean(scores.divergence, norm)
        loss = (1 - self.coef) * nll + self.coef * self.temperature**2 * divergence
        metrics = {"kd/loss": loss.detach(), "kd/nll": nll.detach(), "kd/kl": divergence.detach()}
        return loss, metrics
