"""Loads the models of training commands that score: reward models and critics."""

from typing import Any

from openrlhf.models.scorer import ScoreModel, load_scorer
from openrlhf.training.models import loading_options


def load_reward_model(config: Any, path: str, flag: str, **options: Any) -> ScoreModel:
    """Loads a reward model, or a language model with a new head. `options`: further arguments of
    `load_scorer`."""
    head = config.ds.value_head_prefix
    return load_scorer(path, flag=flag, head_prefix=head, **loading_options(config, flag), **options)
