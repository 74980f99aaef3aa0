"""Tokenizers with the chat templates of five families of models.

tests/data/templates holds templates that render what those of the models do, without their tools.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Split of a text as in today's byte-level tokenizers: a full stop takes the line breaks behind it."""
CORPUS = ["Hello there.\n\nuser assistant system model Hi. No.\n\n", "   "] * 50


@dataclass(frozen=True)
class Model:
    eos: str
    turn: tuple[str, ...]
    """Special tokens around a turn."""
    bos: str | None = None


MODELS = {
    "llama3.1": Model(
        eos="<|eot_id|>", turn=("<|start_header_id|>", "<|end_header_id|>"), bos="<|begin_of_text|>"
    ),
    "qwen2.5": Model(eos="<|im_end|>", turn=("<|im_start|>",)),
    "qwen3": Model(eos="<|im_end|>", turn=("<|im_start|>", "<think>", "</think>")),
    "gemma2": Model(eos="<eos>", turn=("<start_of_turn>", "<end_of_turn>"), bos="<bos>"),
    "gemma3": Model(eos="<eos>", turn=("<start_of_turn>", "<end_of_turn>"), bos="<bos>"),
    "mistral-v0.3": Model(eos="</s>", turn=("[INST]", "[/INST]"), bos="<s>"),
}
ALL = pytest.mark.parametrize("name", MODELS)


@cache
def tokenizer_of(name):
    """Makes a small byte-level tokenizer with the special tokens and the template of the model. It adds the
    beginning of the text itself, as the models' tokenizers do."""
    model = MODELS[name]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token in (model.bos, model.eos, *model.turn) if token]
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if model.bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{model.bos} $A", special_tokens=[(model.bos, tokenizer.token_to_id(model.bos))]
        )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=model.bos, eos_token=model.eos)
    wrapped.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    return wrapped
