"""Environments of verifiers with the real package and its own server between, and the policy's answers by
hand. The package's import takes seconds."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from episodes_of_examples import END, EXAMPLES, play, told, turns

from openrlhf.agents.base import AgentExecutorBase
from openrlhf.types import Outcome

pytestmark = pytest.mark.slow
EXAMPLE = EXAMPLES / "agent_verifiers.py"


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the folder where the package keeps a folder for each episode."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


def add(stream: str) -> str:
    a, b = map(int, re.findall(r"\d+", stream)[:2])
    return f"\\boxed{{{a + b}}}"


def test_a_task_and_its_reward() -> None:
    (t,) = play(EXAMPLE, "", 2, add)
    assert (t.outcome, t.reward, t.extra_logs) == (Outcome.OK, 1, {"right": 1}), t.error
    (asked, _), (said, mine) = turns(t)
    a, b = re.findall(r"\d", asked)
    assert (asked, said, mine) == (told(f"{a} + {b} = ?"), add(asked) + END, True)
    (t,) = play(EXAMPLE, "", 2, "\\boxed{1}")
    assert (t.outcome, t.reward, t.extra_logs) == (Outcome.OK, 0, {"right": 0}), t.error


def test_rows_are_the_tasks(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    subprocess.run([sys.executable, EXAMPLE, path], check=True)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["label"] for row in rows] == list(range(512))
    for row in rows[:3]:
        (t,) = play(EXAMPLE, row["input"], row["label"], add)
        assert turns(t)[0][0] == told(row["input"]) and t.reward == 1


GUESSING = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    secret: int

class Guess(vf.Task[Data]):
    pass

class Guesses(vf.Taskset[Guess, vf.TasksetConfig]):
    def load(self):
        for secret in range(16):
            yield Guess(Data(prompt="Guess.", system_prompt="Numbers.", secret=secret), self.config.task)

class PlayerConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class Game(vf.Env[PlayerConfig]):
    async def setup(self, agents):
        agents.player.trainable = "FIXED" not in globals()

    async def start(self):
        if "BROKEN" in globals():
            raise OSError("no pieces")

    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                guess = int(segment.last_reply)
                if guess == task.data.secret:
                    break
                if guess > 90:
                    raise KeyError("pieces")
                segment = await interaction.turn("Higher." if guess < task.data.secret else "Lower.")
        interaction.trace.record_reward("found", float(not segment.terminated), 0.5)
        interaction.trace.record_metric("secret", task.data.secret)

__all__ = ["Guesses", "Game"]
"""


@pytest.fixture
def guessing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentExecutorBase]:
    """Installs a package with an environment of several turns."""
    from openrlhf.environments.verifiers import CHAT, VerifiersExecutor

    (tmp_path / "guessing_v1.py").write_text(GUESSING)
    monkeypatch.syspath_prepend(tmp_path)
    yield VerifiersExecutor({"taskset": {"id": "guessing-v1"}, "player": CHAT})
    sys.modules.pop("guessing_v1", None)


def test_several_turns_are_one_stream(guessing: AgentExecutorBase) -> None:
    (t,) = play(guessing, "", 6, "3", "9", "6")
    assert t.outcome is Outcome.OK, t.error
    assert turns(t) == [
        (f"<|system|>Numbers.{END}{told('Guess.')}", False),
        (f"3{END}", True),
        (told("Higher."), False),
        (f"9{END}", True),
        (told("Lower."), False),
        (f"6{END}", True),
    ]
    assert (t.reward, t.extra_logs, t.truncated) == (0.5, {"found": 1, "secret": 6}, False)


def test_a_conversation_without_room_is_truncated(guessing: AgentExecutorBase) -> None:
    (t,) = play(guessing, "", 6, "3", max_len=60)
    assert (t.outcome, t.reward, t.truncated) == (Outcome.OK, 0, True), t.error


@pytest.mark.parametrize(
    ("label", "answer", "text"),
    [
        (6, "95", "KeyError: 'pieces'"),
        (6, "six", "invalid literal for int"),
        (16, "6", "guessing-v1 has 16 tasks"),
    ],
)
def test_errors_of_environments(guessing: AgentExecutorBase, label: int, answer: str, text: str) -> None:
    (t,) = play(guessing, "", label, answer)
    assert t.outcome is Outcome.ENV_ERROR and text in t.error, t.error


def test_servers_that_do_not_start_are_an_error_of_every_episode(guessing: AgentExecutorBase) -> None:
    sys.modules["guessing_v1"].BROKEN = True
    found = play(guessing, "", 6, "6", samples=4)
    assert all(t.outcome is Outcome.ENV_ERROR and "OSError: no pieces" in t.error for t in found)


def test_an_agent_that_is_not_trained_needs_a_model(guessing: AgentExecutorBase) -> None:
    sys.modules["guessing_v1"].FIXED = True
    (t,) = play(guessing, "", 6, "6")
    assert t.outcome is Outcome.ENV_ERROR and "player: not trainable" in t.error


def test_sixteen_episodes_never_mix(guessing: AgentExecutorBase) -> None:
    """Each episode begins with a number of its own, and is told what belongs to its own stream."""
    start = iter(range(16))

    def climb(stream: str) -> str:
        said = re.findall(r"<\|assistant\|>(\d+)", stream)
        return str(min(int(said[-1]) + 8, 15)) if said else str(next(start))

    found = play(guessing, "", 15, climb, samples=16)
    assert all(t.ok for t in found), [t.error for t in found]
    streams = [[int(text.removesuffix(END)) for text, mine in turns(t) if mine] for t in found]
    assert sorted(streams) == [sorted({first, min(first + 8, 15), 15}) for first in range(16)]


CLIENTS = """
import anthropic, openai
import verifiers.v1 as vf

class Data(vf.TaskData):
    pass

class One(vf.Task[Data]):
    @vf.reward
    async def done(self, trace) -> float:
        return 1.0

class Ones(vf.Taskset[One, vf.TasksetConfig]):
    def load(self):
        yield One(Data(prompt="Go on."), self.config.task)

class Clients(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        asked = [{"role": "user", "content": "Go on."}]
        back = lambda text: [*asked, {"role": "assistant", "content": text}, *asked]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            first = await client.chat.completions.create(model=ctx.model, messages=asked)
            text = first.choices[0].message.content
            await client.chat.completions.create(model=ctx.model, messages=back(text))
            system = {"model": ctx.model, "instructions": "By responses."}
            first = await client.responses.create(input=asked, **system)
            async with client.responses.stream(input=back(first.output_text), **system) as stream:
                await stream.get_final_response()
        url = endpoint.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=url, api_key=secret) as client:
            system = {"model": ctx.model, "max_tokens": 9, "system": "By messages."}
            first = await client.messages.create(messages=asked, **system)
            async with client.messages.stream(messages=back(first.content), **system) as stream:
                await stream.get_final_message()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

__all__ = ["Ones", "Clients"]
"""


def test_harnesses_of_all_apis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A harness with the real clients, by the package's own server, which passes each API on."""
    from openrlhf.environments.verifiers import VerifiersExecutor

    (tmp_path / "clients_v1.py").write_text(CLIENTS)
    monkeypatch.syspath_prepend(tmp_path)
    harness = {"harness": {"id": "clients_v1"}, "runtime": {"type": "subprocess"}}
    found = play(VerifiersExecutor({"taskset": {"id": "clients_v1"}, "agent": harness}), "", 0, *"123456")
    assert all(t.outcome is Outcome.OK and t.reward == 1 for t in found), found[0].error
    assert [[text for text, mine in turns(t) if mine] for t in found] == [
        [f"{a}{END}", f"{b}{END}"] for a, b in ("12", "34", "56")
    ]
