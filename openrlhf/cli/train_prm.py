"""Process reward models: `python -m openrlhf.cli.train_prm`, or the same under torchrun or deepspeed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from openrlhf.config.supervised_commands import PRM
from openrlhf.loop.supervised import command

if TYPE_CHECKING:
    from openrlhf.loop.supervised.prm import ProcessRewardTask


def load_task() -> "type[ProcessRewardTask]":
    from openrlhf.loop.supervised.prm import ProcessRewardTask

    return ProcessRewardTask


def main(argv: Sequence[str] | None = None) -> None:
    command.main(PRM, load_task, argv)


if __name__ == "__main__":
    main()
