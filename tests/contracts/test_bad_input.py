"""Mistakes of users, through the commands as they are run: every mistake ends at once with exit code 2 and
names the flag or file, the value and the remedy, before any model is loaded."""

import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import torch.distributed as dist
from refusals import printed
from transformers import CodeGenConfig, LlamaConfig

from openrlhf.cli import (
    batch_inference,
    interactive_chat,
    train_dpo,
    train_kd,
    train_kto,
    train_ppo_ray,
    train_prm,
    train_rm,
    train_sft,
)
from openrlhf.config.parse import parse
from openrlhf.device import DEVICE_TYPE
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.loop.supervised.datasets import check_lengths
from openrlhf.tasks.tiny_model import tiny_chat_model

WAITING = re.compile(r"\d\d:\d\d:\d\d ")
"""Beginning of a line that says, on a slow machine, what a command waits for."""
CPU = ("--ds.zero_stage", "0", "--ds.param_dtype", "fp32")
PAIRS = ("--data.prompt_key", "question", "--data.rejected_key", "wrong", "--data.chosen_key", "answer")
PPO = (
    *("--algo.advantage.estimator", "rloo", "--algo.kl.init_coef", "0", "--data.apply_chat_template"),
    *("--rollout.batch_size", "8", "--rollout.n_samples_per_prompt", "2", "--train.batch_size", "16"),
    *("--actor.num_gpus_per_node", "1", "--ds.param_dtype", "fp32", "--data.max_len", "512"),
)


MAINS = {
    "sft": train_sft.main,
    "rm": train_rm.main,
    "prm": train_prm.main,
    "dpo": train_dpo.main,
    "kto": train_kto.main,
    "kd": train_kd.main,
    "ppo": train_ppo_ray.main,
}


def good_flags(command: str, files: dict[str, str]) -> list[str]:
    if command == "ppo":
        names = ["--actor.model_name_or_path", files["model"], "--data.prompt_dataset", files["data"]]
        return [*names, "--data.input_key", "question", "--reward.remote_url", files["reward"], *PPO]
    flags = ["--model.model_name_or_path", files["model"], "--data.dataset", files["data"], *CPU]
    if command == "prm":
        steps = ("--data.input_key", "steps", "--data.label_key", "judged")
        return [*flags, *steps, "--data.placeholder_token", "#", "--data.reward_tokens", "+", "-"]
    flags.append("--data.apply_chat_template")
    if command in ("rm", "dpo"):
        return [*flags, *PAIRS]
    flags += ["--data.input_key", "question", "--data.output_key", "answer"]
    flags += ["--data.label_key", "good"] if command == "kto" else []
    return flags + (["--teacher.model_name_or_path", files["model"]] if command == "kd" else [])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("files")
    rows = [
        {"question": f"{i} + 1?", "answer": str(i + 1), "wrong": str(i + 2), "good": True} for i in range(40)
    ]
    for row in rows:
        row |= {"steps": f"{row['question']} {row['answer']}#", "judged": ["+"]}
    made = {
        "model": tiny_chat_model(folder / "model"),
        "finished": folder / "finished",
        "data": folder / "train.jsonl",
        "reward": folder / "reward.py",
        "no_reward": folder / "no_reward.py",
        "broken_reward": folder / "broken_reward.py",
        "empty": folder / "empty",
        "broken": folder / "broken.jsonl",
        "nothing": folder / "nothing.jsonl",
        "lonely_reward": folder / "lonely_reward.py",
        "misspelt": folder / "trian.jsonl",
        "rewards": folder / "rewards.py",
        "other": folder / "eval.jsonl",
    }
    made["data"].write_text("".join(json.dumps(row) + "\n" for row in rows))
    made["reward"].write_text("def reward_func(queries, prompts, labels): return [1.0]\n")
    made["no_reward"].write_text("def judge(queries, prompts, labels): return [1.0]\n")
    made["broken_reward"].write_text("x = 1\ndef reward_func(queries, prompts, labels) return [1.0]\n")
    made["broken"].write_text('{"question": "1 + 1?"}\n{"question": 1 +\n')
    made["lonely_reward"].write_text("import math\nimport no_such_package\n")
    made["nothing"].write_text("")
    made["other"].write_text('{"prompt": "1 + 1?"}\n')
    made["empty"].mkdir()
    shutil.copytree(made["model"], made["finished"])
    return {name: str(path) for name, path in made.items()}


@pytest.fixture
def refused(files, tmp_path, capsys, monkeypatch):
    """Returns a function that runs a command with good flags and some changes, and returns what it printed.
    It checks what holds for every refusal. Rows are read once the processes of a run have found each other,
    everything else before that."""

    def load_nothing(*args, **kwargs):
        pytest.fail("a model is loaded")

    monkeypatch.setattr("openrlhf.models.loading.load_causal_lm", load_nothing)
    monkeypatch.setattr("openrlhf.models.scorer.load_scorer", load_nothing)

    def run(command: str, *changes: str, problems: int = 1, before_processes: bool = True) -> str:
        output = ["--ckpt.output_dir", str(tmp_path / "out"), "--ckpt.path", str(tmp_path / "ckpt")]
        with pytest.raises(SystemExit) as stop:
            MAINS[command]([*good_flags(command, files), *output, *changes])
        if dist.is_initialized():
            assert not before_processes
            dist.destroy_process_group()
        printed = capsys.readouterr()
        assert stop.value.code == 2
        assert "Traceback" not in printed.err and printed.out == ""
        lines = [line for line in printed.err.strip().splitlines() if not WAITING.match(line)]
        lines = [line for line in lines if not line.startswith("note: ")]
        assert sum(line.startswith("error: ") for line in lines) == problems
        assert lines[0].startswith("error: ")
        closing = "`openrlhf explain " in lines[-1]
        assert len(lines) - closing <= 3 * problems, printed.err
        assert not ray.is_initialized()
        assert list(tmp_path.iterdir()) == []
        return "\n".join(lines)

    return run


def says(text, code, place, *words):
    """Returns whether an error among the lines has this code and place, and these words in its text."""
    return any(
        error[:2] == (code, place) and all(word in error.text for word in words) for error in printed(text)
    )


def places(text: str) -> list[tuple[ErrorCode, str]]:
    """Returns code and place of each problem that a command printed."""
    return [(refusal.code, refusal.place) for refusal in printed(text)]


COMMANDS = tuple(MAINS)
MODEL = dict.fromkeys(COMMANDS, "--model.model_name_or_path") | {"ppo": "--actor.model_name_or_path"}
DATASET = dict.fromkeys(COMMANDS, "--data.dataset") | {"ppo": "--data.prompt_dataset"}
FIRST_COLUMN = dict.fromkeys(COMMANDS, "--data.input_key") | {
    "rm": "--data.prompt_key",
    "dpo": "--data.prompt_key",
}
FUNCTION = "--reward.remote_url"


def mistakes():
    """Yields a command and a row of the table of mistakes, for each command of each row. A place that is not
    given is the flags; {MODEL} and the like are names of flags, {model} and the like those of files."""
    table = (Path(__file__).parent / "mistakes.tsv").read_text().splitlines()
    lines = [line for line in table if not line.startswith("#")]
    for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE, restval=""):
        for command in COMMANDS if row["commands"] == "all" else row["commands"].split():
            marks = [pytest.mark.processes] if row["mark"] else []
            yield pytest.param(command, row, id=f"{command} {row['flags']}", marks=marks)


@pytest.mark.parametrize(("command", "row"), mistakes())
def test_a_mistake_is_named_with_its_place_and_remedy(refused, files, command, row):
    names = {"MODEL": MODEL[command], "DATASET": DATASET[command], "COLUMN": FIRST_COLUMN[command]}
    names |= files | {"column": "steps" if command == "prm" else "question"}
    flags, place, words = (row[name].format(**names) for name in ("flags", "place", "words"))
    changes = shlex.split(flags)
    (error,) = printed(refused(command, *changes))
    assert (error.code, error.place) == (row["code"], place or " ".join(changes))
    assert [word for word in words.split(" | ") if word not in error.text] == []


def changed_model(files, folder, name: str, **values) -> str:
    model = shutil.copytree(files["model"], folder / "model")
    path = model / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))
    return str(model)


CRITIC = ("--algo.advantage.estimator", "gae", "--critic.num_gpus_per_node", "1")


@pytest.mark.parametrize(
    ("command", "flag", "more"),
    [
        *((command, MODEL[command], ()) for command in COMMANDS),
        ("kd", "--teacher.model_name_or_path", ()),
        ("dpo", "--ref.model_name_or_path", ()),
        ("ppo", "--critic.model_name_or_path", CRITIC),
        (
            "ppo",
            "--reward.model_name_or_path",
            ("--reward.num_gpus_per_node", "1", "--reward.remote_url", "None"),
        ),
        ("ppo", "--teacher.model_name_or_path", ("--teacher.num_gpus_per_node", "1")),
    ],
)
def test_a_quantized_model(refused, files, tmp_path_factory, command, flag, more):
    about = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    wrong = changed_model(files, tmp_path_factory.mktemp("q"), "config.json", quantization_config=about)
    text = refused(command, flag, wrong, *more)
    assert says(text, ErrorCode.UNSUPPORTED, f"{flag} {wrong}", "fp8", "dequantize", "--ds.load_in_4bit")


@pytest.mark.parametrize("command", ["sft", "ppo"])
def test_a_generation_config_that_no_export_could_have(refused, files, tmp_path_factory, command):
    wrong = changed_model(files, tmp_path_factory.mktemp("q"), "generation_config.json", max_new_tokens=0)
    text = refused(command, MODEL[command], wrong)
    assert says(text, ErrorCode.INVALID_MODEL, f"{MODEL[command]} {wrong}", "generation_config.json")


@pytest.mark.parametrize("command", COMMANDS)
def test_columns_are_looked_at_before_models(refused, files, command):
    both = 2 if command == "ppo" else 1  # RL lists the problems of all files at once
    flags = (FIRST_COLUMN[command], "questions", MODEL[command], files["empty"])
    text = refused(command, *flags, problems=both)
    assert says(text, ErrorCode.MISSING_COLUMN, f"{FIRST_COLUMN[command]} questions", files["data"])


@pytest.mark.processes
def test_columns_are_looked_at_without_transformers():
    """Columns are checked without importing transformers, whose import takes longer than all other checks
    together."""
    code = "import sys, openrlhf.data.sources; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_batch_that_does_not_divide_among_ranks(refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    text = refused("sft", "--train.batch_size", "16", "--train.micro_batch_size", "1")
    assert places(text) == [(ErrorCode.CONFLICT, "--train.batch_size 16")] and "15 or 18" in text


@pytest.mark.processes  # asks vLLM, whose import takes seconds
def test_a_model_that_vllm_does_not_have(refused, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "codegen"
    CodeGenConfig(architectures=["CodeGenForCausalLM"]).save_pretrained(folder)
    text = refused("ppo", "--actor.model_name_or_path", str(folder))
    assert says(text, ErrorCode.UNSUPPORTED, f"--actor.model_name_or_path {folder}", "CodeGenForCausalLM")


@pytest.mark.skipif(DEVICE_TYPE != "cpu", reason="a GPU's engine takes every head size")
@pytest.mark.parametrize(
    ("main", "flags"),
    [
        (batch_inference.main, ["--task", "generate_vllm", "--data.input_key", "question"]),
        (interactive_chat.main, ["--rollout.engine", "vllm", "--data.max_len", "128"]),
    ],
)
def test_a_head_size_that_vllm_has_no_kernel_for(files, tmp_path, capsys, main, flags):
    folder = tmp_path / "model"
    LlamaConfig(hidden_size=64, num_attention_heads=8, architectures=["LlamaForCausalLM"]).save_pretrained(
        folder
    )
    if main is batch_inference.main:
        flags = [*flags, "--data.dataset", files["data"], "--output_path", str(tmp_path / "out.jsonl")]
    with pytest.raises(SystemExit) as stop:
        main([*flags, "--model.model_name_or_path", str(folder)])
    (refusal,) = printed(capsys.readouterr().err)
    assert stop.value.code == 2
    assert (refusal.code, refusal.place) == (ErrorCode.UNSUPPORTED, f"--model.model_name_or_path {folder}")
    assert "size 8" in refusal.text and "32, 64, " in refusal.text


def test_all_flags_at_once(refused, files):
    """All problems of flags are listed at once, so that a user mends a command in one round instead of
    four."""
    text = refused(
        "ppo",
        *("--actor.model_name_or_path", "./no/such/model", "--data.prompt_dataset", "./no/such.jsonl"),
        *("--reward.remote_url", "./no_reward.py"),
        *("--actor.adam.lr", "fast"),
        problems=4,
    )
    assert places(text) == [
        (ErrorCode.INVALID_VALUE, "--actor.adam.lr fast"),
        (ErrorCode.NOT_FOUND, "--actor.model_name_or_path ./no/such/model"),
        (ErrorCode.NOT_FOUND, "--data.prompt_dataset ./no/such.jsonl"),
        (ErrorCode.NOT_FOUND, "--reward.remote_url ./no_reward.py"),
    ]


def test_everything_outside_of_flags_at_once(refused, files, monkeypatch):
    """Problems of the machine, models, functions and rows are listed at once."""
    monkeypatch.setattr("openrlhf.cluster.launch.available_nodes", lambda: [{"CPU": 2.0}])
    text = refused(
        "ppo",
        *("--actor.num_gpus_per_node", "4", "--actor.model_name_or_path", files["empty"]),
        *("--reward.remote_url", files["no_reward"], "--data.input_key", "questions"),
        *("--vllm.num_engines", "3"),
        problems=4,
    )
    assert places(text) == [
        (ErrorCode.RESOURCES, "--actor.num_nodes x --actor.num_gpus_per_node = 4"),
        (ErrorCode.MISSING_COLUMN, "--data.input_key questions"),
        (ErrorCode.INVALID_MODEL, f"--actor.model_name_or_path {files['empty']}"),
        (ErrorCode.USER_CODE, f"--reward.remote_url {files['no_reward']}"),
    ]
    assert "--vllm.num_engines x --vllm.tensor_parallel_size = 3: " in text


@pytest.mark.skipif(DEVICE_TYPE != "cpu", reason="a GPU's engine takes every head size")
def test_what_engines_refuse_is_said_with_the_rest(refused, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    small = {"hidden_size": 64, "num_attention_heads": 8, "architectures": ["LlamaForCausalLM"]}
    LlamaConfig(**small).save_pretrained(folder)
    flags = ("--actor.model_name_or_path", str(folder), "--data.input_key", "questions")
    text = refused("ppo", *flags, problems=2)
    assert places(text) == [
        (ErrorCode.MISSING_COLUMN, "--data.input_key questions"),
        (ErrorCode.UNSUPPORTED, f"--actor.model_name_or_path {folder}"),
    ]


def test_more_ranks_than_the_cluster_has():
    from openrlhf.cluster.layout import resource_problems
    from openrlhf.config.commands import PPO as COMMAND
    from openrlhf.config.parse import parse

    here = str(Path(__file__).parent)
    flags = ["--actor.model_name_or_path", here, "--data.prompt_dataset", here, FUNCTION, __file__]
    config = parse(COMMAND, [*flags, *PPO, "--actor.num_gpus_per_node", "8"]).config
    (problem,) = resource_problems(config, [{"CPU": 2.0}])
    assert (problem.code, problem.value) == (ErrorCode.RESOURCES, "= 8") and "at most 2" in problem.text
    (problem,) = resource_problems(config, [{"CPU": 64.0, "GPU": 4.0}])
    assert "needs 9 GPUs" in problem.text and "--train.colocate_all" in problem.text


# ---- models that do not fit together


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Writes a model whose tokenizer has one token more than the policy's."""
    from openrlhf.models.tokenizers import load_tokenizer

    folder = tiny_chat_model(tmp_path_factory.mktemp("stranger") / "model")
    tokenizer = load_tokenizer(str(folder), flag="--x")
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(folder)
    LlamaConfig.from_pretrained(folder, vocab_size=len(tokenizer)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("kd", "--teacher.model_name_or_path"),
        ("dpo", "--ref.model_name_or_path"),
        ("kto", "--ref.model_name_or_path"),
    ],
)
def test_another_model_that_does_not_fit(refused, files, stranger, command, flag):
    missing = files["model"] + "s"
    assert places(refused(command, flag, missing)) == [(ErrorCode.NOT_FOUND, f"{flag} {missing}")]
    text = refused(command, flag, files["empty"])
    assert places(text) == [(ErrorCode.INVALID_MODEL, f"{flag} {files['empty']}")]
    text = refused(command, flag, stranger)
    assert says(text, ErrorCode.INVALID_MODEL, f"{flag} {stranger}", "369 tokens")


# ---- rows of the wrong kind


@pytest.fixture
def with_rows(tmp_path_factory: pytest.TempPathFactory):
    """Returns with_rows(*changes): with_rows({"answer": None}, {}) writes a file of two good rows and removes
    the answer of the first."""
    good = {"answer": "2", "wrong": "3", "good": True, "steps": "2#", "judged": ["+"]}

    def write(*changes: dict) -> str:
        path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
        rows = [{"question": f"{i} + 1?"} | good | change for i, change in enumerate(changes)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


BAD_ROWS = [
    ("rm", {"answer": None}, ("'answer'", "null")),
    ("rm --model.margin_loss_enable", {"margin": "much"}, ("'margin'", "'much' (text)")),
    ("dpo", {"wrong": 3}, ("'wrong'", "a number")),
    ("dpo", {"wrong": [{"role": "user", "content": "2"}]}, ("assistant",)),
    ("kto", {"good": "yes"}, ("'good'", "'yes' (text)")),
    ("kto", {"good": 0.5}, ("'good'", "0.5 (a number)")),
    ("prm", {"steps": "2"}, ("1 labels", "0 placeholders", "'#'")),
    ("prm", {"judged": ["+", "-"]}, ("2 labels", "1 placeholders", "'#'")),
    ("prm", {"judged": ["?"]}, ("'?'", "--data.reward_tokens (+ -)")),
    ("prm", {"judged": [1.5]}, ("label 1", "1.5")),
    ("prm", {"judged": "+"}, ("'judged'", "text, not")),
    ("kd", {"answer": 2}, ("'answer'", "a number")),
]


@pytest.mark.parametrize(("command", "columns", "words"), BAD_ROWS)
def test_a_row_that_cannot_be_used(refused, with_rows, command, columns, words):
    path = with_rows(columns, columns)
    (error,) = printed(refused(*command.split(), "--data.dataset", path, before_processes=False))
    assert error.code is ErrorCode.INVALID_ROW and error.place.endswith(f"{path}:1")
    assert all(word in error.text for word in (*words, "--data.bad_rows skip"))


@pytest.mark.parametrize(
    ("command", "rows", "place", "words"),
    [
        ("kto", ({}, {"good": "yes"}), "--data.label_key good", ("{path}:1", "{path}:2")),
        ("prm", ({}, {"judged": [0.5]}), "--data.label_key judged", ("{path}:1", "{path}:2")),
        ("kto", ({"question": "2 + 2?"}, {"question": "2 + 2?"}), "--data.input_key question", ("2 rows",)),
    ],
    ids=["a column of two types", "labels of two kinds", "one prompt for all answers"],
)
def test_rows_that_do_not_go_together(refused, with_rows, command, rows, place, words):
    path = with_rows(*rows)
    text = refused(command, "--data.dataset", path, before_processes=False)
    assert says(text, ErrorCode.INVALID_ROW, place, *(word.format(path=path) for word in words))


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "ppo"])
def test_a_row_that_is_longer_than_the_model_reads(refused, with_rows, files, command):
    long = {"question": "1+" * 300 + "1?", "steps": "1+" * 300 + "1#"}
    changes = ("--data.dataset", with_rows({}, long), "--data.max_len", "1024", "--data.no_cache_enable")
    (error,) = printed(refused(command, *changes, before_processes=False))
    longer = {"rm": "2 of 4", "dpo": "2 of 4", "kto": "2 of 4"}.get(command, "1 of 2")
    assert (error.code, error.place) == (ErrorCode.TOO_LONG, "--data.max_len 1024")
    for named in (longer, f"{files['model']} (--model.model_name_or_path)", "--data.max_len 512"):
        assert named in error.text


@pytest.mark.parametrize(
    ("module", "flag"),
    [
        (train_kd, "--teacher.model_name_or_path"),
        (train_dpo, "--ref.model_name_or_path"),
        (train_kto, "--ref.model_name_or_path"),
    ],
)
def test_a_row_that_is_longer_than_another_model_reads(files, tmp_path, module, flag):
    short = str(tiny_chat_model(tmp_path / "short", max_len=64))
    task = module.load_task()
    command = task.command.name
    built = task(parse(task.command, [*good_flags(command, files), flag, short]).config)
    check_lengths(built, [64, 64], "--data.dataset")  # 64 is what the model reads; data.max_len is larger
    with pytest.raises(UsageError, match=rf"1 of 2 .* {short} \({flag}\)") as error:
        check_lengths(built, [65, 64], "--data.dataset")
    assert error.value.code is ErrorCode.TOO_LONG
