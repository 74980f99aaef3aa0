"""Effects of changed flags on a resumed run, marked at each flag: `num_nodes: Free[Count]`. A flag without a
mark decides what is learned and must not change."""

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, TypeVar


class Change(Enum):
    """The effect of a changed flag on a resume."""

    FREE = "free"
    """The run resumes: placement, memory, layout, logging, saving and evaluation may change."""
    REMARKED = "remarked"
    """The run resumes with a remark on the effect."""
    CONTENT = "content"
    """The run resumes if the content that the flag names is the same; its path may change."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class OnResume:
    """The mark of a flag."""

    change: Change = Change.REFUSED
    remark: str = ""
    """The effect of another value."""


T = TypeVar("T")
Free = Annotated[T, OnResume(Change.FREE)]
Content = Annotated[T, OnResume(Change.CONTENT)]
NEW_LENGTH = OnResume(
    Change.REMARKED,
    "the length of the run changes; from here on the learning rate follows the schedule of the new length",
)
FREE_SECTIONS = ("ckpt.", "eval.", "logger.")
"""Sections whose flags are all free."""
