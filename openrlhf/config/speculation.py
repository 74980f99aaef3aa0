"""Parses `--vllm.speculative`, the configuration of speculative decoding in vLLM."""

import json
from typing import Any

SHORT_FORM = "METHOD:TOKENS, such as ngram:3"


def parse_speculation(text: str) -> dict[str, Any]:
    """Parses a JSON object (vLLM's `speculative_config`) or METHOD:TOKENS. Raises ValueError with a remedy
    for other texts, and for configurations that change the distribution of samples."""
    method, _, number = text.partition(":")
    if text.lstrip().startswith("{"):
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            problem = f"is not a JSON object ({error}); quote it for the shell, or write {SHORT_FORM}"
            raise ValueError(problem) from None
    elif method and number.isdecimal():
        config = {"method": method, "num_speculative_tokens": int(number)}
    else:
        raise ValueError(f"is neither a JSON object nor {SHORT_FORM}")
    if not config.keys() & {"method", "model"}:
        raise ValueError(f'names no "method" and no draft "model"; add one, or write {SHORT_FORM}')
    tokens = config.get("num_speculative_tokens")
    if tokens is not None and (type(tokens) is not int or tokens < 1):
        raise ValueError(
            f'"num_speculative_tokens" is {json.dumps(tokens)}; it must be an integer of at least 1'
        )
    if config.get("rejection_sample_method") == "synthetic":
        raise ValueError(
            '"rejection_sample_method": "synthetic" accepts tokens at random, so that samples do not follow '
            "the policy; remove it"
        )
    return config
