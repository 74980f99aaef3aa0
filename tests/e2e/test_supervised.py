"""Every supervised command as users run it, on word problems: each teaches something that can be measured."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from judged_answers import PLACEHOLDER
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from openrlhf.models.scorer import load_scorer
from openrlhf.observability.trackers.metrics_file import read_metrics
from openrlhf.rows import PackedRow, Sample
from openrlhf.tasks.tiny_model import tiny_chat_model

COMMON = (
    "--data.max_len 256 --train.batch_size 16 --train.micro_batch_size 16 --train.max_epochs 1 "
    "--ds.zero_stage 0 --ds.param_dtype fp32"
)
PAIRS = "--data.prompt_key prompt --data.apply_chat_template"
ANSWERS = "--data.output_key output --data.apply_chat_template"

Metrics = dict[str, float]


def last_metrics(folder: Path) -> Metrics:
    """Returns the last value of every metric."""
    metrics: Metrics = {}
    for row in read_metrics(folder / "run" / "metrics.jsonl").values():
        metrics |= row
    return metrics


@pytest.fixture(scope="module")
def dpo_model(openrlhf, knowing, build_once) -> Path:
    files = knowing.files
    return build_once(
        "dpo_model",
        lambda folder: openrlhf(
            f"dpo --model.model_name_or_path {knowing.chat} --data.dataset {files.pairs} "
            f"--eval.dataset {files.pairs_eval} --eval.split train {PAIRS} {COMMON} "
            "--adam.lr 3e-4 --model.nll_loss_coef 0.5 "
            f"--ref.precompute_enable --ckpt.output_dir {folder} --logger.run_dir {folder}/run"
        ),
    )


@pytest.fixture
def train(openrlhf, tmp_path) -> Callable[[str, str], tuple[Path, Metrics]]:
    """Returns a function that runs a command with these flags and returns the model's folder and the last
    value of every metric."""

    def run(command: str, flags: str) -> tuple[Path, Metrics]:
        folder = tmp_path / command
        openrlhf(f"{command} --ckpt.output_dir {folder} --logger.run_dir {folder}/run {COMMON} {flags}")
        return folder, last_metrics(folder)

    return run


def test_a_reward_model_prefers_right_answers(train, knowing) -> None:
    """transformers alone loads the reward model and gives the same scores."""
    files = knowing.files
    folder, metrics = train(
        "rm",
        f"--model.model_name_or_path {knowing.chat} --data.dataset {files.pairs} "
        f"--eval.dataset {files.pairs_eval} --adam.lr 1e-3 {PAIRS}",
    )
    assert metrics["eval/rm/accuracy"] > 0.85
    tokenizer = AutoTokenizer.from_pretrained(folder)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    ours = load_scorer(str(folder), flag="", dtype="fp32", attention="auto")
    texts = [json.loads(line)["chosen"] for line in files.pairs_eval.read_text().splitlines()[:8]]
    batch = tokenizer([text + tokenizer.eos_token for text in texts], return_tensors="pt", padding=True)
    samples = []
    for text in texts:
        ids = tokenizer(text + tokenizer.eos_token, return_tensors="pt")["input_ids"][0]
        samples.append(Sample(token_ids=ids, action_mask=torch.arange(len(ids)) == len(ids) - 1))
    with torch.no_grad():
        expected = theirs(**{k: batch[k] for k in ("input_ids", "attention_mask")}).logits[:, 0]
        torch.testing.assert_close(ours(PackedRow.of(samples)), expected, atol=1e-5, rtol=0)
    assert theirs.config.std > 0 and abs(theirs.config.mean) < 10


def test_a_process_reward_model_finds_wrong_steps(train, knowing) -> None:
    files = knowing.files
    _, metrics = train(
        "prm",
        f"--model.model_name_or_path {knowing.base} --data.dataset {files.steps} "
        f"--eval.dataset {files.steps_eval} --eval.split train --data.placeholder_token {PLACEHOLDER} "
        "--data.reward_tokens + - --adam.lr 1e-3",
    )
    assert metrics["eval/prm/accuracy"] > 0.85


def test_dpo_raises_accuracy(knowing, accuracy, dpo_model) -> None:
    metrics = last_metrics(dpo_model)
    assert metrics["eval/dpo/accuracy"] > 0.85
    assert accuracy(dpo_model) > accuracy(knowing.chat) + 0.3


@pytest.mark.slow
def test_kto_raises_accuracy(train, knowing, accuracy) -> None:
    files = knowing.files
    folder, metrics = train(
        "kto",
        f"--model.model_name_or_path {knowing.chat} --data.dataset {files.unpaired} "
        f"--eval.dataset {files.unpaired_eval} --eval.split train --model.beta 0.1 --adam.lr 3e-4 {ANSWERS}",
    )
    assert metrics["eval/kto/accuracy"] > 0.85
    assert accuracy(folder) > accuracy(knowing.chat) + 0.3


@pytest.mark.slow
def test_a_smaller_student_learns_what_its_teacher_knows(train, knowing, accuracy, tmp_path) -> None:
    student = tiny_chat_model(tmp_path / "student", hidden_size=64)
    folder, metrics = train(
        "kd",
        f"--model.model_name_or_path {student} --teacher.model_name_or_path {knowing.base} "
        f"--data.dataset {knowing.files.pretrain} --model.pretrain_mode_enable --data.output_key None "
        "--model.kd_coef 1.0 --adam.lr 5e-3 --train.batch_size 8 --train.micro_batch_size 8",
    )
    assert metrics["kd/kl"] < 0.1
    # If one greedy token in a hundred differs, then so do 1 - 0.99^20 = 0.18 of answers of 20 tokens.
    assert accuracy(folder, chat=False) > accuracy(knowing.base, chat=False) - 0.2


@pytest.mark.slow
@pytest.mark.usefixtures("running_ray")
def test_on_policy_distillation_needs_no_reward(openrlhf, knowing, accuracy, dpo_model, tmp_path) -> None:
    """The teacher thinks; the student, which mostly guesses, is corrected on its own answers."""
    openrlhf(
        f"ppo --actor.model_name_or_path {knowing.chat} --teacher.model_name_or_path {dpo_model} "
        f"--data.prompt_dataset {knowing.files.prompts} --data.apply_chat_template --data.max_len 128 "
        "--algo.advantage.estimator reinforce --algo.advantage.gamma 0 --algo.kl.init_coef 0 "
        "--rollout.batch_size 64 --rollout.max_new_tokens 48 --train.batch_size 64 --train.max_steps 12 "
        "--train.dynamic_batch_enable --train.max_tokens_per_gpu 8192 --train.colocate_all "
        "--actor.adam.lr 5e-4 --actor.lr_scheduler constant --actor.num_gpus_per_node 1 "
        f"--ds.param_dtype fp32 --ckpt.output_dir {tmp_path / 'model'} --logger.run_dir {tmp_path / 'run'}"
    )
    distance = [m["teacher/kl_mean"] for m in read_metrics(tmp_path / "run" / "metrics.jsonl").values()]
    assert sum(distance[-3:]) < 0.2 * sum(distance[:3])
    assert accuracy(tmp_path / "model") > accuracy(knowing.chat) + 0.3
