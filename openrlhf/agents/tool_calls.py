"""Calls of tools in an answer, found by vLLM's parsers, each of which knows the markup of a family of models.
They need vLLM to be installed, and no engine of it."""

from typing import Any


def find_calls(parser: str, tokenizer: Any, tools: Any, text: str) -> tuple[str | None, list[dict]]:
    """Returns what the answer says beside its calls, and the calls, both as OpenAI has them.

    `parser`: a name of vLLM's, such as hermes. `tools`: those of the request. KeyError where vLLM has no such
    parser.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    asked = ChatCompletionRequest(messages=[], model="policy", tools=tools)
    make_parser: Any = ToolParserManager.get_tool_parser(parser)
    found = make_parser(tokenizer, asked.tools).extract_tool_calls(text, asked)
    return found.content, [call.model_dump() for call in found.tool_calls] if found.tools_called else []
