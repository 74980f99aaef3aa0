"""Command lines and YAML files become configurations, or messages that say why they cannot."""

import ast
import dataclasses
import math
import os
import random
import re
import shlex
import string
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import openrlhf
from openrlhf.config.checks import COMMON_UNREAD, sequence_parallel
from openrlhf.config.commands import (
    BATCH_INFERENCE,
    CHAT,
    COMMANDS,
    DPO,
    KD,
    KTO,
    PPO,
    PRM,
    RM,
    SERVE_RM,
    SFT,
)
from openrlhf.config.fields import fields_of, to_words, values_of
from openrlhf.config.parse import parse, suggest, to_yaml
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.ppo_checks import PPO_UNREAD
from openrlhf.config.reference import markdown
from openrlhf.config.sections import DeepSpeedConfig, is_due
from openrlhf.config.supervised import DPOConfig
from openrlhf.config.supervised_checks import (
    DPO_UNREAD,
    KD_UNREAD,
    PRETRAIN_UNREAD,
    RM_UNREAD,
    SUPERVISED_UNREAD,
)
from openrlhf.mesh import Mesh
from openrlhf.training.origin import Origin, compare


@pytest.fixture
def say(tmp_path, capsys, monkeypatch):
    """Returns say(command, "--flags …") -> (config or None, lines of stderr); it adds the flags that every
    sane command line has."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("")
    supervised = "--model.model_name_or_path org/model --data.dataset org/rows "
    responses = supervised + "--data.output_key out --data.input_template None"
    base = {
        "sft": responses,
        "rm": supervised,
        "prm": supervised + "--data.placeholder_token #",
        "dpo": supervised,
        "kto": responses,
        "kd": responses + " --teacher.model_name_or_path org/teacher",
        "ppo": "--actor.model_name_or_path org/model --data.prompt_dataset org/rows "
        "--reward.remote_url reward.py --algo.advantage.estimator reinforce",
        "serve_rm": "--reward.model_name_or_path org/model",
        "batch_inference": f"{supervised} --output_path out.jsonl --task rm",
        "chat": "--model.model_name_or_path org/model",
    }

    def say(command, line):
        argv = [*base[command.name].split(), *(line.split() if isinstance(line, str) else line)]
        try:
            config = parse(command, argv).config
        except SystemExit as exit_:
            assert exit_.code == 2
            config = None
        return config, uncoded(capsys.readouterr().err).splitlines()

    return say


def uncoded(stderr):
    """stderr without the codes of its errors."""
    return re.sub(r" \[[a-z-]+\]$", "", stderr, flags=re.MULTILINE)


def refused(command, argv, capsys):
    """Returns the stderr of a command line that must be refused."""
    with pytest.raises(SystemExit) as exit_:
        parse(command, argv)
    assert exit_.value.code == 2
    return uncoded(capsys.readouterr().err)


def problems_of(lines):
    """Splits the lines into problems, each with all of its lines, without the summary."""
    text = "\n".join(line for line in lines[:-1] if not line.startswith("note: "))
    return [problem.removeprefix("error: ") for problem in text.split("\nerror: ")] if text else []


# ---- YAML


def test_later_files_win_and_the_command_line_wins_over_all(say, tmp_path):
    (tmp_path / "a.yaml").write_text("ds: {zero_stage: 3}\nactor:\n  adam: {lr: 5e-7}\n  max_norm: 2\n")
    (tmp_path / "b.yaml").write_text("ds.zero_stage: 1\nactor: {max_norm: 3, adam.lr: 1e-3}\n")
    config, _ = say(PPO, "--actor.adam.lr 1e-5 --config a.yaml --config b.yaml")
    assert (config.ds.zero_stage, config.actor.max_norm, config.actor.adam.lr) == (1, 3.0, 1e-5)
    config, _ = say(PPO, "--config b.yaml a.yaml")
    assert (config.ds.zero_stage, config.actor.max_norm, config.actor.adam.lr) == (3, 2.0, 5e-7)


def test_old_names_on_the_command_line_win_over_files(say, tmp_path):
    (tmp_path / "a.yaml").write_text("zero_stage: 3\nreward_clip_range: 5.0\nbf16: true\n")
    config, lines = say(PPO, "--config a.yaml --zero_stage 0")
    assert config.ds.zero_stage == 0
    assert config.reward.clip_range == (-5.0, 5.0)
    assert lines == [
        "note: 4 flags are spelled as in older versions (a.yaml:1: zero_stage, a.yaml:2: reward_clip_range, "
        "a.yaml:3: bf16, ...); --print_command prints the command in today's",
    ]
    (tmp_path / "b.yaml").write_text("zero_stage: 3\nreward_clip_range: 5.0\n")
    assert say(PPO, "--config b.yaml --bf16")[1] == [
        "note: b.yaml:1: zero_stage is now --ds.zero_stage",
        "note: b.yaml:2: reward_clip_range is now --reward.clip_range -5.0 5.0",
        "note: --bf16 is now --ds.param_dtype bf16",
    ]


def test_a_printed_configuration_has_no_anchors(say):
    config, _ = say(PPO, "")
    assert config.actor.adam.betas is config.critic.adam.betas  # YAML writes it once and then refers to it
    assert to_yaml(config).count("betas: [0.9, 0.95]") == 2


def test_the_last_word_on_the_command_line_counts(say):
    config, _ = say(
        PPO, "--max_norm 2 --critic_learning_rate 1e-3 --actor.max_norm 3 --actor.adam.lr 1 --actor.adam.lr 2"
    )
    assert (config.actor.max_norm, config.critic.max_norm, config.actor.adam.lr) == (3.0, 2.0, 2.0)


def test_an_empty_file_and_empty_sections_change_nothing(say, tmp_path):
    (tmp_path / "a.yaml").write_text("# nothing\n")
    (tmp_path / "b.yaml").write_text("ds:\nactor: {adam: }\n")
    config, lines = say(PPO, "--config a.yaml --config b.yaml")
    assert config.ds.zero_stage == 2 and not lines


def test_everything_wrong_in_a_file_is_listed_with_its_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text(
        "ds: 3\nactor:\n  optim: sgd\n  adam: {lr: fast, betas: [1]}\nrollout:\n  batch_sise: 3\n"
        "train.seed: 1\ntrain: {seed: 2, max_epochs: [], num_episodes: {}}\nds.packing_samples: maybe\n"
        "? [a]\n: 1\n"
    )
    err = refused(PPO, ["--config", "bad.yaml", "--config", "none.yaml"], capsys).splitlines()
    assert [line for line in err if ".yaml" in line] == [
        "error: bad.yaml:1: ds must be a mapping of keys to values",
        "error: bad.yaml:8: train.max_epochs: expects a value or a list of values",
        "error: bad.yaml:8: train.num_episodes: expects a value or a list of values",
        "error: bad.yaml:10: a key must be a name",
        "error: --config none.yaml: No such file or directory",
        "error: bad.yaml:6: rollout.batch_sise: there is no such flag; did you mean rollout.batch_size or "
        "rollout.micro_batch_size or rollout.vllm_generate_batch_size?",
        "error: bad.yaml:8: train.seed: already set in bad.yaml:7",
        "error: bad.yaml:3: actor.optim sgd: expects one of adam, muon",
        "error: bad.yaml:4: actor.adam.lr fast: expects a number",
        "error: bad.yaml:4: actor.adam.betas 1: expects 2 values (FLOAT FLOAT), got 1",
        "error: bad.yaml:9: ds.packing_samples maybe: expects true or false",
    ]


@pytest.mark.parametrize("text", ["a: [", "a: 1\n---\nb: 2\n", "\x00", "- 1\n", "*x", "[" * 600], ids=ascii)
def test_a_file_that_is_no_configuration(text, tmp_path, capsys):
    (tmp_path / "bad.yaml").write_text(text)
    err = refused(SFT, ["--config", str(tmp_path / "bad.yaml")], capsys)
    assert "bad.yaml" in err and "Traceback" not in err


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_print_config_round_trips(command, say, tmp_path, capsys):
    """Every flag with a value other than its default is printed and read again."""
    config = command.config_type()
    argv = []
    for key, field in fields_of(command.config_type).items():
        argv += [f"--{key}", *another_value(field, values_of(config)[key])]
    none = lambda config, explicit: []
    bare = dataclasses.replace(command, problems=none, placed=none, not_yet={})

    def printed(*argv, what="--print_config"):
        with pytest.raises(SystemExit) as exit_:
            parse(bare, [*argv, what])
        assert exit_.value.code == 0
        return capsys.readouterr().out

    text = printed(*argv)
    (tmp_path / "out.yaml").write_text(text)
    assert printed("--config", str(tmp_path / "out.yaml")) == text
    assert to_yaml(parse(bare, argv).config) == text
    name, *flags = shlex.split(printed(*argv, what="--print_command").replace("\\\n", ""))[1:]
    assert name == command.name and to_yaml(parse(bare, flags).config) == text
    again, first = values_of(parse(bare, ["--config", str(tmp_path / "out.yaml")]).config), values_of(config)
    for key in fields_of(command.config_type):
        assert again[key] != first[key], key


def another_value(field, default):
    """Returns words for a value that is not the default."""
    if field.values.startswith("{"):
        names = field.values.partition("}")[0].strip("{").split(",")
        return [next(name for name in names if name != default)]
    if field.is_bool:
        return ["false" if default else "true"]
    if field.key == "logger.wandb.key":
        return ["secret-key"]
    kind = field.values.partition(" | ")[0]
    if field.key == "ds.zero_stage":
        return ["3"]
    return {
        "INT": ["7"],
        "BOOL": ["true"],
        "FLOAT": ["2.5"] if field.name == "dual_clip" else ["0.375"],
        "TEXT": ['\'it: # "is"\n{} ä'],
        "TEXT ...": ["a", "b c"],
        "FLOAT ...": ["0.25", "0.5", "0.75"],
        "FLOAT FLOAT": ["0.25", "0.75"],
    }[kind]


def test_a_key_is_written_nowhere(say, capsys):
    bare = dataclasses.replace(SFT, problems=lambda config, explicit: [])
    for argv in (["--print_config"], ["--help"], ["--train.seed", "x"]):
        with pytest.raises(SystemExit):
            parse(bare, ["--use_wandb", "MARKER", *argv])
    with pytest.raises(SystemExit):
        parse(bare, ["--use_wandb", "MARKER", "MARKER"])
    out = capsys.readouterr()
    assert "MARKER" not in out.out + out.err
    assert "key: 'True'" in out.out


# ---- the command line


def test_forms_of_a_switch(say):
    for words in ("--ds.overlap_comm", "--ds.overlap_comm true", "--ds.overlap-comm=True", "--overlap_comm"):
        assert say(PPO, words)[0].ds.overlap_comm is True
    for words in ("--actor.muon.no_nesterov", "--actor.muon.nesterov false", "--actor.muon.nesterov=False"):
        config = parse(dataclasses.replace(PPO, problems=lambda config, explicit: []), words.split()).config
        assert config.actor.muon.nesterov is False


@pytest.mark.parametrize("words", ["", "true", "False", "auto", "None"])
def test_forms_of_a_switch_that_may_decide_by_itself(words):
    stated = {"": True, "true": True, "False": False, "auto": "auto"}
    bare = dataclasses.replace(PPO, problems=lambda config, explicit: [])
    line = ["--algo.skip_old_log_probs", *words.split()]
    if words not in stated:
        with pytest.raises(SystemExit):
            parse(bare, line)
        return
    config = parse(bare, line).config
    assert config.algo.skip_old_log_probs == stated[words]
    assert parse(bare, ["--algo.no_skip_old_log_probs"]).config.algo.skip_old_log_probs is False


def test_negative_numbers_and_text_that_looks_like_a_flag_are_values(say):
    config, _ = say(
        PPO, ["--reward.clip_range", "-5", "5", "--data.input_template", "-- {} =", "--eval.steps=-1"]
    )
    assert config.reward.clip_range == (-5.0, 5.0)
    assert config.data.input_template == "-- {} ="


def test_whole_numbers_may_be_written_as_powers(say):
    assert say(SFT, "--data.max_samples 1e4")[0].data.max_samples == 10_000


def test_launchers_add_a_rank(say):
    assert say(SFT, "--local_rank=3")[0].local_rank == 3
    assert say(SFT, "--local-rank 3")[0].local_rank == 3


def test_all_problems_are_listed_at_once(capsys):
    argv = (
        "foo --ds.zero_stage three --actor.optim sgd --actor.adam.lr -1 --actor.adam.lrr 1 --train.seed 1 2 "
    )
    argv += "--ds.deepcompile --algo.advantage.estimator rloo --bf16 fp16 --config "
    argv += "--reward.remote_url r.txt --vllm.num_engines"
    err = refused(PPO, argv.split(), capsys).splitlines()
    assert [line for line in err if line.startswith("error")] == [
        "error: foo: unexpected; flags start with --",
        "error: --config: expects the name of a YAML file",
        "error: --actor.adam.lrr: there is no such flag; did you mean --actor.adam.lr or --actor.adam.eps or "
        "--actor.muon.lr?",
        "error: --bf16 fp16: takes no value",
        "error: --ds.zero_stage three: expects a whole number",
        "error: --actor.optim sgd: expects one of adam, muon",
        "error: --actor.adam.lr -1: must be at least 0",
        "error: --train.seed 1 2: expects one value (INT), got 2",
        "error: --vllm.num_engines: expects one value (INT), got none",
        "error: --ds.deepcompile: DeepCompile is not available yet: DeepSpeed then reduces the gradients of "
        "compiled graphs alone, and of rows of many lengths torch compiles only some; remove it",
        "error: --actor.model_name_or_path: is required. Model from which policy and reference start: a "
        "Hugging Face name or a folder.",
        "error: --data.prompt_dataset: is required. Comma list of datasets, each as `path` or "
        "`path@data_dir`: a .json, .jsonl, .csv, .parquet or .arrow file (also compressed, such as "
        ".jsonl.gz), a folder of such files, a URL (s3://, gs://, hf://, https://), a name on the hub, or "
        "problems of reasoning-gym as `reasoning_gym:NAME?size=N&seed=S`.",
        "error: --reward.remote_url r.txt: is neither a .py file nor a URL that starts with http:// or "
        "https://, nor a function as folder/file.py:NAME or package.module:NAME",
    ]
    assert err[-1].startswith("13 problems; nothing was started.")


def test_only_one_process_of_a_machine_speaks(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert refused(SFT, ["--nonsense"], capsys) == ""


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_right_name_for_a_typo(command):
    """A letter may be wrong, missing, doubled or swapped, in every flag and every old name of more than three
    letters."""
    rng = random.Random(0)
    names = {key: {key} for key in fields_of(command.config_type)}
    names |= {old: set(flag.to) for old, flag in command.old_flags.items() if flag.to and len(old) > 3}
    missed = []
    for name, right in names.items():
        i, letter = rng.randrange(1, len(name) - 1), rng.choice(string.ascii_lowercase)
        wrong = (letter + name[i + 1], name[i + 1], name[i] * 2 + name[i + 1], name[i + 1] + name[i])
        typo = name[:i] + rng.choice(wrong) + name[i + 2 :]
        if typo not in names and not right & set(suggest(typo, command)):
            missed.append((name, typo))
    assert len(missed) <= 0.01 * len(names), missed


def test_nothing_near_nonsense(capsys):
    assert "--qqqq: there is no such flag; see --help" in refused(SFT, ["--qqqq"], capsys)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.sampled_from(
                [f"--{key}" for key in fields_of(PPOConfig)] + [f"--{old}" for old in PPO.old_flags]
            ),
            st.sampled_from(
                ["true", "-1", "None", "0", "1e99", "nan", "inf", "a,b", "./x", "--config", "--no_x", "--"]
            ),
            st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5),
        ),
        max_size=12,
    )
)
def test_no_command_line_ends_in_a_traceback(capsys, argv):
    try:
        parse(PPO, argv)
    except SystemExit as exit_:
        assert exit_.code == 2 or (exit_.code == 0 and any(word.startswith("-h") for word in argv))
    err = capsys.readouterr().err
    assert err.isascii() or err.replace("\n", "").isprintable()


# ---- help


def run(*argv, **options):
    environ = os.environ | {"PYTHONPATH": os.getcwd()}
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, env=environ, **options)


HELP = """
from openrlhf.config.commands import PPO
from openrlhf.config.parse import parse
parse(PPO, ['--help'])
"""


def test_parsing_imports_nothing_heavy():
    heavy = "{'torch', 'ray', 'vllm', 'deepspeed', 'transformers', 'datasets', 'numpy'}"
    code = f"""
import sys
from openrlhf.config.commands import COMMANDS
from openrlhf.config.parse import parse
for command in COMMANDS:
    try: parse(command, ["--help"])
    except SystemExit: pass
    try: parse(command, ["--config", "none.yaml", "--x"])
    except SystemExit: pass
assert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)
"""
    assert run("-c", code).returncode == 0


def test_commands_refuse_flags_before_they_import_anything_heavy():
    """A flag that does not exist, one of the wrong type and a missing one are refused before heavy
    imports."""
    heavy = "{'torch', 'ray', 'vllm', 'deepspeed', 'transformers', 'datasets', 'pandas'}"
    code = f"""
import sys
from openrlhf.cli.main import main
for name in {[command.name for command in COMMANDS]}:
    try: main([name, "--ds.param_dtype", "int3", "--nothing.of.the.kind", "1"])
    except SystemExit as stop: assert stop.code == 2
assert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)
"""
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    for told in ("--nothing.of.the.kind: there is no such flag", "--ds.param_dtype int3: expects one of"):
        assert done.stderr.count(f"error: {told}") == len(COMMANDS)
    assert done.stderr.count(": is required. ") >= len(COMMANDS)


def test_help_into_a_pipe_that_closes():
    result = subprocess.run(
        f'{sys.executable} -c "{HELP}" | head -1', shell=True, capture_output=True, text=True, cwd=os.getcwd()
    )
    assert result.stdout.startswith("usage: openrlhf ppo") and result.stderr == ""


def shown(command, argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(command, argv)
    assert exit_.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_explains_every_flag(command, capsys):
    text = shown(command, ["--help"], capsys)
    for key, field in fields_of(command.config_type).items():
        assert f"  --{key}" in text
        assert field.help.endswith((".", ")")), f"--{key} has no docstring"
    assert max(map(len, text.splitlines())) <= 160


def test_help_with_a_word_finds_present_and_old_names(capsys):
    text = shown(PPO, ["--help", "lora-rank"], capsys)
    assert "--ds.lora.rank INT (default: 0)" in text and "alpha" not in text
    assert shown(PPO, ["--help=lora"], capsys).count("  --ds.lora.") == 4
    assert "--ds.lora.rank" in refused(PPO, ["--help", "lora.rankk"], capsys)


def test_help_shows_the_values_in_force(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text("zero_stage: 3\n")
    assert "--ds.zero_stage INT (now: 3)" in shown(
        PPO, ["--config", str(tmp_path / "a.yaml"), "--help"], capsys
    )


def test_the_reference_names_every_flag():
    result = run("-m", "openrlhf.config.reference")
    for command in COMMANDS:
        for name in [*fields_of(command.config_type), *command.old_flags]:
            assert f"`--{name}`" in result.stdout


# ---- what is wrong between flags

ONE_GPU = "--actor.num_gpus_per_node 1 "
GROUP = "--rollout.n_samples_per_prompt 8 --algo.advantage.estimator "
GSPO = "--actor.policy_loss_type gspo --actor.eps_clip_low_high 3e-4 4e-4 "
SKIP = "--algo.skip_old_log_probs --train.batch_size 1024 "
WITH_IMAGES = "--data.max_images_per_prompt 1 --data.apply_chat_template"
FILTER = "--rollout.n_samples_per_prompt 8 --algo.dynamic_filtering_enable "

CHECKS = [
    # backend
    (
        SFT,
        "--train.backend torch --ds.zero_stage 1",
        "--ds.zero_stage 1: train.backend torch shards optimizer states and gradients; use 2 or 3, or use "
        "train.backend deepspeed",
    ),
    (PPO, "--train.backend torch --ds.param_dtype fp16", "torch does not scale losses; use bf16 or fp32"),
    (PPO, "--train.backend torch --ds.grad_accum_dtype bf16", "torch adds gradients up in float32; use"),
    (
        SFT,
        "--train.backend torch --ds.tensor_parallel_size 2",
        "train.backend torch shares no matrices; use 1",
    ),
    (SFT, "--train.backend torch --ds.ring_attn_size 2", "train.backend torch shares no rows; use 1"),
    (SFT, "--train.backend torch --ds.adam_offload", "train.backend torch has no optimizer on the CPU"),
    (SFT, "--train.backend torch --ds.load_in_4bit", "train.backend torch shards no weights of 4 bits"),
    (SFT, "--train.backend torch --ds.use_universal_ckpt", "train.backend torch reads its own checkpoints"),
    (
        SFT,
        "--train.backend torch --optim muon --max_norm 0",
        "--optim muon: train.backend torch has no Muon; use adam",
    ),
    (
        PPO,
        "--train.backend torch --critic.optim muon",
        "--critic.optim muon: train.backend torch has no Muon",
    ),
    (PPO, "--train.backend torch --train.enable_ema", "train.backend torch keeps no moving average"),
    (
        PPO,
        "--train.backend torch --actor.gradient_checkpointing_reentrant",
        "--actor.gradient_checkpointing_reentrant: train.backend torch has no reentrant checkpointing",
    ),
    (
        DPO,
        "--train.backend torch --ref.offload",
        "--ref.offload: train.backend torch keeps no weights on",
    ),
    # placement
    (
        PPO,
        "--placement auto --train.colocate_all false",
        "--train.colocate_all false: --placement auto has the models share their GPUs; remove one of the two",
    ),
    # paths
    (
        SFT,
        "--model.model_name_or_path ./nothing",
        "--model.model_name_or_path ./nothing: does not exist; give the folder of a model, or a name",
    ),
    (
        SFT,
        "--model.model_name_or_path ~/m",
        "--model.model_name_or_path ~/m: ~ is only understood by the shell",
    ),
    (
        SFT,
        "--data.dataset /no/such/rows",
        "--data.dataset /no/such/rows: does not exist, nor does the folder /no/such",
    ),
    (
        SFT,
        "--data.dataset org/a,rewar.py",
        "--data.dataset org/a,rewar.py: rewar.py does not exist; near it: reward.py",
    ),
    (SFT, "--data.dataset rows.jsonl@part", "--data.dataset rows.jsonl@part: rows.jsonl/part does not exist"),
    (SFT, "--eval.dataset ./x.json --data.max_len 7", "--eval.dataset ./x.json: does not exist"),
    (SFT, "--ckpt.output_dir reward.py", "--ckpt.output_dir reward.py: is a file; name a folder"),
    (
        PPO,
        "--reward.remote_url rewards.py",
        "--reward.remote_url rewards.py: does not exist; near it: reward.py",
    ),
    (PPO, "--reward.remote_url reward", "--reward.remote_url reward: is neither a .py file nor a URL"),
    (
        PPO,
        "--reward.remote_url reward.py,reward.py",
        "reward.py must stand alone: one .py file, or several http URLs",
    ),
    (PPO, "--reward.remote_url None", "--reward.remote_url: nothing gives a reward; name a .py file"),
    # data
    (
        SFT,
        "--data.dataset_probs 0.5,0.5",
        "--data.dataset_probs 0.5,0.5: has 2 probabilities for 1 in data.dataset",
    ),
    (
        SFT,
        "--data.dataset a,b --data.dataset_probs 0.5,0.6",
        "must be above 0 and add up to 1, as 0.4545,0.5455",
    ),
    (
        SFT,
        "--data.dataset a,b --data.dataset_probs half,half",
        "expects numbers with commas between them, as 0.7,0.3",
    ),
    (
        PPO,
        "--data.prompt_probs 1,0",
        "--data.prompt_probs 1,0: has 2 probabilities for 1 in data.prompt_dataset",
    ),
    (SFT, "--data.input_template hello", "--data.input_template hello: has no {} for the prompt to go to"),
    (PPO, "--data.input_template {a}", "--data.input_template {a}: must have one {} for the prompt"),
    (SFT, "--data.multiturn", "--data.multiturn: needs messages; add --data.apply_chat_template"),
    *(
        (
            command,
            "--data.max_images_per_prompt 1",
            "--data.max_images_per_prompt 1: needs --data.apply_chat_template",
        )
        for command in (SFT, RM, DPO)
    ),
    (
        PPO,
        "--data.max_images_per_prompt 1 --data.apply_chat_template --ds.use_liger_kernel",
        "--ds.use_liger_kernel: its kernels read no images (--data.max_images_per_prompt); remove it",
    ),
    (
        SFT,
        "--data.max_images_per_prompt 1 --data.apply_chat_template --model.pretrain_mode_enable",
        "--data.max_images_per_prompt 1: contradicts model.pretrain_mode_enable",
    ),
    (
        DPO,
        "--data.max_images_per_prompt 1 --data.apply_chat_template --data.image_root missing",
        "--data.image_root missing: is no folder; name the one that the paths of images begin at",
    ),
    (
        RM,
        "--data.max_images_per_prompt 1 --data.apply_chat_template --data.image_hosts a.org https://b.org",
        "--data.image_hosts a.org https://b.org: names of hosts are without https:// and paths",
    ),
    (
        SFT,
        "--data.output_key None --data.multiturn --model.pretrain_mode_enable",
        "--data.multiturn: contradicts model.pretrain_mode_enable",
    ),
    (SFT, "--data.output_key None", "--data.output_key: nothing says what the response is: name its column"),
    (
        KTO,
        "--data.output_key None",
        "name its column, or use --data.apply_chat_template\n(the last message is",
    ),
    (KD, "--data.output_key None", "(the last message is the response) or --model.pretrain_mode_enable"),
    (
        PRM,
        ["--data.placeholder_token", ""],
        "--data.placeholder_token: is required.",
    ),
    (
        PRM,
        "--data.reward_tokens +",
        "--data.reward_tokens +: a step's label is one of two or more; name them all",
    ),
    (PRM, "--data.reward_tokens + - +", "--data.reward_tokens + - +: names + twice; name each once"),
    # models
    (KD, "--teacher.model_name_or_path ./t", "--teacher.model_name_or_path ./t: does not exist; give the"),
    (
        KD,
        ["--teacher.model_name_or_path", ""],
        "--teacher.model_name_or_path: is required.",
    ),
    (DPO, "--ref.model_name_or_path ./r", "--ref.model_name_or_path ./r: does not exist; give the folder of"),
    (KTO, "--ref.model_name_or_path ./r", "--ref.model_name_or_path ./r: does not exist; give the folder of"),
    # batches
    (RM, "--train.batch_size 0", "--train.batch_size 0: must be at least 1"),
    (
        SFT,
        "--train.batch_size 36",
        "--train.batch_size 36: is not a multiple of 1 ranks x train.micro_batch_size 8 = 8; use 32 or 40",
    ),
    (
        PPO,
        "--train.batch_size 100",
        "1024 prompts x 1 = 1024 samples, which is not a multiple of it; use 64 or 128",
    ),
    (PPO, "--train.batch_size 4", "--train.batch_size 4: does not divide among 8 ranks; use 8"),
    (PPO, "--train.batch_size 2048", "1024 samples, which is not a multiple of it; use 1024"),
    (
        PPO,
        "--rollout.batch_size 7 --train.batch_size 7",
        "does not divide among 8 ranks; use another rollout.batch_size",
    ),
    (
        PPO,
        "--train.micro_batch_size 3",
        "is not a multiple of 8 ranks x train.micro_batch_size 3 = 24; use 16",
    ),
    (
        PPO,
        "--rollout.max_new_tokens 2048",
        "--rollout.max_new_tokens 2048: leaves no room for a prompt in data.max_len 2048",
    ),
    # engines
    (
        PPO,
        "--ds.lora.rank 1024 --vllm.lora_sync adapter",
        "--vllm.lora_sync adapter: vLLM has no adapters of rank 1024 (ds.lora.rank), only up to 512; remove",
    ),
    (
        PPO,
        f"{WITH_IMAGES} --ds.lora.rank 8 --vllm.lora_sync adapter",
        "vLLM adapts the language part of a model alone, and ds.lora adapts the vision part too; remove",
    ),
    (
        PPO,
        "--algo.router_replay",
        "vLLM keeps with the blocks of its prefix cache; add --vllm.enable_prefix_caching",
    ),
    (
        PPO,
        "--algo.router_replay --vllm.enable_prefix_caching --vllm.pipeline_parallel_size 2",
        "--algo.router_replay: no stage of an engine knows the experts of all layers",
    ),
    (
        PPO,
        f"{WITH_IMAGES} --algo.router_replay --vllm.enable_prefix_caching",
        "--algo.router_replay: is for text alone (data.max_images_per_prompt); remove it",
    ),
    (
        PPO,
        "--vllm.keep_cache",
        "requests that a sync pauses, and only --train.partial_rollout_enable pauses any; add",
    ),
    (
        PPO,
        f"{WITH_IMAGES} --train.async_enable --train.partial_rollout_enable --vllm.keep_cache",
        "--vllm.keep_cache: would give images of new prompts what the old weights saw in them; remove it",
    ),
    # algorithm
    (
        PPO,
        "--algo.dynamic_filtering_enable",
        "filters groups; rollout.n_samples_per_prompt must be 2 or more",
    ),
    (
        PPO,
        FILTER + "--reward.remote_url None --teacher.model_name_or_path org/teacher",
        "nothing scores the groups; name a .py file with reward_func(queries, prompts, labels)",
    ),
    (
        PPO,
        "--reward.clip_range 5 -5",
        "--reward.clip_range 5.0 -5.0: the first bound must be less than the second",
    ),
    (
        PPO,
        "--algo.advantage.is_correction_enable --algo.advantage.is_correction_threshold 5 5",
        "must be less than the second",
    ),
    (
        PPO,
        "--rollout.top_k 1",
        "--rollout.top_k 1: keeps one token, whose probability is 1 whatever the policy does, so nothing is "
        "learned; use 2 or more, or -1",
    ),
    (PPO, ["--rollout.stop", "User:", ""], "has an empty text, which would end every response; remove it"),
    (
        PPO,
        "--reward.overlong_buffer_len 4096",
        "--reward.overlong_buffer_len 4096.0: is more than data.max_len 2048; use at most 2048",
    ),
    (
        PPO,
        GSPO + "--actor.loss_aggregation token_mean",
        "--actor.loss_aggregation token_mean: gspo compares sequences, which count alike however long",
    ),
    (
        PPO,
        GSPO + "--actor.loss_aggregation constant_length",
        "--actor.loss_aggregation constant_length: gspo compares sequences, which count alike however long",
    ),
    (
        PPO,
        "--actor.policy_loss_type cispo --actor.dual_clip 3",
        "--actor.dual_clip 3.0: bounds what cispo bounds already, for every advantage; remove it",
    ),
    (
        PPO,
        "--algo.skip_old_log_probs --algo.kl.init_coef 0 --train.max_epochs 2",
        "--algo.skip_old_log_probs: an RL step makes 16 optimizer steps, and only before the first the "
        "policy is the old one;\nuse train.batch_size 1024 and train.max_epochs 1, or remove it",
    ),
    (
        PPO,
        "--eval.dataset org/e --eval.steps 1 --eval.temperature 0",
        "--eval.temperature 0.0: is greedy, and eval.n_samples_per_prompt 4 would sample the same answer 4 "
        "times; use --eval.n_samples_per_prompt 1, or a temperature above 0",
    ),
    (
        PPO,
        SKIP,
        "--algo.skip_old_log_probs: the KL in the reward needs those log-probs; add --algo.kl.use_loss",
    ),
    (
        PPO,
        SKIP + "--algo.kl.init_coef 0 --teacher.model_name_or_path org/teacher",
        "--algo.skip_old_log_probs: the teacher's reward needs those log-probs",
    ),
    (
        PPO,
        SKIP + "--algo.kl.use_loss --algo.kl.estimator k2 --algo.kl.target 0.1 --rollout.mask_truncated",
        "--algo.skip_old_log_probs: algo.kl.target needs those log-probs of all samples; remove one",
    ),
    (
        PPO,
        "--algo.advantage.proximal_policy rollout --algo.advantage.is_correction_enable",
        "--algo.advantage.is_correction_enable: weighs the gap between sampler and proximal policy, and "
        "algo.advantage.proximal_policy rollout makes them one; remove it, or use "
        "--algo.advantage.proximal_policy recomputed",
    ),
    (
        PPO,
        "--algo.advantage.staleness_decay 0",
        "--algo.advantage.staleness_decay 0: must be more than 0 and at most 1",
    ),
    (
        PPO,
        "--actor.lr_scheduler cosin",
        "--actor.lr_scheduler cosin: there is no such schedule; did you mean cosine?",
    ),
    (SFT, "--lr_scheduler zzz", "--lr_scheduler zzz: there is no such schedule; choose one of linear,"),
    # placement
    (
        PPO,
        "--train.colocate_all --vllm.num_engines 2 --vllm.tensor_parallel_size 2",
        "--vllm.num_engines 2: 2 engines x 2 GPUs must be the actor's 8 GPUs with train.colocate_all; use 4",
    ),
    (
        PPO,
        "--train.colocate_all --vllm.tensor_parallel_size 3",
        "with train.colocate_all; an engine can have 1, 2, 4, 8 GPUs (vllm.tensor_parallel_size x",
    ),
    (PPO, "--ref_num_nodes 0", "--ref.num_nodes 0: 0 means the actor's GPUs; add --train.colocate_all"),
    # ranks that share rows
    (
        SFT,
        "--ring_attn_size 2",
        "--ds.ring_attn_size 2: does not divide the 1 rank of the run, of which 2 share each row; use a "
        "multiple of 2",
    ),
    (
        PPO,
        "--ds.ring_attn_size 4 --ref.num_gpus_per_node 2",
        "--ds.ring_attn_size 4: does not divide the 2 ranks of the ref",
    ),
    (
        PPO,
        "--ds.ring_attn_size 2 --data.max_images_per_prompt 1 --data.apply_chat_template",
        "--ds.ring_attn_size 2: ranks do not share rows with images (data.max_images_per_prompt); remove one",
    ),
    (
        PPO,
        "--ds.ring_attn_size 2 --ds.attn_implementation sdpa",
        "--ds.attn_implementation sdpa: sees whole rows, which ranks share (ds.ring_attn_size); use auto",
    ),
    # ranks that share matrices
    (
        SFT,
        "--ds_tensor_parallel_size 2",
        "--ds.tensor_parallel_size 2: does not divide the 1 rank of the run, of which 2 have the same "
        "samples; use a multiple of 2",
    ),
    (
        PPO,
        "--ds.tensor_parallel_size 4 --ref.num_gpus_per_node 2",
        "--ds.tensor_parallel_size 4: does not divide the 2 ranks of the ref",
    ),
    (
        PPO,
        "--ds.tensor_parallel_size 2 --ds.zero_stage 3",
        "--ds.tensor_parallel_size 2: ds.zero_stage 3 shards the same weights; use --ds.zero_stage 2",
    ),
    (
        PPO,
        "--ds.tensor_parallel_size 2 --ds.zero_stage 0",
        "--ds.tensor_parallel_size 2: at ds.zero_stage 0 DeepSpeed counts a part of the norm of gradients in "
        "bf16; use --ds.zero_stage 1 or 2",
    ),
    (
        PPO,
        "--ds.tensor_parallel_size 2 --ds.lora.rank 8",
        "--ds.tensor_parallel_size 2: adapters are not shared with the matrices that they change "
        "(ds.lora.rank); remove one",
    ),
    (
        PPO,
        "--ds.tensor_parallel_size 2 --ref.offload",
        "--ds.tensor_parallel_size 2: DeepSpeed shards the weights that it offloads (ref.offload); remove",
    ),
    (
        PPO,
        "--ds.tensor_parallel_size 2 --data.max_images_per_prompt 1 --data.apply_chat_template",
        "--ds.tensor_parallel_size 2: models that read images are not shared (data.max_images_per_prompt)",
    ),
    (
        SFT,
        "--ds.tensor_parallel_size 2 --optim muon --max_norm 0",
        "--ds.tensor_parallel_size 2: Muon makes whole matrices orthogonal (optim); remove one",
    ),
    (
        PPO,
        "--ds.tensor_parallel_size 2 --actor.num_gpus_per_node 2 --actor.optim muon --actor.max_norm 0",
        "--ds.tensor_parallel_size 2: Muon makes whole matrices orthogonal (actor.optim); remove one",
    ),
    # precision and checkpoints
    (SFT, "--ds.adam_offload --ds.zero_stage 0", "--ds.adam_offload: needs sharded optimizer states"),
    (
        SFT,
        "--ds.attn_implementation flash_atention_2",
        "is not known to keep packed sequences apart; did you mean flash_attention_2?",
    ),
    (
        PPO,
        "--ds.attn_implementation paged",
        "use auto, sdpa, eager, flash_attention_2, flash_attention_3 or a",
    ),
    (
        PPO,
        "--data.pretrain_dataset org/a,org/b --data.pretrain_probs 1",
        "--data.pretrain_probs 1: has 1 probabilities for 2 in data.pretrain_dataset",
    ),
    (
        SFT,
        "--logger.wandb.key ***",
        "--logger.wandb.key: is a mask, not a key; use True and set WANDB_API_KEY",
    ),
    # reward models
    (
        PPO,
        "--reward.model_name_or_path a/b,c/d --reward.model_weights 1",
        "--reward.model_weights 1.0: has 1 weights for 2 reward models; give each model one",
    ),
    # URLs
    (
        PPO,
        "--reward.remote_url http://a/b,http://:80/c",
        "http://:80/c is no URL; write http://HOST:PORT/get_reward",
    ),
    (SFT, "--optim muon", "--max_norm 1.0 (default): DeepSpeed clips what Muon has made orthogonal"),
    (
        PPO,
        "--ds.zero_stage 3 --ds.zpg 3 --actor.num_gpus_per_node 4",
        "--ds.zpg 3: does not divide the 4 ranks of the actor; use one of 1, 2, 4",
    ),
    (
        PPO,
        "--actor.optim muon",
        "--actor.max_norm 1.0 (default): DeepSpeed clips what Muon has made orthogonal",
    ),
    (
        PPO,
        "--algo.advantage.estimator gae --critic.optim muon",
        "little is left of it; use --critic.max_norm 0",
    ),
    (
        PPO,
        "--actor.optim muon --actor.max_norm 0 --ds.adam_offload",
        "--ds.adam_offload: keeps states of Adam on the CPU, not of Muon; remove it",
    ),
    (
        SFT,
        "--optim muon --max_norm 0 --ds.adam_offload",
        "--ds.adam_offload: keeps states of Adam on the CPU, not of Muon; remove it",
    ),
    (
        DPO,
        "--model.dropout_enable",
        "--model.dropout_enable: the policy would differ from its reference",
    ),
    (
        KTO,
        "--model.dropout_enable",
        "--model.dropout_enable: the policy would differ from its reference",
    ),
    (
        PPO,
        "--train.colocate_all --vllm.num_engines 8 --ds.enable_sleep --ds.zero_stage 0",
        "--ds.enable_sleep: moves sharded optimizer states; use --ds.zero_stage 1, 2 or 3",
    ),
    (
        PPO,
        "--train.colocate_all --vllm.num_engines 8 --ds.enable_sleep --ds.zero_stage 1 "
        "--ds.grad_accum_dtype fp32",
        "cannot move the whole gradients that ds.grad_accum_dtype fp32 keeps at ds.zero_stage 1; use "
        "--ds.zero_stage 2",
    ),
    (
        SFT,
        "--ds.grad_accum_dtype fp32 --ds.zero_stage 0",
        "fp32: at ds.zero_stage 0 they add up in ds.param_dtype bf16; use --ds.zero_stage 2 or 3",
    ),
    (
        SFT,
        "--ds.grad_accum_dtype fp16",
        "--ds.grad_accum_dtype fp16: gradients of ds.param_dtype bf16 add up in bf16 or fp32; use that",
    ),
    (
        PPO,
        "--reward.model_name_or_path a/b --reward.model_weights 0",
        "--reward.model_weights 0.0: leaves nothing of the reward models; remove them",
    ),
    (
        PPO,
        "--train.agent_func_path agent.txt",
        "--train.agent_func_path agent.txt: must name a .py file with the class AgentExecutor",
    ),
    (PPO, "--train.agent_func_path agent.py", "--train.agent_func_path agent.py: does not exist"),
    (PPO, "--train.agent_func_path agent.py:Mine", "agent.py:Mine: agent.py does not exist"),
    (
        PPO,
        "--reward.remote_url rewar.py:judge",
        "rewar.py:judge: rewar.py does not exist; near it: reward.py",
    ),
    (
        PPO,
        "--reward.remote_url reward.py:a,reward.py:b",
        "reward.py:a must stand alone: one .py file, or several http URLs",
    ),
]


@pytest.mark.parametrize(("command", "line", "message"), CHECKS, ids=[str(line) for _, line, _ in CHECKS])
def test_one_mistake_gives_one_problem_that_says_what_to_do(command, line, message, say):
    config, lines = say(command, line)
    found = problems_of(lines)
    assert config is None
    assert len(found) == 1 and message in found[0], found
    assert len(found[0].splitlines()) <= 3


NOT_YET = [(command, key) for command in COMMANDS for key in command.not_yet]


def test_flash_attention_of_a_package_gives_way_where_ranks_share_rows() -> None:
    def of(**flags) -> tuple[str, list[bool]]:
        ds = DeepSpeedConfig(**flags)
        return ds.kernels.attention, [p.fatal for p in sequence_parallel(ds, {"run": 2}, reads_images=False)]

    assert of(attn_implementation="flash_attention_2") == ("flash_attention_2", [])
    assert of(attn_implementation="flash_attention_2", ring_attn_size=2) == ("auto", [False])
    assert of(attn_implementation="eager", ring_attn_size=2) == ("eager", [True])


@pytest.mark.parametrize(
    ("command", "key"), NOT_YET, ids=[f"{command.name} {key}" for command, key in NOT_YET]
)
def test_a_feature_that_does_not_exist_yet_is_refused_and_marked(command, key, capsys):
    """One declaration does both, so that a mark goes where a refusal goes."""
    field, feature = fields_of(command.config_type)[key], command.not_yet[key]
    words = another_value(field, values_of(command.config_type())[key])
    err = refused(command, [f"--{key}", *words], capsys)
    (told,) = [line for line in err.splitlines() if line.startswith(f"error: --{key}")]
    assert f": {feature.what} is not available yet" in told and told.endswith(
        ("; remove it", "leave it at 0")
    )
    row = next(line for line in markdown(command).splitlines() if line.startswith(f"| `--{key}` |"))
    assert "| **Not available yet" in row
    available = dataclasses.replace(command, not_yet={})
    assert f"--{key}" not in refused(available, [f"--{key}", *words], capsys).replace("--help", "")
    assert "Not available yet" not in markdown(available)
    with pytest.raises(SystemExit):
        parse(command, ["--help", key])
    assert "Not available yet" in capsys.readouterr().out


REMARKS = [
    (
        SFT,
        "--train.backend torch --ds.bucket_mb 100",
        "--ds.bucket_mb 100: has no effect: fully_shard plans its communication (train.backend torch)",
    ),
    (
        PPO,
        "--vllm.sync_with_ray --vllm.sync_backend gloo",
        "--vllm.sync_backend gloo: has no effect: weights travel through Ray's object store",
    ),
    (SFT, "--packing_samples", "--ds.packing_samples: has no effect: rows are always packed (padding-free)"),
    (PPO, "--packing_samples", "--ds.packing_samples: has no effect: rows are always packed (padding-free)"),
    (SERVE_RM, "--packing_samples", "--ds.packing_samples: has no effect: rows are always packed"),
    (
        DPO,
        "--data.dataloader_num_workers 4",
        "--data.dataloader_num_workers 4: has no effect: the tokenizer's own threads read all rows before "
        "training starts",
    ),
    (
        PPO,
        "--data.dataloader_num_workers 4",
        "--data.dataloader_num_workers 4: has no effect: the tokenizer's",
    ),
    (
        RM,
        "--compute_fp32_loss",
        "--model.compute_fp32_loss_enable: has no effect: scores and losses are always float32",
    ),
    (
        PPO,
        ONE_GPU + "--train.colocate_all --ref_num_gpus_per_node 8",
        "--ref.num_gpus_per_node 8: shares the GPUs of the actor: actor.num_gpus_per_node 1 stands",
    ),
    (
        PPO,
        "--reward.model_name_or_path a/b --train.colocate_critic_reward --algo.advantage.estimator gae "
        "--reward.remote_url none --critic.num_gpus_per_node 4 --reward.num_gpus_per_node 2",
        "--reward.num_gpus_per_node 2: shares the GPUs of the critic: critic.num_gpus_per_node 4 stands",
    ),
    (
        PPO,
        "--eval.dataset org/e --eval.steps 1 --eval_temperature 0",
        "--eval.temperature 0.0: is greedy, and eval.n_samples_per_prompt 4 would sample the same answer",
    ),
    (
        SFT,
        "--ckpt.save_steps 5 --ckpt.disable_ds",
        "--ckpt.disable_ds: leaves nothing to save every ckpt.save_steps",
    ),
    (
        PPO,
        "--reward.remote_url reward.py --reward.normalize_enable",
        "--reward.normalize_enable: has no effect: there is no reward model",
    ),
    (
        PPO,
        "--critic.adam.lr 1",
        "--critic.adam.lr 1.0: has no effect: only estimator gae has a critic",
    ),
    (
        PPO,
        "--eval.dataset a/b --eval.steps 1 --ckpt.best_metric_key eval/default_response_length_mean",
        "the largest value is kept as the best; name a metric that ends in _score_mean, _best_ofK or _passK",
    ),
    (
        PPO,
        "--algo.kl.init_coef 0 --algo.kl.use_loss",
        "has no effect: there is no KL penalty (algo.kl.init_coef 0)",
    ),
    (
        PPO,
        GROUP + "group_norm --algo.advantage.gamma 0.9",
        "--algo.advantage.gamma 0.9: has no effect: estimator group_norm does not discount; reinforce does",
    ),
    (
        PPO,
        "--reward.model_name_or_path a/b",
        "has no effect: reward.remote_url gives the rewards; reward.model_weights adds those of models",
    ),
    (
        PPO,
        FILTER + "--reward.remote_url none --reward.model_name_or_path a/b",
        "the scores of a reward model need not lie between 0 and 1; set a range of its own",
    ),
    (
        PPO,
        "--algo.kl.use_loss",
        "--algo.kl.estimator k1 (default): as a loss its gradient is zero on average; k2 or k3 suit",
    ),
    (PPO, "--algo.kl.estimator k3", "--algo.kl.estimator k3: in the reward k1 is the unbiased estimate"),
    (
        PPO,
        "--eval.dataset org/e",
        "--eval.dataset org/e: is never used: eval.steps is -1; set --eval.steps N",
    ),
    (SFT, ["--data.input_template", r"{}\n"], "has a backslash and an n, not a line break"),
    (PPO, ["--rollout.stop", r"\n\n"], "has a backslash and an n, not a line break"),
    (
        PPO,
        "--train.dynamic_batch_enable --train.micro_batch_size 4",
        "has no effect: train.dynamic_batch_enable fills",
    ),
    (PPO, "--eval.temperature 1", "--eval.temperature 1.0: has no effect: there is no eval.dataset"),
    (SFT, "--ckpt.save_hf", "--ckpt.save_hf: has no effect: no checkpoints are written (ckpt.save_steps)"),
    (
        SFT,
        "--ds.use_universal_ckpt",
        "--ds.use_universal_ckpt: has no effect: nothing is resumed (ckpt.load_enable)",
    ),
    (SFT, "--logger.wandb.org me", "--logger.wandb.org me: has no effect: W&B is off (logger.wandb.key)"),
    (PPO, "--critic.num_nodes 2", "--critic.num_nodes 2: has no effect: only estimator gae has a critic"),
    (PPO, "--algo.kl.init_coef 0 --ref.offload", "--ref.offload: has no effect: there is no reference model"),
    (PPO, "--reward.offload", "--reward.offload: has no effect: there is no reward model"),
    (
        PPO,
        "--reward.remote_url http://a/b --reward.timeout 9",
        "--reward.timeout 9.0: has no effect: reward.remote_url names no reward function",
    ),
    (
        PPO,
        "--train.agent_func_path reward.py",
        "--reward.remote_url reward.py: has no effect: the agent of train.agent_func_path gives the rewards",
    ),
    (
        PPO,
        "--reward.remote_timeout 9",
        "--reward.remote_timeout 9.0: has no effect: reward.remote_url names no server",
    ),
    (
        PPO,
        "--reward.remote_url https://a:5000",
        "https://a:5000 has no path; serve_rm answers at /get_reward",
    ),
    (PPO, "--ds.value_head_prefix x", "has no effect: there is neither a critic nor a reward model"),
    (PPO, "--vllm.enable_sleep", "--vllm.enable_sleep: has no effect: engines have their own GPUs"),
    (PPO, "--vllm.lora_sync adapter", "has no effect: there are no adapters (ds.lora.rank 0)"),
    (
        PPO,
        "--vllm.kv_cache_gb 1 --vllm.gpu_memory_utilization 0.5",
        "has no effect: vllm.kv_cache_gb sets the size",
    ),
    (
        PPO,
        "--actor.policy_loss_type gspo",
        "the ratio of a sequence hardly ever leaves actor.eps_clip 0.2; its paper has --actor.eps_clip_low",
    ),
    (
        PPO,
        SKIP + "--algo.kl.init_coef 0 --actor.eps_clip 0.3",
        "--actor.eps_clip 0.3: has no effect: an RL step is one optimizer step, so the ratio is 1",
    ),
    (PPO, "--ckpt.best_metric_key x_pass1", "has no effect: without eval.dataset there is no metric"),
    (
        PPO,
        "--rollout.vllm_generate_batch_size 2048",
        "samples ahead: groups that wait are of an earlier policy; --algo.advantage.is_correction_enable",
    ),
    (
        PPO,
        "--algo.advantage.estimator rloo",
        "--rollout.n_samples_per_prompt 1 (default): estimator rloo compares the samples of one prompt: "
        "alone each has advantage 0, and its reward teaches nothing",
    ),
    # nothing reads it
    (PPO, "--ptx_coef 0.1", "--actor.ptx_coef 0.1: has no effect: there is no data.pretrain_dataset"),
    (PPO, "--max_steps 3", "--train.max_turns 3: has no effect: there is no train.agent_func_path"),
    (
        PPO,
        "--rollout.max_kept_tokens 8",
        "--rollout.max_kept_tokens 8: has no effect: neither rollout.top_p nor rollout.top_k leaves tokens "
        "out",
    ),
    (
        PPO,
        "--data.pretrain_dataset org/texts --actor.ptx_coef 0",
        "--data.pretrain_dataset org/texts: has no effect: actor.ptx_coef is 0",
    ),
    (
        SFT,
        "--ds.lora.alpha 32",
        "--ds.lora.alpha 32: has no effect: LoRA is off (ds.lora.rank 0)",
    ),
    (SFT, "--ds.ring_attn_head_stride 2", "has no effect: every rank has whole rows"),
    (
        SFT,
        "--ds.sequence_parallel_mode ulysses",
        "--ds.sequence_parallel_mode ulysses: has no effect: every rank has whole rows",
    ),
    (SFT, "--ds.zpg 8", "has no effect: only ds.zero_stage 3 shards weights"),
    (SFT, "--ds.bucket_mb 8 --ds.zero_stage 0", "has no effect: ds.zero_stage 0 shards nothing"),
    (
        SFT,
        "--ds.activation_offload",
        "has no effect: model.gradient_checkpointing_enable is off",
    ),
    (PPO, "--ds.activation_offload", "has no effect: actor.gradient_checkpointing_enable is off"),
    (SFT, "--train.max_tokens_per_gpu 8", "has no effect: train.dynamic_batch_enable is off"),
    (PPO, "--rollout.max_tokens_per_gpu 8", "has no effect: train.dynamic_batch_enable is off"),
    (SFT, "--data.tokenizer_chat_template x", "has no effect: data.apply_chat_template is off"),
    (
        PPO,
        "--data.input_template {} --data.apply_chat_template",
        "has no effect: data.apply_chat_template formats",
    ),
    (SFT, "--muon.lr 1", "has no effect: the optimizer is adam"),
    (
        SFT,
        "--optim muon --max_norm 0 --muon.ns_steps 4",
        "has no effect: DeepSpeed's Muon always takes 5 steps with Nesterov momentum",
    ),
    (SFT, "--data.no_cache_enable --data.cache_dir x", "has no effect: data.cache_enable is off"),
    (
        RM,
        "--model.loss_type logexp --model.margin_loss_enable",
        "--model.margin_loss_enable: has no effect: model.loss_type logexp has no margin",
    ),
    (
        DPO,
        "--model.ipo_enable --model.label_smoothing 0.1",
        "--model.label_smoothing 0.1: has no effect: model.ipo_enable has no label smoothing",
    ),
    (
        KD,
        "--model.kd_coef 0 --model.kd_temperature 2",
        "--model.kd_temperature 2.0: has no effect: model.kd_coef 0 leaves the teacher out",
    ),
    (
        SFT,
        "--model.pretrain_mode_enable",
        "--data.output_key out: has no effect: model.pretrain_mode_enable takes data.input_key",
    ),
    (PPO, "--teacher.kd_coef 2", "has no effect: there is no teacher.model_name_or_path"),
    (SFT, "--min_lr_ratio 0.5 --lr_scheduler cosine", "has no effect: the schedule has no floor"),
    (SFT, "--lr_decay_ratio 0.5", "has no effect: only the schedule warmup_stable_decay ends in"),
    (PPO, "--actor.lr_decay_ratio 0.5", "has no effect: only the schedule warmup_stable_decay ends"),
    (
        SFT,
        "--model.gradient_checkpointing_reentrant",
        "has no effect: model.gradient_checkpointing_enable is off",
    ),
    (SFT, "--ds.enable_sleep", "has no effect: supervised training shares its GPUs with nobody"),
    (PPO, "--algo.advantage.lambd 0.9", "has no effect: only gae uses lambda"),
    (
        PPO,
        GROUP + "rloo --algo.advantage.no_std_norm",
        "has no effect: only the estimators gae, reinforce,",
    ),
    (
        PPO,
        "--algo.advantage.is_correction_type icepop",
        "has no effect: algo.advantage.is_correction_enable is off",
    ),
    (
        PPO,
        "--algo.advantage.is_correction_enable --algo.advantage.is_correction_sequence_threshold 0.99 1.01",
        "has no effect: only algo.advantage.is_correction_type seq-mask-tis drops sequences",
    ),
    (
        PPO,
        "--algo.advantage.staleness_decay 0.9",
        "has no effect: every step trains on samples of its own weights",
    ),
    (
        PPO,
        "--train.async_enable --train.async_queue_size 0 --algo.advantage.max_token_staleness 2",
        "has no effect: every step trains on samples of its own weights",
    ),
    (
        PPO,
        "--train.async_enable --algo.advantage.max_token_staleness 1",
        "has no effect: train.async_queue_size lets nothing get older",
    ),
    (
        PPO,
        "--train.async_enable --algo.advantage.proximal_policy interpolated",
        "--algo.advantage.proximal_policy interpolated: is the sampler where samples are at most 1 step old",
    ),
    (PPO, "--algo.kl.horizon 5", "has no effect: without algo.kl.target the weight stays"),
    (
        PPO,
        "--algo.kl.target 0.1 --algo.kl.horizon 1023",
        "--algo.kl.horizon 1023: a step has 1024 samples, and the KL coefficient changes "
        "by a fifth a step at most, as for 1023; name 1024 or more",
    ),
    (
        PPO,
        "--algo.dynamic_filtering_range 0 0.9",
        "has no effect: algo.dynamic_filtering_enable is off",
    ),
    (
        PPO,
        "--algo.dynamic_filtering_max_batches 3",
        "has no effect: algo.dynamic_filtering_enable is off",
    ),
    (
        PPO,
        "--actor.eps_clip 0.1 --actor.eps_clip_low_high 0.2 0.3",
        "has no effect: actor.eps_clip_low_high sets",
    ),
    (PPO, "--actor.muon.lr 1", "has no effect: the optimizer is adam"),
    (
        PPO,
        "--actor.optim muon --actor.max_norm 0 --actor.muon.ns_steps 4",
        "has no effect: DeepSpeed's Muon always takes 5 steps with Nesterov momentum",
    ),
    (
        PPO,
        "--actor.min_lr_ratio 0.5 --actor.lr_scheduler linear",
        "has no effect: the schedule has no floor",
    ),
    (
        PPO,
        "--actor.gradient_checkpointing_reentrant",
        "has no effect: actor.gradient_checkpointing_enable is off",
    ),
    (
        PPO,
        "--reward.overlong_penalty_factor 2",
        "has no effect: reward.overlong_buffer_len is not set",
    ),
    (PPO, "--train.async_queue_size 2", "has no effect: train.async_enable is off"),
    (PPO, "--train.async_enable --train.async_queue_size 2", "may be 2 steps older than the weights"),
    (
        PPO,
        "--train.async_enable --train.colocate_all --vllm.num_engines 2 --vllm.tensor_parallel_size 2",
        "engines that sample while models train have GPUs of their own; train.colocate_all shares those of "
        "the models. The run needs 4 more",
    ),
    (PPO, "--train.ema_beta 0.5", "has no effect: train.enable_ema is off"),
    (PPO, "--ds.lora.rank 4 --ref.offload", "ds.lora.rank makes the policy without its adapters the"),
    *(
        (command, f"--data.{flag} .", "has no effect: data.max_images_per_prompt is 0")
        for command in (PPO, RM, DPO)
        for flag in ("image_key", "image_root")
    ),
    (KTO, "--model.freeze_visual_encoder", "has no effect: the rows have no images"),
    (RM, "--data.image_hosts a.org", "has no effect: data.max_images_per_prompt is 0"),
    (PPO, "--actor.freeze_visual_encoder", "has no effect: data.max_images_per_prompt is 0"),
    (PPO, "--critic_learning_rate 1", "--critic.adam.lr 1.0: has no effect: only estimator gae has a critic"),
    (PPO, "--use_icepop", "has no effect: algo.advantage.is_correction_enable is off"),
]


def test_a_text_is_one_prompt_in_every_command():
    """A text that SFT learned to answer is the text that RL and inference ask, also if nobody names a
    template."""
    templates = {c.name: values_of(c.config_type()).get("data.input_template") for c in COMMANDS}
    assert set(templates.values()) == {None}


@pytest.mark.parametrize("command", [SFT, KTO, KD])
def test_plain_rows_without_a_template_are_told_how_to_mark_responses(command, capsys):
    base = "--model.model_name_or_path org/m --data.dataset org/d --data.output_key out "
    base += "--teacher.model_name_or_path org/t" if command is KD else ""
    told = "nothing stands between a prompt and its response"
    template = "--data.input_template"
    for more in (f"{template} None", f"{template} Q:{{}}", "--data.apply_chat_template", ""):
        parse(command, [*base.split(), *more.split()])
        assert (told in capsys.readouterr().err) == (more == "")


@pytest.mark.parametrize(("command", "line", "message"), REMARKS, ids=[str(line) for _, line, _ in REMARKS])
def test_remarks_do_not_stop_a_run(command, line, message, say):
    config, lines = say(command, line)
    assert config is not None
    remarks = [text for text in lines if " is now --" not in text]
    assert len(remarks) == 1 and remarks[0].startswith("note: ") and message in remarks[0], lines


@pytest.mark.parametrize(
    "line",
    [
        SKIP + "--algo.kl.init_coef 0",
        SKIP + "--algo.kl.use_loss --algo.kl.estimator k3",
        SKIP + "--algo.kl.init_coef 0 --actor.policy_loss_type gspo",
        GSPO + "--actor.loss_aggregation sample_mean",
        GSPO + "--algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop",
        "--actor.policy_loss_type cispo --actor.loss_aggregation constant_length",
        GSPO + "--algo.advantage.proximal_policy rollout",
        "--train.async_enable --train.async_queue_size 4 --algo.advantage.is_correction_enable "
        "--algo.advantage.proximal_policy interpolated --algo.advantage.staleness_decay 0.9 "
        "--algo.advantage.max_token_staleness 3",
    ],
)
def test_policy_losses_without_a_word(line, say):
    config, lines = say(PPO, line)
    assert config is not None and not lines


def test_what_is_said_twice_over_two_models_is_no_remark(say):
    """`--max_norm` sets actor and critic; without a critic this is nobody's mistake."""
    _, lines = say(PPO, "--max_norm 2 --l2 0.1 --adam_betas 0.8 0.9")
    assert all(" is now --" in line for line in lines) and len(lines) == 3


def test_setting_a_default_is_no_mistake(say):
    line = "--critic.adam.lr 9e-6 --algo.advantage.gamma 1.0 --algo.advantage.lambd 1 --ema_beta 0.992"
    config, _ = say(PPO, line)
    assert config is not None


@pytest.fixture
def installed(monkeypatch) -> set[str]:
    """The optional packages that a command finds."""
    names = {"deepspeed", "vllm"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in names or None)
    return names


@pytest.mark.parametrize("command", [SFT, RM, PRM, DPO, KTO, KD, PPO])
def test_without_deepspeed(command, say, installed):
    installed.remove("deepspeed")
    flag, install = "--train.backend deepspeed (default)", 'pip install "openrlhf[deepspeed]"'
    said = f"{flag}: needs the package deepspeed: {install}; or use --train.backend torch"
    assert problems_of(say(command, "")[1]) == [said]
    assert say(command, "--train.backend torch --ds.zero_stage 2")[0] is not None


def test_rl_without_vllm(say, installed):
    installed.remove("vllm")
    install = 'pip install "openrlhf[gpu]" ("openrlhf[cpu]" without a GPU)'
    flag = "--rollout.engine vllm (default)"
    said = f"{flag}: needs the package vllm: {install}; or use --rollout.engine transformers"
    assert problems_of(say(PPO, "")[1]) == [said]
    assert say(PPO, "--rollout.engine transformers")[0] is not None


@pytest.mark.parametrize("command", [SFT, PPO])
def test_packages_are_looked_for_before_anything_starts(command, say, monkeypatch, installed):
    installed.add("flash_attn")
    found = problems_of(say(command, "--flash_attn --ds.param_dtype fp32 --use_wandb True")[1])
    assert len(found) == 2
    assert found[0].endswith("flash attention has no float32; use auto, or ds.param_dtype bf16")
    assert found[1].startswith('--logger.wandb.key: needs the package wandb: pip install "openrlhf[wandb]"')
    assert "To go on without it set WANDB_MODE=disabled, or leave it out: metrics.jsonl" in found[1]
    monkeypatch.setenv("WANDB_MODE", "disabled")
    config, lines = say(command, "--logger.wandb.key True")
    assert not config.logger.wandb.is_used
    assert "note: --logger.wandb.key: has no effect: WANDB_MODE is disabled" in lines
    monkeypatch.delenv("WANDB_MODE")
    installed.add("wandb")
    assert say(command, "--flash_attn --use_wandb True")[0] is not None
    installed.remove("flash_attn")
    _, lines = say(command, "--flash_attn --ds.param_dtype fp32")
    assert any("the package flash_attn is not installed: auto takes its place" in line for line in lines)
    assert not problems_of(lines)


@pytest.mark.parametrize("command", [SFT, PPO, SERVE_RM, BATCH_INFERENCE, CHAT])
def test_kernels_of_the_hub(command, say, installed):
    line = "--ds.attn_implementation kernels-community/flash-attn2"
    assert problems_of(say(command, line)[1]) == [
        f'{line}: needs the package kernels: pip install "openrlhf[kernels]"; or use auto'
    ]
    installed.add("kernels")
    assert say(command, line)[0] is not None


@pytest.mark.parametrize("command", [SFT, RM, PPO])
def test_modelscope(command, say, installed):
    found = problems_of(say(command, "--use_ms")[1])
    assert found == ['--use_ms: needs the package modelscope: pip install "openrlhf[modelscope]"']
    installed.add("modelscope")
    assert say(command, "--use_ms")[0].use_ms


@pytest.mark.parametrize("command", [SFT, RM, PPO])
def test_liger_kernels(command, say, installed):
    found = problems_of(say(command, "--use_liger_kernel")[1])
    assert found == ['--ds.use_liger_kernel: needs the package liger-kernel: pip install "openrlhf[liger]"']
    installed.add("liger_kernel")
    assert say(command, "--use_liger_kernel")[0].ds.use_liger_kernel
    found = problems_of(say(command, "--use_liger_kernel --ds.experts_implementation grouped_mm")[1])
    assert found == [
        "--ds.experts_implementation grouped_mm: ds.use_liger_kernel brings a kernel for experts; remove one"
    ]


def test_every_reason_is_tested():
    """Each row of the tables of unread flags occurs above."""
    messages = " ".join(message for _, _, message in CHECKS + REMARKS)
    supervised = SUPERVISED_UNREAD + PRETRAIN_UNREAD + RM_UNREAD + DPO_UNREAD + KD_UNREAD
    for row in COMMON_UNREAD + supervised + PPO_UNREAD:
        assert row.why[:20] in messages, row.why


VIEWED = {name for name in fields_of(DeepSpeedConfig) if "." not in name}
INFERENCE = ("batch_inference.py", "interactive_chat.py", "lora_combiner.py", "serve_rm.py")
"""Modules of commands whose ds.* is a precision and a kernel. `rollout.py` serves them and training."""


def test_training_code_reads_the_views_of_ds():
    """Training code names no flag of `ds.*`, except in DeepSpeed's folder and where flags are checked."""
    root = Path(openrlhf.__file__).parent
    for path in root.rglob("*.py"):
        apart = path.is_relative_to(root / "config") or path.is_relative_to(root / "backends" / "deepspeed")
        if apart or path.name in INFERENCE or path == root / "backends" / "rollout.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in VIEWED:
                section = getattr(node.value, "attr", getattr(node.value, "id", ""))
                assert section != "ds", f"{path}:{node.lineno}: ds.{node.attr}"


def test_ranks_come_from_the_launcher(say, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    found = problems_of(say(SFT, "--train.batch_size 128")[1])
    assert found == ["--train.batch_size 128: does not divide among 3 ranks; use 120 or 144"]


def test_a_small_batch_is_one_row(say):
    assert say(SFT, "--train.batch_size 4")[0].train.batch_size == 4


def test_paths_with_commas_and_ats(say, tmp_path):
    (tmp_path / "a,b@c.jsonl").write_text("")
    (tmp_path / "d").mkdir()
    config, lines = say(SFT, "--data.dataset ./a,b@c.jsonl,.@d --data.dataset_probs 0.5,0.5")
    assert config is not None, lines


# ---- what follows from several flags


def test_derived_values(say):
    config, _ = say(
        PPO, "--logger.wandb.run_name r --ckpt.output_dir o --rollout.batch_size 256 --train.max_epochs 3"
    )
    assert config.run_dir == "o/runs/r"
    assert config.samples_per_step == 256 and config.updates_per_step == 6
    assert config.actor.clip_range == (0.2, 0.2)
    assert (
        config.num_engines == 1
        and config.placements["ref"] == (Mesh(data=8), None)
        and config.uses_reference
        and not config.uses_critic
    )
    assert config.longest_response == 2048 and config.rollout_tokens_per_gpu == 16192
    assert config.reward.function == "reward.py"
    line = (
        "--train.colocate_all --vllm.tensor_parallel_size 2 --actor.num_gpus_per_node 4 --actor.num_nodes 2"
    )
    assert say(PPO, line)[0].data_parallel_size == 8
    config, _ = say(PPO, line + " --actor.eps_clip_low_high 0.2 0.27 --vllm.enable_sleep --ref_num_nodes 0")
    assert (
        config.num_engines == 4
        and config.placements["ref"] == (Mesh(data=8), "actor")
        and config.engines_sleep
    )
    assert config.actor.clip_range == (0.2, 0.27)


ROLLOUT = "--algo.advantage.proximal_policy rollout"
ONE_UPDATE = "--train.batch_size 1024"  # 128 prompts of 8 samples


@pytest.mark.parametrize(
    ("line", "skips"),
    [
        (f"{ONE_UPDATE} --algo.kl.init_coef 0", True),
        (f"{ONE_UPDATE} --algo.kl.init_coef 0 --algo.skip_old_log_probs false", False),
        ("--train.batch_size 512 --algo.kl.init_coef 0", False),
        (f"{ONE_UPDATE} --algo.kl.init_coef 0 --train.max_epochs 2", False),
        (ONE_UPDATE, False),  # the KL is in the reward
        (f"{ONE_UPDATE} --algo.kl.use_loss --algo.kl.estimator k2", True),
        (f"{ONE_UPDATE} --algo.kl.init_coef 0 --teacher.model_name_or_path org/teacher", False),
        (f"{ONE_UPDATE} --algo.kl.init_coef 0 --rollout.mask_truncated", False),
        # No forward pass for a sampler that knows its log-probs, whatever the number of optimizer steps.
        (f"{ROLLOUT} --algo.kl.init_coef 0 --train.max_epochs 2 --rollout.mask_truncated", True),
        (f"{ROLLOUT} --algo.kl.init_coef 0 --algo.skip_old_log_probs", True),
        (f"{ROLLOUT} --algo.kl.init_coef 0 --algo.skip_old_log_probs false", False),
        ("--algo.advantage.proximal_policy interpolated --algo.kl.init_coef 0", True),
        (ROLLOUT, False),  # the KL is in the reward
        (f"{ROLLOUT} --algo.kl.use_loss --algo.kl.estimator k2", True),
        (f"{ROLLOUT} --algo.kl.use_loss --algo.kl.estimator k2 --algo.kl.target 0.1", False),
        (f"{ROLLOUT} {ONE_UPDATE} --algo.kl.use_loss --algo.kl.estimator k2 --algo.kl.target 0.1", True),
    ],
)
def test_old_log_probs_are_skipped_where_nothing_reads_them_before_the_update(line, skips, say):
    assert say(PPO, line)[0].skips_old_log_probs is skips


@pytest.mark.parametrize(
    ("line", "remarked"), [("", True), ("--algo.advantage.proximal_policy rollout", False)]
)
def test_the_clip_is_read_in_a_step_of_one_update_where_it_counts_from_the_sampler(line, remarked, say):
    _, problems = say(PPO, f"{ONE_UPDATE} --algo.kl.init_coef 0 --actor.eps_clip 0.3 {line}")
    assert any("so the ratio is 1" in text for text in problems) is remarked


@pytest.mark.parametrize(
    ("line", "steps"),
    [
        ("", 0),
        (FILTER, 0),
        ("--train.async_enable --train.async_queue_size 3", 3),
        ("--rollout.vllm_generate_batch_size 2048", math.inf),
        (f"{FILTER} --rollout.vllm_generate_batch_size 100", math.inf),
        ("--rollout.vllm_generate_batch_size 100", 0),
    ],
)
def test_how_stale_samples_can_be(line, steps, say):
    assert say(PPO, line)[0].largest_staleness == steps


@pytest.mark.parametrize(
    "line", ["--rollout.vllm_generate_batch_size 2048", "--train.async_enable --train.async_queue_size 2"]
)
def test_a_ratio_to_the_sampler_knows_that_samples_are_older(line, say):
    remarks = [say(PPO, f"{line} {more}")[1] for more in ("", "--algo.advantage.proximal_policy rollout")]
    assert [any("algo.advantage.is_correction_enable" in text for text in texts) for texts in remarks] == [
        True,
        False,
    ]


@pytest.mark.parametrize("command", ["sft", "rm", "prm", "dpo", "kto", "kd", "ppo"])
def test_run_names_tell_the_command_and_the_start_time_and_are_unique(command):
    config_type = next(c for c in COMMANDS if c.name == command).config_type
    names = {config_type().logger.wandb.run_name for _ in range(20)}
    assert len(names) == 20
    for name in names:
        prefix, start, _ = name.split("_")
        assert prefix == command and time.strptime(start, "%m%dT%H:%M")


@pytest.mark.parametrize("config_type", [PPOConfig, DPOConfig])
def test_checkpoints_lie_in_the_output_folder_unless_they_are_named(config_type):
    ckpt = config_type().ckpt
    assert dataclasses.replace(ckpt, output_dir="out").folder == "out/checkpoints"
    assert dataclasses.replace(ckpt, output_dir="out", path="elsewhere").folder == "elsewhere"


def test_an_interval_is_due_at_its_multiples():
    assert [step for step in range(1, 8) if is_due(step, 3)] == [3, 6]
    assert not any(is_due(step, every) for step in range(1, 8) for every in (-1, 0))


def test_a_value_becomes_words_of_the_command_line():
    assert to_words((0.5, None, True)) == ("0.5", "None", "true")


# ---- openrlhf COMMAND


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        ([], 0, "openrlhf sft "),
        (["--help"], 0, "openrlhf ppo "),
        (["trian_sft"], 2, "did you mean `openrlhf sft`?"),
        (["dmo"], 2, "did you mean `openrlhf demo`?"),
        (["zzz"], 2, "see `openrlhf --help`"),
    ],
)
def test_the_console_command(argv, code, text):
    result = run("-m", "openrlhf.cli.main", *argv)
    assert result.returncode == code and text in result.stdout + result.stderr


VARIABLES = [
    ("OPENRLHF_ASYNC_NUM_TASKS", "rollout.max_concurrent_episodes", "0"),
    ("OPENRLHF_ASYNC_QUEUE_SIZE", "train.async_queue_size", "-1"),
]


@pytest.mark.parametrize(("variable", "key", "wrong"), VARIABLES)
def test_a_flag_wins_over_a_variable_and_what_wins_is_said(variable, key, wrong, say, monkeypatch, tmp_path):
    (tmp_path / "run.yaml").write_text(f"{key}: 5")
    asked = lambda line: values_of(say(PPO, f"--train.async_enable {line}")[0])[key]
    default = asked("")
    monkeypatch.setenv(variable, "")
    assert asked("") == default
    monkeypatch.setenv(variable, "4")
    config, lines = say(PPO, "--train.async_enable")
    assert values_of(config)[key] == 4 and f"note: the variable {variable} sets --{key} 4" in lines
    assert yaml.safe_load(to_yaml(config))[key.partition(".")[0]][key.partition(".")[2]] == 4
    config, lines = say(PPO, f"--train.async_enable --{key} 1")
    assert values_of(config)[key] == 1
    assert lines == [f"note: --{key} 1 wins over the variable {variable}, 4"]
    assert [asked("--config run.yaml"), asked(f"--{key} 4")] == [5, 4]
    monkeypatch.setenv(variable, wrong)
    config, lines = say(PPO, "")
    assert config is None and f"error: the variable {variable}: --{key} {wrong}: " in "\n".join(lines)


def test_a_queue_by_a_variable_is_compared_at_a_resume(say, monkeypatch):
    origin = lambda: Origin.of("ppo", say(PPO, "--train.async_enable")[0], {})
    without = origin()
    monkeypatch.setenv("OPENRLHF_ASYNC_QUEUE_SIZE", "4")
    assert compare(origin(), without).differences == ["--train.async_queue_size was 4, is 1"]
