"""Every flag that users know, in every spelling, means today what it meant. The tables beside this file list
the flags of the commands: old name, new name, words, value, default. `flags_of_no_older_version.tsv` lists
the flags that only this version has.

Defaults that differ from the old ones on purpose: `ds.attn_implementation` (auto), `logger.wandb.project` and
`run_name` of dpo, kto and kd (the command's own name), `ckpt.path` (in the output folder),
`model.model_name_or_path` of kto (required), `host` of serve_rm (this machine only), `ds.param_dtype` of
serve_rm and lora_combiner (the model's own), `data.input_template` (None in every command: one text is one
prompt everywhere).
"""

import csv
import json
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_lines import refused
from refusals import printed

from openrlhf.config import commands
from openrlhf.config.fields import flag_values, list_flags
from openrlhf.config.parse import parse

# Only spellings are checked here, one flag at a time; contradictions between flags are not.
RULES: dict[str, Any] = {"problems": lambda config, explicit: [], "placed": lambda config, explicit: []}
COMMANDS = {command.name: replace(command, **RULES) for command in commands.COMMANDS}


def table(name: str) -> list[dict[str, Any]]:
    with open(Path(__file__).parent / f"flags_{name}.tsv", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def rows(name: str) -> list[dict[str, Any]]:
    """Reads the table of a command."""
    found = table(name)
    return [row | {key: tupled(json.loads(row[key])) for key in ("value", "default")} for row in found]


def tupled(value):
    return tuple(value) if isinstance(value, list) else value


def value_of(command, key, argv):
    return flag_values(parse(command, argv).config)[key]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_spelling_gives_the_same_value(name, capsys, tmp_path):
    for row in rows(name):
        check_spellings(COMMANDS[name], row, capsys, tmp_path)


def check_spellings(command, row, capsys, folder):
    """Checks every spelling of one flag; those of today give no hint, and an older one names both."""
    key, value, words = row["new"], row["value"], row["example"].split(" ")
    if isinstance(value, str):
        words = [row["example"]]

    def from_yaml(tree):
        (folder / "config.yaml").write_text(yaml.safe_dump(tree))
        return value_of(command, key, ["--config", str(folder / "config.yaml")])

    nested = value if not isinstance(value, tuple) else list(value)
    for name in reversed(key.split(".")):
        nested = {name: nested}
    plain = list(value) if isinstance(value, tuple) else value
    today = {
        "dotted": value_of(command, key, [f"--{key}", *words]),
        "dashes": value_of(command, key, [f"--{key.replace('_', '-')}", *words]),
        "equals": value_of(command, key, [f"--{key}={','.join(words)}"]),
        "flat YAML": from_yaml({key: plain}),
        "nested YAML": from_yaml(nested),
    }
    if value is True:
        today["bare"] = value_of(command, key, [f"--{key}"])
        section, _, name = key.rpartition(".")
        off = f"--{section}.no_{name}" if section else f"--no_{name}"
        assert value_of(command, key, [f"--{key}", off]) is False, key
    assert today == dict.fromkeys(today, value), key
    assert capsys.readouterr().err == "", key

    if row["old"] == "-":
        return
    spellings = [
        ("argv", lambda: value_of(command, key, [f"--{row['old']}", *words])),
        ("equals", lambda: value_of(command, key, [f"--{row['old']}={','.join(words)}"])),
        ("YAML", lambda: from_yaml({row["old"]: plain})),
    ]
    for name, read in spellings:
        assert read() == value, (key, name)
        err = capsys.readouterr().err
        assert row["old"] in err and f"--{key}" in err, (key, name)


@pytest.mark.parametrize("name", COMMANDS)
def test_default(name):
    values = flag_values(COMMANDS[name].config_type())
    for row in rows(name):
        default, expected = values[row["new"]], row["default"]
        if isinstance(expected, str) and expected.endswith("*"):
            assert fnmatch(default, expected), row
        else:
            assert default == expected, row


@pytest.mark.parametrize("name", COMMANDS)
def test_the_tables_hold_every_flag(name):
    ours = {row["flag"] for row in table("of_no_older_version") if name in row["commands"].split()}
    assert set(list_flags(COMMANDS[name].config_type)) == {row["new"] for row in rows(name)} | ours


IS_TYPE, IS_THRESHOLD = "algo.advantage.is_correction_type", "algo.advantage.is_correction_threshold"
OTHER_SPELLINGS = [
    ("ppo", "--bf16", {"ds.param_dtype": "bf16"}),
    ("ppo", "--data_type fp16", {"ds.param_dtype": "fp16"}),
    ("ppo", "--flash_attn", {"ds.attn_implementation": "flash_attention_2"}),
    ("ppo", "--use_icepop", {IS_TYPE: "icepop"}),
    ("ppo", "--vllm_is_correction_type mis", {IS_TYPE: "seq-mask-tis"}),
    ("ppo", "--vllm_is_truncated_threshold 2", {IS_THRESHOLD: (0, 2)}),
    ("ppo", "--vllm_is_truncated_threshold 0.5 5", {IS_THRESHOLD: (0.5, 5)}),
    (
        "ppo",
        "--prompt_max_len 1000 --generate_max_len 24",
        {"data.max_len": 1024, "rollout.max_new_tokens": 24},
    ),
    (
        "ppo",
        "--prompt_max_len 1000 --max_new_tokens 24",
        {"data.max_len": 1024, "rollout.max_new_tokens": 24},
    ),
    ("ppo", "--prompt_max_len 1000", {"data.max_len": 2024, "rollout.max_new_tokens": 1024}),
    ("ppo", "--generate_max_len 24", {"data.max_len": 2048, "rollout.max_new_tokens": 24}),
    (
        "ppo",
        "--max_len 99 --prompt_max_len 10 --generate_max_len 24",
        {"data.max_len": 99, "rollout.max_new_tokens": 24},
    ),
    ("ppo", "--actor.loss_agg_mode token-mean", {"actor.loss_aggregation": "token_mean"}),
    ("ppo", "--actor.loss_agg_mode seq-mean-token-mean", {"actor.loss_aggregation": "sample_mean"}),
    ("ppo", "--actor.loss_agg_mode prompt-mean-token-mean", {"actor.loss_aggregation": "prompt_mean"}),
    ("ppo", "--clip_eps_low 0.1 --clip_eps_high 0.3", {"actor.eps_clip_low_high": (0.1, 0.3)}),
    ("ppo", "--clip_eps_high 0.3", {"actor.eps_clip_low_high": (0.2, 0.3)}),
    ("ppo", "--reward_clip_range 10.0", {"reward.clip_range": (-10, 10)}),
    ("ppo", "--reward_clip_range -3 4", {"reward.clip_range": (-3, 4)}),
    ("ppo", "--critic_pretrain None", {"critic.model_name_or_path": None}),
    ("ppo", "--max_steps 3", {"train.max_turns": 3, "train.max_steps": None}),
    ("ppo", "--value_prefix_head head", {"ds.value_head_prefix": "head"}),
    ("ppo", "--head_prefix head", {"ds.value_head_prefix": "head"}),
    ("ppo", "--use_kl_estimator_k3", {"algo.kl.estimator": "k3"}),
    ("ppo", "--universal_ckpt", {"ds.use_universal_ckpt": True}),
    ("ppo", "--ref_reward_offload", {"ref.offload": True, "reward.offload": True}),
    ("ppo", "--ref_num_nodes 0 --critic_num_nodes 0", {"ref.num_nodes": 0, "critic.num_nodes": 0}),
    ("ppo", "--rollout_micro_batch_size 3", {"rollout.micro_batch_size": 3}),
    ("ppo", "--n_samples_per_prompts 3", {"rollout.n_samples_per_prompt": 3}),
    ("ppo", "--adam_betas 0.8 0.9", {"actor.adam.betas": (0.8, 0.9), "critic.adam.betas": (0.8, 0.9)}),
    ("ppo", "--local_rank=0", {"local_rank": 0}),
    ("ppo", "--local-rank 0", {"local_rank": 0}),
    ("ppo", "--torch_compile --perf --actor_init_on_gpu", {}),
    ("rm", "--loss sigmoid", {"model.loss_type": "sigmoid"}),
    ("rm", "--loss anything", {"model.loss_type": "logexp"}),
    ("rm", "--value_prefix_head head", {"ds.value_head_prefix": "head"}),
    ("rm", "--head_prefix head", {"ds.value_head_prefix": "head"}),
    ("prm", "--reward_tokens +,-", {"data.reward_tokens": ("+", "-")}),
    ("kto", "--learning_rate 5e-7", {"adam.lr": 5e-7}),
    ("batch_inference", "--flash_attn --bf16", {"ds.attn_implementation": "flash_attention_2"}),
    ("batch_inference", "--head_prefix head", {"ds.value_head_prefix": "head"}),
    ("chat", "--engine vllm", {"rollout.engine": "vllm"}),
    ("serve_rm", "--flash_attn --bf16", {"ds.attn_implementation": "flash_attention_2"}),
    ("serve_rm", "--head_prefix head", {"ds.value_head_prefix": "head"}),
    ("lora_combiner", "--bf16", {"ds.param_dtype": "bf16"}),
]


@pytest.mark.parametrize(
    ("name", "line", "expected"), OTHER_SPELLINGS, ids=[f"{name}:{line}" for name, line, _ in OTHER_SPELLINGS]
)
def test_older_and_informal_names(name, line, expected, capsys):
    config = parse(COMMANDS[name], line.split()).config
    values = flag_values(config)
    assert {key: values[key] for key in expected} == expected
    err = capsys.readouterr().err
    for word in line.split():
        if word.startswith("--") and "local" not in word:
            assert word in err, f"{word} gave no hint"


@pytest.mark.parametrize("name", ["sft", "rm", "prm", "dpo", "kto", "kd"])
@pytest.mark.parametrize(
    "line",
    [
        "--bf16 --flash_attn --data_type bf16 --train_split test --universal_ckpt --torch_compile --perf",
        "--zero_stage 3 --local_rank=1",
    ],
)
def test_older_names_for_all_supervised_commands(name, line, capsys):
    parse(COMMANDS[name], line.split())
    ignored = {"--train_split", "--torch_compile", "--perf"} & set(line.split())
    assert capsys.readouterr().err.count("note: ") == 1 + len(ignored)  # all renamed flags share one line


def test_removed_flags_say_what_to_do(capsys):
    (error,) = printed(refused(COMMANDS["kto"], ["--vanilla_loss"], capsys))
    assert (error.code, error.place) == ("unknown-flag", "--vanilla_loss") and "`openrlhf dpo`" in error.text
