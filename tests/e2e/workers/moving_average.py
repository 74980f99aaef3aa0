"""Some steps with a moving average at several ZeRO stages, exported and saved halfway; or the second half,
resumed in this process."""

import gc
from pathlib import Path

import torch
import torch.distributed as dist

from openrlhf.backends.deepspeed.engine import DeepSpeedEngine
from openrlhf.backends.distributed import seed_everything
from openrlhf.config.sections import AdamConfig, DeepSpeedConfig, LoraConfig, OptimConfig
from openrlhf.models.checkpoint_layout import checkpoint_tensors
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.lora import prepare_for_training
from openrlhf.models.policy import PolicyModel
from openrlhf.rows import PackedRow, Sample
from openrlhf.training.objectives.sft import SFTObjective

TAG = "halfway"


def build_engine(spec: dict, case: dict, ema_beta: float | None) -> DeepSpeedEngine:
    dtype = case.get("dtype", "fp32")
    ds = DeepSpeedConfig(
        zero_stage=case["stage"],
        param_dtype=dtype,
        lora=LoraConfig(rank=case.get("rank", 0), alpha=spec["alpha"]),
    )

    def build() -> PolicyModel:
        model = load_causal_lm(spec["model"], flag="--model", dtype=dtype, attention="auto")
        return PolicyModel(prepare_for_training(model, ds))

    gc.collect()  # an engine at stage 3 would shard every later model
    seed_everything(spec["seed"], deterministic=False)
    return DeepSpeedEngine(
        build,
        optim=OptimConfig(
            adam=AdamConfig(lr=spec["lr"], eps=spec["eps"]),
            lr_scheduler="constant",
            lr_warmup_ratio=0.0,
            max_norm=0.0,
        ),
        ds=ds,
        total_steps=100,
        ema_beta=ema_beta,
    )


def weights(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """Returns the weights, adapters apart from what is below them."""
    stored = checkpoint_tensors(engine.module.model).items()
    return {name: tensor.clone() for name, tensor in engine._in_full(stored)}


def bits(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """Returns everything that this rank holds of the weights."""
    held = {}
    for name, param in engine.module.named_parameters():
        held[name] = param.detach().clone()
        held[f"shard of {name}"] = getattr(param, "ds_tensor", param).detach().clone()
    return held


def run(spec: dict, case: dict, rows: list[PackedRow], folder: Path) -> dict:
    engine = build_engine(spec, case, spec["beta"])
    seen = [weights(engine)]
    if "resume" in spec:
        assert engine.load_checkpoint(f"{spec['resume']}/{folder.name}", TAG) == {"step": spec["num_steps"]}
    else:
        for _ in range(spec["num_steps"]):
            engine.train_step(rows, SFTObjective())
            seen.append(weights(engine))
        engine.save_checkpoint(str(folder), TAG, {"step": spec["num_steps"]})
    for _ in range(spec["num_steps"]):
        engine.train_step(rows, SFTObjective())
        seen.append(weights(engine))
    before = bits(engine)
    engine.export(str(folder / "model"))
    after = bits(engine)
    seen.append(weights(engine))
    if dist.get_rank() == 0:
        torch.save(seen, folder / "weights.pt")
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    return {"folder": str(folder), "changed": changed}


def refusal(spec: dict, case: dict) -> str:
    engine = build_engine(spec, case, spec["beta"])
    try:
        engine.load_checkpoint(case["folder"], TAG)
    except ValueError as error:
        return str(error)
    return "loaded"


def save_without_average(spec: dict, folder: Path) -> None:
    build_engine(spec, {"stage": 2}, None).save_checkpoint(str(folder), TAG, {})


def load_without_average(spec: dict, case: dict, folder: Path) -> dict:
    engine = build_engine(spec, case, None)
    engine.load_checkpoint(case["folder"], TAG)
    engine.export(str(folder / "model"))
    sent = weights(engine)
    if dist.get_rank() == 0:
        torch.save([sent], folder / "weights.pt")
    return {"folder": str(folder)}


def on_rank(spec: dict) -> dict:
    rank, world = dist.get_rank(), dist.get_world_size()
    samples = [Sample(token_ids=ids, action_mask=mask) for ids, mask in torch.load(spec["samples"])]
    rows = [PackedRow.of(samples[rank::world])]
    out = Path(spec["out"])
    report: dict = {"cases": [run(spec, case, rows, out / str(i)) for i, case in enumerate(spec["cases"])]}
    if "refused" in spec:
        report["refused"] = refusal(spec, spec["refused"])
    if "resume" not in spec:
        save_without_average(spec, out / "without")
    if "ignored" in spec:
        report["ignored"] = load_without_average(spec, spec["ignored"], out / "ignored")
    return report
