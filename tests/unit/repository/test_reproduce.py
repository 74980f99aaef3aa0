"""The table of docs/results.md: its intervals, its rows, and the page."""

# ruff: noqa: E402  the benchmarks are no package

import json
import random
import re
import sys
from argparse import Namespace
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from openrlhf.loop.settings import read_settings

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "benchmarks"))

import reproduce
from reproducible import guess, tasks
from reproducible.methods import METHODS
from reproducible.outcome import Goal, Outcome, Score, agrees, find_goal, read, write
from reproducible.page import filled, sections
from reproducible.rows import ROWS
from reproducible.tasks import HELD_OUT, TASKS, demonstrate_search, demonstrate_sum, search, worked

OUTCOME = Outcome(
    before=Score(64, 256),
    after=Score(256, 256),
    curve=[0.25, 0.95],
    goal=Goal(step=2, samples=512, minutes=1.26, cpu_minutes=0.5),
    minutes=1.26,
    cpu_minutes=0.5,
    weights="0123456789abcdef",
    machine="a CPU, 2 cores",
    versions={"torch": "2"},
)


def with_score(solved: int, total: int = 256) -> Outcome:
    return replace(OUTCOME, after=Score(solved, total))


def test_wilsons_interval_by_hand() -> None:
    # z^2 / 2n = 1/16, z sqrt(1/288 + 1/2304) = 3 / 16, 1 + z^2 / n = 9/8: (9/16 -+ 3/16) / (9/8)
    assert Score(36, 72).interval(z=3) == pytest.approx((1 / 3, 2 / 3))
    # all solved: (1 + 1/6 -+ 1/6) / (4/3)
    assert Score(27, 27).interval(z=3) == pytest.approx((0.75, 1))
    assert Score(0, 27).interval(z=3) == pytest.approx((0, 0.25))


def test_a_repetition_agrees_if_it_reaches_the_range_of_the_seeds() -> None:
    known = [with_score(128), with_score(224)]  # at 3 deviations 0.409 - 0.591 and 0.798 - 0.925
    assert agrees(with_score(180), known)  # between the seeds
    assert agrees(with_score(84), known)  # 0.328 (0.247 - 0.421)
    assert not agrees(with_score(64), known)  # 0.25 (0.178 - 0.339)
    assert agrees(with_score(246), known) and not agrees(with_score(256), known)  # from 0.906, from 0.966


def check(monkeypatch: pytest.MonkeyPatch, folder: Path, solved: list[int]) -> str:
    """Returns what `--check` says of a row whose repetitions solve these numbers, one after the other."""
    options = Namespace(results=folder, seed=None)
    monkeypatch.setattr(reproduce, "repeat", lambda row, seed, options: with_score(solved.pop(0)))
    return reproduce.difference(ROWS["tiny-words-grpo"], options)


def test_a_check_fails_if_two_seeds_leave_the_intervals(tmp_path, monkeypatch):
    assert "no results" in check(monkeypatch, tmp_path, [])
    write("tiny-words-grpo", 0, with_score(128), tmp_path)
    assert check(monkeypatch, tmp_path, [130]) == ""
    assert check(monkeypatch, tmp_path, [10, 130]) == ""
    assert "0.078, 0.039 after training, and the results have 0.500" in check(monkeypatch, tmp_path, [20, 10])


def test_the_goal_is_the_first_step_that_reaches_it() -> None:
    times = [(1.004, 0.5), (2.0, 1.0), (3.0, 1.5)]
    assert find_goal([0.2, 0.9, 1.0], times, 0.9, samples=256) == Goal(
        step=2, samples=512, minutes=2.0, cpu_minutes=1.0
    )
    assert find_goal([0.2, 0.3, 0.4], times, 0.9, samples=256) is None


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    other = replace(OUTCOME, goal=None)
    write("row", 10, OUTCOME, tmp_path)
    write("row", 2, other, tmp_path)
    write("row", 10, with_score(1), tmp_path)
    assert read("row", tmp_path) == {2: other, 10: with_score(1)}
    assert list(read("row", tmp_path)) == [2, 10]
    assert read("none", tmp_path) == {}


def test_a_line_of_the_page(tmp_path: Path) -> None:
    write("tiny-words-grpo", 1, OUTCOME, tmp_path)
    heading, table, missing = sections(tmp_path)
    assert heading.startswith("### The tiny model: words\n")
    # Wilson at 1.96: 64 of 256 are 20.1 - 30.6 %, 256 of 256 are 98.5 - 100 %
    assert table.splitlines()[2:] == [
        "| `tiny-words-grpo` | GRPO | 1 | 25 (20 - 31) | 100 (99 - 100) | 512 | 1.3 (0.5) | 512 | 1.3 (0.5) "
        "| `0123456789ab` |"
    ]
    assert "`tiny-words-dpo`" in missing and "`tiny-words-grpo`" not in missing


def test_the_page_has_the_committed_results() -> None:
    page = (ROOT / "docs" / "results.md").read_text()
    assert filled(page) == page


def test_the_committed_results_are_those_of_the_rows() -> None:
    files = list((ROOT / "benchmarks" / "results").glob("*.json"))
    assert files
    for file in files:
        for seed, outcome in read(file.stem).items():
            assert len(outcome.curve) == ROWS[file.stem].steps, (file.name, seed)
            assert outcome.before.total == outcome.after.total == HELD_OUT, (file.name, seed)
    assert all(read(row.name) for row in ROWS.values() if row.quick)


@pytest.mark.parametrize("name", ROWS)
def test_the_command_of_a_row_is_understood(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "--row", name, "--seed", "1"])
    options = reproduce.parse_options()
    flags = {"actor": "org/model"} | ROWS[options.row].flags(options.seed)
    config = read_settings(None, flags, steps=None, placement="local").config
    assert config.train.seed == 1
    assert config.train.batch_size * 2 == ROWS[name].samples_per_step


def test_every_method_is_tried_on_the_words() -> None:
    assert {row.method_name for row in ROWS.values() if row.task_name == "words"} == set(METHODS)


def test_the_page_of_papers_names_each_row_once() -> None:
    page = (Path(__file__).parents[3] / "docs" / "papers.md").read_text()
    named = re.findall(r"`((?:tiny|smollm2)-\w+-\w+)`", page)
    assert sorted(named) == sorted(ROWS)


def test_a_sum_is_worked_out_term_by_term() -> None:
    question = "State the final answer to the following arithmetic problem: 3 - 4 + 2 - 9 ="
    assert worked(question) == (["3-4=-1", "-1+2=1", "1-9=-8"], "-8")
    row = {"input": question, "label": "-8"}
    answers = {one["output"] for i in range(20) for one in demonstrate_sum(row, random.Random(i))}
    assert answers == {"<think></think>\\boxed{-8}", "<think>3-4=-1; -1+2=1; 1-9=-8</think>\\boxed{-8}"}
    judged = TASKS["sums"].reward([*answers, "\\boxed{8}"], [""] * 3, ["-8"] * 3)
    assert judged["rewards"] == [1, 1, 0]


def test_a_search_ends_at_the_target() -> None:
    assert search("Make 8 of 3, 7, 2.") == (["3+7+2=12", "3+7-2=8"], "3+7-2")
    assert search("Make 1 of 2, 4, 7.")[0][-1] == "7-2-4=1"  # the last of seven
    assert len(search("Make 1 of 2, 4, 7.")[0]) == 7


def test_searches_solve_the_problems() -> None:
    rows = list(islice(TASKS["countdown"].problems(3), 1000))
    answers = [one["output"] for row in rows for one in demonstrate_search(row, random.Random(0))]
    labels = [row["label"] for row in rows]
    assert TASKS["countdown"].reward(answers, [""] * 1000, labels) == [1] * 1000


def test_a_countdown_needs_all_numbers_and_the_target() -> None:
    answers = ["7-2+3", "3+7", "3+7-2", "3+7-2=8", "9-1", "8", "__import__('os')"]
    queries = [f"<think></think>\\boxed{{{answer}}}" for answer in answers] + ["3+7-2"]
    rewards = TASKS["countdown"].reward(queries, [""] * 8, [[8, 2, 3, 7]] * 8)
    assert rewards == [1, 0, 1, 0, 0, 0, 0, 0]


def test_a_player_who_halves_finds_every_number() -> None:
    wins, seen = 0, set()
    for label in range(200):
        turns = list(guess.play({"label": label}, random.Random(label), careful=1))
        answers = [turn["output"] for turn in turns]
        assert answers[0] == "\\boxed{16}" and answers[1:2] in ([], ["\\boxed{8}"], ["\\boxed{24}"])
        assert [len(turn["input"]) for turn in turns] == [2 * i + 1 for i in range(len(turns))]
        game = guess.Game()
        game.reset(seed=label)
        played = [game.step(answer) for answer in answers]
        wins += sum(reward for _, reward, *_ in played) == 1
        seen.add(answers[-1])
    assert wins == 200 and len(seen) == 31


def test_demonstrations_are_of_problems_that_are_not_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "DEMONSTRATIONS", 300)
    TASKS["sums"].write_demonstrations(tmp_path / "rows.jsonl", seed=3)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    held_out = {row["input"] for row in TASKS["sums"].split(seed=3)[1]}
    assert len(rows) == 300 and not held_out & {row["input"] for row in rows}
    shown = sum("<think></think>" not in row["output"] for row in rows)
    assert 0.3 < shown / 300 < 0.5  # of 300 with a chance of 0.4: 3.5 standard deviations


@pytest.mark.parametrize("name", TASKS)
def test_held_out_problems_are_not_trained_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "TRAINED", 200)
    trained, held_out = TASKS[name].split(seed=3)
    assert len(held_out) == HELD_OUT and len(trained) == 200
    assert not {str(row["input"]) for row in trained} & {str(row["input"]) for row in held_out}
    assert TASKS[name].split(seed=4)[1] == held_out
