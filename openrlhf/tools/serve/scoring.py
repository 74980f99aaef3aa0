"""Scores texts with a reward model, and queues requests for the one thread that runs it."""

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from openrlhf.api import (
    BadRow,
    BatchInferenceConfig,
    Encoder,
    PackedRow,
    Sample,
    ScoreModel,
    ServeRMConfig,
    Text,
    check_embedded,
    current_device,
    load_scorer,
    missing_embeddings,
    pack_to_budget,
    resolve_row_layout,
    score_last,
    score_statistics,
    with_end,
)

logger = logging.getLogger(__name__)

ROUND = 256
"""Maximum number of texts of several requests that the model scores at a time. Finished rounds are answered
while others wait."""


def load_normalized(
    config: BatchInferenceConfig | ServeRMConfig, path: str, flag: str, *, normalize: bool, **options: Any
) -> tuple[ScoreModel, float, float]:
    """Loads a reward model on this process's device. Returns it, and mean and standard deviation by which its
    scores are normalised."""
    model = load_scorer(
        path,
        flag=flag,
        dtype=config.ds.param_dtype,
        attention=config.ds.attn_implementation,
        max_len=config.data.max_len,
        head_prefix=config.ds.value_head_prefix,
        in_4bit=config.ds.load_in_4bit,
        trained=True,
        **options,
    )
    model.to(current_device()).eval()
    resolve_row_layout(model, model)
    return model, *(score_statistics(model.model.config, path) if normalize else (0.0, 1.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Score of one text."""

    score: float
    is_cut: bool
    """Whether the text was truncated at max_len."""


Result = Scored | Exception


class TextScorer:
    """Scores texts, tokenised as in the model's training; see `data/inference.py`."""

    def __init__(
        self,
        model: ScoreModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_len: int,
        max_tokens: int,
        batch_size: int | None = None,
        mean: float = 0.0,
        std: float = 1.0,
    ) -> None:
        """Limits packed rows; scores become (score - mean) / std."""
        self.model, self.tokenizer, self.encode = model, tokenizer, Encoder(tokenizer)
        self.max_len, self.max_tokens, self.batch_size = max_len, max_tokens, batch_size
        self.mean, self.std = mean, std
        self.device = next(model.parameters()).device
        self.missing = missing_embeddings(tokenizer, model.model.config)

    @torch.inference_mode()
    def __call__(self, texts: Sequence[Text]) -> list[Result]:
        """Returns one result per text. If the model fails on a packed row, all its texts get the exception;
        a text with a token without an embedding is left out of the rows."""
        token_ids = [with_end(ids, self.tokenizer) for ids, _ in self.encode(texts)]
        samples = [score_last(ids, self.max_len) for ids in token_ids]
        results: list[Result] = [RuntimeError("not scored")] * len(texts)
        readable = []
        for i, ids in enumerate(token_ids):
            try:
                check_embedded(ids, self.missing)
                readable.append(i)
            except BadRow as reason:
                results[i] = reason
        rows, size = pack_to_budget([samples[i].length for i in readable], self.max_tokens), self.batch_size
        size = size or max(1, len(readable))
        for places in (row[start : start + size] for row in rows for start in range(0, len(row), size)):
            indices = [readable[place] for place in places]
            for i, score in zip(indices, self._score([samples[i] for i in indices]), strict=True):
                is_cut = len(token_ids[i]) > self.max_len
                results[i] = score if isinstance(score, Exception) else Scored(score=score, is_cut=is_cut)
        return results

    def _score(self, samples: Sequence[Sample]) -> list[float] | list[Exception]:
        try:
            scores = self.model(PackedRow.of(samples).to(self.device)).tolist()
        except Exception as error:  # messages are about shapes and memory, never texts
            logger.error("a row of %d texts failed: %s: %s", len(samples), type(error).__name__, error)
            return [error] * len(samples)
        return [(score - self.mean) / self.std for score in scores]


class QueueFull(Exception):
    """Raised if the queue has no room for a request's texts."""


@dataclass(frozen=True, slots=True)
class _Job:
    texts: Sequence[Text]
    scored: Future[list[Scored]] = field(default_factory=Future)


class ScoreQueue:
    """Queue of scoring requests: those that arrive while the model works are scored together in the next
    round."""

    def __init__(self, score: Callable[[Sequence[Text]], list[Result]], *, max_waiting: int) -> None:
        """`score`: called in a single thread. `max_waiting`: maximum number of waiting texts."""
        self._score, self.max_waiting = score, max_waiting
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.num_waiting = self.num_scoring = self.num_scored = 0
        self._thread = threading.Thread(target=self._work, name="scores", daemon=True)
        self._thread.start()

    def submit(self, texts: Sequence[Text]) -> Future[list[Scored]]:
        """Queues texts. The future's RuntimeError names the first text that could not be scored. Raises
        QueueFull if there is no room."""
        job = _Job(texts)
        with self._changed:
            if self.num_waiting + len(texts) > self.max_waiting:
                raise QueueFull
            self._jobs.append(job)
            self.num_waiting += len(texts)
            self._changed.notify()
        return job.scored

    @property
    def is_working(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Finishes the round that the model is scoring, and drops the rest."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()  # bounded: it ends with its current round

    def _work(self) -> None:
        while jobs := self._take():
            texts = [text for job in jobs for text in job.texts]
            self.num_scoring = len(texts)
            try:
                results = iter(self._score(texts))
            except Exception as error:
                logger.error("%d texts could not be scored: %s", len(texts), type(error).__name__)
                results = iter([error] * len(texts))
            for job in jobs:
                _answer(job, [next(results) for _ in job.texts])
            self.num_scored += len(texts)
            self.num_scoring = 0

    def _take(self) -> list[_Job]:
        """Waits for requests; returns the oldest, up to one round, without cancelled ones. Empty once
        closed."""
        taken: list[_Job] = []
        count = 0
        with self._changed:
            while not taken:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if self._closed:
                    return []
                while self._jobs and (not count or count + len(self._jobs[0].texts) <= ROUND):
                    job = self._jobs.popleft()
                    self.num_waiting -= len(job.texts)
                    if job.scored.set_running_or_notify_cancel():
                        taken.append(job)
                        count += len(job.texts)
        return taken


def _answer(job: _Job, results: Sequence[Result]) -> None:
    scored: list[Scored] = []
    for i, result in enumerate(results):
        if isinstance(result, Exception):
            job.scored.set_exception(RuntimeError(f"text {i} could not be scored: {type(result).__name__}"))
            return
        if not math.isfinite(result.score):
            job.scored.set_exception(RuntimeError(f"the score of text {i} is {result.score}"))
            return
        scored.append(result)
    job.scored.set_result(scored)
