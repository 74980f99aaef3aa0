"""The APIs of the agents' server with the real clients `anthropic` and `openai`, over HTTP, and the policy's
answers by hand. tests/unit/agents/test_sampled_wires.py has sampled ones."""

import asyncio
import json
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from tool_episodes import END, TOKENIZER, call, tokens
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from wire_episodes import anthropic_client, check_tokens, play_by_hand

from openrlhf.agents.openai import Session
from openrlhf.tools.wires.messages import BILLING, MESSAGES
from openrlhf.tools.wires.responses import RESPONSES

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OF_ANTHROPIC: Any = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
OF_OPENAI: Any = [{"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA}]


def ask(content: Any) -> Any:
    return {"role": "user", "content": content}


def text_of(t: Any) -> str:
    return str(TOKENIZER.decode(t.token_ids))


def _kind(error: Any) -> str:
    return error.body["error"]["type"]


# Anthropic


def test_messages_are_one_stream_with_their_tools() -> None:
    """The assistant's blocks come back as the client has them; a result stands behind the sampled tokens."""

    async def agent(session: Session) -> None:
        async with anthropic_client(session) as client:
            given: Any = {"model": "m", "max_tokens": 99, "system": "Add.", "tools": OF_ANTHROPIC}
            counted = await client.messages.count_tokens(
                model="m", messages=[ask("1+1")], system="Add.", tools=OF_ANTHROPIC
            )
            first = await client.messages.create(messages=[ask("1+1")], **given)
            assert counted.input_tokens == first.usage.input_tokens
            assert (first.stop_reason, first.stop_sequence) == ("tool_use", None)
            text, used = first.content
            assert (text.text, used.name, used.input) == ("so ", "add", {"a": 1.0})
            assert first.usage.output_tokens == len(tokens(ANSWER))
            assert first.model_extra["token_ids"] == tokens(ANSWER)
            # a client in JavaScript writes 1.0 as 1, and adds a mark of the cache
            blocks = [text.model_dump(), used.model_dump() | {"input": {"a": 1}}]
            result = {"type": "tool_result", "tool_use_id": used.id, "is_error": False, "content": "2"}
            more = [result | {"cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "On."}]
            messages: Any = [
                ask("1+1"),
                {"role": "assistant", "content": blocks},
                {"role": "user", "content": more},
            ]
            last = await client.messages.create(messages=messages, **given)
            assert (last.stop_reason, last.content[0].text) == ("end_turn", "2")

    ANSWER = "so " + call("add", a=1.0) + END
    (t,), heard = play_by_hand(agent, ANSWER, f"2{END}", parser="hermes")
    check_tokens([t], heard)
    ending = f"<|assistant|>{ANSWER}\n<|tool|>2{END}\n<|user|>On.{END}\n<|assistant|>2{END}"
    assert text_of(t) == f"<|system|>add {END}<|system|>Add.{END}\n<|user|>1+1{END}\n{ending}"


def test_streamed_messages() -> None:
    kinds: list[str] = []

    async def agent(session: Session) -> None:
        async with anthropic_client(session) as client:
            given: Any = {"model": "m", "max_tokens": 9, "messages": [ask("?")], "tools": OF_ANTHROPIC}
            whole = await client.messages.create(**given)
            async with client.messages.stream(**given) as stream:
                kinds.extend([event.type async for event in stream])
                found = await stream.get_final_message()
            drop = {"id", "content", "prompt_token_ids", "token_ids"}
            assert not {"prompt_token_ids", "token_ids"} & found.model_dump().keys()
            assert found.model_dump(exclude=drop) == whole.model_dump(exclude=drop)
            assert [block.type for block in found.content] == ["text", "tool_use"]
            assert found.content[1].input == {"a": 1} and found.content[0].text == "so "

    play_by_hand(agent, "so " + call("add", a=1) + END, parser="hermes")
    assert kinds == [
        *("message_start", "content_block_start", "content_block_delta", "text", "content_block_stop"),
        *("content_block_start", "content_block_delta", "input_json", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]


@pytest.mark.parametrize(
    ("answer", "options", "reason", "sequence"),
    [(f"3{END}", {}, "end_turn", None), ("3!4", {"stop_sequences": ["?", "!"]}, "stop_sequence", "!")],
)
def test_reasons_of_stops(answer: str, options: Any, reason: str, sequence: str | None) -> None:
    async def agent(session: Session) -> None:
        async with anthropic_client(session) as client:
            found = await client.messages.create(model="m", max_tokens=9, messages=[ask("?")], **options)
        assert (found.stop_reason, found.stop_sequence) == (reason, sequence)
        assert found.content[0].text == "3"

    play_by_hand(agent, answer)


def test_limits_of_an_answer() -> None:
    """An answer has at most as many tokens as the run allows, whatever a harness asks for."""

    async def agent(session: Session) -> None:
        async with anthropic_client(session) as client:
            for count in (8192, 5):
                await client.messages.create(model="m", max_tokens=count, messages=[ask("?")])

    _, heard = play_by_hand(agent, f"3{END}")
    assert [params.max_tokens for _, params in heard.engine.asked] == [12, 5]


REQUEST: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5,
    "system": [
        {"type": "text", "text": f"{BILLING}: cch=1;"},
        {"type": "text", "text": "One. ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Two."},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "so"},
                {"type": "tool_use", "id": "x", "name": "add", "input": {"a": "é"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "text", "text": "2"}]},
                {"type": "text", "text": "On."},
            ],
        },
    ],
    "tools": OF_ANTHROPIC,
    "stop_sequences": ["!"],
}


def test_requests_are_read_as_vllm_reads_them() -> None:
    """vLLM's own server has the same API."""
    theirs = AnthropicServingMessages.to_chat_completion_request(AnthropicMessagesRequest(**REQUEST))
    reference = theirs.model_dump(exclude_none=True)
    ours = MESSAGES.read(REQUEST)
    plain = lambda messages: [
        m | {"content": _joined(m["content"])} for m in json.loads(json.dumps(messages))
    ]
    assert plain(ours["messages"]) == plain(_arguments_as_text(reference["messages"]))
    assert ours["tools"] == reference["tools"]
    assert (ours["stop"], ours["max_tokens"]) == (reference["stop"], reference["max_tokens"])


def _joined(content: Any) -> Any:
    """Returns text parts as their text."""
    texts = [part.get("text") for part in content] if isinstance(content, list) else [None]
    return content if None in texts else "".join(texts)


def _arguments_as_text(messages: list[dict]) -> list[dict]:
    for message in messages:
        for asked in message.get("tool_calls") or ():
            asked["function"]["arguments"] = json.dumps(
                json.loads(asked["function"]["arguments"]), ensure_ascii=False
            )
    return messages


def test_arguments_that_are_no_object_come_back_as_they_were() -> None:
    """vLLM's parsers may pass text on that is no JSON; the API has objects alone."""
    for text in ("{broken", "[1]", '{"a": 1}'):
        message = {"content": None, "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": text}}]}
        choice = {"message": message, "finish_reason": "tool_calls", "stop_reason": None, "token_ids": []}
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        answer = {"id": "1", "model": "m", "choices": [choice], "usage": usage, "prompt_token_ids": []}
        (block,) = MESSAGES.write({}, answer)["content"]
        assert isinstance(block["input"], dict)
        (read,) = MESSAGES.read({"messages": [{"role": "assistant", "content": [block]}]})["messages"]
        assert read["tool_calls"][0]["function"]["arguments"] == text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": [ask("long " * 800)]}, "prompt is too long: .*--data.max_len 600"),
        ({"messages": [ask("?"), {"role": "assistant", "content": "4"}]}, "the last one is an answer"),
        ({"messages": [ask([{"type": "document"}])]}, "of type document: only text"),
        (
            {"messages": [ask([{"type": "image", "source": {"type": "url", "url": "u"}}])]},
            "of type image: only",
        ),
        ({"messages": [{"role": "user"}]}, "form of this API: .*KeyError"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ({"tools": OF_ANTHROPIC}, "tool_parser"),
        ({"tools": OF_ANTHROPIC, "tool_choice": {"type": "any"}}, "tool_choice: required"),
        ({"tools": OF_ANTHROPIC, "tool_choice": {"type": "tool", "name": "add"}}, "tool_choice: tool add"),
        ({"extra_body": {"thread": {"type": "create"}}}, "thread: the server stores nothing"),
        ({"extra_body": {"mcp_servers": [{"name": "x"}]}}, "mcp_servers"),
        ({"extra_body": {"output_config": {"format": {"type": "json_schema"}}}}, "format: not supported"),
    ],
)
def test_messages_that_cannot_be_answered(options: dict, text: str) -> None:
    async def agent(session: Session) -> None:
        async with anthropic_client(session) as client:
            given: Any = {"model": "m", "max_tokens": 9, "messages": [ask("?")]} | options
            with pytest.raises(anthropic.BadRequestError, match=text) as refused:
                await client.messages.create(**given)
            assert _kind(refused.value) == "invalid_request_error"
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await client.with_options(api_key="other").messages.create(**given)
            assert _kind(refused.value) == "authentication_error"
            await client.messages.create(model="m", max_tokens=9, messages=[ask("?")])

    play_by_hand(agent, f"3{END}")


def test_settings_that_change_nothing_are_passed_over() -> None:
    async def agent(session: Session) -> None:
        async with anthropic_client(session) as client:
            create: Any = client.beta.messages.create
            found = await create(
                model="m",
                max_tokens=9,
                messages=[ask("?")],
                betas=["context-management-2025-06-27"],
                metadata={"user_id": "u"},
                thinking={"type": "enabled", "budget_tokens": 1024},
                tool_choice={"type": "auto", "disable_parallel_tool_use": True},
            )
        assert found.content[0].text == "3"
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as other:
            answer = await other.responses.create(
                model="m",
                input="?",
                store=False,
                metadata={"a": "b"},
                reasoning={"effort": "high"},
                include=["reasoning.encrypted_content"],
                prompt_cache_key="k",
                parallel_tool_calls=True,
                text={"format": {"type": "text"}, "verbosity": "low"},
                truncation="disabled",
            )
            assert answer.output_text == "3"

    play_by_hand(agent, f"3{END}")


# Claude Code

SEARCH: Any = {"name": "ToolSearch", "input_schema": SCHEMA}
ADD: Any = OF_ANTHROPIC[0] | {"defer_loading": True}


def test_a_tool_that_was_searched_for_stands_in_the_result() -> None:
    """Tools that are deferred are no part of the prompt, which keeps its beginning when one is found."""

    async def agent(session: Session) -> None:
        async with anthropic_client(session) as client:
            messages: list[Any] = [ask("1+1")]
            used = result = None
            hidden = {"name": "placeholder", "input_schema": {"type": "object"}, "defer_loading": True}
            for number in range(3):
                tools: Any = [SEARCH, hidden, *([ADD] if number else [])]
                found = await client.messages.create(model="m", max_tokens=9, messages=messages, tools=tools)
                if number == 2:
                    break
                (used,) = found.content
                said: Any = "2" if number else [{"type": "tool_reference", "tool_name": "add"}]
                result = {"type": "tool_result", "tool_use_id": used.id, "content": said}
                messages += [{"role": "assistant", "content": [used.model_dump()]}, ask([result])]
            assert used and result and used.name == "add" and found.content[0].text == "2"
            result["content"] = [{"type": "tool_reference", "tool_name": "sub"}]
            with pytest.raises(anthropic.BadRequestError, match="tool_reference sub"):
                await client.messages.create(model="m", max_tokens=9, messages=messages, tools=tools)

    answers = [call("ToolSearch", a=1) + END, call("add", a=1) + END, f"2{END}"]
    (t,), heard = play_by_hand(agent, *answers, parser="hermes")
    check_tokens([t], heard)
    prompt, definition, result = text_of(t).split("<|tool|>")
    assert prompt.startswith(f"<|system|>ToolSearch {END}<|user|>1+1")
    known = json.loads(definition.partition(END)[0])
    assert known["function"] == {"name": "add", "description": "Adds.", "parameters": SCHEMA}
    assert result.startswith(f"2{END}")


def test_deferred_tools_need_a_parser_of_their_calls() -> None:
    async def agent(session: Session) -> None:
        async with anthropic_client(session) as client:
            with pytest.raises(anthropic.BadRequestError, match="tool_parser"):
                await client.messages.create(model="m", max_tokens=9, messages=[ask("?")], tools=[ADD])
            await client.messages.create(model="m", max_tokens=9, messages=[ask("?")])

    play_by_hand(agent, f"3{END}")


def test_a_client_that_leaves_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    """Its answer was sampled, and is trained on."""

    async def agent(session: Session) -> None:
        left = asyncio.Event()
        engine = session.engine

        class Waiting:
            async def generate(self, *arguments: Any) -> Any:
                await left.wait()
                return await engine.generate(*arguments)

        session.engine = Waiting()
        host, port = session.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"messages": [ask("?")], "stream": True, "max_tokens": 9}).encode()
        head = f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nX-Api-Key: {session.api_key}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        while not session.num_turns:  # bounded: the server reads the request
            await asyncio.sleep(0.01)
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0.05)  # until the server has read the end of the connection
        left.set()
        while not session.branches:  # bounded: the engine answers
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)

    (t,), heard = play_by_hand(agent, f"3{END}")
    check_tokens([t], heard)
    assert not caplog.records


# OpenAI's responses


def test_tools_in_a_namespace_come_back_in_it(caplog: pytest.LogCaptureFixture) -> None:
    """As Codex declares those of sub-agents and of MCP servers, beside one that the API itself would run."""
    inner = [tool | {"strict": False} for tool in OF_OPENAI]
    space = {"type": "namespace", "name": "math", "description": "Numbers.", "tools": inner}
    tools: Any = [space, {"type": "web_search", "external_web_access": True}]

    async def agent(session: Session) -> None:
        items: list[Any] = [{"type": "message", "role": "developer", "content": "Add."}, ask("1+1")]
        given: Any = {"model": "m", "tools": tools}
        async with session.client.responses.stream(input=items, **given) as stream:
            used = (await stream.get_final_response()).output[0]
        assert (used.type, used.namespace, used.name) == ("function_call", "math", "add")
        items += [used.to_dict(), {"type": "function_call_output", "call_id": used.call_id, "output": "2"}]
        last = await session.client.responses.create(input=items, **given)
        assert last.output_text == "2"

    (t,), heard = play_by_hand(agent, call("math__add", a=1) + END, f"2{END}", parser="hermes")
    check_tokens([t], heard)
    assert text_of(t).startswith(f"<|system|>math__add {END}<|system|>Add.{END}\n<|user|>1+1{END}\n")
    assert "not offered the tool web_search" in caplog.text


def test_a_socket_is_refused_so_that_codex_sends_requests() -> None:
    async def agent(session: Session) -> None:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {session.api_key}"}) as client:
            with pytest.raises(aiohttp.WSServerHandshakeError, match="426"):
                await client.ws_connect(f"{session.base_url}/responses")
        await session.client.responses.create(model="m", input="?")

    play_by_hand(agent, f"3{END}")


def test_responses_are_one_stream_with_their_tools() -> None:
    async def agent(session: Session) -> None:
        given: Any = {"model": "m", "instructions": "Add.", "tools": OF_OPENAI}
        items: list[Any] = [ask("1+1")]
        count = await session.client.responses.input_tokens.count(input=items, **given)
        first = await session.client.responses.create(input=items, **given)
        assert count.input_tokens == first.usage.input_tokens
        assert (first.status, first.output_text) == ("completed", "so ")
        _, used = first.output
        assert (used.type, used.name, used.arguments) == ("function_call", "add", '{"a": 1}')
        assert first.usage.output_tokens == len(tokens(ANSWER))
        items += [item.model_dump() for item in first.output]
        items += [
            {"type": "function_call_output", "call_id": used.call_id, "output": "2"},
            {"role": "developer", "content": [{"type": "input_text", "text": "On."}]},
        ]
        last = await session.client.responses.create(input=items, **given)
        assert last.output_text == "2"

    ANSWER = "so " + call("add", a=1) + END
    (t,), heard = play_by_hand(agent, ANSWER, f"2{END}", parser="hermes")
    check_tokens([t], heard)
    ending = f"<|assistant|>{ANSWER}\n<|tool|>2{END}\n<|system|>On.{END}\n<|assistant|>2{END}"
    assert text_of(t) == f"<|system|>add {END}<|system|>Add.{END}\n<|user|>1+1{END}\n{ending}"


def test_streamed_responses() -> None:
    kinds: list[str] = []

    async def agent(session: Session) -> None:
        given: Any = {"model": "m", "input": "?", "tools": OF_OPENAI}
        whole = await session.client.responses.create(**given)
        async with session.client.responses.stream(**given) as stream:
            events = [event async for event in stream]
            found = await stream.get_final_response()
        kinds.extend(event.type for event in events)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert found.output_text == whole.output_text == "so "
        assert found.output[1].arguments == whole.output[1].arguments == '{"a": 1}'
        assert found.usage == whole.usage and found.status == "completed"
        assert whole.model_extra["token_ids"] and "token_ids" not in (found.model_extra or {})

    play_by_hand(agent, "so " + call("add", a=1) + END, parser="hermes")
    assert [kind.removeprefix("response.") for kind in kinds] == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"previous_response_id": "resp_1"}, "stores nothing"),
        ({"input": [{"type": "reasoning", "id": "r", "summary": []}]}, "'reasoning'"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "of type input_file: only text"),
        ({"input": [ask([{"type": "input_image", "image_url": "u"}])]}, "of type input_image: only text"),
        ({"tools": [{"type": "local_shell"}]}, "local_shell"),
        ({"tools": OF_OPENAI, "tool_choice": "required"}, "tool_choice: required"),
        ({"text": {"format": {"type": "json_object"}}}, "json_object"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_responses_that_cannot_be_given(options: dict, text: str) -> None:
    async def agent(session: Session) -> None:
        given: Any = {"model": "m", "input": "?"} | options
        with pytest.raises(openai.BadRequestError, match=text):
            await session.client.responses.create(**given)
        await session.client.responses.create(model="m", input="?")

    play_by_hand(agent, f"3{END}")


@pytest.mark.parametrize(
    ("finish", "status", "stop"),
    [("stop", "completed", "end_turn"), ("length", "incomplete", "max_tokens"), ("abort", "failed", "abort")],
)
def test_how_answers_end(finish: str, status: str, stop: str) -> None:
    message = {"role": "assistant", "content": "3"}
    choice = {"message": message, "finish_reason": finish, "stop_reason": None, "token_ids": [7]}
    usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    answer = {"id": "1", "model": "m", "created": 1, "choices": [choice], "usage": usage}
    answer["prompt_token_ids"] = [5, 6]
    response = RESPONSES.write({}, answer)
    assert (response["status"], response["token_ids"]) == (status, [7])
    assert (response["error"] is None, response["incomplete_details"] is None) == (
        finish != "abort",
        finish != "length",
    )
    *_, last = RESPONSES.events({}, response)
    assert last["type"] == f"response.{status}"
    assert MESSAGES.write({}, answer)["stop_reason"] == stop


# Segments


@pytest.mark.parametrize("wire", ["chat", "messages", "responses"])
def test_what_clients_change_without_a_change_of_meaning_continues(wire: str) -> None:
    """Contents as lists of parts, on each wire."""

    async def agent(session: Session) -> None:
        openais = session.client
        if wire == "chat":
            await openais.chat.completions.create(model="m", messages=[ask("?")])
            parts = [{"type": "text", "text": "3"}]
            back = {"role": "assistant", "content": parts, "refusal": None}
            await openais.chat.completions.create(model="m", messages=[ask("?"), back, ask("!")])
        elif wire == "messages":
            async with anthropic_client(session) as client:
                await client.messages.create(model="m", max_tokens=9, messages=[ask("?")])
                asked = ask([{"type": "text", "text": "?", "cache_control": {"type": "ephemeral"}}])
                back = {"role": "assistant", "content": "3"}
                await client.messages.create(model="m", max_tokens=9, messages=[asked, back, ask("!")])
        else:
            await openais.responses.create(model="m", input="?")
            asked: Any = {"type": "message", **ask([{"type": "input_text", "text": "?"}])}
            back: Any = {"role": "assistant", "content": "3"}
            await openais.responses.create(model="m", input=[asked, back, ask("!")])

    (t,), heard = play_by_hand(agent, f"3{END}", f"2{END}")
    check_tokens([t], heard)
    assert len(t.turn_starts) == 2


def test_a_conversation_may_change_its_wire() -> None:
    async def agent(session: Session) -> None:
        await session.client.chat.completions.create(model="m", messages=[ask("?")])
        back = [ask("?"), {"role": "assistant", "content": "3"}, ask("!")]
        async with anthropic_client(session) as client:
            await client.messages.create(model="m", max_tokens=9, messages=back)

    (t,), heard = play_by_hand(agent, f"3{END}", f"2{END}")
    check_tokens([t], heard)


def test_a_header_that_changes_with_each_request_is_no_part_of_the_prompt() -> None:
    async def agent(session: Session) -> None:
        messages: list[Any] = [ask("?")]
        async with anthropic_client(session) as client:
            for number in range(2):
                header = {"type": "text", "text": f"{BILLING}: cch={number};"}
                system: Any = [header, {"type": "text", "text": "Help."}]
                found = await client.messages.create(
                    model="m", max_tokens=9, system=system, messages=messages
                )
                messages += [{"role": "assistant", "content": found.content}, ask("!")]

    (t,), _ = play_by_hand(agent, f"3{END}")
    assert len(t.turn_starts) == 2 and "cch" not in text_of(t)


@pytest.mark.parametrize("wire", ["chat", "messages", "responses"])
def test_compaction_and_sub_agents_are_segments_that_share_the_reward(wire: str) -> None:
    """The main conversation goes on after a sub-agent's, and then shrinks to a summary."""

    async def agent(session: Session) -> float:
        async def say(system: str, messages: list[Any]) -> list[Any]:
            if wire == "chat":
                head = [{"role": "system", "content": system}]
                chat = session.client.chat.completions
                text = (await chat.create(model="m", messages=[*head, *messages])).choices[0].message.content
            elif wire == "messages":
                async with anthropic_client(session) as client:
                    found = await client.messages.create(
                        model="m", max_tokens=9, system=system, messages=messages
                    )
                text = found.content[0].text
            else:
                response = session.client.responses
                text = (await response.create(model="m", instructions=system, input=messages)).output_text
            return [*messages, {"role": "assistant", "content": text}]

        main = await say("Main.", [ask("a")])
        await say("Sub.", [ask("s")])
        await say("Main.", [*main, ask("b")])
        await say("Main.", [ask("in short"), ask("c")])
        return 0.5

    found, heard = play_by_hand(agent, f"1{END}", f"2{END}", f"3{END}", f"4{END}")
    check_tokens(found, heard)
    assert [len(t.turn_starts) for t in found] == [2, 1, 1]
    assert [t.part for t in found] == [0, 1, 2]
    assert {(t.reward, t.sample_index) for t in found} == {(0.5, 0)}


def test_segments_have_one_place_in_their_group() -> None:
    """A second sample without a rewritten history has the same weight in the comparison."""
    number = iter((0.0, 1.0))

    async def agent(session: Session) -> float:
        reward = next(number)
        for text in ("a", "b") if reward else ("a",):
            await session.client.responses.create(model="m", input=text)
        return reward

    found, _ = play_by_hand(agent, f"1{END}", samples=2)
    assert sorted((t.sample_index, t.part, t.reward) for t in found) in (
        [(0, 0, 0.0), (1, 0, 1.0), (1, 1, 1.0)],
        [(0, 0, 1.0), (0, 1, 1.0), (1, 0, 0.0)],
    )


def test_a_program_finds_the_session_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of the user's own would be sent beside the key; a proxy would not reach this machine."""
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("no_proxy", "intranet")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "own")

    async def agent(session: Session) -> None:
        found = session.environment
        assert found["OPENAI_BASE_URL"] == found["OPENAI_API_BASE"] == f"{found['ANTHROPIC_BASE_URL']}/v1"
        keys = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
        assert {found[name] for name in keys} == {session.api_key}
        assert found["NO_PROXY"] == found["no_proxy"] == "intranet,127.0.0.1,localhost"
        await session.client.responses.create(model="m", input="?")

    play_by_hand(agent, f"3{END}")
