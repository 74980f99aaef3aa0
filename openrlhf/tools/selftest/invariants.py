"""Checks of a run while it trains: equalities that hold for every model and every data set if nothing is
wrong. A violated one raises a RunError with the code `broken-invariant`, which names the quantity, its value,
the expected value and usual causes, and says that this is a bug of this software and how to go on.

The checks of this module compare numbers that a step has anyway. verify.py computes some of them a
second time.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence

import numpy as np

from openrlhf.api import Batch, ErrorCode, Metrics, RunError, Schedule, Trajectory, not_none

SAME_POLICY = {"fp32": 0.005, "fp16": 0.01, "bf16": 0.05}
"""Largest mean difference in nats, by `--ds.param_dtype`, between log-probs that the same weights computed in
two passes whose rows differ. float32 has the rounding of TF32, in which GPUs may multiply."""
CERTAIN = -60.0
"""Log of a probability that never occurs: 1e-26."""

RARE = 20.0
"""Log of the number of orders of some items from which on two equal ones are no chance: 1 in 5e8."""


REMEDY = (
    "This is a bug in openrlhf or in a library below it, not in your flags: please report it with this "
    "message. OPENRLHF_SELFTEST=0 trains without these checks, --train.verify_steps 0 without those of the "
    "first steps."
)


def broken(step: int, quantity: str, value: object, expected: object, causes: str) -> RunError:
    """Returns the error about a quantity that must have another value. `causes`: where in the software to
    look, in sentences."""
    text = f"step {step}: {quantity} is {value}, and must be {expected}.\n{causes}\n{REMEDY}"
    return RunError(ErrorCode.BROKEN_INVARIANT, text)


def check_samples(
    trajectories: Sequence[Trajectory], num_samples: int, step: int, *, is_random: bool
) -> None:
    """Checks the sampled episodes of a step: each prompt has `num_samples` of them, each with a seed of its
    own, and no unlikely answer occurs twice in a group. `is_random`: whether recorded log-probs are those of
    the whole distribution that was sampled from; with greedy agents, top-p or top-k they may not be."""
    groups: dict[tuple[int, int], list[Trajectory]] = {}
    for t in trajectories:
        groups.setdefault(t.group, []).append(t)
    for (epoch, prompt_id), group in groups.items():
        found = sorted({t.sample_index for t in group})
        if found != list(range(num_samples)):
            causes = (
                "Samples were lost, doubled or put into another group between the engines and the trainer."
            )
            quantity = f"the list of the samples of prompt {prompt_id} in epoch {epoch}"
            raise broken(step, quantity, found, f"0 to {num_samples - 1}", causes)
    if is_random:
        _check_answers(groups.values(), step)
    first = [t.seed for t in trajectories if t.is_first and t.seed]  # 0: not recorded
    if len(set(first)) < len(first):
        (seed, count), *_ = Counter(first).most_common(1)
        causes = "These episodes draw the same random numbers, so a group has fewer samples than it seems to."
        raise broken(step, f"the number of episodes with the seed {seed}", count, 1, causes)


def check_epoch_seeds(
    trajectories: Iterable[Trajectory], first: dict[tuple[int, int], tuple[int, int]], step: int
) -> None:
    """Checks that the prompts of a run's first step have other seeds when they come again. `first`: (prompt
    id, sample index) -> epoch and seed in the first step; filled if it is empty."""
    sampled = [t for t in trajectories if t.is_first and t.seed]  # 0: not recorded
    for t in sampled:
        epoch, seed = first.get((t.prompt.prompt_id, t.sample_index), (t.prompt.epoch, 0))
        if seed == t.seed and epoch != t.prompt.epoch:
            causes = "Epochs draw the same random numbers, so a policy that hardly changes repeats itself."
            quantity = f"the seed of sample {t.sample_index} of prompt {t.prompt.prompt_id}"
            raise broken(step, quantity, f"that of epoch {epoch}", "another", causes)
    if not first:
        first |= {(t.prompt.prompt_id, t.sample_index): (t.prompt.epoch, t.seed) for t in sampled}


def _check_answers(groups: Collection[Sequence[Trajectory]], step: int) -> None:
    """Raises if samples of a prompt are equal, although that practically never happens by chance."""
    repeated: list[tuple[float, Trajectory, Trajectory]] = []
    for group in groups:
        answers: dict[bytes, Trajectory] = {}
        for t in group:
            other = answers.setdefault(t.token_ids.tobytes(), t)
            if other.sample_index != t.sample_index:
                repeated.append((float(t.rollout_log_probs.sum()), t, other))
    repeated.sort(key=lambda found: found[0])
    n, total = sum(map(len, groups)), 0.0
    for k, (log_prob, t, other) in enumerate(repeated, start=1):
        total += log_prob
        # k of n samples are repeated with a probability of at most C(n, k) times those of their answers.
        chance = total + math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        if chance < CERTAIN:
            causes = (
                f"By chance {k} of {n} samples are so with a probability of e^{chance:.0f}. The engine uses "
                "one seed for several requests, or returns the answer of another request."
            )
            quantity = f"the answer of sample {t.sample_index} of prompt {t.prompt.prompt_id}"
            raise broken(step, quantity, f"that of sample {other.sample_index}", "another", causes)


def check_lengths(trajectories: Iterable[Trajectory], longest: int | None, step: int) -> None:
    """Checks that no answer has more than `longest` actions. None: no limit."""
    for t in trajectories:
        if longest is not None and t.num_actions > longest:
            causes = "The engine got another limit than that of the flags."
            quantity = f"the number of tokens of sample {t.sample_index} of prompt {t.prompt.prompt_id}"
            raise broken(step, quantity, t.num_actions, f"at most {longest}", causes)


def check_evaluated(trajectories: Iterable[Trajectory], version: int, step: int) -> None:
    """Checks that an evaluation sampled with the current weights. `version`: their version."""
    for t in trajectories:
        for found in t.weight_versions[:, 0].tolist():
            if found != version:
                causes = "The weight sync before the evaluation is missing, late or did not reach the engine."
                quantity = f"the version of the weights that answered evaluation prompt {t.prompt.prompt_id}"
                raise broken(step, quantity, found, version, causes)


def check_schedule(name: str, schedule: Schedule, trained_on: Sequence[int], epochs: int, step: int) -> None:
    """Checks that a schedule contains every sequence of `trained_on` once an epoch and no other. `name`: the
    model."""
    counts = Counter(i for mini_batch in schedule for rank in mini_batch for i in rank)
    expected = dict.fromkeys(trained_on, epochs)
    if counts != expected:
        wrong = next(i for i in counts.keys() | expected.keys() if counts[i] != expected.get(i, 0))
        causes = "The optimizer steps of the update leave sequences out, or have some more than once."
        quantity = f"the number of passes of the {name} over sequence {wrong}"
        raise broken(step, quantity, counts[wrong], expected.get(wrong, 0), causes)


def check_orders(name: str, orders: Iterable[Sequence[Collection[Hashable]]], step: int) -> None:
    """Checks that random orders of the same items differ. Each order is a list of batches, within which the
    order has no meaning. Orders that may be equal by chance, because there are few items, are not compared.
    `name`: what is ordered."""
    seen: set[tuple] = set()
    for batches in orders:
        order = tuple(map(frozenset, batches))
        sizes = list(map(len, order))
        if order in seen and math.lgamma(sum(sizes) + 1) - sum(math.lgamma(n + 1) for n in sizes) > RARE:
            causes = "Shuffling is off, or does not depend on the epoch or the step."
            raise broken(step, f"the order of {name}", "that of another pass", "another", causes)
        seen.add(order)


def check_epochs(name: str, order: Callable[[int], Sequence[int]], step: int) -> None:
    """Checks that two epochs visit a dataset in orders other than each other's and the dataset's own.
    `order`: returns the indices of an epoch."""
    first, second = order(0), order(1)
    orders = (range(len(first)), first, second)
    check_orders(name, [[(i,) for i in indices] for indices in orders], step)


def check_learning_rate(metrics: Metrics, expected: float | None, dtype: str, step: int) -> None:
    """Checks the learning rate of an optimizer step. `expected`: see `plain_learning_rate`. In fp16 the
    schedule waits while the loss scale is found, so the rate is not compared."""
    found = metrics.get("lr", expected)
    if found is None or expected is None or dtype == "fp16" or math.isclose(found, expected, rel_tol=1e-6):
        return
    causes = "The schedule has another number of steps, begins at another one, or was not restored on resume."
    raise broken(step, "the learning rate", f"{found:.6g}", f"{expected:.6g}", causes)


def check_trained(metrics: Metrics, batch: Batch, schedule: Schedule, step: int) -> None:
    """Checks that the optimizer steps trained on as many actions as the schedule has. `metrics` has
    `num_tokens`, the mean over optimizer steps of the actions on all ranks."""
    if "num_tokens" not in metrics:
        return
    trained = round(metrics["num_tokens"] * len(schedule))
    expected = sum(int(batch.num_actions[list(rank)].sum()) for mini_batch in schedule for rank in mini_batch)
    if trained != expected:
        causes = "Sequences were lost or doubled in packing, or other tokens count as actions."
        raise broken(step, "the number of actions that were trained on", trained, expected, causes)


def check_staleness(metrics: Metrics, largest: float, step: int) -> None:
    """Checks that no action was sampled by weights that are more than `largest` updates old."""
    name = "rollout/staleness_max"
    if metrics.get(name, 0.0) > largest:
        causes = (
            "Engines sampled with weights of an earlier step: a weight sync came too late, or more was "
            "sampled ahead than --train.async_queue_size allows."
        )
        raise broken(step, name, metrics[name], f"at most {largest:g}", causes)


def check_first_pass(before: np.ndarray, now: np.ndarray, dtype: str, step: int) -> None:
    """Checks that the policy, before it changes, has the ratio 1 and the KL 0 to itself. `before`, `now`
    (A,): log-probs of the pass before the update and of the update's first optimizer step."""
    difference = float(np.abs(before.astype(np.float64) - now).mean()) if len(now) else 0.0
    if not difference <= SAME_POLICY[dtype]:
        causes = (
            "The first optimizer step computes another policy than the one that was compared with the "
            "sampler: another temperature, mask, order or packing, dropout, or changed weights."
        )
        quantity = "the mean of |log ratio| in the first optimizer step"
        raise broken(step, quantity, f"{difference:.3g} nats", "0 up to rounding", causes)


def check_own_reference(metrics: Metrics, dtype: str, step: int) -> None:
    """Checks that a policy that was not trained yet equals a reference of the same name."""
    value = abs(metrics.get("kl/log_ratio_mean", 0.0))
    if not value <= SAME_POLICY[dtype]:
        causes = (
            "Policy and reference were loaded from the same place, and compute different log-probs: look for "
            "adapters that are on in one of them, another temperature or another precision."
        )
        raise broken(step, "|kl/log_ratio_mean|", f"{value:.3g} nats", "0 up to rounding", causes)


def equals_reference(batch: Batch) -> bool:
    """Returns True if the policy's log-probs are exactly the reference's, and not all actions are certain."""
    policy, reference = batch.log_probs, batch.ref_log_probs
    is_known = policy is not None and reference is not None and policy.any()
    return bool(is_known) and np.array_equal(not_none(policy), not_none(reference))


def check_other_than_reference(batch: Batch, step: int) -> None:
    """Checks that a policy whose weights an update has changed is not the reference."""
    if equals_reference(batch):
        causes = (
            "The reference computes with the weights of the policy, or the update did not reach the policy's "
            "weights: look for adapters that are on in both."
        )
        count = len(batch.rollout_log_probs)
        quantity = f"the number of {count} actions whose log-prob is exactly that of the reference"
        raise broken(step, quantity, count, "less after an update", causes)


def check_parts(parts: Iterable[tuple[str, float]], step: int) -> None:
    """Checks that the parts of an optimizer step add up to the whole. `parts`: (quantity, sum of the weights
    of all rows of all ranks). A sum of 0 is that of a step without actions."""
    for quantity, total in parts:
        if total != 0 and not abs(total - 1) <= 1e-6:
            causes = (
                "Rows are divided by other totals than those of the whole optimizer step, so the loss "
                "depends on packing, micro-batches and the number of ranks."
            )
            raise broken(step, quantity, f"{total:.6g}", 1, causes)
