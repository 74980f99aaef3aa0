"""Agents that use the real `openai` client, over HTTP, on a stand-in for the engine."""

import asyncio
import os
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_engine import Engine
from refusals import refused

from openrlhf.agents.openai import OpenAIAgentExecutor, Session, _events, _same
from openrlhf.config.ppo import PPOConfig, RolloutConfig
from openrlhf.errors import ErrorCode
from openrlhf.rollout.episodes import EpisodeRunner, Sampling
from openrlhf.rollout.executors import AgentSetting, UserExecutor, check_agent_file
from openrlhf.tasks.tiny_model import tiny_tokenizer
from openrlhf.types import Outcome, Prompt, Trajectory

TOKENIZER = tiny_tokenizer()
END = "<|end|>"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
WITH_TOOLS = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Chat template with a line break behind every turn, which no policy samples."""


def tokens(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


Agent = Callable[[str, Any, Session], Awaitable[Any]]


def episodes(
    agent: Agent,
    *answers: str,
    samples: int = 1,
    parser: str | None = None,
    max_len: int = 300,
    max_turns: int | None = None,
    **sampling,
) -> tuple[list[Trajectory], Engine]:
    class AgentExecutor(OpenAIAgentExecutor):
        def __init__(self) -> None:
            super().__init__(tool_parser=parser)

        # Need not be async.
        def run_agent(self, prompt, label, session):  # pyrefly: ignore[bad-override]
            return agent(prompt, label, session)

    engine = Engine(*map(tokens, answers))
    rollout = RolloutConfig(n_samples_per_prompt=samples, max_new_tokens=40, **sampling)

    async def run() -> list[Trajectory]:
        asked = replace(Sampling.for_training(PPOConfig(rollout=rollout)), max_len=max_len)
        executor = UserExecutor("agent.py", AgentExecutor(), AgentSetting(max_turns=max_turns))
        runner = EpisodeRunner(engine, TOKENIZER, executor, [2])
        return (await runner.run_group(Prompt(prompt_id=0, text="1 + 1 =", label="2"), asked)).trajectories

    return asyncio.run(run()), engine


async def chat(session: Session, messages: list[dict], **options: Any) -> Any:
    completions: Any = session.client.chat.completions
    return await completions.create(model=session.model, messages=messages, **options)


def test_requests_to_this_machine_go_through_no_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nothing listens
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "intranet")
    path = tmp_path / "agent.py"
    path.write_text("""
from openrlhf.agents.openai import OpenAIAgentExecutor

class AgentExecutor(OpenAIAgentExecutor):
    async def run_agent(self, prompt, label, session):
        messages = [{"role": "user", "content": prompt}]
        answer = await session.client.chat.completions.create(model=session.model, messages=messages)
        return float(label in answer.choices[0].message.content)
""")

    async def run() -> list[Trajectory]:
        executor = await UserExecutor.load(str(path), AgentSetting(tokenizer=TOKENIZER))
        runner = EpisodeRunner(Engine(tokens(f" 2{END}")), TOKENIZER, executor, [2])
        sampling = Sampling.for_training(PPOConfig(rollout=RolloutConfig(n_samples_per_prompt=1)))
        return (await runner.run_group(Prompt(prompt_id=0, text="1 + 1 =", label="2"), sampling)).trajectories

    (t,) = asyncio.run(run())
    assert (t.reward, t.error) == (1.0, "")
    assert os.environ["no_proxy"] == "intranet,127.0.0.1,localhost"


def test_a_conversation_is_one_stream_of_tokens() -> None:
    async def agent(prompt, label, session):
        messages = [user(prompt)]
        for feedback in ("Wrong.", "Wrong again."):
            answer = (await chat(session, messages)).choices[0]
            assert answer.finish_reason == "stop" and answer.message.content in ("3", "4")
            messages += [answer.message.model_dump(), user(feedback)]
        return {
            "reward": 1.0,
            "extra_logs": {"last": float((await chat(session, messages)).choices[0].message.content)},
        }

    (t,), engine = episodes(agent, f"3{END}", f"4{END}", f"2{END}")
    assert t.outcome is Outcome.OK, t.error
    texts = [
        "<|user|>1 + 1 =<|end|><|assistant|>",
        f"3{END}",
        "<|user|>Wrong.<|end|><|assistant|>",
        f"4{END}",
        "<|user|>Wrong again.<|end|><|assistant|>",
        f"2{END}",
    ]
    parts = list(map(tokens, texts))
    assert t.token_ids.tolist() == [i for part in parts for i in part]
    assert t.action_mask.tolist() == [k % 2 == 1 for k, part in enumerate(parts) for _ in part]
    assert (t.reward, t.extra_logs) == (1, {"last": 2})
    assert [params.max_tokens for _, params in engine.asked] == [40, 40, 40]


def test_what_was_sampled_is_never_tokenised_again() -> None:
    """The answer's tokens are not those of its text, and its spaces are gone from what the template would
    write; a cut answer gets the end of its turn as feedback."""
    odd = [*tokens("1"), *tokens("2")]  # "12" by two tokens, whatever the tokenizer would take
    cut = Engine(odd, tokens(f"ok{END}"))

    async def agent(prompt, label, session):
        first = (await chat(session, [user("?")])).choices[0].message
        await chat(session, [user("?"), {"role": "assistant", "content": first.content}, user("!")])
        return 0.5

    class AgentExecutor(OpenAIAgentExecutor):
        async def run_agent(self, prompt, label, session):
            return await agent(prompt, label, session)

    runner = EpisodeRunner(cut, TOKENIZER, AgentExecutor(), [2])
    sampling = Sampling.for_training(PPOConfig(rollout=RolloutConfig(n_samples_per_prompt=1)))
    (t,) = asyncio.run(runner.run_group(Prompt(prompt_id=0, text=""), sampling)).trajectories
    wanted = [tokens("<|user|>?<|end|><|assistant|>"), odd, tokens("<|end|><|user|>!<|end|><|assistant|>")]
    assert t.token_ids.tolist() == [*wanted[0], *wanted[1], *wanted[2], *tokens(f"ok{END}")]


def test_a_rewritten_history_is_a_sequence_of_its_own() -> None:
    async def agent(prompt, label, session):
        await chat(session, [user(prompt)])
        await chat(session, [user(prompt), {"role": "assistant", "content": "in short"}, user("on")])
        return 1

    found, _ = episodes(agent, f"3{END}", f"2{END}")
    assert len(found) == 2 and [t.reward for t in found] == [1, 1]


def test_several_choices_are_branches() -> None:
    async def agent(prompt, label, session):
        choices = (await chat(session, [user(prompt)], n=3)).choices
        message = choices[1].message.model_dump()
        await chat(session, [user(prompt), message, user("?")])
        return 1

    found, _ = episodes(agent, f"3{END}")
    assert len(found) == 3
    assert sorted(len(t.turn_starts) for t in found) == [1, 1, 2]


def test_streamed_answers_are_recorded() -> None:
    async def agent(prompt, label, session):
        stream = await chat(session, [user(prompt)], stream=True, stream_options={"include_usage": True})
        text, usage, reasons = "", None, []
        async for chunk in stream:
            usage = chunk.usage or usage
            reasons += [choice.finish_reason for choice in chunk.choices]
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        assert usage.completion_tokens == len(tokens(f"three{END}"))
        assert reasons == [None, "stop"]
        return float(text == "three")

    (t,), _ = episodes(agent, f"three{END}")
    assert t.reward == 1, t.error


def test_a_streamed_answer_numbers_its_tool_calls() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}, {"id": "b"}]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    answer = {"id": "x", "created": 1, "model": "m", "choices": [choice], "usage": {"total_tokens": 3}}
    whole, end, usage = _events({"stream_options": {"include_usage": True}}, answer)
    assert whole["choices"][0]["delta"]["tool_calls"] == [{"id": "a", "index": 0}, {"id": "b", "index": 1}]
    assert end["choices"][0] | {"delta": {}, "finish_reason": "tool_calls"} == end["choices"][0]
    assert usage["usage"] == {"total_tokens": 3} and usage["choices"] == []
    assert {chunk["object"] for chunk in (whole, end, usage)} == {"chat.completion.chunk"}


def test_empty_fields_that_clients_add_change_no_message() -> None:
    known = {"role": "assistant", "content": "1"}
    assert _same(known, known | {"name": None, "refusal": "", "tool_calls": []})
    assert not _same(known, known | {"name": "x"}) and not _same(known, {"role": "assistant"})


def test_tools() -> None:
    """vLLM's parser finds the calls; results stand behind the sampled tokens."""
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    own = TOKENIZER.chat_template

    async def agent(prompt, label, session):
        answer = (await chat(session, [user(prompt)], tools=TOOLS)).choices[0]
        assert answer.finish_reason == "tool_calls"
        (asked,) = answer.message.tool_calls
        assert (asked.function.name, asked.function.arguments) == ("add", '{"a": 1}')
        result = {"role": "tool", "tool_call_id": asked.id, "content": "2"}
        messages = [user(prompt), answer.message.model_dump(), result]
        last = (await chat(session, messages, tools=TOOLS)).choices[0]
        return float(last.message.content == "2" and last.finish_reason == "stop")

    TOKENIZER.chat_template = WITH_TOOLS
    try:
        (t,), _ = episodes(agent, call + END, f"2{END}", parser="hermes")
    finally:
        TOKENIZER.chat_template = own
    assert t.reward == 1, t.error
    behind = TOKENIZER.decode(t.token_ids[t.prompt_length :])
    assert behind == f"{call}{END}\n<|tool|>2{END}\n<|assistant|>2{END}"
    assert t.action_mask.sum() == len(tokens(call + END)) + len(tokens(f"2{END}"))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"messages": []}, openai.BadRequestError, "at least one message"),
        # whatever the template makes of it, the engine would not see the picture
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
                ]
            },
            openai.BadRequestError,
            "content of type image_url",
        ),
        (
            {"messages": [user("?"), {"role": "assistant", "content": "4"}]},
            openai.BadRequestError,
            "the last one is an answer",
        ),
        ({"messages": [user("long " * 400)]}, openai.BadRequestError, "--data.max_len 300"),
        ({"messages": [user("?")], "tools": TOOLS}, openai.BadRequestError, "tool_parser"),
        (
            {"messages": [user("?")], "response_format": {"type": "json_object"}},
            openai.BadRequestError,
            "response_format: ",
        ),
    ],
)
def test_requests_that_cannot_be_answered(options: dict, error: type[Exception], text: str) -> None:
    async def agent(prompt, label, session):
        with pytest.raises(error, match=text):
            await session.client.chat.completions.create(model=session.model, **options)
        await chat(session, [user("?")])
        return 1

    (t,), _ = episodes(agent, f"3{END}")
    assert t.reward == 1, t.error


def test_a_key_is_that_of_an_episode() -> None:
    """A key is valid while its episode runs. An error that an agent raises is its own."""
    kept: list[Session] = []

    async def agent(prompt, label, session):
        assert not session.client.is_closed()
        if kept:
            late = openai.AsyncOpenAI(base_url=kept[0].base_url, api_key=kept[0].api_key)
            with pytest.raises(openai.AuthenticationError, match="api_key"):
                await late.models.list()
            await late.close()
        kept.append(session)
        raise KeyError("mine")

    class AgentExecutor(OpenAIAgentExecutor):
        async def run_agent(self, prompt, label, session):
            return await agent(prompt, label, session)

    async def run() -> None:
        executor = AgentExecutor()
        params = Sampling.for_training(PPOConfig())
        runner = EpisodeRunner(Engine(tokens("3")), TOKENIZER, executor, [2])
        for _ in range(2):
            arguments = "", "", runner._sampling_params(params), 100, TOKENIZER, runner.engine
            with pytest.raises(KeyError, match="mine"):
                await executor.execute(*arguments)
        assert not executor._server.sessions and all(session.client.is_closed() for session in kept)

    asyncio.run(run())


def test_a_client_that_episodes_share_names_the_key_in_the_body() -> None:
    async def agent(prompt, label, session):
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key="none") as client:
            request: Any = {"model": session.model, "messages": [user("?")]}
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(**request)
            key = {"session_key": session.api_key}
            answer = await client.chat.completions.create(**request, extra_body=key)
        return float(answer.choices[0].message.content == "3")

    (t,), _ = episodes(agent, f"3{END}")
    assert t.reward == 1, t.error


def test_sixteen_conversations_never_mix() -> None:
    """Each conversation gets its own history, however slow the others are."""
    number = iter(range(1000))

    async def agent(prompt, label, session):
        own = str(next(number))
        messages = [user(f"I am {own}")]
        for turn in range(4):
            await asyncio.sleep(0.001 * (hash((own, turn)) % 7))
            message = (await chat(session, messages)).choices[0].message
            messages += [message.model_dump(), user(f"{own} again")]
        return float(own)

    found, engine = episodes(agent, f"yes{END}", samples=16)
    assert len(found) == 16 and all(t.ok for t in found), [t.error for t in found]
    for t in found:
        own = f"{t.reward:.0f}"
        text = TOKENIZER.decode(t.token_ids)
        assert text == f"<|user|>I am {own}{END}<|assistant|>yes{END}" + 3 * (
            f"<|user|>{own} again{END}<|assistant|>yes{END}"
        )
    assert len(engine.asked) == 64


@pytest.mark.processes
def test_hundreds_that_knock_at_once_are_let_in() -> None:
    """asyncio would keep 128 connections waiting, and turn the others away."""

    async def agent(prompt, label, session):
        await chat(session, [user(prompt)])
        return 1

    found, _ = episodes(agent, f"3{END}", samples=300)
    assert [t.error for t in found] == [""] * 300


def test_what_the_run_decides_is_remarked_upon(caplog: pytest.LogCaptureFixture) -> None:
    async def agent(prompt, label, session):
        options = {"temperature": 0.3, "max_completion_tokens": 5, "stop": ["!"], "logprobs": True}
        choice = (await chat(session, [user("?")], **options, top_logprobs=2)).choices[0]
        assert choice.message.content == "3"
        first = choice.logprobs.content[0]
        assert first.logprob == -0.5 and len(first.top_logprobs) == 2
        return 1

    (t,), engine = episodes(agent, "3!", temperature=0.9)
    assert t.reward == 1, t.error
    (_, params), *_ = engine.asked
    assert (params.temperature, params.max_tokens, params.stop) == (0.9, 5, ["!"])
    assert "requests set temperature" in caplog.text


def test_a_limit_of_turns() -> None:
    """An agent that asks on is told so, and may still say what the episode is worth."""

    async def agent(prompt, label, session):
        await chat(session, [user("?")])
        await chat(session, [user("!")])
        assert session.turns_left == 0
        with pytest.raises(openai.BadRequestError, match=r"--train\.max_turns 2"):
            await chat(session, [user("again")])
        return 0.25

    found, engine = episodes(agent, f"3{END}", max_turns=2)
    assert [t.reward for t in found] == [0.25, 0.25] and len(engine.asked) == 2


@pytest.mark.processes
def test_an_executor_without_an_agent_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text(
        "from openrlhf.agents.openai import OpenAIAgentExecutor\n"
        "class AgentExecutor(OpenAIAgentExecutor):\n    pass\n"
    )
    with refused(ErrorCode.USER_CODE, flag="--train.agent_func_path", value=path) as told:
        check_agent_file(str(path), "--train.agent_func_path")
    assert re.search(r"\brun_agent\b", told.value.text)
