"""Builds a Qwen2.5-VL of half a million weights, its tokenizer and its processor, without a download."""

from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from openrlhf.tasks.picture import COLOURS, QUESTION, SQUARE
from openrlhf.tasks.tiny_model import tiny_tokenizer

IMAGE_TOKEN, VIDEO_TOKEN = "<|image_pad|>", "<|video_pad|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
PLACEHOLDER = f"{VISION_START}{IMAGE_TOKEN}{VISION_END}"
"""Text of an image in the chat template."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + PLACEHOLDER + "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_vision_model(folder: str | Path, *, seed: int = 0, max_len: int = 512) -> Path:
    """Writes an untrained model, its tokenizer and its processor for AutoModelForImageTextToText,
    AutoTokenizer and AutoProcessor, and returns the folder."""
    folder = Path(folder)
    tokenizer = tiny_vision_tokenizer()
    tiny_vision_weights(tokenizer, seed=seed, max_len=max_len).save_pretrained(folder)
    tiny_processor(tokenizer).save_pretrained(folder)
    return folder


def tiny_vision_tokenizer() -> PreTrainedTokenizerFast:
    """Builds the tiny model's tokenizer with tokens for images and colours, and a chat template that writes
    images."""
    base = tiny_tokenizer()
    base.add_tokens([AddedToken(word, normalized=False) for word in _WORDS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=base.backend_tokenizer,
        eos_token=base.eos_token,
        pad_token=base.pad_token,
        extra_special_tokens={
            "image_token": IMAGE_TOKEN,
            "video_token": VIDEO_TOKEN,
            "vision_start_token": VISION_START,
            "vision_end_token": VISION_END,
        },
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_processor(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLProcessor:
    """Builds a processor that makes each square of a picture one token; images have 4 to 64 tokens."""
    pixels = {"shortest_edge": 4 * SQUARE**2, "longest_edge": 64 * SQUARE**2}
    patches = {"patch_size": SQUARE // 2, "merge_size": 2, "temporal_patch_size": 2, "size": pixels}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**patches),
        video_processor=Qwen2VLVideoProcessor(**patches),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )


def tiny_vision_weights(
    tokenizer: PreTrainedTokenizerFast, *, seed: int = 0, max_len: int = 512
) -> Qwen2_5_VLForConditionalGeneration:
    """Builds a model with untrained weights that depend on the seed alone; the global random state is
    unchanged."""
    id_of = tokenizer.get_vocab()
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": max_len,
            "initializer_range": 0.05,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10.0,
                "mrope_section": [4, 6, 6],
            },
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 128,
            "patch_size": SQUARE // 2,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 4 * SQUARE,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.05,
        },
        image_token_id=id_of[IMAGE_TOKEN],
        video_token_id=id_of[VIDEO_TOKEN],
        vision_start_token_id=id_of[VISION_START],
        vision_end_token_id=id_of[VISION_END],
        tie_word_embeddings=True,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2_5_VLForConditionalGeneration(config)


_WORDS = [QUESTION, *COLOURS, *(f" {colour}" for colour in COLOURS)]
