"""Reward models: `python -m openrlhf.cli.train_rm`, or the same under torchrun or deepspeed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from openrlhf.config.supervised_commands import RM
from openrlhf.loop.supervised import command

if TYPE_CHECKING:
    from openrlhf.loop.supervised.rm import RewardModelTask


def load_task() -> "type[RewardModelTask]":
    from openrlhf.loop.supervised.rm import RewardModelTask

    return RewardModelTask


def main(argv: Sequence[str] | None = None) -> None:
    command.main(RM, load_task, argv)


if __name__ == "__main__":
    main()
