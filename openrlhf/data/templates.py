"""Renders rows as text with chat templates and input templates."""

from collections.abc import Sequence
from typing import Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from openrlhf.data.bad_rows import BadRow
from openrlhf.data.files import kind

Message = dict[str, Any]


def check_templates(
    tokenizer: PreTrainedTokenizerBase, *, apply_chat_template: bool, input_template: str | None
) -> None:
    """Raises ValueError when the tokenizer lacks the requested chat template, or `input_template` does not
    hold exactly one `{}`."""
    if apply_chat_template and not tokenizer.chat_template:
        raise ValueError(
            f"--data.apply_chat_template: the tokenizer of {tokenizer.name_or_path} has no chat template.\n"
            "Give one with --data.tokenizer_chat_template, or use --data.input_template instead."
        )
    if input_template is not None:
        try:
            has_place = input_template.format("\0").count("\0") == 1
        except (IndexError, KeyError, ValueError):
            has_place = False
        if not has_place:
            raise ValueError(
                f"--data.input_template {input_template!r}: it must hold one {{}}, where the prompt goes.\n"
                "Write braces that are meant as such twice: \\boxed{{}}."
            )


def render_prompt(
    value: str | Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    apply_chat_template: bool,
    input_template: str | None,
) -> str:
    """Returns the prompt as the policy reads it, to be tokenised by `prompt_token_ids`.

    With a chat template a text is one user message, a list of messages is used as it is, and the header of
    the assistant's turn follows. Without, the text is put into `input_template`. Raises BadRow where the
    value cannot be rendered.
    """
    if apply_chat_template:
        return render_messages(as_messages(value), tokenizer, add_generation_prompt=True)
    if not isinstance(value, str):
        raise BadRow(f"the prompt is {kind(value)}, not text. Messages need --data.apply_chat_template.")
    return value if input_template is None else input_template.format(value)


def as_messages(value: str | Sequence[Message], role: str = "user") -> list[Message]:
    """Returns a text as one message of `role`, and messages unchanged. Raises BadRow for invalid messages."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not value:
        raise BadRow("the list of messages is empty.")
    for i, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRow(f'message {i} is not of the form {{"role": …, "content": …}}.')
        if message.get("content") is None and not message.get("tool_calls"):
            raise BadRow(f"message {i} ({message['role']}) has no content.")
    return list(value)


def render_messages(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_generation_prompt: bool,
    is_open: bool = False,
) -> str:
    """Applies the chat template. `is_open`: the text ends with the last message's content, so its turn can go
    on. Raises BadRow where the template refuses the messages."""
    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=is_open,
        )
    except (TemplateError, TypeError, ValueError) as error:  # roles out of order, content that is not text
        raise BadRow(f"the chat template refuses the messages: {error}") from error
    return cast(str, text)  # tokenize=False
