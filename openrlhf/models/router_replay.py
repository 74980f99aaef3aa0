"""Rollout routing replay for mixtures of experts: training sends every token to the experts that the rollout
engine chose (https://arxiv.org/abs/2510.11370).

A router scores all experts and selects the best of them. If two scores are nearly equal, rounding decides,
and the rollout engine and the trainer round differently. A token that is routed to another expert has a
log-prob that differs by far more than rounding. Only the selection of experts is replayed: the scores, and
the weights computed from them, remain the router's own, with gradients.

Each architecture of transformers has its own router, whose code ends with one `torch.topk` over all experts.
During a replay this call returns the given experts and their scores. Layers get their tokens' experts from
the keyword argument `routing`, which the model passes on like `packing`, so gradient checkpointing recomputes
the same selection.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from openrlhf.errors import ErrorCode, UsageError
from openrlhf.models.configurations import names_beside_model
from openrlhf.models.sequence_parallel import SequenceParallel
from openrlhf.types import own_choice

ROUTER = re.compile(r"TopK_?Router$", re.IGNORECASE)
"""Matches class names in transformers of routers that select `top_k` experts once."""
LAYER = re.compile(r"(?P<layer>.*\blayers\.(?P<index>\d+))\.")


class NotReplayed(RuntimeError):
    """Raised if a router did not use the given experts."""


class Choice(TorchFunctionMode):
    """A context in which the `torch.topk` that selects `top_k` of `num_experts` experts returns the experts
    `given`, (n, K) for n tokens. Tokens marked with `types.own_choice` keep the router's selection.
    """

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.sizes = [router.num_experts, router.top_k]
        self.given: Tensor | None = None
        """Experts to select; None: the router selects."""
        self.was_made = False

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        answer = func(*args, **kwargs or {})
        if func not in (torch.topk, Tensor.topk) or not self._is_over_experts(args[0], answer):
            return answer
        assert self.given is not None  # the context is entered only if `given` is set
        own = self.given == own_choice(self.given)
        indices = torch.where(own, answer.indices, self.given.long())
        self.was_made = True
        return torch.return_types.topk((args[0].gather(-1, indices), indices))

    def _is_over_experts(self, scores: Tensor, answer: Any) -> bool:
        """Returns True if this `topk` selects experts, not groups of experts."""
        return scores.dim() == 2 and [scores.shape[1], answer.indices.shape[1]] == self.sizes


class Replay:
    """Router replay for a model whose routers support it."""

    def __init__(self, model: PreTrainedModel) -> None:
        routers = [
            (place, router)
            for name, router in model.named_modules()
            if (place := LAYER.match(name)) and ROUTER.search(type(router).__name__)
        ]
        self.layers = [int(place["index"]) for place, _ in routers]
        self.choices = [
            _replaying(model.get_submodule(place["layer"]), int(place["index"]), router)
            for place, router in routers
        ]

    def routing(self, of_row: Tensor, num_tokens: int, sharing: SequenceParallel | None) -> Tensor:
        """Returns the keyword argument `routing` of the model, from a row's experts `of_row` (N, M, K). It is
        padded to the `num_tokens` tokens of a pass (of this rank's slice under sequence parallelism). Padding
        tokens keep the router's selection."""
        missing = num_tokens * (1 if sharing is None else sharing.size) - len(of_row)
        padded = F.pad(of_row, (0, 0, 0, 0, 0, missing), value=own_choice(of_row))
        return padded if sharing is None else sharing.own(padded)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (M, K) of a token's routing; M also counts layers without experts."""
        return 1 + max(self.layers), self.choices[0].sizes[1]

    def check(self) -> None:
        """Raises NotReplayed if a layer did not use the given experts in the last pass."""
        left_out = [i for i, choice in zip(self.layers, self.choices, strict=True) if not choice.was_made]
        if left_out:
            raise NotReplayed(f"the routers of layers {left_out} ignore the experts that they are given")
        for choice in self.choices:
            choice.was_made = False


def _replaying(layer: nn.Module, index: int, router: nn.Module) -> Choice:
    """Makes `layer` pass the experts in its keyword argument `routing` to its router."""
    choice, forward = Choice(router), router.forward

    def take(layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        routing = kwargs.pop("routing", None)
        choice.given = None if routing is None else routing[:, index]
        return args, kwargs

    def choose(*args: Any, **kwargs: Any) -> Any:
        if choice.given is None:
            return forward(*args, **kwargs)
        with choice:
            return forward(*args, **kwargs)

    layer.register_forward_pre_hook(take, with_kwargs=True)
    router.forward = choose
    return choice


def check_replay(config: Any, flag: str, path: str) -> None:
    """Raises UsageError if the routers of the model `path` with configuration `config` do not support replay.
    Loads no weights."""
    masks_weights = getattr(config, "topk_method", "") == "group_limited_greedy"
    if masks_weights or not any(_chooses_once(*named) for named in names_beside_model(config).items()):
        text = (
            f"a {config.model_type} ({flag} {path}) has no router to which chosen experts can be given.\n"
            "Remove the flag."
        )
        raise UsageError(ErrorCode.UNSUPPORTED, text, flag="--algo.router_replay")


def _chooses_once(name: str, router: Any) -> bool:
    return ROUTER.search(name) is not None and "topk(" in inspect.getsource(router)
