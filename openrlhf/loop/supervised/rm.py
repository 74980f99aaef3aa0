"""Reward models, and what they share with DPO: pairs of answers."""

import math
from functools import partial
from typing import ClassVar, TypeVar

from transformers import PreTrainedTokenizerBase

from openrlhf.config.supervised import MODEL_FLAG, DPOConfig, RMConfig
from openrlhf.config.supervised_commands import RM
from openrlhf.data.preference import build_pairs
from openrlhf.loop.supervised.task import Parts, Task
from openrlhf.models.scorer import ScoreModel
from openrlhf.rows import PairRow
from openrlhf.training.models import load_reward_model
from openrlhf.training.objectives.rm import RewardObjective, ScoreMoments

ConfigT = TypeVar("ConfigT", RMConfig, DPOConfig)

STATISTICS_FRACTION = 0.01
"""Fraction of the training pairs from which the scores' mean and standard deviation are estimated if there is
no evaluation set."""


class PairTask(Task[ConfigT]):
    """Task on pairs of answers to one prompt."""

    row_type = PairRow
    score_last_token: ClassVar[bool]
    """True if only the last token of each answer is scored (`build_pairs`)."""

    margin_key: str | None = None
    """Column with the margins; None if they are not used."""

    def builder(self) -> partial:
        options = {"score_last_token": self.score_last_token, "margin_key": self.margin_key}
        return self.bound(build_pairs, **options)


class RewardModelTask(PairTask[RMConfig]):
    command = RM
    score_last_token = True
    learns_ends = False

    def __init__(self, config: RMConfig) -> None:
        super().__init__(config)
        self.margin_key = config.margin_key

    def load_model(self, tokenizer: PreTrainedTokenizerBase) -> ScoreModel:
        config, in_4bit = self.config, self.config.ds.load_in_4bit
        path = config.model.model_name_or_path
        return load_reward_model(config, path, MODEL_FLAG, tokenizer=tokenizer, in_4bit=in_4bit)

    def objective(self, parts: Parts) -> RewardObjective:
        return RewardObjective()

    def finish(self, parts: Parts) -> None:
        """Writes the scores' mean and standard deviation to the model's config.json, for
        --reward.normalize_enable of RL."""
        num_pairs = math.ceil(STATISTICS_FRACTION * len(parts.train_set))
        pairs = parts.whole(parts.eval_set) if parts.eval_set else parts.whole(parts.train_set, num_pairs)
        moments = parts.engine.evaluate(pairs, ScoreMoments())
        config = parts.engine.module.model.config
        config.mean = moments["mean"]
        config.std = max(moments["square"] - moments["mean"] ** 2, 1e-16) ** 0.5
