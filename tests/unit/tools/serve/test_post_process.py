import pytest

from openrlhf.tools.serve.result_file import best_and_worst, keep_best, write_rewards


def row(prompt, output: str, reward: float) -> dict:
    return {"input": prompt, "output": output, "reward": reward}


ROWS = [row("a", "a0", 1), row("b", "b0", -2), row("a", "a1", 3), row("a", "a2", 3), row("b", "b1", -1)]


def test_rejection_sampling_keeps_the_best_answer_to_each_input():
    assert keep_best(ROWS) == [row("a", "a1", 3), row("b", "b1", -1)]


def test_the_first_of_equal_answers_wins():
    rows = [row("a", "first", 2), row("a", "second", 2)]
    assert keep_best(rows) == rows[:1]


def test_inputs_may_be_messages():
    one, other = [{"role": "user", "content": "1"}], [{"role": "user", "content": "2"}]
    rows = [row(one, "x", 0), row(other, "y", 0), row(list(one), "z", 1)]
    assert keep_best(rows) == [rows[2], rows[1]]


def test_best_and_worst_answer_become_a_pair():
    pairs, dropped = best_and_worst(ROWS)
    assert dropped == 0
    assert pairs == [
        {"prompt": "a", "chosen": "a1", "chosen_reward": 3, "rejected": "a0", "rejected_reward": 1},
        {"prompt": "b", "chosen": "b1", "chosen_reward": -1, "rejected": "b0", "rejected_reward": -2},
    ]


def test_tools_belong_to_the_question():
    rows = [row("a", text, i) | {"tools": [tools]} for i, text in enumerate("xy") for tools in ({}, {"n": 1})]
    assert keep_best(rows) == rows[2:]
    assert [pair["tools"] for pair in best_and_worst(rows)[0]] == [[{}], [{"n": 1}]]


def test_inputs_whose_rewards_are_equal_are_dropped_and_counted():
    pairs, dropped = best_and_worst([row("a", "x", 1), row("a", "y", 1), row("alone", "z", 5), *ROWS[:3]])
    assert [pair["prompt"] for pair in pairs] == ["a"] and dropped == 2
    assert (pairs[0]["chosen"], pairs[0]["rejected"]) == ("a1", "x")


def test_rewards_are_written_into_inputs():
    rows = write_rewards(
        [row("Hi", "x", 1.005), row("Ho", "y", -0.001)], "{input} <rm>: {reward} ", normalize=False
    )
    assert [r["input"] for r in rows] == ["Hi <rm>: 1.00 ", "Ho <rm>: 0.00 "]
    assert [r["reward"] for r in rows] == [1.005, -0.001]
    assert [r["output"] for r in rows] == ["x", "y"]


def test_braces_of_an_input_stay_as_they_are():
    (written,) = write_rewards([row("{reward} {x}", "", 2)], "{reward}|{input}", normalize=False)
    assert written["input"] == "2.00|{reward} {x}"


def test_z_scores_are_taken_over_all_rows():
    """The mean is 2, the population deviation sqrt((1 + 1 + 0 + 0) / 4)."""
    rows = write_rewards([row("a", "", r) for r in (1, 3, 2, 2)], "{input}{reward}", normalize=True)
    assert [r["input"] for r in rows] == ["a-1.41", "a1.41", "a0.00", "a0.00"]
    assert [r["reward"] for r in rows] == pytest.approx([-(2**0.5), 2**0.5, 0, 0])


def test_equal_rewards_have_the_z_score_0():
    rows = write_rewards([row("a", "", 7), row("b", "", 7)], "{reward}", normalize=True)
    assert [r["input"] for r in rows] == ["0.00", "0.00"]


def test_a_reward_cannot_be_written_into_messages():
    with pytest.raises(ValueError, match="inputs are messages"):
        write_rewards([row([{"role": "user", "content": "1"}], "x", 0)], "{input}{reward}", normalize=False)
