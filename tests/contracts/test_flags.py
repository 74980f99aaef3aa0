"""Every flag that users know, in every spelling, means today what it meant. The tables beside this file are
the flags of `train_sft` and `train_ppo_ray`: old name, new name, words, value, default."""

import csv
import json
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from openrlhf.config.commands import PPO, SFT
from openrlhf.config.fields import fields_of, values_of
from openrlhf.config.parse import parse

# Only spellings are looked at here, one flag at a time: what is wrong between flags is not.
COMMANDS = {command.name: replace(command, problems=lambda config, explicit: []) for command in (SFT, PPO)}


def rows():
    for command in COMMANDS.values():
        with open(Path(__file__).parent / f"flags_{command.name}.tsv", newline="") as file:
            for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
                row["value"], row["default"] = (
                    tupled(json.loads(row["value"])),
                    tupled(json.loads(row["default"])),
                )
                yield pytest.param(command, row, id=f"{command.name}:{row['old']}:{row['new']}")


def tupled(value):
    return tuple(value) if isinstance(value, list) else value


def value_of(command, key, argv):
    return values_of(parse(command, argv).config)[key]


@pytest.mark.parametrize(("command", "row"), rows())
def test_every_spelling_gives_the_same_value(command, row, capsys, tmp_path):
    key, value, words = row["new"], row["value"], row["example"].split(" ")
    if isinstance(value, str):
        words = [row["example"]]

    def from_yaml(tree):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
        return value_of(command, key, ["--config", str(tmp_path / "config.yaml")])

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
        assert value_of(command, key, [f"--{key}", off]) is False
    assert today == dict.fromkeys(today, value)
    assert capsys.readouterr().err == "", "the names of today give no hint"

    if row["old"] == "-":
        return
    spellings = [
        ("argv", lambda: value_of(command, key, [f"--{row['old']}", *words])),
        ("equals", lambda: value_of(command, key, [f"--{row['old']}={','.join(words)}"])),
        ("YAML", lambda: from_yaml({row["old"]: plain})),
    ]
    for name, read in spellings:
        assert read() == value, name
        err = capsys.readouterr().err
        assert row["old"] in err and f"--{key}" in err, f"{name} gave no hint"


@pytest.mark.parametrize(("command", "row"), rows())
def test_default(command, row):
    default = values_of(command.config_type())[row["new"]]
    if isinstance(row["default"], str) and row["default"].endswith("*"):
        assert fnmatch(default, row["default"])
    else:
        assert default == row["default"]


OURS = {
    "sft": {
        "data.bad_rows",
        "ds.enable_sleep",
        "eval.max_samples",
        "logger.run_dir",
        "train.dynamic_batch_enable",
        "train.max_tokens_per_gpu",
    },
    "ppo": {
        "data.bad_rows",
        "data.tokenizer_chat_template",
        "eval.max_samples",
        "logger.run_dir",
        "reward.max_failed_ratio",
        "reward.num_workers",
        "reward.timeout",
        "rollout.top_k",
        "train.max_steps",
        "train.max_turns",
        "vllm.kv_cache_gb",
    },
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_tables_hold_every_flag(name):
    known = {row.values[1]["new"] for row in rows() if row.values[0].name == name}
    assert set(fields_of(COMMANDS[name].config_type)) == known | OURS[name]


IS_TYPE, IS_THRESHOLD = "algo.advantage.is_correction_type", "algo.advantage.is_correction_threshold"
OTHER_SPELLINGS = [
    ("--bf16", {"ds.param_dtype": "bf16"}),
    ("--data_type fp16", {"ds.param_dtype": "fp16"}),
    ("--flash_attn", {"ds.attn_implementation": "flash_attention_2"}),
    ("--use_icepop", {IS_TYPE: "icepop"}),
    ("--vllm_is_correction_type mis", {IS_TYPE: "seq-mask-tis"}),
    ("--vllm_is_truncated_threshold 2", {IS_THRESHOLD: (0, 2)}),
    ("--vllm_is_truncated_threshold 0.5 5", {IS_THRESHOLD: (0.5, 5)}),
    ("--prompt_max_len 1000 --generate_max_len 24", {"data.max_len": 1024, "rollout.max_new_tokens": 24}),
    ("--prompt_max_len 1000 --max_new_tokens 24", {"data.max_len": 1024, "rollout.max_new_tokens": 24}),
    ("--prompt_max_len 1000", {"data.max_len": 2024, "rollout.max_new_tokens": 1024}),
    ("--generate_max_len 24", {"data.max_len": 2048, "rollout.max_new_tokens": 24}),
    (
        "--max_len 99 --prompt_max_len 10 --generate_max_len 24",
        {"data.max_len": 99, "rollout.max_new_tokens": 24},
    ),
    ("--clip_eps_low 0.1 --clip_eps_high 0.3", {"actor.eps_clip_low_high": (0.1, 0.3)}),
    ("--clip_eps_high 0.3", {"actor.eps_clip_low_high": (0.2, 0.3)}),
    ("--reward_clip_range 10.0", {"reward.clip_range": (-10, 10)}),
    ("--reward_clip_range -3 4", {"reward.clip_range": (-3, 4)}),
    ("--critic_pretrain None", {"critic.model_name_or_path": None}),
    ("--max_steps 3", {"train.max_turns": 3, "train.max_steps": None}),
    ("--value_prefix_head head", {"ds.value_head_prefix": "head"}),
    ("--head_prefix head", {"ds.value_head_prefix": "head"}),
    ("--use_kl_estimator_k3", {"algo.kl.estimator": "k3"}),
    ("--universal_ckpt", {"ds.use_universal_ckpt": True}),
    ("--ref_reward_offload", {"ref.offload": True, "reward.offload": True}),
    ("--ref_num_nodes 0 --critic_num_nodes 0", {"ref.num_nodes": 0, "critic.num_nodes": 0}),
    ("--rollout_micro_batch_size 3", {"rollout.micro_batch_size": 3}),
    ("--n_samples_per_prompts 3", {"rollout.n_samples_per_prompt": 3}),
    ("--adam_betas 0.8 0.9", {"actor.adam.betas": (0.8, 0.9), "critic.adam.betas": (0.8, 0.9)}),
    ("--local_rank=0", {"local_rank": 0}),
    ("--local-rank 0", {"local_rank": 0}),
    ("--torch_compile --perf --actor_init_on_gpu", {}),
]


@pytest.mark.parametrize(("line", "expected"), OTHER_SPELLINGS, ids=[line for line, _ in OTHER_SPELLINGS])
def test_older_and_informal_names(line, expected, capsys):
    config = parse(COMMANDS["ppo"], line.split()).config
    values = values_of(config)
    assert {key: values[key] for key in expected} == expected
    err = capsys.readouterr().err
    for word in line.split():
        if word.startswith("--") and "local" not in word:
            assert word in err, f"{word} gave no hint"


@pytest.mark.parametrize(
    "line",
    [
        "--bf16 --flash_attn --data_type bf16 --train_split test --universal_ckpt --torch_compile --perf",
        "--zero_stage 3 --local_rank=1",
    ],
)
def test_older_names_for_sft(line, capsys):
    parse(COMMANDS["sft"], line.split())
    assert capsys.readouterr().err.count("note: ") == sum(
        word.startswith("--") and "local_rank" not in word for word in line.split()
    )


@pytest.mark.parametrize("flag", ["--ptx_coef", "--pretrain_data"])
def test_removed_flags_say_what_to_do(flag, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(COMMANDS["ppo"], [flag, "0.05"])
    assert exit_.value.code == 2
    assert f"error: {flag}: mixing pre-training data into RL" in capsys.readouterr().err
