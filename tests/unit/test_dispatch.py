import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from openrlhf.rollout.generator import SAMPLES_IN_FLIGHT, generate

from openrlhf.types import Prompt, Trajectory


def prompts(count: int) -> list[Prompt]:
    return [Prompt(prompt_id=i, text=f"prompt {i}") for i in range(count)]


def group(prompt: Prompt, size: int = 2) -> list[Trajectory]:
    empty = {"token_ids": [], "action_mask": [], "rollout_log_probs": [], "weight_versions": []}
    return [Trajectory(prompt=prompt, sample_index=i, reward=0.0, **empty) for i in range(size)]


class Sampler:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.open: dict[int, Future] = {}
        self.seen: list[int] = []
        self.purposes: set[str] = set()
        self.most_at_once = 0

    def run_group(self, prompt: Prompt, purpose: str) -> Future:
        future: Future = Future()
        self.open[prompt.prompt_id] = future
        self.seen.append(prompt.prompt_id)
        self.purposes.add(purpose)
        self.most_at_once = max(self.most_at_once, len(self.open))
        return future

    def finish(self, prompt_id: int) -> None:
        self.open.pop(prompt_id).set_result(group(Prompt(prompt_id=prompt_id, text="")))


class Eager(Sampler):
    """Answers at once."""

    def run_group(self, prompt: Prompt, purpose: str) -> Future:
        future = super().run_group(prompt, purpose)
        self.finish(prompt.prompt_id)
        return future


def test_results_come_in_the_order_of_the_prompts():
    sampler, finished = Sampler(), []
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(
            generate,
            prompts(4),
            [sampler],
            purpose="eval",
            num_samples=2,
            on_finished=lambda g: finished.append(g[0].prompt.prompt_id),
        )
        wait_until(lambda: len(sampler.open) == 4)
        for prompt_id in (2, 0, 3, 1):
            sampler.finish(prompt_id)
            wait_until(lambda i=prompt_id: i in finished)
        trajectories = result.result(10)
    ids = [(t.prompt.prompt_id, t.sample_index) for t in trajectories]
    assert ids == [(i, k) for i in range(4) for k in range(2)]
    assert finished == [2, 0, 3, 1]
    assert sampler.purposes == {"eval"}


def test_the_least_loaded_engine_gets_the_next_prompt():
    """Room for one group in each engine: the one that finishes gets the next."""
    slow, fast = Sampler(), Sampler()
    with ThreadPoolExecutor(1) as thread:
        options = {"purpose": "train", "num_samples": SAMPLES_IN_FLIGHT}
        result = thread.submit(generate, prompts(5), [slow, fast], **options)
        for prompt_id in (1, 2, 3, 4):
            wait_until(lambda i=prompt_id: i in fast.open)
            fast.finish(prompt_id)
        assert slow.seen == [0] and fast.seen == [1, 2, 3, 4]
        slow.finish(0)
        assert [t.prompt.prompt_id for t in result.result(10)[::2]] == [0, 1, 2, 3, 4]


def test_engines_get_equal_shares_to_begin_with():
    samplers = [Sampler() for _ in range(3)]
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(generate, prompts(7), samplers, purpose="train", num_samples=2)
        wait_until(lambda: sum(len(s.open) for s in samplers) == 7)
        assert [s.seen for s in samplers] == [[0, 3, 6], [1, 4], [2, 5]]
        for sampler in samplers:
            for prompt_id in list(sampler.open):
                sampler.finish(prompt_id)
        result.result(10)


@pytest.mark.parametrize(("num_samples", "limit"), [(100, 5), (512, 1), (2000, 1)])
def test_no_more_than_the_limit_in_flight(num_samples, limit):
    """512 samples an engine, and a group in any case."""
    sampler = Sampler()
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(generate, prompts(12), [sampler], purpose="train", num_samples=num_samples)
        for prompt_id in range(12):
            wait_until(lambda i=prompt_id: i in sampler.open)
            sampler.finish(prompt_id)
        result.result(10)
    assert sampler.most_at_once == limit


def test_an_exception_reaches_the_caller():
    class Broken(Sampler):
        def run_group(self, prompt: Prompt, purpose: str) -> Future:
            future = super().run_group(prompt, purpose)
            future.set_exception(ConnectionError("the engine died"))
            return future

    with pytest.raises(ConnectionError, match="the engine died"):
        generate(prompts(3), [Broken()], purpose="train", num_samples=1)


def test_nothing_to_do():
    assert generate([], [Eager()], purpose="train", num_samples=4) == []


def wait_until(condition) -> None:
    pause = threading.Event()
    for _ in range(1000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not happen within 10 s")
