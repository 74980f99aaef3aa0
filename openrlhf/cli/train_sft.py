"""Supervised fine-tuning: `python -m openrlhf.cli.train_sft`, or the same under torchrun or deepspeed."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from openrlhf.config.supervised import KDConfig, SFTConfig
from openrlhf.config.supervised_commands import SFT
from openrlhf.loop import task

if TYPE_CHECKING:
    from openrlhf.loop.supervised_run import SupervisedRun
    from openrlhf.training.objectives.sft import SFTObjective
    from openrlhf.types import PackedRow

ConfigT = TypeVar("ConfigT", SFTConfig, KDConfig)


class ResponsesTask(task.Task[ConfigT]):
    """Task whose loss is on the responses, or on all tokens with model.pretrain_mode_enable."""

    column_keys = ("input_key", "output_key")

    def __init__(self, config: ConfigT) -> None:
        super().__init__(config)
        self.learns_ends = not config.model.pretrain_mode_enable

    def columns(self) -> dict[str, str | None]:
        plain_text = {"--data.output_key": None} if self.config.model.pretrain_mode_enable else {}
        return super().columns() | plain_text

    def builder(self) -> partial:
        from openrlhf.data.sft import build_sft_samples

        return self.bound(
            build_sft_samples,
            pretrain=self.config.model.pretrain_mode_enable,
            verify=self.config.train.verify_steps > 0,
        )

    def collate(self, items: list) -> "PackedRow":
        from openrlhf.types import PackedRow

        return PackedRow.of(items)


class SFTTask(ResponsesTask[SFTConfig]):
    command = SFT

    def objective(self, run: "SupervisedRun[SFTConfig]") -> "SFTObjective":
        from openrlhf.training.objectives.sft import SFTObjective

        return SFTObjective()


def main(argv: Sequence[str] | None = None) -> None:
    task.main(SFTTask, argv)


if __name__ == "__main__":
    main()
