"""Hugging Face models on packed rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from openrlhf.models.attention import packing_kwargs
from openrlhf.models.router_replay import Replay
from openrlhf.models.sequence_parallel import SequenceParallel
from openrlhf.models.vision import ImageReader, inputs_of_row, with_blank
from openrlhf.types import Image, PackedRow, present

STATEFUL = {"linear_attention", "conv"}
"""Kinds of layers, in the words of transformers' configurations, that carry a state along the row."""


@dataclass(slots=True)
class Reading:
    """How a model reads rows. models/self_check.py finds out which way is right."""

    flag: str = "auto"
    """`--ds.attn_implementation`, as the user gave it."""
    packed: bool = True
    """A row in one pass. Else one pass for each of its sequences: always right, and slower."""
    liger: bool = False
    """With Liger's kernels, `--ds.use_liger_kernel`."""
    images: ImageReader | None = None
    """None: text only."""
    sharing: SequenceParallel | None = None
    """None: every rank reads whole rows."""
    gathers: bool = False
    """Ranks share parameters and gather them in every pass, so that all must make the same passes."""
    replay: Replay | None = None
    """The experts that a row names for its tokens are chosen. None: routers choose."""


class RowModel(nn.Module):
    """Wraps `model` without renaming or copying a parameter: `.model.save_pretrained` exports it. What a
    subclass answers about a packed row is its forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model


def reading_of(model: PreTrainedModel) -> Reading:
    """What models/loading.py noted on the model that it loaded."""
    return model.__dict__.setdefault("openrlhf_reading", Reading())


def backbone_of(model: PreTrainedModel) -> nn.Module:
    """The model without its head."""
    if model.base_model is not model:
        return model.base_model
    # The architecture misnames it: Llama 4's text model does.
    return next(child for child in model.children() if isinstance(child, PreTrainedModel))


class ActionStates(NamedTuple):
    """What the head of a model reads, once for each action of a row; where ranks share the row, for each
    action of this rank's slice."""

    hidden: Tensor  # (a, H)
    own: slice | Tensor
    """Which of the row's actions those are: all, or (a,) their indices."""
    num_actions: int
    """Of the row."""
    sharing: SequenceParallel | None

    def whole(self, answers: Tensor) -> Tensor:
        """(a, ...) what the head says of its actions -> (A, ...) of all of the row."""
        if self.sharing is None:
            return answers
        of_others = answers.new_zeros(self.num_actions, *answers.shape[1:])
        return self.sharing.summed(of_others.index_copy(0, cast(Tensor, self.own), answers))

    def total(self, of_slice: Tensor) -> Tensor:
        """A sum over the slice's actions -> that over all of the row."""
        return of_slice if self.sharing is None else self.sharing.summed(of_slice)


def action_states(model: PreTrainedModel, row: PackedRow, places: Tensor) -> ActionStates:
    """`places` (A,), in order: the token of the row at which each action is read."""
    hidden, sharing, num_actions = hidden_states(model, row), reading_of(model).sharing, len(places)
    if sharing is None:
        return ActionStates(hidden[places], slice(None), num_actions, None)
    own, in_slice = sharing.located(places, len(row.token_ids))
    return ActionStates(hidden[in_slice], own, num_actions, sharing)


def hidden_states(model: PreTrainedModel, row: PackedRow) -> Tensor:
    """(N, H) what the head of `model` would read at each token; where ranks share the row (n, H), at each of
    this rank's slice."""
    reading = reading_of(model)
    if reading.packed:
        return in_one_pass(model, row, reading.sharing)
    return _one_by_one(model, row)


def in_one_pass(model: PreTrainedModel, row: PackedRow, sharing: SequenceParallel | None = None) -> Tensor:
    attention = model.config._attn_implementation
    assert attention is not None  # models/loading.py chose it
    reader, tokens = reading_of(model).images, slice(len(row.token_ids))
    if reader is not None:
        row = with_blank(row, reader)
    if sharing is not None:
        row, tokens = sharing.filled_up(row), slice(None)
    output = _read(
        model,
        row.routing,
        sharing,
        **_inputs(model, row, sharing),
        **({} if sharing else _state_borders(model, row.lengths, row.token_ids.device)),
        **packing_kwargs(attention, row.lengths, row.token_ids.device, sharing),
    )
    return output[tokens]


def _state_borders(
    model: PreTrainedModel, lengths: tuple[int, ...], device: torch.device
) -> dict[str, Tensor]:
    """Where layers that carry a state along the row (linear attention, convolutions) shall start anew. Only
    the kernels of flash-linear-attention and causal-conv1d read it; transformers' own code leaks."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    if not STATEFUL.intersection(kinds):
        return {}
    counts = torch.tensor(lengths)
    cumulative = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    numbers = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(counts)
    return {
        "cu_seq_lens_q": cumulative.to(device, non_blocking=True),
        "seq_idx": numbers[None].to(device, non_blocking=True),
    }


def _inputs(model: PreTrainedModel, row: PackedRow, sharing: SequenceParallel | None) -> dict[str, Tensor]:
    """What transformers' forward of a row, or of this rank's slice, is called with."""
    reader = reading_of(model).images
    if reader is not None:
        return {"input_ids": row.token_ids[None]} | inputs_of_row(backbone_of(model), row, reader)
    tokens = {"input_ids": row.token_ids, "position_ids": row.position_ids}
    return {name: (x if sharing is None else sharing.own(x))[None] for name, x in tokens.items()}


def _read(
    model: PreTrainedModel, routing: Tensor | None, sharing: SequenceParallel | None, **inputs: Any
) -> Tensor:
    """transformers' forward of `inputs` -> hidden states (n, H)."""
    replay = reading_of(model).replay if routing is not None else None
    if replay is not None:
        inputs["routing"] = replay.routing(present(routing), inputs["input_ids"].shape[1], sharing)
    # A cache makes transformers take the row for one sequence: attention would leak without an error.
    output = backbone_of(model)(**inputs, use_cache=False)
    if replay is not None:
        replay.check()
    return output.last_hidden_state[0].to(model.dtype)  # Mamba keeps its residual in float32


def alone(
    model: PreTrainedModel, token_ids: Tensor, images: Sequence[Image] = (), routing: Tensor | None = None
) -> Tensor:
    """(L,) one sequence -> (L, H), as transformers itself reads it."""
    inputs = inputs_alone(model, token_ids, images)
    return _read(model, routing, None, **inputs)[: len(token_ids)]


def inputs_alone(model: PreTrainedModel, token_ids: Tensor, images: Sequence[Image]) -> dict[str, Tensor]:
    """What transformers' forward of one sequence is called with."""
    reader = reading_of(model).images
    if reader is None:
        return {"input_ids": token_ids[None]}
    if not images:  # as in `with_blank`; what stands behind a sequence changes nothing in it
        images, blank = reader.blank.images, reader.blank.token_ids.to(token_ids.device)
        token_ids = torch.cat([token_ids, blank])
    return {"input_ids": token_ids[None]} | reader.inputs(token_ids, images)


def _one_by_one(model: PreTrainedModel, row: PackedRow) -> Tensor:
    num_passes = _most_sequences(model, row)
    routings = [None] * len(row.lengths) if row.routing is None else row.routing.split(row.lengths)
    images = row.images or [()] * len(row.lengths)
    sequences = zip(row.token_ids.split(row.lengths), images, routings, strict=True)
    hidden = torch.cat([alone(model, *sequence) for sequence in sequences])
    for _ in range(num_passes - len(row.lengths)):
        hidden = hidden + 0 * alone(model, row.token_ids.new_zeros(2)).sum()
    return hidden


def _most_sequences(model: PreTrainedModel, row: PackedRow) -> int:
    """In the row of any rank, where ranks must make the same number of passes."""
    if not reading_of(model).gathers:
        return len(row.lengths)
    count = torch.tensor(len(row.lengths), device=row.token_ids.device)
    dist.all_reduce(count, dist.ReduceOp.MAX)
    return int(count)
