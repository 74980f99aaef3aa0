"""Parts of a training run, each of which may resume from a checkpoint that other ranks saved."""

import gc

import torch
import torch.distributed as dist

from openrlhf.backends.deepspeed.engine import DeepSpeedEngine
from openrlhf.backends.distributed import seed_everything
from openrlhf.config.sections import AdamConfig, DeepSpeedConfig, LoraConfig, OptimConfig
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.lora import prepare_for_training
from openrlhf.models.policy import PolicyModel
from openrlhf.rows import PackedRow, Sample
from openrlhf.training.objectives.sft import SFTObjective
from openrlhf.types import Metrics

NUM_STEPS = 6
LENGTHS = (5, 9, 17, 30, 8, 12, 4, 22)
"""Lengths of the samples of each step, in tokens."""


def build_engine(model_path: str, job: dict) -> DeepSpeedEngine:
    dtype = job.get("dtype", "fp32")
    ds = DeepSpeedConfig(
        zero_stage=job["stage"],
        param_dtype=dtype,
        adam_offload=job.get("offload", False),
        grad_accum_dtype=job.get("grad_accum_dtype"),
        lora=LoraConfig(rank=job.get("rank", 0), alpha=8),
    )

    def build() -> PolicyModel:
        model = load_causal_lm(model_path, flag="--model", dtype=dtype, attention="auto")
        return PolicyModel(prepare_for_training(model, ds))

    gc.collect()  # an engine at stage 3 would shard every later model
    seed_everything(7, deterministic=False)
    return DeepSpeedEngine(
        build,
        optim=OptimConfig(
            optim=job.get("optim", "adam"),
            adam=AdamConfig(lr=1e-2, eps=1e-3, weight_decay=0.5),
            lr_scheduler="cosine_with_min_lr",
            lr_warmup_ratio=0.5,
            max_norm=0.0 if "optim" in job else 1.0,  # ZeRO would clip what Muon has made of a gradient
        ),
        ds=ds,
        total_steps=NUM_STEPS,
        ema_beta=0.8,
    )


def samples_of(step: int) -> list[Sample]:
    random = torch.Generator().manual_seed(step)
    ids = [torch.randint(3, 300, (length,), generator=random) for length in LENGTHS]
    return [Sample(token_ids=row, action_mask=torch.arange(len(row)) > 0) for row in ids]


def run(model_path: str, job: dict) -> dict[str, list[float]]:
    engine = build_engine(model_path, job)
    begin = engine.load_checkpoint(job["load"], "one")["step"] if "load" in job else 0
    metrics = steps(engine, begin, job["until"])
    engine.save_checkpoint(job["save"], "one", {"step": job["until"]})
    metrics += steps(engine, job["until"], job.get("then", job["until"]))
    engine.export(f"{job['save']}/model")
    return {name: [m[name] for m in metrics] for name in ("sft/loss", "grad_norm", "lr")}


def steps(engine: DeepSpeedEngine, begin: int, end: int) -> list[Metrics]:
    assert engine.steps == begin
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = [[PackedRow.of([s]) for s in samples_of(step)[rank::world]] for step in range(begin, end)]
    return [engine.train_step(of_step, SFTObjective()) for of_step in rows]


def on_rank(spec: dict) -> list[dict]:
    return [run(spec["model"], job) for job in spec["jobs"]]
