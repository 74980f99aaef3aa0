"""The trial of users' estimators, losses, corrections and proximal policies before a run."""

import re
from typing import Any

import pytest
from test_user_algorithms import BASE, ESTIMATOR, LOSS, OPO, SAPO, parsed

from openrlhf.algorithms.advantages import ESTIMATORS
from openrlhf.algorithms.advantages.base import AdvantageEstimator
from openrlhf.algorithms.corrections import CORRECTIONS
from openrlhf.algorithms.corrections.base import Correction
from openrlhf.algorithms.policy_losses import POLICY_LOSSES
from openrlhf.algorithms.policy_losses.base import PolicyLoss
from openrlhf.algorithms.proximal import PROXIMAL_POLICIES
from openrlhf.algorithms.trial import try_out
from openrlhf.errors import UsageError
from openrlhf.loop.rl_checks import check_algorithm


@pytest.mark.parametrize(
    "build",
    [
        *(
            kind
            for table in (ESTIMATORS, POLICY_LOSSES, CORRECTIONS, PROXIMAL_POLICIES)
            for kind in table.values()
        ),
        *(ESTIMATORS[OPO], POLICY_LOSSES[SAPO]),
    ],
    ids=lambda kind: kind.__name__,
)
def test_every_built_in_class_and_example_passes_the_trial(build):
    try_out(build)


def test_a_trial_gives_what_a_run_gives() -> None:
    """Users' classes may read any field."""
    given: list[Any] = []

    class Loss(PolicyLoss):
        needs_entropy = dual_clip = True

        def __call__(self, row):
            given.append(row)
            bound = row.advantages > 0
            return -row.log_ratio.exp() * row.advantages * row.entropy, bound, ~bound

    class Estimator(AdvantageEstimator):
        needs_critic = needs_log_probs = True

        def shape(self, step):
            given.append(step)
            return step.rewards

    class Weights(Correction):
        def __call__(self, gap):
            given.append(gap)
            return gap.log_ratio.exp()

    for kind in (Loss, Estimator, Weights):
        try_out(kind)
    (full, empty), step, (whole, nothing) = given[:2], given[2], given[3:]
    for row, counts, num_actions in ((full, [2, 0, 3, 1], 6), (empty, [0], 0)):
        assert row.counts.tolist() == counts and (row.norm.num_tokens, row.norm.num_sequences) == (6, 3)
        columns = ("log_probs", "log_ratio", "advantages", "proximal_log_probs", "rollout_log_probs")
        assert {getattr(row, name).shape for name in (*columns, "entropy")} == {(num_actions,)}
        assert (row.clip_low, row.clip_high, row.dual_clip) == (0.2, 0.2, 3.0)
    rows = ("rewards", "group_ids", "lengths", "turns", "truncated", "episodes", "counts")
    assert {x.shape for x in (*(getattr(step, name) for name in rows), step.named_rewards["score"])} == {(4,)}
    assert sorted(step.truncated.tolist()) == [False, False, False, True]
    assert {getattr(step, name).shape for name in ("log_probs", "rollout_log_probs", "values")} == {(6,)}
    assert step.counts.sum() == 6 and (step.gamma, step.lambd) == (1, 1)
    assert whole.counts.tolist() == [2, 0, 3, 1] and whole.bounds == (0.5, 5) and len(whole.log_ratio) == 6
    assert nothing.counts.tolist() == [0] and len(nothing.log_ratio) == 0


RETURNS = "    def shape(self, step):\n        return "
OF_ACTIONS = "    def advantages(self, rewards, step):\n        return "


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (RETURNS + "step.reward", "line 4: AttributeError: 'StepView' object has no attribute 'reward'"),
        (RETURNS + "step.rewards[:2]", "shape: expected (4,) floats, got (2,) torch.float32"),
        (RETURNS + "step.rewards / 0", "shape: [inf, nan, -inf, inf] is not finite"),
        (RETURNS + "1.0", "shape: expected a tensor (4,), got float"),
        (OF_ACTIONS + "rewards, rewards[:2]", "the returns: expected (6,) floats, got (2,) torch.float32"),
        (OF_ACTIONS + "step.counts, rewards", "the advantages: expected (6,) floats, got (4,) torch.int64"),
        (OF_ACTIONS + "rewards", "advantages() must return a pair: advantages and returns, both (A,)"),
        (
            "    def state_dict(self):\n        return {'mean': 1.0}\n"
            "    def load_state_dict(self, state):\n        self.mean = state['meen']",
            "line 6: KeyError: 'meen'",
        ),
    ],
)
def test_an_estimator_that_fails_its_trial(tmp_path, body, problem):
    path = tmp_path / "mine.py"
    path.write_text(f"{BASE}class Mine(AdvantageEstimator):\n{body}\n")
    config = parsed(ESTIMATOR, reference := f"{path}:Mine")
    with pytest.raises(ValueError) as error:
        check_algorithm(config, ESTIMATOR, reference)
    assert str(error.value) == f"{ESTIMATOR} {reference}: {problem}"


TRIPLE = "the loss must return a triple"


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ("row.log_probs", f"{TRIPLE}, all (A,): loss, active lower bounds, active upper bounds"),
        ("(row.log_probs.mean(), never, never)", "the loss: expected (6,) floats, got () torch.float32"),
        (
            "(row.advantages, never, never)",
            "the loss has no gradient; compute it from log_probs or log_ratio",
        ),
        ("(row.log_probs, never, 0)", "the active upper bounds are not (6,) bool"),
        ("(row.log_probs, never.float(), never)", "the active lower bounds are not (6,) bool"),
        ("(row.log_probs, never, never[:2])", "the active upper bounds are not (6,) bool"),
        ("[row.log_probs, never, never]", TRIPLE),
        ("(row.log_probs / 0, never, never)", "the loss: [-inf"),
        (
            "((row.log_probs - row.log_probs.detach()).abs().sqrt(), never, never)",
            "the gradient of the loss: [nan",
        ),
        # of no action
        ("(row.log_probs - row.log_probs.max(), never, never)", "line 6: RuntimeError: max()"),
    ],
)
def test_a_loss_that_fails_its_trial(tmp_path, returned, problem):
    path = tmp_path / "mine.py"
    path.write_text(
        "from openrlhf.algorithms.policy_losses.base import PolicyLoss\n\nclass Mine(PolicyLoss):\n"
        f"    def __call__(self, row):\n        never = row.log_probs > 0\n        return {returned}\n"
    )
    config = parsed(LOSS, reference := f"{path}:Mine")
    with pytest.raises(ValueError, match=re.escape(problem)):
        check_algorithm(config, LOSS, reference)


WEIGHTS = "corrections.base import Correction", "gap"
PROXIMAL = "proximal.base import ProximalPolicy", "now, old, sampler, staleness"


@pytest.mark.parametrize(
    ("kind", "arguments", "returned", "problem"),
    [
        (*WEIGHTS, "gap.log_ratio[:2]", "the weights: expected (6,) floats"),
        (*WEIGHTS, "gap.counts", "the weights: expected (6,) floats"),
        (*WEIGHTS, "None", "the weights: expected a tensor (6,), got NoneType"),
        (*WEIGHTS, "gap.log_ratio - gap.log_ratio.max()", "max()"),
        (*PROXIMAL, "sampler + old", "NoneType"),
        (*PROXIMAL, "now / (0 if staleness is None else 1)", "log pi_prox: [-inf"),
        (
            *(*PROXIMAL, "now if staleness is None else staleness"),
            "log pi_prox: expected (6,) floats, got (6,) torch.int32",
        ),
    ],
)
def test_a_correction_or_proximal_policy_that_fails_its_trial(tmp_path, kind, arguments, returned, problem):
    path = tmp_path / "mine.py"
    path.write_text(
        f"from openrlhf.algorithms.{kind}\n\nclass Mine({kind.split()[-1]}):\n"
        f"    def __call__(self, {arguments}):\n        return {returned}\n"
    )
    registry = CORRECTIONS if "correction" in kind else PROXIMAL_POLICIES
    with pytest.raises((UsageError, TypeError, RuntimeError), match=re.escape(problem)):
        try_out(registry[f"{path}:Mine"])
