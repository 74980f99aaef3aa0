"""An exported model says of itself what it is: the numbers in its files have the type that config.json names,
and generation_config.json is that of the model which was trained."""

import json
import os
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors import safe_open

from openrlhf.tasks.tiny_model import tiny_chat_model
from openrlhf.tools.serve.flags import lora_combiner as combine

HALF, WHOLE = {"param_dtype": "bf16"}, {"param_dtype": "fp32"}
STAGES = [{"backend": "deepspeed", "zero_stage": stage} for stage in range(4)]
TORCH = {"backend": "torch", "zero_stage": 2}
CASES = [
    *(place | dtype for place in (*STAGES, TORCH) for dtype in (HALF, WHOLE)),
    *(place | HALF | {"kind": kind} for place in (STAGES[2], TORCH) for kind in ("reward", "value")),
    *(STAGES[stage] | dtype | {"average": True} for stage in (2, 3) for dtype in (HALF, WHOLE)),
    *(place | dtype | {"lora": True} for place in (STAGES[2], TORCH) for dtype in (HALF, WHOLE)),
]
LAW = {"do_sample": False, "temperature": 0.9, "eos_token_id": [1, 3]}
"""A generation config that transformers reads, and refuses to write."""


def types_of(file: Path) -> set[str]:
    with safe_open(file, "pt") as weights:
        return {str(weights.get_tensor(name).dtype) for name in weights.keys()}  # noqa: SIM118


SAMPLE = [
    *(TORCH | dtype for dtype in (HALF, WHOLE)),
    *(TORCH | HALF | {"kind": "value"}, TORCH | HALF | {"lora": True}),
    *(STAGES[3] | HALF, STAGES[2] | HALF | {"average": True}),
]


@pytest.mark.parametrize(
    ("base", "cases"),
    [
        pytest.param(torch.float32, SAMPLE, id="sample"),
        pytest.param(torch.float32, CASES, id="all", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, CASES, id="all of a base in bf16", marks=pytest.mark.slow),
    ],
)
def test_weights_and_configurations_agree(run_worker, tmp_path, base, cases):
    folder = tiny_chat_model(tmp_path / "model", seed=0)
    hf.AutoModelForCausalLM.from_pretrained(folder, dtype=base).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(LAW))
    (report,) = run_worker("exports", 1, model=str(folder), cases=cases)
    mode = 0o666 & ~_umask()
    for number, case in enumerate(cases):
        made = Path(report["out"], str(number))
        wanted = "torch.bfloat16" if case["param_dtype"] == "bf16" else "torch.float32"
        (file,) = made.glob("*.safetensors")
        assert types_of(file) == {wanted}, case
        assert {path.stat().st_mode & 0o777 for path in made.iterdir()} == {mode}, case
        if case.get("lora"):
            words = f"--model_path {folder} --lora_path {made} --output_path {made}/merged"
            combine(words.split())
            made, wanted = made / "merged", str(base)
            assert types_of(made / "model.safetensors") == {wanted}, case
        assert json.loads((made / "config.json").read_text())["dtype"] == wanted.removeprefix("torch."), case
        if case.get("kind"):
            continue
        assert json.loads((made / "generation_config.json").read_text()).items() >= LAW.items(), case
        assert str(hf.AutoModelForCausalLM.from_pretrained(made, dtype="auto").dtype) == wanted


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
