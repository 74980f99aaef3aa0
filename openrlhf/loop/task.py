"""A supervised command is a `Task`; it starts with flags and checks, and then with a `SupervisedRun`."""

import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from openrlhf.checkpoint.start import check_output, check_places, continuing
from openrlhf.config.checks import check_launcher
from openrlhf.config.command import Command
from openrlhf.config.parse import parse
from openrlhf.config.supervised import MODEL_FLAG, SupervisedConfig
from openrlhf.errors import Stopped, catch_signals, counted, short_errors
from openrlhf.hub import choose_hub
from openrlhf.observability.progress import checking, waiting
from openrlhf.observability.startup import StartClock, process_clock

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from openrlhf.backends.base import Objective, Row
    from openrlhf.loop.supervised_run import SupervisedRun
    from openrlhf.models.backbone import RowModel

ConfigT = TypeVar("ConfigT", bound=SupervisedConfig)


class Task(ABC, Generic[ConfigT]):
    """The dataset and objective of one supervised command. Methods import torch and transformers themselves,
    so that `--help` is fast."""

    command: ClassVar[Command]
    column_keys: ClassVar[Sequence[str]]
    """Options in the section `data` that name a column of the dataset. The image column is added if rows have
    images."""

    learns_ends = True
    """Whether answers are learned with their ends."""

    def __init__(self, config: ConfigT) -> None:
        self.config = config

    def models(self) -> Mapping[str, str]:
        """Returns flag -> name or path, for all models that read the rows."""
        return {MODEL_FLAG: self.config.model.model_name_or_path}

    def check_models(self) -> None:
        """Raises UsageError for models that do not go together. Each has been checked alone before."""

    def columns(self) -> dict[str, str | None]:
        """Returns flag -> column name."""
        data = self.config.data
        keys = (*self.column_keys, *(("image_key",) if data.reads_images else ()))
        columns = {f"--data.{key}": getattr(data, key) for key in keys}
        return columns | {"--data.tools_key": getattr(data, "tools_column", None)}

    @abstractmethod
    def builder(self) -> partial:
        """Returns a partial (rows, tokenizer) -> dataset with one item for each usable row. If rows have
        images, it is called with a third argument `images`. The data cache's key contains the partial's
        function and arguments."""

    def bound(self, build: Callable, **options: Any) -> partial:
        """Binds `options`, and the parameters of `build` that are named as flags of the section `data`."""
        data = {field.name: getattr(self.config.data, field.name) for field in fields(self.config.data)}
        return partial(build, **{n: data[n] for n in signature(build).parameters if n in data}, **options)

    @abstractmethod
    def collate(self, items: list) -> "Row":
        """Packs items of the dataset into one row."""

    def load_model(self, tokenizer: "PreTrainedTokenizerBase") -> "RowModel":
        """Builds the module to train, not yet on its device. The engine decides where to call it."""
        from openrlhf.models.policy import PolicyModel

        return PolicyModel(self.load_causal_lm())

    def load_causal_lm(self) -> "PreTrainedModel":
        from openrlhf.training.models import load_language_model

        path, in_4bit = self.config.model.model_name_or_path, self.config.ds.load_in_4bit
        return load_language_model(self.config, path, MODEL_FLAG, in_4bit=in_4bit)

    @abstractmethod
    def objective(self, run: "SupervisedRun[ConfigT]") -> "Objective":
        """Builds the objective to minimise."""

    def prepare(
        self, run: "SupervisedRun[ConfigT]", objective: "Objective"
    ) -> "Callable[[Sequence[Any]], Objective] | None":
        """Returns a function from the rows of an optimizer step to their objective, if the objective needs a
        statistic of the whole batch first. Otherwise returns None."""
        return None

    def finish(self, run: "SupervisedRun[ConfigT]") -> None:
        """Runs after the last step, before the model is saved."""


def data_notes(config: SupervisedConfig, num_samples: int) -> Iterator[str]:
    """Yields what a run of `num_samples` samples does otherwise than its flags say."""
    train, data, evaluation = config.train, config.data, config.eval
    steps, size = train.total_steps(math.ceil(num_samples / train.batch_size)), train.batch_size
    if num_samples < size:
        few = f"all {counted(num_samples, 'sample')}, fewer than --train.batch_size {size}"
        yield f"every optimizer step has {few}"
    if train.max_steps and steps < train.max_steps:
        end = f"with --train.max_epochs {train.max_epochs} the data is used up after step {steps}"
        yield f"--train.max_steps {train.max_steps} is not reached: {end}"
    same_split = evaluation.split == data.dataset_split or os.path.isfile(data.dataset)
    if evaluation.dataset == data.dataset and same_split:
        yield f"--eval.dataset {evaluation.dataset} is trained on: no held-out scores"


def main(task_type: type[Task], argv: Sequence[str] | None) -> None:
    """Runs a supervised command from its command line."""
    argv = sys.argv[1:] if argv is None else argv
    with short_errors():
        config = continuing(parse(task_type.command, argv))
        check_launcher()
        catch_signals()
        stopped = None
        try:
            run(task_type(config), argv, process_clock())
        except Stopped as stop:
            if not stop.is_at_boundary:
                raise
            stopped = stop
        from openrlhf.backends.distributed import leave_distributed

        leave_distributed()
        if stopped is not None:
            raise stopped


def run(task: Task, argv: Sequence[str] = (), clock: StartClock | None = None) -> None:
    """Trains on every rank and writes the model to `ckpt.output_dir`. The process group stays open. `clock`:
    began with the start of the run."""
    clock = clock or StartClock()
    choose_hub(task.config.use_ms)
    check_places(task.config)
    check_output(task.config, resumes=task.config.ckpt.load_enable)
    with checking(), clock.stage("checks"):
        check_files(task)
    with waiting("loading libraries"), clock.stage("libraries"):
        from openrlhf.loop.supervised_run import SupervisedRun
    with ExitStack() as held:
        SupervisedRun(task, argv, held, clock).train()


def check_files(task: Task) -> None:
    """Raises UsageError for unsuitable rows and models, before anything is loaded."""
    from openrlhf.loop.data_checks import check_data  # imports torch

    check_data(task)
    from openrlhf.loop.model_checks import check_models  # imports transformers: longer than all of the above

    check_models(task)


def load_run_tokenizer(config: Any) -> "PreTrainedTokenizerBase":
    """Loads the tokenizer of `config.model`, the model to train or to query, as `config.data` says."""
    from openrlhf.models.loading import load_tokenizer

    return load_tokenizer(
        config.model.model_name_or_path,
        flag=MODEL_FLAG,
        use_fast=not config.data.disable_fast_tokenizer,
        chat_template=getattr(config.data, "tokenizer_chat_template", None),
    )
