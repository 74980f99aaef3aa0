"""Packed rows equal transformers' own forward of one sequence at a time."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as hf
from refusals import refused
from torch import Tensor

from openrlhf.errors import ErrorCode, UsageError
from openrlhf.models import loading
from openrlhf.models.attention import PACKED, CannotPack, resolve_attention
from openrlhf.models.loading import load_causal_lm, load_generator
from openrlhf.models.policy import PolicyModel, head_options
from openrlhf.models.process_reward import ProcessRewardModel
from openrlhf.models.scorer import ScoreModel, load_scorer
from openrlhf.rows import PackedRow, Sample
from openrlhf.tools.reference.outputs import plain_log_probs, plain_logits

LENGTHS = (5, 23, 2, 11, 17)
IMPLEMENTATIONS = ("auto", "sdpa", "eager")
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ROUNDING = 3 * 32 * 2**-24 * 32 * 0.3 / 0.6
"""Tolerance of 1e-4: a logit is a sum of H products of hidden states (of norm sqrt(H)) and weights (of norm
0.3 sqrt(H)), which in float32 errs by up to H 2^-24 |a| |b|, over the temperature; two layers err likewise. A
mistake is a hundred times as large (`test_the_reference_sees_what_could_go_wrong`)."""
NO_HEAD_DIM = {name: value for name, value in SHAPE.items() if name != "head_dim"}
CAPPED = {"sliding_window": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0}
MODELS = {
    "qwen3, tied": hf.Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "llama, untied": hf.LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "mistral, window of 8": hf.MistralConfig(**SHAPE, sliding_window=8, tie_word_embeddings=False),
    "gemma2, capped logits": hf.Gemma2Config(**SHAPE, **CAPPED, attn_logit_softcapping=None),
    "granite, divided logits": hf.GraniteConfig(**NO_HEAD_DIM, logits_scaling=3.0),
    "cohere, multiplied logits": hf.CohereConfig(**NO_HEAD_DIM, logit_scale=0.4),
    "gemma2, capped attention": hf.Gemma2Config(**SHAPE, **CAPPED, attn_logit_softcapping=1.5),
    "gpt-oss, sinks": hf.GptOssConfig(**SHAPE, sliding_window=8, num_local_experts=4, num_experts_per_tok=2),
}
WITH_SCORES_OF_THEIR_OWN = ("gemma2, capped attention", "gpt-oss, sinks")
RIGHT = [
    (name, attention)
    for name in MODELS
    for attention in IMPLEMENTATIONS
    if attention == "auto" or name not in WITH_SCORES_OF_THEIR_OWN
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Writes a folder with random weights for each model."""
    made = {}
    for i, (name, config) in enumerate(MODELS.items()):
        torch.manual_seed(i)
        made[name] = tmp_path_factory.mktemp(f"model{i}")
        hf.AutoModelForCausalLM.from_config(copy.deepcopy(config)).save_pretrained(made[name])
    return made


def policy_of(folder: Path, attention: str = "auto") -> PolicyModel:
    return PolicyModel(load_causal_lm(str(folder), flag="--model", dtype="fp32", attention=attention))


def scorer_of(folder: Path) -> ScoreModel:
    return load_scorer(str(folder), flag="--model", dtype="fp32", attention="auto")


def plain_model(folder: Path) -> hf.PreTrainedModel:
    return hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    random = torch.Generator().manual_seed(3)
    made = []
    for length in LENGTHS:
        mask = torch.rand(length, generator=random) < 0.6
        mask[0], mask[-1] = False, True
        ids = torch.randint(3, SHAPE["vocab_size"], (length,), generator=random)
        made.append(Sample(token_ids=ids, action_mask=mask))
    return made


def one_by_one(model: hf.PreTrainedModel, samples: list[Sample], temperature: float) -> tuple[Tensor, ...]:
    """Returns log-probs and entropy of all actions."""
    found = [plain_log_probs(model, sample, temperature, entropy=True) for sample in samples]
    return torch.cat(found).unbind(1)


@pytest.mark.parametrize(("name", "attention"), RIGHT)
@pytest.mark.few(8)
def test_packed_equals_one_by_one(folders, samples, name, attention):
    plain, policy = plain_model(folders[name]), policy_of(folders[name], attention)
    for temperature in (1.0, 0.6):
        with torch.no_grad():
            expected = one_by_one(plain, samples, temperature)
            found = policy(PackedRow.of(samples), temperature=temperature, with_entropy=True)
        torch.testing.assert_close(found.log_probs, expected[0], atol=ROUNDING, rtol=0)
        torch.testing.assert_close(found.entropy, expected[1], atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_judges_do_not_round_their_logits(folders, samples, name):
    """In half precision the logits of a judge are those of its head in float64, up to float32 sums."""
    model = load_causal_lm(str(folders[name]), flag="--model", dtype="bf16", attention="auto")
    judge, read = ProcessRewardModel(model), []
    model.get_output_embeddings().register_forward_pre_hook(lambda head, args: read.append(args[0]))
    with torch.no_grad():
        logits = judge(PackedRow.of(samples))
    scale, softcap = head_options(model.config)
    exact = read[0].double() @ model.get_output_embeddings().weight.double().t() * scale
    exact = exact if softcap is None else softcap * torch.tanh(exact / softcap)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, atol=1e-5, rtol=1e-5)
    assert (exact.bfloat16().double() - exact).abs().max() > 1e-3


def test_the_reference_sees_what_could_go_wrong(folders, samples):
    """A leak over a border, a forgotten window, cap or scale: each moves log-probs by more than 100
    tolerances."""
    glued = Sample(
        token_ids=torch.cat([s.token_ids for s in samples]),
        action_mask=torch.cat([s.action_mask for s in samples]),
    )
    changes = {
        "qwen3, tied": {},
        "mistral, window of 8": {"sliding_window": None},
        "gemma2, capped logits": {"final_logit_softcapping": None},
        "granite, divided logits": {"logits_scaling": 1.0},
        "cohere, multiplied logits": {"logit_scale": 1.0},
        "gemma2, capped attention": {"attn_logit_softcapping": None},
    }
    for name, change in changes.items():
        right = plain_model(folders[name])
        wrong = hf.AutoModelForCausalLM.from_pretrained(
            folders[name], dtype=torch.float32, attn_implementation="eager", **change
        )
        with torch.no_grad():
            expected, _ = one_by_one(right, samples, 1.0)
            found, _ = one_by_one(wrong, samples if change else [glued], 1.0)
        assert (found - expected).abs().max() > 100 * ROUNDING, name


def test_sdpa_would_leave_out_a_cap(folders):
    with refused(ErrorCode.UNSUPPORTED, flag="--ds.attn_implementation", value="sdpa"):
        policy_of(folders["gemma2, capped attention"], "sdpa")


def test_entropy_only_where_it_is_asked_for(folders, samples):
    assert policy_of(folders["llama, untied"])(PackedRow.of(samples)).entropy is None


def test_an_action_with_a_recorded_support_is_of_that_support_and_its_mass(folders, samples):
    name, row = "llama, untied", PackedRow.of(samples)
    targets = row.token_ids[row.actions]
    kept_ids = torch.stack([targets, (targets + 7) % SHAPE["vocab_size"]], dim=1)
    log_masses = torch.linspace(-2, 0, len(targets))
    sampled = replace(row, kept_ids=kept_ids, log_masses=log_masses)
    found = policy_of(folders[name])(sampled, temperature=0.7).log_probs
    model = plain_model(folders[name])
    before = torch.cat([plain_logits(model, sample) for sample in samples])
    expected = (before.gather(1, kept_ids) / 0.7).log_softmax(-1)[:, 0] + log_masses
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "attention"),
    [pytest.param(*one, marks=() if one[1] == "auto" else pytest.mark.processes) for one in RIGHT],
)
def test_gradients_are_the_sum_of_one_by_one(folders, samples, name, attention):
    weights = torch.randn(sum(s.num_actions for s in samples), generator=torch.Generator().manual_seed(5))
    plain = plain_model(folders[name])
    log_probs, entropy = one_by_one(plain, samples, 0.8)
    (weights * (log_probs + 0.1 * entropy)).sum().backward()
    policy = policy_of(folders[name], attention)
    found = policy(PackedRow.of(samples), temperature=0.8, with_entropy=True)
    (weights * (found.log_probs + 0.1 * found.entropy)).sum().backward()
    gradients = {n: p.grad for n, p in policy.model.named_parameters()}
    for parameter, p in plain.named_parameters():
        largest = float(p.grad.abs().max())
        torch.testing.assert_close(gradients[parameter], p.grad, atol=1e-5 * max(1, largest), rtol=1e-4)


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
def test_a_row_without_actions_gives_zero_gradients_everywhere(folders, attention):
    policy = policy_of(folders["llama, untied"], attention)
    scores = policy(PackedRow.empty(), with_entropy=True)
    assert len(scores.log_probs) == len(scores.entropy) == 0
    (scores.log_probs.sum() + scores.entropy.sum()).backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


@pytest.mark.parametrize("name", MODELS)
def test_the_model_stays_what_it_was(folders, samples, name, tmp_path):
    """Parameters keep their names, and the saved model is a plain one for other programs."""
    policy, plain = policy_of(folders[name]), plain_model(folders[name])
    assert [n for n, _ in policy.model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    policy.model.save_pretrained(tmp_path)
    again = plain_model(tmp_path)
    assert type(again.get_output_embeddings()) is torch.nn.Linear
    assert PACKED not in (tmp_path / "config.json").read_text()
    assert set(again.state_dict()) == set(plain.state_dict())
    for key, tensor in plain.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor)
    ids = samples[1].token_ids[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, plain(ids).logits, atol=ROUNDING, rtol=0)


def test_our_attention_cannot_be_called_without_packing(folders, samples):
    """A row that is taken for one sequence would leak without an error."""
    with pytest.raises(CannotPack):
        policy_of(folders["qwen3, tied"]).model(samples[1].token_ids[None])


@pytest.mark.parametrize("name", ["qwen3, tied", "mistral, window of 8"])
@pytest.mark.parametrize("num_padded", [0, 3])
def test_generation_by_transformers(folders, samples, name, num_padded):
    ids = torch.stack([samples[3].token_ids, samples[4].token_ids[:11]])
    ids[0, :num_padded] = 0
    options = {
        "attention_mask": (ids > 0).long(),
        "max_new_tokens": 12,
        "do_sample": False,
        "use_cache": True,
    }
    expected = plain_model(folders[name]).generate(ids, **options)
    generator = load_generator(str(folders[name]), flag="--model", dtype="fp32", attention="auto", max_len=64)
    assert torch.equal(generator.generate(ids, **options), expected)


@pytest.mark.parametrize("use_cache", [True, False])
def test_what_the_configuration_says_of_the_cache_is_exported(tmp_path, use_cache):
    """A trained model without this setting would be slow for everybody who generates with it."""
    config = copy.deepcopy(MODELS["llama, untied"])
    config.use_cache = use_cache
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "loaded")
    for model in (policy_of(tmp_path / "loaded").model, scorer_of(tmp_path / "loaded").model):
        model.save_pretrained(tmp_path / "saved")
        assert hf.AutoConfig.from_pretrained(tmp_path / "saved").use_cache == use_cache


def test_names_of_attention():
    config = MODELS["llama, untied"]
    assert resolve_attention("auto", config) == PACKED
    assert resolve_attention("kernels-community/flash-attn", config) == "kernels-community/flash-attn"
    for name in ("sdpa", "eager"):
        assert resolve_attention(name, config) == name


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the package may be all that is needed")
@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3"])
def test_auto_takes_the_place_of_flash_attention(name):
    assert resolve_attention(name, MODELS["llama, untied"]) == PACKED


def test_flash_attention_without_a_cuda_device_is_told(monkeypatch, caplog):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert resolve_attention("flash_attention_2", MODELS["llama, untied"]) == PACKED
    assert "no CUDA device" in caplog.text


def test_unknown_attention():
    with pytest.raises(UsageError) as refusal:
        resolve_attention("paged", MODELS["llama, untied"])
    assert (refusal.value.flag, refusal.value.value) == ("--ds.attn_implementation", "paged")
    assert "sdpa, eager, flash_attention_2" in refusal.value.text


def test_a_model_that_is_not_there(tmp_path):
    with refused(ErrorCode.INVALID_MODEL, flag="--model", value=tmp_path):
        load_causal_lm(str(tmp_path), flag="--model", dtype="fp32", attention="auto")


def test_bf16_that_a_gpu_only_emulates_is_remarked_upon(folders, monkeypatch, caplog):
    monkeypatch.setattr(loading, "_emulates_bf16", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    for dtype, said in (("fp16", False), ("bf16", True)):
        load_causal_lm(str(folders["qwen3, tied"]), flag="--model", dtype=dtype, attention="auto")
        assert ("--ds.param_dtype fp16" in caplog.text) is said
