"""Converts a GGUF file of llama.cpp into a Hugging Face folder."""

from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

PRE_TOKENIZERS = {
    "default": None,
    "smollm": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
}
"""Pre-tokenizer of llama.cpp -> that of the tokenizers library; None: that of transformers' conversion, which
is right for it. Without `Digits` a space before a digit would be a token of its own."""


def convert(file: Path, folder: Path) -> None:
    """Writes weights in bf16, the type in which the models were published, configuration, generation
    configuration, tokenizer and chat template. The file's quantized weights are computed in float32 and
    rounded once."""
    place: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    config = AutoConfig.from_pretrained(**place, trust_remote_code=False)
    read = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32, trust_remote_code=False)
    weights = read.state_dict()
    with torch.device("meta"):  # a model that knows nothing of the file's format, without random weights
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    model.load_state_dict({name: weight.bfloat16() for name, weight in weights.items()}, assign=True)
    model.tie_weights()
    ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(**place, trust_remote_code=False)
    tokenizer.model_max_length = config.max_position_embeddings
    complete(tokenizer, GGUFReader(file))
    tokenizer.save_pretrained(folder)


def complete(tokenizer: Any, file: GGUFReader) -> None:
    """Adds what transformers' conversion leaves out: the pre-tokenizer, and the token that begins a text."""
    read = lambda key: field.contents() if (field := file.get_field(f"tokenizer.ggml.{key}")) else None
    if pre := PRE_TOKENIZERS[str(read("pre"))]:
        tokenizer.backend_tokenizer.pre_tokenizer = pre
    if read("add_bos_token"):
        bos = tokenizer.bos_token
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, tokenizer.bos_token_id)]
        )
