"""Supervised fine-tuning: `python -m openrlhf.cli.train_sft`, or the same under torchrun or deepspeed."""

from collections.abc import Mapping, Sequence
from functools import partial

from openrlhf.cli import supervised
from openrlhf.config.commands import SFT
from openrlhf.config.supervised import KDConfig, SFTConfig


class SFTTask(supervised.Task[SFTConfig]):
    command = SFT
    module = "openrlhf.cli.train_sft"

    def columns(self) -> Mapping[str, str | None]:
        return response_columns(self.config)

    def builder(self) -> partial:
        return response_builder(self.config)

    def collate(self, items: list):
        from openrlhf.types import PackedRow

        return PackedRow.of(items)

    def objective(self, run):
        from openrlhf.objectives.sft import SFTObjective

        return SFTObjective()


def response_columns(config: SFTConfig | KDConfig) -> Mapping[str, str | None]:
    output_key = None if config.model.pretrain_mode_enable else config.data.output_key
    return {"--data.input_key": config.data.input_key, "--data.output_key": output_key}


def response_builder(config: SFTConfig | KDConfig) -> partial:
    """Samples with loss on the responses, or on everything with model.pretrain_mode_enable."""
    from openrlhf.datasets.sft import build_sft_samples

    return partial(
        build_sft_samples,
        input_key=config.data.input_key,
        output_key=config.data.output_key,
        apply_chat_template=config.data.apply_chat_template,
        input_template=config.data.input_template,
        multiturn=config.data.multiturn,
        pretrain=config.model.pretrain_mode_enable,
        max_len=config.data.max_len,
        bad_rows=config.data.bad_rows,
    )


def main(argv: Sequence[str] | None = None) -> None:
    supervised.main(SFTTask, argv)


if __name__ == "__main__":
    main()
