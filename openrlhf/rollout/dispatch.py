"""Distributes prompts over engines and returns groups as they finish. It knows engines only as
`EngineHandle`."""

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, NoReturn, Protocol, TypeVar

import numpy as np

from openrlhf.types import PURPOSES, Prompt, PromptGroup, Purpose, Sampled, Work, count_work, not_none

SAMPLES_IN_FLIGHT = 512
"""Maximum number of samples in flight per engine: enough to fill its batch, and few enough that engines of
different speed finish at about the same time."""
LENGTH_WINDOW = 4096
"""Window, in samples, of the running mean of sample lengths. It is limited because lengths change as the
policy learns."""
NUM_NAMED = 3
"""Number of prompts that a timeout message names."""


class EngineHandle(Protocol):
    """An engine that runs all samples of a prompt."""

    def run_group(
        self, prompt: Prompt, purpose: Purpose, samples: Sequence[int] | None = None
    ) -> Future[Sampled]:
        """Runs all samples of one prompt, or only those with the indices `samples`, which failed on another
        engine."""
        ...


class Memory(Protocol):
    """Moves GPU memory between engines and models on the same GPUs."""

    def wake(self) -> None:
        """Loads the engines onto their GPUs. Returns when they can serve requests."""
        ...

    def sleep(self) -> None:
        """Offloads the engines, which must be idle, so that models can use the memory."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """All samples of a prompt, or a rerun of some."""

    prompt: Prompt
    purpose: Purpose
    rerun: "_Rerun | None" = None


EngineT = TypeVar("EngineT", bound=EngineHandle)


@dataclass(slots=True, eq=False)
class _Load(Generic[EngineT]):
    """An engine and its unfinished requests."""

    engine: EngineT | None
    """None while the engine is dead or starting."""
    number: int
    requests: list[_Request] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class _Rerun:
    """Failed samples of a group, which are run again on another engine."""

    group: PromptGroup
    """All samples of the prompt."""
    samples: list[int]
    failed_at: _Load


class Balance:
    """Selects the engine for the next prompt: the one with the fewest outstanding tokens. For each unfinished
    sample these are the prompt's tokens plus the mean length of finished answers.

    Engines report each finished sample instead of each finished group, because a group finishes only with its
    longest sample."""

    def __init__(self, num_engines: int, longest: int) -> None:
        """`longest`: expected tokens of an answer before any has finished."""
        self.sent, self.done = np.zeros((2, num_engines, len(PURPOSES) + 1), np.int64)
        """`Work` that was sent to each engine and that it has finished, (engines, P + 1) int64 each."""
        self.tokens_each = np.array([longest] * len(PURPOSES) + [1.0])
        """(P + 1,) float64: the expected length of an answer by purpose. The last entry, 1, is the weight of
        prompt tokens."""
        self._num_averaged = Counter[Purpose]()
        """Number of samples in each mean of `tokens_each`, by purpose."""

    def least_busy(self, num_samples: int, avoided: Collection[int] = ()) -> int | None:
        """Returns the index of the engine with the fewest outstanding tokens that has room for a group of
        this size; None if no engine has. `avoided`: indices of engines to exclude."""
        left = self.sent - self.done
        samples_left = left[:, :-1].sum(1)
        has_room = (samples_left == 0) | (samples_left + num_samples <= SAMPLES_IN_FLIGHT)
        has_room[list(avoided)] = False
        if not has_room.any():
            return None
        return int(np.where(has_room, left @ self.tokens_each, np.inf).argmin())

    def forget(self, number: int) -> None:
        """Drops the work of an engine whose process is replaced."""
        self.sent[number] = self.done[number] = 0

    def merge_report(self, number: int, done: Work) -> None:
        """Merges an engine's report of its finished work. Reports may arrive out of order."""
        self.done[number] = np.maximum(self.done[number], done)

    def update_expected_length(self, purpose: Purpose, num_samples: int, num_tokens: int) -> None:
        """Updates the expected length of an answer. `num_samples` finished samples have `num_tokens` tokens
        in total, without their prompts."""
        if num_samples:
            i, count = PURPOSES.index(purpose), min(self._num_averaged[purpose] + num_samples, LENGTH_WINDOW)
            self._num_averaged[purpose] = count
            self.tokens_each[i] += (num_tokens - num_samples * self.tokens_each[i]) / count


class Dispatcher(Generic[EngineT]):
    """Sends each prompt to the engine with the fewest outstanding tokens. One thread handles all events. Only
    the methods `next_group`, `sleep` and `paused` block."""

    def __init__(
        self,
        engines: Sequence[EngineT],
        num_samples: Mapping[Purpose, int],
        *,
        memory: Memory,
        longest: int,
        score: Callable[[list[PromptGroup]], list[PromptGroup]] | None = None,
        scores_at_once: bool = True,
        retry_on: Collection[str] = (),
        is_replaced: Callable[[int, EngineT, BaseException], bool] = lambda *_: False,
    ) -> None:
        """`num_samples`: samples of a prompt, by purpose. `longest`: expected tokens of an answer until the
        first has finished. `retry_on`: outcomes after which a sample is rerun once on another engine; needs
        two engines. `score`: function that adds rewards to finished groups, as many at a time as have
        finished. `scores_at_once`: False if `score` may run only while all engines are idle, because it needs
        their memory. `is_replaced`: receives the index of an engine, the engine and its error, and tells
        whether another engine will replace it; its prompts are then sampled again. Any other error ends the
        run."""
        self._is_replaced = is_replaced
        self._loads = [_Load(engine, i) for i, engine in enumerate(engines)]
        self._balance = Balance(len(engines), longest)
        self._num_samples, self._memory = num_samples, memory
        self._score, self._scores_at_once, self._retry_on = score, scores_at_once, retry_on
        self._scorer = ThreadPoolExecutor(1, thread_name_prefix="score")
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """Work for the thread; None ends it."""
        self._finished: dict[Purpose, queue.SimpleQueue[PromptGroup | BaseException]] = {
            purpose: queue.SimpleQueue() for purpose in num_samples
        }
        self.finished_at = time.monotonic()
        """When the last group of any purpose finished."""
        self._under_way = Counter[Purpose]()
        self._waiting: deque[_Request] = deque()
        self._unscored: list[tuple[_Request, PromptGroup]] = []
        self._memory_waiters: list[Future[None]] = []
        self._idle_waiters: list[Future[None]] = []
        self._is_awake = self._is_scoring = self._is_paused = False
        self._thread = threading.Thread(target=self._run, name="dispatch", daemon=True)
        self._thread.start()

    def submit(self, prompts: Sequence[Prompt], purpose: Purpose) -> None:
        """Requests the samples of these prompts. Requests are sent in the order of submission."""
        self._under_way[purpose] += len(prompts)
        requests = [_Request(prompt, purpose) for prompt in prompts]
        self._events.put(lambda: self._waiting.extend(requests))

    def next_group(self, purpose: Purpose, timeout: float | None = None) -> PromptGroup:
        """Returns the next finished group. Raises the error of an engine or of `score`, RuntimeError if no
        prompt is in flight, and TimeoutError, which names the prompts in flight, after `timeout` seconds."""
        if not self._under_way[purpose]:
            raise RuntimeError(f"no {purpose} prompt is in flight")
        try:
            found = self._finished[purpose].get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(self._timeout_message(purpose)) from None
        if isinstance(found, BaseException):
            self._finished[purpose].put(found)  # later calls raise it too
            raise found
        self._under_way[purpose] -= 1
        return found

    def sleep(self) -> None:
        """Waits until the engines have finished all requests sent to them, and offloads them."""
        self._wait_until_idle(self._memory_waiters)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pauses dispatch: inside the block, engines are idle and receive no requests."""
        self._events.put(lambda: setattr(self, "_is_paused", True))
        try:
            self._wait_until_idle(self._idle_waiters)
            yield
        finally:
            self._events.put(lambda: setattr(self, "_is_paused", False))

    def _wait_until_idle(self, line: list[Future[None]]) -> None:
        """Waits in `line` until all engines are idle."""
        done: Future[None] = Future()
        self._events.put(lambda: line.append(done))
        while self._thread.is_alive() and not done.done():
            wait([done], timeout=0.5)
        if done.done():
            done.result()  # bounded: it is done

    def lose(self, number: int) -> None:
        """Puts the prompts of a dead engine at the front of the queue, and sends the engine nothing until
        `replace`."""
        self._events.put(lambda: self._on_lost(self._loads[number]))

    def replace(self, number: int, engine: EngineT) -> None:
        """Replaces a dead engine by this one."""
        self._events.put(lambda: setattr(self._loads[number], "engine", engine))

    def fail(self, error: BaseException) -> None:
        """Makes waiting calls raise this error."""
        self._events.put(partial(_throw, error))

    def close(self) -> None:
        self._events.put(None)
        self._scorer.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        """Runs the thread: handles all pending events, then sends the requests for which engines have
        room."""
        try:
            for handle in iter(self._events.get, None):  # bounded: an idle thread
                handle()
                if self._events.empty():
                    self._advance()
        except BaseException as error:
            for finished in self._finished.values():
                finished.put(error)
            for done in self._memory_waiters + self._idle_waiters:
                done.set_exception(error)

    def _advance(self) -> None:
        may_sample = not self._is_paused and (self._scores_at_once or not self._is_scoring)
        if self._waiting and may_sample and not self._is_awake:
            self._memory.wake()
            self._is_awake = True
        while self._waiting and may_sample and (load := self._least_busy()) is not None:
            self._send(self._waiting.popleft(), load)
        is_sampling = any(load.requests for load in self._loads)
        if not is_sampling:
            self._free_memory()
            while self._idle_waiters:
                self._idle_waiters.pop().set_result(None)
        if self._score is None:
            self._hand_out(self._unscored)
            self._unscored = []
        elif self._unscored and not self._is_scoring and (self._scores_at_once or not is_sampling):
            self._start_scoring()

    def _free_memory(self) -> None:
        """Offloads the engines if callers wait for their memory, and resumes these callers."""
        if self._memory_waiters:
            self._memory.sleep()
            self._is_awake = False
        while self._memory_waiters:
            self._memory_waiters.pop().set_result(None)

    def _least_busy(self) -> _Load[EngineT] | None:
        """Returns the engine for the next request; None if no engine has room."""
        request = self._waiting[0]
        avoided = {load.number for load in self._loads if load.engine is None}
        if request.rerun:
            avoided.add(request.rerun.failed_at.number)
        number = self._balance.least_busy(self._size(request), avoided)
        return None if number is None else self._loads[number]

    def _size(self, request: _Request) -> int:
        return len(request.rerun.samples) if request.rerun else self._num_samples[request.purpose]

    def _send(self, request: _Request, load: _Load[EngineT]) -> None:
        self._balance.sent[load.number] += count_work(request.prompt, request.purpose, self._size(request))
        load.requests.append(request)
        samples, engine = request.rerun.samples if request.rerun else None, not_none(load.engine)
        future = engine.run_group(request.prompt, request.purpose, samples)
        future.add_done_callback(
            lambda future: self._events.put(lambda: self._on_answer(request, load, engine, future))
        )

    def _on_answer(
        self, request: _Request, load: _Load[EngineT], engine: EngineT, future: Future[Sampled]
    ) -> None:
        if load.engine is not engine:  # the engine was replaced; its prompts are sampled again
            return
        error = future.exception()
        if error is None:
            self._on_sampled(request, load, future.result())  # bounded: it is done
        elif not self._is_replaced(load.number, engine, error):
            raise error

    def _on_lost(self, load: _Load[EngineT]) -> None:
        self._waiting.extendleft(reversed(load.requests))
        load.engine, load.requests = None, []
        self._balance.forget(load.number)

    def _on_sampled(self, request: _Request, load: _Load[EngineT], sampled: Sampled) -> None:
        load.requests.remove(request)
        group = sampled.group
        self._balance.merge_report(load.number, sampled.done)
        self._balance.update_expected_length(request.purpose, *_num_answered(group))
        if request.rerun:
            group = _replaced(request.rerun.group, group)
        elif failed := [t.sample_index for t in group.trajectories if t.outcome in self._retry_on]:
            rerun = _Rerun(group, sorted({*failed}), load)
            self._waiting.appendleft(_Request(request.prompt, request.purpose, rerun))
            return
        self._unscored.append((request, group))

    def _start_scoring(self) -> None:
        assert self._score is not None
        requests, groups = zip(*self._unscored, strict=True)
        self._unscored, self._is_scoring = [], True
        future = self._scorer.submit(self._score, list(groups))
        future.add_done_callback(lambda future: self._events.put(lambda: self._on_scored(requests, future)))

    def _on_scored(self, requests: Sequence[_Request], future: Future[list[PromptGroup]]) -> None:
        self._is_scoring = False
        self._hand_out(zip(requests, future.result(), strict=True))  # bounded: it is done

    def _hand_out(self, groups: Iterable[tuple[_Request, PromptGroup]]) -> None:
        for request, group in groups:
            self.finished_at = time.monotonic()
            self._finished[request.purpose].put(group)

    def _timeout_message(self, purpose: Purpose) -> str:
        """Returns the message of a timeout, which lists the prompts in flight on each engine."""
        lines = [
            f"engine {i}: {len(load.requests)} prompts, such as {_named(load.requests)}"
            for i, load in enumerate(self._loads)
            if load.requests
        ]
        if self._waiting:
            lines.append(f"not sent yet: {len(self._waiting)} prompts")
        if self._is_scoring:
            lines.append("reward models are scoring finished groups")
        return f"{self._under_way[purpose]} {purpose} prompts are in flight.\n" + "\n".join(lines)


def _num_answered(group: PromptGroup) -> tuple[int, int]:
    """Returns the number of samples that read their prompt, and of their tokens without it. Environment
    feedback counts, because engines read it too."""
    num_samples = len({t.sample_index for t in group.trajectories if len(t.token_ids)})
    num_tokens = sum(len(t.token_ids) for t in group.trajectories)
    return num_samples, num_tokens - num_samples * group.prompt.num_tokens


def _replaced(group: PromptGroup, rerun: PromptGroup) -> PromptGroup:
    """Returns the group with rerun samples in place of the failed ones."""
    new = {t.sample_index for t in rerun.trajectories}
    kept = [t for t in group.trajectories if t.sample_index not in new]
    return replace(
        group, trajectories=sorted([*kept, *rerun.trajectories], key=lambda t: (t.sample_index, t.part))
    )


def _throw(error: BaseException) -> NoReturn:
    raise error


def _named(requests: Sequence[_Request]) -> str:
    return ", ".join(f"{r.prompt.prompt_id} (epoch {r.prompt.epoch})" for r in requests[:NUM_NAMED])
