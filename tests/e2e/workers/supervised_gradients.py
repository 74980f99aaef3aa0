"""Gradients and metrics of the supervised commands for several layouts of the same batch, at one ZeRO stage.

The layouts are those of `openrlhf verify`. The learning rate is 0, so that one engine can take the same step
many times.
"""

import shlex
from collections.abc import Iterable, Iterator
from contextlib import ExitStack

import torch
import torch.distributed as dist
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from workers.gradients import chosen

from openrlhf.config.parse import parse
from openrlhf.loop.supervised.dpo import DPOTask
from openrlhf.loop.supervised.kd import DistillationTask
from openrlhf.loop.supervised.kto import KTOTask
from openrlhf.loop.supervised.prm import ProcessRewardTask
from openrlhf.loop.supervised.rm import RewardModelTask
from openrlhf.loop.supervised.run import SupervisedRun
from openrlhf.loop.supervised.sft import SFTTask
from openrlhf.tools.verify.layouts import LAYOUTS, steps

TASKS = {
    "sft": SFTTask,
    "rm": RewardModelTask,
    "dpo": DPOTask,
    "kto": KTOTask,
    "prm": ProcessRewardTask,
    "kd": DistillationTask,
}


def started(command: str, flags: str) -> SupervisedRun:
    unset_hf_deepspeed_config()  # as in a process of its own, where no model is sharded before the checks
    task, argv = TASKS[command], shlex.split(flags)
    return SupervisedRun(task(parse(task.command, argv).config), argv, ExitStack())


def results(run: SupervisedRun, layouts: Iterable[str] = LAYOUTS) -> Iterator[tuple[str, dict, dict]]:
    """Yields (layout, gradients, metrics) of the training set as one batch."""
    for found in steps(run, layouts):
        evaluated = run.engine.evaluate(found.rows, found.objective)
        metrics = found.metrics | {f"eval/{name}": value for name, value in evaluated.items()}
        run.task.finish(run)
        config = run.engine.module.model.config
        metrics |= {name: getattr(config, name) for name in ("mean", "std") if hasattr(config, name)}
        yield found.layout, found.gradients, metrics


def on_rank(spec: dict) -> dict:
    report = {}
    for place, (name, flags) in enumerate(spec["commands"].items()):
        layout = f"--train.backend {spec['backend']} --ds.zero_stage {spec['stage']}"
        run = started(name.split()[0], f"{spec['common']} {layout} {flags}")
        for layout, gradients, metrics in results(run, chosen(LAYOUTS, place, spec["layouts"])):
            path = f"{spec['out']}/{name} {layout}.pt"
            if dist.get_rank() == 0:
                torch.save(gradients, path)
            report[f"{name}: {layout}"] = {"gradients": path, "metrics": metrics}
    return report
