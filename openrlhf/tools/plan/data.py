"""Shows the samples and rows that a supervised command would train on (`openrlhf data preview`)."""

import sys
from functools import partial
from typing import Any

from openrlhf.api import SupervisedTask as Task
from openrlhf.api import (
    build_train_set,
    checked_supervised_task,
    lay_out,
    load_run_tokenizer,
)
from openrlhf.tools.command_line.run_files import find_task_type
from openrlhf.tools.command_line.terminal import shows_colours
from openrlhf.tools.plan.preview import Preview


def preview(name: str, config: Any, num_samples: int, no_color: bool) -> None:
    task = checked_supervised_task(partial(find_task_type, name), config)
    show(task, num_samples=num_samples, coloured=not no_color and shows_colours())


def show(task: Task, *, num_samples: int, coloured: bool) -> None:
    """Prints samples, rows and a summary of the dataset, which is built as for training, with the same
    cache."""
    config = task.config
    tokenizer = load_run_tokenizer(config)
    dataset = build_train_set(task, tokenizer)
    screen = Preview(sys.stdout, coloured=coloured)
    screen.first_tokens(tokenizer, is_chat=getattr(config.data, "apply_chat_template", False))
    for i in range(min(num_samples, len(dataset))):
        screen.item(i + 1, dataset[i], tokenizer)
    mini_batches = lay_out(task, dataset, batch_size=config.train.batch_size, shuffle=True)
    screen.rows(next(mini_batches.items(0)), dataset)
    screen.summary(dataset)
