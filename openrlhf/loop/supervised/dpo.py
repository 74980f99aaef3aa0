"""DPO, IPO and cDPO."""

from typing import TYPE_CHECKING

from openrlhf.config.supervised import DPOConfig
from openrlhf.config.supervised_commands import DPO
from openrlhf.loop.supervised.reference import ComparedTask, reference_of
from openrlhf.loop.supervised.rm import PairTask
from openrlhf.training.objectives.dpo import DPOObjective, pair_log_probs

if TYPE_CHECKING:
    from openrlhf.loop.supervised.run import SupervisedRun


class DPOTask(PairTask[DPOConfig], ComparedTask[DPOConfig]):
    command = DPO
    score_last_token = False

    def objective(self, run: "SupervisedRun[DPOConfig]") -> DPOObjective:
        model = self.config.model
        return DPOObjective(
            beta=model.beta,
            ipo=model.ipo_enable,
            label_smoothing=model.label_smoothing,
            nll_coef=model.nll_loss_coef,
            reference=reference_of(run, self.config.ref, read=pair_log_probs),
        )
