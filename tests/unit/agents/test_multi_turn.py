"""Environments of several turns, in the forms of all generations, on a stand-in for the engine."""

import asyncio
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from fake_engine import Engine
from refusals import refused

from openrlhf.agents import base
from openrlhf.agents.base import History
from openrlhf.config.ppo import PPOConfig, RolloutConfig
from openrlhf.errors import ErrorCode
from openrlhf.rollout.episodes import EpisodeRunner, Sampling
from openrlhf.rollout.executors import AgentSetting, UserExecutor, check_agent_file
from openrlhf.tasks.tiny_model import tiny_tokenizer
from openrlhf.types import Outcome, Prompt, Trajectory

TOKENIZER = tiny_tokenizer()
FLAG = "--train.agent_func_path"


def tokens(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def play(
    path: Path,
    *answers: str,
    max_turns: int | None = None,
    max_len: int = 200,
    samples: int = 1,
    label: Any = "2",
    **limits,
) -> tuple[list[Trajectory], Engine]:
    engine = Engine(*map(tokens, answers))
    setting = AgentSetting(
        tokenizer=TOKENIZER,
        max_length=max_len,
        max_turns=max_turns,
        step_timeout=limits.pop("step_timeout", None),
    )
    rollout = RolloutConfig(n_samples_per_prompt=samples, max_new_tokens=20)
    config = PPOConfig(rollout=rollout)

    async def episodes() -> list[Trajectory]:
        runner = EpisodeRunner(engine, TOKENIZER, await UserExecutor.load(str(path), setting), [2], **limits)
        sampling = replace(Sampling.for_training(config), max_len=max_len)
        prompt = Prompt(prompt_id=0, text="1 + 1 =", label=label)
        return (await runner.run_group(prompt, sampling)).trajectories

    return asyncio.run(episodes()), engine


NAMES = "AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor"
IMPORTS = f"from openrlhf.agents.base import {NAMES}\n"
STEP = """
    async def reset(self, states, **kwargs):
        assert states == {"observation": "1 + 1 =", "label": "2"}
        self.seen = []
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        self.seen.append((states["observation_text"], states["action_text"]))
        right = states["label"] in states["action_text"]
        return {
            "rewards": 1.0 if right else -0.25,
            "environment_feedback": " No. Again:",
            "done": right,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"turns": len(self.seen)},
            "extra_texts": {"first": "hm"} if len(self.seen) == 1 else {"judge": f"turn {len(self.seen)}"},
        }
"""
SCALAR = "torch.tensor(1.0 if right else -0.25)"
EXECUTOR = """
class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
TOLD_ONCE = """
class AgentExecutor(AgentExecutorBase):
    def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):
        super().__init__(AgentInstance, max_steps, max_length, llm_engine, hf_tokenizer, result_queue)
"""
GENERATIONS = {
    "0.11": (
        "import torch\n"
        f"class AgentInstance(AgentInstanceBase):{STEP.replace('1.0 if right else -0.25', SCALAR)}{EXECUTOR}"
    ),
    "async __init__": (
        "class AgentInstance(AgentInstanceBase):\n"
        f"    async def __init__(self, *args, **kwargs):\n        self.seen = None\n{STEP}{EXECUTOR}"
    ),
    "not async": f"class AgentInstance(AgentInstanceBase):{STEP.replace('async ', '')}{EXECUTOR}",
    "0.8.5": f"class AgentInstance(AgentInstanceBase):{STEP}{TOLD_ONCE}",
    "0.8.5 with execute": (
        f"class AgentInstance(AgentInstanceBase):{STEP}{TOLD_ONCE}"
        "    async def execute(self, prompt, label, sampling_params):\n"
        "        return await super().execute(prompt, label, sampling_params)\n"
    ),
    "0.8.3": """
import torch
turns = 0
async def step(observation, action, label, **kwargs):
    global turns
    turns += 1
    right = label in action
    return {
        "rewards": torch.tensor([1.0 if right else -0.25]),
        "next_observation": observation + action + " No. Again:",
        "done": right,
        "sampling_params": kwargs.get("sampling_params"),
        "extra_logs": {"turns": turns},
    }
""",
    "0.8.3 behind a decorator": """
def traced(function):
    return lambda *texts, **more: function(*texts, **more)

turns = 0
@traced
async def step(observation, action, label, **kwargs):
    global turns
    turns += 1
    right = label in action
    return {
        "rewards": 1.0 if right else -0.25,
        "next_observation": observation + action + " No. Again:",
        "done": right,
        "extra_logs": {"turns": turns},
    }
""",
    "0.8.0": """
turns = 0
async def step(state, action, label):
    global turns
    turns += 1
    right = label in action
    return 1.0 if right else -0.25, state + action + " No. Again:", right, {"turns": turns}
""",
}


@pytest.fixture(params=GENERATIONS.values(), ids=list(GENERATIONS))
def retrying(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Writes an environment that asks again until the answer is right."""
    path = tmp_path / "agent.py"
    path.write_text(IMPORTS + request.param)
    return path


@pytest.mark.parametrize(
    ("scores", "expected"), [((None, None), None), ((0.5, None), 0.5), ((0.5, 0.0), 0.0), ((None, 2.0), 2.0)]
)
def test_the_last_known_score_is_that_of_the_episode(scores, expected):
    steps = [{"rewards": 0.5, "scores": score} for score in scores]
    found = base._result(steps, truncated=True)
    assert (found["reward"], found["scores"], found["turn_rewards"]) == (1.0, expected, [0.5, 0.5])
    assert base._result([{"rewards": 1}], truncated=False)["scores"] is None


def test_an_environment_may_fill_one_dictionary_and_change_its_label(tmp_path: Path) -> None:
    """Its turns earn 1, 2 and 3, and no sample sees what another did to the label of their prompt."""
    path = tmp_path / "agent.py"
    path.write_text(f"""{IMPORTS}
class AgentInstance(AgentInstanceBase):
    async def reset(self, states, **kwargs):
        self.game, self.out = states["label"], {{"environment_feedback": " No. Again:"}}
        return states

    async def step(self, states, **kwargs):
        self.game["moves"].append(states["action_text"])
        played = len(self.game["moves"])
        self.out.update(rewards=played, done=played == 3)
        return self.out
{EXECUTOR}""")
    label = {"moves": []}
    found, _ = play(path, *[" 3"] * 6, samples=2, label=label)
    assert [(t.reward, t.turn_rewards.tolist()) for t in found] == [(6.0, [1.0, 2.0, 3.0])] * 2
    assert label == {"moves": []}


@pytest.mark.processes
def test_files_of_all_generations_are_accepted(retrying: Path) -> None:
    assert check_agent_file(str(retrying), FLAG, limits=()) == ""


def test_one_stream_of_tokens(retrying: Path) -> None:
    """Sampled tokens stand where they were sampled, feedback follows without being trained on; a turn's
    reward is its own."""
    found, engine = play(retrying, " 3", " 4", " 2", samples=1)
    (t,) = found
    assert t.outcome is Outcome.OK, t.error
    texts = ["1 + 1 =", " 3", " No. Again:", " 4", " No. Again:", " 2"]
    parts = list(map(tokens, texts))
    assert t.token_ids.tolist() == list(chain(*parts))
    assert t.action_mask.tolist() == [i % 2 == 1 for i, part in enumerate(parts) for _ in part]
    assert t.turn_rewards.tolist() == [-0.25, -0.25, 1]
    assert (t.reward, t.score, t.truncated, t.extra_logs) == (0.5, 0.5, False, {"turns": 3})
    texts_of_steps = {"first": "hm", "judge": "turn 3"} if "extra_texts" in retrying.read_text() else {}
    assert t.extra_texts == texts_of_steps
    assert [len(ids) for ids, _ in engine.asked] == [sum(map(len, parts[:k])) for k in (1, 3, 5)]
    assert [params.max_tokens for _, params in engine.asked] == [20, 20, 20]


def test_an_answer_keeps_the_tokens_that_were_sampled() -> None:
    """They need not be the tokens of its text."""
    sampled = [token for letter in " 34 apples" for token in tokens(letter)]
    assert sampled != tokens(" 34 apples")
    history = History(TOKENIZER, "1 + 1 =", 200)
    assert history.act(sampled) == " 34 apples"
    assert history.token_ids == [*tokens("1 + 1 ="), *sampled]


def test_siblings_share_nothing(retrying: Path) -> None:
    """Each episode has an environment of its own, also where the environment is a module."""
    found, _ = play(retrying, " 3", " 2", samples=4)
    assert [t.extra_logs["turns"] for t in found] == [len(t.turn_starts) for t in found]
    assert sum(len(t.turn_starts) for t in found) > len(found)


def test_what_ends_an_episode_from_outside(retrying: Path) -> None:
    (t,), engine = play(retrying, " 3", max_turns=2)
    assert (len(engine.asked), t.truncated, t.reward) == (2, True, -0.5)
    room = len(tokens("1 + 1 =") + tokens(" 3") + tokens(" No. Again:")) + 1
    (t,), engine = play(retrying, " 3", max_len=room)
    assert [params.max_tokens for _, params in engine.asked] == [room - len(tokens("1 + 1 =")), 1]
    assert t.truncated and len(t.token_ids) <= room + 1


def agent(tmp_path: Path, step: str, more: str = "") -> Path:
    path = tmp_path / "agent.py"
    lines = "".join(f"        {line}\n" for line in step.splitlines())
    path.write_text(
        f"import asyncio, time\n{IMPORTS}class AgentInstance(AgentInstanceBase):\n"
        f"    async def step(self, states, **kwargs):\n{lines}{EXECUTOR}{more}"
    )
    return path


@pytest.mark.parametrize(
    ("step", "text"),
    [
        ("return 3", "step returned int, not a dict"),
        (
            "return {'rewards': 1, 'environment_feedback': ''}",
            "step returned a dict without 'done'; it has 'rewards'",
        ),
        ("return {'done': True}", "step returned a dict without 'rewards'; it has 'done'"),
        ("return {'done': False, 'rewards': 1}", "step returned a dict without 'environment_feedback'"),
        (
            "return {'done': False, 'rewards': 1, 'environment_images': ['a.png']}",
            "environment_images: the policy reads no images;",
        ),
        ("return {'done': 'False', 'rewards': 1}", "step returned done 'False', not a bool"),
        ("return {'done': 0, 'truncated': 'no', 'rewards': 1}", "step returned truncated 'no', not a bool"),
        ("return {'done': True, 'rewards': None}", "step returned rewards None, not a float"),
        ("return {'done': True, 'rewards': 'good'}", "step returned rewards 'good', not a float"),
        (
            "return {'done': False, 'rewards': 1, 'environment_feedback': None}",
            "step returned environment_feedback None, not a str",
        ),
        ("return {'done': False, 'rewards': 1, 'observation': 3}", "step returned observation 3, not a str"),
        ("return {'done': True, 'rewards': 1, 'extra_logs': 3}", "step returned extra_logs 3, not a dict"),
        (
            "return {'done': False, 'rewards': 1, 'environment_feedback': 'No \\ud800'}",
            "step returned environment_feedback with a half of a character, shown as ?: 'No ?'",
        ),
        (
            "return {'done': False, 'rewards': 1, 'environment_feedback': '', 'sampling_params': {'n': 1}}",
            "sampling_params is the dict {'n': 1}, not SamplingParams",
        ),
        ("return states['nothing']", "line 5: KeyError: 'nothing'"),
        ("return {'done': False, 'rewards': 1, 'observation': ''}", "got no prompt tokens"),
        # these would end the process of the engine, or the group
        ("raise SystemExit(3)", "line 5: RuntimeError: SystemExit: 3"),
        ("raise asyncio.CancelledError", "line 5: CancelledError"),
    ],
)
def test_steps_that_cannot_be_used(tmp_path: Path, step: str, text: str) -> None:
    (t,), _ = play(agent(tmp_path, step), " 3")
    assert t.outcome is Outcome.ENV_ERROR and text in t.error, t.error
    assert len(t.turn_starts) == 1  # the journal has what was sampled


@pytest.mark.parametrize(
    ("step", "text"),
    [
        ("return next(iter([]))", "line 5: RuntimeError: StopIteration"),
        ("raise SystemExit(3)", "line 5: RuntimeError: SystemExit: 3"),
    ],
)
def test_a_step_in_a_thread_ends_neither_the_process_nor_waits_for_ever(tmp_path, step, text):
    path = agent(tmp_path, step)
    path.write_text(path.read_text().replace("async def step", "def step"))
    (t,), _ = play(path, " 3", step_timeout=30)
    assert t.outcome is Outcome.ENV_ERROR and text in t.error, t.error


def test_an_executor_that_exits_fails_its_episode_alone(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    execute = "async def execute(self, prompt, llm_engine):\n        raise SystemExit(3)"
    path.write_text(f"{IMPORTS}class AgentExecutor(AgentExecutorBase):\n    {execute}\n")
    (t,), _ = play(path, " 3")
    assert t.outcome is Outcome.ENV_ERROR and "line 4: SystemExit: 3" in t.error, t.error


@pytest.mark.parametrize(
    ("said", "truncated"),
    [
        ('"done": False, "truncated": True', True),
        ('"done": True, "truncated": True', True),
        ('"done": True, "truncated": False', False),
        ('"done": True, "truncated": None', True),
        ('"done": True', True),
    ],
)
def test_an_environment_says_that_a_limit_of_its_own_ends_the_episode(tmp_path, said, truncated):
    """The engine cuts the answer off, which counts if the environment says nothing."""
    path = tmp_path / "agent.py"
    step = f"    async def step(self, states, **kwargs):\n        return {{'rewards': 0.5, {said}}}\n"
    path.write_text(f"{IMPORTS}class AgentInstance(AgentInstanceBase):\n{step}{EXECUTOR}")
    engine = Engine(tokens(" 3"), finish_reason="length")

    async def episode() -> Trajectory:
        user = await UserExecutor.load(str(path), AgentSetting(tokenizer=TOKENIZER, max_length=200))
        sampling = replace(Sampling.for_training(PPOConfig()), max_len=200)
        runner = EpisodeRunner(engine, TOKENIZER, user, [2])
        return (await runner.run_group(Prompt(prompt_id=0, text="1", label="2"), sampling)).trajectories[0]

    sample = asyncio.run(episode())
    assert (sample.reward, sample.truncated, len(engine.asked)) == (0.5, truncated, 1)


@pytest.mark.parametrize("wait", ["await asyncio.sleep(60)", "return time.sleep(0.4)"])
def test_a_step_that_takes_too_long(tmp_path: Path, wait: str) -> None:
    path = agent(tmp_path, wait)
    if "time.sleep" in wait:
        path.write_text(path.read_text().replace("async def step", "def step"))
    (t,), _ = play(path, " 3", step_timeout=0.05)
    assert t.outcome is Outcome.TIMED_OUT
    assert "execute: " in t.error and "--rollout.step_timeout 0.05" in t.error


HALF_OF_THEM_HANG = """
import itertools, threading, time
NUMBERS, BARRIER = itertools.count(), threading.Barrier(40)

class AgentInstance(AgentInstanceBase):
    async def reset(self, states, **kwargs):
        self.number = next(NUMBERS)
        return states

    def step(self, states, **kwargs):
        time.sleep(3600) if self.number % 2 else BARRIER.wait(30)
        return {"rewards": 1.0, "done": True}
"""


@pytest.mark.processes
def test_steps_that_never_return_hold_up_no_other(tmp_path: Path) -> None:
    """There are more of them than a pool of threads has. The others wait for one another, each in a
    thread."""
    (path := tmp_path / "agent.py").write_text(IMPORTS + HALF_OF_THEM_HANG + EXECUTOR)
    found, _ = play(path, " 3", samples=80, step_timeout=5.0)
    assert [t.outcome for t in found] == [Outcome.OK, Outcome.TIMED_OUT] * 40


def test_a_rewritten_history_is_a_sequence_of_its_own(tmp_path: Path) -> None:
    """The new sequence shares the reward."""
    step = (
        "done = '2' in states['action_text']\n"
        "return {'rewards': 1.0 * done, 'observation': 'In short:', 'done': done}"
    )
    found, _ = play(agent(tmp_path, step), " 3", " 2")
    assert [t.token_ids.tolist() for t in found] == [
        tokens("1 + 1 =") + tokens(" 3"),
        tokens("In short:") + tokens(" 2"),
    ]
    assert [t.reward for t in found] == [1, 1]
    assert [t.turn_rewards.tolist() for t in found] == [[0], [1]]


def test_params_of_the_next_turns(tmp_path: Path) -> None:
    """A step may return the next parameters; limits cut them."""
    step = (
        "params = states['sampling_params']\n"
        "params.top_p, params.max_tokens = 0.5, 7\n"
        "return {'rewards': 0, 'environment_feedback': '?', 'done': '2' in states['action_text'], "
        "'sampling_params': params}"
    )
    _, engine = play(agent(tmp_path, step), " 3", " 4", " 2")
    assert [(p.top_p, p.max_tokens) for _, p in engine.asked] == [(1.0, 20), (0.5, 7), (0.5, 7)]
    assert len({p.seed for _, p in engine.asked}) == 3


@pytest.mark.processes
def test_limits_that_an_executor_would_not_keep_to(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text(
        f"{IMPORTS}class AgentExecutor(AgentExecutorBase):\n"
        "    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):\n"
        "        return {}\n"
    )
    with refused(ErrorCode.USER_CODE, flag=FLAG, value=path, told="--train.max_turns"):
        check_agent_file(str(path), FLAG, limits=["max_turns"])
    assert (
        check_agent_file(str(agent(tmp_path, "return {}")), FLAG, limits=["max_turns", "step_timeout"]) == ""
    )


def test_an_engine_of_0_8_is_asked_as_vllm_is(tmp_path: Path) -> None:
    """The engine of 0.8 is called by `async for output in generate(prompt, params, request_id)`, with a
    dictionary in a queue."""
    path = tmp_path / "agent.py"
    path.write_text(
        f"{IMPORTS}class AgentExecutor(AgentExecutorBase):\n"
        "    def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):\n"
        "        super().__init__(None, max_steps, max_length, llm_engine, hf_tokenizer, result_queue)\n"
        "    async def execute(self, prompt, label, sampling_params):\n"
        "        ids = self.hf_tokenizer(prompt, add_special_tokens=False)['input_ids']\n"
        "        request = {'prompt_token_ids': ids}\n"
        "        async for output in self.llm_engine.generate(request, sampling_params, 'id'):\n"
        "            text = output.outputs[0].text\n"
        "        await self.result_queue.put({'prompt': prompt, 'label': label, 'reward': len(text)})\n"
    )
    (t,), _ = play(path, " 42")
    assert t.ok and t.reward == len(tokens(" 42")), t.error
