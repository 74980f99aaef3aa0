"""Compares the experts that vLLM reports for each token, with the options of an engine on a GPU, with the
model's routers; also for a request that a weight sync pauses."""

import asyncio
import copy
from dataclasses import replace

import numpy as np
import torch
from sending import Client, Trainer, differences, options_of, sync_under_way

from openrlhf.backends.distributed import free_port
from openrlhf.backends.vllm.engine import VLLMEngine
from openrlhf.backends.weight_sync.sender import WeightSender
from openrlhf.completions import Completions, SamplingParams
from openrlhf.models.policy import PolicyModel
from openrlhf.types import not_none

PROMPT = [3 + i % 200 for i in range(140)]


def chosen(policy: PolicyModel, token_ids: list[int], top_k: int) -> np.ndarray:
    """(L, M, K) experts in the order of their numbers."""
    with torch.no_grad():
        layers = policy.model(torch.tensor(token_ids)[None], output_router_logits=True).router_logits
    return torch.stack([layer.topk(top_k).indices.sort().values for layer in layers], 1).numpy()


def read(output: Completions) -> list[int]:
    return [*PROMPT, *output.outputs[0].token_ids]


async def main(spec: dict) -> dict:
    torch.manual_seed(0)
    trainer = Trainer(spec["model"], "fp32")
    top_k = trainer.policy.model.config.num_experts_per_tok
    options = options_of(spec["model"], enable_prefix_caching=True, returns_routing=True, enforce_eager=True)
    engine = VLLMEngine(
        replace(options, on_gpu=spec["on_gpu"], kv_cache_gb=0.25, max_num_seqs=16, keep_cache=False)
    )
    await engine.start()
    client = Client(engine)
    meeting = {"backend": "gloo", "address": "127.0.0.1", "port": free_port(), "rank": 0}
    sender = await asyncio.to_thread(WeightSender, trainer, client, **meeting)
    await asyncio.to_thread(sender.send, 1)

    asked = [SamplingParams(max_tokens=n, seed=n, detokenize=False) for n in (8, 12, 40)]
    for params in asked:
        params.ignore_eos, params.logprobs = True, 0
    found: dict = {"answers": []}
    first = await engine.generate(PROMPT, asked[0])  # the next requests find its first block
    for output in (first, *await asyncio.gather(*(engine.generate(PROMPT, params) for params in asked[:2]))):
        routing, own = output.outputs[0].routed_experts, chosen(trainer.policy, read(output), top_k)
        found["answers"].append(
            {
                "cached": output.num_cached_tokens,
                "shape": routing.shape,
                "type": str(routing.dtype),
                "differ": int((np.sort(routing[: len(own)]) != own[: len(routing)]).any((1, 2)).sum()),
            }
        )
    before = copy.deepcopy(trainer.policy)
    under_way = asyncio.create_task(engine.generate(PROMPT, asked[2]))
    await sync_under_way(engine, PROMPT, trainer, sender)
    output = await under_way
    answer = output.outputs[0]
    found["versions"] = [
        [int(span.version), span.end - span.start] for span in not_none(answer.weight_versions)
    ]
    routing = np.sort(not_none(answer.routed_experts))
    found["paused"] = [
        (routing != chosen(policy, read(output), top_k)[:-1]).any((1, 2)).tolist()
        for policy in (before, trainer.policy)
    ]
    log_probs = [of[token].logprob for token, of in zip(answer.token_ids, answer.logprobs, strict=True)]
    count = found["versions"][0][1]
    found["old"] = max(differences(before, read(output), log_probs)[:count])
    found["new"] = max(differences(trainer.policy, read(output), log_probs)[count:])
    engine.shutdown()
    return found
