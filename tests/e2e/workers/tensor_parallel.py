"""Two optimizer steps of several models at several ZeRO stages, and the second step once more, resumed;
reports what they compute and what is saved, exported and sent."""

from pathlib import Path

import torch
from workers.gradients import OBJECTIVES, experiences

from openrlhf.backends.deepspeed.engine import DeepSpeedEngine, DeepSpeedFrozen
from openrlhf.backends.distributed import ProcessMesh
from openrlhf.config.sections import AdamConfig, DeepSpeedConfig, OptimConfig
from openrlhf.tools.verify.layouts import step_with_gradients

TAG = "first"


def build_engine(spec: dict, case: dict, mesh: ProcessMesh) -> DeepSpeedEngine:
    # An update of lr g / (|g| + eps) errs by lr / eps times the error of the gradient.
    adam = AdamConfig(lr=spec["rate"], eps=spec["rate"], weight_decay=0.1)
    return DeepSpeedEngine(
        lambda: OBJECTIVES[case["objective"]][0](spec | case),
        optim=OptimConfig(adam=adam, lr_scheduler="constant", lr_warmup_ratio=0.0, max_norm=spec["max_norm"]),
        ds=DeepSpeedConfig(
            zero_stage=case["stage"],
            param_dtype=case.get("dtype", "fp32"),
            grad_accum_dtype=case.get("accumulated"),
        ),
        total_steps=2,
        ema_beta=0.5,
        mesh=mesh,
    )


def run(spec: dict, case: dict, mesh: ProcessMesh, folder: Path) -> dict:
    _, (objective, make) = OBJECTIVES[case["objective"]]
    batch = experiences()
    mine = range(mesh.data_rank, 10, mesh.data)  # ranks of one data coordinate have the same samples
    rows = [make(batch.select(list(mine[k : k + 3]))) for k in range(0, len(mine), 3)]
    engine = build_engine(spec, case, mesh)
    found, answers = {}, engine.forward(rows, read) if mesh.data == 1 else []
    gradients, metrics_of_first = step_with_gradients(engine, rows, objective)
    found |= gradients
    metrics = [metrics_of_first]
    engine.save_checkpoint(str(folder), TAG, {})
    metrics.append(engine.train_step(rows, objective))
    held = [p.detach().clone() for p in engine.module.parameters()]
    sent = {name: tensor.clone() for name, tensor in engine.weights()}
    shapes = [(name, tuple(sent[name].shape)) for name, _, _ in engine.weight_metadata()]
    assert shapes == [(name, shape) for name, _, shape in engine.weight_metadata()]
    engine.export(str(folder / "average"))
    engine.average = None
    engine.export(str(folder / "model"))
    resumed = build_engine(spec, case, mesh)
    resumed.load_checkpoint(str(folder), TAG)
    again = resumed.train_step(rows, objective)
    same = [torch.equal(a, b) for a, b in zip(held, resumed.module.parameters(), strict=True)]
    if mesh.is_first:
        torch.save({"gradients": found, "answers": answers, "sent": sent}, folder / "found.pt")
    return {
        "folder": str(folder),
        "metrics": metrics,
        "resumed": all(same) and again == metrics[1],
        "share": sum(p.numel() for p in held) / sum(t.numel() for t in sent.values()),
    }


def read(model, row):
    scores = model(getattr(row, "row", row))
    return scores if torch.is_tensor(scores) else scores.log_probs


def frozen(spec: dict, case: dict, mesh: ProcessMesh) -> list[list[float]]:
    """Returns the log-probs of a reference."""
    build = lambda: OBJECTIVES[case["objective"]][0](spec | case)
    ds = DeepSpeedConfig(zero_stage=case["stage"], param_dtype=case.get("dtype", "fp32"))
    model = DeepSpeedFrozen(build, ds=ds, offload=False, mesh=mesh)
    _, (_, make) = OBJECTIVES[case["objective"]]
    return [a.tolist() for a in model.forward([make(experiences().select([0, 1, 2]))], read)]


def on_rank(spec: dict) -> dict:
    mesh = ProcessMesh.joined(sequence=spec.get("sequence", 1), tensor=spec.get("tensor", 1))
    report = {}
    for name, case in spec["cases"].items():
        folder = Path(spec["out"]) / name
        folder.mkdir(exist_ok=True)
        report[name] = run(spec, case, mesh, folder) | {"frozen": frozen(spec, case, mesh)}
    return report
