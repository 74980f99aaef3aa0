"""Builds a tokenizer of 368 tokens and a Qwen3 of a quarter of a million weights, without a download."""

from functools import cache
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from openrlhf.tasks.word_problem import make_problems, worked_problem

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_chat_model(folder: str | Path, *, seed: int = 0, vocab_size: int = 368, **shape: int) -> Path:
    """Writes an untrained model and its tokenizer for AutoModelForCausalLM and AutoTokenizer, and returns the
    folder. shape: as in `tiny_model`."""
    folder = Path(folder)
    tokenizer = tiny_tokenizer(vocab_size)
    tiny_model(tokenizer, seed=seed, **shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_tokenizer(vocab_size: int = 368) -> PreTrainedTokenizerFast:
    """Builds a byte-level BPE tokenizer trained on word problems, with one token per digit and a chat
    template. It is the same for every seed, so that models of different seeds can talk to each other."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained_tokenizer(vocab_size)),
        eos_token="<|end|>",
        pad_token="<|endoftext|>",
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


@cache
def _trained_tokenizer(vocab_size: int) -> str:
    """Trains the tokenizer and returns it as JSON, of which each caller makes a tokenizer of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex(r"\n"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(_WORDS),
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [worked_problem(problem) for problem in make_problems(1000, seed=0)]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=False) for word in _WORDS])
    return tokenizer.to_str()


def tiny_model(
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int = 0,
    hidden_size: int = 96,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    max_len: int = 512,
) -> Qwen3ForCausalLM:
    """Builds a model with untrained weights that depend on the seed alone; the global random state is
    unchanged."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=256 * hidden_size // 96,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=32,
        max_position_embeddings=max_len,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


_SPECIAL = ["<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
_WORDS = ["<think>", "</think>", "\\boxed{"]
