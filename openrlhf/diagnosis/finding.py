"""A cause that a diagnosis names, with its evidence and its remedy."""

from dataclasses import asdict, dataclass
from typing import Any

CERTAIN, LIKELY = 0.9, 0.6
"""Scores from which a cause is called certain, and likely."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    cause: str
    """Identifier of the kind of cause, such as "flat-reward"; listed in docs/diagnosis.md."""
    title: str
    score: float
    """Confidence from 0 to 1, by which findings are ranked. A rule of thumb, not a probability."""
    evidence: tuple[str, ...]
    """Sentences with figures and steps."""
    remedy: str

    @property
    def confidence(self) -> str:
        return "certain" if self.score >= CERTAIN else "likely" if self.score >= LIKELY else "possible"

    def as_data(self) -> dict[str, Any]:
        """Returns the finding as JSON values."""
        return asdict(self) | {"confidence": self.confidence}
