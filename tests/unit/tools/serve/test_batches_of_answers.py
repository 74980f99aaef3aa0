"""`openrlhf batch_inference` in this process, with a tiny model; tests/e2e has ranks and vLLM."""

import json
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers as hf
from refusals import refused

from openrlhf.backends.distributed import leave_distributed
from openrlhf.config.checks import LAUNCHER
from openrlhf.config.commands import BATCH_INFERENCE
from openrlhf.config.parse import parse
from openrlhf.errors import ErrorCode
from openrlhf.tasks.tiny_model import tiny_chat_model
from openrlhf.tools.serve import batch_inference
from openrlhf.tools.serve.answering import Recorder
from openrlhf.tools.serve.flags import lengths

MODEL_FLAG = "--model.model_name_or_path"
TEMPLATE = "Q: {} A:"
TASK = ["--ds.param_dtype", "fp32", "--data.input_template", TEMPLATE]
GENERATE = [*TASK, "--task", "generate", "--rollout.greedy", "--rollout.max_new_tokens", "4"]
SCORE = [*TASK, "--task", "rm"]
ROWS = [{"input": "1 + 1", "output": "2"}, {"input": "Tom has 3", "output": "3 apples"}]


def test_a_score_that_is_not_finite_is_refused() -> None:
    """`best and worst` would take it for the best or the worst, as it comes first or last."""
    results, asked = mock.Mock(), mock.Mock(prompt_id=7)
    write = Recorder().begin(results, mock.Mock()).scores(0.0, 1.0)
    with refused(ErrorCode.NOT_FINITE, flag="--ds.param_dtype") as told:
        write([asked, asked], [1.0, float("nan")])
    assert "score of input 7 " in told.value.text and not results.append.called


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat_model(tmp_path_factory.mktemp("lm"), hidden_size=32, num_layers=1)


@pytest.fixture(scope="module")
def scorer(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with the mean 0.5 and the standard deviation 2."""
    folder = tmp_path_factory.mktemp("rm")
    tokenizer = hf.AutoTokenizer.from_pretrained(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = hf.AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    made.config.pad_token_id = tokenizer.pad_token_id
    made.config.mean, made.config.std = 0.5, 2.0
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def config_of(model: Path, *flags: str):
    files = [MODEL_FLAG, str(model), "--data.dataset", "rows.jsonl", "--output_path", "out.jsonl"]
    return parse(BATCH_INFERENCE, [*files, *flags], resolve=lengths).config


def infer(model: Path, *flags: str) -> list[dict]:
    config = config_of(model, *flags)
    with mock.patch.dict(os.environ):  # the process joins a group of one rank, which sets RANK
        try:
            batch_inference.run(config)
        finally:
            leave_distributed()
    return [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]


def test_greedy_answers_are_those_of_the_model(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = infer(model, *GENERATE)
    tokenizer = hf.AutoTokenizer.from_pretrained(model)
    plain = hf.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for number, row in enumerate(ROWS):
        ids = tokenizer(TEMPLATE.format(row["input"]), add_special_tokens=False)["input_ids"]
        start = len(ids)
        while len(ids) < start + 4 and (len(ids) == start or ids[-1] != tokenizer.eos_token_id):
            with torch.no_grad():
                ids.append(int(plain(torch.tensor([ids])).logits[0, -1].argmax()))
        is_ended = ids[-1] == tokenizer.eos_token_id
        assert found[number] == {
            "input": row["input"],
            "output": tokenizer.decode(ids[start : len(ids) - is_ended]),
            "finish_reason": "stop" if is_ended else "length",
            "prompt_id": number,
            "sample_index": 0,
        }
    *_, told = capsys.readouterr().out.splitlines()
    assert "2 rows; " in told and " tokens in " in told and told.endswith("; out.jsonl")


def test_a_run_goes_on_where_it_was_stopped(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = infer(model, *GENERATE)
    first, _ = Path("out.jsonl").read_text().splitlines(keepends=True)
    Path("out.jsonl").write_text(first)
    capsys.readouterr()
    assert infer(model, *GENERATE, "--train.micro_batch_size", "1") == whole
    assert "out.jsonl already has 1 of 2 rows" in capsys.readouterr().out
    assert infer(model, *GENERATE) == whole
    assert "tokens in" not in capsys.readouterr().out
    with refused(ErrorCode.OTHER_RUN, flag="--output_path", value=Path("out.jsonl")):
        infer(model, *GENERATE, "--rollout.max_new_tokens", "5")
    Path("rows.jsonl").write_text(json.dumps(ROWS[0] | {"input": "1 + 2"}) + "\n")
    with refused(ErrorCode.OTHER_RUN, flag="--output_path", value=Path("out.jsonl")):
        infer(model, *GENERATE)


@pytest.mark.parametrize("more", [[], ["--reward.normalize_enable"]])
def test_answers_are_scored(scorer: Path, more: list[str]) -> None:
    found = infer(scorer, *SCORE, *more)
    tokenizer = hf.AutoTokenizer.from_pretrained(scorer)
    plain = hf.AutoModelForSequenceClassification.from_pretrained(scorer, dtype=torch.float32)
    for number, row in enumerate(ROWS):
        text = TEMPLATE.format(row["input"]) + row["output"] + tokenizer.eos_token
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        score = plain(ids).logits.item()
        reward = (score - 0.5) / 2 if more else score
        keys = {"prompt_id": number, "sample_index": 0}
        assert found[number] == row | {"reward": pytest.approx(reward, abs=1e-5)} | keys


@pytest.mark.parametrize("reasons", [("length", "stop"), ("stop", "length")])
def test_truncated_answers_are_counted(scorer: Path, reasons: tuple, capsys: pytest.CaptureFixture) -> None:
    """SFT on them would learn to end where the limit was."""
    rows = [ROWS[0] | {"output": f"{i}", "finish_reason": reason} for i, reason in enumerate(reasons)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (best,) = infer(scorer, *SCORE, "--post_processor", "rs")
    assert best["finish_reason"] == reasons[int(best["output"])]
    kept = ", 1 of them truncated" if best["finish_reason"] == "length" else ""
    assert f"2 rows; 1 truncated; rs: 1 row{kept}; " in capsys.readouterr().out


def test_the_best_and_the_worst_answer_are_kept_beside_all(scorer: Path) -> None:
    Path("rows.jsonl").write_text(
        "".join(json.dumps({"input": "1 + 1", "output": text}) + "\n" for text in ("2", "3"))
    )
    (pair,) = infer(scorer, *SCORE, "--post_processor", "iter_dpo")
    raw = [json.loads(line) for line in Path("out.jsonl.raw.jsonl").read_text().splitlines()]
    worse, better = sorted(raw, key=lambda row: row["reward"])
    assert pair == {
        "prompt": "1 + 1",
        "chosen": better["output"],
        "chosen_reward": better["reward"],
        "rejected": worse["output"],
        "rejected_reward": worse["reward"],
    }


def test_columns_and_lengths_are_checked_before_anything_is_loaded(model: Path) -> None:
    batch_inference.check(config_of(model, *GENERATE))
    with refused(ErrorCode.MISSING_COLUMN, flag="--data.input_key", value="gone"):
        batch_inference.check(config_of(model, *GENERATE, "--data.input_key", "gone"))
    batch_inference.check(config_of(model, *GENERATE, "--data.output_key", "gone"))
    with refused(ErrorCode.MISSING_COLUMN, flag="--data.output_key", value="gone"):
        batch_inference.check(config_of(model, *SCORE, "--data.output_key", "gone"))
    with refused(ErrorCode.TOO_LONG, flag="--data.prompt_max_len"):
        batch_inference.check(config_of(model, *GENERATE, "--data.prompt_max_len", "100000"))


def test_vllm_is_asked_about_the_dtype_before_it_starts(tmp_path: Path) -> None:
    """vLLM refuses Gemma 2 in half precision."""
    folder = tmp_path / "gemma"
    hf.Gemma2Config(architectures=["Gemma2ForCausalLM"]).save_pretrained(folder)
    flags = ["--task", "generate_vllm", "--rollout.max_new_tokens", "4", "--data.prompt_max_len", "4"]
    batch_inference.check(config_of(folder, *flags))
    with refused(ErrorCode.UNSUPPORTED, flag=MODEL_FLAG, value=folder):
        batch_inference.check(config_of(folder, *flags, "--ds.param_dtype", "fp16"))
