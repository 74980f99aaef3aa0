"""Checks the rows and trackers of a supervised command, without the import of transformers, which takes
longer than these checks."""

from functools import partial

from openrlhf.data.sources import check_columns
from openrlhf.loop.task import Task
from openrlhf.observability.hooks.load import check_hooks
from openrlhf.observability.trackers.load import build_trackers


def check_data(task: Task) -> None:
    """Raises UsageError for unsuitable rows, hooks and trackers, before anything is loaded."""
    build_trackers(task.config.logger)
    check_hooks(task.config.train.hooks, task.config.train.verify_steps)
    data, evaluation = task.config.data, task.config.eval
    check = partial(check_columns, required_columns=task.columns(), bad_rows=data.bad_rows)
    check(data.dataset, flag="--data.dataset", split=data.dataset_split)
    if evaluation.dataset:
        check(evaluation.dataset, flag="--eval.dataset", split=evaluation.split)
