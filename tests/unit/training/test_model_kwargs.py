"""Options with which transformers loads the models of a run."""

from pathlib import Path
from typing import Any

from refusals import refused

from openrlhf.config.pass_through import PassThrough
from openrlhf.config.ppo import ACTOR_FLAG, REWARD_FLAG, ActorConfig, PPOConfig, RewardConfig
from openrlhf.config.supervised import DPOConfig, DPOModelConfig
from openrlhf.errors import ErrorCode
from openrlhf.loop.supervised.reference import REF_FLAG
from openrlhf.tasks.tiny_model import tiny_chat_model
from openrlhf.training.models import check_loadable, load_language_model, load_reward_model, model_kwargs


def run_with(**options: Any) -> PPOConfig:
    actor = ActorConfig(model_kwargs=PassThrough(options))
    return PPOConfig(actor=actor, reward=RewardConfig(model_kwargs=PassThrough(rms_norm_eps=0.25)))


def test_the_loaded_model_has_them(tmp_path: Path) -> None:
    path = str(tiny_chat_model(tmp_path))
    config = run_with(attention_dropout=0.125, use_safetensors=True)
    assert load_language_model(config, path, ACTOR_FLAG).config.attention_dropout == 0.125
    scorer: Any = load_reward_model(config, path, REWARD_FLAG).model
    assert scorer.config.rms_norm_eps == scorer.model.norm.variance_epsilon == 0.25


def test_a_reference_has_those_of_the_model_that_learns() -> None:
    config = DPOConfig(model=DPOModelConfig(model_kwargs=PassThrough(attention_dropout=0.5)))
    assert model_kwargs(config, REF_FLAG) == {"attention_dropout": 0.5}


def test_what_the_model_cannot_have_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    path = str(tiny_chat_model(tmp_path))
    expected = {"flag": "--actor.model_kwargs", "value": "atention_dropout"}
    with refused(ErrorCode.UNKNOWN_FLAG, **expected, told="did you mean attention_dropout?"):
        check_loadable(run_with(atention_dropout=0.5), path, ACTOR_FLAG)
    check_loadable(run_with(attention_dropout=0.5), path, ACTOR_FLAG)
    with refused(ErrorCode.INVALID_VALUE, flag="--actor.model_kwargs.attention_dropout", told="'high'"):
        check_loadable(run_with(attention_dropout="high"), path, ACTOR_FLAG)
