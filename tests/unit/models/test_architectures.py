"""Packed rows of every causal architecture of transformers equal its own forward of one sequence at a time.

docs/models.md has the table; with OPENRLHF_WRITE_DOCS=1 these tests write it anew.
"""

import logging
import os
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from architectures import ALL, VOCABULARY, tiny_config, tiny_model
from records import sequence
from refusals import refused
from torch import Tensor
from torch.nn.attention import varlen
from transformers import AutoModelForCausalLM, PreTrainedModel

from openrlhf import device
from openrlhf.errors import ErrorCode
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.models.self_check import resolve_row_layout, transformers_attention
from openrlhf.rows import PackedRow, Sample
from openrlhf.tools.reference.outputs import plain_log_probs

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
TEN = (
    "bloom",  # its attention has no interface
    "bert",  # looks ahead
    "gemma2",  # caps scores
    "gpt_oss",  # sinks, and every other layer a window
    "mamba",  # a running state
    "modernbert-decoder",  # more than a linear head
    "opt",  # positions of its own
    "qwen2_moe",  # a window that only its mask knows
    "qwen3",
    "stablelm",  # hands nothing on to its attention
)
EXPERTS = ("deepseek_v3", "glm4_moe", "minimax_m2", "mixtral", "qwen3_moe")
IMPLEMENTATIONS = ("auto", "sdpa", "eager")
LENGTHS = (5, 23, 2, 11, 17)
BRANCHES = ((1, 14, 3), (5, 20, 2), (4, 17, 0), (4, 9, 2))
"""(sequence, number of its tokens, sequence that follows these) of more sequences, with common prefixes."""
ROUNDINGS = 20
"""Allowed error in units of one rounding of every weight: a kernel of another shape rounds each of its sums
anew, and the sums of a few layers are worth this many such roundings."""


class Verdict(NamedTuple):
    how: str
    """"packed", "one by one" or "refused"."""
    shares: bool
    """True: common prefixes are read once."""
    error: float
    """Largest error of a log-prob, nats."""
    rounding: float
    """Change of the log-probs by rounding every weight once more, nats."""
    reason: str


def samples() -> list[Sample]:
    random = torch.Generator().manual_seed(3)
    made = []
    for length in LENGTHS:
        ids = torch.randint(3, VOCABULARY, (length,), generator=random)
        made.append(sequence(ids))
    return made


def with_branches() -> list[Sample]:
    made = samples()
    for first, kept, second in BRANCHES:
        ids = torch.cat([made[first].token_ids[:kept], made[second].token_ids])
        made.append(sequence(ids))
    return made


@torch.no_grad()
def one_by_one(model: PreTrainedModel, sequences: list[Sample] | None = None) -> Tensor:
    return torch.cat([plain_log_probs(model, sample) for sample in sequences or samples()])


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    @cache
    def made(model_type: str) -> Path:
        folder = tmp_path_factory.mktemp("model")
        tiny_model(tiny_config(model_type)).save_pretrained(folder)
        return folder

    return made


@pytest.fixture(scope="session")
def judged(folder_of):
    @cache
    def reference_of(model_type: str) -> tuple[Tensor, float]:
        """Returns transformers' log-probs, and the effect of rounding on them."""
        model = AutoModelForCausalLM.from_pretrained(folder_of(model_type), dtype=torch.float32).eval()
        with transformers_attention(model):
            expected = one_by_one(model)
            random = torch.Generator().manual_seed(5)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + 2**-24 * torch.randn(parameter.shape, generator=random))
            return expected, float((one_by_one(model) - expected).abs().max())

    @cache
    def verdict(model_type: str, attention: str) -> Verdict:
        expected, rounding = reference_of(model_type)
        path = str(folder_of(model_type))
        try:
            policy = PolicyModel(
                load_causal_lm(path, flag="--model", dtype="fp32", attention=attention)
            ).eval()
            reading = resolve_row_layout(policy, policy)
        except ValueError as error:
            return Verdict("refused", False, 0.0, rounding, str(error).splitlines()[0])
        with torch.no_grad():
            found = policy(PackedRow.of(samples())).log_probs
            if reading.shares_prefixes:
                with transformers_attention(policy.model):
                    expected = torch.cat([expected, one_by_one(policy.model, with_branches())])
                found = torch.cat([found, policy(PackedRow.of(with_branches())).log_probs])
        how = "packed" if reading.packed else "one by one"
        error = float((found - expected).abs().max())
        return Verdict(how, reading.shares_prefixes, error, rounding, "")

    return verdict


def marks_of(name: str) -> tuple[pytest.MarkDecorator, ...]:
    if name not in TEN:
        return (pytest.mark.slow,)
    return () if name in ("bert", "gemma2", "gpt_oss", "mamba", "qwen3") else (pytest.mark.processes,)


@pytest.mark.parametrize("model_type", [pytest.param(name, marks=marks_of(name)) for name in ALL])
def test_no_architecture_is_silently_wrong(judged, model_type: str) -> None:
    for attention in IMPLEMENTATIONS:
        verdict = judged(model_type, attention)
        assert verdict.error <= ROUNDINGS * verdict.rounding + 1e-5, (attention, verdict)
        if verdict.how == "refused":
            assert "cannot be trained" in verdict.reason or attention != "auto", verdict
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| {model_type} |"))
    verdicts = [judged(model_type, attention) for attention in IMPLEMENTATIONS]
    assert row.split(" | ")[1:5] == [*(verdict.how for verdict in verdicts), _prefixes(verdicts)]


@pytest.mark.processes
@pytest.mark.parametrize("model_type", [*TEN, *EXPERTS])
def test_half_precision_finds_the_same(judged, folder_of, model_type: str) -> None:
    """Experts are covered too, whose routers may send a token elsewhere because of a rounding."""
    path = str(folder_of(model_type))
    policy = PolicyModel(load_causal_lm(path, flag="--model", dtype="bf16", attention="auto")).eval()
    try:
        found = "packed" if resolve_row_layout(policy, policy).packed else "one by one"
    except ValueError:
        found = "refused"
    else:
        policy(PackedRow.of(samples())).log_probs.sum().backward()
    assert found == judged(model_type, "auto").how


def test_rounding_is_far_below_what_a_leak_does(judged) -> None:
    """A leak, which the check must find, is simulated by sequences in a shared row that are read as one."""
    glued = torch.cat([s.token_ids for s in samples()])
    for model_type in ("qwen3", "stablelm", "mamba"):
        model = tiny_model(tiny_config(model_type))
        with transformers_attention(model):
            leaked = one_by_one(model, [sequence(glued)])[LENGTHS[0] :][: LENGTHS[1] - 1]
        expected = one_by_one(model)[LENGTHS[0] - 1 :][: LENGTHS[1] - 1]
        tolerance = ROUNDINGS * judged(model_type, "auto").rounding + 1e-5
        assert (leaked - expected).abs().max() > 100 * tolerance


@pytest.mark.parametrize(
    "model_type",
    ["qwen3_next", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_5_text", "olmo_hybrid"))],
)
def test_states_start_anew_where_the_kernels_do_that(tmp_path, monkeypatch, model_type: str) -> None:
    """The stand-in kernels follow the documentation of flash-linear-attention and causal-conv1d: states start
    anew where a sequence begins."""
    model = tiny_model(tiny_config(model_type))
    model.save_pretrained(tmp_path / "model")
    modeling = sys.modules[type(model).__module__]
    convolve, attend = modeling.causal_conv1d_fn, modeling.torch_chunk_gated_delta_rule

    def convolve_each(x: Tensor, *args, seq_idx: Tensor | None = None, **options) -> Tensor:
        assert seq_idx is None or seq_idx.dtype == torch.int32
        parts = [x] if seq_idx is None else x.split(seq_idx[0].bincount().tolist(), 2)
        return torch.cat([convolve(part, *args, **options) for part in parts], 2)

    def attend_each(*qkv: Tensor, g, beta, cu_seqlens: Tensor | None = None, **options):
        lengths = [g.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
        parts = zip(*(x.split(lengths, 1) for x in (*qkv, g, beta)), strict=True)
        answers = [attend(q, k, v, g=g, beta=beta, **options)[0] for q, k, v, g, beta in parts]
        return torch.cat(answers, 1), None

    monkeypatch.setattr(modeling, "causal_conv1d_fn", convolve_each)
    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", attend_each)
    monkeypatch.setenv("OPENRLHF_CACHE", str(tmp_path / "cache"))
    path = str(tmp_path / "model")
    policy = PolicyModel(load_causal_lm(path, flag="--model", dtype="fp32", attention="auto")).eval()
    assert resolve_row_layout(policy, policy).packed
    with torch.no_grad():
        found = policy(PackedRow.of(samples())).log_probs
    torch.testing.assert_close(found, one_by_one(model), atol=1e-4, rtol=0)


def test_the_note_and_the_refusal_say_what_leaked_and_what_to_do(judged, caplog, tmp_path) -> None:
    tiny_model(tiny_config("stablelm")).save_pretrained(tmp_path)
    load = lambda attention: PolicyModel(
        load_causal_lm(str(tmp_path), flag="--model", dtype="fp32", attention=attention)
    )
    policy = load("auto")
    with caplog.at_level(logging.WARNING):
        resolve_row_layout(policy, policy)
    (note,) = [record.getMessage() for record in caplog.records if record.name.startswith("openrlhf")]
    assert note.startswith("StableLmForCausalLM ")

    caplog.clear()
    tiny_model(tiny_config("bloom")).save_pretrained(tmp_path)
    policy = load("auto")
    resolve_row_layout(policy, policy)
    assert caplog.messages[-1].endswith("its attention does not know where sequences end")

    tiny_model(tiny_config("opt")).save_pretrained(tmp_path)
    policy = load("eager")
    with refused(ErrorCode.UNSUPPORTED, flag="--ds.attn_implementation", value="eager") as refusal:
        resolve_row_layout(policy, policy)
    assert "OPTForCausalLM" in refusal.value.text and "auto" in refusal.value.text


@pytest.mark.parametrize(
    "error",
    [
        TypeError("varlen_attn() got an unexpected keyword argument 'enable_gqa'"),
        RuntimeError("FlashAttention only supports Ampere GPUs or newer."),
        torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device"),
    ],
)
def test_a_broken_kernel_is_an_error_and_no_property_of_the_model(tmp_path, monkeypatch, error) -> None:
    """The verdict is not cached, and the model reads rows as before."""
    monkeypatch.setenv("OPENRLHF_CACHE", str(tmp_path / "cache"))
    tiny_model(tiny_config("qwen3")).save_pretrained(tmp_path / "model")
    options = {"flag": "--model", "dtype": "fp32", "attention": "auto"}
    policy = PolicyModel(load_causal_lm(str(tmp_path / "model"), **options))

    def broken(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("openrlhf.models.attention.has_varlen_kernel", lambda *_: True)
        patch.setattr(varlen, "varlen_attn", broken)
        with pytest.raises(type(error)) as found:
            resolve_row_layout(policy, policy)
    assert "--ds.attn_implementation sdpa" in found.value.__notes__[0]
    assert resolve_row_layout(policy, policy).packed


def test_what_was_found_out_is_kept(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("OPENRLHF_CACHE", str(tmp_path / "cache"))
    tiny_model(tiny_config("mamba")).save_pretrained(tmp_path / "model")
    calls = []

    def resolve() -> bool:
        path = str(tmp_path / "model")
        policy = PolicyModel(load_causal_lm(path, flag="--model", dtype="fp32", attention="auto"))
        calls.append(0)

        def ask():
            calls[-1] += 1
            return policy()

        return resolve_row_layout(ask, policy).packed

    assert [resolve(), resolve()] == [False, False]
    assert calls[0] > 0 and calls[1] == 0
    (kept,) = (tmp_path / "cache" / "packing").iterdir()
    kept.unlink()
    resolve()
    assert calls[2] > 0


def test_what_was_found_out_holds_for_the_same_engine_and_device(tmp_path, monkeypatch) -> None:
    """Every ZeRO stage, size of a group that shares matrices, and generation of devices is checked anew,
    once."""
    monkeypatch.setenv("OPENRLHF_CACHE", str(tmp_path / "cache"))
    policy = PolicyModel(tiny_model(tiny_config("qwen3")))
    kept = lambda: len(list((tmp_path / "cache" / "packing").iterdir()))
    engines = [{}, {"zero_stage": 2}, {"zero_stage": 3}, {"zero_stage": 2, "tensor": 2}]
    for count, engine in enumerate(engines, 1):
        for _ in range(2):
            resolve_row_layout(policy, policy, **engine)
            assert kept() == count
    for count, capability in enumerate(((8, 0), (9, 0), (8, 0)), len(engines) + 1):
        monkeypatch.setattr(device, "DEVICE_TYPE", "cuda")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        resolve_row_layout(policy, policy)
        assert kept() == min(count, len(engines) + 2)


def test_the_check_leaves_no_trace(tmp_path) -> None:
    """The mode, the random state and the attention are as before."""
    tiny_model(tiny_config("qwen3")).save_pretrained(tmp_path)
    policy = PolicyModel(
        load_causal_lm(str(tmp_path), flag="--model", dtype="fp32", attention="auto")
    ).train()
    own, state = policy.model.config._attn_implementation, torch.get_rng_state()
    resolve_row_layout(policy, policy)
    assert policy.training and all(module.training for module in policy.modules())
    assert policy.model.config._attn_implementation == own
    assert torch.equal(torch.get_rng_state(), state)
    assert "forward" not in vars(policy)


@pytest.mark.skipif("OPENRLHF_WRITE_DOCS" not in os.environ, reason="writes docs/models.md")
def test_write_the_table(judged) -> None:
    head, begin, _ = PAGE.read_text().partition("<!-- table -->\n")
    lines = [
        "| architecture | auto | sdpa | eager | common prefixes | error, nats | why not packed |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in sorted(ALL):
        verdicts = [judged(name, attention) for attention in IMPLEMENTATIONS]
        error = max((v.error for v in verdicts if v.how != "refused"), default=0.0)
        shown = "" if all(v.how == "refused" for v in verdicts) else f"{error:.0e}"
        how = " | ".join(v.how for v in verdicts)
        lines.append(f"| {name} | {how} | {_prefixes(verdicts)} | {shown} | {_why(verdicts)} |")
    PAGE.write_text(head + begin + "\n".join(lines) + "\n")


def _prefixes(verdicts: list[Verdict]) -> str:
    """Returns how attention `auto`, which comes first, computes common prefixes: once, or for each
    sequence."""
    if verdicts[0].how == "refused":
        return "-"
    return "once" if verdicts[0].shares else "each"


def _why(verdicts: list[Verdict]) -> str:
    reasons = [v.reason for v in verdicts if v.reason]
    known = {
        "depend on later tokens": "looks ahead",
        "no linear layer of": "its head is more than one layer",
        "changes the next one": "leaks",
        "changes earlier ones": "leaks",
        "leaves out": "sdpa leaves out the cap of its scores",
        "it fails": "does not take packed rows",
        "does not support an attention": "has no sdpa",
        "of each sequence alone": "other hidden states",
    }
    return "; ".join(dict.fromkeys(text for r in reasons for key, text in known.items() if key in r))
