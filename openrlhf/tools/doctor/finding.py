"""A finding of a diagnosis: a cause with its evidence and its remedy."""

from dataclasses import asdict, dataclass
from typing import Any

CERTAIN, LIKELY = 0.9, 0.6
"""Minimum scores of causes that are called certain and likely."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A cause of a problem."""

    cause: str
    """Identifier of the kind of cause, such as "flat-reward" (docs/diagnosis.md)."""
    title: str
    score: float
    """Confidence from 0 to 1, by which findings are sorted. It is a rule of thumb, not a probability."""
    evidence: tuple[str, ...]
    """Sentences with numbers and steps."""
    remedy: str

    @property
    def confidence(self) -> str:
        return "certain" if self.score >= CERTAIN else "likely" if self.score >= LIKELY else "possible"

    @property
    def is_wrong(self) -> bool:
        """False if the run only takes longer than it could."""
        return self.cause not in ("slow-steps", "late-rank")

    def as_data(self) -> dict[str, Any]:
        return asdict(self) | {"confidence": self.confidence}
