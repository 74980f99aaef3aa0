"""A rollout without Ray and vLLM: prompts go to engines of transformers, groups come back, and new weights
arrive in between."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_contract import options_of
from records import sequence

from openrlhf.agents.base import Reward, SingleTurnAgentExecutor
from openrlhf.backends.transformers.engine import TransformersEngine
from openrlhf.backends.weight_sync.sender import WeightSender
from openrlhf.config.ppo import PPOConfig, PromptDataConfig, RolloutConfig
from openrlhf.models.checkpoint_layout import checkpoint_tensors
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.tokenizers import load_tokenizer
from openrlhf.rollout.dispatch import Dispatcher
from openrlhf.rollout.episodes import EpisodeRunner, Sampling
from openrlhf.tasks.tiny_model import tiny_chat_model
from openrlhf.tools.reference.outputs import plain_log_probs
from openrlhf.types import Prompt, PromptGroup, Purpose, Sampled


class Loop:
    """Event loop in a thread, like that of an engine's process."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def start(self, call: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(call, self.loop)


async def words(query: str, prompt: str, label: Any) -> Reward:
    return Reward(reward=float(len(query) - len(prompt)), score=0.0)


class Member:
    """Engine with its episodes, for a Dispatcher."""

    def __init__(self, loop: Loop, path: str, config: PPOConfig) -> None:
        self.loop, self.sampling = loop, Sampling.for_training(config)
        self.engine = TransformersEngine(options_of("transformers", path))
        loop.start(self.engine.start()).result(60)
        tokenizer = load_tokenizer(path, flag="--model")
        executor = SingleTurnAgentExecutor(words, is_chat=False)
        self.runner = EpisodeRunner(self.engine, tokenizer, executor, [tokenizer.eos_token_id])

    def run_group(
        self, prompt: Prompt, purpose: Purpose, samples: Sequence[int] | None = None
    ) -> Future[Sampled]:
        async def run() -> Sampled:
            group = await self.runner.run_group(prompt, self.sampling, samples)
            return Sampled(group=group, done=self.runner.done.copy())

        return self.loop.start(run())


class Client:
    """Control plane of all members."""

    version, workers_per_engine, ends_with_first = 0, 1, False

    def __init__(self, loop: Loop, members: list[Member]) -> None:
        self.loop, self.members, self.num_engines = loop, members, len(members)
        self.failures: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.ask(name, *arguments)

    def finish_weight_update(self) -> None:
        self.ask("finish_weight_update", str(self.version))

    def checksums(self) -> dict[int, Any]:
        return dict(enumerate(self.ask("loaded_checksums")))

    def ask(self, name: str, *arguments: Any) -> list:
        asked = [self.loop.start(getattr(member.engine, name)(*arguments)) for member in self.members]
        return [future.result(60) for future in asked]


class Trained:
    """Policy of a trainer, for a WeightSender."""

    def __init__(self, path: str) -> None:
        self.model: Any = load_causal_lm(path, flag="--model", dtype="fp32", attention="eager").eval()

    def weights(self, bucket_bytes: int, part: str = "merged") -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, tensor.detach()) for name, tensor in checkpoint_tensors(self.model).items())

    def weight_metadata(self, part: str = "merged") -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.weights(0)]

    def check(self, group: PromptGroup, version: int) -> None:
        """Checks that log-probs are those of these weights."""
        for t in group.trajectories:
            assert t.ok and t.weight_versions.tolist() == [[version, t.num_actions]]
            with torch.no_grad():
                expected = plain_log_probs(self.model, sequence(t.token_ids, t.prompt_length))
            assert t.rollout_log_probs.tolist() == pytest.approx(expected.tolist(), abs=1e-4)


class Awake:
    def wake(self) -> None:
        pass

    def sleep(self) -> None:
        pass


@contextmanager
def dispatching(members: list[Member], num_samples: int) -> Iterator[Dispatcher]:
    found = Dispatcher(members, {"train": num_samples, "eval": 1}, memory=Awake(), longest=8)
    yield found
    found.close()


def test_groups_before_and_after_a_weight_sync(tmp_path: Path) -> None:
    path, loop = str(tiny_chat_model(tmp_path)), Loop()
    config = PPOConfig(
        rollout=RolloutConfig(n_samples_per_prompt=2, max_new_tokens=8), data=PromptDataConfig(max_len=64)
    )
    members, trained = [Member(loop, path, config) for _ in range(2)], Trained(path)
    client = Client(loop, members)
    sender = WeightSender(trained, client, backend="ray", address="", port=0, rank=0)
    prompts = [Prompt(prompt_id=i, text=f"{i} + 1 = ") for i in range(4)]
    with dispatching(members, 2) as dispatcher:
        for version in (0, 1):
            if version:
                with torch.no_grad():
                    trained.model.model.norm.weight.mul_(2.0)
                with dispatcher.paused():
                    sender.send(version)
            dispatcher.submit(prompts, "train")
            groups = [dispatcher.next_group("train", 60) for _ in prompts]
            assert {group.prompt.prompt_id for group in groups} == {0, 1, 2, 3}
            assert [len(group.trajectories) for group in groups] == [2] * 4
            for group in groups:
                trained.check(group, version)
    assert all(member.runner.done.sum() > 0 for member in members)
    assert client.ask("unwritten_parameters") == [[], []]
