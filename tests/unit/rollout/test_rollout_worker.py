"""The process of an engine: what it loads, and which flag reaches which part of it."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from openrlhf.agents.base import SingleTurnAgentExecutor
from openrlhf.backends.rollout import EngineOptions
from openrlhf.backends.weight_sync.stored_weights import EngineProbe, Probe
from openrlhf.config.ppo import (
    ActorConfig,
    AdvantageConfig,
    AlgoConfig,
    EvalConfig,
    PPOConfig,
    PPOTeacherConfig,
    PromptDataConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
    VllmConfig,
)
from openrlhf.config.sections import KEY_VARIABLE, LoraConfig, ScorerDeepSpeedConfig
from openrlhf.rewards.function import NoReward
from openrlhf.rollout import worker as workers
from openrlhf.rollout.episodes import EpisodeRunner
from openrlhf.rollout.executors import AgentSetting
from openrlhf.rollout.worker import RolloutWorker, engine_options, retries_on_other_engine
from openrlhf.tasks.picture import make_pictures
from openrlhf.tasks.tiny_model import tiny_chat_model, tiny_tokenizer
from openrlhf.tasks.tiny_vision_model import tiny_vision_model
from openrlhf.text import image_placeholder_ids
from openrlhf.types import Episode, Image, Prompt
from openrlhf.user_file import UserFiles

REWARDS = "def reward_func(queries, prompts, labels):\n    return [float(len(query)) for query in queries]\n"


class Engine:
    """Engine that remembers its calls and answers each with its name."""

    vocabulary = 50

    def __init__(self, options: Any) -> None:
        self.options, self.calls = options, []

    async def start(self, free_fraction: float | None) -> None:
        self.calls.append(("start", free_fraction))

    async def probe(self, *arguments: Any) -> EngineProbe:
        self.calls.append(("probe", *arguments))
        return EngineProbe(log_probs=[-1.0], version=3)

    def shutdown(self) -> None:
        self.calls.append(("shutdown",))

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> str:
            self.calls.append((name, *arguments))
            return name

        return call


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat_model(tmp_path_factory.mktemp("model"), hidden_size=32)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments with which a worker makes its parts, by their classes' names."""
    made: dict[str, Any] = {}

    def keeping(name: str) -> Any:
        def make(*arguments: Any, **options: Any) -> SimpleNamespace:
            made[name] = arguments, options
            return SimpleNamespace(name=name, close=lambda: made.update(closed=name))

        return make

    for name in ("EpisodeRunner", "RewardFunction", "RemoteReward"):
        monkeypatch.setattr(workers, name, keeping(name))
    monkeypatch.setattr(workers, "engine_class", lambda options: {"vllm": Engine}[options.engine])
    return made


def config_of(model: Path, **changes: Any) -> PPOConfig:
    values = {
        "actor": ActorConfig(model_name_or_path=str(model)),
        "reward": RewardConfig(remote_url="http://host/reward"),
    }
    return PPOConfig(**(values | changes))


def started(config: PPOConfig, free_fraction: float | None = None) -> Any:
    files = UserFiles.of(config.train.agent, config.reward_function)
    worker = RolloutWorker(config, SimpleNamespace(engine="vllm"), files)
    asyncio.run(worker.start(free_fraction))
    return worker


# ---- its parts


def test_a_worker_starts_its_engine_and_runs_episodes_as_the_flags_say(model: Path, made: dict) -> None:
    config = config_of(
        model,
        rollout=RolloutConfig(
            episode_timeout=11.0,
            retries=3,
            retry_on=("env-error",),
            max_concurrent_episodes=5,
            n_samples_per_prompt=6,
            max_kept_tokens=80,
            temperature=0.7,
        ),
        eval=EvalConfig(n_samples_per_prompt=2, temperature=0.1),
        data=PromptDataConfig(apply_chat_template=True),
        vllm=VllmConfig(num_engines=1),
        algo=AlgoConfig(advantage=AdvantageConfig(score_centering_top_k=70)),
    )
    worker = started(config, 0.25)
    assert worker.engine.calls == [("start", 0.25)] and worker.rewards[0].name == "RemoteReward"
    (engine, tokenizer, executor, stops), options = made["EpisodeRunner"]
    assert engine is worker.engine and stops == [tiny_tokenizer().eos_token_id]
    assert tokenizer("1 + 1")["input_ids"] == tiny_tokenizer()("1 + 1")["input_ids"]
    assert isinstance(executor, SingleTurnAgentExecutor)
    assert executor.reward is worker.rewards[0]
    assert executor._prompt_ids.__wrapped__.keywords == {"is_chat": True}
    assert options == {
        "timeout": 11.0,
        "retries": 3,
        "retry_on": ("env-error",),
        "max_concurrent": 5,
        "reward_is_optional": False,
        "image_token_ids": (),
    }
    train, evaluation = worker.samplings["train"], worker.samplings["eval"]
    assert (train.num_samples, train.temperature) == (6, 0.7)
    assert (evaluation.num_samples, evaluation.temperature) == (2, 0.1)
    assert train.max_kept_tokens == train.num_likely == 50  # all of the vocabulary


def test_placeholders_of_pictures_are_known(made: dict, tmp_path: Path) -> None:
    tiny_vision_model(tmp_path)
    started(config_of(tmp_path, data=PromptDataConfig(max_images_per_prompt=1)))
    (_, processor, *_), options = made["EpisodeRunner"]
    assert processor.image_token_id in options["image_token_ids"]
    assert options["image_token_ids"] == image_placeholder_ids(processor)


def test_the_last_retry_is_for_another_engine(model: Path, made: dict) -> None:
    for engines, retries, own in ((2, 3, 2), (2, 0, 0), (1, 3, 3), (2, 1, 0)):
        config = config_of(
            model, rollout=RolloutConfig(retries=retries), vllm=VllmConfig(num_engines=engines)
        )
        started(config)
        assert made["EpisodeRunner"][1]["retries"] == own
        assert retries_on_other_engine(config) == (own < retries)


@pytest.mark.parametrize(
    "changes",
    [
        {"reward": RewardConfig(model_name_or_path="org/rewards")},
        {"reward": RewardConfig(), "teacher": PPOTeacherConfig(model_name_or_path="org/teacher")},
    ],
    ids=["reward model", "teacher"],
)
def test_other_rewards_make_the_executors_optional(model: Path, made: dict, changes: dict) -> None:
    worker = started(config_of(model, **changes))
    assert isinstance(worker.rewards[0], NoReward) and made["EpisodeRunner"][1]["reward_is_optional"]


def test_a_reward_function_is_called_as_the_flags_say(model: Path, made: dict, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    reward = RewardConfig(
        remote_url=f"{tmp_path}/rewards.py", timeout=7.0, num_workers=3, batch=5, memory_gb=2.0
    )
    worker = started(config_of(model, reward=reward))
    arguments, options = made["RewardFunction"]
    assert arguments == (f"{tmp_path}/rewards.py",)
    assert options == {"timeout": 7.0, "num_workers": 3, "batch_size": 5, "memory_gb": 2.0}
    asyncio.run(worker.close())
    assert made["closed"] == "RewardFunction" and worker.engine.calls[-1] == ("shutdown",)


def test_reward_servers_are_asked_as_the_flags_say(model, made, monkeypatch):
    reward = RewardConfig(
        remote_url="http://a/r, http://b/r",
        remote_timeout=9.0,
        remote_try_timeout=4.0,
        remote_batch_size=3,
        remote_concurrency=2,
    )
    for key in (None, "secret"):
        monkeypatch.delenv(KEY_VARIABLE, raising=False)
        if key:
            monkeypatch.setenv(KEY_VARIABLE, key)
        started(config_of(model, reward=reward))
        arguments, options = made["RemoteReward"]
        assert arguments == (("http://a/r", "http://b/r"),)
        wanted = {"timeout": 9.0, "try_timeout": 4.0, "batch_size": 3, "concurrency": 2, "key": key}
        assert options == wanted


AGENT = """
from openrlhf.agents.base import MultiTurnAgentExecutor

class AgentExecutor(MultiTurnAgentExecutor):
    pass
"""


def test_an_agent_gives_the_rewards_and_gets_its_setting(model, made, tmp_path, monkeypatch):
    (tmp_path / "agent.py").write_text(AGENT)
    asked = []

    async def load(reference: str, setting: AgentSetting) -> str:
        asked.append((reference, setting))
        return "executor"

    monkeypatch.setattr(workers.UserExecutor, "load", load)
    config = config_of(
        model,
        train=TrainConfig(agent_func_path=f"{tmp_path}/agent.py", max_turns=4),
        rollout=RolloutConfig(step_timeout=8.0),
        data=PromptDataConfig(max_len=96),
    )
    worker = started(config)
    ((reference, setting),) = asked
    assert reference == f"{tmp_path}/agent.py" and isinstance(worker.rewards[0], NoReward)
    assert (setting.max_length, setting.max_turns, setting.step_timeout) == (96, 4, 8.0)
    assert setting.tokenizer is made["EpisodeRunner"][0][1]
    assert made["EpisodeRunner"][0][2] == "executor"


def test_each_task_has_its_executor_and_temperature_and_all_share_the_count_of_work(model, monkeypatch):
    """Evaluation has the temperature of all. Two slots are for the episodes of all tasks together."""
    monkeypatch.setattr(workers, "engine_class", lambda options: Engine)
    tasks = {"math.reward": "http://math/reward", "math.temperature": 0.5, "chat.temperature": 0.25}
    rollout = RolloutConfig(temperature=0.9, n_samples_per_prompt=2, max_concurrent_episodes=2)
    worker = started(config_of(model, rollout=rollout, tasks=tasks))
    seen: list[tuple[str, float, bool]] = []
    done: list[int] = []

    async def attempt(self: Any, prompt: Prompt, sample_index: int, sampling: Any, *more: Any) -> Episode:
        is_own = self.executor.reward is worker.rewards[1] and self._slots is worker.runner._slots
        seen.append((prompt.source, sampling.temperature, is_own))
        return Episode(prompt=prompt, sample_index=sample_index, turns=[], reward=None)

    monkeypatch.setattr(EpisodeRunner, "_attempt", attempt)
    for i, (source, purpose) in enumerate(
        [("math", "train"), ("chat", "train"), ("other", "train"), ("math", "eval")]
    ):
        prompt = Prompt(prompt_id=i, text="1 + 1", source=source)
        done = asyncio.run(worker.run_group(prompt, purpose)).done.tolist()
    assert dict.fromkeys(seen) == dict.fromkeys(
        [("math", 0.5, True), ("chat", 0.25, False), ("other", 0.9, False), ("math", 0.6, True)]
    )
    assert done[:2] == [6, 4]  # three groups of two in training, one of four in evaluation
    assert [next(reward._urls) for reward in worker.rewards] == ["http://host/reward", "http://math/reward"]


# ---- what it is asked for


def test_a_group_is_run_with_the_parameters_of_its_purpose(model: Path, made: dict) -> None:
    worker = started(config_of(model))
    prompt, asked = Prompt(prompt_id=0, text="?"), []

    async def run_group(*arguments: Any) -> str:
        asked.append(arguments)
        return "group"

    worker.runner = SimpleNamespace(run_group=run_group, done=np.array([1, 2]))
    sampled = asyncio.run(worker.run_group(prompt, "eval", [2]))
    assert sampled.group == "group" and asked == [(prompt, worker.samplings["eval"], [2])]
    worker.runner.done += 1
    assert sampled.done.tolist() == [1, 2]  # as it was then
    asyncio.run(worker.run_group(prompt, "train"))
    assert asked[1] == (prompt, worker.samplings["train"], None)


def test_a_probe_is_asked_with_its_pictures(model: Path, made: dict) -> None:
    worker, (picture,) = started(config_of(model)), make_pictures(1, seed=0)
    probe = Probe(token_ids=[1, 1, 2], asked=[1, 2], images=(Image("digest", picture.png()),))
    assert asyncio.run(worker.answer(probe)) == EngineProbe(log_probs=[-1.0], version=3)
    name, tokens, (decoded,) = worker.engine.calls[-1]
    assert (name, tokens) == ("probe", [1, 2]) and decoded.size[0] > 1


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("init_weight_transfer_engine", ({"port": 1},)),
        ("start_weight_update", ()),
        ("update_weights", ([{"names": []}],)),
        ("finish_weight_update", ("2",)),
        ("loaded_checksums", ()),
        ("unwritten_parameters", ()),
        ("layer_fingerprints", ({"lm_head.weight": 8},)),
        ("peak_memory", ()),
        ("sleep", ()),
        ("wake", (["weights"],)),
    ],
)
def test_the_control_plane_is_the_engines(model: Path, made: dict, name: str, arguments: tuple) -> None:
    worker = RolloutWorker(config_of(model), SimpleNamespace(engine="vllm"), UserFiles.of())
    returns_nothing = name.endswith(("engine", "update", "weights")) or name in ("sleep", "wake")
    answer = asyncio.run(getattr(worker, name)(*arguments))
    assert answer == (None if returns_nothing else name)
    assert worker.engine.calls == [(name, *arguments)]


# ---- the engine's options


def test_every_flag_of_an_engine_reaches_it(model: Path) -> None:
    config = config_of(
        model,
        data=PromptDataConfig(max_len=96, max_images_per_prompt=2),
        rollout=RolloutConfig(engine_timeout=77.0),
        vllm=VllmConfig(
            num_engines=2,
            pipeline_parallel_size=2,
            enable_prefix_caching=True,
            keep_cache=True,
            sync_backend="nccl",
            lora_sync="adapter",
        ),
        algo=AlgoConfig(router_replay=True),
        ds=ScorerDeepSpeedConfig(lora=LoraConfig(rank=3, alpha=5, target_modules=("q_proj",))),
        train=TrainConfig(seed=9),
    )
    found = engine_options(config, on_gpu=True)
    assert (found.model, found.max_len, found.seed) == (str(model), 96, 9)
    assert (found.pipeline_parallel_size, found.max_images, found.timeout) == (2, 2, 77.0)
    assert found.enable_prefix_caching and found.keep_cache and found.returns_routing
    assert found.on_gpu and not engine_options(config, on_gpu=False).on_gpu
    assert found.lora == config.ds.lora
    assert found.engine == "vllm" and found.enable_sleep == config.engines_sleep
    plain = replace(config, rollout=RolloutConfig(engine="transformers"), vllm=VllmConfig())
    other = engine_options(plain, on_gpu=False)
    assert other.engine == "transformers" and other.transfer_backend == "ray" and other.lora is None
    assert isinstance(other, EngineOptions) and not other.enable_prefix_caching


@pytest.mark.parametrize(("kept", "likely", "most"), [(5, 5, 20), (500, 40, 500), (5, 64, 64)])
def test_an_engine_returns_enough_log_probs_for_clients_and_for_supports(model, kept, likely, most):
    algo = AlgoConfig(advantage=AdvantageConfig(score_centering_top_k=likely))
    config = config_of(model, rollout=RolloutConfig(max_kept_tokens=kept), algo=algo)
    assert engine_options(config, on_gpu=False).max_logprobs == most
