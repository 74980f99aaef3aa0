"""Buckets of parameters that ranks gather together."""

import pytest

from openrlhf.backends.model_rank import _buckets


@pytest.mark.parametrize(
    ("sizes", "buckets"),
    [
        ([], []),
        ([4], ["a"]),
        ([4, 6, 1], ["ab", "c"]),
        ([4, 5, 1, 10, 3, 7], ["abc", "d", "ef"]),
        ([99, 1], ["a", "b"]),
    ],
)
def test_buckets_are_full_or_last(sizes: list[int], buckets: list[str]) -> None:
    found = _buckets("abcdef"[: len(sizes)], sizes, capacity=10)
    assert ["".join(bucket) for bucket in found] == buckets
