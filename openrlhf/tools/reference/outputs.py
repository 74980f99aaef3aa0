"""Log-probs, scores and values by transformers' own forward pass of each sequence alone, and a softmax over
the whole vocabulary. The model of a run has its own head and reads images, so `..._of_row` take it apart into
hidden states and head."""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from openrlhf.api import (
    PackedRow,
    Sample,
    alone,
    get_head,
    head_name,
    transformed_logits,
    transformers_attention,
)

CHUNK = 256
"""Number of actions whose logits exist at once: 0.3 GB in float64 with a vocabulary of 150,000."""


def distribution(logits: Tensor, temperature: float | Tensor = 1.0, support: Tensor | None = None) -> Tensor:
    """Returns the log-probs (A, V) of all tokens. `support`: mask of those that they are normalised over, (A,
    V); None: all."""
    scaled = logits / temperature
    return (scaled if support is None else scaled.masked_fill(~support, -torch.inf)).log_softmax(-1)


def chosen(of_all: Tensor, targets: Tensor) -> Tensor:
    """Returns the log-probs (A,) of the targets, given those of all tokens."""
    return of_all.gather(-1, targets[:, None])[:, 0]


def entropies(of_all: Tensor) -> Tensor:
    return -(of_all.exp() * of_all).sum(-1)


def plain_logits(model: PreTrainedModel, sample: Sample) -> Tensor:
    """Returns the logits (A, V) before each action of a sequence, in float32 at least."""
    ids, actions = sample.token_ids.to(model.device), sample.action_mask.nonzero()[:, 0]
    logits = model(ids[None], use_cache=False).logits[0][actions.to(ids.device) - 1]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def plain_log_probs(
    model: PreTrainedModel, sample: Sample, temperature: float = 1.0, entropy: bool = False
) -> Tensor:
    """Returns the log-probs (A,) of a sequence's actions; with `entropy`, log-probs and entropies (A, 2)."""
    found = distribution(plain_logits(model, sample), temperature)
    log_probs = chosen(found, sample.token_ids[sample.action_mask].to(found.device))
    return torch.stack([log_probs, entropies(found)], 1) if entropy else log_probs


def plain_score(model: PreTrainedModel, sample: Sample) -> Tensor:
    """Returns the score () of a sequence, which transformers' classifier computes at the last token."""
    return model(sample.token_ids[None].to(model.device), use_cache=False).logits[0, 0].float()


@torch.no_grad()
def log_probs_of_row(model: PreTrainedModel, row: PackedRow, temperature: float = 1.0) -> Tensor:
    """Returns the log-probs (A,) in float64 of the actions of a row, by the model of a run. `temperature`:
    that of all actions, unless the row has one for each."""
    found = []
    own = row.temperatures
    divisors = (torch.full_like(row.actions, temperature, dtype=torch.float64) if own is None else own)[
        :, None
    ]
    for hidden, ids, actions in _each_alone(model, row):
        for states, targets in zip(hidden[actions - 1].split(CHUNK), ids[actions].split(CHUNK), strict=True):
            of_states, divisors = divisors[: len(states)], divisors[len(states) :]
            found.append(chosen(distribution_of(model, states, of_states), targets))
    return torch.cat(found)


def distribution_of(model: PreTrainedModel, hidden: Tensor, temperature: float | Tensor) -> Tensor:
    """Returns the log-probs (A, V) in float64 of all tokens, given the hidden states (A, H) before them."""
    return distribution(transformed_logits(get_head(model)(hidden).double(), model.config), temperature)


@torch.no_grad()
def scores_of_row(model: PreTrainedModel, row: PackedRow) -> list[Tensor]:
    """Returns the score () in float64 of each sequence of a row, read at its last token, by the model of a
    run."""
    head = getattr(model, head_name(model.config))
    return [head(hidden[-1])[0].double() for hidden, _, _ in _each_alone(model, row)]


@torch.no_grad()
def values_of_row(model: PreTrainedModel, row: PackedRow) -> Tensor:
    """Returns the values (A,) in float64 of a critic, read at the token before each action, by the model of a
    run."""
    head = getattr(model, head_name(model.config))
    values = [head(hidden[actions - 1])[:, 0] for hidden, _, actions in _each_alone(model, row)]
    return torch.cat(values).double()


def _each_alone(model: PreTrainedModel, row: PackedRow) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields the hidden states (L, H) of each sequence of a row, its tokens (L,), and the indices of its
    actions."""
    images = row.images or [()] * len(row.lengths)
    sequences = zip(row.token_ids.split(row.lengths), row.action_mask.split(row.lengths), images, strict=True)
    with transformers_attention(model):
        for ids, mask, pictures in sequences:
            yield alone(model, ids, pictures), ids, mask.nonzero()[:, 0]
