"""Loads the weights of checkpoints into models that do not learn, as an evaluation alone does."""

import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from openrlhf.backends.build import build_engine
from openrlhf.backends.distributed import ProcessMesh, seed_everything
from openrlhf.backends.model_rank import TrainedRank
from openrlhf.config.sections import AdamConfig, DeepSpeedConfig, OptimConfig
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.rows import PackedRow, Sample
from openrlhf.training.objectives.sft import SFTObjective


def build(path: str, job: dict, *, learns: bool) -> TrainedRank:
    ds = DeepSpeedConfig(zero_stage=job["stage"], param_dtype=job["dtype"])
    gc.collect()  # an engine at stage 3 would shard every later model
    seed_everything(7, deterministic=False)
    return build_engine(
        lambda: PolicyModel(load_causal_lm(path, flag="--model", dtype=job["dtype"], attention="auto")),
        backend=job["backend"],
        optim=OptimConfig(adam=AdamConfig(lr=1e-2, weight_decay=0.5), lr_scheduler="constant"),
        ds=ds,
        total_steps=2,
        mesh=ProcessMesh.joined(),
        learns=learns,
    )


def state_bytes(engine: Any) -> int:
    """Returns the bytes of the optimizer's states, without counters of steps."""
    optimizer = engine.optimizer if hasattr(engine, "optimizer") else engine.engine.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    states = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in states if isinstance(value, torch.Tensor) and value.numel() > 1)


def run(path: str, job: dict, folder: Path) -> dict[str, Any]:
    engine = build(path, job, learns=True)
    before = {name: tensor.clone() for name, tensor in engine.weights()}
    ids = torch.arange(3, 23) + dist.get_rank()
    row = PackedRow.of([Sample(token_ids=ids, action_mask=torch.arange(20) > 3)])
    for _ in range(2):
        engine.train_step([row], SFTObjective())
    engine.save_checkpoint(str(folder), "one", {"step": 2})
    trained = {name: tensor.clone() for name, tensor in engine.weights()}
    with_states = state_bytes(engine)
    del engine
    engine = build(path, job, learns=False)
    state = engine.load_checkpoint(str(folder), "one")
    loaded = dict(engine.weights())
    return {
        "state": state,
        "steps": engine.steps,
        "states": [with_states, state_bytes(engine)],
        "trained": any(not torch.equal(before[name], tensor) for name, tensor in trained.items()),
        "same": trained.keys() == loaded.keys()
        and all(torch.equal(loaded[n], t) for n, t in trained.items()),
    }


def on_rank(spec: dict) -> list[dict]:
    jobs = enumerate(spec["jobs"])
    return [run(spec["model"], job, Path(spec["out"], str(number))) for number, job in jobs]
