"""Knowledge distillation: `python -m openrlhf.cli.train_kd`, or the same under torchrun or deepspeed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from openrlhf.config.supervised_commands import KD
from openrlhf.loop.supervised import command

if TYPE_CHECKING:
    from openrlhf.loop.supervised.kd import DistillationTask


def load_task() -> "type[DistillationTask]":
    from openrlhf.loop.supervised.kd import DistillationTask

    return DistillationTask


def main(argv: Sequence[str] | None = None) -> None:
    command.main(KD, load_task, argv)


if __name__ == "__main__":
    main()
