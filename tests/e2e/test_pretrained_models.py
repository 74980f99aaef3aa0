"""Pretrained models of 135 and 268 million weights in place of tiny ones: vocabularies of 49,152 and 262,144
tokens, heads that are tied to the embedding, weights and activations of the sizes that training gives them,
and with Gemma sliding windows and a <bos>.

The models are those of `openrlhf fetch`, in the user's cache. OPENRLHF_TEST_MODELS names a folder that has
both, as `smollm2` and `gemma3-270m`, instead."""

import json
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import transformers as hf
from peft import PeftModel
from processes import run_ranks
from safetensors.torch import load_file

from openrlhf.backends.weight_sync.stored_weights import Limit
from openrlhf.config.commands import PPO
from openrlhf.config.parse import parse
from openrlhf.errors import ErrorCode, RunError, UsageError
from openrlhf.files import cache_folder
from openrlhf.loop.machines import resolve
from openrlhf.loop.rl_command import run
from openrlhf.observability.journal import read_journal
from openrlhf.observability.trackers.metrics_file import read_metrics
from openrlhf.tools.command_line.arguments import check_packages
from openrlhf.tools.fetch.fetch import fetch
from openrlhf.tools.fetch.flags import NEEDED
from openrlhf.tools.verify.subjects import truncate_model

pytestmark = [pytest.mark.slow, pytest.mark.processes]

CACHE = cache_folder() / "models"
"""In the user's cache, before the tests get one of their own."""
NAMES = ("smollm2", "gemma3-270m")
UNAVAILABLE = {ErrorCode.MISSING_PACKAGE, ErrorCode.NOT_FOUND, ErrorCode.NOT_WRITABLE}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
REWARD = Path(__file__).with_name("digits_reward.py")


@pytest.fixture(scope="module")
def pretrained() -> Callable[[str], Path]:
    """Returns a function that returns the folder of a model; it skips the test if the model is nowhere."""

    def find(name: str) -> Path:
        if folder := os.environ.get("OPENRLHF_TEST_MODELS"):
            return Path(folder, name)
        try:
            check_packages(NEEDED)
            return fetch(name, CACHE / name)
        except (RunError, UsageError) as error:
            if error.code not in UNAVAILABLE:
                raise
            pytest.skip(f"needs `openrlhf fetch {name}`, or a folder OPENRLHF_TEST_MODELS: {error}")

    return find


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes sums as questions with right answers, wrong ones and labels."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    made = []
    for i in range(3, 27):
        question, answer = f"What is {i} plus {i + 3}?", f"The sum of {i} and {i + 3} is"
        row = {"input": question, "output": f" {answer} {2 * i + 3}.", "label": str(2 * i + 3)}
        made.append(row | {"chosen": row["output"], "rejected": f" {answer} {i - 3}. I am not sure."})
    file.write_text("".join(json.dumps(row) + "\n" for row in made))
    return file


def openrlhf(command: str, log: Path) -> None:
    run_ranks(["openrlhf.cli.main", *shlex.split(command)], log=log, timeout=900)


def sft(model: Path, rows: Path, folder: Path, flags: str, *, steps: int = 2) -> dict[int, dict[str, float]]:
    """Trains on two rows a step and returns the metrics of each step."""
    openrlhf(
        f"sft --model.model_name_or_path {model} --data.dataset {rows} --data.output_key output "
        f"--data.max_samples {2 * steps} --data.max_len 64 --train.batch_size 2 --train.micro_batch_size 1 "
        "--train.max_epochs 1 --adam.lr 1e-4 --lr_scheduler constant --lr_warmup_ratio 0 --ds.zero_stage 0 "
        f"--ckpt.output_dir {folder / 'model'} --ckpt.path {folder / 'ckpt'} "
        f"--logger.run_dir {folder / 'run'} {flags}",
        folder / "log",
    )
    return read_metrics(folder / "run" / "metrics.jsonl")


def texts(model: Path, rows: Path, count: int = 3) -> list[list[int]]:
    """Returns the tokens of questions with answers, as the model's own tokenizer reads a text."""
    tokenizer = hf.AutoTokenizer.from_pretrained(model)
    read = [json.loads(line) for line in rows.read_text().splitlines()[:count]]
    return [tokenizer(row["input"] + row["output"])["input_ids"] for row in read]


def log_probs(model: hf.PreTrainedModel, texts: Sequence[list[int]]) -> torch.Tensor:
    """Returns transformers' log-probs of all tokens but the first of each text, one text after the other."""
    found = []
    with torch.no_grad():
        for token_ids in texts:
            ids = torch.tensor(token_ids)
            logits = model(ids[None]).logits[0, :-1].float()
            found.append(logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0])
    return torch.cat(found)


def load(folder: Path, dtype: str) -> hf.PreTrainedModel:
    return hf.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype])


def check_equal(found: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
    """The mean difference is at most what rounding explains, the limit of the check of weight syncs."""
    assert (found - expected).abs().mean() <= Limit(dtype=dtype, on_gpu=False).allowed(expected)


def check_different(found: torch.Tensor, base: torch.Tensor, dtype: str) -> None:
    """Training has changed the log-probs by more than twice the limit, so that the weights from before would
    not be taken for the new ones."""
    assert (found - base).abs().mean() > 2 * Limit(dtype=dtype, on_gpu=False).allowed(base)


DATA = {"smollm2": "--data.apply_chat_template", "gemma3-270m": ""}
"""Flags that suit the model; Gemma has no chat template."""


@pytest.mark.parametrize("name", NAMES)
def test_verify_sft(pretrained: Callable, rows: Path, tmp_path: Path, name: str) -> None:
    openrlhf(
        f"verify sft --model.model_name_or_path {pretrained(name)} --data.dataset {rows} "
        f"--data.output_key output --data.max_len 64 --train.batch_size 4 {DATA[name]} "
        "--rows 4 --tokens 48 --layers 2 --no_ranks "
        f"--out {tmp_path / 'report.json'}",
        tmp_path / "log",
    )
    check_report(tmp_path / "report.json")


@pytest.mark.usefixtures("cpu_engines")
@pytest.mark.parametrize("name", NAMES)
def test_verify_ppo(pretrained: Callable, rows: Path, tmp_path: Path, name: str) -> None:
    openrlhf(
        f"verify ppo --actor.model_name_or_path {pretrained(name)} --data.prompt_dataset {rows} "
        f"--reward.remote_url {REWARD} --data.max_len 64 --rollout.max_new_tokens 16 {DATA[name]} "
        "--rollout.batch_size 4 --rollout.n_samples_per_prompt 2 --train.batch_size 4 "
        "--actor.num_gpus_per_node 1 --train.colocate_all --algo.advantage.estimator group_norm "
        "--ds.param_dtype fp32 "
        f"--rows 4 --tokens 48 --layers 2 --no_ranks --out {tmp_path / 'report.json'}",
        tmp_path / "log",
    )
    check_report(tmp_path / "report.json")


def check_report(file: Path) -> None:
    findings = json.loads(file.read_text())["findings"]
    verdicts = {finding["check"]: finding["verdict"] for finding in findings}
    assert len(verdicts) >= 8 and set(verdicts.values()) == {"proved"}, verdicts


@pytest.mark.usefixtures("cpu_engines")
@pytest.mark.parametrize(("name", "dtype"), [("smollm2", "fp32"), ("gemma3-270m", "bf16")])
def test_others_load_an_export(pretrained, rows, tmp_path, run_worker, name, dtype):
    """transformers gives the exported model the trainer's last loss, and vLLM gives it transformers'
    log-probs."""
    base = pretrained(name)
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(rows.read_text().splitlines(keepends=True)[-3:]))
    metrics = sft(
        base,
        rows,
        tmp_path,
        f"--model.pretrain_mode_enable --ds.param_dtype {dtype} --eval.dataset {held_out}",
    )
    exported, tokenizer = tmp_path / "model", hf.AutoTokenizer.from_pretrained(tmp_path / "model")
    read = [json.loads(line)["input"] for line in held_out.read_text().splitlines()]
    asked = [tokenizer(text)["input_ids"] for text in read]
    assert asked == [hf.AutoTokenizer.from_pretrained(base)(text)["input_ids"] for text in read]
    expected = log_probs(load(exported, dtype), asked)
    allowed = Limit(dtype=dtype, on_gpu=False).allowed(expected)
    assert metrics[2]["eval/sft/loss"] == pytest.approx(-expected.mean().item(), abs=allowed)
    check_different(expected, log_probs(load(base, dtype), asked), dtype)
    found = run_worker("log_probs_of_vllm", 1, model=str(exported), dtype=str(DTYPES[dtype])[6:], texts=asked)
    check_equal(torch.tensor([p for text in found[0] for p in text]), expected, dtype)


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_is_merged(pretrained: Callable, rows: Path, tmp_path: Path, name: str) -> None:
    base = pretrained(name)
    sft(base, rows, tmp_path, "--ds.lora.rank 4 --ds.param_dtype fp32 --adam.lr 1e-2", steps=1)
    adapter, merged = tmp_path / "model", tmp_path / "merged"
    openrlhf(
        f"lora_combiner --model_path {base} --lora_path {adapter} --output_path {merged} "
        "--ds.param_dtype fp32",
        tmp_path / "merge.log",
    )
    asked = texts(base, rows)
    plain = load(base, "fp32")
    of_base = log_probs(plain, asked)
    of_adapter = log_probs(PeftModel.from_pretrained(plain, adapter), asked)
    check_different(of_adapter, of_base, "fp32")
    check_equal(log_probs(load(merged, "fp32"), asked), of_adapter, "fp32")
    config = hf.AutoConfig.from_pretrained(merged)
    assert config.tie_word_embeddings and "lm_head.weight" not in load_file(merged / "model.safetensors")


@pytest.mark.usefixtures("cpu_engines")
@pytest.mark.parametrize("task", ["generate", "generate_vllm"])
def test_greedy_answers(pretrained: Callable, rows: Path, tmp_path: Path, task: str) -> None:
    model = pretrained("smollm2")
    output = tmp_path / "answers.jsonl"
    openrlhf(
        f"batch_inference --task {task} --rollout.greedy --model.model_name_or_path {model} "
        f"--data.dataset {rows} --data.apply_chat_template --data.max_samples 6 --data.prompt_max_len 64 "
        f"--rollout.max_new_tokens 24 --ds.param_dtype fp32 --output_path {output}",
        tmp_path / "log",
    )
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(answers) == 6
    tokenizer, plain = hf.AutoTokenizer.from_pretrained(model), load(model, "fp32")
    for row in answers:
        messages = [{"role": "user", "content": row["input"]}]
        asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        written = plain.generate(**asked, max_new_tokens=24, do_sample=False)
        answer = written[0, asked["input_ids"].shape[1] :]
        assert row["output"] == tokenizer.decode(answer, skip_special_tokens=True)
    assert len({row["output"] for row in answers}) > 3


def test_a_reward_model_is_served(pretrained: Callable, rows: Path, tmp_path: Path) -> None:
    """The served scores are those that transformers' own classifier gives."""
    from test_serve_rm import running

    openrlhf(
        f"rm --model.model_name_or_path {pretrained('smollm2')} --data.dataset {rows} "
        "--data.prompt_key input --data.apply_chat_template --data.max_samples 6 --data.max_len 64 "
        "--train.batch_size 2 --train.micro_batch_size 1 --train.max_epochs 1 --adam.lr 1e-4 "
        "--ds.zero_stage 0 --ds.param_dtype fp32 "
        f"--ckpt.output_dir {tmp_path / 'model'} --logger.run_dir {tmp_path / 'run'}",
        tmp_path / "log",
    )
    scorer = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", dtype=torch.float32)
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "model")
    queries, expected = [], []
    for line in rows.read_text().splitlines()[:4]:
        row = json.loads(line)
        for answer in (row["chosen"], row["rejected"]):
            messages = [{"role": "user", "content": row["input"]}, {"role": "assistant", "content": answer}]
            queries.append(tokenizer.apply_chat_template(messages, tokenize=False).removesuffix("\n"))
            batch = tokenizer(queries[-1], add_special_tokens=False, return_tensors="pt")
            with torch.no_grad():
                expected.append(scorer(**batch).logits.item())
    with running(tmp_path / "model", tmp_path / "stderr") as server:
        status, answer, _ = server.ask(queries)
    assert status == 200
    assert max(expected) - min(expected) > 0.01
    assert answer["scores"] == pytest.approx(expected, abs=1e-4)


def test_a_resumed_run_has_the_same_bits(pretrained: Callable, rows: Path, tmp_path: Path) -> None:
    model = pretrained("smollm2")
    flags = "--data.apply_chat_template --ds.param_dtype fp32"
    whole = sft(model, rows, tmp_path, f"{flags} --ckpt.save_steps 2 --ckpt.max_num 2", steps=4)
    (tmp_path / "ckpt" / "latest").write_text("global_step2")
    again = tmp_path / "again"
    again.mkdir()
    resumed = sft(model, rows, again, f"{flags} --ckpt.path {tmp_path / 'ckpt'} --ckpt.load_enable", steps=4)
    assert list(whole) == [1, 2, 3, 4] and list(resumed) == [3, 4]
    for step in (3, 4):
        assert resumed[step]["sft/loss"] == whole[step]["sft/loss"]
        assert resumed[step]["grad_norm"] == whole[step]["grad_norm"]
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (again, tmp_path))
    assert ours.keys() == theirs.keys()
    assert [name for name, weight in ours.items() if not weight.equal(theirs[name])] == []


@pytest.mark.usefixtures("running_ray")
def test_an_engine_gets_every_weight(pretrained: Callable, rows: Path, tmp_path: Path) -> None:
    """A step of RL of Gemma's first six layers, five with a sliding window and one without, and its whole
    embedding: 0.8 GB of weights. The run checks its syncs, and what the engine samples with the weights after
    the step has the log-probs that transformers gives it with the exported ones."""
    whole = pretrained("gemma3-270m")
    base = Path(truncate_model(str(whole), 6, tmp_path / "six_layers", "--actor.model_name_or_path"))
    argv = shlex.split(
        f"--actor.model_name_or_path {base} --data.prompt_dataset {rows} --data.label_key label "
        f"--eval.dataset {rows} --eval.max_samples 2 --eval.steps 1 --eval.n_samples_per_prompt 1 "
        "--eval.temperature 1 --actor.entropy_coef 0.1 "  # changes weights where all rewards are equal
        f"--reward.remote_url {REWARD} --data.max_len 48 --rollout.max_new_tokens 12 "
        "--rollout.batch_size 2 --rollout.n_samples_per_prompt 2 --train.batch_size 4 --train.max_steps 1 "
        "--train.micro_batch_size 1 --algo.advantage.estimator group_norm --algo.kl.init_coef 0 "
        "--actor.num_gpus_per_node 1 --train.colocate_all --ds.zero_stage 2 --ds.param_dtype fp32 "
        "--actor.adam.lr 1e-4 --actor.lr_scheduler constant --actor.lr_warmup_ratio 0 "
        f"--ckpt.output_dir {tmp_path / 'policy'} --logger.run_dir {tmp_path / 'run'}"
    )
    run(parse(PPO, argv, resolve=resolve).config, argv)
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")[1]
    assert metrics["mismatch/abs_diff_max"] < 1e-3
    exported = load(tmp_path / "policy", "fp32")
    rollouts = tmp_path / "run" / "rollouts"
    sampled = [t for step in ("step", "eval") for t in read_journal(rollouts / f"{step}_000001.parquet")]
    assert {int(v) for t in sampled for v, _ in t.weight_versions} == {0, 1}
    assert all(t.token_ids[0] == exported.config.bos_token_id for t in sampled)
    plain = {0: load(base, "fp32"), 1: exported}
    for t in sampled:
        ((version, _),) = t.weight_versions
        expected = log_probs(plain[int(version)], [t.token_ids.tolist()])[t.prompt_length - 1 :]
        check_equal(torch.tensor(t.rollout_log_probs), expected, "fp32")
    asked = [t.token_ids.tolist() for t in sampled]
    check_different(log_probs(exported, asked), log_probs(plain[0], asked), "fp32")
