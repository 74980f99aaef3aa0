"""Sequences with common prefixes, and the reading of prefixes from one token on."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import strategies as st

from openrlhf.data import prefixes as data_prefixes
from openrlhf.models import prefixes


@contextmanager
def sharing_from_one_token() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (prefixes, data_prefixes):
            patch.setattr(module, "FEWEST_TOKENS", 1)
            patch.setattr(module, "SMALLEST_FRACTION", 0.0)
        yield


@st.composite
def families(draw: st.DrawFn) -> list[list[int]]:
    """Draws sequences, each of which extends a prefix of an earlier one or starts anew."""
    tokens = lambda least: draw(st.lists(st.integers(3, 9), min_size=least, max_size=6))
    made: list[list[int]] = [tokens(1)]
    for _ in range(draw(st.integers(0, 6))):
        parent = draw(st.sampled_from(made))
        kept = draw(st.integers(0, len(parent)))
        made.append(parent[:kept] + tokens(0 if kept else 1))
    return made
