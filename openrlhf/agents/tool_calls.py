"""Parses tool calls with vLLM's parsers, one for the markup of each model family. vLLM must be installed; no
vLLM engine is needed."""

from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager


def find_calls(parser: str, tokenizer: Any, tools: Any, text: str) -> tuple[str | None, list[dict]]:
    """Returns the answer's content outside its tool calls, and the calls, both in OpenAI's format. A call
    within thoughts, before </think>, is none, as when vLLM serves a model with a reasoning parser.

    `parser`: the name of a vLLM tool parser, such as hermes. `tools`: the tools of the request. Raises
    KeyError if vLLM has no such parser.
    """
    asked = ChatCompletionRequest(messages=[], model="policy", tools=tools)
    make_parser: Any = ToolParserManager.get_tool_parser(parser)
    thoughts, end, answer = text.rpartition("</think>")
    found = make_parser(tokenizer, asked.tools).extract_tool_calls(answer, asked)
    content = thoughts + end + (found.content or "")
    return content or None, [call.model_dump() for call in found.tool_calls] if found.tools_called else []
