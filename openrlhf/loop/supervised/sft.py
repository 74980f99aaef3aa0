"""Supervised fine-tuning."""

from functools import partial
from typing import TypeVar

from openrlhf.config.supervised import KDConfig, SFTConfig
from openrlhf.config.supervised_commands import SFT
from openrlhf.data.sft import build_sft_samples
from openrlhf.loop.supervised.task import Parts, Task
from openrlhf.rows import PackedRow
from openrlhf.training.objectives.sft import SFTObjective

ConfigT = TypeVar("ConfigT", SFTConfig, KDConfig)


class ResponsesTask(Task[ConfigT]):
    """Task whose loss is on the responses, or on all tokens with model.pretrain_mode_enable."""

    row_type = PackedRow

    def __init__(self, config: ConfigT) -> None:
        super().__init__(config)
        self.learns_ends = not config.model.pretrain_mode_enable

    def builder(self) -> partial:
        return self.bound(
            build_sft_samples,
            pretrain=self.config.model.pretrain_mode_enable,
            verify=self.config.train.verify_steps > 0,
        )


class SFTTask(ResponsesTask[SFTConfig]):
    command = SFT

    def objective(self, parts: Parts) -> SFTObjective:
        return SFTObjective()
