"""Mixtures of experts that send every token to the experts that the sampler sent it to (rollout routing
replay, https://arxiv.org/abs/2510.11370).

A router scores all experts and takes the best of them. Where two score nearly alike, rounding decides, and
what samples rounds otherwise than what trains: a token that goes to another expert gets another log-prob, by
far more than rounding. So the choice is replayed, and nothing else: scores, and weights made of them, are
the router's own, with their gradients.

Every architecture of transformers has a router of its own, whose code ends in one `torch.topk` over all
experts. Inside of it this one call answers with the experts that were given, and their values. Where the
tokens' experts are is said to each layer by the keyword `routing`, which travels through the model as
`packing` does; so what gradient checkpointing computes again chooses alike.
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

from openrlhf.models.sequence_parallel import SequenceParallel
from openrlhf.types import own_choice

ROUTER = re.compile(r"TopK_?Router$", re.IGNORECASE)
"""What transformers calls the classes of routers that end in one choice of `top_k` experts."""
LAYER = re.compile(r"(?P<layer>.*\blayers\.(?P<index>\d+))\.")


class NotReplayed(RuntimeError):
    """A router has chosen by itself."""


class Choice(TorchFunctionMode):
    """Inside, the one `torch.topk` that chooses the best `top_k` of `num_experts` answers with those that are
    `given` (n, K), one row for each token."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.sizes = [router.num_experts, router.top_k]
        self.given: Tensor | None = None
        """None: routers choose."""
        self.was_made = False

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        answer = func(*args, **kwargs or {})
        if func not in (torch.topk, Tensor.topk) or not self._is_over_experts(args[0], answer):
            return answer
        assert self.given is not None  # only then it is entered
        own = self.given == own_choice(self.given)
        indices = torch.where(own, answer.indices, self.given.long())
        self.was_made = True
        return torch.return_types.topk((args[0].gather(-1, indices), indices))

    def _is_over_experts(self, scores: Tensor, answer: Any) -> bool:
        """Not one of groups of experts."""
        return scores.dim() == 2 and [scores.shape[1], answer.indices.shape[1]] == self.sizes


class Replay:
    """Of a model whose routers can be told what to choose."""

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
        """What the model must be called with as `routing`, where a row has `of_row` (N, M, K): of the
        `num_tokens` that a pass reads, also of those behind the row, or of this rank's slice."""
        missing = num_tokens * (1 if sharing is None else sharing.size) - len(of_row)
        padded = F.pad(of_row, (0, 0, 0, 0, 0, missing), value=own_choice(of_row))
        return padded if sharing is None else sharing.own(padded)

    @property
    def shape(self) -> tuple[int, int]:
        """(M, K) of a routing: layers that have no experts are counted too."""
        return 1 + max(self.layers), self.choices[0].sizes[1]

    def check(self) -> None:
        """Raise NotReplayed where a layer has not taken part in the pass that was just made."""
        left_out = [i for i, choice in zip(self.layers, self.choices, strict=True) if not choice.was_made]
        if left_out:
            raise NotReplayed(f"its routers in layers {left_out} do not choose what they are told")
        for choice in self.choices:
            choice.was_made = False


def _replaying(layer: nn.Module, index: int, router: nn.Module) -> Choice:
    """Have `layer` hand on to its router what it is told in the keyword `routing`."""
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
    """Raise ValueError, without loading weights, where the routers of `path` cannot be told what to do."""
    model_type: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    names = vars(sys.modules[model_type.__module__]) if model_type else {}
    masks_weights = getattr(config, "topk_method", "") == "group_limited_greedy"
    if masks_weights or not any(_chooses_once(name, of_name) for name, of_name in names.items()):
        raise ValueError(
            f"--algo.router_replay: a {config.model_type} ({flag} {path}) has no routers that could be told "
            "which experts to choose.\nRemove it."
        )


def _chooses_once(name: str, router: Any) -> bool:
    return ROUTER.search(name) is not None and "topk(" in inspect.getsource(router)
