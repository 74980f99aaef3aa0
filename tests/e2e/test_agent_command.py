"""`openrlhf agent try` with a real engine."""

from pathlib import Path

import pytest
from processes import run_ranks

from openrlhf.tasks.prepare import TaskFiles

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "label", "turns", "flags"),
    [
        ("agent_retry.py", "no number", 3, "--data.apply_chat_template --train.max_turns 3"),
        ("agent_openai.py", "no number", 3, ""),
        ("agent_code.py", '[["1", "2"], ["2", "4"]]', 3, ""),
        ("agent_tools.py", "no number", 1, "--train.max_turns 3 --rollout.step_timeout 60"),
        ("agent_mcp.py", "no number", 1, "--train.max_turns 3 --rollout.step_timeout 60"),
    ],
)
def test_every_kind_of_agent(
    task: TaskFiles, tmp_path: Path, file: str, label: str, turns: int, flags: str
) -> None:
    command = ["openrlhf.cli.agent", "try", str(EXAMPLES / file), "--model", str(task.model)]
    command += ["--prompt", "Tom has 3 apples.", "--label", label, *flags.split()]
    run_ranks([*command, "--rollout.max_new_tokens", "8", "--data.max_len", "500"], log=tmp_path / "log")
    printed = (tmp_path / "log").read_text(errors="replace")
    assert "episode 0: ok" in printed and f"turn {turns}: " in printed, printed
    assert "the token stream holds: one sequence" in printed
