"""`openrlhf agent try`: the run that it prepares, and the printed output for episodes."""

import io
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from records import trajectory
from refusals import refused
from rich.console import Console

from openrlhf.errors import ErrorCode
from openrlhf.tasks.tiny_model import tiny_chat_model, tiny_tokenizer
from openrlhf.tools.plan import agent
from openrlhf.tools.plan.agent import ONE_SEQUENCE, prepare, print_episode
from openrlhf.tools.plan.flags import agent_parser, config_of_agent

TOKENIZER = tiny_tokenizer()


def tokens(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def printed(*parts) -> str:
    out = io.StringIO()
    print_episode(Console(file=out, width=200), TOKENIZER, 3, parts)
    return out.getvalue()


def test_turn_by_turn() -> None:
    texts = ["1 + 1 =", " 3", " Wrong:", " 2"]
    ids = [tokens(text) for text in texts]
    mask = [k % 2 == 1 for k, part in enumerate(ids) for _ in part]
    t = trajectory(
        0.75,
        token_ids=list(chain(*ids)),
        action_mask=mask,
        rollout_log_probs=[-1.0] * len(ids[1]) + [-2.0] * len(ids[3]),
        turn_rewards=[-0.25, 1.0],
        extra_logs={"tries": 2.0},
        extra_texts={"judge": "in the end"},
    )
    _, head, logs, said, *parts, end = printed(t).splitlines()
    assert said == "judge: in the end"
    assert head.startswith("episode 3: ok") and "0.75" in head and logs == "tries 2"
    assert parts[1::2] == texts
    numbers = [re.findall(r"-?[\d.]+", part) for part in parts[::2]]
    sizes = [str(len(part)) for part in ids]
    assert numbers == [
        [sizes[0]],
        ["1", sizes[1], "-1.00", "-0.25"],
        [sizes[2]],
        ["2", sizes[3], "-2.00", "1"],
    ]
    assert end == ONE_SEQUENCE


def test_a_rewritten_history_is_shown() -> None:
    """The output shows the error of a failed episode too."""
    begin = tokens("Tom has 3")

    def part(number: int, text: str):
        ids = [*begin, *tokens(text)]
        mask = [i + 1 == len(ids) for i in range(len(ids))]
        return trajectory(1.0, token_ids=ids, action_mask=mask, part=number)

    text = printed(part(0, " apples and 4"), part(1, " pears and 5"))
    assert re.search(rf"rewrote .* {len(begin)} .*' apples and 4'.*' pears and 5'", text)
    assert ONE_SEQUENCE not in text
    assert "line 3: KeyError" in printed(trajectory(None, error="agent.py: line 3: KeyError: 'x'"))


def test_several_answers_to_one_request_are_no_rewritten_history() -> None:
    """A request with n: 2 leaves two sequences that begin with the same prompt. Their answers begin alike."""
    prompt = tokens("Tom has 3")

    def part(number: int, answer: str):
        ids = [*prompt, *tokens(answer)]
        mask = [i >= len(prompt) for i in range(len(ids))]
        logs = [-1.0] * (len(ids) - len(prompt))
        return trajectory(1.0, token_ids=ids, action_mask=mask, rollout_log_probs=logs, part=number)

    text = printed(part(0, " apples and 4"), part(1, " apples and 5"), part(2, " apples and 5"))
    assert text.count(f"same {len(prompt)} prompt tokens") == 2
    assert "n > 1" in text and "rewrote" not in text


def test_a_rewritten_history_is_compared_with_the_sequence_nearest_to_it() -> None:
    begin = tokens("Tom has 3")

    def part(number: int, text: str):
        ids = [*begin, *tokens(text)]
        return trajectory(
            1.0, token_ids=ids, action_mask=[i + 1 == len(ids) for i in range(len(ids))], part=number
        )

    text = printed(part(0, " pears and 5"), part(1, " apples and 4"), part(2, " apples or 4"))
    shared = len(begin) + len(tokens(" apples"))
    assert re.search(rf"rewrote .* {shared} .*' and 4'.*' or 4'", text)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_chat_model(tmp_path_factory.mktemp("model"), hidden_size=32, num_layers=1))


def prepared(folder: Path, model: str, *words: str):
    options, flags = agent_parser().parse_known_args(
        ["try", str(folder / "agent.py"), "--model", model, "--prompt", "1 + 1", *words]
    )
    config = config_of_agent(options, flags, folder)
    return config, prepare(config)


def test_the_run_that_is_prepared(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's file is checked, here without the process that imports it."""
    (tmp_path / "agent.py").touch()
    asked: list[tuple[Any, list[int]]] = []

    def check_users_files(config: Any, ask: Any) -> None:
        asked.append((config, found := []))
        ask("--flag", found.append, 7)

    monkeypatch.setattr(agent, "check_users_files", check_users_files)
    more = ["--label", "2", "--samples", "3", "--data.input_template", "Q: {}", "--data.max_len", "64"]
    config, prompt = prepared(tmp_path, model, *more, "--rollout.temperature", "0.5")
    assert asked == [(config, [7])]
    assert (prompt.text, prompt.label) == ("Q: 1 + 1", "2")
    assert config.train.agent_func_path == str(tmp_path / "agent.py")
    assert (config.rollout.n_samples_per_prompt, config.rollout.temperature) == (3, 0.5)
    with refused(ErrorCode.TOO_LONG, flag="--data.max_len", value=100000):
        prepared(tmp_path, model, "--data.max_len", "100000")
