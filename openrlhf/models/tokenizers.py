"""Loads and compares tokenizers and processors."""

import os
from pathlib import Path
from typing import Any, cast

from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from openrlhf.data.image_rows import load_auto_processor
from openrlhf.errors import ErrorCode, UsageError, notify
from openrlhf.hub import model_folder
from openrlhf.models.configurations import load_config, loading

TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "merges.txt", "spiece*", "sentencepiece*")


def load_tokenizer(
    path: str, *, flag: str, use_fast: bool = True, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """Loads a tokenizer. If it has no pad token, the end-of-sequence token becomes the pad token. Raises
    UsageError if there is no tokenizer."""
    folder = Path(path)
    if os.path.isdir(folder) and not any(next(folder.glob(name), None) for name in TOKENIZER_FILES):
        # transformers would create an empty tokenizer
        text = "the folder has no tokenizer. Save one beside the model."
        raise UsageError(ErrorCode.INVALID_MODEL, text, flag=flag, value=path)
    with loading("tokenizer", path, flag):
        tokenizer = cast(
            Any, AutoTokenizer.from_pretrained(model_folder(path), use_fast=use_fast, trust_remote_code=False)
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def own_model(config: Any) -> tuple[str, str]:
    """Returns the flag, and the name or path, of the model that a command trains or queries: in RL, of the
    policy."""
    section = "actor" if hasattr(config, "actor") else "model"
    return f"--{section}.model_name_or_path", getattr(config, section).model_name_or_path


def load_run_tokenizer(config: Any) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of `own_model`, as `config.data` says."""
    flag, path = own_model(config)
    return load_tokenizer(
        path,
        flag=flag,
        use_fast=not config.data.disable_fast_tokenizer,
        chat_template=getattr(config.data, "tokenizer_chat_template", None),
    )


def policy_processor(config: Any) -> Any:
    """Returns the policy's tokenizer or, if prompts have images, its processor with that tokenizer."""
    tokenizer = load_run_tokenizer(config)
    if not config.reads_images:
        return tokenizer
    return processor_around(tokenizer, own_model(config)[1])


def saved_reader(tokenizer: PreTrainedTokenizerBase, path: str, *, images: bool) -> Any:
    """Returns what is saved beside a model that was made from the one at `path`: the tokenizer or, if the
    model reads images, even if no row has some, its processor with that tokenizer."""
    config, folder = load_config(path, ""), Path(model_folder(path))
    classes = (AutoModelForCausalLM, AutoModelForImageTextToText)
    of_text, of_images = (auto_class._model_mapping.get(type(config), None) for auto_class in classes)
    has_processor = not folder.is_dir() or any(folder.glob("*processor_config.json"))
    if images or (has_processor and of_text and of_text is of_images):
        return processor_around(tokenizer, path)
    return tokenizer


def processor_around(tokenizer: PreTrainedTokenizerBase, path: str) -> Any:
    """Loads the processor of a vision-language model and gives it this tokenizer and its chat template."""
    with loading("processor", path):
        processor = load_auto_processor(path)
    processor.tokenizer, processor.chat_template = tokenizer, tokenizer.chat_template
    return processor


def reads_tokens_like(own: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Returns True if all tokens of `other` have the same ids in `own`, which may have more tokens."""
    return other.get_vocab().items() <= own.get_vocab().items()


def check_same_vocabulary(
    own: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, flag: str, path: str
) -> None:
    """Raises UsageError unless both tokenizers have the same vocabulary."""
    if own.get_vocab() != other.get_vocab():
        text = (
            f"its vocabulary ({len(other)} tokens) is not that of {own.name_or_path} ({len(own)} tokens).\n"
            "Their probabilities cannot be compared token by token; choose a model of the same family."
        )
        raise UsageError(ErrorCode.INVALID_MODEL, text, flag=flag, value=path)


def missing_embeddings(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> dict[int, str]:
    """Returns the tokens, other than the pad token, for which the model has no embedding, by their ids. Some
    models have such tokens and never use them."""
    size = getattr(config.get_text_config(), "vocab_size", None)
    ids = {i: token for token, i in tokenizer.get_vocab().items() if i >= size} if size else {}
    ids.pop(tokenizer.pad_token_id, None)
    return ids


def note_missing_embeddings(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, path: str, flag: str
) -> None:
    """Prints a note on tokens without an embedding."""
    if ids := missing_embeddings(tokenizer, config):
        first, size = min(ids), config.get_text_config().vocab_size
        notify(
            f"note: {flag} {path}: its tokenizer has {len(tokenizer)} tokens, and the model embeds {size}: a "
            f"text with {ids[first]!r} (token {first}) is refused"
        )
