"""A trained model's DeepSpeed engine, whose configuration has options that are passed through."""

import json
import sys
from pathlib import Path
from typing import Any

from openrlhf.backends.deepspeed.engine import DeepSpeedEngine
from openrlhf.backends.distributed import init_distributed, leave_distributed
from openrlhf.config.pass_through import PassThrough
from openrlhf.config.sections import DeepSpeedConfig, OptimConfig
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel


def main(spec: dict) -> None:
    init_distributed()
    engine: Any = DeepSpeedEngine(
        lambda: PolicyModel(load_causal_lm(spec["model"], flag="--model", dtype="fp32", attention="auto")),
        optim=OptimConfig(),
        ds=DeepSpeedConfig(param_dtype="fp32", config=PassThrough(spec["config"])),
        total_steps=1,
    )
    own = engine.engine
    found = {"sub_group_size": own.zero_sub_group_size(), "clock": own.wall_clock_breakdown()}
    (Path(spec["out"]) / "rank0.json").write_text(json.dumps(found))
    leave_distributed()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
