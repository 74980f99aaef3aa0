"""Forward passes of Hugging Face models over packed rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from openrlhf.config.choices import SharePrefixes
from openrlhf.models.attention import packing_kwargs
from openrlhf.models.dropout import is_noisy
from openrlhf.models.prefixes import Branches, PrefixTree, build_tree
from openrlhf.models.sequence_parallel import SequenceParallel
from openrlhf.models.vision import ImageReader, positions_of_row, with_blank
from openrlhf.rows import PackedRow
from openrlhf.types import Image, not_none

if TYPE_CHECKING:
    from openrlhf.models.router_replay import Replay

STATEFUL = {"linear_attention", "conv"}
"""Layer types, by their names in transformers' configurations, that carry a state along the row."""


@dataclass(slots=True)
class RowLayout:
    """Describes how a model reads rows. It lies on the model, because several stages each know a part of it,
    some before a RowModel wraps the model: models/loading.py the flags, the training engine `sharing`,
    `gathers` and `share_prefixes`, the policy's worker `replay`, and models/self_check.py which way is
    correct. Forward passes only read it."""

    flag: str = "auto"
    """Value of `--ds.attn_implementation` as the user gave it."""
    packed: bool = True
    """True: one forward pass for the whole row. False: one pass per sequence, which is always correct and
    slower."""
    liger: bool = False
    """True with Liger's kernels (`--ds.use_liger_kernel`)."""
    images: ImageReader | None = None
    """Converts images for a vision-language model; None for text only."""
    sharing: SequenceParallel | None = None
    """The sequence-parallel group that splits rows; None if every rank reads whole rows."""
    gathers: bool = False
    """True if ranks gather sharded parameters in every pass, so that all ranks must run the same number of
    passes."""
    replay: "Replay | None" = None
    """Router replay with the experts in `PackedRow.routing`; None: routers select experts."""
    share_prefixes: SharePrefixes = "auto"
    """Value of `--ds.share_prefixes`."""
    shares_prefixes: bool = False
    """True: common prefixes of a row's sequences are read once (models/prefixes.py)."""
    has_noise: bool = False
    """True where the model's configuration has dropout or other noise in training mode."""


class RowModel(nn.Module):
    """Base class of models with a forward pass over a packed row. It wraps `model` without renaming or
    copying a parameter: `.model.save_pretrained` exports it."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model


def get_row_layout(model: PreTrainedModel) -> RowLayout:
    """Returns the record on the model. A model that models/loading.py did not load gets the defaults."""
    return model.__dict__.setdefault("openrlhf_row_layout", RowLayout())


def get_backbone(model: PreTrainedModel) -> nn.Module:
    """Returns the model without its head."""
    if model.base_model is not model:
        return model.base_model
    # Some architectures have a wrong `base_model_prefix`, such as Llama 4's text model.
    return next(child for child in model.children() if isinstance(child, PreTrainedModel))


class ActionStates(NamedTuple):
    """Inputs of a model's head, one for each action of a row; under sequence parallelism, for each action of
    this rank's slice."""

    hidden: Tensor  # (a, H)
    own: slice | Tensor
    """Indices of these actions among the row's actions: all, or (a,) indices."""
    num_actions: int
    """Number of actions of the whole row."""
    sharing: SequenceParallel | None

    def whole(self, answers: Tensor) -> Tensor:
        """Gathers the head's outputs for the whole row, (A, ...), from those for each rank's actions, (a,
        ...)."""
        if self.sharing is None:
            return answers
        of_others = answers.new_zeros(self.num_actions, *answers.shape[1:])
        return self.sharing.summed(of_others.index_copy(0, cast(Tensor, self.own), answers))

    def total(self, of_slice: Tensor) -> Tensor:
        """Returns the total over the whole row, from each rank's total over its slice."""
        return of_slice if self.sharing is None else self.sharing.summed(of_slice)


def action_states(model: PreTrainedModel, row: PackedRow, places: Tensor) -> ActionStates:
    """Returns the hidden states at `places` (A,), indices of the row's tokens, one for each action."""
    tree, sharing, num_actions = _common_prefixes(model, row), get_row_layout(model).sharing, len(places)
    hidden, num_tokens = hidden_states(model, row, tree), len(row.token_ids)
    if tree is not None:
        index = torch.from_numpy(tree.index).to(places.device, non_blocking=True)
        places, num_tokens = index[places], len(tree.places)
    if sharing is None:
        return ActionStates(hidden[places], slice(None), num_actions, None)
    own, in_slice = sharing.locate(places, num_tokens)
    return ActionStates(hidden[in_slice], own, num_actions, sharing)


def hidden_states(model: PreTrainedModel, row: PackedRow, tree: PrefixTree | None = None) -> Tensor:
    """Returns (N, H), the input of the head of `model` at each token of the row, or (M, H), at those of
    `tree`; under sequence parallelism (n, H), for this rank's slice of them."""
    layout = get_row_layout(model)
    if layout.packed:
        return in_one_pass(model, row, layout.sharing, tree)
    return _one_by_one(model, row)


def _common_prefixes(model: PreTrainedModel, row: PackedRow) -> PrefixTree | None:
    """Returns the tree of the row's common prefixes if this pass reads it, else None."""
    layout = get_row_layout(model)
    if not layout.shares_prefixes:
        return None
    tree = build_tree(
        row,
        with_routing=layout.replay is not None and row.routing is not None,
        patch_id=None if layout.images is None else layout.images.patch_id,
    )
    return None if tree is None or is_noisy(model, has_noise=layout.has_noise) else tree


def in_one_pass(
    model: PreTrainedModel,
    row: PackedRow,
    sharing: SequenceParallel | None = None,
    tree: PrefixTree | None = None,
) -> Tensor:
    """Computes `hidden_states` by one forward pass."""
    attention = model.config._attn_implementation
    assert attention is not None  # set by models/loading.py
    device, reader = row.token_ids.device, get_row_layout(model).images
    num_tokens = len(row.token_ids if tree is None else tree.places)
    tokens = slice(num_tokens) if sharing is None else slice(None)
    positions = None
    if reader is not None:
        if not row.images and tree is not None:
            tree = tree.longer(reader.blank.length, reader.blank.images)
        row = with_blank(row, reader)
        positions = positions_of_row(get_backbone(model), row, reader)
    of_row = row.lengths
    if tree is not None:
        if positions is not None:
            positions = positions[..., torch.from_numpy(tree.places).to(device, non_blocking=True)]
        row = tree.of_row(row)
    num_own = len(row.token_ids)
    if sharing is not None:
        row = sharing.padded(row)
    num_more = len(row.token_ids) - num_own
    branches = None if tree is None else Branches.of(tree, of_row, num_more, device)
    output = _read(
        model,
        row.routing,
        sharing,
        **_inputs(model, row, sharing, positions),
        **({} if sharing else _state_borders(model, row.lengths, row.token_ids.device)),
        **packing_kwargs(attention, row.lengths, device, sharing, branches),
    )
    return output[tokens]


def has_states(model: PreTrainedModel) -> bool:
    """Returns whether the model's configuration names layers that carry a state along the row."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return bool(STATEFUL.intersection(kinds))


def _state_borders(
    model: PreTrainedModel, lengths: tuple[int, ...], device: torch.device
) -> dict[str, Tensor]:
    """Returns the keyword arguments with which layers that carry a state along the row (linear attention,
    convolutions) reset it between sequences. Only the kernels of flash-linear-attention and causal-conv1d use
    them; transformers' own code leaks across sequences."""
    if not has_states(model):
        return {}
    counts = torch.tensor(lengths)
    cumulative = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    numbers = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(counts)
    return {
        "cu_seq_lens_q": cumulative.to(device, non_blocking=True),
        "seq_idx": numbers[None].to(device, non_blocking=True),
    }


def _inputs(
    model: PreTrainedModel, row: PackedRow, sharing: SequenceParallel | None, positions: Tensor | None
) -> dict[str, Tensor]:
    """Returns the inputs of transformers' forward for a row, or for this rank's slice of it. `positions`: the
    positions in a row with images."""
    reader = get_row_layout(model).images
    if reader is not None:
        images = [image for of_sequence in row.images for image in of_sequence]
        inputs = {"input_ids": row.token_ids[None]} | reader.inputs(row.token_ids, images)
        return inputs | {"position_ids": not_none(positions)}
    tokens = {"input_ids": row.token_ids, "position_ids": row.position_ids}
    return {name: (x if sharing is None else sharing.own(x))[None] for name, x in tokens.items()}


def _read(
    model: PreTrainedModel, routing: Tensor | None, sharing: SequenceParallel | None, **inputs: Any
) -> Tensor:
    """Runs transformers' forward on `inputs` and returns the hidden states (n, H)."""
    replay = get_row_layout(model).replay if routing is not None else None
    if replay is not None:
        inputs["routing"] = replay.routing(not_none(routing), inputs["input_ids"].shape[1], sharing)
    # With a cache transformers would treat the row as one sequence, and attention would leak across
    # sequences.
    output = get_backbone(model)(**inputs, use_cache=False)
    if replay is not None:
        replay.check()
    return output.last_hidden_state[0].to(model.dtype)  # Mamba's residual stream is float32


def alone(
    model: PreTrainedModel, token_ids: Tensor, images: Sequence[Image] = (), routing: Tensor | None = None
) -> Tensor:
    """Returns the hidden states (L, H) of one sequence `token_ids` (L,), with transformers' ordinary
    inputs."""
    inputs = inputs_alone(model, token_ids, images)
    return _read(model, routing, None, **inputs)[: len(token_ids)]


def inputs_alone(model: PreTrainedModel, token_ids: Tensor, images: Sequence[Image]) -> dict[str, Tensor]:
    """Returns the inputs of transformers' forward for one sequence."""
    reader = get_row_layout(model).images
    if reader is None:
        return {"input_ids": token_ids[None]}
    if not images:  # as in `with_blank`; later tokens do not change earlier states
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
    """Returns the maximum number of sequences in a row over the ranks that must run the same number of
    passes."""
    if not get_row_layout(model).gathers:
        return len(row.lengths)
    count = torch.tensor(len(row.lengths), device=row.token_ids.device)
    dist.all_reduce(count, dist.ReduceOp.MAX)
    return int(count)
