"""Process reward models: `python -m openrlhf.cli.train_prm`, or the same under torchrun or deepspeed."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from openrlhf.config.supervised import PRMConfig
from openrlhf.config.supervised_commands import PRM
from openrlhf.loop import task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from openrlhf.loop.supervised_run import SupervisedRun
    from openrlhf.models.process_reward import ProcessRewardModel
    from openrlhf.training.objectives.prm import ProcessObjective
    from openrlhf.types import StepsRow


class ProcessRewardTask(task.Task[PRMConfig]):
    command = PRM
    column_keys = ("input_key", "label_key")
    learns_ends = False

    def check_models(self) -> None:
        super().check_models()
        if tokens := self.config.data.reward_tokens:
            from openrlhf.data.steps import reward_token_ids

            reward_token_ids(task.load_run_tokenizer(self.config), tokens)

    def builder(self) -> partial:
        from openrlhf.data.steps import build_steps

        return self.bound(build_steps)

    def collate(self, items: list) -> "StepsRow":
        from openrlhf.types import StepsRow

        return StepsRow.of(items)

    def load_model(self, tokenizer: "PreTrainedTokenizerBase") -> "ProcessRewardModel":
        from openrlhf.models.process_reward import ProcessRewardModel

        return ProcessRewardModel(self.load_causal_lm())

    def objective(self, run: "SupervisedRun[PRMConfig]") -> "ProcessObjective":
        from openrlhf.data.steps import reward_token_ids
        from openrlhf.training.objectives.prm import ProcessObjective

        tokens = self.config.data.reward_tokens
        ids = None if tokens is None else reward_token_ids(run.tokenizer, tokens)
        return ProcessObjective(reward_token_ids=ids)


def main(argv: Sequence[str] | None = None) -> None:
    task.main(ProcessRewardTask, argv)


if __name__ == "__main__":
    main()
