"""One row of 131,072 tokens, on two ranks that share it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as hf

TOKENS = 2**17


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_layers", "hidden_size", "length", "checkpointing"),
    [
        (4, 64, 512, False),
        (4, 64, 512, True),
        # With one sequence, attention must not hold the scores of all pairs of tokens, 64 GB for each head.
        (1, 16, TOKENS, False),
    ],
)
def test_a_row_needs_the_memory_that_was_said(
    tmp_path: Path,
    run_worker: Callable[..., list[dict]],
    num_layers: int,
    hidden_size: int,
    length: int,
    checkpointing: bool,
) -> None:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=320,
        hidden_size=hidden_size,
        intermediate_size=256,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        max_position_embeddings=TOKENS,
    )
    hf.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    reports = run_worker(
        "long_row",
        2,
        model=str(tmp_path / "model"),
        ds={"zero_stage": 2},
        checkpointing=checkpointing,
        lengths=[length] * (TOKENS // length),
    )
    for report in reports:
        assert 0.8 < report["needed"] / report["said"] < 1.25, report
