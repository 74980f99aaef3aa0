"""Every kind of RoPE that extends a model's context length, in rows of long and short sequences; frequencies
that transformers chooses by the longest position of a row are compared with fixed ones."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from records import sequence
from torch import Tensor

from openrlhf.models.attention import PACKED
from openrlhf.models.backbone import get_row_layout
from openrlhf.models.configurations import find_max_length
from openrlhf.models.dropout import enable_checkpointing
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.models.rope import fix_frequencies
from openrlhf.models.sequence_parallel import SequenceParallel
from openrlhf.rows import PackedRow, Sample
from openrlhf.tools.reference.outputs import plain_log_probs
from openrlhf.types import not_none

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ORIGINAL = 32
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 4.0, 8.0, 16.0],
    "original_max_position_embeddings": ORIGINAL,
    "factor": 4.0,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
MODELS = {
    "phi3, longrope": hf.Phi3Config(
        **SHAPE, max_position_embeddings=128, original_max_position_embeddings=ORIGINAL, rope_parameters=LONG
    ),
    "llama, dynamic": hf.LlamaConfig(**SHAPE, max_position_embeddings=ORIGINAL, rope_parameters=DYNAMIC),
    "gemma3, dynamic": hf.Gemma3TextConfig(
        **SHAPE,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=16,
        max_position_embeddings=ORIGINAL,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": DYNAMIC,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}
MAX_LEN = 96


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("model")
    hf.AutoModelForCausalLM.from_config(MODELS[request.param]).save_pretrained(made)
    return made


def sample(length: int) -> Sample:
    ids = torch.randint(3, 61, (length,), generator=torch.Generator().manual_seed(length))
    return sequence(ids)


def log_probs(policy: PolicyModel, *samples: Sample) -> torch.Tensor:
    with torch.no_grad():
        return policy(PackedRow.of(samples)).log_probs


def transformers_log_probs(folder: Path, one: Sample) -> torch.Tensor:
    model = hf.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        return plain_log_probs(model, one)


def policy_of(folder: Path, max_len: int | None) -> PolicyModel:
    path = str(folder)
    return PolicyModel(
        load_causal_lm(path, flag="--m", dtype="fp32", attention="auto", max_len=max_len)
    ).eval()


@pytest.mark.parametrize("max_len", [None, ORIGINAL, MAX_LEN])
def test_a_neighbour_changes_nothing(folder, max_len):
    policy, short, long = policy_of(folder, max_len), sample(20), sample(60)
    alone = log_probs(policy, short)
    torch.testing.assert_close(log_probs(policy, short, long)[:19], alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(log_probs(policy, short), alone, atol=0, rtol=0)


def test_frequencies_are_those_of_the_longest_sequence(folder):
    longest, short = sample(MAX_LEN), sample(20)
    expected = transformers_log_probs(folder, longest)
    torch.testing.assert_close(log_probs(policy_of(folder, MAX_LEN), longest), expected, atol=1e-4, rtol=1e-4)
    expected = transformers_log_probs(folder, short)
    torch.testing.assert_close(log_probs(policy_of(folder, 20), short), expected, atol=1e-4, rtol=1e-4)
    changed = log_probs(policy_of(folder, MAX_LEN), short) - expected
    assert changed.abs().max() > 0.01, "a hundred tolerances"


# ---- gradients too, of every kind and on ranks that share the row


STRETCHED = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL, "rope_theta": 1e4}
KINDS = {
    "linear": STRETCHED,
    "yarn": STRETCHED,
    "llama3": STRETCHED | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "dynamic": DYNAMIC,
    "longrope": LONG,
}
LENGTHS = (20, 90, 7, 60)
"""Lengths of the sequences. The second and the last exceed ORIGINAL. Slices of 2 ranks end in the second, of
3 also in the last."""
ROUNDING = len(LENGTHS) * MAX_LEN * 2**-24
"""Share of the largest gradient that rounding may change: cosines and sines are float32, and a gradient has a
term for each token."""


def stretched(kind: str) -> PolicyModel:
    """Returns a policy with this kind of RoPE, in float64 except for the angles."""
    positions = ORIGINAL if kind == "dynamic" else 4 * ORIGINAL
    rope = KINDS[kind] | {"rope_type": kind}
    config = hf.LlamaConfig(**SHAPE, max_position_embeddings=positions, rope_parameters=rope)
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation=PACKED).double()
    fix_frequencies(model, MAX_LEN)
    return PolicyModel(model)


def weights_of(num_tokens: int) -> Tensor:
    return torch.linspace(-1, 1, num_tokens).double()


def of_packed_row(policy: PolicyModel) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns log-probs, and gradients of a sum of them, averaged over ranks as DeepSpeed does."""
    found = policy(PackedRow.of([sample(length) for length in LENGTHS])).log_probs
    (weights_of(len(found)) * found).sum().backward()
    gradients = {name: not_none(p.grad) for name, p in policy.named_parameters()}
    if dist.is_initialized():
        for gradient in gradients.values():
            dist.all_reduce(gradient, dist.ReduceOp.AVG)
    return found.detach(), gradients


def one_by_one(kind: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes the same by transformers' own forward of each sequence, padded to MAX_LEN tokens: its angles
    are those of that length, and a causal model does not see the padding."""
    policy = stretched(kind)
    config = copy.deepcopy(policy.model.config)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()
    model.load_state_dict(policy.model.state_dict())
    padded = lambda ids: sequence(torch.cat([ids, torch.full((MAX_LEN - len(ids),), 5)]))
    found = [plain_log_probs(model, padded(sample(n).token_ids))[: n - 1] for n in LENGTHS]
    log_probs = torch.cat(found)
    (weights_of(len(log_probs)) * log_probs).sum().backward()
    return log_probs.detach(), {f"model.{n}": not_none(p.grad) for n, p in model.named_parameters()}


def check_equal(found: tuple, expected: tuple) -> None:
    torch.testing.assert_close(found[0], expected[0], atol=ROUNDING, rtol=0)
    largest = max(float(g.abs().max()) for g in expected[1].values())
    torch.testing.assert_close(found[1], expected[1], atol=ROUNDING * largest, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_with_long_sequences_is_what_transformers_makes_of_each(kind: str) -> None:
    check_equal(of_packed_row(stretched(kind)), one_by_one(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_angles_differ_from_those_of_a_model_that_is_not_stretched(kind: str) -> None:
    policy, row = stretched(kind).eval(), PackedRow.of([sample(90)])
    rotary = policy.model.model.rotary_emb
    plain = 1 / 1e4 ** (torch.arange(0, 8, 2) / 8)
    before = policy(row).log_probs
    rotary.inv_freq = plain
    assert (policy(row).log_probs - before).abs().max() > 100 * ROUNDING


@pytest.mark.parametrize(("num_ranks", "mode"), [(2, "ulysses"), (3, "allgather")])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(5)
def test_slices_have_the_angles_of_their_sequence(threads, kind, num_ranks, mode):
    policy = stretched(kind)
    enable_checkpointing(policy.model, reentrant=False, dropout=True)
    policy.train()

    def of_rank() -> tuple[Tensor, dict[str, Tensor]]:
        own = copy.deepcopy(policy)
        get_row_layout(own.model).sharing = SequenceParallel(group=not_none(dist.group.WORLD), mode=mode)
        return of_packed_row(own)

    expected = of_packed_row(stretched(kind))
    for found in threads(num_ranks, of_rank):
        check_equal(found, expected)


# ---- how far


def yarn(factor: float) -> dict:
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 100}


@pytest.mark.parametrize(
    ("config", "room"),
    [
        (hf.GPT2Config(n_positions=128), 128),
        (hf.BloomConfig(), None),  # a bias by distance, without a table of positions
        (hf.LlamaConfig(max_position_embeddings=128), 128),
        (hf.LlamaConfig(max_position_embeddings=128, rope_parameters=DYNAMIC), 512),
        (hf.LlamaConfig(max_position_embeddings=128, rope_parameters=DYNAMIC | {"rope_type": "linear"}), 512),
        (hf.Qwen3Config(max_position_embeddings=128, rope_parameters=yarn(4.0)), 400),
        (hf.Qwen3Config(max_position_embeddings=400, rope_parameters=yarn(4.0)), 400),
        (MODELS["phi3, longrope"], 128),
        (hf.Gemma3TextConfig(max_position_embeddings=128), 128),
        (hf.Gemma3Config(text_config=hf.Gemma3TextConfig(max_position_embeddings=128)), 128),
    ],
)
def test_how_long_a_sequence_a_model_reads(config: hf.PreTrainedConfig, room: int | None) -> None:
    assert find_max_length(config) == room
