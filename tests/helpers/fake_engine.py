"""Stand-in for the engine: requests and answers are vLLM's own records, with answers by hand."""

from collections.abc import Callable, Sequence

import vllm
from vllm.logprobs import Logprob, create_sample_logprobs
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan

from openrlhf.backends.vllm.requests import completions, vllm_params
from openrlhf.completions import Completions, SamplingParams

Answer = Sequence[int] | Callable[[list[int]], Sequence[int]]


def log_prob(position: int) -> float:
    """Returns the log-prob of the action at `position` of every answer."""
    return -0.5 * (position + 1)


class Engine:
    """Engine that gives its answers one after the other, the last one for ever, and remembers its
    requests."""

    def __init__(
        self, *answers: Answer, finish_reason: str = "stop", spans: list[WeightVersionSpan] | None = None
    ) -> None:
        self.answers, self.finish_reason, self.spans = answers, finish_reason, spans
        self.asked: list[tuple[list[int], vllm.SamplingParams]] = []

    async def generate(
        self,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        multi_modal_data: dict | None = None,
    ) -> Completions:
        answer = self.answers[min(len(self.asked), len(self.answers) - 1)]
        params = vllm_params(SamplingParams.of(sampling_params))
        self.asked.append((prompt_token_ids, params))
        token_ids = list(answer(prompt_token_ids) if callable(answer) else answer)
        outputs = [self.output(i, token_ids, params) for i in range(params.n)]
        output = RequestOutput("id", None, prompt_token_ids, None, outputs, finished=True)
        return completions(output, sampling_params)

    def output(self, index: int, token_ids: list[int], params: vllm.SamplingParams) -> CompletionOutput:
        """Builds an output whose likely tokens follow the sampled one, as in vLLM's."""
        log_probs = create_sample_logprobs(params.flat_logprobs)
        for i, token in enumerate(token_ids):
            likely = {1000 + k: Logprob(-9.0) for k in range(params.logprobs or 0)}
            log_probs.append({token: Logprob(log_prob(i))} | likely)
        return CompletionOutput(
            index=index,
            text="".join(map(chr, token_ids)) if params.detokenize else "",
            token_ids=token_ids,
            cumulative_logprob=None,
            logprobs=log_probs,
            finish_reason=self.finish_reason,
            weight_versions=self.spans,
        )
