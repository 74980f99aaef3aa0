"""An episode of three turns equals what plain transformers computes, token by token."""

from itertools import groupby

import pytest

PROMPT = "Tom has 3 apples. "


def segments(token_ids: list[int], mask: list[bool]) -> tuple[list[list[int]], list[list[int]]]:
    """Splits the tokens into the stretches that were read and those that were sampled."""
    runs = [
        (k, [i for _, i in pair]) for k, pair in groupby(zip(mask, token_ids, strict=True), lambda p: p[0])
    ]
    return [ids for sampled, ids in runs if not sampled], [ids for sampled, ids in runs if sampled]


@pytest.mark.usefixtures("cpu_engines")
@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.slow)])
def test_tokens_log_probs_and_gradients(task, run_worker, engine):
    """Log-probs are float32 by two programs: their logits are sums of a few hundred products. The gradient is
    that of the actions alone: feedback has no part in it."""
    (found,) = run_worker("three_turns", 1, model=str(task.model), prompt=PROMPT, engine=engine)
    assert len(found["token_ids"]) == 4
    for token_ids, mask in zip(found["token_ids"], found["masks"], strict=True):
        read, sampled = segments(token_ids, mask)
        assert read == found["read"]
        assert [len(ids) <= 6 for ids in sampled] == [True] * 3
    assert found["rewards"] == [[6, 1, 2, 3]] * 4
    for sampled, computed in zip(found["sampled"], found["computed"], strict=True):
        assert sampled == pytest.approx(computed, abs=1e-4)
    assert found["same_parameters"]
    for name, (difference, norm) in found["gradients"].items():
        assert difference <= 1e-4 * norm + 1e-7, name
