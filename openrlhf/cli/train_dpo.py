"""DPO, IPO and cDPO: `python -m openrlhf.cli.train_dpo`, or the same under torchrun or deepspeed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from openrlhf.cli.train_rm import PairTask
from openrlhf.config.supervised import DPOConfig
from openrlhf.config.supervised_commands import DPO
from openrlhf.loop import task
from openrlhf.loop.reference import ComparedTask

if TYPE_CHECKING:
    from openrlhf.loop.supervised_run import SupervisedRun
    from openrlhf.training.objectives.dpo import DPOObjective


class DPOTask(PairTask[DPOConfig], ComparedTask[DPOConfig]):
    command = DPO
    score_last_token = False

    def objective(self, run: "SupervisedRun[DPOConfig]") -> "DPOObjective":
        from openrlhf.loop.reference_model import reference_of
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
