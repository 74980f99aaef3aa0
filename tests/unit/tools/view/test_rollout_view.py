"""`openrlhf rollouts`: its output, for terminals and pipes, and its message where there is nothing to
print."""

import io
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import printed
from rich.console import Console
from tokenizers_of_users import llama_2_style

from openrlhf.observability.journal import Journal, Trained, read_rows
from openrlhf.tasks.tiny_model import tiny_tokenizer
from openrlhf.text import decode
from openrlhf.tools.command_line import terminal
from openrlhf.tools.doctor.record import RunRecord
from openrlhf.tools.view import rollouts
from openrlhf.tools.view.flags import rollouts as rollouts_command
from openrlhf.tools.view.rollouts import BAD, GOOD, NOT_CHOSEN, choose_style, coloured, legend
from openrlhf.types import Batch, Outcome, Prompt, Trajectory, runs

BYTES, LLAMA = tiny_tokenizer(), llama_2_style()
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def trajectory(prompt_id: int, answer: str, reward: float | None, **changes) -> Trajectory:
    text = f"Question {prompt_id}?"
    prompt, action_ids = (BYTES(t, add_special_tokens=False)["input_ids"] for t in (text, answer))
    count = len(action_ids)
    fields = {
        "prompt": Prompt(prompt_id=prompt_id, text=text, label=["four", "日本"]),
        "sample_index": 0,
        "token_ids": np.array(prompt + action_ids, np.int32),
        "action_mask": np.arange(len(prompt) + count) >= len(prompt),
        "rollout_log_probs": np.full(count, -0.1, np.float32),
        "weight_versions": runs([5] * count),
        "reward": reward,
        "score": reward,
    }
    return Trajectory(**fields | changes)


FAILED = trajectory(9, " so", None, outcome=Outcome.REWARD_ERROR, error="KeyError: \x1b[2J'x'\n in reward.py")
LONG = trajectory(8, " it is so and so and so", 0.25, truncated=True, finish_reason="length")
SHORT = trajectory(7, " it is 4", 1.0, sample_index=3, extra_logs={"politeness": 0.5})
SHORT = replace(SHORT, extra_texts={"the judge": "polite \x1b[2J"})


@pytest.fixture
def folder(tmp_path) -> Path:
    """Writes a run of the steps 1 and 12, and an evaluation."""
    BYTES.save_pretrained(tmp_path / "model")
    config = {
        "actor": {"model_name_or_path": str(tmp_path / "model")},
        "data": {"disable_fast_tokenizer": False},
        "ckpt": {"output_dir": str(tmp_path / "out")},
    }
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(config))
    batch = Batch.of([LONG, SHORT])
    advantages = np.repeat(np.array([-1, 0.5], np.float32), batch.num_actions)
    trained = Trained(
        batch=replace(batch, advantages=advantages), schedule=[[[], [0]], [[1], []]], first_update=22
    )
    journal = Journal(tmp_path / "run" / "rollouts", decode=partial(decode, BYTES))
    journal.write(1, [SHORT])
    journal.write(12, [LONG, FAILED, SHORT], trained=trained)
    journal.write(12, [SHORT], name="eval")
    journal.close()
    return tmp_path / "run"


def output(capsys, *flags) -> str:
    rollouts_command([str(flag) for flag in flags])
    return capsys.readouterr().out


def test_relative_paths_of_a_run_are_found_from_every_folder(folder, tmp_path, monkeypatch):
    """They refer to the folder in which the run was started."""
    tree = yaml.safe_load((folder / "config.yaml").read_text()) | {"logger": {"run_dir": "run"}}
    tree |= {"actor": {"model_name_or_path": "model"}, "ckpt": {"output_dir": "out"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (row,) = read_rows(rollouts.find_steps(folder, "step")[12], [2])
    assert "".join(rollouts.token_texts(folder, row)) == " it is 4"
    assert RunRecord(folder).checkpoint_folder == tmp_path / "out" / "checkpoints"


def test_plain_text(folder, capsys):
    assert output(capsys, folder).splitlines() == [
        "",
        "step 12 · prompt 8 sample 0 · reward 0.25 · score 0.25 · advantage -1 · ok · length, cut off · "
        f"{LONG.num_actions} tokens · weights 5 · optimizer step 23 on rank 1",
        'label   ["four", "日本"]',
        "prompt  Question 8?",
        "answer   it is so and so and so",
        "",
        f"step 12 · prompt 9 sample 0 · reward_error · stop · {FAILED.num_actions} tokens · weights 5",
        "error   KeyError: [2J'x'",
        " in reward.py",
        'label   ["four", "日本"]',
        "prompt  Question 9?",
        "answer   so",
        "",
        "step 12 · prompt 7 sample 3 · reward 1 · score 1 · advantage +0.5 · ok · stop · "
        f"{SHORT.num_actions} tokens · weights 5 · optimizer step 24 on rank 0",
        "logs    politeness 0.5",
        'label   ["four", "日本"]',
        "prompt  Question 7?",
        "the judge polite [2J",
        "answer   it is 4",
        "",
        "3 of 3 samples; step 12 had 3",
    ]


@pytest.mark.parametrize(
    ("flags", "prompts"),
    [
        (["--step", 1], [7]),
        (["--prompt", 9], [9]),
        (["--failed"], [9]),
        (["--failed", "--prompt", 7], []),
        (["--sort", "reward"], [7, 8, 9]),
        (["--sort", "length"], [8, 7, 9]),
        (["--sort", "score", "--limit", 1], [7]),
        (["--name", "eval"], [7]),
    ],
)
def test_flags_select_the_shown_prompts(folder, capsys, flags, prompts):
    assert [int(i) for i in re.findall(r"· prompt (\d+)", output(capsys, folder, *flags))] == prompts


def test_versions_of_the_weights_and_epochs(folder, capsys):
    versions = runs([5, 5, *[6] * (SHORT.num_actions - 2)])
    batch = Batch.of([SHORT])
    journal = Journal(folder / "rollouts")
    journal.write(
        13,
        [replace(SHORT, weight_versions=versions, part=1)],
        trained=Trained(batch=batch, schedule=[[[0]], [[], [0]]], first_update=0),
    )
    journal.close()
    text = output(capsys, folder)
    assert f"weights 5 (2 tokens), 6 ({SHORT.num_actions - 2} tokens)" in text
    assert "prompt 7 sample 3 part 1" in text and "answer  (not decoded)" in text
    assert "optimizer step 1 on rank 0, optimizer step 2 on rank 1" in text


@pytest.mark.parametrize(
    ("flags", "place", "there"),
    [
        (["--step", "3"], "--step 3", "1, 12"),
        (["--prompt", "5"], "--prompt 5", "step 12 has 7, 8, 9"),
        (["--step", "1", "--prompt", "9"], "--prompt 9", "in 12"),
        (["--name", "filtered"], "--name filtered", "step, eval"),
    ],
)
def test_an_error_says_what_there_is(folder, capsys, flags, place, there):
    with pytest.raises(SystemExit) as stop:
        rollouts_command([str(folder), *flags])
    (refusal,) = printed(capsys.readouterr().err)
    assert (stop.value.code, refusal.code, refusal.place) == (2, "not-found", place)
    assert there in refusal.text


def test_a_folder_that_is_no_run(folder, capsys):
    with pytest.raises(SystemExit):
        rollouts_command([str(path := folder / "rollouts")])
    (refusal,) = printed(capsys.readouterr().err)
    assert (refusal.code, refusal.place) == ("not-found", str(path)) and "give the folder" in refusal.text


def test_an_output_folder_shows_its_run(folder, capsys):
    rollouts_command([str(folder)])
    shown = capsys.readouterr().out
    rollouts_command([str(folder.parent)])
    assert capsys.readouterr().out == shown


def on_a_terminal(monkeypatch):
    monkeypatch.setattr(terminal, "shows_colours", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")


def test_colours_on_a_terminal(folder, capsys, monkeypatch):
    plain = output(capsys, folder)
    assert "\x1b" not in plain
    on_a_terminal(monkeypatch)
    text = output(capsys, folder)
    lines = ANSI.sub("", text).splitlines()
    assert lines[0].startswith("advantage -1 ") and "below 0.5" in lines[0]
    assert lines[1:] == plain.splitlines()
    background = lambda shade: ";".join(str(int(shade[i : i + 2], 16)) for i in (1, 3, 5))
    long, short = re.findall(r"\x1b\[37;48;2;([\d;]+)m it is", text)
    assert long == background(BAD[-1]) and short == background(GOOD[1])


@pytest.mark.parametrize("break_it", ["remove", "change"])
def test_without_the_tokenizer_of_the_run(folder, capsys, monkeypatch, break_it):
    """The stored text is shown, and the reason."""
    on_a_terminal(monkeypatch)
    if break_it == "change":
        LLAMA.save_pretrained(folder.parent / "model")
    else:
        (folder / "config.yaml").unlink()
    rollouts_command([str(folder)])
    out, err = capsys.readouterr()
    assert "it is so and so and so" in out and "48;2;" not in out
    assert err.startswith("note: ")
    assert ("config.yaml" in err) == (break_it == "remove")
    assert ("decodes the answer differently" in err) == (break_it == "change")


def test_what_the_colours_say():
    """Strength shows the advantage, dim text the probability; tokens that the policy did not choose have no
    colour."""
    assert choose_style(2.0, -0.1, 2.0) == f"white on {GOOD[3]}"
    assert choose_style(0.001, -0.1, 2.0) == f"white on {GOOD[0]}"
    assert choose_style(-1.0, -0.7, 2.0) == f"white on {BAD[1]} dim"
    assert choose_style(0.0, -0.6, 2.0) == "" and choose_style(float("nan"), -0.7, 2.0) == "dim"
    row = {
        "token_ids": [1, 2, 3, 4, 5],
        "action_ranges": [{"start": 1, "end": 2}, {"start": 3, "end": 5}],
        "rollout_log_probs": [-0.1, -3.0, -0.1],
        "advantages": [1.0, 1.0, -1.0],
    }
    text = coloured(row, ["a", "b", "c", "d"], 1.0)
    best, worst = f"white on {GOOD[3]}", f"white on {BAD[3]}"
    styles = [(text.plain[span.start : span.end], span.style) for span in text.spans]
    assert styles == [("a", best), ("b", NOT_CHOSEN), ("c", f"{best} dim"), ("d", worst)]
    assert "advantage" not in legend(0.0).plain


def test_hostile_text_is_inert(capsys):
    console = Console(file=(stream := io.StringIO()), force_terminal=True, color_system="truecolor")
    row = {"token_ids": [1], "action_ranges": [{"start": 0, "end": 1}], "rollout_log_probs": [0.0]}
    console.print(coloured(row | {"advantages": None}, ["[bold]\x1b[2J\x9b\u202e"], 0.0))
    assert stream.getvalue() == "[bold][2J\n"


@settings(max_examples=100, deadline=None)
@given(text=st.text(), prompt=st.text())
@pytest.mark.parametrize("tokenizer", [BYTES, LLAMA], ids=["bytes", "llama"])
def test_the_text_of_each_token(tokenizer, text, prompt):
    """Together they are the text of all tokens, also where a character has several tokens."""
    token_ids, after = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in (text, prompt))
    texts = rollouts.decode_each(tokenizer, token_ids, after=after)
    assert len(texts) == len(token_ids)
    assert "".join(texts) == decode(tokenizer, token_ids, after=after)


def test_a_character_stands_at_its_last_token():
    token_ids = BYTES("a 日", add_special_tokens=False)["input_ids"]
    texts = rollouts.decode_each(BYTES, token_ids)
    assert texts[-3:] == ["", "", "日"] and texts[0] == "a"
