"""Computes the divergence between student and teacher in chunks, so that the logits of a batch never exist at
once."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openrlhf.algorithms.logprobs import HeadGradients, HeadLogits, chunks, rows_of_chunk

Divergence = Literal["forward_kl", "reverse_kl"]
"""Direction of the divergence: KL(teacher || student) or KL(student || teacher)."""


class LinearHead(NamedTuple):
    """Parameters of an output head: logits = scale * cap(hidden @ weight.T + bias), as in
    `linear_log_probs`."""

    weight: Tensor  # (V, H)
    bias: Tensor | None = None  # (V,)
    scale: float = 1.0
    softcap: float | None = None


def linear_divergence(
    hidden: Tensor,
    head: LinearHead,
    teacher_hidden: Tensor,
    teacher_head: LinearHead,
    *,
    kind: Divergence,
    chunk: int | None = None,
) -> Tensor:
    """Computes the divergence between student and teacher at each action, (A,) float32, from hidden states
    (A, H) of the student and (A, H') of the teacher. s and t are the distributions of student and teacher,
    each over the V token ids that both heads have.

    forward_kl: KL(t || s) = sum_v t_v (log t_v - log s_v),   d/dz = s - t
    reverse_kl: KL(s || t) = sum_v s_v (log s_v - log t_v),   d/dz = s * (log s - log t - KL(s || t))

    Differentiable in hidden, head.weight and head.bias. At most `chunk` rows of float32 logits of each model
    exist at a time; the backward pass recomputes them. A temperature goes into the scale of both heads.
    """
    size = min(len(head.weight), len(teacher_head.weight))
    chunk = chunk or rows_of_chunk(head.weight[:size], copies=2)
    return _LinearDivergence.apply(
        hidden,
        head.weight,
        head.bias,
        head.scale,
        head.softcap,
        teacher_hidden,
        teacher_head,
        kind,
        size,
        chunk,
    )


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, scale, softcap, teacher_hidden, teacher_head, kind, size, chunk):
        student = _first(LinearHead(weight, bias, scale, softcap), size)
        teacher = _first(teacher_head, size)
        divergence = hidden.new_empty(len(hidden), dtype=student.dtype)
        for rows in chunks(len(hidden), chunk):
            s, t = student(hidden[rows]).log_softmax(-1), teacher(teacher_hidden[rows]).log_softmax(-1)
            divergence[rows] = _divergence(s, t, kind)
        ctx.save_for_backward(hidden, teacher_hidden)
        # Not saved tensors: ZeRO-3 empties a parameter between the passes and fills it with a new tensor.
        ctx.weight, ctx.bias, ctx.teacher_head = weight, bias, teacher_head
        ctx.scale, ctx.softcap, ctx.kind, ctx.size, ctx.chunk = scale, softcap, kind, size, chunk
        return divergence

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  torch does not type this decorator
    def backward(ctx, grad_divergence):
        hidden, teacher_hidden = ctx.saved_tensors
        weight, bias, size = ctx.weight, ctx.bias, ctx.size
        student = _first(LinearHead(weight, bias, ctx.scale, ctx.softcap), size)
        teacher = _first(ctx.teacher_head, size)
        grads = HeadGradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        grad_divergence = grad_divergence * ctx.scale

        def add(
            rows: slice,
        ) -> None:  # a function, so that each chunk's logits are freed before the next chunk
            logits = student(hidden[rows])
            slope = student.slope(logits)
            s, t = logits.log_softmax(-1), teacher(teacher_hidden[rows]).log_softmax(-1)
            if ctx.kind == "forward_kl":
                grad = s.exp_().sub_(t.exp_())
            else:
                grad = s.exp() * (s - t - _divergence(s, t, ctx.kind)[:, None])
            grads.add(rows, hidden, weight, grad.mul_(grad_divergence[rows, None]), slope)

        for rows in chunks(len(hidden), ctx.chunk):
            add(rows)
        return *grads.totals(), *[None] * 7


def _first(head: LinearHead, size: int) -> HeadLogits:
    bias = None if head.bias is None else head.bias[:size]
    return HeadLogits(head.weight[:size], bias, head.scale, head.softcap)


def _divergence(s: Tensor, t: Tensor, kind: Divergence) -> Tensor:
    """Returns the divergences (C,) of the student's log-probs s and the teacher's log-probs t, both (C,
    V)."""
    return (t.exp() * (t - s)).sum(-1) if kind == "forward_kl" else (s.exp() * (s - t)).sum(-1)
