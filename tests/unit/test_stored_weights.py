"""Which differences between an engine's log-probs and the trainer's stop a run."""

import math

import pytest
import torch

from openrlhf.engine.stored_weights import LEAST_SPREAD, EngineProbe, check_stored, probe_of
from openrlhf.tasks.tiny_model import tiny_tokenizer

OURS = torch.tensor([-1.0, -3.0] * 10)  # 1 nat from their mean


def check(*log_probs: torch.Tensor, dtype: str = "bf16", unwritten: tuple[str, ...] = ()) -> None:
    engines = [EngineProbe(log_probs=lp.tolist(), unwritten=list(unwritten)) for lp in log_probs]
    check_stored(OURS, engines, dtype)


def test_rounding_is_no_difference():
    """32 roundings of 2^-8 are an eighth of the spread, of 2^-11 a sixty-fourth."""
    for dtype, allowed in (("bf16", 1 / 8), ("fp16", 1 / 64), ("fp32", 1 / 64)):
        check(OURS + 0.99 * allowed, OURS - 0.99 * allowed, dtype=dtype)
        with pytest.raises(RuntimeError, match=f"{dtype} explains {allowed:.3g}"):
            check(OURS + 1.01 * allowed, dtype=dtype)


def test_the_mean_counts():
    """One token may differ by much: a router near a tie chooses another expert."""
    one = OURS.clone()
    one[3] += 2
    check(one)
    one[4:8] += 2
    with pytest.raises(RuntimeError, match=r"differ by 0.5 nats on average, 2 at most"):
        check(one)


def test_the_engine_and_what_it_missed_are_named():
    with pytest.raises(RuntimeError, match="inference engine 1 does not compute with the weights"):
        check(OURS, OURS - 1)
    with pytest.raises(RuntimeError, match=r"did not write a, b, c and 2 more:"):
        check(OURS - 1, unwritten=("a", "b", "c", "d", "e"))
    with pytest.raises(RuntimeError, match=r"did not write head.bias:"):
        check(OURS - 1, unwritten=("head.bias",))
    check(OURS, unwritten=("vision.weight",))  # that no text needs


def test_what_is_no_number_is_a_difference():
    broken = OURS.clone()
    broken[0] = math.nan
    with pytest.raises(RuntimeError, match="differ by nan nats"):
        check(broken)


def test_a_model_that_tells_no_tokens_apart():
    same = torch.full((20,), -5.0)
    check_stored(same, [EngineProbe(log_probs=(same + 1e-5).tolist(), unwritten=[])], "fp32")
    with pytest.raises(RuntimeError):
        check_stored(same, [EngineProbe(log_probs=(same + LEAST_SPREAD).tolist(), unwritten=[])], "bf16")


def test_the_probe_is_made_of_ordinary_tokens():
    tokenizer = tiny_tokenizer()
    probe = probe_of(tokenizer, 128)
    assert len(probe) == 128
    assert not set(probe) & {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    assert len(set(probe)) > 80
    assert probe_of(tokenizer, 128) == probe
    tokenizer.bos_token = "<|endoftext|>"
    assert probe_of(tokenizer, 5) == [tokenizer.bos_token_id, *probe[:4]]
