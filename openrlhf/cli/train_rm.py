"""Reward models: `python -m openrlhf.cli.train_rm`, or the same under torchrun or deepspeed."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from openrlhf.config.commands import RM
from openrlhf.config.supervised import DPOConfig, RMConfig
from openrlhf.training import task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from openrlhf.models.scorer import ScoreModel
    from openrlhf.training.objectives.rm import RewardObjective
    from openrlhf.types import PairRow

STATISTICS_FRACTION = 0.01
"""Of the training pairs, to tell mean and deviation of the scores where there is no evaluation set."""


class RewardModelTask(task.Task[RMConfig]):
    command = RM
    module = "openrlhf.cli.train_rm"

    def columns(self) -> Mapping[str, str | None]:
        return pair_columns(self.config)

    def builder(self) -> partial:
        model = self.config.model
        margin_key = "margin" if model.margin_loss_enable and model.loss_type == "sigmoid" else None
        return pair_builder(self.config, score_last_token=True, margin_key=margin_key)

    def collate(self, items: list) -> "PairRow":
        from openrlhf.types import PairRow

        return PairRow.of(items)

    def load_model(self, tokenizer: "PreTrainedTokenizerBase") -> "ScoreModel":
        from openrlhf.models.scorer import load_scorer

        config = self.config
        return load_scorer(
            config.model.model_name_or_path,
            flag="--model.model_name_or_path",
            dtype=config.ds.param_dtype,
            attention=config.ds.row_attention,
            max_len=config.data.max_len,
            head_prefix=config.ds.value_head_prefix,
            tokenizer=tokenizer,
            experts=config.ds.experts_implementation,
            liger=config.ds.use_liger_kernel,
            in_4bit=config.ds.load_in_4bit,
            images=config.data.reads_images,
        )

    def objective(self, run: task.Run[RMConfig]) -> "RewardObjective":
        from openrlhf.training.objectives.rm import RewardObjective

        return RewardObjective()

    def finish(self, run: task.Run[RMConfig]) -> None:
        """Write mean and deviation of the scores into the model's configuration: RL normalises by them."""
        from openrlhf.data.batches import FirstItems
        from openrlhf.training.objectives.rm import ScoreMoments

        num_pairs = math.ceil(STATISTICS_FRACTION * len(run.train_set))
        pairs = run.eval_set or FirstItems(run.train_set, num_pairs)
        moments = run.engine.evaluate(run.whole(pairs), ScoreMoments())
        config = run.engine.module.model.config
        config.mean = moments["mean"]
        config.std = max(moments["square"] - moments["mean"] ** 2, 1e-16) ** 0.5


def pair_columns(config: RMConfig | DPOConfig) -> dict[str, str | None]:
    data = config.data
    return {
        "--data.prompt_key": data.prompt_key,
        "--data.chosen_key": data.chosen_key,
        "--data.rejected_key": data.rejected_key,
        "--data.image_key": data.image_key if data.reads_images else None,
    }


def pair_builder(
    config: RMConfig | DPOConfig, *, score_last_token: bool, margin_key: str | None = None
) -> partial:
    from openrlhf.data.preference import build_pairs

    data = config.data
    return partial(
        build_pairs,
        prompt_key=data.prompt_key,
        chosen_key=data.chosen_key,
        rejected_key=data.rejected_key,
        apply_chat_template=data.apply_chat_template,
        input_template=data.input_template,
        max_len=data.max_len,
        score_last_token=score_last_token,
        margin_key=margin_key,
        bad_rows=data.bad_rows,
    )


def main(argv: Sequence[str] | None = None) -> None:
    task.main(RewardModelTask, argv)


if __name__ == "__main__":
    main()
