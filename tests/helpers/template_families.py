"""Tokenizers with the chat templates that TRL carries, of the families of models that people train.

The templates are read from the installed package. The tokenizers have a token for each byte and one for each
special token that a template writes, so a text has the same tokens wherever it is cut."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
_SPECIAL = re.compile(
    r"<\|[^|<>\s]+\|>|<｜[^｜<>\n]+｜>|<\|\w+>|<\w+\|>|\[/?[A-Z_]{4,}\]"
    r"|</?(?:s|bos|eos|think|tool_call|tool_response|arg_key|arg_value|start_of_turn|end_of_turn|end_of_utterance)>"
)


@dataclass(frozen=True)
class Family:
    eos: str
    bos: str | None = None


OTHERS = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "[gMASK]", "<sop>", "<|eom_id|>", "<|python_tag|>")
OTHERS += ("<tool_response>", "</tool_response>", "<think>", "</think>", "<|vision_start|>", "<|image_pad|>")
"""Special tokens of the models that their templates do not write, and `renderers` asks for."""

FAMILIES = {
    "cohere": Family("<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>"),
    "cohere2": Family("<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>"),
    "deepseek_r1_distill": Family("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),
    "deepseekv3": Family("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),
    "gemma": Family("<eos>", "<bos>"),
    "gemma3": Family("<eos>", "<bos>"),
    "gemma4_v5": Family("<turn|>", "<bos>"),
    "glm4moe": Family("<|endoftext|>"),
    "gptoss": Family("<|return|>"),
    "idefics3": Family("<end_of_utterance>", "<|begin_of_text|>"),
    "lfm2_2_5": Family("<|im_end|>", "<|startoftext|>"),
    "llama3": Family("<|eot_id|>", "<|begin_of_text|>"),
    "llama3_1": Family("<|eot_id|>", "<|begin_of_text|>"),
    "llama3_2": Family("<|eot_id|>", "<|begin_of_text|>"),
    "llava_next": Family("</s>", "<s>"),
    "muse_glimmer": Family("<|eot|>"),
    "nemotron_3_ultra": Family("<|im_end|>", "<s>"),
    "phi3": Family("<|endoftext|>"),
    "phi3_5": Family("<|endoftext|>"),
    "qwen2_5": Family("<|im_end|>"),
    "qwen2_5_vl": Family("<|im_end|>"),
    "qwen3": Family("<|im_end|>"),
    "qwen3_instruct_2507": Family("<|im_end|>"),
    "qwen3_vl": Family("<|im_end|>"),
    "qwen3_5_think": Family("<|im_end|>"),
    "qwen3_6": Family("<|im_end|>"),
    "qwen3_8": Family("<|im_end|>"),
    "smolvlm": Family("<end_of_utterance>", "<|im_start|>"),
}


def template_of(name):
    return (TEMPLATES / f"{name}.jinja").read_text()


@cache
def tokenizer_of(name, template=None):
    """Makes the tokenizer of a family; `template`: another one than its own."""
    family, text = FAMILIES[name], template or template_of(name)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=family.eos, bos_token=family.bos)
    special = {*_SPECIAL.findall(text), *OTHERS, family.eos, *filter(None, [family.bos])}
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in sorted(special)])
    tokenizer.chat_template = text
    return tokenizer
