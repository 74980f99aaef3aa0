"""DPO, IPO and cDPO: `python -m openrlhf.cli.train_dpo`, or the same under torchrun or deepspeed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from openrlhf.config.supervised_commands import DPO
from openrlhf.loop.supervised import command

if TYPE_CHECKING:
    from openrlhf.loop.supervised.dpo import DPOTask


def load_task() -> "type[DPOTask]":
    from openrlhf.loop.supervised.dpo import DPOTask

    return DPOTask


def main(argv: Sequence[str] | None = None) -> None:
    command.main(DPO, load_task, argv)


if __name__ == "__main__":
    main()
