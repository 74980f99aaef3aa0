"""DPO, IPO and cDPO: `python -m openrlhf.cli.train_dpo`, or the same under torchrun or deepspeed."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from openrlhf.cli.train_rm import pair_builder, pair_columns
from openrlhf.config.commands import DPO
from openrlhf.config.supervised import DPOConfig
from openrlhf.training import task
from openrlhf.training.reference import check_reference, reference_of, reference_path

if TYPE_CHECKING:
    from openrlhf.training.objectives.dpo import DPOObjective
    from openrlhf.types import PairRow


class DPOTask(task.Task[DPOConfig]):
    command = DPO
    module = "openrlhf.cli.train_dpo"

    def models(self) -> Mapping[str, str]:
        return {**super().models(), **reference_path(self.config)}

    def check_models(self) -> None:
        super().check_models()
        check_reference(self.config)

    def columns(self) -> Mapping[str, str | None]:
        return pair_columns(self.config)

    def builder(self) -> partial:
        return pair_builder(self.config, score_last_token=False)

    def collate(self, items: list) -> "PairRow":
        from openrlhf.types import PairRow

        return PairRow.of(items)

    def objective(self, run: task.Run[DPOConfig]) -> "DPOObjective":
        from openrlhf.training.objectives.dpo import DPOObjective, pair_log_probs

        model = self.config.model
        return DPOObjective(
            beta=model.beta,
            ipo=model.ipo_enable,
            label_smoothing=model.label_smoothing,
            nll_coef=model.nll_loss_coef,
            reference=reference_of(run, self.config.ref, read=pair_log_probs),
        )


def main(argv: Sequence[str] | None = None) -> None:
    task.main(DPOTask, argv)


if __name__ == "__main__":
    main()
