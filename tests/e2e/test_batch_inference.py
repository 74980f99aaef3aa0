"""Batch inference through its command: its results depend on neither batches, ranks nor interruptions."""

import json
import os
import shlex
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from processes import run_ranks
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from openrlhf.backends.distributed import leave_distributed
from openrlhf.config.commands import BATCH_INFERENCE
from openrlhf.config.parse import parse
from openrlhf.models.tokenizers import load_tokenizer
from openrlhf.tasks.prepare import TaskFiles
from openrlhf.tools.serve import batch_inference, interactive_chat

NUM_PROMPTS = 12
WITHOUT_VLLM = str(Path(__file__).parent / "workers" / "without_vllm.py")
EXAMPLES = Path(__file__).parents[2] / "examples" / "python"


def flags(task: TaskFiles, output: Path, more: str) -> list[str]:
    return shlex.split(
        f"--model.model_name_or_path {task.model} --data.dataset {task.prompts} --data.apply_chat_template "
        f"--data.max_samples {NUM_PROMPTS} --data.prompt_max_len 96 --rollout.max_new_tokens 10 "
        f"--ds.param_dtype fp32 --output_path {output} {more}"
    )


def infer(argv: list[str]) -> list[dict]:
    """Runs the command in this process and returns the rows of the output."""
    config = parse(BATCH_INFERENCE, argv).config
    # the process joins a group of one rank, which sets RANK and MASTER_PORT
    with mock.patch.dict(os.environ):
        batch_inference.run(config)
        leave_distributed()
    return read(config.output_path)


def read(path: str | Path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def keys(rows: list[dict]) -> list[tuple[int, int]]:
    return [(row["prompt_id"], row["sample_index"]) for row in rows]


ALL_KEYS = [(prompt, sample) for prompt in range(NUM_PROMPTS) for sample in range(2)]


@pytest.fixture(scope="module")
def one_engine(cpu_engines, task, tmp_path_factory) -> Iterator[None]:
    """Lets every run of generate_vllm in this file use the engine that the first one starts."""
    argv = flags(task, tmp_path_factory.mktemp("engine") / "x.jsonl", VLLM)
    config = parse(BATCH_INFERENCE, argv).config
    tokenizer = load_tokenizer(str(task.model), flag="")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in os.environ.items():
            patch.setenv(name, value)
        with batch_inference.LOADERS["vllm"](config, tokenizer) as work:
            patch.setitem(batch_inference.LOADERS, "vllm", lambda *_: nullcontext(work))
            yield


VLLM = "--task generate_vllm --rollout.n_samples_per_prompt 2 --vllm.max_num_seqs 7"


def test_a_run_that_was_killed_ends_as_one_that_was_not(task, tmp_path, one_engine, capsys):
    argv = flags(task, tmp_path / "whole.jsonl", VLLM)
    whole = infer(argv)
    assert keys(whole) == ALL_KEYS
    assert len({row["output"] for row in whole}) > NUM_PROMPTS  # samples of a prompt differ
    questions = [json.loads(line)["input"] for line in task.prompts.read_text().splitlines()]
    assert [row["input"] for row in whole] == [questions[row["prompt_id"]] for row in whole]
    said = capsys.readouterr().out.splitlines()[-1]
    assert "24 rows" in said and "tok/s" in said and str(tmp_path / "whole.jsonl") in said

    killed = tmp_path / "killed.jsonl"
    infer(flags(task, killed, VLLM))
    finished = killed.read_bytes()
    cut = finished[: finished.index(b"\n", 800) + 20]  # the last row is half written
    killed.write_bytes(cut)
    capsys.readouterr()
    assert infer(flags(task, killed, VLLM)) == whole
    assert f"{killed} already has {cut.count(10)} of 24" in capsys.readouterr().out

    before = killed.stat().st_mtime_ns
    assert infer(flags(task, killed, VLLM)) == whole  # nothing is left to do
    assert "tok/s" not in capsys.readouterr().out and killed.stat().st_mtime_ns >= before

    with pytest.raises(ValueError, match=r"seed was 1234, is 5"):
        infer(flags(task, killed, f"{VLLM} --train.seed 5"))
    with pytest.raises(ValueError, match="the dataset was"):
        infer(flags(task, killed, f"{VLLM} --data.dataset {task.eval}"))
    assert read(killed) == whole


def test_iterations_go_around_the_dataset(task: TaskFiles, tmp_path: Path, one_engine) -> None:
    rows = infer(flags(task, tmp_path / "0.jsonl", f"{VLLM} --iter 0 --rollout.batch_size 8"))
    more = infer(flags(task, tmp_path / "1.jsonl", f"{VLLM} --iter 1 --rollout.batch_size 8"))
    assert sorted({row["prompt_id"] for row in rows + more}) == list(range(16))
    assert [row["input"] for row in more[-8:]] == [row["input"] for row in rows[:8]]
    assert [row["output"] for row in more[-8:]] != [row["output"] for row in rows[:8]]


GENERATE = "--task generate --rollout.n_samples_per_prompt 2"


def test_ranks_and_batches_do_not_change_answers(task: TaskFiles, tmp_path: Path) -> None:
    alone = infer(flags(task, tmp_path / "alone.jsonl", f"{GENERATE} --train.micro_batch_size 24"))
    argv = flags(task, tmp_path / "both.jsonl", f"{GENERATE} --train.micro_batch_size 5")
    # another run, which was killed, left it
    (tmp_path / "both.jsonl.rank1.jsonl").write_text(json.dumps(alone[7]) + "\n")
    (tmp_path / "both.jsonl.meta.json").write_text((tmp_path / "alone.jsonl.meta.json").read_text())
    log = tmp_path / "log"
    run_ranks(["openrlhf.cli.batch_inference", *argv], 2, log=log)
    printed = log.read_text()
    assert read(tmp_path / "both.jsonl") == alone
    assert keys(alone) == ALL_KEYS
    assert "has 1 of 24 rows" in printed and "\x1b" not in printed
    assert sorted(p.name for p in tmp_path.glob("both*")) == ["both.jsonl", "both.jsonl.meta.json"]


def test_every_command_samples_without_vllm(task: TaskFiles, tmp_path: Path) -> None:
    """The rows of task generate_vllm by transformers are those of task generate; an agent plays an episode;
    a chat answers."""
    engine = "--rollout.engine transformers"
    output, log = tmp_path / "answers.jsonl", tmp_path / "log"
    agent = [
        "try",
        str(EXAMPLES / "agent_retry.py"),
        "--model",
        str(task.model),
        "--prompt",
        "Tom has 3 apples.",
    ]
    agent += f"--data.apply_chat_template --rollout.max_new_tokens 8 --data.max_len 500 {engine}".split()
    chat = f"--model.model_name_or_path {task.model} --data.max_len 128 --ds.param_dtype fp32 {engine}"
    commands = [
        ["openrlhf.cli.batch_inference", flags(task, output, f"--task generate_vllm {engine}")],
        ["openrlhf.cli.main", ["agent", *agent]],
        ["openrlhf.cli.interactive_chat", chat.split()],
    ]
    run_ranks([WITHOUT_VLLM, json.dumps(commands)], log=log)
    assert read(output) == infer(flags(task, tmp_path / "generate.jsonl", "--task generate"))
    printed = log.read_text()
    assert "episode 0: ok" in printed and interactive_chat.HELP in printed, printed


def test_greedy_answers_are_those_of_the_model(task: TaskFiles, tmp_path: Path) -> None:
    """Greedy answers of both engines equal those of a loop without cache or padding."""
    rows = infer(flags(task, tmp_path / "hf.jsonl", "--task generate --rollout.greedy"))
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    for row in rows[:4]:
        messages = [{"role": "user", "content": row["input"]}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        start = len(ids)
        while len(ids) < start + 10 and (len(ids) == start or ids[-1] != tokenizer.eos_token_id):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        is_ended = ids[-1] == tokenizer.eos_token_id
        assert row["output"] == tokenizer.decode(ids[start : len(ids) - is_ended])
        assert row["finish_reason"] == ("stop" if is_ended else "length")


@pytest.fixture(scope="module")
def reward_model(task: TaskFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward") / "model"
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(task.model, num_labels=1)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.config.mean, model.config.std = 0.5, 2.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def scoring(reward_model: Path, rows: Path, output: Path, more: str = "") -> list[str]:
    return shlex.split(
        f"--task rm --model.model_name_or_path {reward_model} --data.dataset {rows} --ds.param_dtype fp32 "
        f"--data.apply_chat_template --data.max_len 256 --output_path {output} {more}"
    )


def test_answers_are_scored_and_become_pairs(task: TaskFiles, tmp_path: Path, reward_model: Path) -> None:
    answers = infer(flags(task, tmp_path / "answers.jsonl", GENERATE))
    out = tmp_path / "pairs.jsonl"
    pairs = infer(scoring(reward_model, tmp_path / "answers.jsonl", out, "--post_processor iter_dpo"))
    raw = read(tmp_path / "pairs.jsonl.raw.jsonl")
    assert [(row["input"], row["output"]) for row in raw] == [(a["input"], a["output"]) for a in answers]
    assert keys(raw) == [(i, 0) for i in range(24)]

    model = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    for row in raw[:6]:
        messages = [
            {"role": "user", "content": row["input"]},
            {"role": "assistant", "content": row["output"]},
        ]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        if row["finish_reason"] == "length":  # scored without an end, as in RL
            text = text.removesuffix(tokenizer.eos_token)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        assert row["reward"] == pytest.approx(model(ids).logits.item(), abs=1e-5)

    assert [pair["prompt"] for pair in pairs] == [answers[2 * i]["input"] for i in range(NUM_PROMPTS)]
    for pair, one, other in zip(pairs, raw[::2], raw[1::2], strict=True):
        better, worse = (one, other) if one["reward"] > other["reward"] else (other, one)
        assert (pair["chosen"], pair["chosen_reward"]) == (better["output"], better["reward"])
        assert (pair["rejected"], pair["rejected_reward"]) == (worse["output"], worse["reward"])

    normal = infer(
        scoring(reward_model, tmp_path / "answers.jsonl", tmp_path / "n.jsonl", "--reward.normalize_enable")
    )
    assert [row["reward"] for row in normal] == pytest.approx(
        [(r["reward"] - 0.5) / 2 for r in raw], abs=1e-5
    )


def test_a_model_without_a_head_does_not_score(task: TaskFiles, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input": "Hi", "output": "Ho"}\n')
    with pytest.raises(ValueError, match="no scalar head") as refused:
        infer(scoring(task.model, rows, tmp_path / "out.jsonl"))
    leave_distributed()
    assert len(str(refused.value).splitlines()) <= 3


def test_what_the_model_cannot_read_is_refused_before_it_is_loaded(task: TaskFiles, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"1010 = 1106: .* 512"):
        infer(flags(task, tmp_path / "x.jsonl", "--task generate --rollout.max_new_tokens 1010"))
    with pytest.raises(ValueError, match=r"prompts.jsonl:1: .*--data.prompt_max_len"):
        infer(flags(task, tmp_path / "x.jsonl", "--task generate --data.prompt_max_len 5"))
