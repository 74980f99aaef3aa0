"""`openrlhf demo` without its runs: what it prints about them."""

from pathlib import Path

import pytest
from recorded_runs import write
from records import trajectory
from refusals import refused

from openrlhf.errors import ErrorCode
from openrlhf.tasks.tiny_model import tiny_tokenizer
from openrlhf.tools.demo import demo, flags
from openrlhf.types import Trajectory

TOKENIZER = tiny_tokenizer()


def answered(prompt_id: int, problem: str, answer: str, reward: float) -> Trajectory:
    asked, said = (TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in (problem, answer))
    mask = [False] * len(asked) + [True] * len(said)
    return trajectory(
        reward,
        token_ids=[*asked, *said],
        action_mask=mask,
        prompt_id=prompt_id,
        extra_logs={"thinks": 1 - reward},
    )


def test_what_is_printed_before_and_after(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brackets are text, and special tokens are left out."""
    monkeypatch.setenv("COLUMNS", "100")
    end, rollouts = TOKENIZER.eos_token, tmp_path / "run" / "rollouts"
    rollouts.mkdir(parents=True)
    TOKENIZER.save_pretrained(tmp_path / "policy")
    before = [answered(0, "1 + 1", f"3{end}", 0.0), answered(1, "2 + 2", f"[bold]4{end}", 1.0)]
    after = [answered(0, "1 + 1", f"[i]2{end}", 1.0), answered(1, "2 + 2", f"4{end}", 1.0)]
    write(rollouts, 0, before, "eval")
    write(rollouts, 5, after, "eval")
    assert demo._show_result(tmp_path, 5) == "1 + 1"
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    lengths = [[t.num_actions for t in found] for found in (before, after)]
    assert cells == [
        ["accuracy", "50.0%", "100.0%"],
        ["answers with reasoning", "50.0%", "0.0%"],
        ["tokens in an answer", *(f"{sum(found) / 2:.1f}" for found in lengths)],
        ["1 + 1", "3 ✗", "[i]2 ✓"],
        ["2 + 2", "[bold]4 ✓", "4 ✓"],
    ]
    write(rollouts, 6, before[:1], "eval")
    write(rollouts, 0, before[:1], "eval")
    assert demo._show_result(tmp_path, 6) == ""


def test_a_missing_engine_is_named_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "find_spec", lambda name: None if name == "vllm" else name)
    with refused(ErrorCode.MISSING_PACKAGE) as told:
        flags.check_packages()
    assert "not installed: vllm." in told.value.text
