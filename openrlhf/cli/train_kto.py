"""KTO: `python -m openrlhf.cli.train_kto`, or the same under torchrun or deepspeed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from openrlhf.config.supervised_commands import KTO
from openrlhf.loop.supervised import command

if TYPE_CHECKING:
    from openrlhf.loop.supervised.kto import KTOTask


def load_task() -> "type[KTOTask]":
    from openrlhf.loop.supervised.kto import KTOTask

    return KTOTask


def main(argv: Sequence[str] | None = None) -> None:
    command.main(KTO, load_task, argv)


if __name__ == "__main__":
    main()
