"""The exported average equals that of plain PyTorch at every ZeRO stage. After a resume it is the same bit
for bit; on another number of ranks it is the same up to rounding."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from openrlhf.config.sections import AdamConfig, DeepSpeedConfig, LoraConfig
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.lora import prepare_for_training
from openrlhf.models.policy import PolicyModel
from openrlhf.rows import LossNorm, PackedRow, Sample
from openrlhf.tasks.prepare import TaskFiles
from openrlhf.training.objectives.sft import SFTObjective

LENGTHS = (5, 9, 17, 30, 8, 12, 3, 22)
SETTINGS = {"beta": 0.8, "lr": 1e-2, "eps": 1e-3, "alpha": 8, "seed": 7, "num_steps": 2}
CASES = [{"stage": 2}, {"stage": 3, "rank": 4}, {"stage": 3, "dtype": "bf16"}]
MORE = [{"stage": 2}, {"stage": 0}, {"stage": 3}]

Weights = dict[str, torch.Tensor]


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
def expected(task: TaskFiles, samples: list[Sample]) -> dict[int, tuple[Weights, Weights]]:
    """Returns (average, weights) after all steps, by the rank of the adapters; rank 0 means no adapters."""
    return {rank: plain_training(task.model, samples, rank) for rank in (0, 4)}


def plain_training(path: Path, samples: list[Sample], rank: int) -> tuple[Weights, Weights]:
    model = load_causal_lm(str(path), flag="--model", dtype="fp32", attention="auto")
    torch.manual_seed(SETTINGS["seed"])
    prepare_for_training(model, DeepSpeedConfig(lora=LoraConfig(rank=rank, alpha=SETTINGS["alpha"])))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    start = {name: p.detach().clone() for name, p in trained.items()}
    average, beta = dict(start), SETTINGS["beta"]
    adam = torch.optim.AdamW(
        trained.values(),
        lr=SETTINGS["lr"],
        betas=AdamConfig().betas,
        eps=SETTINGS["eps"],
        weight_decay=AdamConfig().weight_decay,
    )
    row = PackedRow.of(samples)
    for _ in range(2 * SETTINGS["num_steps"]):
        adam.zero_grad()
        SFTObjective()(PolicyModel(model), row, LossNorm(row.num_tokens, row.num_sequences))[0].backward()
        adam.step()
        average = {name: beta * average[name] + (1 - beta) * p.detach() for name, p in trained.items()}
    weights = {name: p.detach().clone() for name, p in trained.items()}
    for other in (start, weights):
        assert all((average[name] - other[name]).abs().max() > 1e-3 for name in trained), "nothing to see"
    return average, weights


def exported(folder: str) -> Weights:
    """Returns the exported weights by their names in the model."""
    (file,) = Path(folder, "model").glob("*.safetensors")
    found = {name.removeprefix("base_model.model."): tensor for name, tensor in load_file(file).items()}
    return {
        name.replace(".weight", ".default.weight") if ".lora_" in name else name: tensor
        for name, tensor in found.items()
    }


def check_close(found: Weights, expected: Weights, case: dict) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, atol=1e-6, rtol=1e-6, msg=lambda m, n=name: f"{case} {n}: {m}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("cases", [CASES, MORE])
def test_the_average_is_exported_and_kept(task, run_worker, tmp_path, samples, expected, cases):
    torch.save([(s.token_ids, s.action_mask) for s in samples], tmp_path / "samples.pt")
    run = partial(
        run_worker,
        "moving_average",
        **SETTINGS,
        model=str(task.model),
        samples=str(tmp_path / "samples.pt"),
        cases=cases,
    )
    two = run(2)
    folders = [Path(case["folder"]) for case in two[0]["cases"]]
    one = run(1, resume=str(folders[0].parent))  # resumes what two ranks saved
    resumed = run(
        2,
        resume=str(folders[0].parent),
        refused={"stage": 2, "folder": str(folders[0].parent / "without")},
        ignored={"stage": 2, "folder": str(folders[0])},
    )
    for i, case in enumerate(cases):
        average, weights = expected[case.get("rank", 0)]
        check_case(case, [report["cases"][i] for report in two], average, weights)
        if "dtype" not in case:
            check_close(exported(one[0]["cases"][i]["folder"]), average, case)
    for before, after in zip(two[0]["cases"], resumed[0]["cases"], strict=True):
        check_equal(exported(before["folder"]), exported(after["folder"]))
    for report in resumed:  # all ranks raise, so that none waits for another
        assert report["refused"].startswith("--train.enable_ema: ")
    ignored = resumed[0]["ignored"]["folder"]
    check_equal(exported(ignored), torch.load(f"{ignored}/weights.pt")[0])


def check_case(case: dict, ranks: list[dict], average: Weights, weights: Weights) -> None:
    folder = ranks[0]["folder"]
    found = exported(folder)
    assert found.keys() == average.keys()
    *steps, after_export = torch.load(f"{folder}/weights.pt")
    check_equal(after_export, steps[-1])
    if case.get("dtype") == "bf16":
        check_equal(found, average_of(steps))
    else:
        check_close(found, average, case)
        check_close(after_export, weights, case)
    assert [rank["changed"] for rank in ranks] == [[]] * len(ranks)
    num_parts = len(list(Path(folder).glob("*/moving_average_*")))
    assert num_parts == len(ranks)


def average_of(steps: list[Weights]) -> Weights:
    """Averages in float32 and rounds to the weights' dtype only at the end."""
    found = {name: start.float() for name, start in steps[0].items()}
    for step in steps[1:]:
        for name, param in step.items():
            found[name].lerp_(param.float(), 1 - SETTINGS["beta"])
    return {name: mean.to(steps[0][name].dtype) for name, mean in found.items()}


def check_equal(found: Weights, expected: Weights) -> None:
    assert found and all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
