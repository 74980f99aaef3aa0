"""Samples as text, for golden tests."""

from itertools import groupby


def marked(sample, tokenizer):
    """Decodes a sample, with each stretch of learned tokens in ⟦brackets⟧. Every token must decode to whole
    characters."""
    tokens = zip(sample.token_ids.tolist(), sample.action_mask.tolist(), strict=True)
    parts = []
    for learned, group in groupby(tokens, key=lambda token: token[1]):
        text = "".join(tokenizer.decode([token_id]) for token_id, _ in group)
        parts.append(f"⟦{text}⟧" if learned else text)
    return "".join(parts)
