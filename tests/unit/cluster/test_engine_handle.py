"""cluster/engine_handle.py between a dispatcher and an engine that answers when the test tells it to."""

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf.cluster.engine_handle import RayEngineHandle, SamplingTasks
from openrlhf.types import Prompt, PromptGroup, Sampled, no_work


class Method:
    """Remote method of an actor."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple, Future]] = []

    def remote(self, *arguments: Any) -> Any:
        answer: Future = Future()
        self.calls.append((arguments, answer))
        return SimpleNamespace(future=lambda: answer)

    @property
    def last(self) -> Future:
        return self.calls[-1][1]


def engine() -> Any:
    return SimpleNamespace(submit_groups=Method(), finished_groups=Method())


def prompt(number: int) -> Prompt:
    return Prompt(prompt_id=number, text="")


def group(number: int) -> Sampled:
    return Sampled(group=PromptGroup(prompt=prompt(number), trajectories=[]), done=no_work())


def ids(groups: dict[int, Sampled]) -> dict[int, int]:
    return {number: sampled.group.prompt.prompt_id for number, sampled in groups.items()}


def test_what_is_asked_for_while_a_call_is_on_its_way_goes_with_the_next() -> None:
    actor = engine()
    sampler = RayEngineHandle(actor)
    futures = [sampler.run_group(prompt(i), "train", [i]) for i in range(5)]
    assert [list(requests) for (requests,), _ in actor.submit_groups.calls] == [[0]]
    actor.submit_groups.last.set_result(None)
    (requests,), _ = actor.submit_groups.calls[1]
    assert requests == {i: (prompt(i), "train", [i]) for i in range(1, 5)}
    actor.submit_groups.last.set_result(None)
    assert len(actor.submit_groups.calls) == 2 and len(actor.finished_groups.calls) == 1
    actor.finished_groups.last.set_result({3: group(3), 1: group(1)})
    actor.finished_groups.last.set_result({0: group(0), 2: group(2), 4: group(4)})
    assert [future.result().group.prompt.prompt_id for future in futures] == [0, 1, 2, 3, 4]
    assert len(actor.finished_groups.calls) == 2  # nothing waits for more groups


@pytest.mark.parametrize("method", ["submit_groups", "finished_groups"])
def test_a_dead_engine_fails_all_that_wait_and_all_who_ask_later(method: str) -> None:
    actor = engine()
    sampler = RayEngineHandle(actor)
    futures = [sampler.run_group(prompt(i), "train") for i in range(2)]
    getattr(actor, method).last.set_exception(RuntimeError("died"))
    for future in futures:
        with pytest.raises(RuntimeError, match="died"):
            future.result(timeout=0)
    later = sampler.run_group(prompt(2), "train")
    assert not later.done()
    actor.finished_groups.last.set_exception(RuntimeError("still dead"))
    with pytest.raises(RuntimeError, match="still dead"):
        later.result(timeout=0)


def test_groups_are_fetched_as_soon_as_one_has_finished() -> None:
    async def use() -> None:
        ready = [asyncio.Event() for _ in range(3)]

        async def run(prompt: Prompt, *_: Any) -> Sampled:
            await ready[prompt.prompt_id].wait()
            return group(prompt.prompt_id)

        groups = SamplingTasks(run)
        groups.submit({10 + i: (prompt(i), "train", None) for i in range(3)})
        ready[1].set()
        assert ids(await groups.finished()) == {11: 1}
        ready[2].set()
        ready[0].set()
        await asyncio.sleep(0.01)
        assert ids(await groups.finished()) == {10: 0, 12: 2}

    asyncio.run(use())


def test_what_a_group_raises_is_raised_to_who_fetches() -> None:
    async def use() -> None:
        async def run(*_: Any) -> Sampled:
            raise ValueError("no room")

        groups = SamplingTasks(run)
        groups.submit({0: (prompt(0), "train", None)})
        with pytest.raises(ValueError, match="no room"):
            await groups.finished()

    asyncio.run(use())
