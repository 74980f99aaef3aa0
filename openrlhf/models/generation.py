"""Answers of a transformers model, each decided by its own seed: not by what else is in its batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from openrlhf.completions import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoding:
    """How answers are sampled; engine-neutral."""

    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    greedy: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def sampling_params(self, seed: int) -> SamplingParams:
        """The request of an engine for one answer, as tokens."""
        return SamplingParams(
            temperature=0.0 if self.greedy else self.temperature,
            top_p=1.0 if self.greedy else self.top_p,
            repetition_penalty=self.repetition_penalty,
            max_tokens=self.max_new_tokens,
            seed=seed,
            stop_token_ids=list(self.stop_token_ids),
            detokenize=False,
            skip_special_tokens=False,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    token_ids: list[int]
    """Without the prompt; a stop token that ended it included."""
    finish_reason: str
    """stop, length or abort."""


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    seeds: Sequence[int],
    decoding: Decoding,
    *,
    pad_token_id: int,
    on_token: Callable[[int], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> list[Generated]:
    """Answers to prompts of token ids, padded on the left. One seed for each.

    on_token: called with each token of the answer to a single prompt as it comes.
    stop: asked after each token; True ends all answers as they are.
    """
    longest = max(map(len, prompts))
    input_ids = torch.full((len(prompts), longest), pad_token_id)
    mask = torch.zeros(len(prompts), longest, dtype=torch.bool)
    for i, prompt in enumerate(prompts):
        input_ids[i, longest - len(prompt) :] = torch.tensor(prompt)
        mask[i, longest - len(prompt) :] = True
    device = model.device
    # Whatever the model's folder recommends (penalties, top-k) is not what the flags say.
    model.generation_config = GenerationConfig()
    output = cast(Any, model).generate(
        input_ids.to(device),
        attention_mask=mask.long().to(device),
        generation_config=GenerationConfig(
            max_new_tokens=decoding.max_new_tokens,
            do_sample=False,  # the processor has added the randomness: its argmax is a sample
            eos_token_id=list(decoding.stop_token_ids),
            pad_token_id=pad_token_id,
            use_cache=True,
        ),
        logits_processor=LogitsProcessorList([Sampling(decoding, mask.to(device), seeds)]),
        stopping_criteria=StoppingCriteriaList([_Asked(stop)]),
        streamer=None if on_token is None else _Listener(on_token),
    )
    return [_generated(ids.tolist(), decoding, stop()) for ids in output[:, longest:]]


class Sampling(LogitsProcessor):
    """Turns logits into scores whose argmax is the next token.

    Penalty, temperature and top-p in vLLM's order, then -log(E) with E from an exponential distribution is
    added: the argmax of log p_i - log E_i is distributed as p (Gumbel 1954). Each row draws from a generator
    of its own.
    """

    def __init__(self, decoding: Decoding, prompt_mask: Tensor, seeds: Sequence[int]) -> None:
        """prompt_mask: (B, prompt) bool, False where there is padding."""
        self.decoding = decoding
        self.prompt_mask = prompt_mask
        self.generators = [torch.Generator(prompt_mask.device).manual_seed(seed) for seed in seeds]
        self.top_p = TopPLogitsWarper(decoding.top_p) if decoding.top_p < 1 else None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, L) tokens so far, (B, V) logits -> (B, V)"""
        decoding = self.decoding
        scores = scores.float()
        if decoding.repetition_penalty != 1:
            scores = torch.where(self._seen(input_ids, scores), self._penalised(scores), scores)
        if decoding.greedy:
            return scores
        scores = scores / decoding.temperature
        if self.top_p is not None:
            scores = self.top_p(cast(Any, input_ids), cast(Any, scores))
        return scores - self._exponential(scores).log()

    def _seen(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V) True for tokens of the prompt and of the answer; padding does not count."""
        new = input_ids.shape[1] - self.prompt_mask.shape[1]
        real = torch.nn.functional.pad(self.prompt_mask, (0, new), value=True)
        rows, columns = real.nonzero(as_tuple=True)
        seen = torch.zeros_like(scores, dtype=torch.bool)
        seen[rows, input_ids[rows, columns]] = True
        return seen

    def _penalised(self, scores: Tensor) -> Tensor:
        penalty = self.decoding.repetition_penalty
        return torch.where(scores > 0, scores / penalty, scores * penalty)

    def _exponential(self, scores: Tensor) -> Tensor:
        drawn = torch.empty_like(scores)
        for row, generator in zip(drawn, self.generators, strict=True):
            row.exponential_(generator=generator)
        return drawn.clamp_min_(torch.finfo(drawn.dtype).tiny)


class _Listener(BaseStreamer):
    """transformers first hands over the prompt, then each token."""

    def __init__(self, on_token: Callable[[int], None]) -> None:
        self.on_token = on_token
        self.heard_prompt = False

    def put(self, value: Tensor) -> None:
        if self.heard_prompt:
            self.on_token(int(value))
        self.heard_prompt = True

    def end(self) -> None:
        pass


class _Asked(StoppingCriteria):
    def __init__(self, stop: Callable[[], bool]) -> None:
        self.stop = stop

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Any:
        return torch.full((input_ids.shape[0],), self.stop(), device=input_ids.device, dtype=torch.bool)


def _generated(token_ids: list[int], decoding: Decoding, stopped: bool) -> Generated:
    """Cuts what follows the first stop token: padding, while others of the batch went on."""
    for i, token in enumerate(token_ids):
        if token in decoding.stop_token_ids:
            return Generated(token_ids=token_ids[: i + 1], finish_reason="stop")
    return Generated(token_ids=token_ids, finish_reason="abort" if stopped else "length")
