"""The dispatcher's thread, with engines that answer when the test tells them to."""

import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue

import pytest
from records import group_of, trajectory

from openrlhf.rollout.dispatch import SAMPLES_IN_FLIGHT, Dispatcher
from openrlhf.types import (
    Outcome,
    Prompt,
    PromptGroup,
    Purpose,
    Sampled,
    Trajectory,
    Work,
    count_work,
    no_work,
)


def prompts(*ids: int) -> list[Prompt]:
    return [Prompt(prompt_id=i, text=f"prompt {i}") for i in ids]


class FakeEngine:
    """Engine whose requests finish on demand. `calls`: log of calls in order, shared with other stand-ins."""

    def __init__(self, calls: list[str] | None = None) -> None:
        self.calls = [] if calls is None else calls
        self.open: dict[int, Future[Sampled]] = {}
        self.work: dict[int, Work] = {}
        self.done = no_work()
        self.num_samples = 2
        self.seen: list[int] = []
        self.samples: list[Sequence[int] | None] = []
        self.purposes: list[Purpose] = []
        self.most_at_once = 0

    def run_group(
        self, prompt: Prompt, purpose: Purpose, samples: Sequence[int] | None = None
    ) -> Future[Sampled]:
        future: Future[Sampled] = Future()
        self.work[prompt.prompt_id] = count_work(
            prompt, purpose, self.num_samples if samples is None else len(samples)
        )
        self.samples.append(samples)
        self.seen.append(prompt.prompt_id)
        self.purposes.append(purpose)
        self.calls.append(f"run {prompt.prompt_id}")
        self.open[prompt.prompt_id] = future
        self.most_at_once = max(self.most_at_once, len(self.open))
        return future

    def finish(self, *ids: int) -> None:
        """Finishes these groups as soon as they are under way."""
        wait_until(lambda: set(ids) <= set(self.open))
        for i in ids:
            self._hand_over(group_of(Prompt(prompt_id=i, text=""), [0.0, 1.0]))

    def answer(self, i: int, trajectories: list[Trajectory]) -> None:
        wait_until(lambda: i in self.open)
        prompt = Prompt(prompt_id=i, text="")
        self._hand_over(PromptGroup(prompt=prompt, trajectories=trajectories))

    def _hand_over(self, group: PromptGroup) -> None:
        i = group.prompt.prompt_id
        self.done += self.work.pop(i)
        self.open.pop(i).set_result(Sampled(group=group, done=self.done.copy()))

    def fail(self, i: int, error: Exception) -> None:
        wait_until(lambda: i in self.open)
        self.open.pop(i).set_exception(error)


class Memory:
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def wake(self) -> None:
        self.calls.append("wake")

    def sleep(self) -> None:
        self.calls.append("rest")


class Score:
    """Reward model that adds 1 to every reward once it is permitted to."""

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.permits = calls, threading.Semaphore(0)

    def __call__(self, groups: list[PromptGroup]) -> list[PromptGroup]:
        self.calls.append(f"score {[g.prompt.prompt_id for g in groups]}")
        assert self.permits.acquire(timeout=10)
        self.calls.append("scored")
        return [group_of(g.prompt, [1.0, 2.0]) for g in groups]


Build = Callable[..., Dispatcher]


@pytest.fixture
def dispatcher_of() -> Iterator[Build]:
    """Returns a function that builds a dispatcher; closes all of them in the end."""
    made: list[Dispatcher] = []

    def build(engines: Sequence[FakeEngine], num_samples: int = 2, calls: list[str] | None = None, **options):
        sizes: dict[Purpose, int] = {"train": num_samples, "eval": num_samples}
        memory = Memory([] if calls is None else calls)
        for engine in engines:
            engine.num_samples = num_samples
        made.append(Dispatcher(engines, sizes, memory=memory, longest=100, **options))
        return made[-1]

    yield build
    for dispatcher in made:
        dispatcher.close()


def wait_until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(1000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not happen within 10 s")


def received(dispatcher: Dispatcher, count: int, purpose: Purpose = "train") -> list[int]:
    return [dispatcher.next_group(purpose, 10).prompt.prompt_id for _ in range(count)]


# ---- samples that failed


def test_a_sample_that_failed_runs_once_more_on_another_engine(dispatcher_of: Build):
    """Only that sample runs again; what it had sampled, in two parts, is replaced. Another failure there
    stands."""
    sick, well = FakeEngine(), FakeEngine()
    dispatcher = dispatcher_of([sick, well], num_samples=3, retry_on=["env_error"])

    def sample(i: int, outcome: Outcome = Outcome.OK, part: int = 0) -> Trajectory:
        reward = 1.0 if outcome is Outcome.OK else None
        return replace(trajectory(reward, sample_index=i), outcome=outcome, part=part)

    broken = [sample(1, Outcome.ENV_ERROR, part) for part in (0, 1)]
    dispatcher.submit(prompts(7), "train")
    sick.answer(7, [sample(0), *broken, sample(2, Outcome.REWARD_ERROR)])
    well.answer(7, [sample(1)])
    group = dispatcher.next_group("train", 10)
    assert [(t.sample_index, t.outcome) for t in group.trajectories] == [
        (0, Outcome.OK),
        (1, Outcome.OK),
        (2, Outcome.REWARD_ERROR),
    ]
    assert (sick.samples, well.samples) == ([None], [[1]])
    dispatcher.submit(prompts(8), "train")
    sick.answer(8, [sample(0, Outcome.ENV_ERROR)])
    well.answer(8, [sample(0, Outcome.ENV_ERROR)])
    assert not dispatcher.next_group("train", 10).trajectories[0].ok
    assert (sick.seen, well.seen) == ([7, 8], [7, 8])


# ---- which engine, in which order


def test_groups_come_in_the_order_in_which_they_finish(dispatcher_of: Build):
    engine = FakeEngine()
    dispatcher = dispatcher_of([engine])
    dispatcher.submit(prompts(0, 1, 2, 3), "train")
    wait_until(lambda: len(engine.open) == 4)
    engine.finish(2, 0, 3, 1)
    assert received(dispatcher, 4) == [2, 0, 3, 1]


def test_the_least_busy_engine_gets_the_next_prompt(dispatcher_of: Build):
    """Each engine has room for one group: the one that finishes gets the next."""
    slow, fast = FakeEngine(), FakeEngine()
    dispatcher = dispatcher_of([slow, fast], num_samples=SAMPLES_IN_FLIGHT)
    dispatcher.submit(prompts(0, 1, 2, 3, 4), "train")
    for i in (1, 2, 3, 4):
        fast.finish(i)
    assert received(dispatcher, 4) == [1, 2, 3, 4]
    assert slow.seen == [0] and fast.seen == [1, 2, 3, 4]
    slow.finish(0)
    assert received(dispatcher, 1) == [0]


def test_engines_get_equal_shares_to_begin_with(dispatcher_of: Build):
    engines = [FakeEngine() for _ in range(3)]
    dispatcher_of(engines).submit(prompts(*range(7)), "train")
    wait_until(lambda: sum(len(s.open) for s in engines) == 7)
    assert [s.seen for s in engines] == [[0, 3, 6], [1, 4], [2, 5]]


@pytest.mark.parametrize(("num_samples", "limit"), [(100, 5), (512, 1), (2000, 1)])
def test_no_more_than_the_limit_in_flight(dispatcher_of: Build, num_samples: int, limit: int):
    """The limit is 512 samples of an engine, and a group in any case."""
    engine = FakeEngine()
    dispatcher = dispatcher_of([engine], num_samples=num_samples)
    dispatcher.submit(prompts(*range(12)), "train")
    wait_until(lambda: len(engine.open) == limit)
    for i in range(12):
        engine.finish(i)
    assert received(dispatcher, 12) == list(range(12))
    assert engine.most_at_once == limit


def test_training_and_evaluation_are_kept_apart(dispatcher_of: Build):
    engine = FakeEngine()
    dispatcher = dispatcher_of([engine])
    dispatcher.submit(prompts(0, 1), "train")
    dispatcher.submit(prompts(2, 3), "eval")
    engine.finish(0, 3, 1, 2)
    assert received(dispatcher, 2, "eval") == [3, 2]
    assert received(dispatcher, 2) == [0, 1]
    assert engine.purposes == ["train", "train", "eval", "eval"]


# ---- waiting


def test_where_nothing_is_under_way_nobody_waits(dispatcher_of: Build):
    engine = FakeEngine()
    dispatcher = dispatcher_of([engine])
    dispatcher.submit([], "train")
    with pytest.raises(RuntimeError, match=r"\btrain\b"):
        dispatcher.next_group("train")
    dispatcher.submit(prompts(0), "train")
    with pytest.raises(RuntimeError, match=r"\beval\b"):
        dispatcher.next_group("eval")
    engine.finish(0)
    received(dispatcher, 1)
    with pytest.raises(RuntimeError, match=r"\btrain\b"):
        dispatcher.next_group("train")


def test_a_timeout_says_what_was_waited_for(dispatcher_of: Build):
    """Two engines have room for two groups each; three prompts of nine have finished."""
    engines = [FakeEngine(), FakeEngine()]
    dispatcher = dispatcher_of(engines, num_samples=SAMPLES_IN_FLIGHT // 2)
    dispatcher.submit([Prompt(prompt_id=i, text="", epoch=1) for i in range(9)], "train")
    engines[0].finish(0, 2)
    engines[1].finish(1)
    assert received(dispatcher, 3) == [0, 2, 1]
    wait_until(lambda: sum(len(s.open) for s in engines) == 4)
    with pytest.raises(TimeoutError) as error:
        dispatcher.next_group("train", 0.01)
    first, *more = str(error.value).splitlines()
    assert re.findall(r"\b(\d+|train)\b", first) == ["6", "train"]
    named = [f"{a} (epoch 1), {b} (epoch 1)" for a, b in (engine.open for engine in engines)]
    assert more == [
        f"engine 0: 2 prompts, such as {named[0]}",
        f"engine 1: 2 prompts, such as {named[1]}",
        "not sent yet: 2 prompts",
    ]
    engines[0].finish(*engines[0].open)  # the wait was only too short: it can go on
    received(dispatcher, 2)


def test_a_timeout_names_reward_models_that_are_scoring(dispatcher_of: Build):
    engine, score = FakeEngine(), Score([])
    dispatcher = dispatcher_of([engine], score=score)
    dispatcher.submit(prompts(0), "eval")
    engine.finish(0)
    wait_until(lambda: bool(score.calls))
    with pytest.raises(TimeoutError, match=r"\b1 eval .*\n.*reward"):
        dispatcher.next_group("eval", 0.01)
    score.permits.release()
    received(dispatcher, 1, "eval")


# ---- errors


def test_an_error_of_an_engine_reaches_whoever_asks_however_often(dispatcher_of: Build):
    engine = FakeEngine()
    dispatcher = dispatcher_of([engine])
    dispatcher.submit(prompts(0, 1), "train")
    dispatcher.submit(prompts(2), "eval")
    engine.finish(0)
    assert received(dispatcher, 1) == [0]
    engine.fail(1, ConnectionError("the engine died"))
    for purpose in ("train", "train", "eval"):
        with pytest.raises(ConnectionError, match="the engine died"):
            dispatcher.next_group(purpose, 10)
    dispatcher.submit(prompts(3), "train")
    with pytest.raises(ConnectionError, match="the engine died"):
        dispatcher.next_group("train", 10)


def test_an_error_of_a_reward_model_reaches_whoever_asks_however_often(dispatcher_of: Build):
    def score(groups: list[PromptGroup]) -> list[PromptGroup]:
        raise ValueError(f"cannot read {groups[0].prompt.prompt_id}")

    engine = FakeEngine()
    dispatcher = dispatcher_of([engine], score=score)
    dispatcher.submit(prompts(7, 8), "train")
    engine.finish(7)
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot read 7"):
            dispatcher.next_group("train", 10)


def test_an_error_while_memory_is_taken_reaches_whoever_asks():
    class Full(Memory):
        def wake(self) -> None:
            raise MemoryError("the KV cache does not fit")

    dispatcher = Dispatcher([FakeEngine()], {"train": 2}, memory=Full([]), longest=100)
    dispatcher.submit(prompts(0), "train")
    with pytest.raises(MemoryError, match="the KV cache does not fit"):
        dispatcher.next_group("train", 10)
    dispatcher.close()


# ---- engines that are replaced


def test_prompts_of_a_dead_engine_are_sampled_again_before_others(dispatcher_of: Build):
    """Late answers of the dead engine are dropped; every prompt comes back once."""
    told: list[tuple] = []

    def is_replaced(number: int, engine: FakeEngine, error: BaseException) -> bool:
        told.append((number, engine, str(error)))
        dispatcher.lose(number)
        return True

    dead, other, new = FakeEngine(), FakeEngine(), FakeEngine()
    new.num_samples = SAMPLES_IN_FLIGHT // 2
    dispatcher = dispatcher_of([dead, other], num_samples=SAMPLES_IN_FLIGHT // 2, is_replaced=is_replaced)
    dispatcher.submit(prompts(*range(8)), "train")
    other.finish(1)
    dead.finish(0)
    assert sorted(received(dispatcher, 2)) == [0, 1]
    wait_until(lambda: len(dead.open) == len(other.open) == 2)
    lost = sorted(dead.open)
    late = dead.open[lost[1]]
    dead.fail(lost[0], ConnectionError("the engine died"))
    wait_until(lambda: bool(told))
    late.set_result(Sampled(group=group_of(Prompt(prompt_id=99, text=""), [0.0]), done=no_work()))
    assert told == [(0, dead, "the engine died")]
    before = sorted(other.open)
    other.finish(before[0])
    wait_until(lambda: lost[0] in other.open)  # the first of the dead one's prompts
    dispatcher.replace(0, new)
    wait_until(lambda: bool(new.open))
    assert new.seen[0] == lost[1]
    got = received(dispatcher, 1)
    while len(got) < 6:
        wait_until(lambda: bool(other.open or new.open))
        count = len(other.open) + len(new.open)
        for engine in (other, new):
            engine.finish(*engine.open)
        got += received(dispatcher, count)
    assert sorted(got) == list(range(2, 8))


class LossyEngine(FakeEngine):
    """Engine that answers at once. Of one request in twenty either the request is lost or the answer."""

    rng, num_runs = random.Random(0), 0

    def run_group(
        self, prompt: Prompt, purpose: Purpose, samples: Sequence[int] | None = None
    ) -> Future[Sampled]:
        future, fate = super().run_group(prompt, purpose, samples), self.rng.random()
        LossyEngine.num_runs += fate >= 0.05  # the request arrived
        if fate < 0.1:
            self.fail(prompt.prompt_id, ConnectionError("a call was lost"))
        else:
            self.finish(prompt.prompt_id)
        return future


@pytest.mark.processes
def test_of_lost_requests_and_answers_every_prompt_comes_back_once(dispatcher_of: Build):
    """Ray reports both by the same error, so the prompt runs again, perhaps for the second time."""
    lost: SimpleQueue[int] = SimpleQueue()
    told: list[FakeEngine] = []

    def is_replaced(number: int, engine: FakeEngine, error: BaseException) -> bool:
        if engine not in told:  # an engine dies once, however many of its requests fail
            told.append(engine)
            dispatcher.lose(number)
            lost.put(number)
        return True

    dispatcher = dispatcher_of([LossyEngine(), LossyEngine()], is_replaced=is_replaced)
    got: list[int] = []
    for step in range(500):
        dispatcher.submit(prompts(*range(4 * step, 4 * step + 4)), "train")
        while len(got) < 4 * step + 4:
            try:
                got.append(dispatcher.next_group("train", 0.02).prompt.prompt_id)
            except TimeoutError:  # an engine was lost, or this machine is slow
                if not lost.empty():
                    dispatcher.replace(lost.get(), LossyEngine())
    assert sorted(got) == list(range(2000))
    assert LossyEngine.num_runs <= 1.2 * 2000


def test_with_a_single_engine_the_run_waits_for_its_successor(dispatcher_of: Build):
    dead, new = FakeEngine(), FakeEngine()
    dispatcher = dispatcher_of([dead], is_replaced=lambda *_: True)
    dispatcher.submit(prompts(0, 1, 2), "train")
    dead.finish(1)
    assert received(dispatcher, 1) == [1]
    dispatcher.lose(0)
    with pytest.raises(TimeoutError, match=r"\b2 prompts"):
        dispatcher.next_group("train", 0.2)
    with dispatcher.paused():  # nobody samples
        pass
    dispatcher.replace(0, new)
    new.finish(0, 2)
    assert received(dispatcher, 2) == [0, 2]


def test_a_run_whose_engine_is_not_replaced_again_ends(dispatcher_of: Build):
    dispatcher = dispatcher_of([FakeEngine()], is_replaced=lambda *_: True)
    dispatcher.submit(prompts(0), "train")
    dispatcher.fail(ConnectionError("it died six times"))
    with pytest.raises(ConnectionError, match="six times"):
        dispatcher.next_group("train", 10)


# ---- rewards and memory


def test_reward_models_score_while_engines_work_and_several_groups_at_a_time(dispatcher_of: Build):
    """Groups that finish while reward models work wait for the next call, all together."""
    engine, score = FakeEngine(), Score([])
    dispatcher = dispatcher_of([engine], score=score)
    dispatcher.submit(prompts(0, 1, 2, 3), "train")
    engine.finish(1)
    wait_until(lambda: score.calls == ["score [1]"])
    engine.finish(3, 0)
    score.permits.release(2)
    groups = [dispatcher.next_group("train", 10) for _ in range(3)]
    assert [g.prompt.prompt_id for g in groups] == [1, 3, 0]
    assert [[t.reward for t in g.trajectories] for g in groups] == [[1.0, 2.0]] * 3
    assert score.calls == ["score [1]", "scored", "score [3, 0]", "scored"]


def test_scored_groups_go_where_they_were_asked_for(dispatcher_of: Build):
    engine, score = FakeEngine(), Score([])
    score.permits.release(9)
    dispatcher = dispatcher_of([engine], score=score)
    dispatcher.submit(prompts(0, 1), "train")
    dispatcher.submit(prompts(2), "eval")
    engine.finish(0, 2, 1)
    assert received(dispatcher, 1, "eval") == [2] and received(dispatcher, 2) == [0, 1]


def test_engines_keep_the_memory_until_somebody_needs_it(dispatcher_of: Build):
    calls: list[str] = []
    engine = FakeEngine(calls)
    dispatcher = dispatcher_of([engine], calls=calls)
    for _ in range(2):
        for i in (0, 1):
            dispatcher.submit(prompts(i), "train")
            engine.finish(i)
            received(dispatcher, 1)
        dispatcher.sleep()
    assert calls == ["wake", "run 0", "run 1", "rest"] * 2


def test_sleep_waits_for_the_groups_that_engines_were_sent(dispatcher_of: Build):
    calls: list[str] = []
    engine = FakeEngine(calls)
    dispatcher = dispatcher_of([engine], calls=calls)
    dispatcher.submit(prompts(0, 1), "train")
    engine.finish(0)
    waiting = threading.Thread(target=dispatcher.sleep)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive() and "rest" not in calls
    engine.finish(1)
    waiting.join(10)
    assert not waiting.is_alive() and calls == ["wake", "run 0", "run 1", "rest"]


def test_sleep_raises_the_error_of_a_dead_engine(dispatcher_of: Build):
    engine = FakeEngine()
    dispatcher = dispatcher_of([engine])
    dispatcher.submit(prompts(0), "train")
    with ThreadPoolExecutor(1) as thread:
        freed = thread.submit(dispatcher.sleep)
        with pytest.raises(TimeoutError):
            freed.result(0.1)
        engine.fail(0, ConnectionError("the engine died"))
        with pytest.raises(ConnectionError, match="the engine died"):
            freed.result(10)
    dispatcher.sleep()  # `next_group` reports the failure


def test_reward_models_that_need_the_memory_wait_until_it_is_free(dispatcher_of: Build):
    """Engines wait until the reward models have finished, also with prompts that come meanwhile."""
    calls: list[str] = []
    engine, score = FakeEngine(calls), Score(calls)

    def score_alone(groups: list[PromptGroup]) -> list[PromptGroup]:
        dispatcher.sleep()
        return score(groups)

    dispatcher = dispatcher_of([engine], calls=calls, score=score_alone, scores_at_once=False)
    dispatcher.submit(prompts(0, 1), "train")
    engine.finish(1)
    engine.finish(0)
    wait_until(lambda: calls[-1] == "score [1, 0]")
    dispatcher.submit(prompts(2), "eval")
    score.permits.release(2)
    assert received(dispatcher, 2) == [1, 0]
    engine.finish(2)
    assert received(dispatcher, 1, "eval") == [2]
    first = ["wake", "run 0", "run 1", "rest", "score [1, 0]", "scored"]
    assert calls == [*first, "wake", "run 2", "rest", "score [2]", "scored"]


def test_a_closed_dispatcher_leaves_no_thread_behind(dispatcher_of: Build):
    others = set(threading.enumerate())
    engine, score = FakeEngine(), Score([])
    score.permits.release()
    dispatcher = dispatcher_of([engine], score=score)
    dispatcher.submit(prompts(0), "train")
    engine.finish(0)
    received(dispatcher, 1)
    own = set(threading.enumerate()) - others
    assert own
    dispatcher.close()
    wait_until(lambda: not any(thread.is_alive() for thread in own))


# ---- weights change


def test_nothing_runs_while_weights_change(dispatcher_of: Build):
    """Groups that were sent are finished first; waiting prompts are sent afterwards."""
    engine = FakeEngine()
    dispatcher = dispatcher_of([engine], num_samples=SAMPLES_IN_FLIGHT)
    dispatcher.submit(prompts(0, 1), "train")
    wait_until(lambda: 0 in engine.open)
    with ThreadPoolExecutor(1) as pool:
        changed = threading.Event()

        def change() -> None:
            with dispatcher.paused():
                assert engine.seen == [0] and not engine.open
                changed.set()

        changing = pool.submit(change)
        assert not changed.wait(0.1)
        engine.finish(0)
        changing.result(10)
    engine.finish(1)
    assert received(dispatcher, 2) == [0, 1]
    with dispatcher.paused():  # there is nothing to wait for
        dispatcher.submit(prompts(2), "train")
        assert not threading.Event().wait(0.05) and engine.seen == [0, 1]
    engine.finish(2)
    assert received(dispatcher, 1) == [2]
