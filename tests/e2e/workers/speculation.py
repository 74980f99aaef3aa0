"""Samples of an engine with speculative decoding, and the model's own probabilities of the same tokens."""

import asyncio
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from sending import options_of
from transformers import AutoModelForCausalLM

from openrlhf.backends.vllm.engine import VLLMEngine
from openrlhf.completions import SamplingParams
from openrlhf.config.speculation import parse_speculation

PROMPT_LENGTH, MAX_TOKENS, SAMPLES = 24, 12, 2000
REPEATED = 0.8
"""Probability of the token that the prompt repeats, right after the prompt."""


@torch.no_grad()
def logits_of(model: torch.nn.Module, token: int, count: int) -> torch.Tensor:
    """Returns the logits after each of the last MAX_TOKENS of `count` repetitions of a token."""
    return model(torch.full((1, count), token)).logits[0, -MAX_TOKENS:].double()


def favourite(model: torch.nn.Module) -> int:
    """Returns a token that is the most likely one after its own repetitions."""
    token = 5
    for _ in range(20):
        token = int(logits_of(model, token, PROMPT_LENGTH)[-1].argmax())
    return token


def temperature_for(logits: torch.Tensor, token: int) -> float:
    """Returns the temperature at which `token`, the most likely one, has the probability REPEATED."""
    low, high = 1e-3, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        is_lower = (logits / middle).softmax(-1)[token] > REPEATED
        low, high = (middle, high) if is_lower else (low, middle)
    return low


async def main(spec: dict) -> dict:
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32).eval()
    token = favourite(model)
    temperature = temperature_for(logits_of(model, token, PROMPT_LENGTH)[-1], token)
    prompt = [token] * PROMPT_LENGTH
    options = options_of(spec["model"], speculation=parse_speculation(spec["speculative"]))
    engine = VLLMEngine(replace(options, load_weights=True))
    await engine.start()
    others = [i for i in range(engine.vocabulary) if i != token]
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, detokenize=False, logprobs=0)
    params.stop_token_ids, params.ignore_eos = others, True
    asked = [replace(params, n=100, seed=1000 * i) for i in range(SAMPLES // 100)]
    outputs = await asyncio.gather(*(engine.generate(prompt, one) for one in asked))
    answers = list(chain.from_iterable(output.outputs for output in outputs))
    again = await engine.generate(prompt, asked[0])
    greedy = SamplingParams(max_tokens=40, temperature=0.0, detokenize=False)
    greedy.ignore_eos = True
    pieces = [len(piece) async for piece in engine.stream(prompt, greedy)]
    log_probs = (
        (logits_of(model, token, PROMPT_LENGTH + MAX_TOKENS - 1) / temperature).log_softmax(-1).numpy()
    )
    found = {
        "token": token,
        "first": [int(answer.token_ids[0]) for answer in answers],
        "lengths": [len(answer.token_ids) for answer in answers],
        "first probabilities": np.exp(log_probs[0]).tolist(),
        "repeated probabilities": np.exp(log_probs[:, token]).tolist(),
        "gap": max(
            float(np.abs(answer.log_probs - log_probs[range(len(answer.token_ids)), answer.token_ids]).max())
            for answer in answers
        ),
        "repeatable": [list(answer.token_ids) for answer in again.outputs]
        == [list(answer.token_ids) for answer in answers[:100]],
        "pieces": pieces,
    }
    engine.shutdown()
    return found
