"""Adapters in training: gradients are the same at every ZeRO stage, other libraries load the files, and runs
resume."""

import shlex
from pathlib import Path

import pytest
import torch
import transformers as hf
from judged_answers import TaskFiles
from peft import PeftModel
from processes import run_ranks

from openrlhf.errors import ErrorCode
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.models.scorer import load_scorer
from openrlhf.observability.trackers.metrics_file import read_metrics
from openrlhf.rows import LossNorm, PackedRow, Sample
from openrlhf.training.objectives.sft import SFTObjective

LENGTHS = (5, 9, 17, 30, 8, 12, 3, 22)
SCALE = 8 / 4
"""alpha / rank of the worker's adapters."""
CASES = {
    1: [
        {"stage": 0},
        {"stage": 2, "checkpointing": True},
        {"stage": 2, "backend": "torch"},
        {"stage": 3},
        {"stage": 0, "in_4bit": True},
        {"stage": 2, "in_4bit": True},
    ],
    2: [
        {"stage": 0, "targets_of_another": ["q_proj"]},
        {"stage": 2},
        {"stage": 2, "backend": "torch"},
        {"stage": 3, "backend": "torch", "checkpointing": True},
        {"stage": 3, "checkpointing": True},
        {"stage": 2, "in_4bit": True},
    ],
}


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    random = torch.Generator().manual_seed(1)
    made = []
    for length in LENGTHS:
        mask = torch.rand(length, generator=random) < 0.6
        mask[0], mask[1] = False, True
        made.append(Sample(token_ids=torch.randint(3, 300, (length,), generator=random), action_mask=mask))
    return made


@pytest.fixture(scope="module")
def seen() -> dict[str, dict]:
    return {}


def load(path) -> hf.PreTrainedModel:
    return load_causal_lm(str(path), flag="--model", dtype="fp32", attention="auto")


def log_probs(model: hf.PreTrainedModel, samples: list[Sample]) -> torch.Tensor:
    with torch.no_grad():
        return PolicyModel(model)(PackedRow.of(samples)).log_probs


def dense_gradients(base: Path, samples: list[Sample]) -> dict[str, torch.Tensor]:
    """Computes dB = s dW' A^T and dA = s B^T dW' of W' = W + s B A, with the adapters that the worker starts
    from."""
    from openrlhf.config.sections import DeepSpeedConfig, LoraConfig
    from openrlhf.models.lora import prepare_for_training

    torch.manual_seed(7)
    adapted = prepare_for_training(load(base), DeepSpeedConfig(lora=LoraConfig(rank=4, alpha=8)))
    adapters = {name: p.detach() for name, p in adapted.named_parameters() if p.requires_grad}
    random = torch.Generator().manual_seed(5)
    for name, b in adapters.items():
        if "lora_B" in name:
            b.copy_(0.1 * torch.randn(b.shape, generator=random))
    model, pairs = load(base), {}
    for name, param in model.named_parameters():
        stem = name.removesuffix("weight")
        if f"{stem}lora_A.default.weight" in adapters:
            a, b = (adapters[f"{stem}lora_{x}.default.weight"] for x in "AB")
            pairs[stem] = (param, a, b)
            param.data += SCALE * b @ a
    row = PackedRow.of(samples)
    SFTObjective()(PolicyModel(model), row, LossNorm(row.num_tokens, row.num_sequences))[0].backward()
    found = {}
    for stem, (param, a, b) in pairs.items():
        assert param.grad is not None
        found[f"gradient {stem}lora_A.default.weight"] = SCALE * b.T @ param.grad
        found[f"gradient {stem}lora_B.default.weight"] = SCALE * param.grad @ a.T
    return found


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_adapters_at_every_stage(whole_blocks, run_worker, tmp_path, samples, seen, num_ranks):
    model = whole_blocks.model
    torch.save([(s.token_ids, s.action_mask) for s in samples], tmp_path / "samples.pt")
    cases = CASES[num_ranks]
    arguments = {"model": str(model), "samples": str(tmp_path / "samples.pt"), "cases": cases}
    reports = run_worker("lora", num_ranks, **arguments)[0].values()
    gradients, base = dense_gradients(model, samples), log_probs(load(model), samples)
    for case, report in zip(cases, reports, strict=True):
        found = torch.load(Path(report["folder"], "found.pt"))
        in_4bit = case.get("in_4bit", False)
        # four bits change the weights, so the numbers are compared with those of the first such case
        if in_4bit:
            expected = seen.setdefault("4 bits", found)
            assert (found["base log-probs"] - base).abs().max() > 0.01
        else:
            expected = gradients | {"base log-probs": base}
        assert {name for name in found if name.startswith("gradient")} == gradients.keys()
        for name in (*gradients, "base log-probs"):
            torch.testing.assert_close(
                found[name],
                expected[name],
                atol=1e-6,
                rtol=1e-5,
                msg=lambda m, n=name, c=case: f"{c} {n}: {m}",
            )
        assert report["losses"][1] < report["losses"][0] - 0.1
        assert report["again"] == report["losses"][1], "a resumed run goes on as the first did"
        assert report["step"]["drift"] == 0
        assert report["step"]["reference"] == pytest.approx(found["base log-probs"].sum().item(), rel=1e-5)
        if "targets_of_another" in case:
            assert report["step"]["refused"] == ErrorCode.OTHER_RUN
        if not in_4bit:
            check_files(model, Path(report["folder"]), samples, found["log-probs"])


def check_files(base: Path, folder: Path, samples: list[Sample], expected: torch.Tensor) -> None:
    adapter = folder / "adapter"
    assert {p.name for p in adapter.iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
    plain = hf.AutoModelForCausalLM.from_pretrained(adapter)
    assert plain.dtype == torch.float32
    loaded = PeftModel.from_pretrained(load(base), adapter).merge_and_unload()
    torch.testing.assert_close(log_probs(loaded, samples), expected, atol=2e-5, rtol=0)
    for path in (folder / "ckpt").rglob("*model_states.pt"):
        state = torch.load(path, weights_only=False)
        assert state["module"].keys() and all("lora_" in name for name in state["module"]), path
        assert not state.get("frozen_param_fragments")


def test_a_reward_model_of_four_bits_is_trained_and_merged(whole_blocks: TaskFiles, tmp_path: Path) -> None:
    model, pairs = whole_blocks.model, whole_blocks.pairs
    run = lambda command: run_ranks(shlex.split(command), log=tmp_path / "log")
    run(
        f"openrlhf.cli.train_rm --model.model_name_or_path {model} --data.dataset {pairs} "
        "--data.prompt_key prompt --data.apply_chat_template --data.max_samples 48 --train.batch_size 16 "
        "--train.micro_batch_size 8 --train.max_epochs 3 --adam.lr 1e-2 --ds.param_dtype fp32 "
        "--ds.load_in_4bit --ds.lora.rank 4 "
        f"--ckpt.output_dir {tmp_path / 'adapter'} --logger.run_dir {tmp_path / 'run'}"
    )
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert metrics[max(metrics)]["rm/loss"] < metrics[1]["rm/loss"] - 0.1
    merge = f"--model_path {model} --lora_path {tmp_path / 'adapter'} --output_path {tmp_path / 'merged'}"
    run(f"openrlhf.cli.lora_combiner {merge} --is_rm --param_dtype fp32")
    merged = load_scorer(
        str(tmp_path / "merged"), flag="--model", dtype="fp32", attention="auto", trained=True
    )
    config = merged.model.config
    assert config.std > 0.1 and config.mean != 0
    assert not hasattr(config, "quantization_config")
    assert hf.AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
