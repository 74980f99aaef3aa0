"""Generates answers with a transformers model. Each answer depends on its own seed, not on the other answers
of its batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from openrlhf.completions import LogProb, SamplingParams


@dataclass(frozen=True, slots=True)
class Likely(Sequence):
    """The log-probs of the sampled token and of the K most likely tokens at each position. As a sequence, it
    has a mapping from token id to LogProb for each position, which is built on access."""

    ids: Tensor
    """(A, 1 + K) token ids."""
    log_probs: Tensor
    """(A, 1 + K) float32 log-probs under the sampling distribution; -inf for tokens that truncation
    removed."""

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return Likely(self.ids[place], self.log_probs[place])
        ids, log_probs = self.ids[place].tolist(), self.log_probs[place].tolist()
        return {token: LogProb(log_prob) for token, log_prob in zip(ids, log_probs, strict=True)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """A generated answer."""

    token_ids: list[int]
    """Token ids of the answer without the prompt, including the stop token."""
    finish_reason: str
    """One of stop, length or abort."""
    likely: Likely | None = None
    """Log-probs of likely tokens; None if not requested."""


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    seeds: Sequence[int],
    params: SamplingParams,
    *,
    pad_token_id: int,
    on_token: Callable[[int], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    likely: int | None = None,
) -> list[Generated]:
    """Generates one answer for each prompt of token ids, each with its own seed. Prompts are padded on the
    left.

    params: `max_tokens` must be set; `seed` and `n` are not read.
    on_token: called with each new token of the answer; for a single prompt.
    stop: called after each token; True ends all answers.
    likely: number of most likely tokens per position whose log-probs are returned besides that of the sampled
        token. None: no log-probs.
    """
    longest = max(map(len, prompts))
    input_ids = torch.full((len(prompts), longest), pad_token_id)
    mask = torch.zeros(len(prompts), longest, dtype=torch.bool)
    for i, prompt in enumerate(prompts):
        input_ids[i, longest - len(prompt) :] = torch.tensor(prompt)
        mask[i, longest - len(prompt) :] = True
    device = model.device
    sampling = Sampling(params, mask.to(device), seeds, likely)
    # Defaults in the model's folder (penalties, top-k) must not override the flags.
    model.generation_config = GenerationConfig()
    output = cast(Any, model).generate(
        input_ids.to(device),
        attention_mask=mask.long().to(device),
        generation_config=GenerationConfig(
            max_new_tokens=params.max_tokens,
            do_sample=False,  # Sampling adds the noise whose argmax is a sample
            eos_token_id=list(params.stop_token_ids or ()),
            pad_token_id=pad_token_id,
            use_cache=True,
        ),
        logits_processor=LogitsProcessorList([sampling]),
        stopping_criteria=StoppingCriteriaList([_AfterEachToken(on_token, stop)]),
    )
    answers = [_generated(ids.tolist(), params, stop()) for ids in output[:, longest:]]
    return [replace(a, likely=sampling.select_likely(i, len(a.token_ids))) for i, a in enumerate(answers)]


class Sampling(LogitsProcessor):
    """Converts logits to scores whose argmax is the sampled token.

    Repetition penalty, temperature and truncation (min-p, top-k, top-p) apply in vLLM's order. Then -log(E)
    is added, with E from an exponential distribution: the argmax of log p_i - log E_i is distributed as p
    (Gumbel 1954). Each row draws from its own generator.
    """

    def __init__(
        self, params: SamplingParams, prompt_mask: Tensor, seeds: Sequence[int], likely: int | None = None
    ) -> None:
        """Creates one random generator per seed. prompt_mask: (B, prompt) bool, False for padding. likely:
        see `generate`."""
        self.params = params
        self.prompt_mask = prompt_mask
        self.generators = [torch.Generator(prompt_mask.device).manual_seed(seed) for seed in seeds]
        self.truncations = [
            *([MinPLogitsWarper(params.min_p)] if params.min_p > 0 else []),
            *([TopKLogitsWarper(params.top_k)] if params.top_k > 0 else []),
            *([TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []),
        ]
        self.num_likely, self.found = likely, []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns scores (B, V) from the tokens so far (B, L) and logits (B, V)."""
        params = self.params
        scores = scores.float()
        if params.repetition_penalty != 1:
            scores = torch.where(self._seen(input_ids, scores), self._penalised(scores), scores)
        if params.temperature == 0:
            return self._recorded(scores, scores)
        scores = scores / params.temperature
        for truncate in self.truncations:
            scores = truncate(cast(Any, input_ids), cast(Any, scores))
        return self._recorded(scores, scores - self._exponential(scores).log())

    def select_likely(self, row: int, length: int) -> Likely | None:
        """Returns the likely tokens at the first `length` positions of answer `row`; None if not
        requested."""
        if self.num_likely is None:
            return None
        ids, log_probs = (torch.stack(of)[:length, row] for of in zip(*self.found, strict=True))
        return Likely(ids, log_probs)

    def _recorded(self, scores: Tensor, drawn: Tensor) -> Tensor:
        """Records the likely tokens if requested, and returns `drawn`, whose argmax is a sample from the
        softmax of `scores`, both (B, V)."""
        if self.num_likely is not None:
            log_probs = scores.log_softmax(-1)
            ids = torch.cat([drawn.argmax(-1, True), log_probs.topk(self.num_likely).indices], 1)
            self.found.append((ids, log_probs.gather(1, ids)))
        return drawn

    def _seen(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns (B, V) bool, True for tokens that are in the prompt or the answer. Padding does not
        count."""
        new = input_ids.shape[1] - self.prompt_mask.shape[1]
        real = torch.nn.functional.pad(self.prompt_mask, (0, new), value=True)
        rows, columns = real.nonzero(as_tuple=True)
        seen = torch.zeros_like(scores, dtype=torch.bool)
        seen[rows, input_ids[rows, columns]] = True
        return seen

    def _penalised(self, scores: Tensor) -> Tensor:
        penalty = self.params.repetition_penalty
        return torch.where(scores > 0, scores / penalty, scores * penalty)

    def _exponential(self, scores: Tensor) -> Tensor:
        drawn = torch.empty_like(scores)
        for row, generator in zip(drawn, self.generators, strict=True):
            row.exponential_(generator=generator)
        return drawn.clamp_min_(torch.finfo(drawn.dtype).tiny)


class _AfterEachToken(StoppingCriteria):
    """Passes each new token to `on_token` and ends generation when `stop` returns True."""

    def __init__(self, on_token: Callable[[int], None] | None, stop: Callable[[], bool]) -> None:
        self.on_token, self.stop = on_token, stop

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Any:
        if self.on_token is not None:
            self.on_token(int(input_ids[0, -1]))
        return torch.full((input_ids.shape[0],), self.stop(), device=input_ids.device, dtype=torch.bool)


def _generated(token_ids: list[int], params: SamplingParams, stopped: bool) -> Generated:
    """Removes the padding behind the first stop token, which was added while other answers of the batch
    continued."""
    for i, token in enumerate(token_ids):
        if token in (params.stop_token_ids or ()):
            return Generated(token_ids=token_ids[: i + 1], finish_reason="stop")
    return Generated(token_ids=token_ids, finish_reason="abort" if stopped else "length")
