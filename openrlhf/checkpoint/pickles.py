"""Unpickles checkpoint files. A pickle can run any code, so only the types that checkpoints contain are
allowed."""

import datetime
import io
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

import numpy as np
import torch

from openrlhf import types
from openrlhf.errors import ErrorCode, UsageError, first_line

_NUMPY_1 = "numpy.core.multiarray"
"""Module of NumPy 1 whose functions a file may name."""
_RECONSTRUCT: Any = np._core.multiarray._reconstruct
_SCALAR: Any = np._core.multiarray.scalar
_NUMPY: list[Any] = [
    *(_RECONSTRUCT, (_RECONSTRUCT, f"{_NUMPY_1}._reconstruct"), _SCALAR, (_SCALAR, f"{_NUMPY_1}.scalar")),
    *(np.ndarray, np.dtype, *{type(np.dtype(code)) for code in np.typecodes["All"]}),
]
"""Types of NumPy's arrays and numbers."""
_SAMPLES: list[Any] = [
    *(types.Prompt, types.Image, types.PromptGroup, types.Trajectory, types.Nuclei, types.Outcome),
    (types.Nuclei, "openrlhf.types.KeptSets"),  # its name in older checkpoints
    *(types._unpack_group, bytes, Decimal, datetime.date, datetime.time, datetime.datetime),
    *(datetime.timedelta, datetime.timezone),
]
"""Types of samples and prompts that wait for a later step, and of labels from parquet files."""


def load(file: str | os.PathLike, more: Iterable[Any] = (), **options: Any) -> Any:
    """Loads a file that `torch.save` wrote, on the CPU. `more`: further types that it may contain; `options`:
    those of `torch.load`. Raises UsageError for damage or any other type, without running its code."""
    with refusing(file), torch.serialization.safe_globals([*_NUMPY, *_SAMPLES, *more]):
        return torch.load(file, map_location="cpu", weights_only=True, **options)


def copy_loadable(content: Any, name: str) -> Any:
    """Returns a copy of what is saved under this name, as `load` restores it. Raises UsageError if it
    cannot."""
    file = io.BytesIO()
    try:
        torch.save(content, file)
        file.seek(0)
        with torch.serialization.safe_globals([*_NUMPY, *_SAMPLES]):
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # objects may raise anything when they are pickled
        text = f"no checkpoint can restore it: {_reason(error)}\n"
        text += "Keep numbers, texts, lists, tuples, sets, dicts, tensors and arrays."
        raise UsageError(ErrorCode.INVALID_VALUE, text, flag=name) from error


@contextmanager
def refusing(file: str | os.PathLike) -> Iterator[None]:
    """Turns every error that a damaged or forged file causes inside into a UsageError about the file."""
    try:
        yield
    except (OSError, MemoryError, UsageError):
        raise
    except Exception as error:  # a damaged pickle can raise any error
        raise refusal(file, error) from error


def refusal(file: str | os.PathLike, error: BaseException) -> UsageError:
    """Returns the error for a file that must not be unpickled."""
    text = (
        f"it is damaged, or holds objects that could run code: {_reason(error)}\n"
        "Resume from another checkpoint."
    )
    return UsageError(ErrorCode.DAMAGED_CHECKPOINT, text, flag="--ckpt.path", value=file)


def _reason(error: BaseException) -> str:
    lines = (line.strip() for line in str(error).splitlines() if "GLOBAL" in line)
    return next(lines, first_line(error))[:200]


def check_same_model(unknown: Iterable[str], missing: Iterable[str]) -> None:
    """Raises UsageError if checkpoint and model have different parameters. `unknown`: parameters of the
    checkpoint that the model lacks; `missing`: the reverse."""
    unknown, missing = sorted(unknown), sorted(missing)
    if missing or unknown:
        what = f"it has no {missing[0]}" if missing else f"this model has no {unknown[0]}"
        text = (
            f"the checkpoint belongs to another model: {what}.\n"
            "Resume with the model and the --ds.lora.* flags that it was saved with."
        )
        raise UsageError(ErrorCode.OTHER_RUN, text)
