"""Stand-in for an engine whose answers are vLLM's own processing of given logits."""

from typing import Any

import torch
from vllm.logprobs import append_logprobs_for_next_position, create_sample_logprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_only, apply_top_k_top_p_pytorch

from openrlhf.backends.vllm.requests import completions, vllm_params

LOGITS = torch.tensor([[0.0, 3.0, 2.0, 2.0, 1.0, *[-5.0] * 12], [4.0, 3.0, 2.0, 1.0, 0.0, *[-9.0] * 12]])


class Sampled:
    """Engine whose every answer is vLLM's own processing of `logits` (A, V)."""

    def __init__(self, logits: torch.Tensor, tokens: list[int] | None) -> None:
        """Sets the answer's tokens; with `tokens` None they are sampled at random."""
        self.logits, self.tokens = logits, tokens
        self.log_probs: torch.Tensor | None = None

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None) -> Any:
        params, count = vllm_params(sampling_params), len(self.logits)
        top_k = torch.full((count,), params.top_k if params.top_k > 0 else self.logits.shape[1])
        if params.top_p == 1:
            kept = apply_top_k_only(self.logits.clone(), top_k)
        else:
            kept = apply_top_k_top_p_pytorch(
                self.logits.clone(), top_k, torch.full((count,), params.top_p), allow_cpu_sync=True
            )
        self.log_probs = kept.log_softmax(-1)
        tokens = self.tokens
        if tokens is None:
            tokens = self.log_probs.exp().multinomial(1)[:, 0].tolist()
        # in the layout of vLLM's `Sampler.gather_logprobs`
        likely = self.log_probs.topk(params.logprobs).indices
        ids = torch.cat([torch.tensor(tokens, dtype=torch.int64)[:, None], likely], dim=1)
        values, flat = self.log_probs.gather(-1, ids), create_sample_logprobs(params.flat_logprobs)
        for of_ids, of_values in zip(ids.tolist(), values.tolist(), strict=True):
            nothing = [None] * len(of_ids)
            append_logprobs_for_next_position(flat, of_ids, of_values, nothing, 1, params.logprobs)
        answer = CompletionOutput(0, "", tokens, None, flat, finish_reason="stop")
        output = RequestOutput("id", None, prompt_token_ids, None, [answer], finished=True)
        return completions(output, sampling_params)
