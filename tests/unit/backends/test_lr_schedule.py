"""Learning rates, as shares of the peak, equal numbers by hand."""

import math

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from openrlhf.backends.lr_schedule import lr_schedule
from openrlhf.config.choices import LR_SCHEDULERS
from openrlhf.config.sections import OptimConfig


def rates(name: str, total: int, warmup: float, **flags) -> list[float]:
    rate = lr_schedule(OptimConfig(lr_scheduler=name, lr_warmup_ratio=warmup, **flags), total)
    return [rate(step) for step in range(total)]


def cosine(progress: float, floor: float = 0.0) -> float:
    return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("linear", [1 / 2, 1, 3 / 4, 2 / 4, 1 / 4]),
        ("polynomial", [1 / 2, 1, 3 / 4, 2 / 4, 1 / 4]),
        ("cosine", [1 / 2, 1, cosine(1 / 4), cosine(2 / 4), cosine(3 / 4)]),
        ("cosine_with_restarts", [1 / 2, 1, cosine(1 / 4), cosine(2 / 4), cosine(3 / 4)]),
        ("cosine_with_min_lr", [1 / 2, 1, cosine(1 / 4, 0.2), cosine(2 / 4, 0.2), cosine(3 / 4, 0.2)]),
        ("cosine_warmup_with_min_lr", [1 / 2, 1, cosine(1 / 3, 0.2), cosine(2 / 3, 0.2), 0.2]),
        ("constant", [1, 1, 1, 1, 1]),
        ("constant_with_warmup", [1 / 2, 1, 1, 1, 1]),
        ("inverse_sqrt", [1 / 2, 1, math.sqrt(2 / 3), math.sqrt(2 / 4), math.sqrt(2 / 5)]),
        ("warmup_stable_decay", [1 / 2, 1, 1, cosine(0), cosine(1 / 2)]),
    ],
)
def test_two_steps_of_warm_up_in_five(name, expected):
    """The schedule has 5 steps with 2 of warm-up; warmup_stable_decay decays in the last 2."""
    found = rates(name, 5, 0.4, min_lr_ratio=0.2, lr_decay_ratio=0.3)
    # polynomial ends at 1e-7, not at 0
    assert found == pytest.approx(expected, abs=2e-7)


@pytest.mark.parametrize("total", [1, 2, 33, 34, 1000])
@pytest.mark.parametrize("name", LR_SCHEDULERS)
def test_no_step_is_wasted(name, total):
    """A run with the default warm-up, of any length and schedule, makes no step with a learning rate of 0,
    and reaches the peak when the warm-up is over."""
    found, warmup = rates(name, total, OptimConfig().lr_warmup_ratio), math.ceil(0.03 * total)
    assert all(0 < rate <= 1 for rate in found)
    assert found[warmup - 1] == 1


@pytest.mark.parametrize("name", LR_SCHEDULERS)
def test_without_a_warm_up_the_peak_comes_at_once(name):
    assert rates(name, 10, 0.0)[0] == 1


@pytest.mark.parametrize("total", [1, 2, 3, 7, 33])
@pytest.mark.parametrize("warmup", [0.1, 0.5, 0.9])
def test_a_decay_that_begins_after_the_warm_up_begins_at_the_peak(total, warmup):
    """Both lengths are rounded up; a sum of the ratios above 1 is refused."""
    assert max(rates("warmup_stable_decay", total, warmup, lr_decay_ratio=1 - warmup)) == 1


@pytest.mark.parametrize("name", LR_SCHEDULERS)
def test_more_steps_than_planned_keep_the_last_rate(name):
    rate = lr_schedule(OptimConfig(lr_scheduler=name), 4)
    assert rate(7) == rate(4) == rate(3) > 0


def test_a_resumed_schedule_goes_on():
    def scheduler() -> LambdaLR:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
        return LambdaLR(optimizer, lr_schedule(OptimConfig(lr_warmup_ratio=0.5), 10))

    def lr_after(scheduler: LambdaLR, steps: int) -> float:
        for _ in range(steps):
            scheduler.optimizer.step()
            scheduler.step()
        return float(scheduler.get_last_lr()[0])

    first, second = scheduler(), scheduler()
    lr_after(first, 3)
    second.load_state_dict(first.state_dict())
    assert lr_after(second, 4) == lr_after(scheduler(), 7)
    assert scheduler().get_last_lr() == [2.0 / 5]
