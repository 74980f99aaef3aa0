"""Gradients of objectives and supervised commands on one mesh, each at its ZeRO stage and with its mode of
sharing rows."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from workers import gradients, supervised_gradients

from openrlhf.backends.distributed import ProcessMesh

CHOSEN = {"all": slice(None), "last": slice(-1, None)}
"""Slices of the layouts; the last layout has all samples in one row."""


def of_objective(spec: dict, mesh: ProcessMesh, objective: str) -> Iterator[tuple[str, dict, dict[str, Any]]]:
    build, *parts = gradients.OBJECTIVES[objective]
    for layout, (order, size) in list(gradients.LAYOUTS.items())[CHOSEN[spec["layouts"]]]:
        yield layout, gradients.gradients(spec, mesh, build, parts, order, size), {}


def of_command(spec: dict, command: str) -> Iterator[tuple[str, dict, dict[str, Any]]]:
    flags = (
        f"{spec['common']} --ds.zero_stage {spec['stage']} --ds.ring_attn_size {spec['sequence']} "
        f"--ds.sequence_parallel_mode {spec['mode']} --ds.tensor_parallel_size {spec['tensor']} "
        f"{spec['commands'][command]}"
    )
    run = supervised_gradients.started(command, flags)
    layouts = list(supervised_gradients.LAYOUTS)[CHOSEN[spec["layouts"]]]
    for layout, found, metrics in supervised_gradients.results(run, layouts):
        yield layout, found, {"metrics": metrics}


def on_rank(spec: dict) -> dict:
    mesh = ProcessMesh.joined(sequence=spec["sequence"], tensor=spec["tensor"])
    report = {}
    # While an engine of stage 3 lives, transformers loads every model in parts.
    for objective, mode, stage in sorted(spec["cases"], key=lambda case: case[2]):
        case = spec | {"mode": mode, "stage": stage}
        is_command = objective in spec["commands"]
        for layout, found, more in (
            of_command(case, objective) if is_command else of_objective(case, mesh, objective)
        ):
            name = f"{objective} {mode} stage {stage}: {layout}"
            path = f"{spec['out']}/{name}.pt"
            if dist.get_rank() == 0:
                torch.save(found, path)
            report[name] = {"gradients": path, **more}
    return report
