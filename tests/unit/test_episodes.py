"""Episodes with a stand-in for the engine: vLLM's own records, tokens by hand."""

import asyncio
from dataclasses import replace

import pytest
from vllm import SamplingParams
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan

from openrlhf.config.ppo import EvalConfig, PPOConfig, PromptDataConfig, RolloutConfig, TrainConfig
from openrlhf.rollout.episodes import EpisodeRunner, Sampling
from openrlhf.rollout.seeds import seed_at
from openrlhf.tasks.tiny_model import tiny_tokenizer
from openrlhf.types import Outcome, Prompt
from openrlhf.utils.agent import AgentExecutorBase, Reward, RewardError, SingleTurnAgentExecutor

PROMPT = Prompt(prompt_id=5, text="1 + 1 =", label="2", episode=3)
TOKENIZER = tiny_tokenizer()
PROMPT_IDS = TOKENIZER(PROMPT.text, add_special_tokens=False)["input_ids"]
STOP = TOKENIZER.eos_token_id
ANSWER = [*TOKENIZER("2", add_special_tokens=False)["input_ids"], STOP]


class Engine:
    """Answers every prompt with the same tokens and remembers what it was asked."""

    def __init__(self, finish_reason: str = "stop", token_ids: list[int] = ANSWER, spans=None) -> None:
        self.finish_reason, self.token_ids, self.spans = finish_reason, token_ids, spans
        self.asked: list[tuple[list[int], SamplingParams]] = []

    async def generate(self, prompt_token_ids: list[int], sampling_params: SamplingParams) -> RequestOutput:
        self.asked.append((prompt_token_ids, sampling_params))
        log_probs = [{t: Logprob(-0.5 * (i + 1))} for i, t in enumerate(self.token_ids)]
        output = CompletionOutput(
            index=0,
            text="",
            token_ids=self.token_ids,
            cumulative_logprob=None,
            logprobs=log_probs,
            finish_reason=self.finish_reason,
            weight_versions=self.spans,
        )
        return RequestOutput("id", None, prompt_token_ids, None, [output], finished=True)


async def judge(query: str, prompt: str, label: str) -> Reward:
    """1 where the answer is the label; extra_logs carry what the judge saw."""
    answer = query.removeprefix(prompt)
    right = float(answer == label + TOKENIZER.eos_token)
    return Reward(reward=right, score=right / 2, extra_logs={"characters": float(len(answer))})


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


def run_group(engine: Engine, reward=judge, prompt: Prompt = PROMPT, **changes):
    runner = EpisodeRunner(engine, TOKENIZER, SingleTurnAgentExecutor(reward, is_chat=True), [STOP])
    return asyncio.run(runner.run_group(prompt, sampling(**changes)))


def test_every_field():
    spans = [WeightVersionSpan("4", start=0, end=1), WeightVersionSpan("5", start=1, end=2)]
    first, *others = run_group(Engine(spans=spans))
    assert first.prompt is PROMPT
    assert first.token_ids == PROMPT_IDS + ANSWER
    assert first.action_mask == [False] * len(PROMPT_IDS) + [True, True]
    assert first.rollout_log_probs == [-0.5, -1.0]
    assert first.weight_versions == [4, 5]
    assert (first.reward, first.score) == (1.0, 0.5)
    assert first.extra_logs == {"characters": float(len("2" + TOKENIZER.eos_token))}
    assert (first.outcome, first.error, first.finish_reason) == (Outcome.OK, "", "stop")
    assert first.ok and not first.truncated
    assert [t.sample_index for t in (first, *others)] == [0, 1, 2]


def test_seeds_are_addresses():
    engine = Engine()
    trajectories = run_group(engine)
    seeds = [seed_at(42, "train", PROMPT.episode, PROMPT.prompt_id, i) for i in range(3)]
    assert [t.seed for t in trajectories] == seeds
    assert [params.seed for _, params in engine.asked] == seeds
    assert [t.seed for t in run_group(Engine(), purpose="eval")] != seeds


def test_what_the_engine_is_asked():
    engine = Engine()
    run_group(engine, num_samples=1)
    ((prompt_ids, params),) = engine.asked
    assert prompt_ids == PROMPT_IDS
    assert (params.temperature, params.top_p, params.top_k) == (0.7, 0.9, 20)
    assert params.stop_token_ids == [STOP]
    assert params.logprobs == 0 and not params.detokenize


def test_texts_that_end_an_answer():
    """vLLM finds them in the text; the tokens stay what was sampled."""
    engine = Engine()
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
    """min(max_new_tokens, what the prompt leaves of max_len)"""
    engine = Engine()
    run_group(engine, max_new_tokens=max_new_tokens, max_len=max_len)
    assert [params.max_tokens for _, params in engine.asked] == [expected] * 3


def test_a_prompt_without_room():
    with pytest.raises(ValueError, match=f"{len(PROMPT_IDS)} tokens leaves no room in --data.max_len"):
        run_group(Engine(), max_len=len(PROMPT_IDS))


def test_an_answer_that_was_cut():
    (t,) = run_group(Engine("length", ANSWER[:1]), num_samples=1)
    assert t.truncated and t.ok and t.finish_reason == "length"
    assert t.reward == 0.0  # the judge saw no end


def test_an_aborted_answer_is_never_judged():
    (t,) = run_group(Engine("abort", ANSWER[:1]), reward=no_judge, num_samples=1)
    assert (t.outcome, t.reward, t.score) == (Outcome.ABORTED, None, None)
    assert t.token_ids == PROMPT_IDS + ANSWER[:1]
    assert not t.ok


def test_a_failed_reward_keeps_the_tokens():
    (t,) = run_group(Engine(), reward=no_judge, num_samples=1)
    assert (t.outcome, t.error) == (Outcome.REWARD_ERROR, "the judge is out")
    assert (t.reward, t.score) == (None, None)
    assert t.token_ids == PROMPT_IDS + ANSWER
    assert t.rollout_log_probs == [-0.5, -1.0] and t.weight_versions == [0, 0]


def test_an_executor_that_fails_without_telling():
    class Lost(AgentExecutorBase):
        async def execute(
            self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None
        ):
            raise RewardError("lost the episode")

    runner = EpisodeRunner(Engine(), TOKENIZER, Lost(), [STOP])
    t = asyncio.run(runner.run(PROMPT, 0, sampling()))
    assert (t.outcome, t.error, t.token_ids) == (Outcome.REWARD_ERROR, "lost the episode", [])


def test_any_other_exception_propagates():
    async def broken(query, prompt, label):
        raise KeyError("a bug of ours")

    with pytest.raises(KeyError, match="a bug of ours"):
        run_group(Engine(), reward=broken)


def test_feedback_between_actions_is_no_action():
    class TwoTurns(AgentExecutorBase):
        async def execute(
            self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None
        ):
            return {
                "prompt": prompt,
                "label": label,
                "observation_tokens": [1, 2, 3, 4, 5, 6],
                "action_ranges": [(1, 3), (5, 6)],
                "rollout_log_probs": [0.0, -1.0, -2.0, 0.0, 0.0, -3.0],
                "weight_versions": [1, 1, 2],
                "reward": 1.0,
                "scores": 1.0,
                "finish_reason": "stop",
                "truncated": False,
            }

    t = asyncio.run(EpisodeRunner(Engine(), TOKENIZER, TwoTurns(), [STOP]).run(PROMPT, 0, sampling()))
    assert t.action_mask == [False, True, True, False, False, True]
    assert t.rollout_log_probs == [-1.0, -2.0, -3.0]
    assert t.extra_logs == {}


def test_sampling_of_a_configuration():
    config = PPOConfig(
        rollout=RolloutConfig(
            n_samples_per_prompt=6, temperature=0.9, top_p=0.8, top_k=5, max_new_tokens=7, stop=("User:",)
        ),
        eval=EvalConfig(n_samples_per_prompt=2, temperature=0.1),
        data=PromptDataConfig(max_len=99),
        train=TrainConfig(seed=11),
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
    )
    assert Sampling.for_training(config) == train
    evaluation = replace(train, purpose="eval", num_samples=2, temperature=0.1)
    assert Sampling.for_evaluation(config) == evaluation
