"""DPO, IPO and cDPO."""

from openrlhf.config.supervised import DPOConfig
from openrlhf.config.supervised_commands import DPO
from openrlhf.loop.supervised.reference import ComparedTask, reference_of
from openrlhf.loop.supervised.rm import PairTask
from openrlhf.loop.supervised.task import Parts
from openrlhf.training.objectives.dpo import DPOObjective, pair_log_probs


class DPOTask(PairTask[DPOConfig], ComparedTask[DPOConfig]):
    command = DPO
    score_last_token = False

    def objective(self, parts: Parts) -> DPOObjective:
        model = self.config.model
        return DPOObjective(
            beta=model.beta,
            ipo=model.ipo_enable,
            label_smoothing=model.label_smoothing,
            nll_coef=model.nll_loss_coef,
            reference=reference_of(self.config, parts, read=pair_log_probs),
        )
