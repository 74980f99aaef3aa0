"""Critic of a plain language model at several ZeRO stages; reports the head that every rank starts from."""

from pathlib import Path

from openrlhf.backends.deepspeed.engine import DeepSpeedEngine
from openrlhf.backends.distributed import seed_everything
from openrlhf.config.sections import DeepSpeedConfig, OptimConfig
from openrlhf.models.scorer import load_scorer


def start(spec: dict, stage: int, dtype: str, folder: Path) -> dict:
    seed_everything(spec["seed"], deterministic=False)
    engine = DeepSpeedEngine(
        lambda: load_scorer(
            spec["model"],
            flag="--critic.model_name_or_path",
            dtype=dtype,
            attention="auto",
            head_prefix=spec["head"],
        ),
        optim=OptimConfig(),
        ds=DeepSpeedConfig(zero_stage=stage, param_dtype=dtype),
        total_steps=1,
    )
    engine.export(str(folder))
    (head,) = [w[0].tolist() for name, w in engine.weights() if name == f"{spec['head']}.weight"]
    return {"head": head, "folder": str(folder)}


def on_rank(spec: dict) -> dict:
    out = Path(spec["out"])
    return {
        f"stage {stage}, {dtype}": start(spec, stage, dtype, out / f"{stage}-{dtype}")
        for stage in spec["stages"]
        for dtype in ("fp32", "bf16")
    }
