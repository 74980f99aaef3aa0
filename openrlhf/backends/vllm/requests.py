"""Converts sampling parameters to vLLM's, and vLLM's outputs to answers."""

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from openrlhf.backends.rollout import find_nuclei, likely_tokens
from openrlhf.completions import Completion, Completions, SamplingParams
from openrlhf.types import not_none, unrouted

if TYPE_CHECKING:
    import vllm
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput


def library():
    """Imports vLLM. Processes call it once their environment is set."""
    from openrlhf.backends.vllm import library as names  # late: see there

    return names


def vllm_params(params: SamplingParams, *, stream: bool = False) -> "vllm.SamplingParams":
    """Converts sampling parameters to vLLM's. Raises ValueError if vLLM rejects them. `stream`: return tokens
    as they are sampled."""
    names = library()
    asked: dict[str, Any] = dict(vars(params))
    kept, likely, log_probs = asked.pop("max_kept_tokens"), asked.pop("num_likely"), params.logprobs or 0
    if (kept or likely) and log_probs >= 0:
        # The most likely tokens are the top-p/top-k nucleus. One more token than top-k shows that the nucleus
        # is complete: the token has probability 0.
        kept = min(kept, params.top_k + 1) if params.top_k > 0 else kept
        asked["logprobs"] = max(log_probs, kept, likely)
    asked["output_kind"] = names.RequestOutputKind.DELTA if stream else names.RequestOutputKind.FINAL_ONLY
    asked["flat_logprobs"] = True  # halves the time per token, and can be read like a list
    asked["skip_clone"] = True  # nothing else refers to this object
    return names.SamplingParams(**asked)


def completions(output: "RequestOutput", params: SamplingParams) -> Completions:
    """Converts vLLM's output of a request with `params`."""
    read = not_none(output.prompt_token_ids)
    answers = [_completion(answer, len(read), params) for answer in output.outputs]
    return Completions(prompt_token_ids=read, outputs=answers, own=output)


def _completion(answer: "CompletionOutput", prompt_length: int, params: SamplingParams) -> Completion:
    log_probs = cast("FlatLogprobs | None", answer.logprobs)
    spans = [(int(span.version), span.end - span.start) for span in answer.weight_versions or ()]
    if not spans and len(answer.token_ids):
        spans = [(0, len(answer.token_ids))]
    return Completion(
        index=answer.index,
        token_ids=answer.token_ids,
        text=answer.text,
        finish_reason=not_none(answer.finish_reason),
        logprobs=cast(Any, log_probs),
        log_probs=None if log_probs is None else _sampled_log_probs(log_probs),
        versions=np.array(spans, np.int32).reshape(-1, 2),
        kept=find_nuclei(*_rows(not_none(log_probs))) if params.max_kept_tokens else None,
        likely=likely_tokens(*_rows(not_none(log_probs)), params.num_likely) if params.num_likely else None,
        routing=_routing(answer.routed_experts, prompt_length + len(answer.token_ids)),
        own=answer,
    )


def _routing(of_read: np.ndarray | None, num_tokens: int) -> np.ndarray | None:
    """Returns the routing of all `num_tokens` tokens, (L, M, K). The last token, which vLLM never reads, gets
    `types.own_choice`. None if vLLM returned no routing."""
    if of_read is None:
        return None
    of_read = of_read[: num_tokens - 1]
    return np.concatenate([of_read, unrouted(num_tokens - len(of_read), of_read)])


def _sampled_log_probs(log_probs: "FlatLogprobs") -> np.ndarray:
    """Returns the log-probs of the sampled tokens, (A,), which are the first ones at each position."""
    values = np.asarray(log_probs.logprobs, np.float32)
    return values if len(values) == len(log_probs) else values[log_probs.start_indices]


def _rows(log_probs: "FlatLogprobs") -> tuple[np.ndarray, np.ndarray]:
    """Returns ids and log-probs, (A, 1 + K): the sampled token, then the most likely ones."""
    shape = len(log_probs), len(log_probs.token_ids) // max(1, len(log_probs))
    ids = np.asarray(log_probs.token_ids, np.int32).reshape(shape)
    values = np.asarray(log_probs.logprobs, np.float64).reshape(shape)
    return ids, values
