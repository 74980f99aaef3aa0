"""Spreads prompts over engines and returns groups as they finish. Engines appear only as `EngineHandle`."""

import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from openrlhf.types import PURPOSES, Prompt, PromptGroup, Purpose, Sampled, Work, work_of

SAMPLES_IN_FLIGHT = 512
"""Samples in flight per engine: enough to fill its batch, few enough that engines of different speed finish
together."""
REMEMBERED = 4096
"""Window, in samples, of the mean length expected of further samples: lengths change as the policy learns."""
NAMED = 3
"""Number of prompts that a timeout message names."""


class EngineHandle(Protocol):
    def run_group(
        self, prompt: Prompt, purpose: Purpose, samples: Sequence[int] | None = None
    ) -> Future[Sampled]:
        """Runs all samples of one prompt, or those with the numbers `samples`, which have failed on another
        engine."""
        ...


class Memory(Protocol):
    """Hands device memory over between engines and models that share it."""

    def wake(self) -> None:
        """Gives the memory to the engines. Returns when they can answer."""
        ...

    def sleep(self) -> None:
        """Frees the memory of idle engines for models."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    prompt: Prompt
    purpose: Purpose
    again: "_Again | None" = None


@dataclass(slots=True, eq=False)
class _Load:
    engine: EngineHandle
    number: int
    requests: list[_Request] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class _Again:
    """Failed samples to rerun on another engine."""

    group: PromptGroup
    """All samples of the prompt."""
    samples: list[int]
    failed_at: _Load


class Balance:
    """Selects the engine for the next prompt: the one with the fewest expected tokens left. These are the
    tokens of its unfinished samples' prompts plus, for each sample, the mean length of finished ones.

    A group takes as long as its longest sample, so engines report each finished sample."""

    def __init__(self, num_engines: int, longest: int) -> None:
        """`longest`: expected tokens of an answer before any has finished."""
        self.sent, self.done = np.zeros((2, num_engines, len(PURPOSES) + 1), np.int64)
        """(engines, P + 1) int64 Work of each engine, sent and done."""
        self.tokens_each = np.array([longest] * len(PURPOSES) + [1.0])
        """(P + 1,) float64 expected tokens of a sample by its purpose; the last entry, 1, weighs the tokens
        of prompts."""
        self._seen = Counter[Purpose]()
        """Number of samples in the mean `tokens_each`, by purpose."""

    def least_busy(self, num_samples: int, avoided: int | None = None) -> int | None:
        """Returns the number of the least busy engine with room for a group of this size. None where no
        engine has room."""
        left = self.sent - self.done
        samples_left = left[:, :-1].sum(1)
        has_room = (samples_left == 0) | (samples_left + num_samples <= SAMPLES_IN_FLIGHT)
        if avoided is not None:
            has_room[avoided] = False
        if not has_room.any():
            return None
        return int(np.where(has_room, left @ self.tokens_each, np.inf).argmin())

    def hear(self, number: int, done: Work) -> None:
        """Merges an engine's progress report; reports may arrive out of order."""
        self.done[number] = np.maximum(self.done[number], done)

    def expect(self, purpose: Purpose, num_samples: int, num_tokens: int) -> None:
        """Updates the expected length with `num_samples` samples that took `num_tokens` tokens in total,
        without their prompts."""
        if num_samples:
            i = PURPOSES.index(purpose)
            self._seen[purpose] = min(self._seen[purpose] + num_samples, REMEMBERED)
            self.tokens_each[i] += (num_tokens - num_samples * self.tokens_each[i]) / self._seen[purpose]


class Dispatcher:
    """Sends each prompt to the engine with the least work left. One thread decides; of the methods,
    `next_group`, `sleep` and `quiet` block."""

    def __init__(
        self,
        engines: Sequence[EngineHandle],
        num_samples: Mapping[Purpose, int],
        *,
        memory: Memory,
        longest: int,
        score: Callable[[list[PromptGroup]], list[PromptGroup]] | None = None,
        scores_at_once: bool = True,
        retry_on: Collection[str] = (),
    ) -> None:
        """`num_samples`: samples of a prompt, by purpose. `longest`: expected tokens of an answer before any
        has finished. `retry_on`: outcomes after which a sample is rerun once on another engine; needs two
        engines. `score`: adds rewards to finished groups, several at a time where they finish during a call;
        `scores_at_once` off: only while all engines are idle, because it needs their memory."""
        self._loads = [_Load(engine, i) for i, engine in enumerate(engines)]
        self._balance = Balance(len(engines), longest)
        self._num_samples, self._memory = num_samples, memory
        self._score, self._scores_at_once, self._retry_on = score, scores_at_once, retry_on
        self._scorer = ThreadPoolExecutor(1, thread_name_prefix="score")
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._finished: dict[Purpose, queue.SimpleQueue[PromptGroup | BaseException]] = {
            purpose: queue.SimpleQueue() for purpose in num_samples
        }
        self._under_way = Counter[Purpose]()
        self._waiting: deque[_Request] = deque()
        self._unscored: list[tuple[_Request, PromptGroup]] = []
        self._who_needs_memory: list[Future[None]] = []
        self._who_needs_quiet: list[Future[None]] = []
        self._is_awake = self._is_scoring = self._is_held = False
        self._thread = threading.Thread(target=self._work, name="dispatch", daemon=True)
        self._thread.start()

    def submit(self, prompts: Sequence[Prompt], purpose: Purpose) -> None:
        """Requests the samples of these prompts, after those of earlier requests."""
        self._under_way[purpose] += len(prompts)
        requests = [_Request(prompt, purpose) for prompt in prompts]
        self._events.put(lambda: self._waiting.extend(requests))

    def next_group(self, purpose: Purpose, timeout: float | None = None) -> PromptGroup:
        """Returns the next finished group. Raises what an engine or `score` raised; RuntimeError where
        nothing is in flight; TimeoutError, which names the prompts in flight, after `timeout` seconds."""
        if not self._under_way[purpose]:
            raise RuntimeError(f"no prompt is under way for {purpose}")
        try:
            found = self._finished[purpose].get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(self._waited(purpose)) from None
        if isinstance(found, BaseException):
            self._finished[purpose].put(found)  # for whoever asks next
            raise found
        self._under_way[purpose] -= 1
        return found

    def sleep(self) -> None:
        """Waits until engines have finished what they were sent, and frees their memory."""
        self._wait_in(self._who_needs_memory)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Pauses dispatch: inside, engines have finished what they were sent and receive nothing more."""
        self._events.put(lambda: setattr(self, "_is_held", True))
        try:
            self._wait_in(self._who_needs_quiet)
            yield
        finally:
            self._events.put(lambda: setattr(self, "_is_held", False))

    def _wait_in(self, line: list[Future[None]]) -> None:
        """Waits until no engine works."""
        done: Future[None] = Future()
        self._events.put(lambda: line.append(done))
        while self._thread.is_alive() and not done.done():
            wait([done], timeout=0.5)
        if done.done():
            done.result()

    def close(self) -> None:
        self._events.put(_stop_thread)
        self._scorer.shutdown(wait=False, cancel_futures=True)

    def _work(self) -> None:
        """Handles all pending events, then sends what can be sent."""
        try:
            while True:
                self._events.get()()
                while not self._events.empty():
                    self._events.get()()
                self._advance()
        except _ThreadStopped:
            return
        except BaseException as error:
            for finished in self._finished.values():
                finished.put(error)
            for done in self._who_needs_memory + self._who_needs_quiet:
                done.set_exception(error)

    def _advance(self) -> None:
        may_sample = not self._is_held and (self._scores_at_once or not self._is_scoring)
        if self._waiting and may_sample and not self._is_awake:
            self._memory.wake()
            self._is_awake = True
        while self._waiting and may_sample and (load := self._least_busy()) is not None:
            self._send(self._waiting.popleft(), load)
        is_sampling = any(load.requests for load in self._loads)
        if not is_sampling:
            self._free_memory()
            while self._who_needs_quiet:
                self._who_needs_quiet.pop().set_result(None)
        if self._score is None:
            self._hand_out(self._unscored)
            self._unscored = []
        elif self._unscored and not self._is_scoring and (self._scores_at_once or not is_sampling):
            self._start_scoring()

    def _free_memory(self) -> None:
        """Puts engines to sleep if a caller needs their memory, and wakes these callers."""
        if self._who_needs_memory:
            self._memory.sleep()
            self._is_awake = False
        while self._who_needs_memory:
            self._who_needs_memory.pop().set_result(None)

    def _least_busy(self) -> _Load | None:
        """Returns the engine for the next request. None where no engine has room."""
        request = self._waiting[0]
        avoided = request.again.failed_at.number if request.again else None
        number = self._balance.least_busy(self._size(request), avoided)
        return None if number is None else self._loads[number]

    def _size(self, request: _Request) -> int:
        return len(request.again.samples) if request.again else self._num_samples[request.purpose]

    def _send(self, request: _Request, load: _Load) -> None:
        self._balance.sent[load.number] += work_of(request.prompt, request.purpose, self._size(request))
        load.requests.append(request)
        samples = request.again.samples if request.again else None
        future = load.engine.run_group(request.prompt, request.purpose, samples)
        future.add_done_callback(
            lambda future: self._events.put(lambda: self._sampled(request, load, future.result()))
        )

    def _sampled(self, request: _Request, load: _Load, sampled: Sampled) -> None:
        load.requests.remove(request)
        group = sampled.group
        self._balance.hear(load.number, sampled.done)
        self._balance.expect(request.purpose, *_answered(group))
        if request.again:
            group = _replaced(request.again.group, group)
        elif failed := [t.sample_index for t in group.trajectories if t.outcome in self._retry_on]:
            again = _Again(group, sorted({*failed}), load)
            self._waiting.appendleft(_Request(request.prompt, request.purpose, again))
            return
        self._unscored.append((request, group))

    def _start_scoring(self) -> None:
        assert self._score is not None
        requests, groups = zip(*self._unscored, strict=True)
        self._unscored, self._is_scoring = [], True
        future = self._scorer.submit(self._score, list(groups))
        future.add_done_callback(lambda future: self._events.put(lambda: self._scored(requests, future)))

    def _scored(self, requests: Sequence[_Request], future: Future[list[PromptGroup]]) -> None:
        self._is_scoring = False
        self._hand_out(zip(requests, future.result(), strict=True))

    def _hand_out(self, groups: Iterable[tuple[_Request, PromptGroup]]) -> None:
        for request, group in groups:
            self._finished[request.purpose].put(group)

    def _waited(self, purpose: Purpose) -> str:
        """Returns a text that says which prompts are in flight, and where."""
        lines = [
            f"engine {i}: {len(load.requests)} prompts, such as {_named(load.requests)}"
            for i, load in enumerate(self._loads)
            if load.requests
        ]
        if self._waiting:
            lines.append(f"not sent yet: {len(self._waiting)} prompts")
        if self._is_scoring:
            lines.append("reward models are scoring finished groups")
        return f"{self._under_way[purpose]} prompts of {purpose} are under way.\n" + "\n".join(lines)


def _answered(group: PromptGroup) -> tuple[int, int]:
    """Returns the number of samples and of their tokens without prompts, including feedback, which engines
    read too."""
    num_samples = len({t.sample_index for t in group.trajectories})
    num_tokens = sum(len(t.token_ids) for t in group.trajectories)
    return num_samples, num_tokens - num_samples * group.prompt.num_tokens


def _replaced(group: PromptGroup, again: PromptGroup) -> PromptGroup:
    """Returns the group with rerun samples in place of the failed ones."""
    new = {t.sample_index for t in again.trajectories}
    kept = [t for t in group.trajectories if t.sample_index not in new]
    return replace(
        group, trajectories=sorted([*kept, *again.trajectories], key=lambda t: (t.sample_index, t.part))
    )


class _ThreadStopped(Exception):
    pass


def _stop_thread() -> None:
    raise _ThreadStopped


def _named(requests: Sequence[_Request]) -> str:
    return ", ".join(f"{r.prompt.prompt_id} (epoch {r.prompt.epoch})" for r in requests[:NAMED])
