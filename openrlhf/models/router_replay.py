"""Rollout routing replay for mixtures of experts: training sends every token to the experts that the rollout
engine chose (https://arxiv.org/abs/2510.11370).

A router scores all experts and takes the best of them. Where two scores are nearly equal, rounding decides,
and the rollout engine and the trainer round differently: a token routed to another expert gets a log-prob
that differs by far more than rounding. So only the choice is replayed: scores, and the weights made of them,
stay the router's own, with their gradients.

Every architecture of transformers has its own router, whose code ends in one `torch.topk` over all experts.
During a replay this call returns the given experts and their values. Each layer gets its tokens' experts by
the keyword `routing`, which travels through the model as `packing` does; gradient checkpointing therefore
recomputes the same choice.
"""

import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from openrlhf.errors import ErrorCode, UsageError
from openrlhf.models.sequence_parallel import SequenceParallel
from openrlhf.types import own_choice

ROUTER = re.compile(r"TopK_?Router$", re.IGNORECASE)
"""Matches transformers' class names of routers that end in one choice of `top_k` experts."""
LAYER = re.compile(r"(?P<layer>.*\blayers\.(?P<index>\d+))\.")


class NotReplayed(RuntimeError):
    """Raised when a router has chosen its experts by itself."""


class Choice(TorchFunctionMode):
    """Makes the `torch.topk` that chooses the best `top_k` of `num_experts` return the `given` experts (n,
    K), one row for each token, inside the context. Tokens marked with `own_choice` keep the router's choice.
    """

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.sizes = [router.num_experts, router.top_k]
        self.given: Tensor | None = None
        """Experts to choose; None: the router chooses."""
        self.was_made = False

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        answer = func(*args, **kwargs or {})
        if func not in (torch.topk, Tensor.topk) or not self._is_over_experts(args[0], answer):
            return answer
        assert self.given is not None  # the context is entered only with `given`
        own = self.given == own_choice(self.given)
        indices = torch.where(own, answer.indices, self.given.long())
        self.was_made = True
        return torch.return_types.topk((args[0].gather(-1, indices), indices))

    def _is_over_experts(self, scores: Tensor, answer: Any) -> bool:
        """Returns whether this choice is over the experts, not over groups of experts."""
        return scores.dim() == 2 and [scores.shape[1], answer.indices.shape[1]] == self.sizes


class Replay:
    """Replays the experts of a model whose routers support it."""

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
        """Returns the `routing` argument of the model's call from a row's experts `of_row` (N, M, K), padded
        to the `num_tokens` that a pass reads (on this rank, if it has a slice of the row). Padding tokens
        keep the router's choice."""
        missing = num_tokens * (1 if sharing is None else sharing.size) - len(of_row)
        padded = F.pad(of_row, (0, 0, 0, 0, 0, missing), value=own_choice(of_row))
        return padded if sharing is None else sharing.own(padded)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (M, K) of a token's routing; M also counts layers without experts."""
        return 1 + max(self.layers), self.choices[0].sizes[1]

    def check(self) -> None:
        """Raises NotReplayed if a layer did not replay its choice in the last pass."""
        left_out = [i for i, choice in zip(self.layers, self.choices, strict=True) if not choice.was_made]
        if left_out:
            raise NotReplayed(f"the routers of layers {left_out} ignore the experts that they are given")
        for choice in self.choices:
            choice.was_made = False


def _replaying(layer: nn.Module, index: int, router: nn.Module) -> Choice:
    """Makes `layer` pass its experts from the keyword `routing` on to its router."""
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
    """Raises UsageError, without loading weights, if the routers of `path` do not support replay."""
    model_type: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    names = vars(sys.modules[model_type.__module__]) if model_type else {}
    masks_weights = getattr(config, "topk_method", "") == "group_limited_greedy"
    if masks_weights or not any(_chooses_once(name, of_name) for name, of_name in names.items()):
        text = (
            f"a {config.model_type} ({flag} {path}) has no router to which chosen experts can be given.\n"
            "Remove the flag."
        )
        raise UsageError(ErrorCode.UNSUPPORTED, text, flag="--algo.router_replay")


def _chooses_once(name: str, router: Any) -> bool:
    return ROUTER.search(name) is not None and "topk(" in inspect.getsource(router)
