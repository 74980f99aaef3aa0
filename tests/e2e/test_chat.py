"""A chat with lines from a pipe, with both engines."""

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from openrlhf.backends.vllm.stream import VLLMStream
from openrlhf.completions import SamplingParams
from openrlhf.config.commands import CHAT
from openrlhf.config.parse import parse
from openrlhf.models.tokenizers import load_tokenizer
from openrlhf.tasks.prepare import TaskFiles
from openrlhf.tools.serve import interactive_chat
from openrlhf.tools.serve.flags import chat

LINES = "Tom has 3 figs.\nclear\nTom has 3 figs.\n\nAnd now?\nexit\nnever read\n"


def flags(task: TaskFiles, *more: str) -> list[str]:
    sampling = ["--rollout.max_new_tokens", "12", "--rollout.repetition_penalty", "3", "--rollout.greedy"]
    model = ["--model.model_name_or_path", str(task.model), "--ds.param_dtype", "fp32"]
    return [*model, *sampling, "--data.max_len", "128", "--data.apply_chat_template", *more]


@pytest.fixture(scope="module")
def engine(cpu_engines: None, task: TaskFiles) -> Iterator[VLLMStream]:
    config = parse(CHAT, flags(task, "--rollout.engine", "vllm")).config
    with closing(interactive_chat._load(config, load_tokenizer(str(task.model), flag=""))) as engine:
        assert isinstance(engine, VLLMStream)
        yield engine


class Shared:
    """Engine that several chats share; the end of one chat leaves it running."""

    def __init__(self, engine: VLLMStream) -> None:
        self.stream = engine.stream

    def close(self) -> None:
        pass


def test_both_engines_answer_the_same_and_clear_forgets(task: TaskFiles, engine, monkeypatch, capsys) -> None:
    """Greedy answers are the same: transformers runs in a process with a pipe, vLLM in this process."""
    command = [sys.executable, "-m", "openrlhf.cli.interactive_chat", *flags(task)]
    done = subprocess.run(
        command,
        input=LINES,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    monkeypatch.setattr(sys, "stdin", io.StringIO(LINES))
    monkeypatch.setattr(interactive_chat, "_load", lambda *_: Shared(engine))
    chat(flags(task, "--rollout.engine", "vllm"))
    answers = capsys.readouterr().out
    assert done.stdout == answers
    first, again, later = answers.removesuffix("\n").split("\n")
    assert first == again != later  # the third answer reads the second turn too


def test_an_answer_can_be_stopped(task: TaskFiles, engine) -> None:
    tokenizer = load_tokenizer(str(task.model), flag="")
    prompt = tokenizer("Tom has 3 figs.", add_special_tokens=False)["input_ids"]
    long = SamplingParams(max_tokens=100, temperature=0.0, detokenize=False)
    whole = list(engine.stream(prompt, 0, long))
    assert len(whole) == 100
    with closing(engine.stream(prompt, 0, long)) as tokens:
        assert [next(tokens) for _ in range(3)] == whole[:3]
    assert list(engine.stream(prompt, 0, long)) == whole


def test_the_input_may_end_without_exit(task: TaskFiles, engine, monkeypatch, capsys, tmp_path: Path) -> None:
    """The chat has a text before the conversation, no chat template, and grows too long."""
    (tmp_path / "start.txt").write_text("You count.\n")
    argv = [flag for flag in flags(task, "--rollout.engine", "vllm") if flag != "--data.apply_chat_template"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("How many?\n" + "many " * 200 + "\n"))
    monkeypatch.setattr(interactive_chat, "_load", lambda *_: Shared(engine))
    chat([*argv, "--ta_prompt", str(tmp_path / "start.txt")])
    out = capsys.readouterr().out.splitlines()
    assert "--data.max_len 128" in out[-1]
