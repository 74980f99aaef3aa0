"""Options of vLLM, DeepSpeed and transformers without a flag: how they are written, and which are refused."""

import json

import pytest
import yaml

from openrlhf.checkpoint.run_fingerprint import RunFingerprint, compare
from openrlhf.config.commands import PPO, SFT
from openrlhf.config.owned_options import OWNED
from openrlhf.config.parse import parse, to_yaml
from openrlhf.config.pass_through import PassThrough

RUN = [
    *("--actor.model_name_or_path", "x/y", "--data.prompt_dataset", "a/b"),
    *("--reward.remote_url", "http://h:1/get_reward"),
]
TREE = {"quantization": "fp8", "max_num_seqs": 8, "hf_overrides": {"x-y.z": ["8", 8, None]}}


def parsed(*words: str):
    return parse(PPO, [*RUN, *words], raises=True).config


def test_every_way_to_write_options_gives_the_same(tmp_path):
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(TREE))
    nested = tmp_path / "nested.yaml"
    nested.write_text(yaml.safe_dump({"vllm": {"engine_args": TREE}}))
    dotted = tmp_path / "dotted.yaml"
    dotted.write_text(
        "vllm.engine_args.quantization: fp8\nvllm.engine_args: {max_num_seqs: 8}\n"
        "vllm: {engine_args.hf_overrides: {x-y.z: ['8', 8, ]}}\n".replace(", ]", ", null]")
    )
    one = ("--vllm.engine_args.quantization", "fp8", "--vllm.engine_args.max-num-seqs", "8")
    overrides = ("--vllm.engine_args.hf_overrides", json.dumps(TREE["hf_overrides"]))
    for words in (
        (*one, *overrides),
        ("--vllm.engine_args", json.dumps(TREE)),
        ("--vllm.engine_args", str(file)),
        ("--config", str(nested)),
        ("--config", str(dotted)),
    ):
        assert parsed(*words).vllm.engine_args == TREE, words


def test_values_are_json_or_text():
    start = "--vllm.engine_args."
    words = (f"{start}a", f"{start}b", "false", f"{start}c", "1e-3", f"{start}d", "x", "2", f"{start}e=None")
    words += (f"{start}f", ".5", f"{start}g", "-1.")
    expected = {"a": True, "b": False, "c": 1e-3, "d": ["x", 2], "e": None, "f": 0.5, "g": -1.0}
    assert parsed(*words).vllm.engine_args == expected


def test_later_options_win_one_by_one(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"sub_group_size": 5, "round_robin_gradients": true}}')
    more = ("--ds.config.zero_optimization.sub_group_size", "7", "--ds.config.wall_clock_breakdown")
    assert parsed("--ds.config", str(file), *more).ds.config == {
        "zero_optimization": {"sub_group_size": 7, "round_robin_gradients": True},
        "wall_clock_breakdown": True,
    }


def test_options_are_recorded_and_compared(tmp_path):
    config = parsed("--vllm.engine_args", json.dumps(TREE))
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert parsed("--config", str(tmp_path / "config.yaml")).vllm.engine_args == TREE
    before = RunFingerprint.of("ppo", config, {})
    other = parsed("--vllm.engine_args", json.dumps(TREE | {"quantization": None}))
    assert compare(before, RunFingerprint.of("ppo", config, {})) == ([], [])
    (difference,) = compare(before, RunFingerprint.of("ppo", other, {})).differences
    assert difference.startswith('--vllm.engine_args was {"quantization": "fp8"')


@pytest.mark.parametrize("flag", ["vllm.engine_args", "ds.config", "actor.model_kwargs"])
def test_options_that_a_flag_decides_are_refused(flag):
    for option, remedy in OWNED[flag.rpartition(".")[2]].items():
        with pytest.raises(ValueError) as error:
            parsed(f"--{flag}.{option}", "1")
        assert f"{option} is not passed through: {remedy}" in str(error.value)
        assert f"--{flag}" in str(error.value)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--vllm.engine_args", "nowhere.json"), "expects a JSON object, or a file with one"),
        (("--vllm.engine_args", "{"), "expects a JSON object"),
        (("--rollout.engine", "transformers", "--vllm.engine_args.max_num_seqs", "8"), "does not support it"),
        (("--train.backend", "torch", "--ds.config.wall_clock_breakdown"), "does not read DeepSpeed"),
        (("--vllm.engine_arg.max_num_seqs", "8"), "no such flag"),
    ],
)
def test_what_cannot_be_passed_is_refused(words, part):
    with pytest.raises(ValueError, match=part):
        parsed(*words)


def test_supervised_commands_pass_options_too():
    words = ["--model.model_name_or_path", "x/y", "--data.dataset", "a/b"]
    words += ["--data.input_key", "q", "--data.output_key", "a"]
    config = parse(SFT, [*words, "--model.model_kwargs.attention_dropout", "0.1"], raises=True).config
    assert config.model.model_kwargs == {"attention_dropout": 0.1} and config.ds.config == PassThrough()
    with pytest.raises(ValueError, match=r"use --ds\.zero_stage"):
        parse(SFT, [*words, "--ds.config.zero_optimization", '{"stage": 1}'], raises=True)
