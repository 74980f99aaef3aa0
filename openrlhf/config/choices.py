"""Types of flag values: names and ranges. Imports nothing heavy, so that `--help` is fast."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from openrlhf.ranges import Range
from openrlhf.registry import Registry


@dataclass(frozen=True, slots=True, eq=False)
class OneOf:
    """Values of a flag: the names of a table, whose rows have a summary of each."""

    rows: Mapping[str, Any]

    def __contains__(self, name: str) -> bool:
        return name in self.rows

    def __str__(self) -> str:
        return f"one of {', '.join(self.names)}{self.others and f', or {self.others}'}"

    @property
    def names(self) -> list[str]:
        return self.rows.names if isinstance(self.rows, Registry) else list(self.rows)

    @property
    def others(self) -> str:
        return "package.module:NAME, or folder/file.py:NAME" if isinstance(self.rows, Registry) else ""

    @property
    def values(self) -> str:
        return "{" + ",".join(self.names) + "}" + (" | FILE.py:NAME" if self.others else "")

    @property
    def summary(self) -> str:
        return " ".join(f"{name}: {row.summary.removesuffix('.')}." for name, row in self.rows.items())


class TemplateText:
    """A Jinja template as a flag's value: its text, or the name of a file with it."""

    def read(self, value: str) -> str:
        """Returns the text. Raises ValueError for a value that is neither."""
        try:
            text = value if _JINJA.search(value) else Path(value).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(f"neither the text of a Jinja template nor a file with one: {error}") from None
        if not _JINJA.search(text):
            raise ValueError("the file holds no Jinja template: it has neither {{ nor {%")
        return text


_JINJA = re.compile("{[{%]")
ChatTemplate = Annotated[str, TemplateText()]
OptimizerName = Literal["adam", "muon"]
ParamDtype = Literal["bf16", "fp16", "fp32"]
BackendName = Literal["deepspeed", "torch"]
SequenceParallelMode = Literal["auto", "allgather", "ring", "ulysses"]
SharePrefixes = Literal["auto", "true", "false"]
ExpertsImplementation = Literal["eager", "batched_mm", "grouped_mm", "deepgemm"]
LoraSync = Literal["merged", "adapter"]
BadRows = Literal["error", "skip"]
EngineName = Literal["transformers", "vllm"]
JournalMode = Literal["full", "sample", "off"]

VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks that vLLM allocates memory for."""

FLASH_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
"""Maps attention kernels to the packages that they need."""
ROW_KERNELS = ("auto", "sdpa", "eager", *FLASH_PACKAGES)
"""Attention kernels that keep the sequences of a packed row apart, beside those of `HUB_KERNELS`."""
HUB_KERNELS = "kernels-community/"

LR_SCHEDULERS = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "warmup_stable_decay",
)
"""Schedules of `transformers.get_scheduler` whose arguments all have flags."""


Count = Annotated[int, Range(at_least=1)]
CountOrZero = Annotated[int, Range(at_least=0)]
Steps = Annotated[int, Range(at_least=-1)]
"""An interval in steps. -1 and 0: never, unless the flag says otherwise; see `is_due`."""
Positive = Annotated[float, Range(above=0)]
PositiveOrZero = Annotated[float, Range(at_least=0)]
Fraction = Annotated[float, Range(at_least=0, at_most=1)]
PositiveFraction = Annotated[float, Range(above=0, at_most=1)]
Decay = Annotated[float, Range(at_least=0, below=1)]
