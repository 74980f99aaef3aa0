"""Batch inference: answers or rewards for a dataset, with vLLM or transformers."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from openrlhf.api import (
    Answer,
    ErrorCode,
    PackedRow,
    Phase,
    Question,
    RolloutEngine,
    RunError,
    SamplingParams,
    ScoreModel,
    decode,
    format_duration,
    seed_at,
)
from openrlhf.api import GeneratedAnswers as Generated
from openrlhf.api import generate_answers as generate
from openrlhf.tools.serve.result_file import ResultFile


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request for one answer."""

    question: Question
    sample_index: int
    seed: int

    @property
    def key(self) -> tuple[int, int]:
        """(prompt_id, sample_index), unique in a run."""
        return self.question.prompt_id, self.sample_index


OnAnswers = Callable[[Sequence[Request], Sequence[Generated]], None]
"""Callback for finished requests and their answers."""
OnScores = Callable[[Sequence[Answer], Sequence[float]], None]
"""Callback for scored answers and their scores."""


class Recorder:
    """Appends results to the result file as they arrive, and shows progress."""

    def __init__(self) -> None:
        self.num_tokens = self.num_rows = 0
        self.started = time.monotonic()

    def begin(self, results: ResultFile, phase: Phase) -> "Recorder":
        """Starts the clock; call it once the model is ready. `phase.total`: number of rows to come."""
        self.results, self.phase = results, phase
        self.started = time.monotonic()
        return self

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def answers(self, tokenizer: PreTrainedTokenizerBase) -> OnAnswers:
        def write(requests: Sequence[Request], answers: Sequence[Generated]) -> None:
            rows = [
                {
                    "input": request.question.input,
                    "output": decode(tokenizer, written(answer), after=request.question.token_ids),
                    "finish_reason": answer.finish_reason,
                    "prompt_id": request.question.prompt_id,
                    "sample_index": request.sample_index,
                }
                | request.question.tools
                for request, answer in zip(requests, answers, strict=True)
            ]
            self._record(rows, sum(len(answer.token_ids) for answer in answers))

        return write

    def scores(self, mean: float, std: float) -> OnScores:
        """Returns a callback that writes rewards as (score - mean) / std. It refuses those that are not
        finite."""

        def write(answers: Sequence[Answer], scores: Sequence[float]) -> None:
            for answer, score in zip(answers, scores, strict=True):
                if not math.isfinite(score):
                    text = (
                        f"the score of input {answer.prompt_id} of the dataset is {score}; try bf16 or fp32"
                    )
                    raise RunError(ErrorCode.NOT_FINITE, text, flag="--ds.param_dtype")
            rows = [
                {
                    "input": answer.input,
                    "output": answer.output,
                    "reward": (score - mean) / std,
                    "prompt_id": answer.prompt_id,
                    "sample_index": 0,
                }
                | answer.kept
                for answer, score in zip(answers, scores, strict=True)
            ]
            self._record(rows, sum(answer.sample.length for answer in answers))

        return write

    def _record(self, rows: Sequence[dict], num_tokens: int) -> None:
        self.results.append(rows)
        self.num_rows += len(rows)
        self.num_tokens += num_tokens
        left = ((self.phase.total or 0) - self.num_rows) * self.elapsed / self.num_rows
        figures = {"tok/s": self.num_tokens / max(self.elapsed, 1e-9), "eta": format_duration(left)}
        self.phase.advance(len(rows), **figures)


def written(answer: Generated) -> list[int]:
    """Returns the tokens of an answer without the stop token. Others, such as <think>, are part of it."""
    return answer.token_ids[:-1] if answer.finish_reason == "stop" else answer.token_ids


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


async def answer_with_engine(
    engine: RolloutEngine,
    requests: Sequence[Request],
    params: SamplingParams,
    on_answers: OnAnswers,
    *,
    concurrency: int,
) -> None:
    """Answers requests, up to `concurrency` at a time. The first error cancels all others."""
    waiting = iter(requests)

    async def work() -> None:
        for request in waiting:
            asked = replace(params, seed=request.seed)
            output = (await engine.generate(request.question.token_ids, asked)).outputs[0]
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
    params: SamplingParams,
    on_answers: OnAnswers,
    *,
    batch_size: int,
    pad_token_id: int,
) -> None:
    """Answers requests in batches of `batch_size` prompts of similar length, the longest first."""
    ordered = sorted(requests, key=lambda request: -len(request.question.token_ids))
    for start in range(0, len(ordered), batch_size):
        batch = ordered[start : start + batch_size]
        answers = generate(
            model,
            [request.question.token_ids for request in batch],
            [request.seed for request in batch],
            params,
            pad_token_id=pad_token_id,
        )
        on_answers(batch, answers)


@torch.inference_mode()
def score(
    model: ScoreModel,
    answers: Sequence[Answer],
    on_scores: OnScores,
    *,
    batch_size: int,
    device: torch.device,
) -> None:
    """Scores answers with a reward model, `batch_size` in each packed row."""
    for start in range(0, len(answers), batch_size):
        batch = answers[start : start + batch_size]
        row = PackedRow.of([answer.sample for answer in batch])
        on_scores(batch, model(row.to(device)).tolist())
