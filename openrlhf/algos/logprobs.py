"""Log-probabilities of chosen tokens straight from hidden states, without the logits of a whole batch."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LOGITS_BYTES = 256 * 2**20
"""What the float32 logits of one chunk may take. The peak is about that; with entropy or a softcap, about
three times that."""


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    scale: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    with_entropy: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """hidden (A, H), weight (V, H), targets (A,) -> log-probs and, if asked, entropies, both (A,) float32.

    z = scale * cap(hidden @ weight.T + bias),   log p(y) = z_y - logsumexp(z),   H = -sum_v p_v log p_v

    `scale` is 1 / temperature (times the model's own logit scale); `cap(x)` is softcap * tanh(x / softcap),
    or x. Both results are differentiable in hidden, weight and bias. At most `chunk` rows of logits exist at
    a time, in float32 also if the weight is not; the backward pass computes them again. Without actions the
    results are empty, and their gradients are zeros, so that collectives over gradients still find their
    partners.
    """
    chunk = chunk or max(1, LOGITS_BYTES // (4 * len(weight)))
    log_probs, entropy = _LinearLogProbs.apply(
        hidden, weight, bias, targets, scale, softcap, with_entropy, chunk
    )
    return log_probs, entropy


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, scale, softcap, with_entropy, chunk):
        log_z = hidden.new_empty(len(hidden), dtype=_accumulation_dtype(hidden))
        log_probs = torch.empty_like(log_z)
        entropy = torch.empty_like(log_z) if with_entropy else None
        compute_logits = HeadLogits(weight, bias, scale, softcap)
        for rows in chunks(len(hidden), chunk):
            logits, _ = compute_logits(hidden[rows])
            chosen, largest = logits.gather(-1, targets[rows, None])[:, 0], logits.amax(-1)
            # logits.logsumexp(-1) in place: without a second tensor of this size
            exp = logits.sub_(largest[:, None]).exp_()
            total = exp.sum(-1)
            log_z[rows] = largest + total.log()
            log_probs[rows] = chosen - log_z[rows]
            if entropy is not None:
                entropy[rows] = torch.special.entr(exp.div_(total[:, None])).sum(-1)

        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, targets, log_z, entropy)
        # Not saved tensors: ZeRO-3 empties a parameter between the passes and fills it with a new tensor.
        ctx.weight, ctx.bias = weight, bias
        ctx.scale, ctx.softcap, ctx.chunk = scale, softcap, chunk
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  torch does not type this decorator
    def backward(ctx, grad_log_probs, grad_entropy):
        hidden, targets, log_z, entropy = ctx.saved_tensors
        weight, bias, dtype = ctx.weight, ctx.bias, log_z.dtype
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=dtype) if needs_bias else None
        grad_log_probs = torch.zeros_like(log_z) if grad_log_probs is None else grad_log_probs * ctx.scale
        if grad_entropy is not None:
            grad_entropy = grad_entropy * ctx.scale

        compute_logits = HeadLogits(weight, bias, ctx.scale, ctx.softcap)
        for rows in chunks(len(hidden), ctx.chunk):
            logits, cap_slope = compute_logits(hidden[rows])
            all_log_probs = logits.sub_(log_z[rows, None])
            # d log p(y) / dz = onehot(y) - p,   dH / dz = -p * (log p + H)
            slope = grad_log_probs[rows, None]
            if grad_entropy is not None:
                slope = slope + grad_entropy[rows, None] * (all_log_probs + entropy[rows, None])
            grad = all_log_probs.exp_().mul_(-slope)
            grad.scatter_add_(-1, targets[rows, None], grad_log_probs[rows, None])
            if cap_slope is not None:
                grad.mul_(cap_slope)

            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad @ weight
            if grad_weight is not None:
                _add_product(grad_weight, grad.t(), hidden[rows])
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 5,
        )


def linear_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """hidden (A, H), weight (V, H) -> (A, V) hidden @ weight.T + bias, float32 also if the weight is not.
    Differentiable in all three; gradients have their types."""
    return _LinearLogits.apply(hidden, weight, bias)


class _LinearLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias):
        ctx.save_for_backward(hidden)
        ctx.weight, ctx.bias = weight, bias  # as in _LinearLogProbs
        return HeadLogits(weight, bias, 1.0, None)(hidden)[0]

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  torch does not type this decorator
    def backward(ctx, grad):
        (hidden,), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        grad_bias = None if bias is None else grad.sum(0).to(bias.dtype)
        grad = grad.to(weight.dtype)
        needs_hidden, needs_weight, _ = ctx.needs_input_grad
        return (
            grad @ weight if needs_hidden else None,
            grad.t() @ hidden if needs_weight else None,
            grad_bias,
        )


class HeadLogits:
    """hidden (C, H) -> scaled logits (C, V) in at least float32 and, with a softcap, the slope of the cap."""

    def __init__(self, weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None) -> None:
        self.dtype = _accumulation_dtype(weight)
        # Half-precision factors with a float32 product: there is no such kernel on the CPU.
        self.has_kernel = weight.dtype != self.dtype and weight.device.type != "cpu"
        self.weight = weight.detach() if self.has_kernel else weight.detach().to(self.dtype)
        self.bias, self.scale, self.softcap = bias, scale, softcap

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.has_kernel:
            logits = torch.mm(hidden, self.weight.t(), out_dtype=self.dtype)
        else:
            logits = hidden.to(self.dtype) @ self.weight.t()
        if self.bias is not None:
            logits += self.bias
        if self.softcap is None:
            return logits if self.scale == 1 else logits.mul_(self.scale), None
        capped = logits.div_(self.softcap).tanh_()
        return capped * (self.softcap * self.scale), 1 - capped**2


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, without the product on the way where the types allow it."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def _accumulation_dtype(x: Tensor) -> torch.dtype:
    """float32, and float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def chunks(length: int, size: int) -> list[slice]:
    """range(length) in slices of at most `size`."""
    return [slice(start, start + size) for start in range(0, length, size)]
