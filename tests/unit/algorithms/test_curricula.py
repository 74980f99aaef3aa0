"""Difficulty by success rate: its weights, its distribution, and its state."""

import json
from collections import Counter

import pytest
from refusals import refused

from openrlhf.algorithms.curricula import CURRICULA, Curriculum
from openrlhf.algorithms.curricula.difficulty import Difficulty
from openrlhf.algorithms.trial import try_out
from openrlhf.errors import ErrorCode
from openrlhf.types import Prompt


def difficulty(size: int = 4, *, seed: int = 0, **options) -> Difficulty:
    curriculum = Difficulty(**options)
    curriculum.prompts = [Prompt(prompt_id=i, text=str(i)) for i in range(size)]
    curriculum.seed = seed
    return curriculum


def test_weights_by_hand():
    """floor 0.2 and memory 0.25: from the rate 1/2, a group of mean 1 gives 1/8 + 3/4 = 7/8, and a second
    one, of mean 0, 7/32. Scores beyond 1 count as 1."""
    curriculum = difficulty(floor=0.2, memory=0.25)
    assert [curriculum.weight(i) for i in range(4)] == [1.0] * 4
    curriculum.observe(0, [1.0, 1.0])
    curriculum.observe(1, [3.0, 3.0])
    curriculum.observe(2, [])
    assert curriculum.rates == {0: 7 / 8, 1: 7 / 8}
    assert curriculum.weight(0) == pytest.approx(0.2 + 0.8 * 4 * 7 / 64)
    curriculum.observe(0, [0.0, 0.0])
    assert curriculum.rates[0] == 7 / 32


def test_the_next_prompt_is_drawn_in_proportion_to_the_weights():
    """Weights 1, 1, 0.1 and 0.1, where memory 0 forgets the rate 1/2. The standard error of a frequency of
    4000 draws is below 0.008; and given the first draw, the second is one of the other three."""
    rates, firsts, pairs = {2: [0.0], 3: [1.0]}, Counter(), Counter()
    for seed in range(4000):
        curriculum = difficulty(seed=seed, floor=0.1, memory=0.0)
        for i, scores in rates.items():
            curriculum.observe(i, scores)
        first, second = curriculum.choose(), curriculum.choose()
        firsts[first] += 1
        pairs[first, second] += 1
    weights = [1.0, 1.0, 0.1, 0.1]
    for i, weight in enumerate(weights):
        assert firsts[i] / 4000 == pytest.approx(weight / 2.2, abs=0.032)
        assert pairs[i, i] == 0
    assert pairs[0, 1] / firsts[0] == pytest.approx(1 / 1.2, abs=0.045)


def test_a_prompt_is_not_drawn_again_before_it_was_observed_unless_all_are_sampled():
    curriculum = difficulty()
    assert sorted(curriculum.choose() for _ in range(4)) == [0, 1, 2, 3]
    assert sorted(curriculum.choose() for _ in range(4)) == [0, 1, 2, 3]
    chosen = [difficulty().choose()]
    curriculum = difficulty()
    curriculum.choose()
    curriculum.observe(chosen[0], [1.0])
    assert chosen[0] in {curriculum.choose() for _ in range(4)}


def test_it_goes_on_from_its_state():
    def run(curriculum: Difficulty, steps: range) -> list[int]:
        found = []
        for step in steps:
            found.append(curriculum.choose())
            if step % 3:
                curriculum.observe(found[-1], [step % 2])
        return found

    for done in range(8):
        whole, first, second = (difficulty(size=6, seed=5) for _ in range(3))
        expected = run(whole, range(12))
        assert run(first, range(done)) == expected[:done]
        second.load_state_dict(json.loads(json.dumps(first.state_dict()), object_pairs_hook=with_numbers))
        assert run(second, range(done, 12)) == expected[done:]


def with_numbers(pairs: list) -> dict:
    return {int(key) if key.isdigit() else key: value for key, value in pairs}


def test_ours_passes_the_trial_and_a_broken_one_is_refused(tmp_path):
    assert CURRICULA.names == ["difficulty"]
    try_out(CURRICULA["difficulty"])
    (tmp_path / "own.py").write_text(
        "import openrlhf as rl\n\n\nclass Far(rl.Curriculum):\n    def choose(self):\n"
        "        return len(self.prompts)\n"
    )
    kind = CURRICULA[f"{tmp_path}/own.py:Far"]
    assert issubclass(kind, Curriculum)
    with refused(ErrorCode.USER_CODE, told="0 to 2, and not 3"):
        try_out(kind)
