"""NaN in each kind of tensor of a step on one of the ranks; reports what changed and what was refused."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf.backends.build import build_engine
from openrlhf.backends.distributed import ProcessMesh, seed_everything
from openrlhf.backends.model_rank import MAX_SKIPPED, TrainedRank, held
from openrlhf.config.sections import AdamConfig, DeepSpeedConfig, OptimConfig
from openrlhf.errors import RunError
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.rows import PackedRow, Sample
from openrlhf.training.objectives.sft import SFTObjective

NAN = float("nan")


def build(spec: dict, case: dict, *, skips: bool) -> TrainedRank:
    backend = case.get("backend", "deepspeed")
    ds = DeepSpeedConfig(**{name: value for name, value in case.items() if name != "backend"})

    def load() -> PolicyModel:
        return PolicyModel(
            load_causal_lm(spec["model"], flag="--model", dtype=ds.param_dtype, attention="auto")
        )

    seed_everything(7, deterministic=False)
    engine: Any = build_engine(
        load,
        backend=backend,
        optim=OptimConfig(adam=AdamConfig(lr=1e-2), lr_scheduler="linear", lr_warmup_ratio=0.0),
        ds=ds,
        total_steps=100,
        mesh=ProcessMesh.joined(),
        ema_beta=None if backend == "torch" else 0.9,
        skip_nonfinite=skips,
    )
    return engine


def rows() -> list[PackedRow]:
    random = torch.Generator().manual_seed(dist.get_rank())
    mask = torch.arange(20) > 3
    ids = [torch.randint(3, 300, (20,), generator=random) for _ in range(2)]
    return [PackedRow.of([Sample(token_ids=row, action_mask=mask)]) for row in ids]


def weights(engine: TrainedRank) -> Iterator[tuple[str, Tensor]]:
    trained = engine.module.model.named_parameters()
    yield from ((name, held(p).detach()) for name, p in trained if p.requires_grad)


def content(engine: TrainedRank) -> list[Tensor]:
    """Returns everything that a checkpoint holds on this rank."""
    return [tensor.clone() for _, tensor in [*weights(engine), *engine._states()]]


def poisoned(what: str) -> Callable:
    """Returns an objective whose loss or metric is NaN in the second row of the last rank."""
    seen: list[int] = []

    def objective(model: Callable, row: PackedRow, norm: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = SFTObjective()(model, row, norm)
        seen.append(1)
        if len(seen) == 2 and dist.get_rank() == dist.get_world_size() - 1:
            if what == "loss":
                loss = loss * NAN
            elif what == "infinite loss":
                loss = loss + float("inf")
            elif what == "metric":
                metrics = metrics | {"sft/loss": metrics["sft/loss"] * NAN}
            else:  # a gradient alone
                loss = loss + (0 * loss).sqrt() * 0
        return loss, metrics

    return objective


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except RunError as error:
        return f"{error.code}: {error.text}"
    return ""


def inject(spec: dict, case: dict, folder: Path) -> dict:
    engine, is_last = build(spec, case, skips=True), dist.get_rank() == dist.get_world_size() - 1
    lr = [engine.train_step(rows(), SFTObjective())["lr"]]
    found: dict[str, Any] = {"skips": {}}
    for what in ("loss", "infinite loss", "metric", "gradient"):
        before = content(engine)
        metrics = engine.train_step(rows(), poisoned(what))
        after = content(engine)
        found["skips"][what] = {
            "changed": sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True)),
            "metrics": metrics,
            "step": engine.steps,
        }
    before = content(engine)
    good = engine.train_step(rows(), SFTObjective())
    changed = (not torch.equal(a, b) for a, b in zip(before, content(engine), strict=True))
    found["good"] = {"metrics": good, "changed": sum(changed), "lr": [*lr, good["lr"]]}

    tensors = dict(engine._states())
    state = tensors[next(name for name in sorted(tensors) if "exp_avg_sq" in name and len(tensors[name]))]
    flat = state.view(-1)
    kept = flat[0].clone()
    if is_last:
        flat[0] = NAN
    found["weights alone"] = error_of(lambda: engine.check_finite(states=False))
    found["state"] = error_of(lambda: engine.save_checkpoint(str(folder), "tag", {}))
    flat[0] = kept

    weight = next(w for _, w in weights(engine) if w.numel()).view(-1)
    kept = weight[0].clone()
    for value in (NAN, -float("inf")):
        if is_last:
            weight[0] = value
        found[f"save {value}"] = error_of(lambda: engine.save_checkpoint(str(folder), "tag", {}))
        found[f"export {value}"] = error_of(lambda: engine.export(str(folder / "export")))
        weight[0] = kept
    found["files"] = [str(path) for path in folder.rglob("*")]
    engine.save_checkpoint(str(folder), "tag", {})
    found["saved"] = len(list((folder / "tag").iterdir()))

    again = [error_of(lambda: engine.train_step(rows(), poisoned("loss"))) for _ in range(MAX_SKIPPED + 1)]
    found["again"] = (again[:-1], again[-1])
    weight = next(w for _, w in weights(engine) if w.numel()).view(-1)
    if is_last:
        weight[0] = NAN
    found["weight"] = error_of(lambda: engine.train_step(rows(), SFTObjective()))

    stopping = build(spec, case, skips=False)
    before = content(stopping)
    found["stop"] = error_of(lambda: stopping.train_step(rows(), poisoned("loss")))
    after = content(stopping)
    found["stop changed"] = sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return found


def on_rank(spec: dict) -> dict:
    out = Path(spec["out"])
    return {"cases": [inject(spec, case, out / f"case{i}") for i, case in enumerate(spec["cases"])]}
