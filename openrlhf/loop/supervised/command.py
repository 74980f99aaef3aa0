"""Runs a supervised command: its flags, its checks, and then its `SupervisedRun`. Flags and rows are checked
before transformers is imported."""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from openrlhf.checkpoint.start import check_output, check_places, continuing
from openrlhf.config.checks import check_launcher
from openrlhf.config.command import Command
from openrlhf.config.parse import parse
from openrlhf.config.supervised import SupervisedConfig
from openrlhf.errors import Stopped, catch_signals, short_errors
from openrlhf.hub import choose_hub
from openrlhf.observability.startup import StartClock, process_clock
from openrlhf.observability.waits import checking, waiting

if TYPE_CHECKING:
    from openrlhf.loop.supervised.task import Task

    TaskLoader = Callable[[], type[Task[Any]]]
    """Imports the task of a command."""


def entry_point(command: Command, task: str) -> tuple["TaskLoader", Callable[..., None]]:
    """Returns the loader of a command's task, `module:NAME`, and the command's `main`."""
    load = partial(resolve_name, task)
    return load, partial(main, command, load)


def main(command: Command, load: "TaskLoader", argv: Sequence[str] | None = None) -> None:
    """Runs a supervised command from its command line."""
    argv = sys.argv[1:] if argv is None else argv
    with short_errors():
        config = continuing(parse(command, argv))
        check_launcher()
        catch_signals()
        stopped = None
        try:
            run(load, config, argv, process_clock())
        except Stopped as stop:
            if not stop.is_at_boundary:
                raise
            stopped = stop
        from openrlhf.backends.distributed import leave_distributed

        leave_distributed()
        if stopped is not None:
            raise stopped


def run(
    load: "TaskLoader", config: SupervisedConfig, argv: Sequence[str] = (), clock: StartClock | None = None
) -> None:
    """Trains on every rank and writes the model to `ckpt.output_dir`. The process group stays open. `clock`:
    began with the start of the run."""
    clock = clock or StartClock()
    choose_hub(config.use_ms)
    check_places(config)
    check_output(config, resumes=config.ckpt.load_enable)
    with checking(), clock.stage("checks"):
        task = checked_task(load, config)
    with waiting("loading libraries"), clock.stage("libraries"):
        from openrlhf.loop.supervised.run import SupervisedRun
    with ExitStack() as held:
        SupervisedRun(task, argv, held, clock).train()


def checked_task(load: "TaskLoader", config: SupervisedConfig) -> "Task":
    """Returns the task of a run. Raises UsageError for unsuitable rows and models, before any is loaded."""
    from openrlhf.loop.supervised.data_checks import check_data  # imports torch

    check_data(config)
    task = load()(config)  # imports transformers, which takes longer than all of the above
    from openrlhf.loop.supervised.model_checks import check_models

    check_models(task)
    return task
