"""Flags of batch_inference and chat: today's names, old ones, and refusals."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers as hf
from refusals import printed, refused

from openrlhf.config.commands import BATCH_INFERENCE, CHAT, SERVE_RM
from openrlhf.config.fields import flag_values, list_flags, with_values
from openrlhf.config.inference import AnswerConfig, BatchInferenceConfig, InferenceDataConfig
from openrlhf.config.parse import parse
from openrlhf.errors import ErrorCode
from openrlhf.models.configurations import check_room
from openrlhf.tools.serve.flags import chat_lengths, lengths, served_lengths

BATCH_DEFAULTS = {
    "task": None,
    "model.model_name_or_path": "",
    "data.dataset": "",
    "data.dataset_probs": None,
    "data.input_key": "input",
    "data.output_key": "output",
    "data.apply_chat_template": False,
    "data.input_template": None,
    "data.max_len": 2048,
    "data.max_samples": 100_000_000,
    "output_path": "",
    "data.prompt_max_len": 1024,
    "rollout.max_new_tokens": 1024,
    "rollout.greedy": False,
    "rollout.top_p": 1.0,
    "rollout.temperature": 1.0,
    "rollout.repetition_penalty": 1.0,
    "rollout.n_samples_per_prompt": 1,
    "post_processor": None,
    "reward.normalize_enable": False,
    "reward.template": "{input} <rm_score>: {reward} ",
    "csft.enable": False,
    "csft.prompt": "<rm_score>: 5.00",
    "iter": None,
    "rollout.batch_size": 2048,
    "vllm.tensor_parallel_size": None,
    "vllm.max_num_seqs": 256,
    "vllm.enable_prefix_caching": False,
    "ds.zero_stage": 0,
    "local_rank": -1,
    "train.micro_batch_size": 16,
    "train.seed": 1234,
    "train.full_determinism_enable": False,
    "ds.param_dtype": "bf16",
    "ds.attn_implementation": "auto",
    "data.disable_fast_tokenizer": False,
    "use_ms": False,
    "ds.value_head_prefix": "value_head",
}
CHAT_DEFAULTS = {
    "data.max_len": 4096,
    "rollout.greedy": False,
    "rollout.top_p": 0.9,
    "rollout.temperature": 0.2,
    "rollout.repetition_penalty": 1.2,
    "data.input_template": None,
    "data.apply_chat_template": False,
    "ta_prompt": None,
    "csft.enable": False,
    "csft.prompt": "<rm_score>: 5.00",
    "rollout.engine": "transformers",
}


@pytest.mark.parametrize(("command", "expected"), [(BATCH_INFERENCE, BATCH_DEFAULTS), (CHAT, CHAT_DEFAULTS)])
def test_defaults(command, expected):
    defaults = flag_values(command.config_type())
    assert {key: defaults[key] for key in expected} == expected


@pytest.fixture
def files(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("rows.jsonl").write_text('{"input": "Hi", "output": "Ho"}\n')
    Path("start.txt").write_text("Be kind.")
    return tmp_path


NAMES = (
    "--model.model_name_or_path",
    "./model",
    "--data.dataset",
    "./rows.jsonl",
    "--output_path",
    "out.jsonl",
)
GENERATE = (*NAMES, "--task", "generate")
RM = (*NAMES, "--task", "rm")


def config_of(*flags):
    return parse(BATCH_INFERENCE, flags).config


def chat_of(*flags):
    return parse(CHAT, ("--model.model_name_or_path", "./model", *flags)).config


OLD_VLLM = """--eval_task generate_vllm --pretrain ./model --dataset ./rows.jsonl --dataset_probs 1 --bf16
    --input_key question --apply_chat_template --max_samples 10 --output_path out.jsonl --prompt_max_len 7
    --max_new_tokens 8 --top_p 0.9 --temperature 0.8 --repetition_penalty 1.1 --best_of_n 3 --iter 2
    --rollout_batch_size 5 --tp_size 2 --max_num_seqs 9 --enable_prefix_caching --zero_stage 0 --seed 3
    --enable_csft --disable_fast_tokenizer --local_rank 0"""
TODAY_VLLM = {
    "task": "generate_vllm",
    "model.model_name_or_path": "./model",
    "data.dataset": "./rows.jsonl",
    "data.dataset_probs": "1",
    "ds.param_dtype": "bf16",
    "data.input_key": "question",
    "data.apply_chat_template": True,
    "data.max_samples": 10,
    "output_path": "out.jsonl",
    "data.prompt_max_len": 7,
    "rollout.max_new_tokens": 8,
    "rollout.top_p": 0.9,
    "rollout.temperature": 0.8,
    "rollout.repetition_penalty": 1.1,
    "rollout.n_samples_per_prompt": 3,
    "iter": 2,
    "rollout.batch_size": 5,
    "vllm.tensor_parallel_size": 2,
    "vllm.max_num_seqs": 9,
    "vllm.enable_prefix_caching": True,
    "train.seed": 3,
    "csft.enable": True,
    "data.disable_fast_tokenizer": True,
    "local_rank": 0,
}
OLD_RM = """--eval_task rm --pretrain ./model --dataset ./rows.jsonl --output_path out.jsonl --max_len 9
    --input_template Q:{} --output_key output --post_processor csft --normalize_reward
    --reward_template {input}{reward} --micro_batch_size 4 --full_determinism --flash_attn
    --value_head_prefix score"""
TODAY_RM = {
    "task": "rm",
    "data.max_len": 9,
    "data.input_template": "Q:{}",
    "post_processor": "csft",
    "reward.normalize_enable": True,
    "reward.template": "{input}{reward}",
    "train.micro_batch_size": 4,
    "train.full_determinism_enable": True,
    "ds.attn_implementation": "flash_attention_2",
    "ds.value_head_prefix": "score",
}
OLD_CHAT = """--pretrain ./model --max_len 99 --max_new_tokens 9 --greedy_sampling --repetition_penalty 1.3
    --input_template Q:{} --ta_prompt start.txt --enable_csft --csft_prompt <good> --param_dtype fp16"""
TODAY_CHAT = {
    "data.max_len": 99,
    "rollout.max_new_tokens": 9,
    "rollout.greedy": True,
    "rollout.repetition_penalty": 1.3,
    "data.input_template": "Q:{}",
    "ta_prompt": "start.txt",
    "csft.enable": True,
    "csft.prompt": "<good>",
    "ds.param_dtype": "fp16",
}


@pytest.mark.parametrize(
    ("command", "old", "today"),
    [
        (BATCH_INFERENCE, OLD_VLLM, TODAY_VLLM),
        (BATCH_INFERENCE, OLD_RM, TODAY_RM),
        (CHAT, OLD_CHAT, TODAY_CHAT),
    ],
)
def test_commands_of_older_versions_mean_what_they_meant(files, command, old, today, capsys):
    values = flag_values(parse(command, old.split()).config)
    assert {key: values[key] for key in today} == today
    same = ("output_path", "iter", "local_rank", "post_processor", "ta_prompt")
    renamed = [name for name in re.findall(r"--(\w+)", old) if name not in same]
    assert f"note: {len(renamed)} flags " in capsys.readouterr().err


@pytest.mark.parametrize("command", [BATCH_INFERENCE, CHAT])
def test_every_old_flag_leads_to_a_flag(command):
    fields = list_flags(command.config_type)
    assert all(key in fields for flag in command.old_flags.values() for key in flag.to)


def test_where_rows_go():
    config = BATCH_INFERENCE.config_type
    assert config(output_path="a.jsonl").raw_path == "a.jsonl"
    assert config(output_path="a.jsonl", post_processor="rs").raw_path == "a.jsonl.raw.jsonl"
    assert config(output_path="a.jsonl").meta_path == "a.jsonl.meta.json"


REFUSED = [
    ((*GENERATE, "--output_path", "model"), "not-writable", "--output_path model", ".jsonl"),
    ((*GENERATE, "--output_path", "out.txt"), "invalid-value", "--output_path out.txt", ".jsonl"),
    ((*GENERATE, "--output_path", "rows.jsonl"), "conflict", "--output_path rows.jsonl", ""),
    ((*GENERATE, "--post_processor", "rs"), "conflict", "--post_processor rs", "--task rm"),
    (
        (*GENERATE, "--rollout.greedy", "--rollout.n_samples_per_prompt", "2"),
        "conflict",
        "--rollout.n_samples_per_prompt 2",
        "rollout.greedy",
    ),
    ((*GENERATE, "--iter", "-1"), "invalid-value", "--iter -1", "0"),
    ((*GENERATE, "--data.input_template", "Q"), "invalid-value", "--data.input_template Q", "{}"),
    ((*GENERATE, "--use_ms"), "missing-package", "--use_ms", "modelscope"),
    (
        (*RM, "--post_processor", "csft", "--reward.template", "{input}"),
        "invalid-value",
        "--reward.template {input}",
        "{reward}",
    ),
    ((*RM, "--post_processor", "best"), "invalid-value", "--post_processor best", "rs, csft, iter_dpo"),
]


def refusals_of(read, flags, capsys):
    """Returns code and place of each problem of a command line that must be refused, and the stderr."""
    with pytest.raises(SystemExit) as stop:
        read(*flags)
    assert stop.value.code == 2
    told = capsys.readouterr().err
    return [(problem.code, problem.place) for problem in printed(told)], told


def test_required_flags(files, capsys):
    found, _ = refusals_of(config_of, (), capsys)
    required = ("--task", "--model.model_name_or_path", "--data.dataset", "--output_path")
    assert found == [("missing-flag", flag) for flag in required]


@pytest.mark.parametrize(("flags", "code", "place", "told"), REFUSED)
def test_wrong_flags_are_refused(files, flags, code, place, told, capsys):
    found, text = refusals_of(config_of, flags, capsys)
    assert found == [(code, place)] and told in text


@pytest.mark.parametrize("flag", ["--task generate_vllm", "--rollout.engine vllm"])
def test_vllm_under_a_launcher_is_refused(files, monkeypatch, capsys, flag):
    monkeypatch.setenv("WORLD_SIZE", "2")
    config_of(*GENERATE)
    config_of(*GENERATE, "--task", "generate_vllm", "--rollout.engine", "transformers")
    found, _ = refusals_of(config_of, (*GENERATE, *flag.split()), capsys)
    assert found == [("conflict", flag)]


VLLM = (*NAMES, "--task", "generate_vllm")
TRANSFORMERS = ("--rollout.engine", "transformers")


@pytest.mark.parametrize(
    ("read", "flags", "engine"),
    [
        (config_of, GENERATE, "transformers"),
        (config_of, (*GENERATE, "--rollout.engine", "vllm"), "vllm"),
        (config_of, VLLM, "vllm"),
        (config_of, (*VLLM, *TRANSFORMERS), "transformers"),
        (config_of, (*RM, "--rollout.engine", "vllm"), "transformers"),
        (chat_of, (), "transformers"),
        (chat_of, ("--engine", "vllm"), "vllm"),  # as older versions spell it
    ],
)
def test_the_engine(files, read, flags, engine):
    assert read(*flags).engine == engine


@pytest.mark.parametrize(
    ("read", "flags", "selects"),
    [
        (config_of, VLLM, "--task generate_vllm"),
        (config_of, (*GENERATE, "--rollout.engine", "vllm"), "--rollout.engine vllm"),
        (chat_of, ("--rollout.engine", "vllm"), "--rollout.engine vllm"),
    ],
)
def test_without_vllm(files, monkeypatch, capsys, read, flags, selects):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert read(*flags, *TRANSFORMERS).engine == "transformers"
    found, told = refusals_of(read, flags, capsys)
    assert found == [("missing-package", selects)]
    assert 'pip install "openrlhf[gpu]" ("openrlhf[cpu]" without a GPU)' in told
    assert "--rollout.engine transformers" in told


@pytest.mark.parametrize(("read", "flags"), [(config_of, VLLM), (chat_of, ())])
def test_an_engine_of_transformers_has_one_gpu(files, capsys, read, flags):
    found, _ = refusals_of(read, (*flags, *TRANSFORMERS, "--vllm.tensor_parallel_size", "2"), capsys)
    assert found == [("unsupported", "--vllm.tensor_parallel_size 2")]


UNREAD = [
    (config_of, (*GENERATE, "--reward.normalize_enable"), "--reward.normalize_enable"),
    (
        config_of,
        (*GENERATE, "--rollout.greedy", "--rollout.top_p", "0.5"),
        "--rollout.top_p 0.5",
    ),
    (
        config_of,
        (*GENERATE, "--rollout.batch_size", "4"),
        "--rollout.batch_size 4",
    ),
    (config_of, (*GENERATE, "--csft.prompt", "<good>"), "--csft.prompt <good>"),
    (
        config_of,
        (*RM, "--rollout.temperature", "0.5"),
        "--rollout.temperature 0.5",
    ),
    (config_of, (*RM, "--reward.template", "{input}"), "--reward.template {input}"),
    (chat_of, ("--rollout.greedy", "--rollout.temperature", "1"), "--rollout.temperature 1.0"),
    (config_of, (*GENERATE, "--vllm.max_num_seqs", "3"), "--vllm.max_num_seqs 3"),
    (config_of, (*GENERATE, "--ds.zero_stage", "3"), "--ds.zero_stage 3"),
    (config_of, (*GENERATE, "--zero_stage", "2"), "--ds.zero_stage 2"),
    (
        config_of,
        (*GENERATE, "--task", "generate_vllm", "--train.micro_batch_size", "3"),
        "--train.micro_batch_size 3",
    ),
]


@pytest.mark.parametrize(("read", "flags", "place"), UNREAD)
def test_a_flag_without_effect_is_remarked_on(files, read, flags, place, capsys):
    read(*flags)
    assert f"note: {place}: has no effect" in capsys.readouterr().err


CHAT_REFUSED = [
    (("--ta_prompt", "strat.txt"), "not-found", "--ta_prompt strat.txt", "start.txt"),
    (("--rollout.max_new_tokens", "4096"), "conflict", "--rollout.max_new_tokens 4096", "data.max_len 4096"),
    (("--rollout.engine", "sglang"), "invalid-value", "--rollout.engine sglang", "transformers, vllm"),
]


@pytest.mark.parametrize(("flags", "code", "place", "told"), CHAT_REFUSED)
def test_wrong_flags_of_chat_are_refused(files, flags, code, place, told, capsys):
    found, text = refusals_of(chat_of, flags, capsys)
    assert found == [(code, place)] and told in text


@pytest.mark.parametrize("command", [BATCH_INFERENCE, CHAT])
def test_help_shows_every_flag_once_with_its_meaning(command, capsys):
    with pytest.raises(SystemExit):
        parse(command, ["--help"])
    text = capsys.readouterr().out
    for key, field in list_flags(command.config_type).items():
        assert len(re.findall(rf"^  --{re.escape(key)}(?: |$)", text, re.MULTILINE)) == 1
        assert field.help
    assert text.index("\ncommand\n") < text.index("\nmodel:")


@pytest.mark.parametrize(
    ("lengths", "told"),
    [
        ((None, 32), "--data.prompt_max_len 1024 (default) + --rollout.max_new_tokens 32 = 1056"),
        ((481, 32), "--data.prompt_max_len 481 + --rollout.max_new_tokens 32 = 513"),
    ],
)
def test_lengths_that_nobody_set_are_told_as_defaults(lengths, told):
    prompt, new = lengths
    data = InferenceDataConfig() if prompt is None else InferenceDataConfig(prompt_max_len=prompt)
    config = BatchInferenceConfig(data=data, rollout=AnswerConfig(max_new_tokens=new))
    keys = ("data.prompt_max_len", "rollout.max_new_tokens")
    model = hf.Qwen3Config(max_position_embeddings=512)
    flag, _, value = told.partition(" ")
    with refused(ErrorCode.TOO_LONG, flag=flag, value=value) as refusal:
        check_room(model, config, *keys, path="m")
    assert "--data.prompt_max_len 480" in refusal.value.text
    check_room(model, with_values(config, {"data.prompt_max_len": 480}), *keys, path="m")


def resolved(folder: Path, settings: dict, line: str) -> dict:
    """The lengths that a command chooses for a model with this config.json."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    name, *flags = line.split()
    resolve, command, flag = {
        "chat": (chat_lengths, CHAT, "--model.model_name_or_path"),
        "serve_rm": (served_lengths, SERVE_RM, "--reward.model_name_or_path"),
        "batch_inference": (lengths, BATCH_INFERENCE, "--model.model_name_or_path"),
    }[name]
    (folder.parent / "rows.jsonl").write_text('{"input": "x"}\n')
    if name == "batch_inference":
        flags += [
            "--data.dataset",
            str(folder.parent / "rows.jsonl"),
            "--output_path",
            str(folder / "o.jsonl"),
        ]
    config = parse(command, [flag, str(folder), *flags], resolve=resolve).config
    keys = ("data.max_len", "data.prompt_max_len", "rollout.max_new_tokens")
    return {key: value for key, value in flag_values(config).items() if key in keys}


RM, SAMPLE = "batch_inference --task rm", "batch_inference --task generate"
PROMPT, ANSWER = "data.prompt_max_len", "rollout.max_new_tokens"


@pytest.mark.parametrize(
    ("line", "lengths"),
    [
        ("chat", {"data.max_len": 512}),
        ("chat --data.max_len 300", {"data.max_len": 300}),
        ("chat --data.max_len 600", {"data.max_len": 600}),  # refused later, and never changed
        ("serve_rm", {"data.max_len": 512}),
        (RM, {"data.max_len": 512}),
        (SAMPLE, {PROMPT: 256, ANSWER: 256}),
        (f"{SAMPLE} --{ANSWER} 32", {PROMPT: 480, ANSWER: 32}),
        (f"{SAMPLE} --{PROMPT} 100", {PROMPT: 100, ANSWER: 412}),
        (f"{SAMPLE} --{PROMPT} 512", {PROMPT: 512, ANSWER: 1024}),  # no room is left to choose from
    ],
)
def test_lengths_that_nobody_set_fit_the_model(tmp_path, line, lengths):
    settings = {"model_type": "qwen3", "max_position_embeddings": 512}
    found = resolved(tmp_path / "model", settings, line)
    assert {key: found[key] for key in lengths} == lengths


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        ({"model_type": "qwen3", "max_position_embeddings": 8192}, 4096),
        ({"model_type": "gemma3", "text_config": {"max_position_embeddings": 256}}, 256),
        ({"model_type": "gpt2", "n_positions": 128}, 128),
        (
            {
                "model_type": "llama",
                "max_position_embeddings": 512,
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            },
            2048,
        ),
        (
            {
                "model_type": "llama",
                "max_position_embeddings": 512,
                "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
            },
            1024,
        ),
    ],
)
def test_the_context_of_a_model_is_read_from_its_configuration(tmp_path, settings, length):
    assert resolved(tmp_path / "model", settings, "chat")["data.max_len"] == length


def test_lengths_are_chosen_before_anything_heavy_is_imported(tmp_path):
    tmp_path.joinpath("config.json").write_text('{"max_position_embeddings": 512}')
    code = """
import sys
from openrlhf.tools.serve.flags import chat_lengths
from openrlhf.config.commands import CHAT
from openrlhf.config.parse import parse
config = parse(CHAT, ["--model.model_name_or_path", sys.argv[1]], resolve=chat_lengths).config
print(config.data.max_len, sorted({"torch", "transformers", "vllm"} & set(sys.modules)))
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "512 []\n" and "auto-selected" in done.stderr
