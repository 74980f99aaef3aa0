"""The checks of an RL run on a rank of the policy or the critic."""

from collections.abc import Sequence
from dataclasses import field

import numpy as np
import torch

from openrlhf.api import Batch, CriticWorker, Hook, Metrics, PackedRow, PolicyWorker, not_none
from openrlhf.tools.reference.objectives import plain_learning_rate
from openrlhf.tools.selftest.invariants import check_first_pass, check_learning_rate
from openrlhf.tools.selftest.verify import check_log_probs, check_values, is_whole, verify_step
from openrlhf.tools.selftest.verify_rl import check_policy_loss, check_value_loss


class RankChecks(Hook):
    """The first optimizer step of a run's first `train.verify_steps` updates by a second computation, the
    learning rate of each step, and log-probs before and in an update."""

    worker: PolicyWorker | CriticWorker
    num_verified: int = field(default=0, init=False)

    def before_update(self, batch: Batch, mini_batches: Sequence[Sequence[int]], kl_coef: float) -> None:
        worker, config = self.worker, self.worker.config
        if self.num_verified >= config.train.verify_steps:
            return
        self.num_verified += 1
        rows, step = worker.rows(batch, mini_batches[0]), worker.model.steps + 1
        verify_step(
            worker.model,
            rows,
            worker.objective(kl_coef),
            step,
            ds=config.ds,
            mesh=worker.mesh,
            temperature=config.rollout.temperature,
        )
        if rows[0].row.num_actions.sum():
            if isinstance(worker, PolicyWorker):
                check_policy_loss(config, kl_coef, rows[0], step)
            else:
                check_value_loss(config, rows[0], step)
        if (first := mini_batches[0]) and is_whole(worker.model.module.model, worker.mesh):
            some = sorted({first[0], first[len(first) // 2], first[-1]})
            self._check_outputs(batch.select(some), step)

    def _check_outputs(self, sequences: Batch, step: int) -> None:
        model, config = self.worker.model.module.model, self.worker.config
        row, dtype = PackedRow.from_batch(sequences), config.ds.param_dtype
        if isinstance(self.worker, CriticWorker):
            check_values(model, row, torch.from_numpy(not_none(sequences.values)), dtype=dtype, step=step)
        elif sequences.log_probs is not None:
            log_probs, temperature = torch.from_numpy(sequences.log_probs), config.rollout.temperature
            check_log_probs(model, row, log_probs, temperature=temperature, dtype=dtype, step=step)

    def after_step(self, step: int, metrics: Metrics) -> None:
        expected = plain_learning_rate(self.worker.optim, step - 1, self.worker.total_steps)
        check_learning_rate(metrics, expected, self.worker.config.ds.param_dtype, step)

    def first_pass(self, before: np.ndarray, now: np.ndarray, step: int) -> None:
        ds = self.worker.config.ds
        if ds.lora.dropout == 0:
            check_first_pass(before, now, ds.param_dtype, step)
