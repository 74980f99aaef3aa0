"""A trained model's DeepSpeed engine, whose configuration has options that are passed through."""

from typing import Any

from openrlhf.backends.deepspeed.engine import DeepSpeedEngine
from openrlhf.config.pass_through import PassThrough
from openrlhf.config.sections import DeepSpeedConfig, OptimConfig
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel


def on_rank(spec: dict) -> dict:
    engine: Any = DeepSpeedEngine(
        lambda: PolicyModel(load_causal_lm(spec["model"], flag="--model", dtype="fp32", attention="auto")),
        optim=OptimConfig(),
        ds=DeepSpeedConfig(param_dtype="fp32", config=PassThrough(spec["config"])),
        total_steps=1,
    )
    own = engine.engine
    return {"sub_group_size": own.zero_sub_group_size(), "clock": own.wall_clock_breakdown()}
