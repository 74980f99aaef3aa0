"""Episodes with a stand-in for the engine and tokens by hand."""

import asyncio
from dataclasses import replace

import pytest
from fake_engine import Engine
from refusals import refused
from vllm.outputs import WeightVersionSpan

from openrlhf.agents.base import AgentExecutorBase, Reward, RewardError, SingleTurnAgentExecutor
from openrlhf.backends.rollout import EngineDied
from openrlhf.config.ppo import (
    AdvantageConfig,
    AlgoConfig,
    EvalConfig,
    PPOConfig,
    PromptDataConfig,
    RolloutConfig,
    TrainConfig,
)
from openrlhf.errors import ErrorCode
from openrlhf.rollout import episodes
from openrlhf.rollout.episodes import EpisodeRunner, Sampling
from openrlhf.rollout.seeds import seed_at
from openrlhf.tasks.tiny_model import tiny_tokenizer
from openrlhf.types import Outcome, Prompt, Trajectory

PROMPT = Prompt(prompt_id=5, text="1 + 1 =", label="2", epoch=3)
TOKENIZER = tiny_tokenizer()
PROMPT_IDS = TOKENIZER(PROMPT.text, add_special_tokens=False)["input_ids"]
STOP = TOKENIZER.eos_token_id
ANSWER = [*TOKENIZER("2", add_special_tokens=False)["input_ids"], STOP]


ALL = RolloutConfig().retry_on


async def judge(query: str, prompt: str, label: str) -> Reward:
    """Returns 1 if the answer is the label; extra_logs carry what the judge saw."""
    answer = query.removeprefix(prompt)
    right = float(answer == label + TOKENIZER.eos_token)
    logs, texts = {"characters": float(len(answer))}, {"seen": answer}
    return Reward(reward=right, score=right / 2, extra_logs=logs, extra_texts=texts)


async def no_judge(query: str, prompt: str, label: str) -> Reward:
    raise RewardError("the judge is out")


def sampling(**changes) -> Sampling:
    values = {
        "purpose": "train",
        "num_samples": 3,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "max_new_tokens": 8,
        "max_len": 64,
        "stop": (),
        "run_seed": 42,
    }
    return Sampling(**(values | changes))


def run_group(engine: Engine, reward=judge, options: dict | None = None, **changes) -> list[Trajectory]:
    executor = SingleTurnAgentExecutor(reward, is_chat=True)
    return run_executor(executor, engine, options, **changes)


def run_executor(
    executor: AgentExecutorBase, engine: Engine, options: dict | None = None, **changes
) -> list[Trajectory]:
    runner = EpisodeRunner(engine, TOKENIZER, executor, [STOP], **(options or {}))
    group = asyncio.run(runner.run_group(PROMPT, sampling(**changes)))
    assert group.prompt is PROMPT
    return group.trajectories


def test_every_field_of_an_episode_is_recorded():
    spans = [WeightVersionSpan("4", start=0, end=1), WeightVersionSpan("5", start=1, end=2)]
    first, *others = run_group(Engine(ANSWER, spans=spans))
    assert first.prompt is PROMPT
    assert first.token_ids.tolist() == PROMPT_IDS + ANSWER
    assert first.action_mask.tolist() == [False] * len(PROMPT_IDS) + [True, True]
    assert first.rollout_log_probs.tolist() == [-0.5, -1.0]
    assert first.weight_versions.tolist() == [[4, 1], [5, 1]]
    assert (first.turn_starts.tolist(), first.part) == ([len(PROMPT_IDS)], 0)
    assert (first.reward, first.score) == (1.0, 0.5)
    assert first.extra_logs == {"characters": float(len("2" + TOKENIZER.eos_token))}
    assert first.extra_texts == {"seen": "2" + TOKENIZER.eos_token}
    assert (first.outcome, first.error, first.finish_reason) == (Outcome.OK, "", "stop")
    assert first.ok and not first.truncated
    assert [t.sample_index for t in (first, *others)] == [0, 1, 2]


def test_seeds_are_addresses():
    engine = Engine(ANSWER)
    trajectories = run_group(engine)
    seeds = [seed_at(42, "train", PROMPT.epoch, PROMPT.prompt_id, i) for i in range(3)]
    assert [t.seed for t in trajectories] == seeds
    assert [params.seed for _, params in engine.asked] == seeds
    assert [t.seed for t in run_group(Engine(ANSWER), purpose="eval")] != seeds


def test_what_the_engine_is_asked():
    engine = Engine(ANSWER)
    run_group(engine, num_samples=1)
    ((prompt_ids, params),) = engine.asked
    assert prompt_ids == PROMPT_IDS
    assert (params.temperature, params.top_p, params.top_k) == (0.7, 0.9, 20)
    assert params.stop_token_ids == [STOP]
    assert params.logprobs == 0 and not params.detokenize


def test_texts_that_end_an_answer():
    """vLLM finds them in the text; the tokens stay as they were sampled."""
    engine = Engine(ANSWER)
    run_group(engine, num_samples=1, stop=("User:", "\n\n"))
    ((_, params),) = engine.asked
    assert params.stop == ["User:", "\n\n"] and params.include_stop_str_in_output
    assert params.detokenize and not params.skip_special_tokens
    assert params.stop_token_ids == [STOP]


@pytest.mark.parametrize(
    ("max_new_tokens", "max_len", "expected"),
    [(8, 64, 8), (8, len(PROMPT_IDS) + 3, 3), (None, len(PROMPT_IDS) + 5, 5), (8, len(PROMPT_IDS) + 8, 8)],
)
def test_the_room_for_an_answer(max_new_tokens, max_len, expected):
    """The room is min(max_new_tokens, what the prompt leaves of max_len)."""
    engine = Engine(ANSWER)
    run_group(engine, max_new_tokens=max_new_tokens, max_len=max_len)
    assert [params.max_tokens for _, params in engine.asked] == [expected] * 3


def test_a_prompt_that_fills_the_maximum_length_is_refused():
    with refused(ErrorCode.TOO_LONG, flag="--data.max_len", value=len(PROMPT_IDS)):
        run_group(Engine(ANSWER), max_len=len(PROMPT_IDS))


def test_an_answer_that_was_cut():
    (t,) = run_group(Engine(ANSWER[:1], finish_reason="length"), num_samples=1)
    assert t.truncated and t.ok and t.finish_reason == "length"
    assert t.reward == 0.0  # the judge did not see an end


def test_an_aborted_answer_is_never_judged():
    (t,) = run_group(Engine(ANSWER[:1], finish_reason="abort"), reward=no_judge, num_samples=1)
    assert (t.outcome, t.reward, t.score) == (Outcome.ABORTED, None, None)
    assert t.token_ids.tolist() == PROMPT_IDS + ANSWER[:1]
    assert not t.ok


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_an_answer_with_log_probs_that_are_not_finite_is_no_sample(monkeypatch, value: float) -> None:
    monkeypatch.setattr("fake_engine.log_prob", lambda position: value if position else -0.5)
    for trajectory in run_group(Engine(ANSWER)):
        assert (trajectory.outcome, trajectory.reward) == (Outcome.ENV_ERROR, None)
        assert "not finite" in trajectory.error


def test_a_failed_reward_keeps_the_tokens():
    (t,) = run_group(Engine(ANSWER), reward=no_judge, num_samples=1)
    assert (t.outcome, t.error) == (Outcome.REWARD_ERROR, "the judge is out")
    assert (t.reward, t.score) == (None, None)
    assert t.token_ids.tolist() == PROMPT_IDS + ANSWER
    assert t.rollout_log_probs.tolist() == [-0.5, -1.0] and t.weight_versions.tolist() == [[0, 2]]


def test_any_other_exception_propagates():
    async def broken(query, prompt, label):
        raise KeyError("a bug of ours")

    with pytest.raises(KeyError, match="a bug of ours"):
        run_group(Engine(ANSWER), reward=broken)


class Waiting(Engine):
    """Engine whose first `slow` requests take a minute."""

    def __init__(self, slow: int) -> None:
        super().__init__(ANSWER)
        self.slow = slow

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        output = await super().generate(prompt_token_ids, sampling_params)
        await asyncio.sleep(60 if len(self.asked) <= self.slow else 0)
        return output


def test_an_episode_that_takes_too_long() -> None:
    (t,) = run_group(Waiting(1), options={"timeout": 0.05}, num_samples=1)
    assert t.outcome is Outcome.TIMED_OUT and t.reward is None and t.num_actions == 0
    assert "--rollout.episode_timeout 0.05 s" in t.error


@pytest.mark.parametrize(("closes", "told"), [(0.01, "0.05 s"), (60, "did not end in 0.2 s")])
def test_an_episode_that_closes_late_holds_up_no_other(monkeypatch, closes: float, told: str) -> None:
    async def hangs(query: str, prompt: str, label: str) -> Reward:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(closes)
        raise AssertionError

    monkeypatch.setattr(episodes, "CLOSE_SECONDS", 0.2)
    (t,) = run_group(Engine(ANSWER), hangs, {"timeout": 0.05}, num_samples=1)
    assert t.outcome is Outcome.TIMED_OUT and t.error.endswith(told), t.error


def test_a_slow_reward_counts_and_leaves_the_tokens() -> None:
    async def slow(query: str, prompt: str, label: str) -> Reward:
        await asyncio.sleep(60)
        raise AssertionError

    (t,) = run_group(Engine(ANSWER), slow, {"timeout": 0.05}, num_samples=1)
    assert t.outcome is Outcome.TIMED_OUT and t.action_ids.tolist() == ANSWER


def test_a_time_out_of_ours_is_not_the_episodes() -> None:
    async def broken(query: str, prompt: str, label: str) -> Reward:
        raise TimeoutError("a bug of ours")

    with pytest.raises(TimeoutError, match="a bug of ours"):
        run_group(Engine(ANSWER), broken, {"timeout": 60})


def test_failed_episodes_run_again_with_other_seeds() -> None:
    """The i-th further try has the address of the episode and its number."""
    engine = Waiting(2)
    (t,) = run_group(engine, options={"timeout": 0.05, "retries": 3, "retry_on": ALL}, num_samples=1)
    address = (42, "train", PROMPT.epoch, PROMPT.prompt_id, 0)
    seeds = [seed_at(*address), seed_at(*address, "attempt", 1), seed_at(*address, "attempt", 2)]
    assert [params.seed for _, params in engine.asked] == seeds
    assert t.ok and t.seed == seeds[-1] and t.action_ids.tolist() == ANSWER


def test_samples_that_failed_elsewhere_have_the_seeds_of_a_further_try() -> None:
    engine = Engine(ANSWER)
    executor = SingleTurnAgentExecutor(judge, is_chat=True)
    runner = EpisodeRunner(engine, TOKENIZER, executor, [STOP], retries=1, retry_on=ALL)
    group = asyncio.run(runner.run_group(PROMPT, sampling(), samples=[2, 0]))
    assert [t.sample_index for t in group.trajectories] == [2, 0]
    wanted = [seed_at(42, "train", PROMPT.epoch, PROMPT.prompt_id, i, "attempt", 2) for i in (2, 0)]
    assert [params.seed for _, params in engine.asked] == wanted


def test_samples_are_counted_while_others_of_their_group_go_on() -> None:
    prompt, counts = replace(PROMPT, num_tokens=5), []

    class Noting(Engine):
        async def generate(self, *arguments, **options):
            output = await super().generate(*arguments, **options)
            if len(self.asked) == 3:  # the last request
                await asyncio.sleep(0.01)
                counts.append(runner.done.tolist())
            return output

    runner = EpisodeRunner(Noting(ANSWER), TOKENIZER, SingleTurnAgentExecutor(judge, is_chat=True), [STOP])
    asyncio.run(runner.run_group(prompt, sampling(num_samples=3, purpose="eval")))
    asyncio.run(runner.run_group(prompt, sampling(num_samples=1)))
    assert counts[0] == [0, 2, 10] and runner.done.tolist() == [1, 3, 20]


def test_the_last_try_stands() -> None:
    engine = Engine(ANSWER[:1], finish_reason="abort")
    (t,) = run_group(engine, options={"retries": 2, "retry_on": ALL}, num_samples=1)
    assert t.outcome is Outcome.ABORTED and len(engine.asked) == 3


def test_a_reward_that_failed_is_not_tried_again() -> None:
    engine = Engine(ANSWER)
    (t,) = run_group(engine, no_judge, {"retries": 2, "retry_on": ALL}, num_samples=1)
    assert t.outcome is Outcome.REWARD_ERROR and len(engine.asked) == 1


def test_a_dead_engine_ends_the_run() -> None:
    class Dead(Engine):
        async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
            raise EngineDied(ErrorCode.ENGINE_FAILED, "out of memory")

    with pytest.raises(EngineDied):
        run_group(Dead(ANSWER), options={"retries": 2, "retry_on": ALL})


def test_a_cancelled_episode_is_no_data() -> None:
    async def cancelled() -> None:
        runner = EpisodeRunner(Waiting(1), TOKENIZER, SingleTurnAgentExecutor(judge, is_chat=True), [STOP])
        task = asyncio.create_task(runner.run(PROMPT, 0, sampling()))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())


def test_sampling_of_a_configuration():
    config = PPOConfig(
        rollout=RolloutConfig(
            n_samples_per_prompt=6,
            temperature=0.9,
            top_p=0.8,
            top_k=5,
            max_kept_tokens=9,
            max_new_tokens=7,
            stop=("User:",),
        ),
        eval=EvalConfig(n_samples_per_prompt=2, temperature=0.1),
        data=PromptDataConfig(max_len=99),
        train=TrainConfig(seed=11),
        algo=AlgoConfig(advantage=AdvantageConfig(score_centering_top_k=3)),
    )
    train = Sampling(
        purpose="train",
        num_samples=6,
        temperature=0.9,
        top_p=0.8,
        top_k=5,
        max_new_tokens=7,
        max_len=99,
        stop=("User:",),
        run_seed=11,
        max_kept_tokens=9,
        num_likely=3,
    )
    assert Sampling.for_training(config) == train
    nothing_more = {"max_kept_tokens": 0, "num_likely": 0}
    evaluation = replace(train, purpose="eval", num_samples=2, temperature=0.1, **nothing_more)
    assert Sampling.for_evaluation(config) == evaluation
    own = replace(config, eval=replace(config.eval, top_p=0.3, max_new_tokens=5))
    assert Sampling.for_evaluation(own) == replace(evaluation, top_p=0.3, max_new_tokens=5)
    assert Sampling.for_training(own) == train


def test_episodes_at_a_time() -> None:
    running, most = 0, 0

    class Slow(AgentExecutorBase):
        async def execute(self, prompt, label, sampling_params, *others):
            llm_engine = others[2]
            nonlocal running, most
            running += 1
            most = max(most, running)
            await llm_engine.generate(PROMPT_IDS, sampling_params)
            await asyncio.sleep(0.001)
            running -= 1
            return {"reward": 1.0}

    for limit, expected in ((2, 2), (None, 9)):
        most = 0
        found = run_executor(Slow(), Engine(ANSWER), {"max_concurrent": limit}, num_samples=9)
        assert len(found) == 9 and most == expected
