"""Text of chat templates between answers, and templates that an agent of many turns can use."""

import asyncio
import logging
from functools import partial
from pathlib import Path

import pytest
from chat_models import ALL, MODELS, tokenizer_of
from refusals import refused

from openrlhf.agents.chat_stream import CALL, ChatStream, TemplateProblem, in_turns, probe
from openrlhf.errors import ErrorCode
from openrlhf.rollout.executors import AgentSetting, UserExecutor, check_agent_file, load_agent
from openrlhf.tasks.tiny_model import tiny_tokenizer
from openrlhf.user_file import UnusableFile

ENDS = {name: model.eos for name, model in MODELS.items()} | dict.fromkeys(
    ("gemma2", "gemma3"), "<end_of_turn>"
)
AGENT = """
from openrlhf.agents.openai import OpenAIAgentExecutor
class AgentExecutor(OpenAIAgentExecutor):
    async def run_agent(self, prompt, label, session):
        return 0.0
"""
ONLY_THE_LAST = (
    "{% set m = messages[-1] %}<|{{ m.role }}|>{{ m.content }}<|end|>"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WANTS_CALLS = (
    "{% for m in messages %}{% set before = messages[loop.index0 - 1] %}"
    "{% if m.role == 'tool' and before.role != 'tool' and not before.tool_calls %}"
    "{{ raise_exception('a result without a call') }}{% endif %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.what }}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def said(role: str, content: object, **more: object) -> dict:
    return {"role": role, "content": content, **more}


def with_template(template: str):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@ALL
def test_an_answer_and_what_is_behind_it_are_what_the_template_writes(name: str) -> None:
    """Mistral's template writes a space before answers, which a policy samples; the others write answers as
    they are."""
    stream, end = ChatStream(tokenizer_of(name)), ENDS[name]
    messages = [said("user", "Hi."), said("assistant", "No."), said("user", "Hello.")]
    space = " " if name.startswith("mistral") else ""
    behind = stream.behind(messages, 1, None, end)
    assert stream.render(messages[:1]) + f"{space}No.{end}" + behind == stream.render(messages)
    assert stream.behind(messages, 1, None, "") == end + behind


TOOLS_LAST = (
    "{% for m in messages %}{% if loop.last and tools %}<tools>{{ tools[0].function.name }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Writes tools before the last message, as Mistral's templates do."""


def test_tools_stand_behind_an_answer_where_the_template_writes_them() -> None:
    stream = ChatStream(with_template(TOOLS_LAST))
    messages = [said("user", "Hi."), said("assistant", "No."), said("user", "Hello.")]
    tools = [{"type": "function", "function": {"name": "count", "parameters": {}}}]
    asked = "<|user|>Hello.<|end|><|assistant|>"
    assert stream.behind(messages, 1, tools, "<|end|>") == f"<tools>count{asked}"
    assert stream.behind(messages, 1, None, "<|end|>") == asked


def test_a_thought_stays_where_qwen3_leaves_it_out() -> None:
    (remark,) = probe(tokenizer_of("qwen3"), with_tools=False)
    assert "<think>" in remark
    assert not probe(tokenizer_of("qwen2.5"), with_tools=False)


def test_a_template_that_wants_the_calls_that_tools_answer() -> None:
    """The answer stays where it was, with its arguments as a mapping."""
    tokenizer = with_template(WANTS_CALLS)
    assert not probe(tokenizer, with_tools=True)
    call = {"id": "1", "type": "function", "function": CALL}
    messages = [said("user", "?"), said("assistant", "", tool_calls=[call]), said("tool", "3")]
    stream = ChatStream(tokenizer)
    assert stream.behind(messages, 1, None, "<|end|>") == "\n<|tool|>3<|end|>\n<|assistant|>"
    assert stream.behind(messages, 1, None, "") == "<|end|>\n<|tool|>3<|end|>\n<|assistant|>"
    broken = {**call, "function": {"name": "count", "arguments": "{what"}}
    assert stream.render([said("user", "?"), said("assistant", "no", tool_calls=[broken])])
    with pytest.raises(TemplateProblem, match="a result without a call"):
        stream.render([said("user", "?"), said("tool", "3")])


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (ONLY_THE_LAST, ["rewrites", "'<|user|>Are you sure"]),
        (
            "{% for m in messages[:2] %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}",
            ["omits", "'Are you sure?'"],
        ),
        ("{{ raise_exception('not today') }}", ["rejects", "not today"]),
        (None, ["rejects", "Cannot use chat template"]),
    ],
)
def test_templates_that_no_agent_can_use(template: str | None, words: list[str]) -> None:
    with pytest.raises(TemplateProblem) as raised:
        probe(with_template(template), with_tools=False)
    assert all(word in str(raised.value) for word in words)


def test_prompts_that_would_become_messages_twice(tmp_path: Path) -> None:
    (path := tmp_path / "agent.py").write_text(AGENT)
    load_agent(str(path), tokenizer=tiny_tokenizer)
    with pytest.raises(UnusableFile, match="twice"):
        load_agent(str(path), tokenizer=tiny_tokenizer, is_chat=True)


@pytest.mark.processes
def test_a_template_is_tried_before_anything_starts(tmp_path: Path) -> None:
    (path := tmp_path / "agent.py").write_text(AGENT)
    with refused(ErrorCode.USER_CODE, flag="--train.agent_func_path", value=path):
        check_agent_file(
            str(path), "--train.agent_func_path", tokenizer=partial(with_template, ONLY_THE_LAST)
        )


def test_what_an_engine_remarks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (path := tmp_path / "agent.py").write_text(AGENT)

    def load(tokenizer) -> None:
        asyncio.run(UserExecutor.load(str(path), AgentSetting(tokenizer=tokenizer)))

    with caplog.at_level(logging.WARNING):
        load(tokenizer_of("qwen3"))
    assert "tokens are kept" in caplog.text
    with pytest.raises(RuntimeError, match="rewrites"):
        load(with_template(ONLY_THE_LAST))


def test_messages_as_templates_read_them() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    stream = ChatStream(tiny_tokenizer())
    assert stream.render([{"role": "user", "content": parts}]) == stream.render([said("user", "one two")])


@pytest.mark.parametrize("name", ["gemma3", "mistral-v0.3"])
def test_a_template_with_strict_turns_reads_what_harnesses_write(name: str) -> None:
    """Claude Code writes system messages behind the user's, Codex several messages of one role in a row."""
    stream, end = ChatStream(tokenizer_of(name)), ENDS[name]
    asked = [said("system", "Be"), said("system", "brief."), said("user", "Hi."), said("system", "It rains.")]
    joined = [said("system", "Be\n\nbrief."), said("user", "Hi.\n\nIt rains.")]
    assert stream.render(asked) == stream.render(joined)
    after = [said("assistant", "No."), said("user", "Hello."), said("system", "It pours.")]
    behind = stream.behind([*asked, *after], len(asked), None, end)
    assert behind == stream.behind([*joined, *after[:1], said("user", "Hello.\n\nIt pours.")], 2, None, end)
    assert "It pours." in behind and "It rains." not in behind
    with pytest.raises(TemplateProblem, match="take turns"):
        stream.render([*joined, said("assistant", "No."), said("assistant", "Yes.")])


def test_turns_keep_parts_and_what_is_no_system_message() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    call = said("assistant", "", tool_calls=[CALL])
    messages = [
        said("user", [image]),
        said("system", "Look."),
        call,
        said("tool", "1"),
        said("system", "On."),
    ]
    text = lambda written: {"type": "text", "text": written}
    parts = [image, text("\n\n"), text("Look.")]
    assert in_turns(messages) == [said("user", parts), call, said("tool", "1"), said("user", "On.")]
    assert in_turns([said("tool", "1"), said("tool", "2")]) == [said("tool", "1"), said("tool", "2")]
