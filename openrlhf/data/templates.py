"""Renders rows as text with chat templates and input templates."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise, takewhile
from operator import eq
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from openrlhf.data.bad_rows import BadRow
from openrlhf.data.files import MAX_TEXT, Row, kind
from openrlhf.data.messages import Message, calls_of, decoded, read_text, render, text_of, without_nulls
from openrlhf.errors import ErrorCode, UsageError, notify

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """Renders a prompt as the policy reads it, to be tokenised by `prompt_token_ids`."""

    tokenizer: PreTrainedTokenizerBase
    apply_chat_template: bool
    """Whether prompts are rendered by the tokenizer's chat template instead of `input_template`."""
    input_template: str | None
    """Text with one `{}` for the prompt; None: the prompt alone."""

    def __post_init__(self) -> None:
        """Raises UsageError if the tokenizer lacks the requested chat template, or `input_template` does
        not hold exactly one `{}`."""
        if self.apply_chat_template and not self.tokenizer.chat_template:
            raise UsageError(
                ErrorCode.CHAT_TEMPLATE,
                f"the tokenizer of {self.tokenizer.name_or_path} has no chat template.\n"
                "Give one with --data.tokenizer_chat_template, or use --data.input_template instead.",
                flag="--data.apply_chat_template",
            )
        if self.apply_chat_template:
            _note_missing_header(self.tokenizer)
        if self.input_template is None:
            return
        try:
            has_place = self.input_template.format("\0").count("\0") == 1
        except (IndexError, KeyError, ValueError):
            has_place = False
        if not has_place:
            raise UsageError(
                ErrorCode.INVALID_VALUE,
                "must have exactly one {}, where the prompt goes.\n"
                "Write every other brace twice: \\boxed{{}}.",
                flag="--data.input_template",
                value=repr(self.input_template),
            )

    def __call__(self, value: str | Sequence[Message], tools: Tools | None = None) -> str:
        """Renders a prompt. With a chat template a text is one user message, a list of messages is used as it
        is, and the header of the assistant's turn follows. If the last message is the assistant's, the prompt
        ends with its content, which the policy continues. Raises BadRow if the value cannot be rendered."""
        if self.apply_chat_template:
            messages = as_messages(value)
            check_ends(messages, self.tokenizer)
            is_open = messages[-1]["role"] == "assistant"
            if is_open and not (text_of(messages[-1].get("content")) or "").strip():
                raise BadRow("the last message is the assistant's and has no text that an answer continues.")
            return render_messages(
                messages, self.tokenizer, add_generation_prompt=not is_open, is_open=is_open, tools=tools
            )
        if not isinstance(value, str):
            raise BadRow(f"the prompt is {kind(value)}, not text. Messages need --data.apply_chat_template.")
        return value if self.input_template is None else self.input_template.format(value)


def as_messages(value: str | Sequence[Message], role: str = "user") -> list[Message]:
    """Returns a text as one message of `role`, or as the messages whose JSON text it is; messages without
    keys that are null. Raises BadRow for invalid messages."""
    value = read_text(value)
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not value:
        raise BadRow("the list of messages is empty.")
    for i, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRow(f'message {i} is not of the form {{"role": …, "content": …}}.')
        if message.get("content") is None and not calls_of(message):
            raise BadRow(f"message {i} ({message['role']}) has no content.")
    return without_nulls(list(value))


def tools_of(row: Row, key: str | None) -> Tools | None:
    """Returns the tools in a column, a list or its JSON text; None if the row has none. Raises BadRow for
    anything else."""
    tools = None if key is None else decoded(row.get(key))
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(
            f"column {key!r} is no list of tools, each an object. If it is meant for something else, give\n"
            "--data.tools_key None."
        )
    return without_nulls(tools)


def joined(
    prompt: list[Message], answer: list[Message], prompt_key: str, answer_key: str, remedy: str
) -> list[Message]:
    """Returns the messages of two columns as one conversation. Raises BadRow if the answer repeats the end of
    the prompt, apart from white space, or if both are turns of the assistant."""
    ours, theirs = ([_compared(message) for message in messages] for messages in (prompt, answer))
    text = ""
    if any(ours[-count:] == theirs[:count] for count in range(1, 1 + min(len(ours), len(theirs)))):
        text = f"column {answer_key!r} already begins with the messages of {prompt_key!r}"
    elif ours[-1][0] == theirs[0][0] == "assistant":
        text = f"column {prompt_key!r} ends with the assistant, and {answer_key!r} adds another turn of it"
    if text:
        raise BadRow(f"{text};\n{remedy}")
    return prompt + answer


def _compared(message: Message) -> tuple[str, str, list[dict[str, Any]]]:
    content = message.get("content")
    text = text_of(content)
    return message["role"], "".join((str(content) if text is None else text).split()), calls_of(message)


def render_messages(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_generation_prompt: bool,
    is_open: bool = False,
    tools: Tools | None = None,
) -> str:
    """Applies the chat template. `is_open`: the text ends with the last message's content, so its turn can go
    on. Raises BadRow if the template refuses the messages."""
    _special_tokens(tokenizer).note(messages)
    if any(one["role"] == other["role"] == "assistant" for one, other in pairwise(messages)):
        _tell_two_answers()
    options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": is_open}
    text = _rendered(messages, tokenizer, tools, **options)
    if tools and not any(str(tool.get("name")) in text for tool in calls_of({"tool_calls": tools})):
        _tell_unread_tools(str(tokenizer.chat_template))
    is_asked = add_generation_prompt or is_open
    return text if is_asked else text.removesuffix(_ending(tokenizer, str(tokenizer.chat_template)).header)


def _rendered(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools | None = None,
    **options: bool,
) -> str:
    try:
        text = render(tokenizer, messages, tools=tools, **options)
    except (TemplateError, TypeError, ValueError) as error:  # roles out of order, content that is not text
        raise BadRow(f"the chat template refuses the messages: {error}", ErrorCode.CHAT_TEMPLATE) from error
    if len(text) > MAX_TEXT:
        raise BadRow(f"the conversation has {len(text)} characters; at most {MAX_TEXT} can be tokenised.")
    return text


@cache
def _tell_unread_tools(template: str) -> None:
    """Prints a note once per chat template."""
    notify(
        "note: --data.tools_key: the chat template writes no tools, so the model does not read those of the\n"
        "rows. Use a template that does (--data.tokenizer_chat_template)."
    )


@cache
def _tell_two_answers() -> None:
    """Warns once per process."""
    logger.warning(
        "some rows have two messages of the assistant in a row: the model reads, and may learn, an answer "
        "behind an answer.\nJoin them, or remove one."
    )


@dataclass(frozen=True, slots=True)
class _Ending:
    """The text that a chat template writes behind the last answer."""

    end: str
    """End of the answer's turn."""
    header: str
    """Header of the next answer, which some templates write even if it is not asked for."""


@cache
def _ending(tokenizer: PreTrainedTokenizerBase, template: str) -> _Ending:
    """Compares the text behind the last answer with that between an answer and a question, which ends with
    the header of a question. `template`: the tokenizer's, which may be replaced. Raises UsageError if the end
    of a turn and a header behind it cannot be told apart."""
    turns = zip(("user", "assistant", "user"), _MARKS, strict=True)
    talk = [{"role": role, "content": mark} for role, mark in turns]
    try:
        asked, answered, again = (_rendered(talk[:count], tokenizer) for count in (1, 2, 3))
    except BadRow:  # a template for other messages
        return _Ending("", "")
    before, after = asked.partition(_MARKS[0])[0], answered.partition(_MARKS[1])[2]
    between = again.partition(_MARKS[1])[2].partition(_MARKS[2])[0]
    if between.startswith(after):
        return _Ending(after, "")
    header_of_question = [*takewhile(bool, map(eq, reversed(before), reversed(between)))]
    place = len(between) - len(header_of_question)
    pattern = _special_tokens(tokenizer).pattern
    tokens = pattern.finditer(between) if pattern else ()
    place = next((token.end() for token in tokens if token.start() < place < token.end()), place)
    end, header = after[:place], after[place:]
    if not (between.startswith(end) and header.strip() and asked.endswith(header)):
        return _Ending(after, "")
    if not place and len(before) > len(between):
        text = (
            f"the template writes {after!r} behind the last answer. The end of the turn\nand the header of "
            "another answer cannot be told apart in it. Use a template that writes the header only with\n"
            "add_generation_prompt (--data.tokenizer_chat_template)."
        )
        raise UsageError(ErrorCode.CHAT_TEMPLATE, text, flag="--data.apply_chat_template")
    return _Ending(end, header)


_MARKS = ("\u241f1\u241f", "\u241f2\u241f", "\u241f3\u241f")
"""Contents of messages, to find what a template writes around them."""


def check_ends(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises BadRow if an answer ends with the token that ends its turn, which the template writes too."""
    end = _ending(tokenizer, str(tokenizer.chat_template)).end.strip()
    if not end:
        return
    pattern = _special_tokens(tokenizer).pattern
    found = pattern.match(end) if pattern else None
    for token in filter(None, (found[0] if found else end, tokenizer.eos_token)):
        for number, message in enumerate(messages, start=1):
            text = text_of(message.get("content")) or ""
            if message["role"] == "assistant" and text.rstrip().endswith(token):
                raise BadRow(
                    f"message {number} (assistant) ends with {token}, and the chat template ends the turn "
                    "itself; remove it\nfrom the message.",
                    ErrorCode.CHAT_TEMPLATE,
                )


@cache
def _note_missing_header(tokenizer: PreTrainedTokenizerBase) -> None:
    """Prints a note if the chat template begins answers with a header that it does not write behind a prompt,
    so that a policy must write the header itself. Templates without a header, such as Mistral's, write
    nothing in either place."""
    asked = [{"role": "user", "content": "?"}]
    answer = {"role": "assistant", "content": _ANSWER}
    try:
        plain = render_messages(asked, tokenizer, add_generation_prompt=False)
        prompt = render_messages(asked, tokenizer, add_generation_prompt=True)
        whole = render_messages([*asked, answer], tokenizer, add_generation_prompt=False)
    except BadRow:  # a template for other messages
        return
    header = whole.removeprefix(prompt).partition(_ANSWER)[0]
    if prompt == plain and whole.startswith(prompt) and header.strip():
        notify(
            f"note: the chat template of {tokenizer.name_or_path} writes {header!r} before an answer,\n"
            "but not at the end of a prompt (it ignores add_generation_prompt), so the policy has to write "
            "it.\nAnother template is given with --data.tokenizer_chat_template."
        )


_ANSWER = "An answer."


@dataclass(slots=True)
class _SpecialTokens:
    """Special tokens of a tokenizer, and whether a note about one in a message was printed."""

    pattern: re.Pattern[str] | None
    is_noted: bool = field(default=False, init=False)

    def note(self, messages: Sequence[Message]) -> None:
        """Prints a note at the first message that contains a special token and is no answer of a model: the
        chat template writes the special tokens of a conversation itself."""
        if self.is_noted or self.pattern is None:
            return
        for message in messages:
            text = text_of(message.get("content"))
            if message["role"] == "assistant" or text is None:
                continue
            if found := self.pattern.search(text):
                self.is_noted = True
                place = text[max(0, found.start() - _AROUND) : found.end() + _AROUND]
                notify(
                    f"note: a message of the role {message['role']} contains {found[0]}: {place!r}.\n"
                    "The model reads it as a special token, beside those that the chat template writes. "
                    "Prompts that are\nrendered already need no --data.apply_chat_template. Further messages "
                    "are not reported."
                )
                return


_AROUND = 40
"""Characters before and after a special token that a note shows."""


@cache
def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> _SpecialTokens:
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    tokens = sorted({*tokenizer.all_special_tokens, *added} - {""}, key=len, reverse=True)
    return _SpecialTokens(re.compile("|".join(map(re.escape, tokens))) if tokens else None)
