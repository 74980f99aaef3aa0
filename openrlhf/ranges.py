"""Ranges of valid numbers for flags and options."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds of a number; `above` and `below` exclude the bound itself."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None

    def __contains__(self, number: float) -> bool:
        return (
            (self.at_least is None or number >= self.at_least)
            and (self.at_most is None or number <= self.at_most)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        words = {
            "at least": self.at_least,
            "more than": self.above,
            "at most": self.at_most,
            "less than": self.below,
        }
        return " and ".join(f"{word} {bound:g}" for word, bound in words.items() if bound is not None)
