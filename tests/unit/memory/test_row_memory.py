"""The predicted memory of a row, compared with what passes keep."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers as hf
from architectures import ALL, tiny_config
from counted_work import Work
from kept_memory import TOKENS, kept_bytes
from refusals import refused

from openrlhf.algorithms.logprobs import linear_log_probs, logits_bytes, sum_of_log_probs
from openrlhf.config.sections import DeepSpeedConfig
from openrlhf.config.supervised import TrainConfig
from openrlhf.errors import ErrorCode
from openrlhf.memory.rows import memory_of_rows, most_tokens
from openrlhf.memory.sizes import ModelShape
from openrlhf.memory.training import RankMemory, activations, layer_bytes, training_memory
from openrlhf.models.attention import PACKED

SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
CONFIGS = {
    "llama": hf.LlamaConfig(**SIZES),
    "qwen3": hf.Qwen3Config(**SIZES, head_dim=32),
    "mistral": hf.MistralConfig(**SIZES),
    "qwen2": hf.Qwen2Config(**SIZES),
}


def model_of(name: str, layers: int, dtype: torch.dtype) -> hf.PreTrainedModel:
    config = CONFIGS[name]
    config.num_hidden_layers = layers
    return hf.AutoModelForCausalLM.from_config(config, attn_implementation=PACKED).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_layer_keeps_of_a_token(name, dtype):
    one, three = (model_of(name, layers, dtype) for layers in (1, 3))
    found = (kept_bytes(three) - kept_bytes(one)) / 2 / TOKENS
    shape = shape_of(one.config)
    # The prediction leaves out a float32 number for each norm, and one for each head of attention.
    heads = one.config.num_attention_heads
    norms = 2 + (heads + one.config.num_key_value_heads if shape.normed_heads else 0)
    assert found == layer_bytes(shape, dtype.itemsize) + 4 * (norms + heads)


def shape_of(config: hf.PreTrainedConfig) -> ModelShape:
    normed = config.model_type == "qwen3"
    return ModelShape.of(config, weight_bytes=0, trainable=0, normed_heads=normed)


def test_experts_of_a_token_count_together():
    config = hf.Qwen3MoeConfig(**SIZES, **MOE)
    assert shape_of(config).intermediate == 2 * 96
    assert shape_of(hf.GPT2Config(n_embd=64)).intermediate == 4 * 64


def test_a_head_that_caps_its_logits_keeps_their_slope():
    assert shape_of(hf.Gemma2Config(**SIZES)).softcap
    assert not shape_of(hf.Gemma2Config(**SIZES, final_logit_softcapping=None)).softcap
    assert not shape_of(hf.Qwen2Config(**SIZES)).softcap


@pytest.mark.parametrize("name", ALL)
@pytest.mark.few(40)
def test_every_architecture_says_how_large_it_is(name: str) -> None:
    shape = shape_of(tiny_config(name))
    assert shape.layers >= 2 and shape.vocabulary == 61
    assert layer_bytes(shape, 4) > 12 * shape.hidden >= 12 * 32


SHAPE = ModelShape(
    weight_bytes=2 * 10**9,
    trainable=10**9,
    vocabulary=1000,
    layers=10,
    hidden=100,
    intermediate=300,
    queries=100,
    keys=50,
    normed_heads=False,
)
LAYER = 2 * 100 * 8 + 400 * 2 + 4 * 300 * 2
HEAD = 10**6 * 14 * 100 + (4 + 4 + 2) * 1000 * 100 + 2**28
H100 = 80 * 2**30
HEAD_ON_GPU = 10**6 * 14 * 100 + 4 * 1000 * 100 + 1.5 * H100 / 64
AGAIN = 10**6 * (3 * 300 * 2 + 4 * 100)


@pytest.mark.parametrize(
    ("flags", "checkpointing", "gpu", "expected"),
    [
        # (weights, gradients, optimizer, activations) of a rank of 4 with a million tokens
        ({"zero_stage": 0}, False, None, (2e9, 2e9, 12e9, 1e7 * LAYER + max(AGAIN, HEAD))),
        ({"zero_stage": 1}, False, None, (2e9, 2e9, 3e9, 1e7 * LAYER + max(AGAIN, HEAD))),
        ({"zero_stage": 2}, False, None, (2e9, 1e9 + 1e9, 3e9, 1e7 * LAYER + max(AGAIN, HEAD))),
        ({"zero_stage": 3}, True, None, (0.5e9 + 2e9, 2e9, 3e9, 1e7 * 200 + 1e6 * LAYER + AGAIN)),
        (
            {"zero_stage": 3, "bucket_mb": 100, "overlap_comm": True, "activation_offload": True},
            True,
            H100,
            (2.5e9, 1e9 + 2 * 100 * 2**20, 3e9, 1e6 * LAYER + AGAIN),
        ),
        ({"zero_stage": 1}, False, H100, (2e9, 2e9, 3e9, 1e7 * LAYER + HEAD_ON_GPU)),
        ({"zero_stage": 2, "adam_offload": True}, True, H100, (2e9, 2e9, 0, 1e7 * 200 + 1e6 * LAYER + AGAIN)),
    ],
)
def test_numbers_by_hand(flags: dict, checkpointing: bool, gpu: int | None, expected: tuple) -> None:
    ds = DeepSpeedConfig(param_dtype="bf16", **flags)
    found = training_memory(SHAPE, ds, "deepspeed", 10**6, checkpointing, ranks=4, gpu=gpu)
    passes = found.activations + found.logits + found.step
    assert (
        found.weights + found.gathered,
        found.gradients + found.buckets,
        found.optimizer,
        passes,
    ) == expected
    assert found.total == sum(expected)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("vocabulary", [32_000, 151_936])
@pytest.mark.parametrize("gpu", [8 * 2**30, H100])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_a_chunk_of_logits_on_a_gpu(gpu, vocabulary, dtype, softcap, with_entropy):
    """Counts on the meta device the memory of the head of a model without layers, by a GPU's rules."""
    tokens, hidden = 16_384, 2048
    sizes = dict.fromkeys(("weight_bytes", "trainable", "layers", "intermediate", "queries", "keys"), 0)
    shape = ModelShape(
        **sizes, vocabulary=vocabulary, hidden=hidden, normed_heads=False, softcap=softcap is not None
    )
    flags = DeepSpeedConfig(param_dtype=dtype)
    found = training_memory(shape, flags, "deepspeed", tokens, False, gpu=gpu, with_entropy=with_entropy)
    said = found.activations + found.logits
    options = {"device": "meta", "dtype": {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]}
    chunk, size = logits_bytes(gpu) // (4 * vocabulary), options["dtype"].itemsize
    both = lambda log_probs, entropy: log_probs.sum() + entropy.sum()
    ways = {
        False: (
            lambda *x: linear_log_probs(*x, chunk=chunk, softcap=softcap)[0].sum(),
            partial(sum_of_log_probs, chunk=chunk, softcap=softcap),
        ),
        True: (lambda *x: both(*linear_log_probs(*x, chunk=chunk, softcap=softcap, with_entropy=True)),),
    }
    for compute in ways[with_entropy]:
        states, weight = (torch.empty(n, hidden, **options, requires_grad=True) for n in (tokens, vocabulary))
        with Work() as work:
            compute(states, weight, torch.empty(tokens, dtype=torch.int64, device="meta")).backward()
        # Both sides leave out what is counted with the hidden states: their gradient, and a chunk's again.
        made = work.peak - tokens * hidden * size - chunk * hidden * size
        assert made == pytest.approx(said - tokens * hidden * (4 + 5 * size), rel=0.03)


def test_a_tied_head_has_two_gradients_and_their_sum() -> None:
    """As the backward pass ends, which is more than what a short row of a small model keeps."""
    tied = replace(SHAPE, vocabulary=10**6, trainable=10**9, tied=True)
    needed = lambda shape, size: activations(shape, 4, size, False, None, on_host=False)
    assert needed(tied, 4) == 3 * 4 * 10**6 * SHAPE.hidden
    untied = needed(replace(tied, tied=False), 4)
    assert needed(replace(tied, trainable=1000), 4) == untied < needed(tied, 4)  # adapters
    assert needed(tied, 2) == needed(replace(tied, tied=False), 2)  # float32 copies of head and gradient
    long = 10**6  # tokens whose activations exceed it
    assert activations(tied, long, 4, False, None, on_host=False) == activations(
        replace(tied, tied=False), long, 4, False, None, on_host=False
    )


def test_a_step_of_the_optimizer_may_need_more_than_a_short_row() -> None:
    found = training_memory(SHAPE, DeepSpeedConfig(), "deepspeed", 10, True, ranks=4, gpu=H100)
    assert found.activations + found.logits + found.step == 4 * 10**9 / 4
    assert str(found) == "7.5 GB (weights 1.9, gradients 1.9, optimizer 2.8, activations 0.9)"
    small = RankMemory(weights=2**20, gradients=0, optimizer=2**19, activations=0)
    assert str(small) == "1.5 MB (weights 1.0, gradients 0.0, optimizer 0.5, activations 0.0)"


def test_how_long_a_row_may_be() -> None:
    by_tokens = TrainConfig(dynamic_batch_enable=True, max_tokens_per_gpu=1000)
    assert most_tokens(by_tokens, 300, 2) == 2000
    assert most_tokens(by_tokens, 5000, 2) == 5000
    assert most_tokens(TrainConfig(micro_batch_size=4), 300, 2) == 1200
    few = TrainConfig(dynamic_batch_enable=True, max_tokens_per_gpu=1000, batch_size=2)
    assert most_tokens(few, 300, 1) == 600  # all sequences of a step


@pytest.mark.parametrize(
    ("train", "longest", "sharing", "flag", "fitting"),
    [
        ({"dynamic_batch_enable": True, "max_tokens_per_gpu": 16192}, 300, 1, "max_tokens_per_gpu", 900),
        ({"dynamic_batch_enable": True, "max_tokens_per_gpu": 16192}, 300, 2, "max_tokens_per_gpu", 450),
        ({"dynamic_batch_enable": True, "max_tokens_per_gpu": 16192}, 901, 1, "max_tokens_per_gpu", None),
        ({"micro_batch_size": 8}, 300, 1, "micro_batch_size", 3),
        ({"micro_batch_size": 8}, 301, 1, "micro_batch_size", 2),
        ({"micro_batch_size": 8}, 901, 1, "micro_batch_size", None),
    ],
)
def test_rows_that_exceed_the_memory_are_refused_with_what_fits(train, longest, sharing, flag, fitting):
    """Weights of 100 bytes and one byte a token, on a device of 1,000 bytes: rows of 900 tokens fit."""
    estimate = lambda tokens: RankMemory(weights=100, gradients=0, optimizer=0, activations=tokens)
    config = TrainConfig(**train)
    with refused(ErrorCode.RESOURCES, flag=f"--train.{flag}", value=getattr(config, flag)) as refusal:
        memory_of_rows(estimate, config, longest, sharing, 1000)
    remedy = refusal.value.text.partition("\n")[2]
    assert remedy.startswith("Even a row") if fitting is None else remedy == f"Use --train.{flag} {fitting}."
    if fitting:
        fits = replace(config, **{flag: fitting})
        assert "tokens" in memory_of_rows(estimate, fits, longest, sharing, 1000)
