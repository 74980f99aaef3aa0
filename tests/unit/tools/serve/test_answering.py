"""Questions answered and answers scored in batches."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from openrlhf.api import SamplingParams
from openrlhf.data.inference import Answer, Question
from openrlhf.rows import Sample
from openrlhf.tools.serve.answering import Request, answer_with_engine, score


def test_scores_come_with_the_answers_that_they_belong_to() -> None:
    """The stand-in for the model scores an answer by its last token."""
    answers = [
        Answer(
            prompt_id=i,
            input=f"{i}",
            output="",
            sample=Sample(token_ids=torch.tensor([1] * i + [10 + i]), action_mask=torch.arange(i + 1) == i),
        )
        for i in range(1, 6)
    ]
    found: list[tuple] = []
    score(
        lambda row: row.token_ids[row.actions].float(),
        answers,
        lambda batch, scores: found.append(([answer.prompt_id for answer in batch], scores)),
        batch_size=2,
        device=torch.device("cpu"),
    )
    assert found == [([1, 2], [11.0, 12.0]), ([3, 4], [13.0, 14.0]), ([5], [15.0])]


class Engine:
    """Answers with the seed and fails at the token 9; remembers how many requests it had at a time."""

    def __init__(self) -> None:
        self.running = self.most = 0

    async def generate(self, token_ids: list[int], params: SamplingParams) -> SimpleNamespace:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        if 9 in token_ids:
            raise ValueError("nine")
        await asyncio.sleep(0)
        self.running -= 1
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=(params.seed,), finish_reason="stop")])


def requests_of(*tokens: int) -> list[Request]:
    return [
        Request(question=Question(prompt_id=i, input="", token_ids=[token]), sample_index=0, seed=100 + i)
        for i, token in enumerate(tokens)
    ]


@pytest.mark.parametrize(("concurrency", "most"), [(2, 2), (9, 5)])
def test_an_engine_gets_some_requests_at_a_time(concurrency: int, most: int) -> None:
    engine, found = Engine(), {}

    def on_answers(requests, answers) -> None:
        found.update(
            {request.key: answer.token_ids for request, answer in zip(requests, answers, strict=True)}
        )

    work = answer_with_engine(
        engine, requests_of(1, 2, 3, 4, 5), SamplingParams(max_tokens=1), on_answers, concurrency=concurrency
    )
    asyncio.run(work)
    assert found == {(i, 0): [100 + i] for i in range(5)} and engine.most == most


def test_the_first_error_ends_all_requests() -> None:
    work = answer_with_engine(
        Engine(), requests_of(1, 9, 3), SamplingParams(max_tokens=1), lambda *_: None, concurrency=3
    )
    with pytest.raises(ValueError, match="nine"):
        asyncio.run(work)
