"""The base class of tasks: what one supervised command learns from, and what it minimises."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from inspect import signature
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from openrlhf.backends.base import Objective
from openrlhf.backends.distributed import ProcessMesh
from openrlhf.backends.model_rank import FrozenRank, TrainedRank
from openrlhf.config.command import Command
from openrlhf.config.supervised import MODEL_FLAG, SupervisedConfig
from openrlhf.data.batches import Dataset, MiniBatches
from openrlhf.data.store import Samples
from openrlhf.models.backbone import RowModel
from openrlhf.models.policy import PolicyModel
from openrlhf.training.models import load_language_model

ConfigT = TypeVar("ConfigT", bound=SupervisedConfig)


class Parts(Protocol):
    """Parts of a run on one rank, as its task uses them. `SupervisedRun` documents the methods."""

    engine: TrainedRank
    mesh: ProcessMesh
    tokenizer: PreTrainedTokenizerBase
    train_set: Samples
    eval_set: Samples | None

    def frozen(self, build_model: Callable[[], RowModel], offload: bool) -> FrozenRank: ...

    def lay_out(self, dataset: Dataset, *, batch_size: int, shuffle: bool) -> MiniBatches: ...

    def whole(self, dataset: Dataset, most: int | None = None) -> list[Any]: ...

    def attach_reference(self, answers: Callable[[Samples], np.ndarray]) -> None: ...


class Task(ABC, Generic[ConfigT]):
    """The dataset and objective of one supervised command."""

    command: ClassVar[Command]
    row_type: ClassVar[Any]
    """The class of packed rows, which `row_type.of` packs of items."""
    learns_ends = True
    """Whether answers are learned with their ends."""

    def __init__(self, config: ConfigT) -> None:
        self.config = config

    def models(self) -> Mapping[str, str]:
        """Returns flag -> name or path, for all models that read the rows."""
        return {MODEL_FLAG: self.config.model.model_name_or_path}

    def check_models(self) -> None:
        """Raises UsageError for models that do not go together. Each has been checked alone before."""

    @abstractmethod
    def builder(self) -> partial:
        """Returns a partial (rows, tokenizer) -> dataset with one item for each usable row. If rows have
        images, it is called with a third argument `images`. The data cache's key contains the partial's
        function and arguments."""

    def bound(self, build: Callable, **options: Any) -> partial:
        """Binds `options`, and the parameters of `build` that are named as flags of the section `data`."""
        data = {field.name: getattr(self.config.data, field.name) for field in fields(self.config.data)}
        return partial(build, **{n: data[n] for n in signature(build).parameters if n in data}, **options)

    def load_model(self, tokenizer: PreTrainedTokenizerBase) -> RowModel:
        """Builds the module to train, not yet on its device. The engine decides where to call it."""
        return PolicyModel(self.load_causal_lm())

    def load_causal_lm(self) -> PreTrainedModel:
        path, in_4bit = self.config.model.model_name_or_path, self.config.ds.load_in_4bit
        return load_language_model(self.config, path, MODEL_FLAG, in_4bit=in_4bit)

    @abstractmethod
    def objective(self, parts: Parts) -> Objective:
        """Builds the objective to minimise."""

    def prepare(self, parts: Parts, objective: Objective) -> Callable[[Sequence[Any]], Objective] | None:
        """Returns a function from the rows of an optimizer step to their objective, if the objective needs a
        statistic of the whole batch first. Otherwise returns None."""
        return None

    def finish(self, parts: Parts) -> None:
        """Runs after the last step, before the model is saved."""
