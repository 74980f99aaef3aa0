"""A Gemma 3 and a Gemma 4 of a hundred thousand weights that read images, with tokenizer and processor, made
on the spot. Tokens of an image see each other in both directions and stand between marks and newlines."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessor,
    Gemma3Processor,
    Gemma4AudioFeatureExtractor,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4ImageProcessor,
    Gemma4Processor,
    Gemma4VideoProcessor,
    PreTrainedTokenizerFast,
)

from openrlhf.tasks.tiny_model import tiny_tokenizer
from openrlhf.tasks.tiny_vision_model import CHAT_TEMPLATE, PLACEHOLDER

NEWLINES = ["\n" * count for count in range(1, 6)]
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
    "bos_token_id": None,
}
VISION = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
SIDE, PATCHES = 56, 4
"""Gemma 3's image size in pixels, and the number of tokens of an image."""


def tiny_gemma3(folder: str | Path) -> Path:
    folder = Path(folder)
    marks = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = _tokenizer(marks | {"eoi_token": "<end_of_image>"}, marks["boi_token"])
    ids = tokenizer.get_vocab()
    config = Gemma3Config(
        text_config={**TEXT, **_facts(tokenizer), "query_pre_attn_scalar": 32, "sliding_window": 16},
        vision_config={**VISION, "image_size": SIDE, "patch_size": SIDE // 4, "vision_use_head": False},
        mm_tokens_per_image=PATCHES,
        boi_token_index=ids[tokenizer.boi_token],
        eoi_token_index=ids[tokenizer.eoi_token],
        image_token_index=ids[tokenizer.image_token],
        tie_word_embeddings=True,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Gemma3ForConditionalGeneration(config)
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.05)
    model.save_pretrained(folder)
    # Names as published models have them and vLLM reads them.
    weights = load_file(folder / "model.safetensors")
    named = {name.replace("vision_tower.", "vision_tower.vision_model."): x for name, x in weights.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    Gemma3Processor(
        image_processor=Gemma3ImageProcessor(size={"height": SIDE, "width": SIDE}),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        image_seq_length=PATCHES,
    ).save_pretrained(folder)
    return folder


def tiny_gemma4(folder: str | Path) -> Path:
    """Makes a Gemma 4 with the architecture of its larger sizes, whose sliding-attention layers see images in
    both directions."""
    folder = Path(folder)
    marks = {"boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>"}
    audio = {"boa_token": "<|audio>", "audio_token": "<|audio|>", "eoa_token": "<audio|>"}
    tokenizer = _tokenizer(marks | audio | {"video_token": "<|video|>"}, marks["image_token"])
    ids, patches = tokenizer.get_vocab(), {"patch_size": 4, "max_soft_tokens": 70}
    config = Gemma4Config(
        text_config={
            **TEXT,
            **_facts(tokenizer),
            "global_head_dim": 32,
            "sliding_window": 128,
            "use_bidirectional_attention": "vision",
            "vocab_size_per_layer_input": len(tokenizer),
            "hidden_size_per_layer_input": 0,
        },
        vision_config={
            **VISION,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "patch_size": patches["patch_size"],
            "position_embedding_size": 64,
            # published configurations have the field, and vLLM reads it
            "default_output_length": patches["max_soft_tokens"],
            "initializer_range": 0.05,
        },
        boi_token_id=ids[tokenizer.boi_token],
        eoi_token_id=ids[tokenizer.eoi_token],
        image_token_id=ids[tokenizer.image_token],
        video_token_id=ids[tokenizer.video_token],
        boa_token_id=ids[tokenizer.boa_token],
        eoa_token_index=ids[tokenizer.eoa_token],
        audio_token_id=ids[tokenizer.audio_token],
        tie_word_embeddings=True,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Gemma4ForConditionalGeneration(config).save_pretrained(folder)
    Gemma4Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=Gemma4ImageProcessor(**patches),
        video_processor=Gemma4VideoProcessor(patch_size=patches["patch_size"]),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)
    return folder


def _tokenizer(marks: dict[str, str], placeholder: str) -> Any:
    base = tiny_tokenizer()
    base.add_tokens([AddedToken(text, normalized=False) for text in NEWLINES])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=base.backend_tokenizer,
        eos_token=base.eos_token,
        pad_token=base.pad_token,
        extra_special_tokens=marks,
    )
    # Gemma's own template also writes a newline before the words of a turn.
    template = CHAT_TEMPLATE.replace("}}|>", "}}|>\n", 1).replace("<|assistant|>", "<|assistant|>\n")
    tokenizer.chat_template = template.replace(PLACEHOLDER, placeholder)
    return tokenizer


def _facts(tokenizer: Any) -> dict[str, int]:
    return {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
