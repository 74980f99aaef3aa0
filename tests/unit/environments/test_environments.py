"""Environments of the real packages, with the policy's answers by hand."""

import json
import random
import re
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from episodes_of_examples import END, EXAMPLES, play, told, turns
from refusals import refused

from openrlhf.data.reasoning_gym import find_entry, gym_rows
from openrlhf.environments.gym import GymExecutor
from openrlhf.environments.packages import EXTRAS
from openrlhf.errors import ErrorCode
from openrlhf.rollout.executors import check_agent_file
from openrlhf.types import Outcome

NEEDS_GEM = pytest.mark.skipif(sys.version_info >= (3, 12), reason="gem-llm has no release for this Python")
GUESS, GEM, ARENA = (EXAMPLES / f"agent_{name}.py" for name in ("guess", "gem", "textarena"))


def text_arena(**options: Any) -> Any:
    """Builds the executor; its package is imported by the tests that play."""
    from openrlhf.environments.textarena import TextArenaExecutor

    return TextArenaExecutor(**options)


def guess(number: int) -> str:
    return f"\\boxed{{{number}}}"


def halving(lowest: int, highest: int, form: str = "\\boxed{%d}") -> Callable[[str], str]:
    """Returns a policy that needs the fewest guesses, from what is in its stream."""

    def answer(stream: str) -> str:
        low, high = lowest, highest
        tries = re.split(r"<\|assistant\|>", stream)[1:]
        for said in tries[:-1]:
            number = int(re.findall(r"\d+", said)[0])
            if re.search("higher", said, re.IGNORECASE):
                low = number + 1
            else:
                high = number - 1
        return form % ((low + high) // 2)

    return answer


def secret(seed: int) -> int:
    return random.Random(seed).randint(1, 8)


def test_one_stream_of_tokens_in_the_policys_template() -> None:
    """Only answers are trained on; the environment's text stands between them, as its template writes it."""
    seed = next(s for s in range(99) if secret(s) == 6)
    (t,) = play(GUESS, "guess", seed, guess(3), "I do not know.", guess(7), guess(6))
    assert t.outcome is Outcome.OK, t.error
    assert turns(t) == [
        (told("Guess a number from 1 to 8. Answer \\boxed{number}."), False),
        (guess(3) + END, True),
        (told("Higher than 3."), False),
        (f"I do not know.{END}", True),
        (told("It is between 4 and 8."), False),
        (guess(7) + END, True),
        (told("Lower than 7."), False),
        (guess(6) + END, True),
    ]
    assert t.turn_rewards.tolist() == [0, -0.25, 0, 1]
    assert (t.reward, t.truncated, t.extra_logs) == (0.75, False, {"turns": 4})


@pytest.mark.parametrize(
    ("limits", "turns_played", "reward"),
    [
        ({}, 4, -0.75),  # the environment's own limit; from the second time on the guess is excluded
        ({"max_turns": 2}, 2, -0.25),
        ({"max_len": 80}, 2, -0.25),  # the third prompt has 89 tokens
        ({"max_new_tokens": 2}, 4, -0.75),
    ],
)
def test_what_ends_an_episode_early_truncates_it(limits: dict, turns_played: int, reward: float) -> None:
    seed = next(s for s in range(99) if secret(s) != 1)
    (t,) = play(GUESS, "guess", seed, guess(1), **limits)
    assert (t.outcome, t.reward, t.truncated) == (Outcome.OK, reward, True), t.error
    assert len(t.turn_starts) == turns_played == t.extra_logs["turns"]


@NEEDS_GEM
@pytest.mark.parametrize("seed", range(8))
def test_gem(seed: int) -> None:
    """Halving finds one of ten numbers in four guesses. The seed decides the number."""
    (first,) = play(GEM, "game:GuessTheNumber-v0-easy", seed, halving(1, 10))
    assert (first.outcome, first.reward) == (Outcome.OK, 1), first.error
    random.seed(seed)
    number = random.randint(1, 10)
    assert turns(first)[-1] == (guess(number) + END, True)
    (again,) = play(GEM, "game:GuessTheNumber-v0-easy", seed, halving(1, 10))
    assert first.token_ids.tolist() == again.token_ids.tolist()


@NEEDS_GEM
def test_rewards_of_gem() -> None:
    """An answer without a number gets gem's format error; the last of four guesses is worth how near it
    is."""
    (t,) = play(GEM, "game:GuessTheNumber-v0-easy", 3, "what?")
    assert (t.reward, len(t.turn_starts), t.truncated) == (-0.1, 1, False)
    random.seed(3)
    number = random.randint(1, 10)
    others = [n for n in range(1, 11) if n != number][:4]
    (t,) = play(GEM, "game:GuessTheNumber-v0-easy", 3, *map(guess, others))
    assert t.reward == pytest.approx(1 - abs(others[-1] - number) / 9) and t.truncated


class Dice:
    """Environment that draws from the process's global random numbers at each step."""

    def reset(self, *, seed: int) -> tuple[str, dict]:
        self.rolls = 0
        return str(random.randint(0, 10**6)), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.rolls += 1
        return f"{random.randint(0, 10**6)} {np.random.randint(10**6)}", 0.0, self.rolls == 3, False, {}


class DiceExecutor(GymExecutor):
    def make(self, prompt, label):
        return Dice()


def test_episodes_at_the_same_time_draw_their_own_random_numbers() -> None:
    """16 episodes of one seed see the same numbers, one of another seed does not, and the process's own
    numbers go on."""
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.random()
    random.seed(5)
    np.random.seed(5)
    found = play(DiceExecutor(), "dice", 1, "roll", samples=16)
    assert (random.random(), np.random.random()) == expected
    assert all(t.ok for t in found), found[0].error
    assert len({tuple(t.token_ids.tolist()) for t in found}) == 1
    (other,) = play(DiceExecutor(), "dice", 2, "roll")
    assert other.token_ids.tolist() != found[0].token_ids.tolist()


def test_sixteen_episodes_never_mix() -> None:
    """An episode that is told something else goes on differently."""
    state = iter(range(1000))

    class Counting(Dice):
        def reset(self, *, seed: int) -> tuple[str, dict]:
            self.own = next(state)
            return f"I am {self.own}", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
            return f"{self.own} again", float(action == f"yes {self.own}"), False, False, {}

    class Executor(GymExecutor):
        draws_globally = False

        def make(self, prompt, label):
            return Counting()

    answer = lambda stream: "yes " + re.findall(r"I am (\d+)", stream)[0]
    found = play(Executor(), "count", 0, answer, samples=16, max_turns=4)
    assert [t.reward for t in found] == [4] * 16
    numbers = [set(re.findall(r"\d+", "".join(text for text, _ in turns(t)))) for t in found]
    assert all(len(own) == 1 for own in numbers) and len(set.union(*numbers)) == 16


class Broken(Dice):
    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        raise KeyError("pieces")


class BrokenExecutor(GymExecutor):
    def make(self, prompt, label):
        return Broken()


@pytest.mark.parametrize(
    ("executor", "prompt", "label", "text"),
    [
        (BrokenExecutor(), "dice", 0, "KeyError: 'pieces'"),
        (DiceExecutor(), "dice", "Tom", "label 'Tom' is not a seed"),
        pytest.param(GEM, "game:Guess", 0, "Environment game:Guess not found", marks=NEEDS_GEM),
        (ARENA, "Nimm-v0", 0, "Nimm-v0 not found"),
    ],
)
def test_errors_of_environments(executor, prompt: str, label, text: str) -> None:
    (t,) = play(executor, prompt, label, "roll")
    assert t.outcome is Outcome.ENV_ERROR and text in t.error, t.error


def test_a_first_observation_without_room_is_an_error() -> None:
    (t,) = play(GUESS, "guess", 0, "1", max_len=20)
    assert t.outcome is Outcome.ENV_ERROR and "--data.max_len 20" in t.error


class Slow(Dice):
    closed, seconds = 0, 0.5

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        time.sleep(self.seconds)
        return super().step(action)

    def close(self) -> None:
        Slow.closed += 1


class SlowExecutor(GymExecutor):
    def make(self, prompt, label):
        return Slow()


def test_an_environment_that_is_too_slow_is_closed() -> None:
    before = Slow.closed
    (t,) = play(SlowExecutor(), "dice", 0, "roll", step_timeout=0.05)
    assert t.outcome is Outcome.TIMED_OUT and "--rollout.step_timeout" in t.error
    assert Slow.closed == before + 1


def test_the_limit_of_a_step_leaves_out_the_steps_of_others(monkeypatch) -> None:
    monkeypatch.setattr(Slow, "seconds", 0.1)
    found = play(SlowExecutor(), "dice", 0, "roll", samples=20, step_timeout=1.5)
    assert [t.outcome for t in found] == [Outcome.OK] * 20


LEGS = "reasoning_gym:chain_sum?size=3&seed=1&max_terms=2&max_digits=1&min_digits=1"


def problem() -> tuple[str, str, str]:
    """Returns (question, label, answer)."""
    row = next(gym_rows(LEGS, "--data.prompt_dataset"))
    return row["input"], row["label"], find_entry(row["label"])[1]["answer"]


def test_reasoning_gym_over_several_turns() -> None:
    question, label, answer = problem()
    executor = EXAMPLES / "agent_reasoning_gym.py"
    (t,) = play(executor, question, label, "99", f"<think>hm</think>\\boxed{{{answer}}}")
    assert [text for text, mine in turns(t) if not mine] == [
        told(question),
        told("This is not right. Try again."),
    ]
    assert (t.reward, t.turn_rewards.tolist(), t.truncated) == (1, [0, 1], False)
    (t,) = play(executor, question, label, "99")
    dataset, entry = find_entry(label)
    wrong = dataset.score_answer("99", entry)  # a little more than 0: a number, but not the right one
    assert (t.reward, t.extra_logs["turns"]) == (pytest.approx(wrong), 3)


@pytest.fixture
def run_example(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def run(*command: object) -> None:
        monkeypatch.setattr(sys, "argv", [str(word) for word in command])
        runpy.run_path(str(EXAMPLES / str(command[0])), run_name="__main__")

    return run


@pytest.mark.parametrize(
    "name", ["guess", pytest.param("gem", marks=NEEDS_GEM), "textarena", "reasoning_gym"]
)
def test_every_example_writes_the_rows_that_it_plays(run_example, tmp_path: Path, name: str) -> None:
    run_example(f"agent_{name}.py", tmp_path / "rows.jsonl")
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len({row["label"] for row in written}) == 512 and all(row["input"] for row in written)


def test_the_example_of_nemo_gym_needs_a_dataset_and_says_so(run_example, tmp_path: Path, capsys) -> None:
    dataset, out = tmp_path / "dataset.jsonl", tmp_path / "rows.jsonl"
    dataset.write_text(json.dumps({"responses_create_params": {"input": "1 + 1 = ?"}}) + "\n")
    run_example("agent_nemo_gym.py", dataset, out)
    assert json.loads(out.read_text())["input"] == "1 + 1 = ?"
    for words, said in (
        ([dataset], "the following arguments are required: ROWS"),
        ([tmp_path / "absent.jsonl", out], "No such file or directory"),
        ([out, tmp_path / "more.jsonl"], "line 1 "),
    ):
        with pytest.raises(SystemExit):
            run_example("agent_nemo_gym.py", *words)
        usage, error = capsys.readouterr().err.splitlines()
        assert usage == "usage: agent_nemo_gym.py [-h] DATASET ROWS" and said in error


def test_a_verifier_that_raises_is_an_error() -> None:
    from openrlhf.environments.reasoning_gym import ReasoningGymExecutor

    row = next(gym_rows("reasoning_gym:prime_factorization?size=1&seed=1", "--data.prompt_dataset"))
    (t,) = play(ReasoningGymExecutor(max_tries=2), row["input"], row["label"], "two and three")
    assert t.outcome is Outcome.ENV_ERROR and "ValueError" in t.error


def test_a_game_for_one() -> None:
    """Twenty numbers take ten guesses."""
    (t,) = play(text_arena(), "GuessTheNumber-v0", 3, halving(1, 20, "[%d]"))
    random.seed(3)
    assert t.outcome is Outcome.OK, t.error
    assert turns(t)[-1] == (f"[{random.randint(1, 20)}]{END}", True) and t.reward == 1
    hints = [text for text, mine in turns(t) if not mine][1:]
    assert {*hints} <= {told(f"The target number is {hint}.") for hint in ("higher", "lower")}


def nim(stream: str) -> str:
    """Plays Nim with piles of 1 and 2: taking one of the larger pile leaves the other player to lose."""
    piles = re.findall(r"pile (\d): (\d)", stream.rpartition("Current Pile:")[2])
    (largest, _), *_ = sorted(piles, key=lambda pile: -int(pile[1]))
    return f"[{largest} 1]"


def test_a_game_against_an_opponent() -> None:
    """The first of two players of Nim with piles of 1 and 2 wins. An even seed trains the first."""
    (t,) = play(ARENA, "Nim-v0", 4, nim)
    assert (t.outcome, t.reward, t.truncated) == (Outcome.OK, 1, False), t.error
    first, last = (text.removesuffix(END) for text, mine in turns(t) if mine)
    assert first == "[1 1]" and last in ("[0 1]", "[1 1]")  # the opponent takes the other one
    assert "Player 0" in turns(t)[0][0] and "[Player 1]" in turns(t)[2][0]


def test_a_game_against_itself_trains_one_player() -> None:
    """Both players ask the policy; of the two streams that of player `seed % 2` is trained on, with its
    reward. Thoughts are neither moves nor read by the other one."""
    thinks, rewards = lambda stream: f"<think>Why not [0 1]?</think>{nim(stream)}", []
    for seed in (0, 1):
        (t,) = play(text_arena(num_players=2, piles=[1, 2]), "Nim-v0", seed, thinks)
        assert t.outcome is Outcome.OK, t.error
        assert not any("Why not" in text for text, mine in turns(t) if not mine)
        assert f"Welcome to Nim, Player {seed}!" in turns(t)[0][0]
        rewards.append(t.reward)
    assert rewards == [1, -1]


def test_an_invalid_move_is_the_games_to_judge() -> None:
    (t,) = play(ARENA, "Nim-v0", 0, "pass")
    assert (t.outcome, t.reward, t.extra_logs["turns"]) == (Outcome.OK, -1, 2), t.error
    assert "attempted an invalid move" in turns(t)[2][0]


@pytest.mark.parametrize("unfinished", [0, -1])
def test_a_game_that_does_not_end(unfinished: float) -> None:
    executor = text_arena(unfinished=unfinished)
    (t,) = play(executor, "GuessTheNumber-v0", 3, "[1]", max_turns=1)
    assert (t.outcome, t.reward, t.truncated) == (Outcome.OK, unfinished, True), t.error


@pytest.mark.parametrize(("name", "extra"), EXTRAS.items())
def test_a_package_that_is_missing(name: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The import of the file names the extra, before a run starts."""
    for module in list(sys.modules):
        if module.partition(".")[0] == name or module.startswith("openrlhf.environments."):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf'"openrlhf\[{extra}\]"'):
        runpy.run_path(str(EXAMPLES / f"agent_{name}.py"), run_name="agent")


@pytest.mark.processes
def test_an_executor_without_an_environment_is_refused(tmp_path: Path) -> None:
    """A run is refused before it starts; a whole executor keeps to the limits of a run."""
    flag = "--train.agent_func_path"
    check_agent_file(str(GUESS), flag, ["max_turns", "step_timeout"])
    path = tmp_path / "agent.py"
    path.write_text(
        "from openrlhf.environments.gym import GymExecutor\nclass AgentExecutor(GymExecutor):\n    pass\n"
    )
    with refused(ErrorCode.USER_CODE, flag=flag, value=path) as refusal:
        check_agent_file(str(path), flag)
    assert re.search(r"\bmake\b", refusal.value.text)
