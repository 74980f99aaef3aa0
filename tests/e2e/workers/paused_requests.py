"""Requests that a weight sync pauses, and requests after it; reports which weights computed what. Weights
travel from a transformers model in this process to a vLLM engine."""

import asyncio
import copy

import torch
from sending import Client, Trainer, differences, options_of

from openrlhf.backends.distributed import free_port
from openrlhf.backends.vllm.engine import VLLMEngine
from openrlhf.backends.weight_sync.sender import WeightSender
from openrlhf.completions import Completions, SamplingParams

PROMPT = [3 + i % 200 for i in range(140)]
"""Prompt of one whole block of vLLM's cache on a CPU and a part of the next."""


def params(seed: int, *, tokens: int = 100) -> SamplingParams:
    asked = SamplingParams(max_tokens=tokens, seed=seed, detokenize=False)
    asked.logprobs, asked.ignore_eos = 0, True
    return asked


def answer_of(output: Completions) -> tuple[list[int], list[float], list[list[int]]]:
    answer = output.outputs[0]
    log_probs = [d[t].logprob for t, d in zip(answer.token_ids, answer.logprobs, strict=True)]
    versions = [[int(span.version), span.end - span.start] for span in answer.weight_versions or ()]
    return [*PROMPT, *answer.token_ids], log_probs, versions


async def main(spec: dict) -> dict:
    torch.manual_seed(0)
    trainer = Trainer(spec["model"], "fp32")
    options = options_of(spec["model"], enable_prefix_caching=True, keep_cache=spec["keep_cache"])
    engine = VLLMEngine(options)
    await engine.start()
    client = Client(engine)
    meeting = {"backend": "gloo", "address": "127.0.0.1", "port": free_port(), "rank": 0}
    sender = await asyncio.to_thread(WeightSender, trainer, client, **meeting)
    await asyncio.to_thread(sender.send, 1)
    before = copy.deepcopy(trainer.policy)
    trainer.learn()
    under_way = asyncio.create_task(engine.generate(PROMPT, params(0)))
    seen = 0
    async for tokens in engine.stream(PROMPT, params(1)):  # runs beside the paused request
        seen += len(tokens)
        if seen == 20:
            await asyncio.to_thread(sender.send, 2)
    token_ids, log_probs, versions = answer_of(await under_way)
    later = [await engine.generate(PROMPT, params(2, tokens=8)) for _ in range(2)]
    new_ids, new_log_probs, new_versions = answer_of(later[0])
    count = versions[0][1]
    found = {
        "versions": versions,
        "old": max(differences(before, token_ids, log_probs)[:count]),
        "new": max(differences(trainer.policy, token_ids, log_probs)[count:], default=None),
        "new versions": new_versions,
        "of new requests": max(differences(trainer.policy, new_ids, new_log_probs)),
        "cached": [output.num_cached_tokens for output in later],
    }
    engine.shutdown()
    return found
