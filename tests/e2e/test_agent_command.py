"""`openrlhf agent try` with a real engine."""

from pathlib import Path

import pytest
from processes import run_ranks

from openrlhf.tasks.prepare import TaskFiles

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "flags"),
    [("agent_retry.py", "--data.apply_chat_template --train.max_turns 3"), ("agent_openai.py", "")],
)
def test_every_kind_of_agent(task: TaskFiles, tmp_path: Path, file: str, flags: str) -> None:
    command = ["openrlhf.cli.agent", "try", str(EXAMPLES / file), "--model", str(task.model)]
    command += ["--prompt", "Tom has 3 apples.", "--label", "no number", *flags.split()]
    run_ranks([*command, "--rollout.max_new_tokens", "8", "--data.max_len", "200"], log=tmp_path / "log")
    printed = (tmp_path / "log").read_text(errors="replace")
    assert "episode 0: ok" in printed and "turn 3: " in printed, printed
    assert "the token stream holds: one sequence" in printed
