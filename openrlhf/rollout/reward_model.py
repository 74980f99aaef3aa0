"""Rewards from reward models: what they read of a trajectory, and what their scores make of it."""

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openrlhf.datasets.encode import Encoder, Text, with_end
from openrlhf.datasets.inference import score_last
from openrlhf.models.loading import reads_the_tokens_of
from openrlhf.types import Outcome, Sample, Trajectory, present


class RewardReader:
    """A policy's sample as a reward model reads it, whose one action is the last token.

    With the policy's vocabulary the model reads the sampled tokens themselves; with another one, the text in
    its own tokens. Either way an end-of-sequence token is added where there is none, as in its training.
    """

    def __init__(
        self, policy: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase, max_len: int | None
    ) -> None:
        """`max_len`: tokens that the reward model reads at most, None for any number."""
        self.policy, self.own, self.max_len = policy, own, max_len
        self.encode = None if reads_the_tokens_of(own, policy) else Encoder(own)

    def __call__(self, sample: Sample) -> Sample:
        token_ids = with_end(self._in_own_tokens(sample), self.own)
        return score_last(token_ids, self.max_len or len(token_ids))

    def _in_own_tokens(self, sample: Sample) -> list[int]:
        token_ids = sample.token_ids.tolist()
        if self.encode is None:
            return token_ids
        start = int(sample.action_mask.int().argmax())  # of the first action
        prompt = str(self.policy.decode(token_ids[:start]))
        response = str(self.policy.decode(token_ids[start:])).removesuffix(str(self.policy.eos_token))
        span = ((len(prompt), len(prompt) + len(response)),) if prompt and response else ()
        ((token_ids, _),) = self.encode([Text(text=prompt + response, spans=span)])
        return token_ids


def add_model_rewards(
    trajectories: Sequence[Trajectory],
    scores: Sequence[Tensor],
    *,
    names: Sequence[str],
    weights: Sequence[float],
    has_function: bool,
) -> list[Trajectory]:
    """Each finished trajectory with the weighted sum of its `scores`, (M,) of M models, added to its reward;
    `scores` has an entry for each trajectory that is ok. Where a score is not finite, the reward has failed.

    `has_function`: the trajectory's score (what filtering and evaluation look at) stays the reward
    function's, else it is that sum. The scores themselves go to `extra_logs` as `reward_model/{name}`.
    """
    each = iter(scores)
    return [_with_scores(t, next(each), names, weights, has_function) if t.ok else t for t in trajectories]


def _with_scores(
    t: Trajectory, scores: Tensor, names: Sequence[str], weights: Sequence[float], has_function: bool
) -> Trajectory:
    by_name = dict(zip(names, scores.tolist(), strict=True))
    broken = {name: score for name, score in by_name.items() if not math.isfinite(score)}
    if broken:
        error = ", ".join(f"reward model {name} says {score}" for name, score in broken.items())
        return replace(t, reward=None, score=None, outcome=Outcome.REWARD_ERROR, error=error)
    total = sum(weight * score for weight, score in zip(weights, by_name.values(), strict=True))
    return replace(
        t,
        reward=present(t.reward) + total,
        score=t.score if has_function else total,
        extra_logs=t.extra_logs | {f"reward_model/{name}": score for name, score in by_name.items()},
    )


def short_names(paths: Sequence[str]) -> list[str]:
    """The last part of each path, with numbers where two would be called the same."""
    names = [path.rstrip("/").rpartition("/")[2] for path in paths]
    return names if len({*names}) == len(names) else [f"{name}_{i}" for i, name in enumerate(names)]
