"""Builds the data of an RL run: training prompts, evaluation prompts and pre-training texts."""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from openrlhf.algorithms.curricula import CURRICULA, Curriculum
from openrlhf.config.checks import split_spec
from openrlhf.config.ppo import ACTOR_FLAG, CRITIC_FLAG, REWARD_FLAG, TEACHER_FLAG, PPOConfig
from openrlhf.data.bad_rows import BadRow
from openrlhf.data.encode import log_skipped
from openrlhf.data.image_rows import ImageColumn
from openrlhf.data.order import epoch_order
from openrlhf.data.prompt_sampler import PromptDataset, PromptDraws, PromptSampler, Shuffled
from openrlhf.data.prompts import build_prompts, source_names
from openrlhf.data.scored import end_token_id
from openrlhf.data.sft import build_sft_samples
from openrlhf.data.sources import Rows, load_rows
from openrlhf.data.store import SampleStore
from openrlhf.data.templates import PromptTemplate
from openrlhf.errors import ErrorCode, UsageError, counted
from openrlhf.models.configurations import check_room, load_config
from openrlhf.models.ends import log_stops
from openrlhf.models.tokenizers import (
    check_same_vocabulary,
    load_run_tokenizer,
    load_tokenizer,
    missing_embeddings,
    reads_tokens_like,
)
from openrlhf.rewards.models import check_conversations, has_own_template
from openrlhf.training.schedule import num_updates, prompts_of_steps
from openrlhf.types import Prompt

PRETRAIN_FLAG = "--data.pretrain_dataset"
TEMPLATE = "the model's chat template is not used"
USE_TEMPLATE = "set --data.apply_chat_template, or --data.input_template '{}' if prompts are right without it"


class RLData(NamedTuple):
    """The data of an RL run."""

    prompts: PromptDataset
    eval_prompts: PromptDataset
    """Empty without evaluation."""
    texts: SampleStore | None
    """None without data.pretrain_dataset."""
    tokenizer: PreTrainedTokenizerBase


def build_data(config: PPOConfig) -> RLData:
    """Reads all data of the run. Raises UsageError for models that cannot read it."""
    prompts, eval_prompts, tokenizer = build_prompt_datasets(config)
    if not config.rollout.stop:
        log_stops(config, tokenizer)
    texts = build_pretrain_texts(config, tokenizer, len(prompts))
    return RLData(prompts, eval_prompts, texts, tokenizer)


def build_prompt_datasets(
    config: PPOConfig,
) -> tuple[PromptDataset, PromptDataset, PreTrainedTokenizerBase]:
    """Returns the training prompts, the evaluation prompts and the policy's tokenizer."""
    data, evaluation = config.data, config.eval
    tokenizer = load_run_tokenizer(config)
    check_vocabularies(config, tokenizer)
    reader = PromptReader(config, tokenizer)
    flag, options = "--data.prompt_dataset", {"split": data.prompt_split, "max_samples": data.max_samples}
    if config.tasks and data.prompt_probs is None and len(split_spec(data.prompt_dataset)) > 1:
        prompts = reader.named_sets(data.prompt_dataset, flag, total=data.max_samples, **options)
    else:
        prompts = reader.prompts(reader.rows(data.prompt_dataset, flag, data.prompt_probs, **options), flag)
    options = {"split": evaluation.split, "max_samples": evaluation.max_samples}
    eval_prompts = reader.named_sets(evaluation.dataset or "", "--eval.dataset", **options)
    check_tasks(config, prompts.without_images, eval_prompts.without_images)
    check_reward_templates(config, tokenizer, [prompts.without_images, eval_prompts.without_images])
    return prompts, eval_prompts, tokenizer


class PromptReader:
    """Reads prompts with the columns and the template of the flags `data.*`."""

    def __init__(self, config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.images = ImageColumn.of(config.data, config.actor.model_name_or_path, ACTOR_FLAG, tokenizer)
        """Column of images; None without one."""

    def rows(
        self, spec: Any, flag: str, probs: str | None = None, *, split: str, max_samples: int | None
    ) -> Rows:
        return load_rows(
            spec,
            flag=flag,
            required_columns=prompt_columns(self.config),
            probs=probs,
            split=split,
            max_samples=max_samples,
            seed=self.config.train.seed,
            bad_rows=self.config.data.broken_rows,
            row_func=self.config.data.row_func,
        )

    def prompts(self, rows: Rows, flag: str, *, source: str = "default", first_id: int = 0) -> PromptDataset:
        config, data = self.config, self.config.data
        model_config = load_config(config.actor.model_name_or_path, ACTOR_FLAG)
        prompts = build_prompts(
            rows,
            self.tokenizer,
            input_key=data.input_key,
            label_key=config.label_key,
            apply_chat_template=data.apply_chat_template,
            input_template=data.input_template,
            max_len=data.max_len,
            bad_rows=data.bad_rows,
            source=source,
            first_id=first_id,
            images=self.images,
            tools_key=data.tools_key,
            by_task=bool(config.tasks),
            missing=missing_embeddings(self.tokenizer, model_config),
        )
        log_skipped(prompts, flag)
        return prompts

    def named_sets(
        self, spec: str, flag: str, *, split: str, max_samples: int | None, total: float = math.inf
    ) -> PromptDataset:
        """Returns the prompts of a list of datasets, whose names are the sources of rows without one.
        `max_samples`: maximum number of prompts of each; `total`: of all."""
        sets, found, num_rows = split_spec(spec), [], 0
        for item, source in zip(sets, source_names(sets), strict=True):
            rows = self.rows(item, flag, split=split, max_samples=max_samples)
            if not (count := min(len(rows), total - num_rows)):
                break
            rows = rows.take(range(int(count)))
            found.append(self.prompts(rows, flag, source=source, first_id=num_rows))
            num_rows += len(rows)
        return PromptDataset.joined(found)


def check_tasks(config: PPOConfig, prompts: Sequence[Prompt], eval_prompts: Sequence[Prompt]) -> None:
    """Raises UsageError for a task without prompts, and for a source of prompts without a quota or a
    reward."""
    trained, held_out = (Counter(prompt.source for prompt in those) for those in (prompts, eval_prompts))
    quotas, sources = config.task_values("quota"), trained | held_out
    for name in sorted({key.partition(".")[0] for key in config.tasks}):
        if name not in (known := trained if name in quotas else sources):
            text = f"no prompt has this datasource; there are {', '.join(known)}"
            raise UsageError(ErrorCode.NOT_FOUND, text, flag=f"--tasks.{name}")
    for source, count in sources.items() if config.tasks else ():
        if quotas and source in trained and source not in quotas:
            text = f"{counted(count, 'prompt')} with the datasource {source} would never be sampled.\n"
            text += f"Set --tasks.{source}.quota, or leave them out of the dataset."
            raise UsageError(ErrorCode.MISSING_FLAG, text, flag=f"--tasks.{source}.quota")
        needs_scores = source in held_out or config.algo.dynamic_filtering_enable or not config.uses_teacher
        if needs_scores and not config.for_source(source).has_rewards:
            text = f"{counted(count, 'prompt')} with the datasource {source} have no reward source.\n"
            text += f"Set --tasks.{source}.reward, or --reward.remote_url for all tasks without one."
            raise UsageError(ErrorCode.MISSING_FLAG, text, flag=f"--tasks.{source}.reward")


def build_sampler(config: PPOConfig, prompts: PromptDataset) -> PromptSampler | PromptDraws:
    """Returns the prompts of a run in the order in which they are sampled."""
    seed = config.train.seed
    if not config.draws_prompts:
        return PromptSampler(prompts, seed=seed, num_epochs=config.train.num_episodes)
    build: Callable[[], Curriculum] = Shuffled
    if name := config.data.curriculum:
        build = partial(CURRICULA[name].of, config.algo.options)
    size, quotas = config.rollout.batch_size, dict(sorted(config.task_values("quota").items()))
    return PromptDraws(prompts, seed=seed, batch_size=size, quotas=quotas, build=build)


def read_prompts(config: PPOConfig, source: Any, tokenizer: PreTrainedTokenizerBase) -> PromptDataset:
    """Returns the prompts of a file, folder or hub dataset, or of rows in memory, with the columns and the
    template of the flags `data.*`. A text or a list of messages is the input of a row."""
    data = config.data
    if isinstance(source, os.PathLike):
        source = os.fspath(source)
    elif isinstance(source, Sequence | Iterator) and not isinstance(source, str):
        source = [_as_row(row, data.input_key) for row in source]
    reader, flag = PromptReader(config, tokenizer), "prompts"
    return reader.prompts(
        reader.rows(source, flag, split=data.prompt_split, max_samples=data.max_samples), flag
    )


def _as_row(row: Any, key: str) -> Any:
    """Returns a row in memory, or its input alone, as a row of a file, with messages of any record."""
    row = {key: row} if isinstance(row, str | list | tuple) else row
    return {**row, key: _as_lists(row[key])} if isinstance(row, Mapping) and key in row else row


def _as_lists(value: Any) -> Any:
    """Converts mappings, tuples, arrays and messages of OpenAI's client to dicts and lists, at any depth."""
    if hasattr(value, "model_dump") or hasattr(value, "tolist"):
        value = value.model_dump() if hasattr(value, "model_dump") else value.tolist()
    if isinstance(value, Mapping):
        return {key: _as_lists(inner) for key, inner in value.items()}
    return [*map(_as_lists, value)] if isinstance(value, list | tuple) else value


def data_notes(
    config: PPOConfig, num_prompts: int, prompts: PromptDataset, eval_prompts: PromptDataset
) -> Iterator[str]:
    """Yields how a run of `num_prompts` prompts, of which `prompts` are known, departs from its flags."""
    train, size, steps = config.train, config.rollout.batch_size, prompts_of_steps(config, num_prompts)
    if (most := max(steps)) < size:
        samples = most * config.rollout.n_samples_per_prompt
        few = f"all {counted(most, 'prompt')}, fewer than --rollout.batch_size {size}"
        yield f"every step has {few}: {counted(samples, 'sample')}"
    if train.max_steps and len(steps) < train.max_steps:
        end = f"with --train.num_episodes {train.num_episodes} prompts are used up after step {len(steps)}"
        yield f"--train.max_steps {train.max_steps} is not reached: {end}"
    if eval_prompts and (shared := prompts.num_shared(eval_prompts)) >= len(eval_prompts) / 10:
        yield f"{shared} of {len(eval_prompts)} prompts of --eval.dataset are trained on: no held-out scores"


def missing_template(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, prompts: PromptDataset) -> str:
    """Returns evidence that prompts lack the chat template; "" if they have it, or another is chosen."""
    data, mark = config.data, "a question"
    if data.apply_chat_template or data.input_template or config.agents or not tokenizer.chat_template:
        return ""
    with suppress(BadRow):  # raised by a template that needs other messages
        end = PromptTemplate(tokenizer, True, None)(mark).partition(mark)[2].strip()
        if not any(end in prompt.text for prompt in prompts.without_images[:8]):
            return f"{config.actor.model_name_or_path} has one, and --data.apply_chat_template is not set"
    return ""


def build_pretrain_texts(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, num_prompts: int
) -> SampleStore | None:
    """Returns as many texts as the run's optimizer steps consume, in that order. A longer run begins with the
    same texts. None without data.pretrain_dataset."""
    data, train, column = config.data, config.train, pretrain_column(config)
    if data.pretrain_dataset is None:
        return None
    rows = load_rows(
        data.pretrain_dataset,
        flag=PRETRAIN_FLAG,
        required_columns=column,
        probs=data.pretrain_probs,
        split=data.pretrain_split,
        seed=train.seed,
        bad_rows=data.broken_rows,
    )
    taken = train.batch_size * num_updates(config, num_prompts, config.frozen_actor_steps)
    (input_key,) = column.values()
    texts = build_sft_samples(
        rows.take(epoch_order(len(rows), seed=train.seed, epoch=0)[:taken]),
        tokenizer,
        input_key=input_key,
        output_key=None,
        apply_chat_template=False,
        input_template=None,
        multiturn=False,
        pretrain=True,
        max_len=data.max_len,
        bad_rows=data.broken_rows,
    )
    log_skipped(texts, PRETRAIN_FLAG)
    return texts


def prompt_columns(config: PPOConfig) -> dict[str, str | None]:
    """Returns flag -> column name, for the columns of prompts; None: not used."""
    data = config.data
    image_key = data.image_key if data.max_images_per_prompt else None
    return {
        "--data.input_key": data.input_key,
        "--data.label_key": config.label_key,
        "--data.image_key": image_key,
        "--data.tools_key": data.tools_column,
    }


def pretrain_column(config: PPOConfig) -> dict[str, str]:
    """Returns flag -> column name, for the column of pre-training texts."""
    own = config.data.pretrain_key
    return {"--data.input_key": config.data.input_key} if own is None else {"--data.pretrain_key": own}


def check_reward_templates(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, sets: Sequence[Sequence[Prompt]]
) -> None:
    """Raises UsageError if a reward model's tokenizer has no end, if its own chat template cannot render the
    prompts, or if prompts have images and its chat template or tokenizer differs from the policy's."""
    for path in config.reward.models:
        own = load_tokenizer(path, flag=REWARD_FLAG)
        end_token_id(own)
        is_another = has_own_template(own, tokenizer) or not reads_tokens_like(own, tokenizer)
        if config.reads_images and is_another:
            text = (
                "the chat template or the tokenizer of this reward model differs from the policy's, so the "
                "places of\nimages are unknown. Use a reward model of the policy's family."
            )
            raise UsageError(ErrorCode.INVALID_MODEL, text, flag=REWARD_FLAG, value=path)
        if has_own_template(own, tokenizer):
            check_conversations(chain.from_iterable(sets), own, path)


def check_vocabularies(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UsageError if another model cannot read the policy's tokens, or sequences of the run's
    length."""
    if path := config.teacher.model_name_or_path:
        check_same_vocabulary(tokenizer, load_tokenizer(path, flag=TEACHER_FLAG), TEACHER_FLAG, path)
    if config.uses_critic:
        path = config.critic_path
        if not reads_tokens_like(load_tokenizer(path, flag=CRITIC_FLAG), tokenizer):
            text = (
                "the critic starts from this model, whose vocabulary differs from the policy's.\n"
                f"Name a model of the policy's family, such as {config.actor.model_name_or_path}."
            )
            raise UsageError(ErrorCode.INVALID_MODEL, text, flag=CRITIC_FLAG, value=path)
    for path in config.reward.models:
        own = load_tokenizer(path, flag=REWARD_FLAG)
        if reads_tokens_like(own, tokenizer):  # other tokenizers: length unknown
            model = load_config(path, REWARD_FLAG)
            check_room(model, config, "data.max_len", path=path)
