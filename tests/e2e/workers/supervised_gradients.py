"""Gradients and metrics of the supervised commands for several layouts of the same batch, at one ZeRO stage.

Everything up to the optimizer step is built by the command's own code. The learning rate is 0, so that one
engine can take the same step many times.
"""

import json
import shlex
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from workers.gradients import before_steps, chosen, full_gradient

from openrlhf.backends.distributed import init_distributed, leave_distributed
from openrlhf.cli.train_dpo import DPOTask
from openrlhf.cli.train_kd import DistillationTask
from openrlhf.cli.train_kto import KTOTask
from openrlhf.cli.train_prm import ProcessRewardTask
from openrlhf.cli.train_rm import RewardModelTask
from openrlhf.cli.train_sft import SFTTask
from openrlhf.config.parse import parse
from openrlhf.training.task import Run

TASKS = {
    "sft": SFTTask,
    "rm": RewardModelTask,
    "dpo": DPOTask,
    "kto": KTOTask,
    "prm": ProcessRewardTask,
    "kd": DistillationTask,
}
LAYOUTS = {
    # (rows in the order of the file, changes of `train.*`)
    "one by one": (False, {"micro_batch_size": 1}),
    "shuffled, three in a row": (True, {"micro_batch_size": 3}),
    "300 tokens in a row": (True, {"dynamic_batch_enable": True, "max_tokens_per_gpu": 300}),
    "all in a row": (False, {"dynamic_batch_enable": True, "max_tokens_per_gpu": 10**6}),
}


def started(command: str, flags: str) -> Run:
    unset_hf_deepspeed_config()  # as in a process of its own, where no model is sharded before the checks
    task, argv = TASKS[command], shlex.split(flags)
    return Run(task(parse(task.command, argv).config), argv, ExitStack())


def first_gradients(run: Run) -> Callable[[], dict[str, torch.Tensor]]:
    """Returns a function that returns the gradients of all parameters at the engine's last step."""
    found: dict[str, torch.Tensor] = {}

    def look() -> None:
        for name, param in run.engine.module.model.named_parameters():
            found[name] = full_gradient(param)

    before_steps(run.engine, look)
    return lambda: dict(found)


def steps(run: Run, layouts: Iterable[str] = LAYOUTS):
    """Yields (layout, gradients, metrics) of the training set as one batch."""
    gradients = first_gradients(run)
    objective = run.task.objective(run)
    prepare = run.task.prepare(run, objective) or (lambda rows: objective)
    train = run.task.config.train
    for layout in layouts:
        shuffle, changes = LAYOUTS[layout]
        run.task.config = replace(run.task.config, train=replace(train, **changes))
        windows = run.lay_out(run.train_set, batch_size=len(run.train_set), shuffle=shuffle)
        (rows,) = windows.epoch(0)
        metrics = run.engine.train_step(rows, prepare(rows))
        metrics |= {f"eval/{k}": v for k, v in run.engine.evaluate(rows, prepare(rows)).items()}
        run.task.finish(run)
        config = run.engine.module.model.config
        metrics |= {name: getattr(config, name) for name in ("mean", "std") if hasattr(config, name)}
        yield layout, gradients(), metrics


def main() -> None:
    spec = json.loads(sys.argv[1])
    init_distributed()
    report = {}
    for place, (name, flags) in enumerate(spec["commands"].items()):
        layout = f"--train.backend {spec['backend']} --ds.zero_stage {spec['stage']}"
        run = started(name.split()[0], f"{spec['common']} {layout} {flags}")
        for layout, gradients, metrics in steps(run, chosen(LAYOUTS, place, spec["layouts"])):
            path = f"{spec['out']}/{name} {layout}.pt"
            if dist.get_rank() == 0:
                torch.save(gradients, path)
            report[f"{name}: {layout}"] = {"gradients": path, "metrics": metrics}
    Path(f"{spec['out']}/rank{dist.get_rank()}.json").write_text(json.dumps(report))
    leave_distributed()


if __name__ == "__main__":
    main()
