"""Agents of examples/python that call tools or run code."""

import json
from pathlib import Path
from typing import Any

import pytest
from namespaces import needs_namespaces
from tool_episodes import END, call, run_episode

from openrlhf.rollout.executors import AgentSetting, check_agent_file, load_agent
from openrlhf.types import Outcome, Trajectory

EXAMPLES = Path(__file__).parents[3] / "examples" / "python"


def episode(file: str, *answers: str, outcome: Outcome = Outcome.OK, **options: Any) -> Trajectory:
    executor = load_agent(str(EXAMPLES / file), ["max_turns"])(AgentSetting())
    t, _ = run_episode(executor, *(answer + END for answer in answers), max_len=2000, **options)
    assert t.outcome is outcome, t.error
    return t


def test_the_calculator() -> None:
    answers = call("calculate", expression="(3 + 4) * -2 / 4"), r"So \boxed{-3.5}"
    t = episode("agent_tools.py", *answers, label="-3.5")
    assert (t.reward, t.extra_logs) == (1, {"tool_calls": 1, "tool_errors": 0})
    wrong = ("1 / 0", "__import__('os')", "2 ** 9", "(", "1" * 101, "'a' * 3")
    calls = "".join(call("calculate", expression=expression) for expression in wrong)
    t = episode("agent_tools.py", calls, r"\boxed{1}", label="2")
    assert (t.reward, t.extra_logs) == (0, {"tool_calls": 6, "tool_errors": 6})
    assert episode("agent_tools.py", call("calculate", expression="1"), max_turns=1).truncated


@needs_namespaces
@pytest.mark.processes
def test_code_with_feedback() -> None:
    """The policy reads the output of the shown tests; the hidden ones decide."""
    tests = json.dumps([["1", "2"], ["5", "10"]])
    wrong, right = "print(2)", "Better:\n```python\nprint(2 * int(input()))\n```"
    t = episode("agent_code.py", wrong, label=tests)
    assert (t.reward, t.extra_logs) == (0, {"tries": 1, "shown_right": 1})
    t = episode("agent_code.py", "print(x)", right, label=tests)
    assert (t.reward, t.extra_logs) == (1, {"tries": 2, "shown_right": 1})
    t = episode("agent_code.py", "import os; os._exit(0)", label=tests)
    assert (t.reward, t.extra_logs) == (0, {"tries": 3, "shown_right": 0})
    t = episode("agent_code.py", "print(2)", label="[]", outcome=Outcome.ENV_ERROR)
    assert t.reward is None and "has no tests" in t.error


@pytest.mark.processes
def test_the_example_of_mcp_calls_its_server() -> None:
    calls = call("price", fruit="plum") + call("price", fruit="pear")
    t = episode("agent_mcp.py", calls, "It is 3", label="3")
    assert (t.reward, t.extra_logs) == (1, {"tool_calls": 2, "tool_errors": 1})


@pytest.mark.processes
@pytest.mark.parametrize(
    "file", ["agent_tools.py", pytest.param("agent_code.py", marks=needs_namespaces), "agent_mcp.py"]
)
def test_examples_with_tools_are_accepted(file: str) -> None:
    assert check_agent_file(str(EXAMPLES / file), "--train.agent_func_path", limits=["max_turns"]) == ""
