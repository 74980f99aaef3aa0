"""Tokens that end a response: those of the model's files, and the end of the chat template."""

import os
from types import NoneType
from typing import Any

from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
)

from openrlhf.data.encode import tokenize_text
from openrlhf.data.templates import ending
from openrlhf.errors import ErrorCode, UsageError, first_line, notify
from openrlhf.hub import model_folder
from openrlhf.models.tokenizers import own_model
from openrlhf.text import decode

GENERATION = "generation_config.json"


def stop_token_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns all tokens that end a response: the tokenizer's end-of-sequence token, and those in the
    generation config."""
    ids, path = {tokenizer.eos_token_id}, model_folder(path)
    if os.path.exists(os.path.join(path, GENERATION)) or not os.path.exists(path):
        try:
            found = GenerationConfig.from_pretrained(path).eos_token_id
        except (OSError, TypeError) as error:
            if os.path.exists(path):
                text = f"its {GENERATION} cannot be read: {first_line(error)}\nCorrect or remove it."
                raise UsageError(ErrorCode.INVALID_MODEL, text, value=path) from error
            found = None  # a hub model without a generation config
        more = found if isinstance(found, list) else [found]
        if any(type(token) not in (int, NoneType) for token in more):
            text = f"{GENERATION} has eos_token_id {found!r}. Write the number of the token there, or a list."
            raise UsageError(ErrorCode.INVALID_MODEL, text, value=path)
        ids.update(more)
    return sorted(ids - {None})


def template_end(config: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the tokens with which the chat template ends an answer; none if it is not used."""
    is_chat = getattr(config.data, "apply_chat_template", False) and tokenizer.chat_template
    return tokenize_text(ending(tokenizer)[0], tokenizer) if is_chat else []


def check_stops(config: Any, tokenizer: PreTrainedTokenizerBase, *, learns: bool = False) -> None:
    """Raises UsageError if no token ends a response of the run's model, or if the chat template ends an
    answer with another. `learns`: True if the model learns ends: the tokenizer's, or the template's, which
    then is an end token of the exported model."""
    flag, path = own_model(config)
    ids, end = stop_token_ids(path, tokenizer), template_end(config, tokenizer)
    if not ids or (learns and tokenizer.eos_token_id is None and not end):
        text = "no token ends a response. Set eos_token in the tokenizer_config.json of the model."
        raise UsageError(ErrorCode.INVALID_MODEL, text, flag=flag, value=path)
    if end and not learns and not set(end) & set(ids):
        text = (
            f"the chat template ends an answer with {decode(tokenizer, end)!r}, which has no stop token: "
            "answers would never end.\nAdd the token to eos_token_id in generation_config.json."
        )
        raise UsageError(ErrorCode.CHAT_TEMPLATE, text, flag="--data.apply_chat_template", value=path)


def log_stops(config: Any, tokenizer: PreTrainedTokenizerBase, *, learns: bool = False) -> None:
    """Prints the problem that `check_stops` finds, at the start of a run."""
    try:
        check_stops(config, tokenizer, learns=learns)
    except UsageError as problem:
        notify(f"warning: {problem}")
    if learns and (
        learned := set(trained_ends(config, tokenizer))
        - set(stop_token_ids(config.model.model_name_or_path, tokenizer))
    ):
        notify(
            f"note: answers end with {decode(tokenizer, [*learned])!r}, which becomes an end token in the "
            "generation_config.json of the trained model"
        )


def trained_ends(config: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the end tokens of a model that was trained on answers with their ends: those that it had, and
    the first token of the template's end."""
    ids, end = stop_token_ids(config.model.model_name_or_path, tokenizer), template_end(config, tokenizer)
    return ids if set(end) & set(ids) else [*ids, *end[:1]]
