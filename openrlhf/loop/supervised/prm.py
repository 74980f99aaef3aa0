"""Process reward models."""

from functools import partial

from transformers import PreTrainedTokenizerBase

from openrlhf.config.supervised import PRMConfig
from openrlhf.config.supervised_commands import PRM
from openrlhf.data.steps import build_steps, reward_token_ids
from openrlhf.loop.supervised.task import Parts, Task
from openrlhf.models.process_reward import ProcessRewardModel
from openrlhf.models.tokenizers import load_run_tokenizer
from openrlhf.rows import StepsRow
from openrlhf.training.objectives.prm import ProcessObjective


class ProcessRewardTask(Task[PRMConfig]):
    command = PRM
    row_type = StepsRow
    learns_ends = False

    def check_models(self) -> None:
        super().check_models()
        if tokens := self.config.data.reward_tokens:
            reward_token_ids(load_run_tokenizer(self.config), tokens)

    def builder(self) -> partial:
        return self.bound(build_steps)

    def load_model(self, tokenizer: PreTrainedTokenizerBase) -> ProcessRewardModel:
        return ProcessRewardModel(self.load_causal_lm())

    def objective(self, parts: Parts) -> ProcessObjective:
        tokens = self.config.data.reward_tokens
        ids = None if tokens is None else reward_token_ids(parts.tokenizer, tokens)
        return ProcessObjective(reward_token_ids=ids)
