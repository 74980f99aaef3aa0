import math
from typing import get_args

import pytest
import torch

from openrlhf.algos.correction import CORRECTIONS, mismatch_metrics
from openrlhf.algos.policy_loss import token_log_ratio
from openrlhf.config import choices

COUNTS = torch.tensor([2, 3])
RATIO = torch.tensor([0.25, 1.0, 4.0, 8.0, 2.0])  # geometric means 0.5 and 4


def test_tis_clamps():
    assert CORRECTIONS["tis"](RATIO.log(), COUNTS, 0.5, 5.0).tolist() == pytest.approx([0.5, 1, 4, 5, 2])


def test_icepop_drops_tokens():
    assert CORRECTIONS["icepop"](RATIO.log(), COUNTS, 0.5, 5.0).tolist() == pytest.approx([0, 1, 4, 0, 2])


def test_seq_mask_tis_drops_sequences_and_clamps_the_rest():
    correct = CORRECTIONS["seq-mask-tis"]
    assert correct(RATIO.log(), COUNTS, 0.6, 5.0).tolist() == pytest.approx([0, 0, 4, 5, 2])
    assert correct(RATIO.log(), COUNTS, 0.4, 3.0).tolist() == pytest.approx([0.4, 1, 0, 0, 0])


@pytest.mark.parametrize("name", CORRECTIONS)
def test_weights_are_finite_however_far_the_sampler_is(name):
    log_probs, rollout = torch.tensor([0.0, -900, 0, -1, -1]), torch.tensor([-900.0, 0, -torch.inf, -1, -1])
    weights = CORRECTIONS[name](token_log_ratio(log_probs, rollout, COUNTS), COUNTS, 0.5, 5.0)
    assert weights.isfinite().all()
    assert weights.max() <= 5


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_faithful_sampler_changes_nothing(name):
    assert CORRECTIONS[name](torch.zeros(5), COUNTS, 0.5, 5.0).tolist() == [1] * 5
    assert CORRECTIONS[name](torch.zeros(0), torch.tensor([0]), 0.5, 5.0).tolist() == []


def test_mismatch_metrics():
    metrics = mismatch_metrics(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -3.0]))
    # r = 1 and e: (0 + e - 1 - 1) / 2
    assert metrics["mismatch/kl"] == pytest.approx((math.e - 2) / 2)
    assert metrics["mismatch/abs_diff_mean"] == pytest.approx(0.5)
    assert metrics["mismatch/abs_diff_max"] == 1
    assert set(mismatch_metrics(torch.zeros(0), torch.zeros(0)).values()) == {0.0}


def test_every_name_is_known():
    assert set(CORRECTIONS) == set(get_args(choices.ISCorrectionType))
