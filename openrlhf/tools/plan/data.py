"""Previews the training data of a supervised command: `openrlhf data preview COMMAND`."""

import sys
from collections.abc import Sequence

from openrlhf.api import (
    ErrorCode,
    UsageError,
    build_train_set,
    choose_hub,
    lay_out,
    load_tokenizer_of,
    parse,
    short_errors,
)
from openrlhf.api import SupervisedTask as Task
from openrlhf.api import check_supervised_files as check_files
from openrlhf.tools.command_line.run_files import TASKS, task_type_of
from openrlhf.tools.command_line.terminal import shows_colours

USAGE = f"""\
usage: openrlhf data preview {"|".join(TASKS)} [--samples N] [--no_color] [flags of that command]

Prints the first N samples (default: 3) as the command trains on them, with tokens that have a loss marked.
Then prints the first packed rows, and counts and lengths of the whole dataset. Loads the tokenizer, but no
model."""


def main(argv: Sequence[str] | None = None) -> None:
    with short_errors():
        match list(sys.argv[1:] if argv is None else argv):
            case [] | ["--help" | "-h", *_] | ["preview"] | ["preview", "--help" | "-h"]:
                print(USAGE)
            case ["preview", name, *flags] if name in TASKS:
                preview(task_type_of(name), flags)
            case ["preview", name, *_]:
                raise _unknown("data preview", name, f"it previews {', '.join(TASKS)}")
            case [name, *_]:
                raise _unknown("data", name, "there is `openrlhf data preview`")


def _unknown(command: str, name: str, remedy: str) -> UsageError:
    text = f"there is no such command; {remedy}"
    return UsageError(ErrorCode.UNKNOWN_FLAG, text, flag=f"openrlhf {command}", value=repr(name))


def preview(task_type: type[Task], flags: Sequence[str]) -> None:
    num_samples, no_color, rest = _take_own(flags)
    task = task_type(parse(task_type.command, rest).config)
    choose_hub(task.config.use_ms)
    check_files(task)
    show(task, num_samples=num_samples, coloured=not no_color and shows_colours())


def show(task: Task, *, num_samples: int, coloured: bool) -> None:
    """Prints samples, rows and a summary of the dataset, which is built as for training, with the same
    cache."""
    from openrlhf.tools.plan.preview import Preview

    config = task.config
    tokenizer = load_tokenizer_of(config)
    dataset = build_train_set(task, tokenizer)
    screen = Preview(sys.stdout, coloured=coloured)
    screen.first_tokens(tokenizer, is_chat=getattr(config.data, "apply_chat_template", False))
    for i in range(min(num_samples, len(dataset))):
        screen.item(i + 1, dataset[i], tokenizer)
    windows = lay_out(task, dataset, batch_size=config.train.batch_size, shuffle=True)
    screen.rows(next(windows.items(0)), dataset)
    screen.summary(dataset)


def _take_own(flags: Sequence[str]) -> tuple[int, bool, list[str]]:
    """Returns (number of samples, whether colours are off, flags of the supervised command)."""
    num_samples, no_color, rest = 3, False, []
    words = iter(flags)
    for word in words:
        name, equals, value = word.partition("=")
        name = name.replace("-", "_")
        if name == "__samples":
            value = value if equals else next(words, "")
            if not value.isdecimal():
                text = "expects a whole number"
                raise UsageError(ErrorCode.INVALID_VALUE, text, flag="--samples", value=value)
            num_samples = int(value)
        elif name == "__no_color":
            no_color = True
        else:
            rest.append(word)
    return num_samples, no_color, rest
