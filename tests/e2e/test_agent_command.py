"""`openrlhf agent try` with a real engine."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nemo_gym_server
import pytest
from processes import port_for_later, run_ranks

from openrlhf.data.reasoning_gym import gym_rows
from openrlhf.tasks.prepare import TaskFiles
from openrlhf.tools.plan.agent import ONE_SEQUENCE

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "label", "turns", "flags"),
    [
        ("agent_retry.py", "no number", 3, "--data.apply_chat_template --train.max_turns 3"),
        ("agent_openai.py", "no number", 3, ""),
        ("agent_code.py", '[["1", "2"], ["2", "4"]]', 3, ""),
        ("agent_tools.py", "no number", 1, "--train.max_turns 3 --rollout.step_timeout 60"),
        ("agent_mcp.py", "no number", 1, "--train.max_turns 3 --rollout.step_timeout 60"),
    ],
)
def test_every_kind_of_agent(task, tmp_path, file, label, turns, flags):
    command = ["openrlhf.cli.main", "agent", "try", str(EXAMPLES / file), "--model", str(task.model)]
    command += ["--prompt", "Tom has 3 apples.", "--label", label, *flags.split()]
    run_ranks([*command, "--rollout.max_new_tokens", "8", "--data.max_len", "500"], log=tmp_path / "log")
    printed = (tmp_path / "log").read_text(errors="replace")
    assert "episode 0: ok" in printed and f"turn {turns}: " in printed, printed
    assert ONE_SEQUENCE in printed


@pytest.fixture
def nemo_gym(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Starts the servers that the example of NeMo Gym asks."""
    model_port, agent_port = port_for_later(), port_for_later()
    monkeypatch.setenv("NEMO_GYM_MODEL_PORT", str(model_port))
    monkeypatch.setenv("NEMO_GYM_AGENT", f"http://127.0.0.1:{agent_port}")
    command = [sys.executable, nemo_gym_server.__file__, f"http://127.0.0.1:{model_port}/v1", str(agent_port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout and server.stdout.readline()
        yield
        server.terminate()


PROBLEM = next(gym_rows("reasoning_gym:leg_counting?size=1&seed=1&max_animals=4", "--data.prompt_dataset"))


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_engines", "nemo_gym")
@pytest.mark.parametrize(
    ("name", "prompt", "label"),
    [
        ("guess", "guess", "3"),
        ("gem", "game:GuessTheNumber-v0-easy", "3"),
        ("textarena", "Nim-v0", "4"),
        ("reasoning_gym", PROBLEM["input"], PROBLEM["label"]),
        ("verifiers", "1 + 1 = ?", "3"),
        ("nemo_gym", "1 + 1 = ?", json.dumps(nemo_gym_server.row(3))),
    ],
    ids=lambda value: value.partition(" ")[0][:20],
)
def test_every_example_of_an_environment(task, tmp_path, name, prompt, label):
    command = [
        "openrlhf.cli.main",
        "agent",
        "try",
        str(EXAMPLES / f"agent_{name}.py"),
        "--model",
        str(task.model),
    ]
    command += ["--prompt", prompt, "--label", label, "--samples", "3"]
    run_ranks([*command, "--rollout.max_new_tokens", "8", "--data.max_len", "500"], log=tmp_path / "log")
    printed = (tmp_path / "log").read_text(errors="replace")
    assert printed.count("ok, reward") == printed.count(ONE_SEQUENCE) == 3, printed


PROGRAM = """
import anthropic, openai
asked = [{"role": "user", "content": "Tom has 3 apples."}]
chat = openai.OpenAI()
for _ in range(2):
    answer = chat.chat.completions.create(model="m", messages=asked)
    asked += [answer.choices[0].message, {"role": "user", "content": "And?"}]
chat.responses.create(model="m", instructions="Be brief.", input="Tom has 3 apples.")
rewritten = [{"role": "user", "content": "Tom had apples."}]
with anthropic.Anthropic().messages.stream(model="m", max_tokens=8, messages=rewritten) as stream:
    print("ended", stream.get_final_message().stop_reason)
"""


@pytest.mark.slow
def test_the_requests_of_a_program_are_recorded(task: TaskFiles, tmp_path: Path) -> None:
    """The real clients of three APIs, and vLLM."""
    (program := tmp_path / "program.py").write_text(PROGRAM)
    command = ["openrlhf.cli.main", "agent", "record", "--model", str(task.model)]
    command += ["--rollout.max_new_tokens", "8", "--data.max_len", "500", "--", sys.executable, str(program)]
    run_ranks(command, log=tmp_path / "log")
    printed = (tmp_path / "log").read_text(errors="replace")
    assert "ended " in printed and "4 turns in 3 segments" in printed, printed
    assert printed.count("the agent rewrote the history") == 2
