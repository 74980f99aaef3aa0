"""A dataset's worth of answers or rewards, by vLLM or by transformers, in whatever order is fast."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from openrlhf.datasets.inference import Answer, Question
from openrlhf.models.generation import Decoding, Generated, generate
from openrlhf.models.scorer import ScoreModel
from openrlhf.rollout.seeds import seed_at
from openrlhf.types import PackedRow


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One answer that is wanted."""

    question: Question
    sample_index: int
    seed: int

    @property
    def key(self) -> tuple[int, int]:
        """(prompt_id, sample_index)"""
        return self.question.prompt_id, self.sample_index


OnAnswers = Callable[[Sequence[Request], Sequence[Generated]], None]


def requests_for(questions: Sequence[Question], *, num_samples: int, run_seed: int) -> list[Request]:
    return [
        Request(
            question=question,
            sample_index=i,
            seed=seed_at(run_seed, "batch_inference", question.prompt_id, i),
        )
        for question in questions
        for i in range(num_samples)
    ]


def sampling_params(decoding: Decoding, seed: int, *, max_new_tokens: int, stream: bool = False) -> Any:
    """vLLM's word for it."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=0.0 if decoding.greedy else decoding.temperature,
        top_p=1.0 if decoding.greedy else decoding.top_p,
        repetition_penalty=decoding.repetition_penalty,
        max_tokens=max_new_tokens,
        seed=seed,
        stop_token_ids=list(decoding.stop_token_ids),
        detokenize=False,
        skip_special_tokens=False,
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
    )


async def answer_with_vllm(
    engine: Any, requests: Sequence[Request], decoding: Decoding, on_answers: OnAnswers, *, concurrency: int
) -> None:
    """`engine.generate` as in engine/vllm_engine.py; `concurrency` requests are with it at a time. The first
    error stops all."""
    waiting = iter(requests)

    async def work() -> None:
        for request in waiting:
            params = sampling_params(decoding, request.seed, max_new_tokens=decoding.max_new_tokens)
            output = (await engine.generate(request.question.token_ids, params)).outputs[0]
            answer = Generated(token_ids=list(output.token_ids), finish_reason=output.finish_reason)
            on_answers([request], [answer])

    workers = [asyncio.ensure_future(work()) for _ in range(min(concurrency, len(requests)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()


def answer_with_transformers(
    model: Any,
    requests: Sequence[Request],
    decoding: Decoding,
    on_answers: OnAnswers,
    *,
    batch_size: int,
    pad_token_id: int,
) -> None:
    """Batches of prompts of about the same length."""
    ordered = sorted(requests, key=lambda request: -len(request.question.token_ids))
    for start in range(0, len(ordered), batch_size):
        batch = ordered[start : start + batch_size]
        answers = generate(
            model,
            [request.question.token_ids for request in batch],
            [request.seed for request in batch],
            decoding,
            pad_token_id=pad_token_id,
        )
        on_answers(batch, answers)


@torch.inference_mode()
def score(
    model: ScoreModel,
    answers: Sequence[Answer],
    on_scores: Callable[[Sequence[Answer], list[float]], None],
    *,
    batch_size: int,
    device: torch.device,
) -> None:
    """`batch_size` answers in a packed row."""
    for start in range(0, len(answers), batch_size):
        batch = answers[start : start + batch_size]
        row = PackedRow.of([answer.sample for answer in batch])
        on_scores(batch, model(row.to(device)).tolist())
