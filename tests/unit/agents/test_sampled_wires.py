"""Real clients of three APIs on a real engine with a tiny model: the tokens trained on are those sampled, bit
for bit. `play_sampled` checks each of them."""

import sys
from pathlib import Path
from typing import Any

import openai
import pytest
from anthropic.lib.tools.mcp import async_mcp_tool
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from tool_episodes import TOKENIZER
from wire_episodes import Agent, anthropic_client, play_sampled

from openrlhf.agents.openai import Session
from openrlhf.tasks.tiny_model import tiny_chat_model

SHOP = Path(__file__).parents[3] / "examples" / "python" / "mcp_shop.py"
SCHEMA = {"type": "object", "properties": {"fruit": {"type": "string"}}}
ROUNDS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_chat_model(tmp_path_factory.mktemp("model"), hidden_size=32, num_layers=1)
    TOKENIZER.save_pretrained(folder)
    return folder


def ask(text: str) -> Any:
    return {"role": "user", "content": text}


async def by_messages(session: Session) -> None:
    """Streams every second answer."""
    given: dict[str, Any] = {"model": "m", "max_tokens": 12, "system": "Be brief."}
    messages: list[Any] = [ask("Tom has 3 apples.")]
    async with anthropic_client(session) as client:
        for number in range(ROUNDS):
            counted = await client.messages.count_tokens(model="m", system=given["system"], messages=messages)
            if number % 2:
                async with client.messages.stream(messages=messages, **given) as stream:
                    answer = await stream.get_final_message()
            else:
                answer = await client.messages.create(messages=messages, **given)
            assert counted.input_tokens == answer.usage.input_tokens
            messages += [{"role": "assistant", "content": answer.content}, ask("And then?")]


async def by_chat(session: Session) -> None:
    messages: list[Any] = [ask("Tom has 3 apples.")]
    for _ in range(ROUNDS):
        answer = await session.client.chat.completions.create(model="m", messages=messages)
        messages += [answer.choices[0].message, ask("And then?")]


async def by_responses(session: Session) -> None:
    items: list[Any] = [ask("Tom has 3 apples.")]
    for number in range(ROUNDS):
        given: dict[str, Any] = {"model": "m", "instructions": "Be brief.", "input": items}
        if number % 2:
            async with session.client.responses.stream(**given) as stream:
                *_, last = [event async for event in stream]
            answer = last.response  # completed, or incomplete
        else:
            answer = await session.client.responses.create(**given)
        items += [*answer.output, ask("And then?")]


async def tools_by_messages(session: Session) -> None:
    """Loops by the client's own runner, with the tools of a real MCP server; the policy reads its errors."""
    server = StdioServerParameters(command=sys.executable, args=[str(SHOP)])
    async with (
        stdio_client(server) as (reads, writes),
        ClientSession(reads, writes) as shop,
        anthropic_client(session) as client,
    ):
        await shop.initialize()
        tools = [async_mcp_tool(tool, shop) for tool in (await shop.list_tools()).tools]
        asked: list[Any] = [ask("What does an apple cost?")]
        runner = client.beta.messages.tool_runner(
            model="m", max_tokens=12, tools=tools, messages=asked, max_iterations=ROUNDS
        )
        found = [message async for message in runner]
    assert [message.stop_reason for message in found] == ["tool_use"] * ROUNDS


async def tools_by_chat(session: Session) -> None:
    tools: Any = [{"type": "function", "function": {"name": "price", "strict": True, "parameters": SCHEMA}}]
    messages: list[Any] = [ask("What does an apple cost?")]
    for _ in range(ROUNDS):
        chat = session.client.chat.completions
        async with chat.stream(model="m", messages=messages, tools=tools) as stream:
            message: Any = (await stream.get_final_completion()).choices[0].message
        (call,) = message.tool_calls
        told = {"role": "tool", "tool_call_id": call.id, "content": "2"}
        messages += [message.to_dict(), told]


async def tools_by_responses(session: Session) -> None:
    tools: Any = [{"type": "function", "name": "price", "parameters": SCHEMA}]
    items: list[Any] = [ask("What does an apple cost?")]
    for _ in range(ROUNDS):
        async with session.client.responses.stream(model="m", input=items, tools=tools) as stream:
            *_, last = [event async for event in stream]
        (call,) = last.response.output
        items += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "2"}]


AGENTS: dict[Agent, str | None] = {
    by_messages: None,
    by_chat: None,
    by_responses: None,
    tools_by_messages: "shopper",
    tools_by_chat: "shopper",
    tools_by_responses: "shopper",
}


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
def test_what_is_sampled_is_what_is_trained_on(agent: Agent, model: Path) -> None:
    (found,) = play_sampled("transformers", model, agent, parser=AGENTS[agent])
    assert len(found.turn_starts) == ROUNDS


def test_a_compacted_history_and_a_sub_agent_are_segments(model: Path) -> None:
    async def agent(session: Session) -> None:
        await by_messages(session)
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            await client.responses.create(model="m", instructions="You search.", input="Find it.")
        async with anthropic_client(session) as client:
            summary = [ask("Tom had apples."), ask("And then?")]
            await client.messages.create(model="m", max_tokens=12, system="Be brief.", messages=summary)

    found = play_sampled("transformers", model, agent)
    assert [len(t.turn_starts) for t in found] == [ROUNDS, 1, 1]
    assert {(t.reward, t.sample_index) for t in found} == {(1.0, 0)}
