"""Computes log-probs and entropies of a linear head in chunks, so that the logits of a batch never exist at
once."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

LOGITS_BYTES = 256 * 2**20
"""Bytes of the float32 logits of one chunk on a CPU. Peak memory is about as large; a softcap and the
gradient of the entropy each add the same amount."""

SHARE_OF_GPU = 1 / 64
"""Share of a GPU's memory for the float32 logits of one chunk. Per head weight, a chunk of C rows costs 8 C
floating-point operations (four matrix products) and 8 bytes of memory traffic (reading and writing the
gradient). An H100 does 240 operations in the time of one byte. With a vocabulary of 150,000, 2,200 rows fit
into this share and the traffic takes 11 % of the products' time; with the 440 rows of a CPU's chunk it would
take 55 %."""

FAR = 80.0
"""Difference between the largest logit inside the top-p/top-k nucleus and the logits of all tokens outside
it. The resulting probability, 2e-35, changes no sum; a smaller one could be denormal, which is slow on
CPUs."""


class Vocabulary:
    """Operations on the logits (C, V) of a head whose whole vocabulary is on this rank."""

    def largest(self, logits: Tensor) -> Tensor:
        """Returns the largest logit of each row, (C,)."""
        return logits.amax(-1)

    def total(self, x: Tensor) -> Tensor:
        """Sums `x` over the shards of the vocabulary, in place."""
        return x

    def at(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Returns the logits (C, K) of `ids` (C, K)."""
        return logits.gather(-1, ids)

    def put(self, logits: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        """Sets the logits of `ids` to `values` (C, K), in place. `values` must not be below the current
        logits."""
        return logits.scatter_(-1, ids, values)

    def add(self, x: Tensor, ids: Tensor, values: Tensor) -> None:
        """Adds `values` (C, K) to x (C, V) at `ids`, in place."""
        x.scatter_add_(-1, ids, values)

    def joined(self, logits: Tensor) -> Tensor:
        """Returns the logits of the whole vocabulary, without a gradient."""
        return logits


WHOLE = Vocabulary()


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedVocabulary(Vocabulary):
    """Operations on the logits of a vocabulary-parallel head: each rank of `group` has the weights of `size`
    tokens, in rank order. The ranks have the same hidden states and exchange a few numbers per row; only
    `joined` exchanges logits."""

    group: dist.ProcessGroup
    size: int

    def largest(self, logits: Tensor) -> Tensor:
        found = logits.amax(-1)
        dist.all_reduce(found, dist.ReduceOp.MAX, self.group)
        return found

    def total(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.group)
        return x

    def at(self, logits: Tensor, ids: Tensor) -> Tensor:
        here, places = self.own(ids)
        return self.total(logits.gather(-1, places).masked_fill_(~here, 0))

    def put(self, logits: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        here, places = self.own(ids)
        return logits.scatter_reduce_(-1, places, values.masked_fill(~here, -torch.inf), "amax")

    def add(self, x: Tensor, ids: Tensor, values: Tensor) -> None:
        here, places = self.own(ids)
        x.scatter_add_(-1, places, values.masked_fill(~here, 0))

    def joined(self, logits: Tensor) -> Tensor:
        parts = [torch.empty_like(logits) for _ in range(self.group.size())]
        dist.all_gather(parts, logits.detach().contiguous(), self.group)
        return torch.cat(parts, -1)

    def own(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a mask of the `ids` on this rank (bool), and their local indices; 0 for ids of other
        ranks."""
        places = ids - self.group.rank() * self.size
        here = (places >= 0) & (places < self.size)
        return here, places.where(here, 0)


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    scale: float | Tensor = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    kept: Tensor | None = None,
    with_entropy: bool = False,
    chunk: int | None = None,
    vocabulary: Vocabulary = WHOLE,
) -> tuple[Tensor, Tensor | None]:
    """Computes log-probs of `targets`, (A,) or (A, T) for T tokens at each action, in the shape of `targets`,
    and, with `with_entropy`, entropies (A,), in float32. Maps hidden (A, H) to logits z (A, V) with weight
    (V, H) and bias (V,).

    z = scale * cap(hidden @ weight.T + bias),   log p(y) = z_y - logsumexp(z),   H = -sum_v p_v log p_v

    `scale` is 1 / temperature (times the model's own logit scale), a number or one for each action, (A,);
    `cap(x)` is softcap * tanh(x / softcap), or x. `kept` (A, K) has the ids of each action's top-p/top-k
    nucleus, including its target; z, the sum over v and the gradient are then restricted to these tokens. A
    row of `kept` may repeat a token; a row of -1 means the whole vocabulary.

    Both results are differentiable in hidden, weight and bias. At most `chunk` rows of logits exist at a
    time, in float32 even if the weight is not; the backward pass recomputes them. Without actions the results
    are empty and their gradients zeros, so that every rank still takes part in collectives over gradients.
    With a `SharedVocabulary` each rank passes its shard of `weight` and `bias`.
    """
    chunk = chunk or rows_of_chunk(weight)
    if isinstance(scale, Tensor):
        scale = scale.to(_accumulation_dtype(hidden))
    arguments = hidden, weight, bias, targets, scale, softcap, kept, vocabulary, chunk
    if not with_entropy and targets.dim() == 1 and _only_hidden_learns(hidden, weight, bias):
        return _LogProbsForward.apply(*arguments, False), None
    return _LinearLogProbs.apply(*arguments, with_entropy)


def sum_of_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    scale: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
    vocabulary: Vocabulary = WHOLE,
) -> Tensor:
    """Returns the sum () of `linear_log_probs`. The forward pass computes the gradients too, while the logits
    exist, so forward and backward together have three products of the head's size instead of four."""
    chunk = chunk or rows_of_chunk(weight)
    arguments = hidden, weight, bias, targets, scale, softcap, None, vocabulary, chunk
    if not torch.is_grad_enabled():
        return _LinearLogProbs.apply(*arguments, False)[0].sum()
    return _LogProbsForward.apply(*arguments, True)


def rows_of_chunk(weight: Tensor, copies: int = 1) -> int:
    """Returns the number of rows per chunk for a head `weight` (V, H), if `copies` float32 tensors of the
    chunk's logits exist at a time."""
    gpu = torch.cuda.get_device_properties(weight.device).total_memory if weight.is_cuda else None
    return max(1, logits_bytes(gpu) // (4 * copies * len(weight)))


def logits_bytes(gpu: int | None) -> int:
    """Returns the limit of the float32 logits of one chunk in bytes. `gpu`: the GPU's memory in bytes; None
    on a CPU."""
    return LOGITS_BYTES if gpu is None else max(LOGITS_BYTES, int(gpu * SHARE_OF_GPU))


def _only_hidden_learns(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    head_learns = weight.requires_grad or (bias is not None and bias.requires_grad)
    return torch.is_grad_enabled() and hidden.requires_grad and not head_learns


# Each chunk is processed in a function of its own, so that its logits are freed before those of the next one.


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, scale, softcap, kept, vocabulary, chunk, with_entropy):
        log_z = hidden.new_empty(len(hidden), dtype=_accumulation_dtype(hidden))
        log_probs = log_z.new_empty(targets.shape)
        entropy = torch.empty_like(log_z) if with_entropy else None
        head = HeadLogits(weight, bias, scale, softcap)
        for rows in chunks(len(hidden), chunk):
            scores = _score(
                _restrict_to_support(head(hidden[rows], rows), kept, rows, vocabulary),
                targets[rows],
                with_entropy,
                vocabulary,
            )
            for whole, of_rows in zip((log_z, log_probs, entropy), scores, strict=True):
                if whole is not None and of_rows is not None:
                    whole[rows] = of_rows

        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, targets, kept, log_z, entropy)
        # Not saved tensors: ZeRO-3 empties a parameter between the passes and fills it with a new tensor.
        ctx.weight, ctx.bias = weight, bias
        ctx.scale, ctx.softcap, ctx.vocabulary, ctx.chunk = scale, softcap, vocabulary, chunk
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  torch does not type this decorator
    def backward(ctx, grad_log_probs, grad_entropy):
        hidden, targets, kept, log_z, entropy = ctx.saved_tensors
        grads = HeadGradients(hidden, ctx.weight, ctx.bias, ctx.needs_input_grad[:3], ctx.vocabulary)
        head = HeadLogits(ctx.weight, ctx.bias, ctx.scale, ctx.softcap)
        if grad_log_probs is None:
            grad_log_probs = log_z.new_zeros(targets.shape)
        grad_log_probs = _columns(grad_log_probs) * head.scale_of(slice(None))
        total = grad_log_probs.sum(1)
        if grad_entropy is not None:
            grad_entropy = grad_entropy * ctx.scale

        def add(rows: slice) -> None:
            logits = _restrict_to_support(head(hidden[rows], rows), kept, rows, ctx.vocabulary)
            slope = head.slope(logits, rows)
            all_log_probs = logits.sub_(log_z[rows, None])
            # d log p(y) / dz = onehot(y) - p,   dH / dz = -p * (log p + H)
            factor = total[rows, None]
            if grad_entropy is not None:
                factor = (all_log_probs + entropy[rows, None]).mul_(grad_entropy[rows, None]).add_(factor)
            grad = all_log_probs.exp_().mul_(factor).neg_()
            del factor  # as large as the logits with an entropy bonus
            ctx.vocabulary.add(grad, _columns(targets[rows]), grad_log_probs[rows])
            grads.add(rows, hidden, ctx.weight, grad, slope)

        for rows in chunks(len(hidden), ctx.chunk):
            add(rows)
        return *grads.totals(), *[None] * 7


class _LogProbsForward(torch.autograd.Function):
    """Log-probs or their sum, whose forward pass also computes the gradients. This is possible if all actions
    have the same upstream gradient (the sum) or the head is frozen."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, scale, softcap, kept, vocabulary, chunk, summed):
        log_probs = hidden.new_empty(len(hidden), dtype=_accumulation_dtype(hidden))
        grads = HeadGradients(hidden, weight, bias, ctx.needs_input_grad[:3], vocabulary)
        head = HeadLogits(weight, bias, scale, softcap)

        def add(rows: slice) -> None:
            logits = _restrict_to_support(head(hidden[rows], rows), kept, rows, vocabulary)
            chosen = targets[rows, None]
            slope, of_chosen = head.slope(logits, rows), vocabulary.at(logits, chosen)
            log_z, exp, total = _log_sum_exp(logits, vocabulary)
            log_probs[rows] = of_chosen[:, 0] - log_z
            grad = exp.div_(-total[:, None])
            vocabulary.add(grad, chosen, torch.ones_like(of_chosen))
            grads.add(rows, hidden, weight, grad, slope)

        for rows in chunks(len(hidden), chunk):
            add(rows)
        ctx.grads, ctx.scale, ctx.summed = grads, scale, summed
        return log_probs.sum() if summed else log_probs

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  torch does not type this decorator
    def backward(ctx, grad):
        grads, ctx.grads = ctx.grads, None  # scaled in place, so they can be used only once
        factor = grad * ctx.scale
        grads.scale(factor if ctx.summed else factor[:, None])
        return *grads.totals(), *[None] * 7


def _restrict_to_support(logits: Tensor, kept: Tensor | None, rows: slice, vocabulary: Vocabulary) -> Tensor:
    """Restricts logits (C, V) to the nuclei `kept[rows]`, in place: lowers all others to FAR below the
    largest logit of the nucleus."""
    if kept is None:
        return logits
    ids = kept[rows].clamp(min=0)
    inside = vocabulary.at(logits, ids)
    far = torch.where(kept[rows, :1] < 0, torch.inf, inside.amax(-1, keepdim=True) - FAR)
    return vocabulary.put(logits.clamp_(max=far), ids, inside)


def _score(
    logits: Tensor, targets: Tensor, with_entropy: bool, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(C, V), targets -> logsumexp (C,), log-probs in the shape of the targets, and entropy (C,). The logits
    are overwritten."""
    chosen = vocabulary.at(logits, _columns(targets))
    log_z, exp, total = _log_sum_exp(logits, vocabulary)
    log_probs = (chosen - log_z[:, None]).view_as(targets)
    if not with_entropy:
        return log_z, log_probs, None
    probs = exp.div_(total[:, None])
    entropy = torch.special.entr(probs, out=probs).sum(-1)
    return log_z, log_probs, vocabulary.total(entropy)


def _columns(x: Tensor) -> Tensor:
    """Returns (A,) as (A, 1), and (A, T) as it is."""
    return x[:, None] if x.dim() == 1 else x


def _log_sum_exp(logits: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor, Tensor]:
    """(C, V) -> logsumexp (C,), exp(logits - max) (C, V), and its sums (C,). The exponentials overwrite the
    logits, so that no second tensor of this size is needed."""
    largest = vocabulary.largest(logits)
    exp = logits.sub_(largest[:, None]).exp_()
    total = vocabulary.total(exp.sum(-1))
    return largest + total.log(), exp, total


class HeadGradients:
    """Gradients of hidden (A, H), weight (V, H) and bias (V,). The gradients of weight and bias accumulate
    over chunks in at least float32."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needed: tuple[bool, bool, bool],
        vocabulary: Vocabulary = WHOLE,
    ) -> None:
        self.vocabulary = vocabulary
        dtype = _accumulation_dtype(weight)
        needs_hidden, needs_weight, needs_bias = needed
        # Keeps no reference to the head's parameters: ZeRO-3 frees them between the passes.
        self.head_dtype, self.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        self.hidden = torch.empty_like(hidden) if needs_hidden else None
        self.weight = torch.zeros_like(weight, dtype=dtype) if needs_weight else None
        self.bias = None if bias is None or not needs_bias else torch.zeros_like(bias, dtype=dtype)

    def add(self, rows: slice, hidden: Tensor, weight: Tensor, grad: Tensor, slope: Tensor | None) -> None:
        """Adds the gradients of one chunk. `grad` (C, V'): gradient with respect to the logits of the first
        V' tokens at `rows` of hidden, times the head's scale; it is overwritten. `slope`: result of
        `HeadLogits.slope`."""
        if slope is not None:
            grad.mul_(slope)
        size = grad.shape[1]
        if self.bias is not None:
            self.bias[:size] += grad.sum(0)
        grad = grad.to(self.head_dtype)
        if self.hidden is not None:
            self.hidden[rows] = grad @ weight.detach()[:size]
        if self.weight is not None:
            _add_product(self.weight[:size], grad.t(), hidden[rows])

    def scale(self, factor: Tensor) -> None:
        """Multiplies all gradients by `factor`: one number, or one per action (A, 1) if only hidden has a
        gradient."""
        for grad in (self.hidden, self.weight, self.bias):
            if grad is not None:
                grad.mul_(factor)

    def totals(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns the gradients of hidden, weight and bias, each in the dtype of its tensor. The gradient of
        hidden is summed over the shards of the vocabulary."""
        hidden = None if self.hidden is None else self.vocabulary.total(self.hidden)
        weight = None if self.weight is None else self.weight.to(self.head_dtype)
        bias = None if self.bias is None else self.bias.to(self.bias_dtype)
        return hidden, weight, bias


def linear_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns hidden @ weight.T + bias, (A, V), for hidden (A, H) and weight (V, H), in float32 even if the
    weight is not. Differentiable in all three; gradients have the dtypes of their tensors."""
    return _LinearLogits.apply(hidden, weight, bias)


class _LinearLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias):
        ctx.save_for_backward(hidden)
        ctx.weight, ctx.bias = weight, bias  # not saved tensors: see _LinearLogProbs
        return HeadLogits(weight, bias, 1.0, None)(hidden)

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
    """Maps hidden (C, H) to scale * cap(hidden @ weight.T + bias), (C, V) in at least float32."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, scale: float | Tensor, softcap: float | None
    ) -> None:
        """`scale`: a number, or one for each row of all hidden states, of which a call gets some."""
        self.dtype = _accumulation_dtype(weight)
        # torch has no CPU kernel for half-precision factors with a float32 product.
        self.has_kernel = weight.dtype != self.dtype and weight.device.type != "cpu"
        self.weight = weight.detach() if self.has_kernel else weight.detach().to(self.dtype)
        self.bias, self.scale, self.softcap = bias, scale, softcap

    def scale_of(self, rows: slice) -> float | Tensor:
        return self.scale[rows, None] if isinstance(self.scale, Tensor) else self.scale

    def __call__(self, hidden: Tensor, rows: slice = slice(None)) -> Tensor:
        scale = self.scale_of(rows)
        if self.has_kernel:
            logits = torch.mm(hidden, self.weight.t(), out_dtype=self.dtype)
        else:
            logits = hidden.to(self.dtype) @ self.weight.t()
        if self.bias is not None:
            logits += self.bias
        if self.softcap is None:
            return logits if isinstance(scale, float) and scale == 1 else logits.mul_(scale)
        return logits.div_(self.softcap).tanh_().mul_(self.softcap * scale)

    def slope(self, logits: Tensor, rows: slice = slice(None)) -> Tensor | None:
        """Returns the derivative of the softcap, d cap(x) / dx = 1 - tanh(x / softcap)^2, (C, V); None
        without a softcap."""
        if self.softcap is None:
            return None
        return (logits / (self.softcap * self.scale_of(rows))).square_().neg_().add_(1)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Computes total += a @ b, without a temporary product if there is a kernel for these dtypes."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.device.type == "cpu":
        total += a @ b
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def _accumulation_dtype(x: Tensor) -> torch.dtype:
    """Returns float64 for float64, else float32."""
    return torch.promote_types(x.dtype, torch.float32)


def chunks(length: int, size: int) -> list[slice]:
    """Splits range(length) into slices of at most `size`."""
    return [slice(start, start + size) for start in range(0, length, size)]
