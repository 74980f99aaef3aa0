"""Whole supervised runs in this process, of a tiny model and a few rows."""

import json
import math
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from judged_answers import PLACEHOLDER
from records import sequence
from refusals import refused
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.backends.distributed import leave_distributed
from openrlhf.cli import train_dpo, train_kd, train_kto, train_prm, train_rm, train_sft
from openrlhf.config.checks import LAUNCHER
from openrlhf.config.lora_combiner import LoraCombinerConfig
from openrlhf.config.parse import parse
from openrlhf.config.supervised_commands import SFT
from openrlhf.errors import ErrorCode
from openrlhf.loop.supervised import command
from openrlhf.models.saving import save_ends
from openrlhf.observability.trackers.metrics_file import read_metrics
from openrlhf.tasks.tiny_model import tiny_chat_model
from openrlhf.text import Calendar
from openrlhf.tools.reference.outputs import plain_log_probs
from openrlhf.tools.serve.lora_combiner import run as merge

TASKS = {
    "sft": (train_sft, "--data.output_key output"),
    "rm": (train_rm, "--data.prompt_key input"),
    "prm": (
        train_prm,
        f"--data.placeholder_token {PLACEHOLDER} --data.reward_tokens + - "
        "--data.input_key solution --data.label_key steps",
    ),
    "dpo": (train_dpo, "--data.prompt_key input"),
    "kto": (train_kto, "--data.output_key output --data.label_key good"),
    "kd": (train_kd, "--data.output_key output --teacher.model_name_or_path MODEL"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Returns a model. The process group of the runs and its variables end with the tests."""
    with mock.patch.dict(os.environ):
        for name in LAUNCHER:
            os.environ.pop(name, None)
        yield tiny_chat_model(tmp_path_factory.mktemp("run") / "model")
        leave_distributed()


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a file with six rows that every command can read."""
    rows = [
        {
            "input": f"{i} + 1 =",
            "output": f" {i + 1}",
            "chosen": f" {i + 1}",
            "rejected": f" {i}",
            "good": i % 2 == 0,
            "solution": f"{i} + 1{PLACEHOLDER}= {i}{PLACEHOLDER}",
            "steps": ["+", "-"],
        }
        for i in range(6)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(Calendar, "today", Calendar.today)
    return file


def run(name: str, model: Path, rows: Path, *more: str) -> dict[int, dict[str, float]]:
    """Runs a command; returns the metrics of its steps."""
    module, flags = TASKS[name]
    folder = rows.parent
    argv = [
        *("--model.model_name_or_path", str(model), "--data.dataset", str(rows), "--data.max_len", "64"),
        *("--eval.dataset", str(rows), "--eval.steps", "3", "--ds.param_dtype", "fp32"),
        *("--train.batch_size", "2", "--train.micro_batch_size", "2", "--train.max_epochs", "1"),
        *("--ckpt.output_dir", f"{folder}/out", "--ckpt.path", f"{folder}/ckpt", "--ckpt.save_steps", "2"),
        *("--logger.run_dir", f"{folder}/run", *flags.replace("MODEL", str(model)).split(), *more),
    ]
    kind = module.load_task()
    command.run(module.load_task, parse(kind.command, argv).config, argv)
    return read_metrics(folder / "run" / "metrics.jsonl")


def nll_of(model: Path, rows: Path) -> float:
    """Returns the loss of SFT on a whole file, as the mean over all answers' tokens."""
    tokenizer, found = AutoTokenizer.from_pretrained(model), []
    language_model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for row in map(json.loads, rows.read_text().splitlines()):
        prompt, text = row["input"], row["input"] + row["output"] + tokenizer.eos_token
        answer = sequence(tokenizer(text)["input_ids"], len(tokenizer(prompt)["input_ids"]))
        found.append(plain_log_probs(language_model, answer).detach())
    return -float(torch.cat(found).mean())


@pytest.mark.parametrize(("chat", "more"), [(False, ()), (True, ()), (True, ("--ds.lora.rank", "2"))])
def test_a_trained_model_lists_the_end_that_it_has_learned(chat, more, model, rows, capsys):
    """The model's generation config lists the pad token alone, and the tokenizer ends texts with another than
    the template. An adapter is merged."""
    folder = Path(shutil.copytree(model, rows.parent / "base"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end, tokenizer.eos_token = tokenizer.eos_token_id, "<think>"
    tokenizer.chat_template = tokenizer.chat_template.replace("eos_token", repr(tokenizer.decode([end])))
    tokenizer.save_pretrained(folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": tokenizer.pad_token_id}))
    run("sft", folder, rows, "--train.max_steps", "1", *["--data.apply_chat_template"] * chat, *more)
    made = rows.parent / "out"
    if more:
        names = {"model_path": str(folder), "lora_path": str(made), "output_path": f"{made}_merged"}
        merge(LoraCombinerConfig(**names))
        made = Path(names["output_path"])
    written = json.loads((made / "generation_config.json").read_text())
    ends = [tokenizer.pad_token_id, tokenizer.eos_token_id, *[end] * chat]
    assert written["eos_token_id"] == ends
    told = (
        "becomes an end token in the generation_config.json of the trained model" in capsys.readouterr().err
    )
    assert told == chat


@pytest.mark.parametrize("is_on_hub", [False, True])
def test_an_adapter_lists_ends_that_no_file_beside_its_base_lists(
    is_on_hub: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base on the hub is no folder; the one here has no generation config at all, but a config.json."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    if is_on_hub:
        base = tmp_path / "hub" / "models--owner--base" / "snapshots" / "1"
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        (tmp_path / "hub" / "models--owner--base" / "refs").mkdir(parents=True)
        (tmp_path / "hub" / "models--owner--base" / "refs" / "main").write_text("1")
    shutil.copytree(model, base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"eos_token_id": 7}))
    listed = {"eos_token_id": [8]}
    file = base / "generation_config.json"
    file.write_text(json.dumps(listed)) if is_on_hub else file.unlink()
    for task, expected in {"CAUSAL_LM": [8 if is_on_hub else 7, 9], "SEQ_CLS": None}.items():
        (adapter / task).mkdir(parents=True)
        (adapter / task / "adapter_config.json").write_text(json.dumps({"task_type": task}))
        save_ends(adapter / task, "owner/base" if is_on_hub else str(base), [9])
        made = adapter / task / "generation_config.json"
        assert (json.loads(made.read_text())["eos_token_id"] if made.exists() else None) == expected


@pytest.fixture
def with_new_token(model: Path, tmp_path: Path) -> Path:
    """Returns the model with a tokenizer that has one more token."""
    folder = Path(shutil.copytree(model, tmp_path / "with_new_token"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<new>"], special_tokens=True)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_a_token_without_an_embedding_is_refused_where_a_row_has_it(name, with_new_token, rows):
    run(name, with_new_token, rows, "--train.max_steps", "1")
    rows.write_text(rows.read_text().replace("3 + 1 =", "3 <new> 1 ="))
    shutil.rmtree(rows.parent / "out")
    with refused(ErrorCode.INVALID_ROW, flag="--data.dataset") as told:
        run(name, with_new_token, rows, "--train.max_steps", "1", "--ckpt.path", f"{rows.parent}/other")
    assert told.value.text.startswith(f"{2 if name == 'dpo' else 1} tokens have no embedding in")


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.few(4)
def test_a_command_trains_evaluates_and_saves(name, model, rows, capsys):
    """The first loss is that of a model that equals its reference, or its teacher."""
    metrics = run(name, model, rows)
    folder, first, last = rows.parent, metrics[1], metrics[3]
    assert list(metrics) == [1, 2, 3] and f"eval/{name}/loss" in last and f"eval/{name}/loss" not in first
    expected = {
        "dpo": {"dpo/loss": math.log(2), "dpo/chosen_reward": 0},
        "kto": {"kto/loss": 0.5, "kto/kl": 0},
        "kd": {"kd/kl": 0, "kd/loss": 0.6 * first.get("kd/nll", 0)},
    }.get(name, {})
    assert {key: first[key] for key in expected} == pytest.approx(expected, abs=1e-5)
    assert (folder / "ckpt" / "latest").read_text() == "global_step2"
    before, after = (load_file(place / "model.safetensors") for place in (model, folder / "out"))
    if name != "rm":
        assert before.keys() == after.keys()
        moved = max(float((after[key] - before[key]).abs().max()) for key in before)
        assert 0 < moved < 1e-3, "three steps of AdamW move each weight by three learning rates at most"
    told = capsys.readouterr().out
    assert "6 samples" in told and f"3 steps an epoch; run folder {folder / 'run'}" in told
    assert "estimated memory of a rank: " in told and "is trained on: no held-out scores" in told
    line = shlex.split((folder / "run" / "argv.txt").read_text().splitlines()[-1])
    assert line[-line[::-1].index("-m") - 1 :][:2] == ["-m", f"openrlhf.cli.train_{name}"]


def test_an_empty_evaluation_set_is_refused_under_its_flag(model, rows, tmp_path, monkeypatch):
    """The hub is chosen before."""
    (tmp_path / "none.jsonl").touch()
    monkeypatch.setattr(command, "choose_hub", lambda use_ms: chosen.append(use_ms))
    chosen: list[bool] = []
    with refused(ErrorCode.UNREADABLE, flag="--eval.dataset", value=tmp_path / "none.jsonl"):
        run("sft", model, rows, "--eval.dataset", str(tmp_path / "none.jsonl"))
    assert chosen == [False]


def test_the_loss_is_that_of_transformers(model: Path, rows: Path) -> None:
    metrics = run("sft", model, rows, "--adam.lr", "0", "--adam.weight_decay", "0")
    assert metrics[3]["eval/sft/loss"] == pytest.approx(nll_of(model, rows), abs=1e-5)


@pytest.mark.parametrize(
    ("backend", "stages"),
    [
        *(("torch", "22"), ("deepspeed", "22")),
        *(pytest.param("deepspeed", stages, marks=pytest.mark.processes) for stages in ("20", "02")),
    ],
)
def test_a_run_continues_from_its_checkpoint(backend, stages, model, rows, tmp_path, capsys):
    """Its losses are those of a run that never stopped, from the step after the checkpoint on. `stages`:
    ZeRO stages of both runs."""
    flags = ["--train.backend", backend, "--train.max_epochs", "2", "--ds.zero_stage"]
    whole = run("sft", model, rows, *flags, stages[0])
    for name in ("global_step4", "global_step6"):
        shutil.rmtree(tmp_path / "ckpt" / name)
    (tmp_path / "ckpt" / "latest").write_text("global_step2")
    leave_distributed()  # as the process of the first run would at its end
    capsys.readouterr()
    again = run("sft", model, rows, *flags, stages[1], "--ckpt.load_enable")
    said = capsys.readouterr()
    assert "global_step2" in said.out + said.err
    assert list(again) == list(whole) == [1, 2, 3, 4, 5, 6]
    for step in (3, 4, 5, 6):
        for key in ("sft/loss", "lr", "grad_norm"):
            assert again[step][key] == pytest.approx(whole[step][key], rel=1e-5)


@pytest.mark.parametrize(("flags", "column"), [([], None), (["--data.tools_key", "functions"], "functions")])
def test_the_column_of_tools_must_exist_if_a_flag_names_it(model: Path, flags: list, column: str) -> None:
    argv = f"--model.model_name_or_path {model} --data.dataset a/b --data.apply_chat_template".split()
    assert parse(SFT, [*argv, *flags]).config.columns["--data.tools_key"] == column
