"""Exports a model by every backend, stage and precision, after a step; each kind into a folder of its own."""

from functools import partial
from typing import Any

import torch
from transformers import AutoTokenizer

from openrlhf.backends.build import build_engine
from openrlhf.backends.distributed import ProcessMesh
from openrlhf.config.sections import AdamConfig, DeepSpeedConfig, LoraConfig, OptimConfig
from openrlhf.files import exporting
from openrlhf.models.backbone import RowModel
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.lora import prepare_for_training
from openrlhf.models.policy import PolicyModel
from openrlhf.models.scorer import ValueModel, load_scorer
from openrlhf.rows import PackedRow, Sample
from openrlhf.training.objectives.sft import SFTObjective


def load(model: str, kind: str, ds: DeepSpeedConfig) -> RowModel:
    options: dict[str, Any] = {"flag": "--model", "dtype": ds.param_dtype, "attention": "auto"}
    if kind == "policy":
        module: RowModel = PolicyModel(load_causal_lm(model, **options))
    else:
        scorer = load_scorer(model, tokenizer=AutoTokenizer.from_pretrained(model), **options)
        module = scorer if kind == "reward" else ValueModel(scorer.model)
    prepare_for_training(module.model, ds)
    return module


def export(model: str, folder: str, case: dict) -> None:
    case = dict(case)
    backend, kind, average = case.pop("backend"), case.pop("kind", "policy"), case.pop("average", False)
    lora = LoraConfig(rank=2) if case.pop("lora", False) else LoraConfig()
    ds = DeepSpeedConfig(**case, lora=lora)
    engine: Any = build_engine(
        partial(load, model, kind, ds),
        backend=backend,
        optim=OptimConfig(adam=AdamConfig(lr=1e-2), lr_warmup_ratio=0.0),
        ds=ds,
        total_steps=10,
        mesh=ProcessMesh.joined(),
        ema_beta=0.5 if average else None,
    )
    if kind == "policy":
        mask = torch.arange(20) > 3
        row = PackedRow.of([Sample(token_ids=torch.arange(3, 23), action_mask=mask)])
        engine.train_step([row], SFTObjective())
    with exporting(folder) as made:
        engine.export(str(made))


def on_rank(spec: dict) -> dict:
    for number, case in enumerate(spec["cases"]):
        export(spec["model"], f"{spec['out']}/{number}", case)
    return {"out": spec["out"]}
