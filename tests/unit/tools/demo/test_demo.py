"""`openrlhf demo` without its runs: what it prints about them."""

import json
import runpy
from pathlib import Path
from unittest.mock import Mock

import pytest
from recorded_runs import write
from records import trajectory

from openrlhf.config.ppo import PPOConfig
from openrlhf.data.reasoning_gym import find_entry
from openrlhf.tasks.tiny_model import tiny_chat_model, tiny_tokenizer
from openrlhf.tools.command_line import arguments
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
    """Brackets are text; special tokens, and what a template writes around a problem, are left out."""
    monkeypatch.setenv("COLUMNS", "100")
    end, rollouts = TOKENIZER.eos_token, tmp_path / "run" / "rollouts"
    rollouts.mkdir(parents=True)
    TOKENIZER.save_pretrained(tmp_path / "policy")
    (tmp_path / "task").mkdir()
    rows = [json.dumps({"input": problem}) + "\n" for problem in ("1 + 1", "2 + 2")]
    (tmp_path / "task" / "eval.jsonl").write_text("".join(rows))
    before = [answered(0, "9 1 + 1", f"3{end}", 0.0), answered(1, "9 2 + 2", f"[bold]4{end}", 1.0)]
    after = [answered(0, "9 1 + 1", f"[i]2{end}", 1.0), answered(1, "9 2 + 2", f"4{end}", 1.0)]
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


def test_a_missing_engine_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(arguments, "find_spec", lambda name: None if name == "vllm" else name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(SystemExit):
        flags.demo(["--folder", str(tmp_path)])
    assert "error: vllm is not installed, and the demo samples with it." in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_a_pretrained_model_learns_sums_of_reasoning_gym(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command that is printed and run has problems, none of them twice, and a reward that reads their
    labels."""
    monkeypatch.setattr(demo, "fetch", lambda name: tiny_chat_model(tmp_path / "my models" / name, seed=0))
    monkeypatch.setattr(demo, "_show_result", lambda folder, steps: "4 - 1 =")
    runs: list[PPOConfig] = []
    monkeypatch.setattr(demo, "run_rl", lambda config, argv: runs.append(config))
    demo.run(tmp_path, "smollm2", 7, 3)
    (config,) = runs
    assert (
        config.actor.model_name_or_path == str(tmp_path / "my models" / "smollm2")
        and config.train.max_steps == 3
    )
    trained, held_out = (
        [json.loads(line) for line in Path(file).read_text().splitlines()]
        for file in (config.data.prompt_dataset, config.eval.dataset)
    )
    questions = [row["input"] for row in trained + held_out]
    assert len(held_out) == 64 and len(trained) == 200 - 64 and len(questions) == len(set(questions))
    label = trained[0]["label"]
    answer = find_entry(label)[1]["answer"]
    reward = runpy.run_path(config.reward.remote_url)["reward_func"]
    said = [f"The answer is {answer}.<|im_end|>", f"It is {answer}0.<|im_end|>", "No number"]
    assert reward([f"Q{text}" for text in said], ["Q"] * 3, [label] * 3) == [1, 0, 0]
    printed = capsys.readouterr().out
    assert "$ openrlhf ppo" in printed and "openrlhf chat --model.model_name_or_path" in printed


@pytest.mark.parametrize("in_path", [False, True])
def test_the_printed_command_is_found_after_make_too(
    in_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make demo` calls `.venv/bin/openrlhf`, which a shell without that folder in its PATH does not find."""
    (tmp_path / "openrlhf").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path if in_path else tmp_path / "empty"))
    monkeypatch.setattr(demo, "_fetch", lambda model, folder, seed, seconds: (tmp_path / "start", ""))
    monkeypatch.setattr(demo, "parse", lambda command, argv: Mock())
    monkeypatch.setattr(demo, "run_rl", lambda config, argv: None)
    monkeypatch.setattr(demo, "_show_result", lambda folder, steps: "4 - 1 =")
    demo.run(tmp_path, "smollm2", 0, 1)
    *_, before, last = capsys.readouterr().out.splitlines()
    assert last.startswith("echo '4 - 1 =' | openrlhf chat ")
    assert before.startswith("export PATH=/") is not in_path


def test_a_pretrained_model_needs_packages_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple] = []
    monkeypatch.setattr(flags, "run", lambda *words: ran.append(words))
    monkeypatch.setattr(arguments, "find_spec", lambda name: None if name == "reasoning_gym" else name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    flags.demo(["--folder", str(tmp_path)])
    with pytest.raises(SystemExit):
        flags.demo(["--folder", str(tmp_path), "--model", "smollm2"])
    err = capsys.readouterr().err
    assert "error: reasoning_gym is not installed" in err and "openrlhf[gym]" in err and len(ran) == 1
