"""The few samples of a step that are kept or shown."""

from openrlhf.observability.selection import best_to_worst, evenly


def test_samples_are_evenly_spaced_from_best_to_worst() -> None:
    rewards = [0.1, 0.9, 0.5, 0.7, 0.3]
    assert best_to_worst(rewards, 5) == [1, 3, 2, 4, 0]
    assert best_to_worst(rewards, 3) == [1, 2, 0]
    assert best_to_worst(rewards, 1) == [1]
    assert best_to_worst([0.5, 0.5, 0.5], 2) == [0, 2]
    assert best_to_worst([], 4) == []


def test_failed_samples_take_the_places_that_are_left_or_kept_for_them() -> None:
    rewards = [None, 0.1, None, 0.9, 0.5, None]
    assert best_to_worst(rewards, 3) == [3, 4, 1]
    assert best_to_worst(rewards, 4) == [3, 4, 1, 0]
    assert best_to_worst(rewards, 4, failed=2) == [3, 1, 0, 2]
    assert best_to_worst(rewards[:2], 2, failed=2) == [1, 0]


def test_evenly_keeps_the_ends() -> None:
    assert evenly("abcdefg", 3) == ["a", "d", "g"]
    assert evenly("abc", 9) == ["a", "b", "c"]
    assert evenly("abc", 1) == ["a"] and evenly("abc", 0) == []
