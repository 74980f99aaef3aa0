"""Training on ranks that share the model's matrices equals training without sharing."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_invariance import check_equal, commands  # noqa: F401  a fixture
from transformers import LlamaConfig, LlamaForCausalLM

from openrlhf.tasks.prepare import TaskFiles

RATE = 1e-2
RESULTS = dict[str, dict]
slow = lambda *groups: [pytest.param(*group, marks=pytest.mark.slow) for group in groups]


@pytest.fixture(scope="module")
def models(task: TaskFiles, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Writes a Qwen3 with tied embeddings, and a Llama without and one with biases."""
    config = LlamaConfig(
        vocab_size=368,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        initializer_range=0.3,
        tie_word_embeddings=False,
        pad_token_id=0,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    llama = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(llama)
    return {"qwen": str(task.model), "llama": str(llama)}


@pytest.fixture
def steps(run_worker: Callable, models: dict[str, str]) -> Callable[..., RESULTS]:
    """Returns a function that runs `workers/tensor_parallel.py` on cases and maps each case's name to its
    report and what it saved."""

    def run(
        cases: list[tuple[str, str, int]],
        num_ranks: int = 1,
        *,
        precision: dict | None = None,
        rate: float = RATE,
        **mesh: int,
    ) -> RESULTS:
        named = {
            f"{model} {objective} {stage}": {
                "model": models[model],
                "objective": objective,
                "stage": stage,
                "attention": "auto",
                **(precision or {}),
            }
            for model, objective, stage in cases
        }
        options = {"rate": rate, "max_norm": 0.05, "cases": named}
        reports = run_worker("tensor_parallel", num_ranks, **options, **mesh)
        assert all(report == reports[0] or mesh.get("data") for report in reports)
        return {
            name: report | torch.load(Path(report["folder"]) / "found.pt")
            for name, report in reports[0].items()
        }

    return run


def exported(result: dict, what: str) -> dict[str, torch.Tensor]:
    return load_file(Path(result["folder"]) / what / "model.safetensors")


def check_same(name: str, found: dict, expected: dict) -> None:
    check_equal(f"gradients of {name}", found["gradients"], expected["gradients"])
    for what in ("model", "average"):
        weights = exported(found, what)
        assert weights.keys() == exported(expected, what).keys()
        torch.testing.assert_close(weights, exported(expected, what), atol=1e-5, rtol=1e-5)
    assert found["sent"].keys() == exported(found, "model").keys()
    torch.testing.assert_close(found["sent"], exported(found, "model"), atol=0, rtol=0)
    for ours, theirs in zip(found["metrics"], expected["metrics"], strict=True):
        # fractions are discontinuous
        smooth = {key: value for key, value in theirs.items() if "fraction" not in key}
        assert ours.keys() == theirs.keys()
        assert {key: ours[key] for key in smooth} == pytest.approx(smooth, rel=1e-4, abs=1e-6), name
    torch.testing.assert_close(found["frozen"], expected["frozen"], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(
        found["answers"] or expected["answers"], expected["answers"], atol=1e-4, rtol=0
    )
    assert found["resumed"] and expected["resumed"], name
    assert expected["metrics"][0]["grad_norm"] > 0.1  # the gradient was clipped


REPRESENTATIVE = [("qwen", "ppo", 2)]
EVERY = [
    *(("qwen", "ppo", stage) for stage in (0, 1, 2)),
    *(("llama", "sft", stage) for stage in (0, 1, 2)),
    ("qwen", "critic", 1),
]


@pytest.mark.parametrize(
    ("cases", "num_ranks", "mesh"),
    [
        (REPRESENTATIVE, 2, {"tensor": 2}),
        *slow((EVERY, 2, {"tensor": 2}), (EVERY, 4, {"tensor": 2}), (EVERY, 4, {"tensor": 2, "sequence": 2})),
    ],
)
def test_two_steps(steps: Callable, cases: list, num_ranks: int, mesh: dict) -> None:
    expected = steps(cases)
    for name, found in steps(cases, num_ranks, **mesh).items():
        check_same(name, found, expected[name])
        assert found["share"] < 0.51 and expected[name]["share"] == 1, name


def test_a_wrong_plan_is_refused_at_load(task: TaskFiles, run_worker: Callable) -> None:
    """In a wrong plan nobody sums the parts of some matrices. Nothing has trained, and every rank says
    why."""
    flags = (
        f"--model.model_name_or_path {task.model} --data.dataset {task.sft} --data.output_key output "
        "--data.max_samples 10 --ds.tensor_parallel_size 2"
    )
    for report in run_worker("wrong_plan", 2, flags=flags):
        assert re.match(r"--ds\.tensor_parallel_size 2: .*\bwrong\b", report["said"])


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "accumulated"), [(1, None), (1, "fp32"), (2, None)])
def test_norms_in_half_precision(steps: Callable, stage: int, accumulated: str | None) -> None:
    """DeepSpeed has an optimizer for each combination. The part of the norm on one rank would be 0.7 of it.
    The weights hardly move: a KL estimate that crosses its bound of 10, which rounding decides, would change
    the second norm by a tenth."""
    cases, precision = [("qwen", "ppo", stage)], {"dtype": "bf16", "accumulated": accumulated}
    ((expected,), (found,)) = (
        steps(cases, size, precision=precision, rate=1e-5, tensor=size).values() for size in (1, 2)
    )
    for ours, theirs in zip(found["metrics"], expected["metrics"], strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.02)
    assert found["resumed"]


@pytest.mark.slow
def test_every_supervised_command(task: TaskFiles, run_worker: Callable, commands: dict) -> None:  # noqa: F811
    """Distillation and step judges are among the commands; their heads need the whole vocabulary."""
    common = (
        f"--model.model_name_or_path {task.model} --data.max_samples 10 --ds.param_dtype fp32 --max_norm 0 "
        "--adam.lr 0 --ds.tensor_parallel_size"
    )
    seen: dict = {}
    for size, num_ranks in ((1, 1), (2, 2)):
        options = {"commands": commands, "common": f"{common} {size}", "backend": "deepspeed", "stage": 1}
        (report, *_) = run_worker("supervised_gradients", num_ranks, layouts="all", **options)
        for name, found in report.items():
            gradients, metrics = torch.load(found["gradients"]), found["metrics"]
            expected, expected_metrics = seen.setdefault(name.split(":")[0], (gradients, metrics))
            check_equal(name, gradients, expected)
            assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-5), name
