"""Tensor parallelism, the sharding of a model's matrices over ranks: https://arxiv.org/abs/1909.08053

An attention or MLP module has two matrix products. Each rank has some outputs of the first (its columns, in
the paper's order of factors) and the matching inputs of the second, whose results are summed over the ranks.
transformers' plan for the architecture lists these layers. Everything else is replicated on all ranks, with
equal gradients. The exception are weights that each rank applies only to its own heads: their gradients are
summed.

The vocabulary is sharded if the head is a `LogProbHead`, or if there is no head. Each rank has the rows of
some tokens in embedding and head, and ranks exchange a few numbers per action (algorithms/logprobs.py).

DeepSpeed recognizes sharded parameters by Megatron's attribute `tensor_model_parallel`. DeepSpeed's own
AutoTP is not used, because it does not sum the gradient of a column-parallel layer if the gradient is not
contiguous, and because its layers for training work only inside an engine.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from openrlhf.algorithms.logprobs import SharedVocabulary
from openrlhf.device import DEVICE_TYPE
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.models.collectives import differentiable, joined, own_part, replicated, summed
from openrlhf.models.configurations import load_config, without_weights
from openrlhf.models.policy import LogProbHead

WRONG_PLANS = {
    "apertus": "its activation has weights of its own, whose gradients transformers' plan forgets",
    "doge": "transformers' plan splits its attention, but not the mask that it computes from the values",
}
"""Architectures for which transformers' plan is wrong: `model_type` -> reason."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Attribute of a parameter that is this rank's equal part of a tensor, which is split along `dim` over
    `group` in rank order."""

    group: dist.ProcessGroup
    dim: int


def shard_matrices(model: PreTrainedModel, group: dist.ProcessGroup) -> None:
    """Shards a model, of which every rank of `group` has a full copy. Raises UsageError if it cannot be
    sharded."""
    check_planned(model, group.size())
    inputs: dict[str, SharedInput] = defaultdict(lambda: SharedInput(group))
    for name, module, style in _planned(model):
        STYLES[style](module, group)
        if isinstance(module, ColumnLinear):
            module.entrance = inputs[name.rpartition(".")[0]].add_layer()
    _shard_vocabulary(model, group)
    for parameter in model.parameters():
        if not hasattr(parameter, "shard"):
            _take_first(parameter, group)


def check_planned(model: PreTrainedModel, size: int) -> None:
    """Raises UsageError if the matrices of a model cannot be sharded over `size` ranks. The model may be on
    the meta device."""
    if reason := why_not(model, size):
        raise refusal(model, size, reason)


def check_tensor_parallel(path: str, flag: str, size: int) -> None:
    """Raises UsageError if the matrices of the model at `path` cannot be sharded over `size` ranks. Loads no
    weights."""
    if type(load_config(path, flag)) in MODEL_FOR_CAUSAL_LM_MAPPING:  # else loading it reports the error
        check_planned(without_weights(path, flag, images=False), size)


def why_not(model: PreTrainedModel, size: int) -> str:
    """Returns the reason why the matrices of a model cannot be sharded over `size` ranks; "" if they can. The
    model may be on the meta device."""
    planned, config = list(_planned(model)), model.config.get_text_config()
    if not planned:
        return "transformers has no plan for its architecture"
    if config.model_type in WRONG_PLANS:
        return WRONG_PLANS[config.model_type]
    for name, module, style in planned:
        if style not in STYLES:
            return f"transformers' plan for {name} is {style}, which is not implemented"
        if style != REPLICATED and type(module) is not nn.Linear:
            return f"{name} is a {type(module).__name__}"
    heads = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    sizes = {"attention heads": heads, "heads of keys": keys}
    sizes |= {f"features of {name}": _cut_size(module, style) for name, module, style in planned}
    for what, number in sizes.items():
        if number % size:
            return f"its {number} {what} cannot be divided evenly among them"
    return ""


def refusal(model: PreTrainedModel, size: int, reason: str) -> UsageError:
    """Returns the error for a model that cannot be sharded."""
    name = f"{type(model).__name__} {model.name_or_path}".strip()
    text = (
        f"{name} does not support tensor parallelism: {reason}.\n"
        "Remove the flag; --ds.zero_stage 3 shards weights too."
    )
    return UsageError(ErrorCode.UNSUPPORTED, text, flag="--ds.tensor_parallel_size", value=size)


def whole(tensor: Tensor) -> Tensor:
    """Returns the full (unsharded) tensor of a model's tensor, without a gradient. Collective for the ranks
    that shard it."""
    if isinstance(tensor, DTensor):  # sharded by fully_shard
        return tensor.full_tensor().detach()
    shard: Shard | None = getattr(tensor, "shard", None)
    if shard is None:
        return tensor.data
    return joined(tensor.data, shard.group, shard.dim)


def laid_out_as(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Shards a full tensor over ranks in the way that `fully_shard` has sharded `parameter`. Collective."""
    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)


def put_together(parts: Sequence[Tensor], tensor: Tensor) -> Tensor:
    """Concatenates the ranks' shards of `tensor`, given in rank order, into the full tensor."""
    shard: Shard | None = getattr(tensor, "shard", None)
    return parts[0] if shard is None else torch.cat(list(parts), shard.dim)


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """Returns the full (unsharded) shape of a tensor, which ZeRO-3 or tensor parallelism may have sharded."""
    shape, shard = list(getattr(tensor, "ds_shape", tensor.shape)), getattr(tensor, "shard", None)
    if shard is not None:
        shape[shard.dim] *= shard.group.size()
    return tuple(shape)


class SharedInput:
    """The input of a module's column-parallel layers. Layers with the same input, such as the query, key and
    value projections, need only one all-reduce of its gradient."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.layers = self._left = 0
        self._given: Tensor | None = None
        self._answer: Tensor | None = None

    def add_layer(self) -> Self:
        """Registers a further layer of the module, and returns this object."""
        self.layers += 1
        return self

    def replicated(self, x: Tensor) -> Tensor:
        answer = self._answer
        if answer is None or self._given is not x:
            answer, self._left = differentiable(x, self.group, replicated, summed), self.layers
        self._left -= 1
        # dropped after the last layer
        self._given, self._answer = (x, answer) if self._left else (None, None)
        return answer


class ColumnLinear(nn.Linear):
    """A column-parallel linear layer: this rank computes some of the outputs."""

    group: dist.ProcessGroup
    entrance: SharedInput

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(self.entrance.replicated(input))


class RowLinear(nn.Linear):
    """A row-parallel linear layer: this rank has some of the inputs, and the results are summed over the
    ranks."""

    group: dist.ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        output = _summed_once(F.linear(input, self.weight), self.group)
        return output if self.bias is None else output + self.bias


class GatheredLinear(ColumnLinear):
    """A column-parallel linear layer that gathers all outputs on every rank."""

    def forward(self, input: Tensor) -> Tensor:
        return differentiable(super().forward(input), self.group, joined, own_part)


class SplitLinear(RowLinear):
    """A row-parallel linear layer that receives all inputs and uses this rank's."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(differentiable(input, self.group, own_part, joined))


class SharedEmbedding(nn.Embedding):
    """Mixin for the class of an embedding of which this rank has the rows of some tokens. Results are summed
    over the ranks."""

    vocabulary: SharedVocabulary

    def forward(self, input: Tensor) -> Tensor:
        here, places = self.vocabulary.own(input)
        found = super().forward(places).masked_fill(~here[..., None], 0)
        return _summed_once(found, self.vocabulary.group)


def _summed_once(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums `x` over the ranks, for use on all ranks. The gradient of `x` is the gradient of the sum."""
    return differentiable(x, group, summed, lambda grad, group: grad)


def _planned(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, str]]:
    """Yields (name, module, style) of everything in transformers' plan except the vocabulary."""
    plan = model._tp_plan or {}
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    modules = dict(model.named_modules())
    names = {name: name for name in modules}
    for owner, module in modules.items():
        names |= {f"{owner}.{own}": owner for own, _ in module.named_parameters(recurse=False)}
    for name, owner in names.items():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is not None and modules[owner] not in ends:
            yield name, modules[owner], style


def _cut_size(module: nn.Module, style: str) -> int:
    """Returns the size of the dimension that is split; 0 if none is."""
    if not isinstance(module, nn.Linear):
        return 0
    return module.out_features if style.startswith("colwise") else module.in_features


def _shard_columns(module: Any, group: dist.ProcessGroup, kind: type = ColumnLinear) -> None:
    module.__class__, module.group = kind, group
    _cut(module.weight, 0, group)
    _cut(module.bias, 0, group)


def _shard_rows(module: Any, group: dist.ProcessGroup, kind: type = RowLinear) -> None:
    module.__class__, module.group = kind, group
    _cut(module.weight, 1, group)


def _sum_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Sums gradients of replicated parameters over the ranks. Each rank has the part of its own heads."""
    for parameter in module.parameters(recurse=False):
        if parameter.requires_grad:
            parameter.register_hook(lambda grad: summed(grad, group))


REPLICATED = "replicated_with_grad_allreduce"
STYLES = {
    "colwise": _shard_columns,
    "rowwise": _shard_rows,
    "colwise_gather_output": partial(_shard_columns, kind=GatheredLinear),
    "rowwise_split_input": partial(_shard_rows, kind=SplitLinear),
    REPLICATED: _sum_gradients,
}
"""Maps the styles of transformers' plans to their implementations."""


def _shard_vocabulary(model: PreTrainedModel, group: dist.ProcessGroup) -> None:
    """Shards embedding and head if their tokens divide evenly and the head computes only log-probs."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    num_tokens, rest = divmod(len(embedding.weight), group.size())
    if rest or not (head is None or isinstance(head, LogProbHead)):
        return
    vocabulary = SharedVocabulary(group=group, size=num_tokens)
    embedding.__class__ = type("SharedEmbedding", (SharedEmbedding, type(embedding)), {})
    embedding.vocabulary = vocabulary
    if embedding.padding_idx is not None:
        here, place = vocabulary.own(torch.tensor(embedding.padding_idx))
        embedding.padding_idx = int(place) if here else None
    _cut(embedding.weight, 0, group)
    if head is not None:
        head.vocabulary = vocabulary
        _cut(head.weight, 0, group)
        _cut(head.bias, 0, group)


def _cut(parameter: Tensor | None, dim: int, group: dist.ProcessGroup) -> None:
    """Replaces a parameter by this rank's shard. A tied weight is split only once."""
    if parameter is None or hasattr(parameter, "shard"):
        return
    parameter.data = own_part(parameter.data, group, dim)
    setattr(parameter, "shard", Shard(group, dim))  # noqa: B010  not declared in nn.Parameter
    setattr(parameter, "tensor_model_parallel", True)  # noqa: B010


def _take_first(parameter: Tensor, group: dist.ProcessGroup) -> None:
    """Copies the first rank's value to all ranks, because new weights, such as a scalar head, are initialized
    randomly."""
    value = parameter.data.to(DEVICE_TYPE)
    dist.broadcast(value, group=group, group_src=0)
    parameter.data.copy_(value)
