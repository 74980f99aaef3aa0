"""Users' executors: files that can be used and files that cannot, results, and errors."""

import asyncio
import re
from pathlib import Path

import pytest
from fake_engine import Engine
from refusals import refused

from openrlhf.config.ppo import PPOConfig, RolloutConfig, TrainConfig
from openrlhf.errors import ErrorCode, warn_once
from openrlhf.loop.rl_checks import check_files
from openrlhf.rollout.episodes import EpisodeRunner, Sampling
from openrlhf.rollout.executors import UserExecutor, check_agent_file
from openrlhf.tasks.tiny_model import tiny_tokenizer
from openrlhf.types import Outcome, Prompt, Trajectory
from openrlhf.user_file import ImportTimeout

HEAD = "import asyncio\nfrom openrlhf.agents.base import AgentExecutorBase, RewardError\n"
EXECUTE = (
    "    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):\n"
)
PROMPT = Prompt(prompt_id=0, text="1 + 1 =", label="2")


def agent_file(folder: Path, body: str) -> str:
    """Writes a file whose `execute` of the 0.9 form is `body`: its first line is line 5."""
    path = folder / "agent.py"
    lines = "".join(f"        {line}\n" for line in body.splitlines())
    path.write_text(f"{HEAD}class AgentExecutor(AgentExecutorBase):\n{EXECUTE}{lines}")
    return str(path)


def run(
    path: str, engine: Engine, num_samples: int = 1, tokenizer: object = "tokenizer", **options
) -> list[Trajectory]:
    config = PPOConfig(rollout=RolloutConfig(n_samples_per_prompt=num_samples, max_new_tokens=8))

    async def episodes() -> list[Trajectory]:
        runner = EpisodeRunner(engine, tokenizer, await UserExecutor.load(path), [2], **options)
        return (await runner.run_group(PROMPT, Sampling.for_training(config))).trajectories

    return asyncio.run(episodes())


def test_the_old_contract_end_to_end(tmp_path: Path) -> None:
    """The executor makes two calls with feedback between them and returns a dictionary with the keys of 0.11;
    tensors count as numbers."""
    path = agent_file(
        tmp_path,
        """import torch
assert (prompt, label, hf_tokenizer, max_length) == ("1 + 1 =", "2", "tokenizer", 2048)
first = (await llm_engine.generate([1, 3], sampling_params)).outputs[0]
assert first.text == "AB" and first.logprobs[1][66].logprob == -1.0
tokens = [1, 3, *first.token_ids, 9]
second = (await llm_engine.generate(tokens, sampling_params)).outputs[0]
return {
    "prompt": prompt, "label": label, "reward": torch.tensor([0.5]), "scores": None,
    "observation_tokens": torch.tensor(tokens + second.token_ids), "action_ranges": [(2, 4), (5, 6)],
    "rollout_log_probs": None, "extra_logs": {"turns": torch.tensor(2)},
}""",
    )
    (t,) = run(path, Engine([65, 66], [67]))
    assert t.outcome is Outcome.OK, t.error
    assert t.token_ids.tolist() == [1, 3, 65, 66, 9, 67]
    assert t.action_mask.tolist() == [False, False, True, True, False, True]
    assert t.rollout_log_probs.tolist() == [-0.5, -1.0, -0.5]
    assert t.weight_versions.tolist() == [[0, 3]]
    assert (t.reward, t.score, t.extra_logs) == (0.5, 0.5, {"turns": 2.0})
    assert (t.truncated, t.finish_reason) == (False, "stop")


ASK = "tokens = (await llm_engine.generate([1, 3], sampling_params)).outputs[0].token_ids\n"


def test_siblings_do_not_share_their_params(tmp_path: Path) -> None:
    engine = Engine([65])
    path = agent_file(tmp_path, f'sampling_params.max_tokens -= 1\n{ASK}return {{"reward": 1}}')
    assert all(t.ok for t in run(path, engine, num_samples=3))
    assert [params.max_tokens for _, params in engine.asked] == [7, 7, 7]


def test_a_penalty_of_its_own_fails_the_episode(tmp_path: Path) -> None:
    engine = Engine([65])
    path = agent_file(tmp_path, f'sampling_params.repetition_penalty = 1.1\n{ASK}return {{"reward": 1}}')
    (t,) = run(path, engine)
    assert t.outcome is ENV and not engine.asked
    assert f"{path}:" in t.error and "repetition_penalty 1.1" in t.error


def test_without_ranges_all_requests_are_trained_on(tmp_path: Path) -> None:
    body = f"{ASK}await llm_engine.generate([4], sampling_params)\nreturn {{'reward': 1, 'truncated': True}}"
    parts = run(agent_file(tmp_path, body), Engine([65], [66]))
    assert [t.token_ids.tolist() for t in parts] == [[1, 3, 65], [4, 66]]
    assert [(t.reward, t.part, t.truncated) for t in parts] == [(1.0, 0, True), (1.0, 1, True)]


ENV, REWARD = Outcome.ENV_ERROR, Outcome.REWARD_ERROR
TOKENS = "{'reward': 1, 'observation_tokens': "


@pytest.mark.parametrize(
    ("returned", "outcome", "error"),
    [
        ("None", ENV, "execute returned NoneType, not a dict"),
        ("{'rewards': 1}", ENV, "execute returned a dict without 'reward'; it has 'rewards'"),
        ("{'reward': 1, 'truncated': 'False'}", ENV, "execute returned truncated 'False', not a bool"),
        ("{'reward': None}", REWARD, "the reward None"),
        ("{'reward': float('nan')}", REWARD, r"returned reward that are not finite: \[nan\]"),
        ("{'reward': 'good'}", REWARD, "returned reward that are not numbers: .*'good'"),
        ("{'reward': 1, 'scores': [1, 2]}", REWARD, "returned 2 scores for 1 samples"),
        (
            "{'reward': 1, 'extra_logs': {'a': float('inf')}}",
            REWARD,
            r"extra_logs\['a'\] that are not finite: \[inf\]",
        ),
        ("{'reward': 1, 'extra_logs': 3}", REWARD, "extra_logs that are not a dict: 3"),
        (TOKENS + "[1, 3]}", ENV, "observation_tokens and action_ranges"),
        (
            TOKENS + "[1, 3, 7], 'action_ranges': [(2, 3)]}",
            ENV,
            r"an action range \(2, 3\) has tokens that the engine never answered with: the one at 2, 7, was",
        ),
        (
            TOKENS + "[[1, 3]], 'action_ranges': [(1, 2)]}",
            ENV,
            r"observation_tokens .*: int64 of shape \(1, 2\)",
        ),
        (TOKENS + "[1, 3.5], 'action_ranges': [(1, 2)]}", ENV, r"observation_tokens .*: float64"),
        (TOKENS + "[1, 3], 'action_ranges': [2]}", ENV, "action_ranges "),
        (TOKENS + "[1, 3], 'action_ranges': []}", ENV, "no action.* llm_engine.generate"),
        (TOKENS + "[[1], [1, 3]], 'action_ranges': [(1, 2)]}", ENV, "cannot be read: ValueError: setting"),
        ("{'reward': (1 / 0 for _ in [1])}", ENV, "what cannot be read: ZeroDivisionError"),
    ],
)
def test_answers_that_cannot_be_used(tmp_path: Path, returned: str, outcome: Outcome, error: str) -> None:
    path = agent_file(tmp_path, f"{ASK}return {returned}")
    (t,) = run(path, Engine([65]))
    assert t.outcome is outcome and t.reward is None and t.score is None
    assert t.error.startswith(f"{path}: execute returned ") and re.search(error, t.error)
    assert t.action_ids.tolist() == [65]  # the journal keeps what was sampled


@pytest.mark.parametrize(
    "value", ["1", "True", "torch.tensor(1.0)", "np.float32(1)", "np.array([1])", "[1.0]"]
)
def test_rewards_are_numbers_of_any_kind(tmp_path: Path, value: str) -> None:
    path = agent_file(tmp_path, f"import torch, numpy as np\n{ASK}return {{'reward': {value}}}")
    (t,) = run(path, Engine([65]))
    assert (t.reward, t.score) == (1.0, 1.0) and type(t.reward) is float


@pytest.mark.parametrize(("score", "expected"), [("0", 0.0), ("-2", -2.0), ("None", 1.0)])
def test_a_score_of_zero_is_a_score(tmp_path: Path, score: str, expected: float) -> None:
    path = agent_file(tmp_path, f"{ASK}return {{'reward': 1, 'scores': {score}}}")
    (t,) = run(path, Engine([65]))
    assert (t.reward, t.score) == (1.0, expected)


def test_reward_models_may_give_the_reward(tmp_path: Path) -> None:
    path = agent_file(tmp_path, f"{ASK}return {{'reward': None}}")
    (t,) = run(path, Engine([65]), reward_is_optional=True)
    assert t.ok and t.reward == 0.0


@pytest.mark.parametrize(
    ("body", "outcome", "error"),
    [
        ("x = {}\nreturn x['answer']", ENV, "PATH: line 6: KeyError: 'answer'\nTraceback"),
        ("raise RewardError('no judge')", REWARD, "no judge"),
        ("raise TimeoutError('theirs')", ENV, "PATH: line 5: TimeoutError: theirs\n"),
        ("from json import loads\nloads('{')", ENV, "PATH: line 6: JSONDecodeError: Expecting"),
        ("await asyncio.sleep(60)", Outcome.TIMED_OUT, "PATH: execute took longer than LIMIT 0.2 s"),
    ],
)
def test_what_an_executor_raises(tmp_path: Path, body: str, outcome: Outcome, error: str) -> None:
    path = agent_file(tmp_path, f"{body}")
    (t,) = run(path, Engine([65]), timeout=0.2)
    assert t.outcome is outcome
    assert t.error.startswith(error.replace("PATH", path).replace("LIMIT", "--rollout.episode_timeout"))


def test_of_a_deep_error_the_last_calls_are_told(tmp_path: Path) -> None:
    body = "def dive(depth):\n    return dive(depth - 1) if depth else 1 / 0\ndive(9)"
    (t,) = run(agent_file(tmp_path, body), Engine([65]))
    assert t.error.count(", in dive\n") == 3 and t.error.count("  File ") == 3
    assert t.error.splitlines()[-1] == "ZeroDivisionError: division by zero" == t.error[-35:]


def test_what_was_sampled_before_an_exception_is_kept(tmp_path: Path) -> None:
    (t,) = run(agent_file(tmp_path, f"{ASK}raise OSError('sandbox')"), Engine([65, 66]))
    assert t.outcome is ENV and t.action_ids.tolist() == [65, 66]


def test_an_executor_that_fails_runs_again(tmp_path: Path) -> None:
    body = f"{ASK}if tokens == [65]: raise OSError('sandbox')\nreturn {{'reward': 1}}"
    engine = Engine([65], [66])
    (t,) = run(agent_file(tmp_path, body), engine, retries=1, retry_on=["env_error"])
    assert t.ok and t.action_ids.tolist() == [66]
    assert len({params.seed for _, params in engine.asked}) == 2


def test_a_changed_context_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such files return generated tokens behind a prompt of their own."""
    warn_once.cache_clear()
    body = f"{ASK}return {{'reward': 1, 'observation_tokens': [4, *tokens], 'action_ranges': [(1, 2)]}}"
    trajectories = run(agent_file(tmp_path, body), Engine([65]), num_samples=2)
    assert all(t.ok and t.token_ids.tolist() == [4, 65] for t in trajectories)
    (record,) = caplog.records
    assert "observation_tokens" in record.message


SIGNATURES = {
    "0.9": EXECUTE,
    "0.11": EXECUTE.replace("llm_engine)", "llm_engine, images=None)"),
    "what it needs": "    async def execute(self, llm_engine, sampling_params):\n",
    "everything": "    async def execute(self, **given):\n        llm_engine, sampling_params = "
    "given['llm_engine'], given['sampling_params']\n        assert len(given) == 9\n",
}


def written(folder: Path, source: str) -> Path:
    path = folder / "agent.py"
    path.write_text(source)
    return path


@pytest.mark.processes
@pytest.mark.parametrize("signature", SIGNATURES.values(), ids=SIGNATURES)
def test_an_executor_gets_what_it_accepts(tmp_path: Path, signature: str) -> None:
    body = f"        {ASK}        return {{'reward': 1}}\n"
    path = str(written(tmp_path, f"{HEAD}class AgentExecutor(AgentExecutorBase):\n{signature}{body}"))
    assert check_agent_file(path, "--train.agent_func_path") == ""
    (t,) = run(path, Engine([65]))
    assert t.ok, t.error


CLASS = f"{HEAD}class AgentExecutor(AgentExecutorBase):\n"
CONSTRUCTOR = "    def __init__(self"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("class Agent: pass", "the file has no class AgentExecutor (its classes: Agent)"),
        ("AgentExecutor = 3", "the file has no class AgentExecutor (its classes: none)"),
        (
            "class AgentExecutor: pass",
            "AgentExecutor is no subclass of openrlhf.agents.base.AgentExecutorBase",
        ),
        (f"{CLASS}    pass", "AgentExecutor does not define execute"),
        (f"{CLASS}{CONSTRUCTOR}, max_steps): pass\n{EXECUTE}        pass", "AgentExecutor(max_steps) "),
        (f"{CLASS}    async def execute(self, prompt, env): pass", "execute(self, prompt, env) "),
        ("import json\nimport no_such", "line 2: ModuleNotFoundError: No module named 'no_such'"),
        ("import os\nos._exit(3)", "the process that imported the file died with exit code 3"),
    ],
)
def test_files_that_cannot_be_agents(tmp_path: Path, source: str, text: str) -> None:
    path = written(tmp_path, source)
    with refused(ErrorCode.USER_CODE, flag="--train.agent_func_path", value=path) as error:
        check_agent_file(str(path), "--train.agent_func_path")
    assert error.value.text.startswith(text)
    is_form = not text.startswith(("line", "the process"))
    assert ("class AgentExecutor(AgentExecutorBase)" in error.value.text) == is_form


def load(path: Path, **options) -> UserExecutor:
    return asyncio.run(UserExecutor.load(str(path), **options))


def test_an_import_that_does_not_end_ends_the_run(tmp_path: Path) -> None:
    path = written(tmp_path, "import time\ntime.sleep(1)\n")
    with refused(ErrorCode.USER_CODE, value=path) as told:
        load(path, deadline=0.1)
    assert isinstance(told.value, ImportTimeout) and "0.1 s" in told.value.text


def test_a_constructor_that_raises_names_its_line(tmp_path: Path) -> None:
    raises = f"{CONSTRUCTOR}):\n        raise OSError('no sandbox')\n"
    path = written(tmp_path, f"{CLASS}{raises}{EXECUTE}        pass\n")
    with refused(ErrorCode.USER_CODE) as error:
        load(path)
    assert error.value.text == f"{path}: line 5: OSError: no sandbox"


@pytest.mark.processes
def test_a_run_is_refused_before_it_starts(tmp_path: Path) -> None:
    path = written(tmp_path, "class AgentExecutor: pass")
    config = PPOConfig(train=TrainConfig(agent_func_path=str(path)))
    asked = []
    check_files(config, lambda flag, check, *args, **options: asked.append((flag, check, args)), on_cpu=True)
    flag, check, args = asked[-1]  # the check runs after everything that is quicker
    assert flag == "--train.agent_func_path"
    with refused(ErrorCode.USER_CODE, flag=flag, value=path):
        check(*args)


def test_the_example_asks_twice() -> None:
    tokenizer = tiny_tokenizer()
    wrong, right = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("3", "2"))

    class Speaking(Engine):
        def output(self, index, token_ids, params):
            output = super().output(index, token_ids, params)
            output.text = tokenizer.decode(token_ids)
            return output

    path = Path(__file__).parents[3] / "examples" / "python" / "agent_two_calls.py"
    engine = Speaking(wrong, right)
    (t,) = run(str(path), engine, tokenizer=tokenizer)
    assert (t.reward, t.extra_logs) == (1.0, {"first_right": 0.0, "corrected": 1.0})
    assert t.action_ids.tolist() == wrong + right and len(t.turn_starts) == 2
    assert tokenizer.decode(t.token_ids) == "1 + 1 =3\nCheck this. Answer: 2"
