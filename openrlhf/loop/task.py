"""The steps that all supervised commands share: check, load, train, evaluate, save. Each command defines a
`Task`."""

import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import fields
from functools import cache, partial
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, get_type_hints

from openrlhf import heap
from openrlhf.checkpoint.start import (
    check_output,
    check_places,
    check_space,
    choose_checkpoint,
    continuing,
    day_of,
    grace_of,
    lock_folders,
    move_old_checkpoints,
    origin_of,
    position,
)
from openrlhf.config.checks import SCATTERED, check_launcher
from openrlhf.config.command import Command
from openrlhf.config.fields import flag_of
from openrlhf.config.parse import parse, to_yaml
from openrlhf.config.supervised import MODEL_FLAG, SupervisedConfig
from openrlhf.errors import (
    ErrorCode,
    Stopped,
    UsageError,
    catch_signals,
    counted,
    noting_position,
    short_errors,
)
from openrlhf.files import exporting
from openrlhf.hub import choose_hub
from openrlhf.observability.startup import StartClock, process_clock
from openrlhf.text import Calendar
from openrlhf.training.publish import publish

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from openrlhf.backends.base import FrozenModel, Objective, Row
    from openrlhf.backends.distributed import ProcessMesh
    from openrlhf.checkpoint.folder import CheckpointFolder
    from openrlhf.checkpoint.origin import Origin
    from openrlhf.data.batches import Dataset, TokenisedDataset, Windows
    from openrlhf.data.image_rows import ImageColumn
    from openrlhf.data.sources import Rows
    from openrlhf.loop.sft import SupervisedTrainer
    from openrlhf.models.backbone import RowModel
    from openrlhf.observability.observer import Observer

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
        """Raises UsageError for a missing or unsuitable model, before anything is loaded."""
        from openrlhf.models.loading import check_model
        from openrlhf.models.saving import check_saving

        for flag, path in self.models().items():
            check_model(path, flag)
        check_saving(self.config.model.model_name_or_path, MODEL_FLAG, reader_of(self.config))
        if self.config.model.aux_loss_coef > 0:
            from openrlhf.models.experts import check_experts

            check_experts(self.config.model.model_name_or_path, MODEL_FLAG)
        if (size := self.config.ds.tensor_parallel_size) > 1:
            from openrlhf.models.tensor_parallel import check_tensor_parallel

            for flag, path in self.models().items():
                check_tensor_parallel(path, flag, size)

    def columns(self) -> dict[str, str | None]:
        """Returns flag -> column name."""
        data = self.config.data
        keys = (*self.column_keys, *(("image_key",) if data.reads_images else ()))
        columns = {f"--data.{key}": getattr(data, key) for key in keys}
        return columns | {"--data.tools_key": getattr(data, "tools_column", None)}

    def images(self, tokenizer: "PreTrainedTokenizerBase") -> "ImageColumn | None":
        """Returns the image column of the rows; None without one."""
        from openrlhf.data.image_rows import ImageColumn

        if not self.config.data.reads_images:
            return None
        return ImageColumn.of(self.config.data, self.config.model.model_name_or_path, MODEL_FLAG, tokenizer)

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
    def objective(self, run: "Run[ConfigT]") -> "Objective":
        """Builds the objective to minimise."""

    def prepare(
        self, run: "Run[ConfigT]", objective: "Objective"
    ) -> "Callable[[Sequence[Any]], Objective] | None":
        """Returns a function from the rows of an optimizer step to their objective, if the objective needs a
        statistic of the whole batch first. Otherwise returns None."""
        return None

    def finish(self, run: "Run[ConfigT]") -> None:
        """Runs after the last step, before the model is saved."""


class Run(Generic[ConfigT]):
    """The parts of a supervised command on one rank."""

    shares_prefixes = False
    """True if the model computes common prefixes once. Rows are then filled accordingly, unless they have
    images."""

    def __init__(
        self, task: Task[ConfigT], argv: Sequence[str], held: ExitStack, clock: StartClock | None = None
    ) -> None:
        """Builds the run, and locks its folders until `held` is closed. `clock`: measures the stages."""
        from openrlhf.observability.progress import waiting

        self.clock = clock = clock or StartClock()
        with waiting("loading libraries, connecting to the other ranks"), clock.stage("libraries"):
            from openrlhf.backends.build import build_engine
            from openrlhf.backends.distributed import (
                ProcessMesh,
                from_first,
                init_distributed,
                seed_everything,
            )
            from openrlhf.models.loading import tell_stops

            heap.freeze()
            init_distributed(timeout_minutes=task.config.train.rank_timeout / 60 + 1)
            self.mesh = ProcessMesh.joined(
                sequence=task.config.ds.ring_attn_size, tensor=task.config.ds.tensor_parallel_size
            )
        self.task, self.config, self.argv = task, task.config, argv
        config = task.config
        seed_everything(config.train.seed, config.train.full_determinism_enable)
        with clock.stage("data"):
            Calendar.today = from_first(partial(day_of, config))
            self.tokenizer = load_tokenizer_of(config)
            if task.learns_ends:
                tell_stops(config, self.tokenizer, learns=True)
            self.train_set, self.eval_set = build_datasets(task, self.tokenizer)
        self.windows = self.lay_out(self.train_set, batch_size=config.train.batch_size, shuffle=True)
        self.total_steps = config.train.total_steps(len(self.windows))
        self.checkpoints = self._checkpoints()
        self.tag = self._choose_checkpoint(held)
        with waiting("loading the model", key=config.model.model_name_or_path), clock.stage("model"):
            self.engine = build_engine(
                self._build_model,
                backend=config.train.backend,
                optim=config,
                ds=config.ds,
                total_steps=self.total_steps,
                gradient_checkpointing=config.model.gradient_checkpointing_enable,
                reentrant=config.model.gradient_checkpointing_reentrant,
                dropout=config.model.dropout_enable,
                skip_nonfinite=config.train.on_nonfinite == "skip_step",
                mesh=self.mesh,
            )
        self.shares_prefixes = self.engine.trains_on_prefixes and not config.data.reads_images
        self.windows = self.lay_out(self.train_set, batch_size=config.train.batch_size, shuffle=True)

    def _build_model(self) -> "RowModel":
        from openrlhf.models.lora import prepare_for_training
        from openrlhf.models.vision import freeze_vision

        module = self.task.load_model(self.tokenizer)
        if self.config.model.freeze_visual_encoder:
            freeze_vision(module.model)
        prepare_for_training(module.model, self.config.ds)
        return module

    def frozen(self, build_model: "Callable[[], RowModel]", offload: bool) -> "FrozenModel":
        """Builds a frozen model (a reference or a teacher) on the ranks of this run."""
        from openrlhf.backends.build import build_frozen

        config = self.config
        return build_frozen(
            build_model, backend=config.train.backend, ds=config.ds, offload=offload, mesh=self.mesh
        )

    def lay_out(self, dataset: "Dataset", *, batch_size: int, shuffle: bool) -> "Windows[Row]":
        """Returns this rank's part of the optimizer steps of an epoch."""
        return lay_out(
            self.task,
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            mesh=self.mesh,
            shares_prefixes=self.shares_prefixes,
        )

    def in_order(self, dataset: "Dataset") -> "Windows[Row]":
        """Returns batches that contain every item once, in order."""
        return self.lay_out(dataset, batch_size=self.config.train.batch_size, shuffle=False)

    def attach_reference(self, answers: "Callable[[TokenisedDataset], np.ndarray]") -> None:
        """Adds reference log-probs `answers(dataset)`, (n, 2), to the training set and the evaluation set.
        Each item has two samples."""
        from openrlhf.data.labelled import TwoSamples

        def attached(dataset: "TokenisedDataset") -> "TokenisedDataset":
            assert isinstance(dataset, TwoSamples)
            return dataset.with_reference(answers(dataset))

        self.train_set = attached(self.train_set)
        if self.eval_set is not None:
            self.eval_set = attached(self.eval_set)
        self.windows = self.lay_out(self.train_set, batch_size=self.config.train.batch_size, shuffle=True)

    def whole(self, dataset: "Dataset", most: int | None = None) -> list[Any]:
        """Returns this rank's rows of the whole dataset, or of its first `most` items, as if they were one
        batch."""
        return next(self.lay_out(dataset, batch_size=most or len(dataset), shuffle=False).epoch(0))

    def trainer(self) -> "SupervisedTrainer":
        """Returns the trainer, at the checkpoint or the beginning. On rank 0 it has an observer, which has
        started."""
        from openrlhf.backends.distributed import on_any_rank
        from openrlhf.loop.sft import SupervisedTrainer
        from openrlhf.observability.hooks.load import attached, hooks_of
        from openrlhf.observability.progress import waiting

        config, engine = self.config, self.engine
        objective = self.task.objective(self)
        prepare = self.task.prepare(self, objective)
        if config.model.aux_loss_coef > 0:
            objective, prepare = balanced(objective, prepare, config.model.aux_loss_coef)
        trainer = SupervisedTrainer(
            config=config,
            engine=engine,
            objective=objective,
            prepare=prepare,
            windows=self.windows,
            eval_rows=[] if self.eval_set is None else self.whole(self.eval_set),
            checkpoints=self.checkpoints,
            export=self.export,
            observer=None,
            hooks=[
                *attached("supervised", config, engine=engine, mesh=self.mesh, windows=self.windows),
                *hooks_of(config.train.hooks),
            ],
            on_any_rank=on_any_rank,
        )
        if self.tag is not None:
            with waiting("loading the checkpoint", key=config.model.model_name_or_path):
                trainer.resume(self.tag)
        if self.mesh.is_first:
            move_old_checkpoints(config, self.checkpoints, self.tag)
            trainer.observer = self._observer(resume_step=None if self.tag is None else trainer.step)
            trainer.observer.start(self.total_steps, done=trainer.step)
            trainer.observer.message(
                f"{len(self.train_set)} samples, {sum(self.train_set.lengths)} tokens, "
                f"{counted(len(self.windows), 'step')} an epoch; run folder {config.run_dir}"
            )
            for note in data_notes(config, len(self.train_set)):
                trainer.observer.message(f"note: {note}")
            trainer.observer.message(self._memory_of_rows())
            trainer.observer.started(self.clock)
        return trainer

    def train(self) -> None:
        """Trains from the checkpoint or the beginning, and saves and publishes the model."""
        from openrlhf.observability.progress import waiting

        config, trainer = self.config, self.trainer()
        with noting_position(partial(position, trainer)), trainer.stop.deferred(grace_of(config)):
            try:
                trainer.fit()
            finally:
                if trainer.observer:
                    trainer.observer.close()
            self.task.finish(self)
            with waiting("saving the model", key=config.model.model_name_or_path):
                self.export(config.ckpt.output_dir)
        if self.mesh.is_first:
            publish(
                config,
                self.task.command,
                base_model=config.model.model_name_or_path,
                datasets=config.data.dataset,
            )

    def _memory_of_rows(self) -> str:
        from openrlhf.backends.row_memory import memory_of_rows
        from openrlhf.device import own_bytes

        longest, estimate = max(self.train_set.lengths), self.engine.row_memory
        needs = memory_of_rows(estimate, self.config.train, longest, self.mesh.sequence, own_bytes())
        return f"estimated memory of a rank: {needs}"

    def _checkpoints(self) -> "CheckpointFolder":
        from openrlhf.checkpoint.folder import CheckpointFolder

        ckpt, universal = self.config.ckpt, self.config.ds.use_universal_ckpt
        origin = self._origin() if ckpt.is_used else None
        return CheckpointFolder(ckpt.folder, ckpt, origin=origin, universal=universal)

    def _choose_checkpoint(self, held: ExitStack) -> str | None:
        """Returns the tag of the checkpoint to resume from, the same on all ranks; None to start from the
        beginning. Rank 0 also locks the folders and prints."""
        from openrlhf.backends.distributed import from_first, machines_without
        from openrlhf.checkpoint.fork import find_or_fork

        ckpt = self.config.ckpt
        if ckpt.has_parts and (machines := machines_without(ckpt.folder)):
            text = SCATTERED.format(", ".join(machines))
            raise UsageError(ErrorCode.NOT_FOUND, text, flag="--ckpt.path", value=ckpt.folder)
        if self.mesh.is_first:
            lock_folders(self.config, self.checkpoints, held)
        found = from_first(partial(find_or_fork, self.config, self.checkpoints, self.total_steps))
        if self.mesh.is_first:
            check_space(self.config, self.checkpoints, self.total_steps)
            return choose_checkpoint(self.config, self.checkpoints, found)
        return self.checkpoints.choose(found)[0]

    def _origin(self) -> "Origin":
        from openrlhf.data.cache import arrays_digest

        config, checksum = self.config, arrays_digest(self.train_set.arrays())[:16]
        more = {"--data.dataset": f"{len(self.train_set)} samples (checksum {checksum})"}
        models = {flag: [path] for flag, path in self.task.models().items()}
        return origin_of(config, self.task.command, models, more)

    def export(self, folder: str) -> None:
        """Writes the model with its tokenizer or processor in Hugging Face format. Collective."""
        with exporting(folder) if self.mesh.is_first else nullcontext(folder) as made:
            self.engine.export(str(made))
            if self.mesh.is_first:
                reader_of(self.config, self.tokenizer).save_pretrained(made)

    def _observer(self, resume_step: int | None) -> "Observer":
        from openrlhf.observability.observer import Observer
        from openrlhf.observability.run_folder import RunFolder

        folder = RunFolder.create(
            self.config.run_dir,
            config_yaml=to_yaml(self.config),
            argv=["python", "-m", f"openrlhf.cli.train_{self.task.command.name}", *self.argv],
            resume=resume_step is not None and self.checkpoints.changed is None,
        )
        folder.write_fork(self.checkpoints.fork)
        return Observer(folder, self.config.logger, resume_step=resume_step)


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
    from openrlhf.observability.progress import checking

    check_places(task.config)
    check_output(task.config, resumes=task.config.ckpt.load_enable)
    with checking(), clock.stage("checks"):
        check_files(task)
    with ExitStack() as held:
        Run(task, argv, held, clock).train()


def check_files(task: Task) -> None:
    """Checks models and files before anything is loaded."""
    from openrlhf.data.sources import check_columns
    from openrlhf.observability.hooks.load import check_hooks
    from openrlhf.observability.trackers.load import trackers_of

    trackers_of(task.config.logger)
    check_hooks(task.config.train.hooks, task.config.train.verify_steps)
    data, evaluation = task.config.data, task.config.eval
    check = partial(check_columns, required_columns=task.columns(), bad_rows=data.bad_rows)
    check(data.dataset, flag="--data.dataset", split=data.dataset_split)
    if evaluation.dataset:
        check(evaluation.dataset, flag="--eval.dataset", split=evaluation.split)
    task.check_models()  # imports transformers, which takes longer than all of the above


def load_tokenizer_of(config: Any) -> "PreTrainedTokenizerBase":
    """Loads the tokenizer of `config.model`, the model to train or to query, as `config.data` says."""
    from openrlhf.models.loading import load_tokenizer

    return load_tokenizer(
        config.model.model_name_or_path,
        flag=MODEL_FLAG,
        use_fast=not config.data.disable_fast_tokenizer,
        chat_template=getattr(config.data, "tokenizer_chat_template", None),
    )


def reader_of(config: SupervisedConfig, tokenizer: "PreTrainedTokenizerBase | None" = None) -> Any:
    """Returns what is saved with the model: its tokenizer, or its processor if rows have images."""
    from openrlhf.models.loading import processor_around

    own = tokenizer or load_tokenizer_of(config)
    return processor_around(own, config.model.model_name_or_path) if config.data.reads_images else own


def lay_out(
    task: Task,
    dataset: "Dataset",
    *,
    batch_size: int,
    shuffle: bool,
    mesh: "ProcessMesh | None" = None,
    shares_prefixes: bool = False,
) -> "Windows[Row]":
    """Returns the optimizer steps of an epoch: the part of this rank of `mesh`, or all of it if `mesh` is
    None. `shares_prefixes`: see `Windows`."""
    from openrlhf.data.batches import Windows

    train = task.config.train
    tokens_of_row = train.max_tokens_per_gpu * (mesh.sequence if mesh else 1)
    return Windows(
        dataset,
        task.collate,
        batch_size=batch_size,
        micro_batch_size=None if train.dynamic_batch_enable else train.micro_batch_size,
        max_tokens=tokens_of_row if train.dynamic_batch_enable else None,
        data_rank=mesh.data_rank if mesh else 0,
        data_size=mesh.data if mesh else 1,
        seed=train.seed,
        shuffle=shuffle,
        shares_prefixes=shares_prefixes,
    )


def build_datasets(
    task: Task, tokenizer: "PreTrainedTokenizerBase"
) -> "tuple[TokenisedDataset, TokenisedDataset | None]":
    """Builds the training set and the evaluation set; the latter is None without evaluation."""
    evaluation = task.config.eval
    train_set = build_train_set(task, tokenizer)
    if not evaluation.dataset:
        return train_set, None
    return train_set, build_dataset(
        task,
        tokenizer,
        evaluation.dataset,
        flag="--eval.dataset",
        split=evaluation.split,
        max_samples=evaluation.max_samples,
    )


def build_train_set(task: Task, tokenizer: "PreTrainedTokenizerBase") -> "TokenisedDataset":
    data = task.config.data
    return build_dataset(
        task,
        tokenizer,
        data.dataset,
        flag="--data.dataset",
        split=data.dataset_split,
        probs=data.dataset_probs,
        max_samples=data.max_samples,
    )


def build_dataset(
    task: Task,
    tokenizer: "PreTrainedTokenizerBase",
    spec: str,
    *,
    flag: str,
    split: str,
    probs: str | None = None,
    max_samples: int | None = None,
) -> "TokenisedDataset":
    """Builds a dataset, or reads it from the data cache. Raises UsageError for sequences that are longer than
    a model's maximum length."""
    mix = {"split": split, "probs": probs, "max_samples": max_samples, "seed": task.config.train.seed}
    from openrlhf.data.encode import tell_losses

    dataset = tokenise(task, tokenizer, spec, flag, mix)
    tell_losses(dataset, flag, min(max_lengths_of(task).values(), default=None))
    check_lengths(task, dataset.sequence_lengths, flag)
    return dataset


def check_lengths(task: Task, lengths: Sequence[int], flag: str) -> None:
    """Raises UsageError if a sequence is longer than a model's maximum length. `data.max_len` may be larger
    than that, as long as no sequence is."""
    for model_flag, room in max_lengths_of(task).items():
        if max(lengths) > room:
            path, count = task.models()[model_flag], sum(length > room for length in lengths)
            text = (
                f"{count} of {len(lengths)} sequences of {flag} exceed the maximum length of {path} "
                f"({model_flag}),\n{room} tokens; the longest has {max(lengths)}.\nTruncate them with "
                f"--data.max_len {room}, or stretch the model's RoPE in its config.json (docs/models.md)."
            )
            limit, _, value = flag_of(task.config, "data.max_len").partition(" ")
            raise UsageError(ErrorCode.TOO_LONG, text, flag=limit, value=value)


def max_lengths_of(task: Task) -> dict[str, int]:
    """Returns flag -> maximum sequence length, for each model whose configuration limits it."""
    from openrlhf.models.loading import load_config, max_length_of

    rooms = {flag: max_length_of(load_config(path, flag)) for flag, path in task.models().items()}
    return {flag: room for flag, room in rooms.items() if room}


def tokenise(
    task: Task, tokenizer: "PreTrainedTokenizerBase", spec: str, flag: str, mix: Mapping[str, Any]
) -> "TokenisedDataset":
    """Tokenises the rows of `spec` for the task, using the data cache. `mix`: arguments of `load_rows` that
    select and order the rows."""
    from openrlhf.data.cache import cached, tokenizer_digest
    from openrlhf.data.sources import load_rows, rows_digest

    data, builder, images = task.config.data, task.builder(), task.images(tokenizer)

    @cache
    def rows() -> "Rows":
        return load_rows(spec, flag=flag, required_columns=task.columns(), bad_rows=data.bad_rows, **mix)

    def build() -> Any:
        return builder(rows(), tokenizer, **({} if images is None else {"images": images}))

    images_digest = "" if images is None else images.digest(rows())

    def kept() -> Any:
        key_parts = {
            "rows": rows_digest(spec, flag=flag, split=mix["split"]),
            "images": images_digest,
            "mix": mix,
            "tokenizer": tokenizer_digest(tokenizer),
            "builder": builder.func.__qualname__,
            "options": builder.keywords,
        }
        dataset_type = get_type_hints(builder.func)["return"]
        return cached(dataset_type, key_parts, build, cache_dir=data.cache_dir, source=spec)

    dataset = kept() if data.cache_enable else build()
    if images is not None:
        dataset.read_images_with(images.reader(rows()), images_digest)
    return dataset


def balanced(
    objective: "Objective", prepare: "Callable[[Sequence[Any]], Objective] | None", coef: float
) -> "tuple[Objective, Callable[[Sequence[Any]], Objective] | None]":
    """Adds the load-balancing loss of experts to the objective, and to those that `prepare` returns."""
    from openrlhf.training.objectives.balanced import BalancedObjective

    add = lambda inner: BalancedObjective(objective=inner, coef=coef)
    return add(objective), None if prepare is None else lambda rows: add(prepare(rows))
