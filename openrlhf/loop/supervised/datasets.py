"""The datasets of a supervised command: read, tokenised, kept in the data cache, laid out in batches."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, get_type_hints

import numpy as np
from transformers import PreTrainedTokenizerBase

from openrlhf import plugins
from openrlhf.backends.base import Row
from openrlhf.backends.distributed import ProcessMesh
from openrlhf.config.fields import format_flag
from openrlhf.config.supervised import MODEL_FLAG
from openrlhf.data.bad_rows import RESIZE
from openrlhf.data.batches import Dataset, MiniBatches
from openrlhf.data.cache import cached, tokenizer_digest
from openrlhf.data.encode import log_skipped
from openrlhf.data.image_rows import ImageColumn
from openrlhf.data.sources import Rows, load_rows, rows_digest
from openrlhf.data.store import Samples
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.loop.supervised.task import Task
from openrlhf.models.configurations import find_max_length, load_config
from openrlhf.models.tokenizers import missing_embeddings
from openrlhf.user_file import split


def build_datasets(task: Task, tokenizer: PreTrainedTokenizerBase) -> tuple[Samples, Samples | None]:
    """Builds the training set and the evaluation set; the latter is None without evaluation."""
    evaluation, train_set = task.config.eval, build_train_set(task, tokenizer)
    if not evaluation.dataset:
        return train_set, None
    mix = {"split": evaluation.split, "probs": None, "max_samples": evaluation.max_samples}
    return train_set, _build_dataset(task, tokenizer, evaluation.dataset, "--eval.dataset", mix)


def build_train_set(task: Task, tokenizer: PreTrainedTokenizerBase) -> Samples:
    data = task.config.data
    mix = {"split": data.dataset_split, "probs": data.dataset_probs, "max_samples": data.max_samples}
    return _build_dataset(task, tokenizer, data.dataset, "--data.dataset", mix)


def _build_dataset(
    task: Task, tokenizer: PreTrainedTokenizerBase, spec: str, flag: str, mix: Mapping[str, Any]
) -> Samples:
    """Builds a dataset, or reads it from the data cache. Raises UsageError for sequences that a model cannot
    read: longer than its maximum length, or with a token without an embedding. `mix`: see `tokenise`."""
    dataset = tokenise(task, tokenizer, spec, flag, {**mix, "seed": task.config.train.seed})
    log_skipped(dataset, flag, min(find_max_lengths(task).values(), default=None))
    check_lengths(task, dataset.sequence_lengths, flag)
    check_embeddings(task, tokenizer, dataset.arrays()["token_ids"], flag)
    return dataset


def check_embeddings(
    task: Task, tokenizer: PreTrainedTokenizerBase, token_ids: np.ndarray, flag: str
) -> None:
    """Raises UsageError if a model has no embedding for one of the tokens."""
    for model_flag, path in task.models().items():
        missing = missing_embeddings(tokenizer, load_config(path, model_flag))
        if missing and (found := np.isin(token_ids, [*missing])).any():
            token = missing[int(token_ids[found.argmax()])]
            text = (
                f"{found.sum()} tokens have no embedding in {path} ({model_flag}), first {token!r}: {RESIZE}"
            )
            raise UsageError(ErrorCode.INVALID_ROW, text, flag=flag)


def check_lengths(task: Task, lengths: Sequence[int], flag: str) -> None:
    """Raises UsageError if a sequence is longer than a model's maximum length. `data.max_len` may be larger
    than that, as long as no sequence is."""
    for model_flag, room in find_max_lengths(task).items():
        if max(lengths) > room:
            path, count = task.models()[model_flag], sum(length > room for length in lengths)
            text = (
                f"{count} of {len(lengths)} sequences of {flag} exceed the maximum length of {path} "
                f"({model_flag}),\n{room} tokens; the longest has {max(lengths)}.\nTruncate them with "
                f"--data.max_len {room}, or stretch the model's RoPE in its config.json (docs/models.md)."
            )
            limit, _, value = format_flag(task.config, "data.max_len").partition(" ")
            raise UsageError(ErrorCode.TOO_LONG, text, flag=limit, value=value)


def find_max_lengths(task: Task) -> dict[str, int]:
    """Returns flag -> maximum sequence length, for each model whose configuration limits it."""
    rooms = {flag: find_max_length(load_config(path, flag)) for flag, path in task.models().items()}
    return {flag: room for flag, room in rooms.items() if room}


def images_of(task: Task, tokenizer: PreTrainedTokenizerBase) -> ImageColumn | None:
    """Returns the image column of the rows; None without one."""
    return ImageColumn.of(task.config.data, task.config.model.model_name_or_path, MODEL_FLAG, tokenizer)


def tokenise(
    task: Task, tokenizer: PreTrainedTokenizerBase, spec: str, flag: str, mix: Mapping[str, Any]
) -> Samples:
    """Tokenises the rows of `spec` for the task, using the data cache. `mix`: arguments of `load_rows` that
    select and order the rows."""
    data, builder, images = task.config.data, task.builder(), images_of(task, tokenizer)

    @cache
    def rows() -> Rows:
        named = {"required_columns": task.config.columns, "row_func": data.row_func}
        return load_rows(spec, flag=flag, bad_rows=data.bad_rows, **named, **mix)

    def build() -> Any:
        return builder(rows(), tokenizer, **({} if images is None else {"images": images}))

    images_digest = "" if images is None else images.digest(rows())

    def kept() -> Any:
        key_parts = {
            "rows": rows_digest(spec, flag=flag, split=mix["split"]),
            "row_func": data.row_func and (split(data.row_func)[1], plugins.digest(data.row_func)),
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


def lay_out(
    task: Task,
    dataset: Dataset,
    *,
    batch_size: int,
    shuffle: bool,
    mesh: ProcessMesh | None = None,
    shares_prefixes: bool = False,
) -> MiniBatches[Row]:
    """Returns the optimizer steps of an epoch: the part of this rank of `mesh`, or all of it if `mesh` is
    None. `shares_prefixes`: see `MiniBatches`."""
    train = task.config.train
    tokens_of_row = train.max_tokens_per_gpu * (mesh.sequence if mesh else 1)
    return MiniBatches(
        dataset,
        task.row_type.of,
        batch_size=batch_size,
        micro_batch_size=None if train.dynamic_batch_enable else train.micro_batch_size,
        max_tokens=tokens_of_row if train.dynamic_batch_enable else None,
        data_rank=mesh.data_rank if mesh else 0,
        data_size=mesh.data if mesh else 1,
        seed=train.seed,
        shuffle=shuffle,
        shares_prefixes=shares_prefixes,
    )
