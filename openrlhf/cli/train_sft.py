"""Supervised fine-tuning: `python -m openrlhf.cli.train_sft`, or the same under torchrun or deepspeed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from openrlhf.config.supervised_commands import SFT
from openrlhf.loop.supervised import command

if TYPE_CHECKING:
    from openrlhf.loop.supervised.sft import SFTTask


def load_task() -> "type[SFTTask]":
    from openrlhf.loop.supervised.sft import SFTTask

    return SFTTask


def main(argv: Sequence[str] | None = None) -> None:
    command.main(SFT, load_task, argv)


if __name__ == "__main__":
    main()
