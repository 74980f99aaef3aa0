"""Compares student and teacher models over the whole vocabulary, without computing all logits of either at
once."""

from typing import NamedTuple, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from openrlhf.algorithms.distillation import Divergence, LinearHead, linear_divergence
from openrlhf.algorithms.logprobs import linear_log_probs
from openrlhf.models.backbone import RowModel, action_states
from openrlhf.models.policy import get_head, head_options
from openrlhf.rows import PackedRow


class TeacherTargets(NamedTuple):
    """The teacher's distributions at the actions of a row."""

    hidden: Tensor  # (A, H) inputs of the teacher's head, one for each action
    head: LinearHead


class TeacherModel(RowModel):
    """The teacher of a distillation. It returns hidden states, from which `StudentModel` computes the
    teacher's logits."""

    def forward(self, row: PackedRow) -> Tensor:
        """Returns the hidden states (A, H) that predict the actions. Under sequence parallelism ranks gather
        them: if only one of teacher and student shares common prefixes, their slices have different
        actions."""
        states = action_states(self.model, row, row.actions - 1)
        return states.whole(states.hidden)


def linear_head(model: PreTrainedModel) -> LinearHead:
    """Returns the head of a causal language model, with the architecture's scale and softcap of logits."""
    head, (scale, softcap) = cast(nn.Linear, get_head(model)), head_options(model.config)
    return LinearHead(head.weight, head.bias, scale, softcap)


class StudentScores(NamedTuple):
    """The output of the student for the actions of a row."""

    log_probs: Tensor  # (A,) float32
    divergence: Tensor  # (A,) float32, between teacher and student


class StudentModel(RowModel):
    """The student of a distillation."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.head_options = head_options(model.config)
        get_head(model).__class__ = StudentHead  # changes only the class: ZeRO-3's hooks on the module stay

    def forward(
        self, row: PackedRow, teacher_targets: TeacherTargets, temperature: float, kind: Divergence
    ) -> StudentScores:
        """Returns log-probs of the actions and divergences from the teacher. `temperature` divides both
        models' logits in the divergence, but not in the log-probs."""
        states = action_states(self.model, row, row.actions - 1)
        scale, softcap = self.head_options
        log_probs, divergence = get_head(self.model)(
            states.hidden,
            row.token_ids[row.actions[states.own]],
            teacher_targets._replace(hidden=teacher_targets.hidden[states.own]),
            scale=scale,
            softcap=softcap,
            temperature=temperature,
            kind=kind,
        )
        return StudentScores(states.whole(log_probs), states.whole(divergence))


class StudentHead(nn.Linear):
    """A language model head that can also return log-probs and divergences. It is called as a module so that
    ZeRO-3 gathers its weight."""

    # pyrefly: ignore[bad-override]  without targets of a teacher it is a linear layer
    def forward(
        self,
        input: Tensor,
        targets: Tensor | None = None,
        teacher_targets: TeacherTargets | None = None,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
        temperature: float = 1.0,
        kind: Divergence = "forward_kl",
    ):
        if targets is None or teacher_targets is None:
            return super().forward(input)
        log_probs, _ = linear_log_probs(
            input, self.weight, targets, scale=scale, bias=self.bias, softcap=softcap
        )
        own = LinearHead(self.weight, self.bias, scale / temperature, softcap)
        teacher = teacher_targets.head._replace(scale=teacher_targets.head.scale / temperature)
        divergence = linear_divergence(input, own, teacher_targets.hidden, teacher, kind=kind)
        return StudentScores(log_probs, divergence)
