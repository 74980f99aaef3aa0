"""Renders rows as text with chat templates and input templates."""

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from operator import eq
from typing import Any
from weakref import WeakSet

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from openrlhf.data.bad_rows import BadRow
from openrlhf.data.files import MAX_TEXT, Row, kind
from openrlhf.data.messages import (
    MARK,
    MASKS,
    ROLES,
    WEIGHTS,
    Message,
    as_function,
    as_openai,
    decoded,
    from_column,
    is_blank,
    join_text,
    read_calls,
    read_text,
    reads,
    render,
    thoughts_apart,
    with_role,
    without_nulls,
)
from openrlhf.data.shown import check_shown
from openrlhf.errors import ErrorCode, UsageError, notify, notify_once, shortened
from openrlhf.text import Calendar

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
        """Raises UsageError if the tokenizer lacks the requested chat template."""
        if self.apply_chat_template and not self.tokenizer.chat_template:
            raise UsageError(
                ErrorCode.CHAT_TEMPLATE,
                f"the tokenizer of {self.tokenizer.name_or_path} has no chat template.\n"
                "Give one with --data.tokenizer_chat_template, or use --data.input_template instead.",
                flag="--data.apply_chat_template",
            )
        if self.apply_chat_template:
            _note_missing_header(self.tokenizer)
            if "strftime_now" in str(self.tokenizer.chat_template):
                day = f"the date, {Calendar.today}: the day on which the run started, also once resumed"
                notify_once(f"note: the chat template writes {day}")

    def __call__(self, value: str | Sequence[Message], tools: Tools | None = None) -> str:
        """Renders a prompt. With a chat template a text is one user message, a list of messages is used as it
        is, and the header of the assistant's turn follows. If the last message is the assistant's, the prompt
        ends with its content, which the policy continues. Raises BadRow if the value cannot be rendered."""
        if self.apply_chat_template:
            messages = as_messages(value)
            if all(map(is_blank, messages)):  # an environment may ask instead
                text = "note: a prompt is empty: the policy reads nothing but the chat template"
                notify_once(text, self.tokenizer)
            check_ends(messages, self.tokenizer)
            is_open = messages[-1]["role"] == "assistant"
            if is_open and not (join_text(messages[-1].get("content")) or "").strip():
                raise BadRow("the last message is the assistant's and has no text that an answer continues.")
            check_shown(messages, self.tokenizer, tools)
            return render_messages(
                messages, self.tokenizer, add_generation_prompt=not is_open, is_open=is_open, tools=tools
            )
        if not isinstance(value, str):
            raise BadRow(f"the prompt is {kind(value)}, not text. Messages need --data.apply_chat_template.")
        return value if self.input_template is None else self.input_template.format(value)


def as_messages(value: str | Sequence[Message], role: str = "user") -> list[Message]:
    """Returns a text as one message of `role`, or as the messages whose text it is; messages without keys
    that are null. Raises BadRow for invalid messages."""
    value = read_text(value)
    if isinstance(value, str):
        if _LOOKS_LIKE_MESSAGES.fullmatch(value.strip()) and isinstance(from_column(value), str):
            text = f"{shortened(value, 60)!r} looks like messages, but cannot be read as JSON."
            raise BadRow(f"{text}\nWrite the column with json.dumps.")
        return [{"role": role, "content": value}]
    if not value:
        raise BadRow("the list of messages is empty.")
    value = [with_role(message) for message in value]
    for i, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            form = '{"role": …, "content": …} or {"from": "human" or "gpt", "value": …}'
            raise BadRow(f"message {i} is not of the form {form}.")
        value[i - 1] = message = as_openai(message)
        if message["role"] not in ROLES:
            why = (
                "is neither the assistant's nor one that templates know: it is written as it is, not learned"
            )
            notify_once(f"note: the role {shortened(message['role'], 40)!r} of a message {why}")
        _check_content(message, i)
        if i > 1 and message["role"] == value[i - 2]["role"] == "assistant":
            raise BadRow(f"messages {i - 1} and {i} are answers in a row; join them, or remove one.")
        for name in WEIGHTS:
            if message.get(name) not in (None, 0, 1):
                raise BadRow(
                    f"message {i} has {name} {message[name]!r}; an answer is learned (1) or not (0)."
                )
        if mark := next((name for name in MASKS if message.get(name)), None):
            text = f'message {i} has {mark}, which is not read: mark whole answers by "weight", 1 or 0.'
            raise BadRow(text)
    return without_nulls(value)


_LOOKS_LIKE_MESSAGES = re.compile(r"""\[\s*\{\s*['"](role|content|from|value)['"]\s*:.*\]""", re.DOTALL)


def _check_content(message: Message, number: int) -> None:
    """Raises BadRow for a message without a content, for a content that is no text and no list of parts (of a
    tool it may be an object), and for a call without a name."""
    content, role = message.get("content"), message["role"]
    for call in message.get("tool_calls") or ():
        inner = call.get("function") if isinstance(call, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            text = f"a call of message {number} ({role}) is {shortened(str(call), 60)}, not of the form"
            raise BadRow(f'{text} {{"name": …, "arguments": …}}.')
    if content is None and not read_calls(message):
        raise BadRow(f"message {number} ({role}) has no content.")
    is_result = isinstance(content, dict) and role not in ("system", "developer", "user", "assistant")
    if not isinstance(content, str | list | None) and not is_result:
        raise BadRow(f"the content of message {number} ({role}) is {kind(content)}, not text.")
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            found = shortened(str(part), 60) if isinstance(part, dict) else kind(part)
            text = f"a part of message {number} ({role}) is {found}, not of the form"
            raise BadRow(f'{text} {{"type": "text", "text": …}}.')


def check_media(messages: Sequence[Message], *, has_images: bool) -> None:
    """Raises BadRow for a part with a picture, a video or sound that nothing reads: templates would write its
    placeholder alone. `has_images`: whether the parts {"type": "image"} get the row's images."""
    for i, message in enumerate(messages, start=1):
        content = message.get("content")
        kinds = [str(part.get("type")) for part in content] if isinstance(content, list) else []
        if wrong := [kind for kind in kinds if _MEDIA.match(kind) and not (has_images and kind == "image")]:
            place = f"message {i} ({message['role']})"
            remedy = 'Images are parts {"type": "image"} and need --data.max_images_per_prompt 1.'
            raise BadRow(f"{place} has a part of the type {wrong[0]}, which is not read here.\n{remedy}")


_MEDIA = re.compile(r"(input_)?(image|video|audio)")


def read_tools(row: Row, key: str | None) -> Tools | None:
    """Returns the tools in a column, a list of objects or of their texts, or its text; None without any.
    Raises BadRow for others."""
    value = None if key is None else from_column(row.get(key))
    if not value:
        return None
    tools = [decoded(tool) for tool in value] if isinstance(value, list) else [None]
    if not all(isinstance(tool, dict) for tool in tools):
        text = f"column {key!r} is no list of tools. If it is meant for others, add --data.tools_key None."
        raise BadRow(text)
    return without_nulls([as_function(tool) for tool in tools])


def joined(
    prompt: list[Message], answer: list[Message], prompt_key: str, answer_key: str, remedy: str
) -> list[Message]:
    """Joins the messages of two columns. Raises BadRow if the second begins with messages of the first, apart
    from white space, or with a system message, or if both are turns of the assistant."""
    plain = lambda content: content if (text := join_text(content)) is None else text
    squeezed = lambda m: (m["role"], "".join(str(plain(m.get("content"))).split()), read_calls(m))
    ours, theirs = [*map(squeezed, prompt)], [*map(squeezed, answer)]
    asked = [*takewhile(lambda said: said[0] != "assistant", theirs)]
    if any(said in ours for said in asked):
        raise BadRow(f"column {answer_key!r} already begins with the messages of {prompt_key!r};\n{remedy}")
    if any(said[0] == "system" for said in asked):
        raise BadRow(f"column {answer_key!r} has a system message behind those of {prompt_key!r};\n{remedy}")
    if ours[-1][0] == theirs[0][0] == "assistant":
        raise BadRow(f"columns {prompt_key!r} and {answer_key!r} have an answer each, in a row;\n{remedy}")
    return prompt + answer


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
    _note_special_token(messages, tokenizer)
    options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": is_open}
    text = _rendered(messages, tokenizer, tools, **options)
    return text if add_generation_prompt or is_open else text.removesuffix(ending(tokenizer)[1])


def _rendered(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools | None = None,
    **options: bool,
) -> str:
    check_cost(str(tokenizer.chat_template))
    talk = [thoughts_apart(message, tokenizer) for message in messages]
    if options.get("continue_final_message") and not talk[-1].get("content"):
        talk[-1] = messages[-1]  # nothing but thoughts, which would be followed by an answer
    try:
        text = render(tokenizer, talk, tools=tools, **options)
    except _REFUSALS as error:  # roles out of order, content that is not text, calls without an end
        raise BadRow(f"the chat template refuses the messages: {error}", ErrorCode.CHAT_TEMPLATE) from error
    if len(text) > MAX_TEXT:
        raise BadRow(f"the conversation has {len(text)} characters; at most {MAX_TEXT} can be tokenised.")
    if tools and not reads(tokenizer, str(tokenizer.chat_template)).tools:
        reason = "the chat template writes no tools, so the model does not read those of the rows"
        remedy = "Use a template that does (--data.tokenizer_chat_template)."
        notify_once(f"note: --data.tools_key: {reason}.\n{remedy}", str(tokenizer.chat_template))
    return text


_REFUSALS = (TemplateError, TypeError, ValueError, OverflowError, RecursionError, MemoryError)


@cache
def check_cost(template: str) -> None:
    """Renders a short conversation in a process with limits. Raises UsageError if it exceeds them."""
    trial = subprocess.run(  # bounded: the process limits its CPU time
        [sys.executable, "-X", "utf8", "-Pc", _TRIAL],
        input=template,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    error = trial.stderr.strip().rpartition("\n")[2]
    if trial.returncode < 0 or error.startswith(("MemoryError", "OverflowError", "RecursionError")):
        text = (
            "the template takes more than 3 seconds or 1 GiB for a short conversation.\n"
            f"{error} Give another one with --data.tokenizer_chat_template."
        )
        raise UsageError(ErrorCode.CHAT_TEMPLATE, text, flag="--data.apply_chat_template")


_TRIAL = r"""
import re, resource, sys
from jinja2.sandbox import ImmutableSandboxedEnvironment
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
resource.setrlimit(resource.RLIMIT_CPU, (3, 3))
text = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", sys.stdin.read())
made = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).from_string(text)
talk = [{"role": role, "content": "Hi."} for role in ("user", "assistant", "user")]
made.render(messages=talk, add_generation_prompt=True, bos_token="", eos_token="", strftime_now=str)
"""
"""Program that renders the template on stdin within 3 seconds and 1 GiB."""


def ending(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Returns what the chat template writes behind the last answer, see `_find_ending`."""
    return _find_ending(tokenizer, str(tokenizer.chat_template))


@cache
def _find_ending(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[str, str]:
    """Returns the end of the last answer's turn, and the header of another answer if the template writes one
    unasked. The end also stands between an answer and the header of a question. Raises UsageError if end and
    header cannot be told apart."""
    turns = zip(("user", "assistant", "user"), _MARKS, strict=True)
    talk = [{"role": role, "content": mark} for role, mark in turns]
    try:
        asked, answered, again = (_rendered(talk[:count], tokenizer) for count in (1, 2, 3))
    except BadRow:  # a template for other messages
        return "", ""
    before, after = asked.partition(_MARKS[0])[0], answered.partition(_MARKS[1])[2]
    between = again.partition(_MARKS[1])[2].partition(_MARKS[2])[0]
    header_of_question = [*takewhile(bool, map(eq, reversed(before), reversed(between)))]
    place = len(between) - len(header_of_question)
    tokens = _special_tokens(tokenizer).finditer(between)
    place = next((token.end() for token in tokens if token.start() < place < token.end()), place)
    end, header = after[:place], after[place:]
    if between.startswith(after) or not (
        between.startswith(end) and asked.endswith(header) and header.strip()
    ):
        return after, ""
    if not place and len(before) > len(between):
        text = (
            f"the template writes {after!r} behind the last answer, in which its end and another\nheader "
            "cannot be told apart. Use one that heeds add_generation_prompt (--data.tokenizer_chat_template)."
        )
        raise UsageError(ErrorCode.CHAT_TEMPLATE, text, flag="--data.apply_chat_template")
    return end, header


_MARKS = ("\u241f1\u241f", "\u241f2\u241f", "\u241f3\u241f")
"""Contents of messages, to find what a template writes around them."""


def check_ends(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises BadRow if an answer ends with the token that ends its turn, which the template writes too."""
    if not (end := ending(tokenizer)[0].strip()):
        return
    token = _special_tokens(tokenizer).match(end)
    ends = (token[0] if token else end, tokenizer.eos_token or end)
    answers = (join_text(m.get("content")) or "" for m in messages if m["role"] == "assistant")
    if wrong := next((answer for answer in answers if answer.rstrip().endswith(ends)), ""):
        text = f"the answer {shortened(wrong, 80)!r} ends itself, and the chat template ends it again."
        raise BadRow(f"{text}\nTake the end out of the row.", ErrorCode.CHAT_TEMPLATE)


@cache
def _note_missing_header(tokenizer: PreTrainedTokenizerBase) -> None:
    """Prints a note if the chat template begins answers with a header that it does not write behind a prompt,
    so that a policy must write the header itself. Templates without a header, such as Mistral's, write
    nothing in either place."""
    asked = [{"role": "user", "content": "?"}]
    answer = {"role": "assistant", "content": MARK}
    try:
        plain = render_messages(asked, tokenizer, add_generation_prompt=False)
        prompt = render_messages(asked, tokenizer, add_generation_prompt=True)
        whole = render_messages([*asked, answer], tokenizer, add_generation_prompt=False)
    except BadRow:  # a template for other messages
        return
    header = whole.removeprefix(prompt).partition(MARK)[0]
    if prompt == plain and whole.startswith(prompt) and header.strip():
        notify(
            f"note: the chat template of {tokenizer.name_or_path} writes {header!r} before an answer,\n"
            "but not at the end of a prompt (it ignores add_generation_prompt), so the policy has to write "
            "it.\nAnother template is given with --data.tokenizer_chat_template."
        )


_noted: WeakSet[PreTrainedTokenizerBase] = WeakSet()
"""Tokenizers about whose special tokens a note was printed."""


def _note_special_token(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> None:
    """Prints a note at the first message that contains a special token and is no answer of a model: the chat
    template writes the special tokens of a conversation itself."""
    for message in messages if tokenizer not in _noted else ():
        text = join_text(message.get("content"))
        if message["role"] != "assistant" and text and (found := _special_tokens(tokenizer).search(text)):
            _noted.add(tokenizer)
            place = text[max(0, found.start() - 40) : found.end() + 40]
            notify(
                f"note: a message of the role {message['role']} contains {found[0]}: {place!r}.\n"
                "The model reads it as a special token, beside those that the chat template writes. "
                "Prompts that are\nrendered already need no --data.apply_chat_template. Further messages "
                "are not reported."
            )
            return


@cache
def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    tokens = sorted({*tokenizer.all_special_tokens, *added} - {""}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")
