"""Claude Code and Codex themselves, as they are released, with the server of agents.

    pip install "openrlhf[harnesses]"

Their first request has more than 15,000 tokens, of a tokenizer with 368.
"""

import asyncio
import importlib.util
import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from engine_contract import TOLERANCE
from tool_episodes import END, TOKENIZER, call
from vllm.entrypoints.generate.base.protocol import ExtractedToolCallInformation, FunctionCall, ToolCall
from vllm.tool_parsers import ToolParser, ToolParserManager
from wire_episodes import check_tokens, play_by_hand, play_sampled

from openrlhf.agents.openai import Session
from openrlhf.observability.journal import journal_steps, read_journal
from openrlhf.observability.trackers.metrics_file import read_metrics
from openrlhf.tasks.tiny_model import tiny_chat_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "python" / "agent_harness.py"
CLASSES = {"claude": "AgentExecutor", "codex": "Codex"}
ROOM = 40_000
"""Tokens of a sequence. The template names the tools alone, whose definitions would be as long again."""
QUESTION = "What does an apple cost? fruit.txt has it."
SHELLS = {"claude": ("Bash", "command"), "codex": ("exec_command", "cmd")}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("agent_harness", EXAMPLE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=CLASSES)
def harness(request: pytest.FixtureRequest, example: Any) -> str:
    try:
        example.find(request.param)
    except FileNotFoundError as error:
        pytest.skip(f'{error}; pip install "openrlhf[harnesses]"')
    return request.param


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes an untrained model that reads whole requests of harnesses."""
    folder = tmp_path_factory.mktemp("model")
    shape = {"hidden_size": 32, "num_layers": 1, "max_len": ROOM}
    tiny_chat_model(folder, **shape)
    TOKENIZER.save_pretrained(folder)
    return folder


@ToolParserManager.register_module("shell_user")
class ShellUser(ToolParser):
    """Reads each of the first answers as a call of the harness's shell, which does nothing: an untrained
    policy writes no calls."""

    calls = 2
    left = 0
    shell = SHELLS["claude"]

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        if not ShellUser.left:
            return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)
        ShellUser.left -= 1
        name, argument = self.shell
        arguments = json.dumps({argument: f": {shlex.quote(model_output)}"}, ensure_ascii=False)
        used = ToolCall(function=FunctionCall(name=name, arguments=arguments))
        return ExtractedToolCallInformation(tools_called=True, tool_calls=[used], content=None)


def asking(example: Any, harness: str, folder: Path, *, may_fail: bool = False) -> Any:
    """Returns an agent that runs the harness in a folder with a file. `may_fail`: with answers that are cut
    off, which harnesses continue, and give up after a few."""
    (folder / "fruit.txt").write_text("apple 2\npear 3\n")
    executor = getattr(example, CLASSES[harness])()

    async def agent(session: Session) -> None:
        private = {"HOME": str(folder), "CODEX_HOME": str(folder)}
        environment = os.environ | executor.settings(session) | private
        program = await asyncio.create_subprocess_exec(
            *executor.command(session, QUESTION),
            cwd=folder,
            env=environment | session.environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        printed, _ = await asyncio.wait_for(program.communicate(), 240)
        assert may_fail or program.returncode == 0, printed.decode(errors="replace")[-2000:]

    return agent


def text_of(t: Any) -> str:
    return str(TOKENIZER.decode(t.token_ids))


def test_its_tools_are_called_in_one_stream(harness: str, example: Any, tmp_path: Path) -> None:
    name, argument = SHELLS[harness]
    answers = [f"I look. {call(name, **{argument: 'cat fruit.txt'})}{END}", f"It costs 2.{END}"]
    (t,), heard = play_by_hand(asking(example, harness, tmp_path), *answers, parser="hermes", max_len=ROOM)
    check_tokens([t], heard)
    assert len(t.turn_starts) == 2
    prompt, result = text_of(t).split("I look. ")
    assert QUESTION in prompt and "apple 2\npear 3" in result.partition("<|tool|>")[2]
    assert text_of(t).endswith(answers[1])


def test_a_tool_that_claude_code_defers_is_found(example: Any, tmp_path: Path, harness: str) -> None:
    if harness != "claude":
        pytest.skip("Codex declares all its tools")
    search, fetch = (
        call("ToolSearch", query="select:NotebookEdit"),
        {"notebook_path": "x.ipynb", "new_source": ""},
    )
    answers = [search + END, call("NotebookEdit", **fetch) + END, f"It costs 2.{END}"]
    (t,), heard = play_by_hand(asking(example, harness, tmp_path), *answers, parser="hermes", max_len=ROOM)
    check_tokens([t], heard)
    _, found, edited = text_of(t).split("<|tool|>")
    assert json.loads(found.partition(END)[0])["function"]["name"] == "NotebookEdit"
    assert "tool_use_error" in edited and "InputValidationError" not in edited


def test_sub_agents_are_segments(example: Any, tmp_path: Path, harness: str) -> None:
    """Codex goes on while its sub-agent runs, and may end before."""
    task = {"prompt": "Find it.", "description": "f", "subagent_type": "general-purpose"}
    spawn = {
        "claude": call("Agent", **task, run_in_background=False),
        "codex": call("multi_agent_v1__spawn_agent", message="Find it."),
    }
    answers = [spawn[harness] + END, f"2{END}"]
    found, heard = play_by_hand(asking(example, harness, tmp_path), *answers, parser="hermes", max_len=ROOM)
    check_tokens(found, heard)
    asked = [t for t in found if text_of(t).startswith("<|system|>") and QUESTION in text_of(t)]
    assert len(asked) == 1 and len(asked[0].turn_starts) == 2
    assert harness == "codex" or len(found) == 2


def test_what_is_sampled_is_what_is_trained_on(harness, example, tmp_path, model, monkeypatch):
    """Sampled by an engine; `play_sampled` compares all tokens."""
    monkeypatch.setattr(ShellUser, "left", ShellUser.calls)
    monkeypatch.setattr(ShellUser, "shell", SHELLS[harness])
    agent = asking(example, harness, tmp_path, may_fail=True)
    found = play_sampled("transformers", model, agent, parser="shell_user", max_len=ROOM)
    assert max(len(t.turn_starts) for t in found) > ShellUser.calls


def test_a_run_trains_on_what_it_did(harness: str, tmp_path: Path, model: Path, openrlhf: Any) -> None:
    (prompts := tmp_path / "prompts.jsonl").write_text(json.dumps({"input": "1 + 1 = ?", "label": "2"}))
    openrlhf(
        f"ppo --actor.model_name_or_path {model} --data.prompt_dataset {prompts} --data.label_key label "
        f"--train.agent_func_path {EXAMPLE}:{CLASSES[harness]} --train.max_steps 1 --rollout.batch_size 1 "
        f"--rollout.n_samples_per_prompt 1 --rollout.max_new_tokens 8 --data.max_len {ROOM} "
        "--train.max_turns 2 --rollout.engine transformers --train.force_on_policy --ds.param_dtype fp32 "
        "--actor.num_gpus_per_node 1 --train.colocate_all --algo.kl.init_coef 0 "
        f"--algo.advantage.estimator reinforce --ckpt.output_dir {tmp_path / 'policy'} "
        f"--logger.run_dir {tmp_path / 'run'}"
    )
    (metrics,) = read_metrics(tmp_path / "run" / "metrics.jsonl").values()
    (path,) = journal_steps(tmp_path / "run" / "rollouts").values()
    samples = read_journal(path)
    assert samples and metrics["rollout/turns"] == sum(len(t.turn_starts) for t in samples) >= 1
    for t in samples:
        assert t.ok and t.reward == 0.0 and 1 <= t.num_actions <= 16
        assert len(t.token_ids) > 10_000
    assert metrics["mismatch/abs_diff_max"] < TOLERANCE
