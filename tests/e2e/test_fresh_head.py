"""A critic starts from a language model and a new head, which is the same on every rank and at every ZeRO
stage."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from openrlhf.models.scorer import load_scorer

SEED, HEAD, STAGES = 7, "value_head", [0, 2, 3]


def test_a_seed_makes_the_same_head_on_every_rank_and_at_every_stage(task, run_worker):
    expected = {dtype: plain_head(task.model, dtype) for dtype in ("fp32", "bf16")}
    reports = run_worker("fresh_head", 2, model=str(task.model), seed=SEED, head=HEAD, stages=STAGES)
    for report in reports:
        assert len(report) == len(STAGES) * len(expected)
        for case, found in report.items():
            head = expected[case.split()[-1]]
            assert found["head"] == head, case
            (file,) = Path(found["folder"]).glob("*.safetensors")
            assert load_file(file)[f"{HEAD}.weight"][0].tolist() == head, case


def plain_head(path: Path, dtype: str) -> list[float]:
    torch.manual_seed(SEED)
    scorer = load_scorer(str(path), flag="--model", dtype=dtype, attention="auto", head_prefix=HEAD)
    head = scorer.model.value_head.weight[0]
    assert head.float().std() > 0.01
    return head.tolist()
