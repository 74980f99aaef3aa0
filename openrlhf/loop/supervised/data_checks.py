"""Checks the rows, hooks and trackers of a supervised command, without importing transformers, which takes
longer than these checks."""

from functools import partial

from openrlhf.config.supervised import SupervisedConfig
from openrlhf.data.sources import check_columns
from openrlhf.observability.hooks.load import check_hooks
from openrlhf.observability.trackers.load import build_trackers


def check_data(config: SupervisedConfig) -> None:
    """Raises UsageError for unsuitable rows, hooks and trackers, before anything is loaded."""
    build_trackers(config.logger)
    check_hooks(config.train.hooks, config.train.verify_steps)
    data, evaluation = config.data, config.eval
    check = partial(
        check_columns, required_columns=config.columns, bad_rows=data.bad_rows, row_func=data.row_func
    )
    check(data.dataset, flag="--data.dataset", split=data.dataset_split)
    if evaluation.dataset:
        check(evaluation.dataset, flag="--eval.dataset", split=evaluation.split)
