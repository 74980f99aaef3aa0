"""Agents that call tools."""

import asyncio
import re
from datetime import date
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import tool_episodes
from refusals import refused
from tool_episodes import END, TOKENIZER, call, tokens
from transformers import PreTrainedTokenizerBase

from openrlhf.agents.tools import Tool, ToolError, _shortened, function_tool
from openrlhf.errors import ErrorCode
from openrlhf.rollout.executors import AgentSetting, UserExecutor, check_agent_file, load_agent
from openrlhf.tasks.tiny_model import tiny_tokenizer
from openrlhf.types import Outcome
from openrlhf.user_file import UnusableFile


def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    assert isinstance(a, int)
    return a + b


async def divide(a: float, b: float) -> str:
    """Divides.

    Args:
        a: Of this.
        b: By this.
    """
    if b < 0:
        raise ToolError("b is negative")
    return f"{a / b:g}"


play = partial(tool_episodes.play, tools=[add, divide])
said = partial(tool_episodes.said, tools=[add, divide])


def test_an_episode_is_one_stream_of_tokens() -> None:
    """Answers stand as they were sampled, with what the template writes behind them; only they are trained
    on."""
    first = call("add", a=1, b=2) + call("divide", a=3, b=2)
    t, engine = play(f"Well. {first}{END}", f"{call('add', a=1)}{END}", f"It is 2{END}")
    assert t.outcome is Outcome.OK, t.error
    texts = [
        f"<|system|>add divide {END}<|user|>?{END}\n<|assistant|>",
        f"Well. {first}{END}",
        f"\n<|tool|>3{END}\n<|tool|>1.5{END}\n<|assistant|>",
        f"{call('add', a=1)}{END}",
        f"\n<|tool|>2{END}\n<|assistant|>",
        f"It is 2{END}",
    ]
    parts = list(map(tokens, texts))
    assert t.token_ids.tolist() == [i for part in parts for i in part]
    assert t.action_mask.tolist() == [k % 2 == 1 for k, part in enumerate(parts) for _ in part]
    assert (t.reward, t.truncated, t.extra_logs) == (1, False, {"tool_calls": 3, "tool_errors": 0})
    assert len(engine.asked) == 3


def test_calls_of_an_answer_run_at_a_time() -> None:
    """Each call waits for the other; results stand in the order of the calls."""
    met = asyncio.Barrier(2)

    async def meet(who: str) -> str:
        """Waits.

        Args:
            who: Who.
        """
        await met.wait()
        return who

    calls = call("meet", who="one") + call("meet", who="two")
    assert said(calls + END, f"2{END}", tools=[meet], step_timeout=60) == ["one", "two"]


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (call("subtract", a=1), "Error: there is no tool subtract; there are add, divide"),
        (call("add", a="one"), "Error: a: Input should be a valid integer"),
        (call("add", b=1), "Error: missing a required argument: 'a'"),
        (call("add", a=1, c=1), "Error: got an unexpected keyword argument 'c'"),
        (
            '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
            "Error: the arguments are no JSON object",
        ),
        ('<tool_call>{"name": "add", "argum</tool_call>', "Error: this call of a tool cannot be read"),
        (call("divide", a=1, b=-1), "Error: b is negative"),
    ],
)
def test_mistakes_of_the_policy(asked: str, answer: str) -> None:
    """The policy is told, and goes on; the mistakes are counted."""
    (heard,) = said(asked + END, f"2{END}")
    assert heard.startswith(answer)
    t, _ = play(asked + END, f"2{END}")
    assert (t.reward, t.extra_logs["tool_errors"]) == (1, 1)


def test_a_call_within_thoughts_is_none() -> None:
    """Models write drafts of calls, and servers with a reasoning parser do not make them."""
    thought = f"<think>{call('add', a=1)} or <tool_call> no</think>"
    assert said(f"{thought}{call('add', a=2)}{END}", f"2{END}") == ["3"]
    t, engine = play(f"{thought}It is 2{END}")
    assert t.extra_logs == {"tool_calls": 0, "tool_errors": 0} and len(engine.asked) == 1


def test_failures_of_a_tool() -> None:
    """A failure of a tool is no feedback: the episode fails. The executor may declare which errors are
    mistakes of the policy."""
    bad = call("divide", a=1, b=0) + END
    t, _ = play(bad, f"2{END}")
    assert t.outcome is Outcome.ENV_ERROR and "ZeroDivisionError" in t.error
    assert said(bad, f"2{END}", mistakes=[ZeroDivisionError]) == ["Error: float division by zero"]


def test_a_failure_ends_the_other_calls() -> None:
    ended = asyncio.Event()

    async def wait() -> None:
        """Waits for ever."""
        try:
            await asyncio.sleep(1000)
        finally:
            ended.set()

    t, _ = play(call("wait") + call("divide", a=1, b=0) + END, tools=[wait, divide])
    assert t.outcome is Outcome.ENV_ERROR and ended.is_set()
    t, _ = play(call("wait") + END, tools=[wait], step_timeout=0.05)
    assert t.outcome is Outcome.TIMED_OUT
    assert "wait" in t.error and t.error.endswith("--rollout.step_timeout 0.05 s")


def test_what_ends_an_episode_before_the_policy_does() -> None:
    """The reward function gets the messages so far."""
    ask = call("add", a=1) + END
    t, engine = play(ask, max_turns=2)
    assert (len(engine.asked), t.truncated, t.reward) == (2, True, 1)  # the last message is a tool's 2
    t, engine = play(
        ask, max_len=len(tokens(f"<|system|>add divide {END}<|user|>?{END}\n<|assistant|>{ask}"))
    )
    assert (len(engine.asked), t.truncated) == (1, True)
    t, _ = play("2", finish_reason="length")
    assert (t.truncated, t.reward) == (True, 1)
    t, _ = play(ask, max_len=5)
    assert t.outcome is Outcome.ENV_ERROR and "--data.max_len 5" in t.error
    t, _ = play("2", finish_reason="abort", reward=lambda *_: 1 / 0)
    assert t.outcome is Outcome.ABORTED


def test_what_a_reward_may_return() -> None:
    result = {"reward": 3, "scores": 0.5, "extra_logs": {"tool_errors": 7, "mine": 1}, "truncated": True}
    t, _ = play(f"2{END}", reward=lambda *_: result)
    assert (t.reward, t.score, t.truncated) == (3, 0.5, True)
    assert t.extra_logs == {"tool_calls": 0, "tool_errors": 7, "mine": 1}


def test_arguments_are_what_the_hints_say() -> None:
    def kinds(
        number: int,
        pair: tuple[int, int],
        unit: Literal["m", "s"],
        names: list[str] | None = None,
        **others: int,
    ) -> str:
        """Says what it was handed.

        Args:
            number: A number.
            pair: Two.
            unit: A unit.
            names: Names.
            others: Others.
        """
        return repr((number, pair, unit, names, others))

    tool = function_tool(kinds)
    asked = '{"number": "3", "pair": [1, 2], "unit": "m", "more": "4"}'
    assert asyncio.run(tool.call(asked)) == "(3, (1, 2), 'm', None, {'more': 4})"
    with pytest.raises(ToolError, match=r"pair\.1: Input should be a valid integer"):
        asyncio.run(tool.call('{"number": 3, "pair": [1, "x"], "unit": "m"}'))
    with pytest.raises(ToolError, match="unit: Input should be 'm' or 's'"):
        asyncio.run(tool.call('{"number": 3, "pair": [1, 2], "unit": "kg"}'))


def test_what_the_policy_reads_of_a_function() -> None:
    assert function_tool(add).description == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first."},
                    "b": {"type": "integer", "description": "The second."},
                },
                "required": ["a"],
            },
            "return": {"type": "integer"},
        },
    }


def test_results_become_text() -> None:
    """Text stays as it is, anything else becomes JSON; the middle of a long result is left out."""

    def look() -> dict:
        """Looks."""
        return {"é": [1, None]}

    assert said(call("look") + END, f"2{END}", tools=[look]) == ['{"é": [1, null]}']

    def measure() -> dict:
        """Measures."""
        return {"on": date(2026, 1, 2), "mean": np.float32(0.5), "counts": np.arange(3)}

    texts = said(call("measure") + END, f"2{END}", tools=[measure])
    assert texts == ['{"on": "2026-01-02", "mean": 0.5, "counts": [0, 1, 2]}']
    (shortened,) = said(call("look") + END, f"2{END}", tools=[look], max_result_length=5)
    assert shortened == '{"é\n[11 characters left out]\n]}'
    assert _shortened("abcdefghij", 10) == "abcdefghij"
    assert re.fullmatch(r"abc\n\[5 .*\]\nij", _shortened("abcdefghij", 5))


def test_tools_that_cannot_be_used() -> None:
    def silent(a: int) -> int:
        return a

    with pytest.raises(Exception, match=r"silent .* no docstring"):
        play(f"2{END}", tools=[silent])
    with pytest.raises(TypeError, match="'add' is neither"):
        play(f"2{END}", tools=["add"])
    t, _ = play(f"2{END}", tools=[add, Tool("add", {}, function_tool(add).call)])
    assert t.outcome is Outcome.ENV_ERROR and "add, add" in t.error


@pytest.mark.processes
def test_an_executor_without_a_reward_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text(
        "from openrlhf.agents.tools import ToolAgentExecutor\n"
        "class AgentExecutor(ToolAgentExecutor):\n    pass\n"
    )
    with refused(ErrorCode.USER_CODE, flag="--train.agent_func_path", value=path) as told:
        check_agent_file(str(path), "--train.agent_func_path")
    assert re.search(r"\breward\b", told.value.text)


AGENT = """
from openrlhf.agents.tools import ToolAgentExecutor

def add(a: int) -> int:
    '''
    Adds one.

    Args:
        a: To this.
    '''
    return a + 1

class AgentExecutor(ToolAgentExecutor):
    def __init__(self):
        super().__init__([add])

    async def reward(self, prompt, label, messages):
        return 0.0
"""


def deaf_to_tools() -> PreTrainedTokenizerBase:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{% for message in messages %}", "{% for message in messages if message.role != 'tool' %}"
    )
    return tokenizer


def test_templates(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A template that leaves results out is refused before a run; one that leaves the tools out is remarked
    upon."""
    (path := tmp_path / "agent.py").write_text(AGENT)
    check = partial(load_agent, str(path))
    assert check(tokenizer=tiny_tokenizer)
    with pytest.raises(UnusableFile, match="twice"):
        check(tokenizer=tiny_tokenizer, is_chat=True)
    with pytest.raises(UnusableFile, match=r"omits .*'result 0'"):
        check(tokenizer=deaf_to_tools)

    def load(tokenizer: PreTrainedTokenizerBase) -> bool:
        caplog.clear()
        asyncio.run(UserExecutor.load(str(path), AgentSetting(tokenizer=tokenizer)))
        return "messages()" in caplog.text

    assert load(tiny_tokenizer()) and not load(TOKENIZER)
