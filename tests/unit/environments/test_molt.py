"""Agent files of Molt run as they are."""

import subprocess
import sys
from pathlib import Path

import pytest
from episodes_of_examples import END, play

from openrlhf.rollout.executors import check_agent_file, load_agent
from openrlhf.types import Outcome
from openrlhf.user_file import UnusableFile

ENV = '''
from pathlib import Path

from molt.agents import Env, Result, StepEnvRunner


class Guess(Env):
    """Two turns at most."""

    turns = 0

    async def step(self, state) -> Result:
        self.turns += 1
        if str(state["label"]) in state["action_text"]:
            return Result(reward=1.0, terminated=True, score=0.5, info={"turns": self.turns})
        if self.turns == 2:
            return Result(reward=-0.25, terminated=False, truncated=True)
        return Result(reward=0.25, observation=" No. Again:", terminated=False)

    async def close(self):
        Path("closed").open("a").write("x")


class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(Guess)
'''
CHAT = """
from openai import AsyncOpenAI

from molt.agents import ChatAgent, ChatAgentRunner, ChatContext, Result


class Asker(ChatAgent):
    async def run(self, ctx: ChatContext) -> Result:
        client = AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key)
        resp = await client.chat.completions.create(
            model=ctx.model_name,
            messages=[{"role": "user", "content": ctx.prompt}],
            max_tokens=ctx.sampling_params.max_tokens,
            temperature=ctx.sampling_params.temperature,
        )
        right = ctx.label in resp.choices[0].message.content
        return Result(reward=float(right), truncated=not right, info={"root": ctx.session_url.count("/v1")})


class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(Asker)
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "guess_agent.py"


# The real package (0.2.1), run with rewards 0.25 and 0.5 by turn, gives reward 0.75 and score 0.5.
@pytest.mark.parametrize(
    ("answers", "reward", "score", "truncated", "logs"),
    [
        ((f"4{END}",), 1.0, 0.5, False, {"turns": 1.0}),
        ((f"3{END}", f"4{END}"), 1.25, 0.5, False, {"turns": 2.0}),
        ((f"3{END}", f"5{END}"), 0.0, -0.25, True, {}),
    ],
)
def test_an_environment_gives_the_sum_of_its_rewards(file, answers, reward, score, truncated, logs):
    file.write_text(ENV)
    (sample,) = play(file, "2 + 2 =", "4", *answers)
    assert (sample.reward, sample.score, sample.truncated) == (reward, score, truncated)
    assert sample.extra_logs == logs
    assert Path("closed").read_text() == "x"


def test_an_environment_is_closed_also_if_a_limit_or_an_error_ends_the_episode(file: Path) -> None:
    file.write_text(ENV)
    (sample,) = play(file, "2 + 2 =", "4", f"3{END}", max_turns=1)
    assert (sample.reward, sample.truncated) == (0.25, True)
    file.write_text(ENV.replace("self.turns += 1", "raise ValueError"))
    (sample,) = play(file, "2 + 2 =", "4", f"3{END}")
    assert sample.outcome is Outcome.ENV_ERROR
    assert Path("closed").read_text() == "xx"


@pytest.mark.parametrize(("answer", "reward"), [(f"4{END}", 1.0), (f"3{END}", 0.0)])
def test_a_chat_agent_asks_over_http(file: Path, answer: str, reward: float) -> None:
    file.write_text(CHAT)
    (sample,) = play(file, "2 + 2 =", "4", answer)
    assert (sample.reward, sample.truncated, sample.extra_logs) == (reward, reward == 0, {"root": 0.0})


def test_a_runner_of_its_own_is_refused(file: Path) -> None:
    file.write_text(
        "from molt.agents import Runner\nclass AgentRunner(Runner):\n    def __init__(self): ...\n"
    )
    with pytest.raises(TypeError, match="neither an Env nor a ChatAgent"):
        load_agent(str(file))


@pytest.mark.processes
def test_limits_that_a_chat_agent_ignores_are_refused(file: Path) -> None:
    file.write_text(CHAT)
    with pytest.raises(UnusableFile, match=r"--data.max_images_per_prompt"):
        load_agent(str(file), limits=("images",))
    assert check_agent_file(str(file), "--train.agent_path") == ""


@pytest.mark.processes
def test_the_package_itself_wins(tmp_path: Path) -> None:
    """Its classes are read by what they have, since its runners name their class as they like."""
    agents = tmp_path / "molt" / "agents"
    agents.mkdir(parents=True)
    (agents.parent / "__init__.py").write_text("")
    (agents / "__init__.py").write_text(
        "class Env: ...\nclass Result: ...\nclass Runner: ...\n"
        "class StepEnvRunner(Runner):\n    def __init__(self, env_cls): self._made_of = env_cls\n"
    )
    (tmp_path / "agent.py").write_text(ENV)
    code = (
        "import sys; from openrlhf.rollout import executors; executors.load_agent('agent.py'); "
        "print(sys.modules['molt'].__file__)"
    )
    paths = {"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=paths, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == str(agents.parent / "__init__.py"), done.stderr
