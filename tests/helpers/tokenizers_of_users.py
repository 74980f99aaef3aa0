"""Tokenizers of other families than the tiny model's, made on the spot."""

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


def llama_2_style() -> PreTrainedTokenizerFast:
    """Makes a tokenizer whose words carry the space before them, and whose decoder drops the one before the
    first word; unknown characters become bytes. Llama 2, Mistral, Phi 3 and TinyLlama have such
    tokenizers."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    trainer = trainers.BpeTrainer(
        vocab_size=150, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    backend.train_from_iterator(["Question: 2 + 2 = ? Answer: the answer is 4"] * 20, trainer)
    state = json.loads(backend.to_str())
    vocabulary = state["model"]["vocab"]
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    state["model"]["byte_fallback"] = True
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        eos_token="</s>",
        bos_token="<s>",
        unk_token="<unk>",
    )


def word_pieces() -> PreTrainedTokenizerFast:
    """Makes a tokenizer whose `decode` cleans up: it takes the space before punctuation away."""
    words = ["[UNK]", "[EOS]", "x", "=", "3", ",", "y", "4", ".", "[", "]"]
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="[EOS]", unk_token="[UNK]", clean_up_tokenization_spaces=True
    )
