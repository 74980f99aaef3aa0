"""Checks the rows, hooks and trackers of a supervised command, and tells what its flags do not say, without
importing transformers, which takes longer than these checks."""

import math
import os
from collections.abc import Iterator
from functools import partial

from openrlhf.config.supervised import SupervisedConfig
from openrlhf.data.sources import check_columns
from openrlhf.device import idle_gpus
from openrlhf.errors import counted
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


def data_notes(config: SupervisedConfig, num_samples: int) -> Iterator[str]:
    """Yields what a run of `num_samples` samples does otherwise than its flags and machine suggest."""
    train, data, evaluation = config.train, config.data, config.eval
    steps, size = train.total_steps(math.ceil(num_samples / train.batch_size)), train.batch_size
    if num_samples < size:
        few = f"all {counted(num_samples, 'sample')}, fewer than --train.batch_size {size}"
        yield f"every optimizer step has {few}"
    if train.max_steps and steps < train.max_steps:
        end = f"with --train.max_epochs {train.max_epochs} the data is used up after step {steps}"
        yield f"--train.max_steps {train.max_steps} is not reached: {end}"
    same_split = evaluation.split == data.dataset_split or os.path.isfile(data.dataset)
    if evaluation.dataset == data.dataset and same_split:
        yield f"--eval.dataset {evaluation.dataset} is trained on: no held-out scores"
    if idle := idle_gpus():
        yield f"{counted(idle, 'GPU')} without a rank: torchrun --nproc_per_node starts one on each GPU"
