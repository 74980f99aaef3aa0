"""Command lines and YAML files become configurations, or messages that say why they cannot."""

import ast
import dataclasses
import inspect
import math
import os
import random
import shlex
import signal
import string
import subprocess
import sys
import time

import pytest
import refusals
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import printed

from openrlhf.checkpoint.origin import Origin, compare
from openrlhf.config import checks, ppo_checks, supervised_checks
from openrlhf.config.checks import LAUNCHER, check_launcher, optimizer_unread, sequence_parallel
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
from openrlhf.config.old_flags import OTHER_NAMES
from openrlhf.config.parse import parse, suggest, to_yaml
from openrlhf.config.ppo import PPOConfig, PromptDataConfig
from openrlhf.config.reference import page
from openrlhf.config.sections import DeepSpeedConfig, OptimConfig, is_due
from openrlhf.config.supervised import DPOConfig
from openrlhf.errors import ErrorCode
from openrlhf.mesh import Mesh


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
        return config, capsys.readouterr().err.splitlines()

    return say


def refused(command, argv, capsys):
    """Returns the stderr of a command line that must be refused."""
    with pytest.raises(SystemExit) as exit_:
        parse(command, argv)
    assert exit_.value.code == 2
    return capsys.readouterr().err


def problems_of(lines):
    """Returns the code and the place of each problem among the lines of stderr."""
    return [(problem.code, problem.place) for problem in printed("\n".join(lines))]


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
    (line,) = lines
    assert line.startswith("note: 4 flags ") and "--print_command" in line
    assert "a.yaml:1: zero_stage, a.yaml:2: reward_clip_range, a.yaml:3: bf16, ..." in line
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


def test_a_printed_configuration_breaks_lines_after_110_characters():
    template = " ".join(["words"] * 30)
    text = to_yaml(PPOConfig(data=PromptDataConfig(input_template=template)), defaults=False)
    first = " ".join(["words"] * 16)  # ends at character 113, the first end of a word after 110
    assert f"  input_template: {first}\n    words" in text


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


@pytest.mark.parametrize("null", ["", "~", "null", "None"])
def test_an_empty_value_of_a_file_is_none(say, tmp_path, null):
    (tmp_path / "a.yaml").write_text("data.input_template: x{}\n")
    (tmp_path / "b.yaml").write_text(f"data:\n  input_template: {null}\n")
    assert say(PPO, "--config a.yaml b.yaml")[0].data.input_template is None


def test_everything_wrong_in_a_file_is_listed_with_its_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text(
        "ds: 3\nactor:\n  optim: sgd\n  adam: {lr: fast, betas: [1]}\nrollout:\n  batch_sise: 3\n"
        "train.seed: 1\ntrain: {seed: 2, max_epochs: [], num_episodes: {}}\nds.packing_samples: maybe\n"
        "? [a]\n: 1\n"
    )
    err = refused(PPO, ["--config", "bad.yaml", "--config", "none.yaml"], capsys)
    found = [problem for problem in printed(err) if ".yaml" in problem.place]
    assert [(problem.code, problem.place, problem.text.partition(": ")[0]) for problem in found] == [
        ("invalid-value", "bad.yaml:1", "ds must be a mapping of keys to values"),
        ("invalid-value", "bad.yaml:8", "train.max_epochs"),
        ("invalid-value", "bad.yaml:8", "train.num_episodes"),
        ("invalid-value", "bad.yaml:10", "a key must be a name"),
        ("not-found", "--config none.yaml", "No such file or directory"),
        ("unknown-flag", "bad.yaml:6", "rollout.batch_sise"),
        ("conflict", "bad.yaml:8", "train.seed"),
        ("invalid-value", "bad.yaml:3", "actor.optim sgd"),
        ("invalid-value", "bad.yaml:4", "actor.adam.lr fast"),
        ("invalid-value", "bad.yaml:4", "actor.adam.betas 1"),
        ("invalid-value", "bad.yaml:9", "ds.packing_samples maybe"),
    ]
    assert "rollout.batch_size" in err and "bad.yaml:7" in err


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
    bare = dataclasses.replace(command, problems=none, placed=none)

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
    if field.key == "data.tokenizer_chat_template":
        return ["{{ a }}\n{% if 'it' %}"]
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


def test_a_chat_template_may_be_a_file(say, tmp_path):
    """The configuration has its text, so a resumed run needs no file."""
    text = "{% for m in messages %}\n{{ m.content }}{% endfor %}\n"
    (tmp_path / "chat.jinja").write_text(text)
    words = ["--data.apply_chat_template", "--data.tokenizer_chat_template"]
    for value in (text, "chat.jinja", str(tmp_path / "chat.jinja")):
        config, _ = say(SFT, [*words, value])
        assert config.data.tokenizer_chat_template == text
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    (tmp_path / "chat.jinja").unlink()
    again, _ = say(SFT, ["--config", str(tmp_path / "again.yaml")])
    assert again == config


@pytest.mark.parametrize("name", ["missing.jinja", "text.jinja", ".", "binary.jinja"])
def test_a_text_that_is_no_chat_template_is_refused(name, say, tmp_path):
    (tmp_path / "text.jinja").write_text("User: ")
    (tmp_path / "binary.jinja").write_bytes(b"\xff\xfe{{")
    flag = "--data.tokenizer_chat_template"
    _, lines = say(SFT, ["--data.apply_chat_template", flag, name])
    assert problems_of(lines) == [("invalid-value", f"{flag} {name}")]


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
    err = refused(PPO, argv.split(), capsys)
    assert problems_of(err.splitlines()) == [
        ("invalid-value", "foo"),
        ("invalid-value", "--config"),
        ("unknown-flag", "--actor.adam.lrr"),
        ("invalid-value", "--bf16 fp16"),
        ("invalid-value", "--ds.zero_stage three"),
        ("invalid-value", "--actor.optim sgd"),
        ("invalid-value", "--actor.adam.lr -1"),
        ("invalid-value", "--train.seed 1 2"),
        ("invalid-value", "--vllm.num_engines"),
        ("missing-flag", "--actor.model_name_or_path"),
        ("missing-flag", "--data.prompt_dataset"),
        ("invalid-value", "--reward.remote_url r.txt"),
        ("unsupported", "--ds.deepcompile"),
    ]
    assert "--actor.adam.lr " in err and "adam, muon" in err
    assert err.splitlines()[-1].startswith("13 problems; ")


def test_only_one_process_of_a_machine_speaks(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert refused(SFT, ["--nonsense"], capsys) == ""


@pytest.mark.processes
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


@pytest.mark.parametrize(
    ("command", "name", "meant"),
    [
        (PPO, "num_generations", "rollout.n_samples_per_prompt"),
        (PPO, "learning_rate", "actor.adam.lr"),
        (PPO, "max_completion_length", "rollout.max_new_tokens"),
        (PPO, "per_device_train_batch_size", "train.micro_batch_size"),
        (PPO, "gradient_accumulation_steps", "train.batch_size"),
        (PPO, "beta", "algo.kl.init_coef"),
        (PPO, "num_train_epochs", "train.num_episodes"),
        (SFT, "num_train_epochs", "train.max_epochs"),
        (PPO, "actor_rollout_ref.rollout.n", "rollout.n_samples_per_prompt"),
        (PPO, "actor_rollout_ref.actor.optim.lr", "actor.adam.lr"),
        (PPO, "actor_rollout_ref.model.path", "actor.model_name_or_path"),
        (PPO, "data.train_batch_size", "rollout.batch_size"),
    ],
)
def test_names_of_other_libraries_are_translated(command, name, meant):
    assert suggest(name, command) == [meant]


def test_every_name_of_another_library_has_a_flag_and_is_none_itself():
    flags = set().union(*(fields_of(command.config_type) for command in COMMANDS))
    for name, meant in OTHER_NAMES.items():
        assert set(meant.split("|")) <= flags and name not in flags, name


def test_nothing_near_nonsense(capsys):
    assert "--help [unknown-flag]" in refused(SFT, ["--qqqq"], capsys)


@pytest.mark.processes
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    codes = [problem.code for problem in printed(done.stderr)]
    for code in (ErrorCode.UNKNOWN_FLAG, ErrorCode.INVALID_VALUE):
        assert codes.count(code) == len(COMMANDS)
    assert codes.count(ErrorCode.MISSING_FLAG) >= len(COMMANDS)


def test_help_into_a_pipe_that_closes():
    result = subprocess.run(
        f'{sys.executable} -c "{HELP}" | head -1', shell=True, capture_output=True, text=True, cwd=os.getcwd()
    )
    assert result.stdout.startswith("usage: openrlhf ppo") and result.stderr == ""


@pytest.mark.processes
@pytest.mark.parametrize(
    "words",
    [
        "openrlhf.cli.main",
        "openrlhf.cli.main completion bash",
        "openrlhf.tools.plan.init --what sft --model m --data d --gpus 0 --yes",
    ],
)
def test_output_that_nobody_reads_ends_a_command_as_sigpipe_does(words, tmp_path):
    read, write = os.pipe()
    os.close(read)
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", *words.split()]
    result = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=os.environ | paths
    )
    os.close(write)
    assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, "")
    if "init" in words:  # the file is whole
        assert parse(SFT, ["--config", str(tmp_path / "run.yaml")]).config.data.dataset == "d"


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
    (unknown,) = printed(refused(PPO, ["--help", "lora.rankk"], capsys))
    assert (unknown.code, unknown.place) == ("unknown-flag", "--help lora.rankk")
    assert "--ds.lora.rank" in unknown.text
    (unknown,) = printed(refused(PPO, ["--help", "qqqq"], capsys))
    assert unknown.text.splitlines()[0] == "no flag has this in its name"


def test_help_shows_the_values_in_force(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text("zero_stage: 3\n")
    assert "--ds.zero_stage INT (now: 3)" in shown(
        PPO, ["--config", str(tmp_path / "a.yaml"), "--help"], capsys
    )


def test_the_reference_names_every_flag():
    text = page(*COMMANDS)
    for command in COMMANDS:
        for name in [*fields_of(command.config_type), *command.old_flags]:
            assert f"`--{name}`" in text
    assert run("-m", "openrlhf.config.reference").stdout.startswith(text.partition("\n\n## ")[0])


# ---- what is wrong between flags

ONE_GPU = "--actor.num_gpus_per_node 1 "
GROUP = "--rollout.n_samples_per_prompt 8 --algo.advantage.estimator "
GSPO = "--actor.policy_loss_type gspo --actor.eps_clip_low_high 3e-4 4e-4 "
SKIP = "--algo.skip_old_log_probs --train.batch_size 1024 "
IS = "--algo.advantage.is_correction_"
LEVEL = f"{IS}level"
SAMPLER = "--algo.kl.ref rollout --algo.kl.use_loss --algo.kl.estimator k3"
CRITIC = "--algo.advantage.estimator gae"
WITH_IMAGES = "--data.max_images_per_prompt 1 --data.apply_chat_template"
FILTER = "--rollout.n_samples_per_prompt 8 --algo.dynamic_filtering_enable "

CHECKS = [
    (
        SFT,
        "--model.aux_loss_coef 0.1 --model.gradient_checkpointing_enable "
        "--model.gradient_checkpointing_reentrant",
        "unsupported",
        "--model.gradient_checkpointing_reentrant",
        "model.aux_loss_coef",
    ),
    (SFT, "--ds.deepcompile", "unsupported", "--ds.deepcompile", "remove it"),
    (
        PPO,
        "--train.shuffle group --train.batch_size 4 --rollout.batch_size 8 --rollout.n_samples_per_prompt 8",
        "conflict",
        "--train.shuffle group",
        "raise train.batch_size 4",
    ),
    (
        PPO,
        "--train.partial_rollout_enable",
        "conflict",
        "--train.partial_rollout_enable",
        "--train.async_enable",
    ),
    # backend
    (SFT, "--train.backend torch --ds.zero_stage 1", "unsupported", "--ds.zero_stage 1", "use 2 or 3"),
    (PPO, "--train.backend torch --ds.param_dtype fp16", "unsupported", "--ds.param_dtype fp16", ""),
    (
        PPO,
        "--train.backend torch --ds.grad_accum_dtype bf16",
        "unsupported",
        "--ds.grad_accum_dtype bf16",
        "",
    ),
    (
        SFT,
        "--train.backend torch --ds.tensor_parallel_size 2",
        "unsupported",
        "--ds.tensor_parallel_size 2",
        "use 1",
    ),
    (SFT, "--train.backend torch --ds.ring_attn_size 2", "unsupported", "--ds.ring_attn_size 2", "use 1"),
    (SFT, "--train.backend torch --ds.adam_offload", "unsupported", "--ds.adam_offload", ""),
    (SFT, "--train.backend torch --ds.load_in_4bit", "unsupported", "--ds.load_in_4bit", ""),
    (SFT, "--train.backend torch --ds.use_universal_ckpt", "unsupported", "--ds.use_universal_ckpt", ""),
    (SFT, "--train.backend torch --optim muon --max_norm 0", "unsupported", "--optim muon", ""),
    (PPO, "--train.backend torch --critic.optim muon", "unsupported", "--critic.optim muon", ""),
    (PPO, "--train.backend torch --train.enable_ema", "unsupported", "--train.enable_ema", ""),
    (
        PPO,
        "--train.backend torch --actor.gradient_checkpointing_reentrant",
        "unsupported",
        "--actor.gradient_checkpointing_reentrant",
        "",
    ),
    (DPO, "--train.backend torch --ref.offload", "unsupported", "--ref.offload", ""),
    # placement
    (
        PPO,
        "--placement auto --train.colocate_all false",
        "conflict",
        "--train.colocate_all false",
        "--placement",
    ),
    # paths
    (SFT, "--model.model_name_or_path ./nothing", "not-found", "--model.model_name_or_path ./nothing", ""),
    (SFT, "--model.model_name_or_path ~/m", "not-found", "--model.model_name_or_path ~/m", ""),
    (SFT, "--data.dataset /no/such/rows", "not-found", "--data.dataset /no/such/rows", ""),
    (SFT, "--data.dataset org/a,rewar.py", "not-found", "--data.dataset org/a,rewar.py", "reward.py"),
    (SFT, "--data.dataset rows.jsonl@part", "not-found", "--data.dataset rows.jsonl@part", ""),
    (SFT, "--eval.dataset ./x.json --data.max_len 7", "not-found", "--eval.dataset ./x.json", ""),
    (SFT, "--ckpt.output_dir reward.py", "not-writable", "--ckpt.output_dir reward.py", ""),
    (PPO, "--reward.remote_url rewards.py", "not-found", "--reward.remote_url rewards.py", "reward.py"),
    (PPO, "--reward.remote_url reward", "invalid-value", "--reward.remote_url reward", ""),
    (
        PPO,
        "--reward.remote_url reward.py,reward.py",
        "invalid-value",
        "--reward.remote_url reward.py,reward.py",
        "",
    ),
    (PPO, "--reward.remote_url None", "missing-flag", "--reward.remote_url", "--reward.model_name_or_path"),
    # data
    (SFT, "--data.dataset_probs 0.5,0.5", "conflict", "--data.dataset_probs 0.5,0.5", ""),
    (
        SFT,
        "--data.dataset a,b --data.dataset_probs 0.5,0.6",
        "invalid-value",
        "--data.dataset_probs 0.5,0.6",
        "0.4545,0.5455",
    ),
    (
        SFT,
        "--data.dataset a,b --data.dataset_probs half,half",
        "invalid-value",
        "--data.dataset_probs half,half",
        "",
    ),
    (PPO, "--data.prompt_probs 1,0", "conflict", "--data.prompt_probs 1,0", ""),
    (SFT, "--data.input_template hello", "invalid-value", "--data.input_template hello", ""),
    (PPO, "--data.input_template {a}", "invalid-value", "--data.input_template {a}", ""),
    (PPO, "--data.input_template reward.py", "invalid-value", "--data.input_template reward.py", "$(cat"),
    (SFT, "--data.multiturn", "conflict", "--data.multiturn", "--data.apply_chat_template"),
    (
        SFT,
        "--data.max_images_per_prompt 1",
        "conflict",
        "--data.max_images_per_prompt 1",
        "--data.apply_chat_template",
    ),
    (
        RM,
        "--data.max_images_per_prompt 1",
        "conflict",
        "--data.max_images_per_prompt 1",
        "--data.apply_chat_template",
    ),
    (
        DPO,
        "--data.max_images_per_prompt 1",
        "conflict",
        "--data.max_images_per_prompt 1",
        "--data.apply_chat_template",
    ),
    (
        PPO,
        "--data.max_images_per_prompt 1 --data.apply_chat_template --ds.use_liger_kernel",
        "unsupported",
        "--ds.use_liger_kernel",
        "--data.max_images_per_prompt",
    ),
    (
        SFT,
        "--data.max_images_per_prompt 1 --data.apply_chat_template --model.pretrain_mode_enable",
        "conflict",
        "--data.max_images_per_prompt 1",
        "",
    ),
    (
        DPO,
        "--data.max_images_per_prompt 1 --data.apply_chat_template --data.image_root missing",
        "not-found",
        "--data.image_root missing",
        "",
    ),
    (
        RM,
        "--data.max_images_per_prompt 1 --data.apply_chat_template --data.image_hosts a.org https://b.org",
        "invalid-value",
        "--data.image_hosts a.org https://b.org",
        "",
    ),
    (
        SFT,
        "--data.output_key None --data.multiturn --model.pretrain_mode_enable",
        "conflict",
        "--data.multiturn",
        "",
    ),
    (SFT, "--data.output_key None", "missing-flag", "--data.output_key", "--data.apply_chat_template"),
    (KTO, "--data.output_key None", "missing-flag", "--data.output_key", "--data.apply_chat_template"),
    (KD, "--data.output_key None", "missing-flag", "--data.output_key", "--data.apply_chat_template"),
    (PRM, ["--data.placeholder_token", ""], "missing-flag", "--data.placeholder_token", ""),
    (PRM, "--data.reward_tokens +", "invalid-value", "--data.reward_tokens +", ""),
    (PRM, "--data.reward_tokens + - +", "invalid-value", "--data.reward_tokens + - +", ""),
    # models
    (KD, "--teacher.model_name_or_path ./t", "not-found", "--teacher.model_name_or_path ./t", ""),
    (KD, ["--teacher.model_name_or_path", ""], "missing-flag", "--teacher.model_name_or_path", ""),
    (DPO, "--ref.model_name_or_path ./r", "not-found", "--ref.model_name_or_path ./r", ""),
    (KTO, "--ref.model_name_or_path ./r", "not-found", "--ref.model_name_or_path ./r", ""),
    # batches
    (RM, "--train.batch_size 0", "invalid-value", "--train.batch_size 0", ""),
    (SFT, "--train.batch_size 36", "conflict", "--train.batch_size 36", "use 32 or 40"),
    (PPO, "--train.batch_size 100", "conflict", "--train.batch_size 100", "use 64 or 128"),
    (PPO, "--train.batch_size 4", "conflict", "--train.batch_size 4", "use 8"),
    (PPO, "--train.batch_size 2048", "conflict", "--train.batch_size 2048", "use 1024"),
    (PPO, "--rollout.batch_size 7 --train.batch_size 7", "conflict", "--train.batch_size 7", ""),
    (PPO, "--train.micro_batch_size 3", "conflict", "--train.batch_size 128 (default)", "use 16"),
    (PPO, "--rollout.max_new_tokens 2048", "conflict", "--rollout.max_new_tokens 2048", ""),
    # engines
    (
        PPO,
        "--ds.lora.rank 1024 --vllm.lora_sync adapter",
        "unsupported",
        "--vllm.lora_sync adapter",
        "ds.lora.rank",
    ),
    (
        PPO,
        f"{WITH_IMAGES} --ds.lora.rank 8 --vllm.lora_sync adapter",
        "unsupported",
        "--vllm.lora_sync adapter",
        "",
    ),
    (PPO, "--algo.router_replay", "conflict", "--algo.router_replay", "--vllm.enable_prefix_caching"),
    (
        PPO,
        "--algo.router_replay --vllm.enable_prefix_caching --vllm.pipeline_parallel_size 2",
        "unsupported",
        "--algo.router_replay",
        "--vllm.pipeline_parallel_size",
    ),
    (
        PPO,
        f"{WITH_IMAGES} --algo.router_replay --vllm.enable_prefix_caching",
        "unsupported",
        "--algo.router_replay",
        "data.max_images_per_prompt",
    ),
    (PPO, "--vllm.keep_cache", "conflict", "--vllm.keep_cache", "--train.partial_rollout_enable"),
    (PPO, "--vllm.speculative ngram", "invalid-value", "--vllm.speculative ngram", "ngram:3"),
    (
        PPO,
        "--vllm.speculative ngram:3 --algo.router_replay --vllm.enable_prefix_caching",
        "unsupported",
        "--vllm.speculative ngram:3",
        "--algo.router_replay",
    ),
    (
        PPO,
        "--vllm.speculative ngram:3 --rollout.engine transformers",
        "unsupported",
        "--vllm.speculative ngram:3",
        "rollout.engine transformers",
    ),
    (
        PPO,
        f"{WITH_IMAGES} --train.async_enable --train.partial_rollout_enable --vllm.keep_cache",
        "unsupported",
        "--vllm.keep_cache",
        "",
    ),
    # algorithm
    (
        PPO,
        "--algo.dynamic_filtering_enable",
        "conflict",
        "--algo.dynamic_filtering_enable",
        "--rollout.n_samples_per_prompt",
    ),
    (
        PPO,
        FILTER + "--reward.remote_url None --teacher.model_name_or_path org/teacher",
        "missing-flag",
        "--algo.dynamic_filtering_enable",
        "--reward.model_name_or_path",
    ),
    (PPO, "--reward.clip_range 5 -5", "invalid-value", "--reward.clip_range 5.0 -5.0", ""),
    (
        PPO,
        "--algo.advantage.is_correction_enable --algo.advantage.is_correction_threshold 5 5",
        "invalid-value",
        "--algo.advantage.is_correction_threshold 5.0 5.0",
        "",
    ),
    (
        PPO,
        f"{LEVEL} token {IS}threshold 1 2 3",
        "invalid-value",
        f"{IS}threshold 1.0 2.0 3.0",
        "",
    ),
    (PPO, f"{LEVEL} token {IS}enable", "conflict", f"{IS}enable", "is_correction_level"),
    (PPO, f"{LEVEL} seq {IS}mode clip", "conflict", f"{IS}mode clip", "a sequence"),
    (
        PPO,
        f"{LEVEL} token {IS}gating tv {IS}threshold 0.1 {IS}mode clip",
        "conflict",
        f"{IS}mode clip",
        "the divergence tv",
    ),
    (
        PPO,
        f"{LEVEL} token {IS}gating binary_kl",
        "conflict",
        f"{IS}threshold 0.5 5.0 (default)",
        "0.05",
    ),
    (
        PPO,
        f"--algo.advantage.proximal_policy rollout {LEVEL} token",
        "conflict",
        f"{LEVEL} token",
        "--algo.advantage.proximal_policy",
    ),
    (PPO, "--algo.kl.ref rollout", "conflict", "--algo.kl.ref rollout", "--algo.kl.use_loss"),
    (PPO, "--rollout.top_k 1", "conflict", "--rollout.top_k 1", "use 2"),
    (PPO, ["--rollout.stop", "User", ""], "invalid-value", "--rollout.stop User ''", ""),
    (PPO, "--reward.overlong_buffer_len 4096", "conflict", "--reward.overlong_buffer_len 4096.0", ""),
    (
        PPO,
        GSPO + "--actor.loss_aggregation token_mean",
        "conflict",
        "--actor.loss_aggregation token_mean",
        "",
    ),
    (
        PPO,
        GSPO + "--actor.loss_aggregation constant_length",
        "conflict",
        "--actor.loss_aggregation constant_length",
        "",
    ),
    (
        PPO,
        "--actor.policy_loss_type cispo --actor.dual_clip 3",
        "conflict",
        "--actor.dual_clip 3.0",
        "--actor.eps_clip_low_high",
    ),
    (
        PPO,
        "--algo.skip_old_log_probs --algo.kl.init_coef 0 --train.max_epochs 2",
        "conflict",
        "--algo.skip_old_log_probs",
        "",
    ),
    (
        PPO,
        "--eval.dataset org/e --eval.steps 1 --eval.temperature 0",
        "conflict",
        "--eval.temperature 0.0",
        "--eval.n_samples_per_prompt",
    ),
    (PPO, SKIP, "conflict", "--algo.skip_old_log_probs", "--algo.kl.use_loss"),
    (
        PPO,
        SKIP + "--algo.kl.init_coef 0 --teacher.model_name_or_path org/teacher",
        "conflict",
        "--algo.skip_old_log_probs",
        "teacher.model_name_or_path",
    ),
    (
        PPO,
        SKIP + "--algo.kl.use_loss --algo.kl.estimator k2 --algo.kl.target 0.1 --rollout.mask_truncated",
        "conflict",
        "--algo.skip_old_log_probs",
        "",
    ),
    (
        PPO,
        "--algo.advantage.proximal_policy rollout --algo.advantage.is_correction_enable",
        "conflict",
        "--algo.advantage.is_correction_enable",
        "--algo.advantage.proximal_policy",
    ),
    (PPO, "--algo.advantage.staleness_decay 0", "invalid-value", "--algo.advantage.staleness_decay 0", ""),
    (PPO, "--actor.lr_scheduler cosin", "invalid-value", "--actor.lr_scheduler cosin", "cosine"),
    (SFT, "--lr_scheduler zzz", "invalid-value", "--lr_scheduler zzz", ""),
    # placement
    (
        PPO,
        "--train.colocate_all --vllm.num_engines 2 --vllm.tensor_parallel_size 2",
        "conflict",
        "--vllm.num_engines 2",
        "use 4",
    ),
    (
        PPO,
        "--train.colocate_all --vllm.tensor_parallel_size 3",
        "conflict",
        "--vllm.num_engines",
        "vllm.tensor_parallel_size",
    ),
    (PPO, "--ref_num_nodes 0", "conflict", "--ref.num_nodes 0", "use 1"),
    # ranks that share rows
    (SFT, "--ring_attn_size 2", "conflict", "--ds.ring_attn_size 2", ""),
    (PPO, "--ds.ring_attn_size 4 --ref.num_gpus_per_node 2", "conflict", "--ds.ring_attn_size 4", ""),
    (
        PPO,
        "--ds.ring_attn_size 2 --data.max_images_per_prompt 1 --data.apply_chat_template",
        "unsupported",
        "--ds.ring_attn_size 2",
        "data.max_images_per_prompt",
    ),
    (
        PPO,
        "--ds.ring_attn_size 2 --ds.attn_implementation sdpa",
        "conflict",
        "--ds.attn_implementation sdpa",
        "ds.ring_attn_size",
    ),
    # ranks that share matrices
    (SFT, "--ds_tensor_parallel_size 2", "conflict", "--ds.tensor_parallel_size 2", ""),
    (
        PPO,
        "--ds.tensor_parallel_size 4 --ref.num_gpus_per_node 2",
        "conflict",
        "--ds.tensor_parallel_size 4",
        "",
    ),
    (
        PPO,
        "--ds.tensor_parallel_size 2 --ds.zero_stage 3",
        "conflict",
        "--ds.tensor_parallel_size 2",
        "--ds.zero_stage",
    ),
    (
        PPO,
        "--ds.tensor_parallel_size 2 --ds.zero_stage 0",
        "unsupported",
        "--ds.tensor_parallel_size 2",
        "--ds.zero_stage",
    ),
    (
        PPO,
        "--ds.tensor_parallel_size 2 --ds.lora.rank 8",
        "unsupported",
        "--ds.tensor_parallel_size 2",
        "ds.lora.rank",
    ),
    (
        PPO,
        "--ds.tensor_parallel_size 2 --ref.offload",
        "unsupported",
        "--ds.tensor_parallel_size 2",
        "ref.offload",
    ),
    (
        PPO,
        "--ds.tensor_parallel_size 2 --data.max_images_per_prompt 1 --data.apply_chat_template",
        "unsupported",
        "--ds.tensor_parallel_size 2",
        "data.max_images_per_prompt",
    ),
    (
        SFT,
        "--ds.tensor_parallel_size 2 --optim muon --max_norm 0",
        "unsupported",
        "--ds.tensor_parallel_size 2",
        "",
    ),
    (
        PPO,
        "--ds.tensor_parallel_size 2 --actor.num_gpus_per_node 2 --actor.optim muon --actor.max_norm 0",
        "unsupported",
        "--ds.tensor_parallel_size 2",
        "actor.optim",
    ),
    # precision and checkpoints
    (SFT, "--ds.adam_offload --ds.zero_stage 0", "conflict", "--ds.adam_offload", "--ds.zero_stage"),
    (
        SFT,
        "--ds.attn_implementation flash_atention_2",
        "invalid-value",
        "--ds.attn_implementation flash_atention_2",
        "flash_attention_2",
    ),
    (PPO, "--ds.attn_implementation paged", "invalid-value", "--ds.attn_implementation paged", ""),
    (
        PPO,
        "--data.pretrain_dataset org/a,org/b --data.pretrain_probs 1",
        "conflict",
        "--data.pretrain_probs 1",
        "",
    ),
    (SFT, "--logger.wandb.key ***", "invalid-value", "--logger.wandb.key", ""),
    # reward models
    (
        PPO,
        "--reward.model_name_or_path a/b,c/d --reward.model_weights 1",
        "conflict",
        "--reward.model_weights 1.0",
        "",
    ),
    # URLs
    (
        PPO,
        "--reward.remote_url http://a/b,http://:80/c",
        "invalid-value",
        "--reward.remote_url http://a/b,http://:80/c",
        "",
    ),
    (
        PPO,
        "--reward.remote_url http://<redacted>@a/b",
        "invalid-value",
        "--reward.remote_url http://<redacted>@a/b",
        "again",
    ),
    (
        SFT,
        "--data.dataset https://a/b.jsonl?token=<redacted>",
        "invalid-value",
        "--data.dataset https://a/b.jsonl?token=<redacted>",
        "again",
    ),
    (SFT, "--optim muon", "conflict", "--max_norm 1.0 (default)", "--max_norm"),
    (
        PPO,
        "--ds.zero_stage 3 --ds.zpg 3 --actor.num_gpus_per_node 4",
        "conflict",
        "--ds.zpg 3",
        "1, 2, 4",
    ),
    (PPO, "--actor.optim muon", "conflict", "--actor.max_norm 1.0 (default)", "--actor.max_norm"),
    (
        PPO,
        "--algo.advantage.estimator gae --critic.optim muon",
        "conflict",
        "--critic.max_norm 1.0 (default)",
        "--critic.max_norm",
    ),
    (PPO, "--actor.optim muon --actor.max_norm 0 --ds.adam_offload", "unsupported", "--ds.adam_offload", ""),
    (SFT, "--optim muon --max_norm 0 --ds.adam_offload", "unsupported", "--ds.adam_offload", ""),
    (DPO, "--model.dropout_enable", "unsupported", "--model.dropout_enable", ""),
    (KTO, "--model.dropout_enable", "unsupported", "--model.dropout_enable", ""),
    (
        PPO,
        "--train.colocate_all --vllm.num_engines 8 --ds.enable_sleep --ds.zero_stage 0",
        "conflict",
        "--ds.enable_sleep",
        "--ds.zero_stage",
    ),
    (
        PPO,
        "--train.colocate_all --vllm.num_engines 8 --ds.enable_sleep --ds.zero_stage 1 "
        "--ds.grad_accum_dtype fp32",
        "unsupported",
        "--ds.enable_sleep",
        "--ds.zero_stage",
    ),
    (SFT, "--ds.grad_accum_dtype fp32 --ds.zero_stage 0", "unsupported", "--ds.grad_accum_dtype fp32", ""),
    (SFT, "--ds.grad_accum_dtype fp16", "unsupported", "--ds.grad_accum_dtype fp16", ""),
    (
        PPO,
        "--reward.model_name_or_path a/b --reward.model_weights 0",
        "conflict",
        "--reward.model_weights 0.0",
        "",
    ),
    (PPO, "--train.agent_func_path agent.txt", "invalid-value", "--train.agent_func_path agent.txt", ""),
    (PPO, "--train.agent_func_path agent.py", "not-found", "--train.agent_func_path agent.py", ""),
    (PPO, "--train.agent_func_path agent.py:Mine", "not-found", "--train.agent_func_path agent.py:Mine", ""),
    (
        PPO,
        "--reward.remote_url rewar.py:judge",
        "not-found",
        "--reward.remote_url rewar.py:judge",
        "reward.py",
    ),
    (
        PPO,
        "--reward.remote_url reward.py:a,reward.py:b",
        "invalid-value",
        "--reward.remote_url reward.py:a,reward.py:b",
        "",
    ),
]


@pytest.mark.parametrize(
    ("command", "line", "code", "place", "told"), CHECKS, ids=[str(line) for _, line, *_ in CHECKS]
)
def test_a_mistake_is_refused_once_with_its_flag_and_remedy(command, line, code, place, told, say):
    config, lines = say(command, line)
    assert config is None
    assert problems_of(lines) == [(code, place)]
    assert told in "\n".join(lines)
    assert len(lines) <= 4


def test_flash_attention_of_a_package_gives_way_where_ranks_share_rows() -> None:
    def of(**flags) -> tuple[str, list[bool]]:
        ds = DeepSpeedConfig(**flags)
        return ds.attention, [p.fatal for p in sequence_parallel(ds, {"run": 2}, reads_images=False)]

    assert of(attn_implementation="flash_attention_2") == ("flash_attention_2", [])
    assert of(attn_implementation="flash_attention_2", ring_attn_size=2) == ("auto", [False])
    assert of(attn_implementation="eager", ring_attn_size=2) == ("eager", [True])


REMARKS = [
    (PPO, f"{CRITIC} --critic.muon.lr 1", "--critic.muon.lr 1.0", "--critic.optim"),
    (
        PPO,
        f"{CRITIC} --critic.min_lr_ratio 0.5 --critic.lr_scheduler cosine",
        "--critic.min_lr_ratio 0.5",
        "critic.lr_scheduler",
    ),
    (PPO, f"{CRITIC} --critic.lr_decay_ratio 0.5", "--critic.lr_decay_ratio 0.5", "--critic.lr_scheduler"),
    (
        PPO,
        "--ds.ring_attn_size 2 --ds.sequence_parallel_mode ulysses --ds.ring_attn_head_stride 2",
        "--ds.ring_attn_head_stride 2",
        "ulysses",
    ),
    (SFT, "--train.backend torch --ds.bucket_mb 100", "--ds.bucket_mb 100", ""),
    (
        PPO,
        "--vllm.sync_with_ray --vllm.sync_backend gloo",
        "--vllm.sync_backend gloo",
        "--vllm.sync_with_ray",
    ),
    (SFT, "--packing_samples", "--ds.packing_samples", ""),
    (PPO, "--packing_samples", "--ds.packing_samples", ""),
    (SERVE_RM, "--packing_samples", "--ds.packing_samples", ""),
    (DPO, "--data.dataloader_num_workers 4", "--data.dataloader_num_workers 4", ""),
    (PPO, "--data.dataloader_num_workers 4", "--data.dataloader_num_workers 4", ""),
    (RM, "--compute_fp32_loss", "--model.compute_fp32_loss_enable", ""),
    (
        PPO,
        ONE_GPU + "--train.colocate_all --ref_num_gpus_per_node 8",
        "--ref.num_gpus_per_node 8",
        "actor.num_gpus_per_node",
    ),
    (
        PPO,
        "--reward.model_name_or_path a/b --train.colocate_critic_reward --algo.advantage.estimator gae "
        "--reward.remote_url none --critic.num_gpus_per_node 4 --reward.num_gpus_per_node 2",
        "--reward.num_gpus_per_node 2",
        "critic.num_gpus_per_node",
    ),
    (
        PPO,
        "--eval.dataset org/e --eval.steps 1 --eval_temperature 0",
        "--eval.temperature 0.0",
        "--eval.n_samples_per_prompt",
    ),
    (SFT, "--ckpt.save_steps 5 --ckpt.disable_ds", "--ckpt.disable_ds", "--ckpt.save_hf"),
    (SFT, "--ckpt.save_steps 5 --ckpt.save_hf --ckpt.disable_ds --ckpt.async_save", "--ckpt.async_save", ""),
    (PPO, "--reward.remote_url reward.py --reward.normalize_enable", "--reward.normalize_enable", ""),
    (PPO, "--critic.adam.lr 1", "--critic.adam.lr 1.0", ""),
    (
        PPO,
        "--eval.dataset a/b --eval.steps 1 --ckpt.best_metric_key eval/default_response_length_mean",
        "--ckpt.best_metric_key eval/default_response_length_mean",
        "",
    ),
    (PPO, "--algo.kl.init_coef 0 --algo.kl.use_loss", "--algo.kl.use_loss", "algo.kl.init_coef"),
    (PPO, GROUP + "group_norm --algo.advantage.gamma 0.9", "--algo.advantage.gamma 0.9", ""),
    (PPO, "--reward.model_name_or_path a/b", "--reward.model_name_or_path a/b", "--reward.model_weights"),
    (
        PPO,
        FILTER + "--reward.remote_url none --reward.model_name_or_path a/b",
        "--algo.dynamic_filtering_range 0.0 1.0 (default)",
        "",
    ),
    (PPO, "--algo.kl.use_loss", "--algo.kl.estimator k1 (default)", ""),
    (PPO, "--algo.kl.estimator k3", "--algo.kl.estimator k3", ""),
    (PPO, "--eval.dataset org/e", "--eval.dataset org/e", "--eval.steps"),
    (SFT, ["--data.input_template", "{}\\n"], "--data.input_template {}\\n", ""),
    (PPO, ["--rollout.stop", "\\n\\n"], "--rollout.stop \\n\\n", ""),
    (
        PPO,
        "--train.dynamic_batch_enable --train.micro_batch_size 4",
        "--train.micro_batch_size 4",
        "--train.dynamic_batch_enable",
    ),
    (PPO, "--eval.temperature 1", "--eval.temperature 1.0", "--eval.dataset"),
    (SFT, "--ckpt.save_hf", "--ckpt.save_hf", "--ckpt.save_steps"),
    (SFT, "--ds.use_universal_ckpt", "--ds.use_universal_ckpt", "--ckpt.load_enable"),
    (SFT, "--logger.wandb.org me", "--logger.wandb.org me", "--logger.wandb.key"),
    (PPO, "--critic.num_nodes 2", "--critic.num_nodes 2", ""),
    (PPO, "--algo.kl.init_coef 0 --ref.offload", "--ref.offload", "algo.kl.init_coef"),
    (PPO, "--reward.offload", "--reward.offload", ""),
    (PPO, "--reward.remote_url http://a/b --reward.timeout 9", "--reward.timeout 9.0", ""),
    (PPO, "--train.agent_func_path reward.py", "--reward.remote_url reward.py", "--train.agent_func_path"),
    (PPO, "--reward.remote_timeout 9", "--reward.remote_timeout 9.0", ""),
    (PPO, "--reward.remote_url https://a:5000", "--reward.remote_url https://a:5000", ""),
    (PPO, "--ds.value_head_prefix x", "--ds.value_head_prefix x", ""),
    (PPO, "--vllm.enable_sleep", "--vllm.enable_sleep", ""),
    (PPO, "--vllm.lora_sync adapter", "--vllm.lora_sync adapter", "--ds.lora.rank"),
    (
        PPO,
        "--vllm.kv_cache_gb 1 --vllm.gpu_memory_utilization 0.5",
        "--vllm.gpu_memory_utilization 0.5",
        "--vllm.kv_cache_gb",
    ),
    (PPO, "--actor.policy_loss_type gspo", "--actor.policy_loss_type gspo", "--actor.eps_clip_low_high"),
    (PPO, SKIP + "--algo.kl.init_coef 0 --actor.eps_clip 0.3", "--actor.eps_clip 0.3", ""),
    (PPO, "--ckpt.best_metric_key x_pass1", "--ckpt.best_metric_key x_pass1", "--eval.dataset"),
    (
        PPO,
        "--rollout.vllm_generate_batch_size 2048",
        "--rollout.vllm_generate_batch_size 2048",
        "--algo.advantage.is_correction_level token",
    ),
    (PPO, "--algo.advantage.estimator rloo", "--rollout.n_samples_per_prompt 1 (default)", ""),
    # nothing reads it
    (PPO, "--ptx_coef 0.1", "--actor.ptx_coef 0.1", "--data.pretrain_dataset"),
    (PPO, "--max_steps 3", "--train.max_turns 3", "--train.agent_func_path"),
    (PPO, "--rollout.max_kept_tokens 8", "--rollout.max_kept_tokens 8", "--rollout.top_p"),
    (
        PPO,
        "--data.pretrain_dataset org/texts --actor.ptx_coef 0",
        "--data.pretrain_dataset org/texts",
        "--actor.ptx_coef",
    ),
    (SFT, "--ds.lora.alpha 32", "--ds.lora.alpha 32", "--ds.lora.rank"),
    (SFT, "--ds.ring_attn_head_stride 2", "--ds.ring_attn_head_stride 2", "ds.ring_attn_size"),
    (SFT, "--ds.sequence_parallel_mode ulysses", "--ds.sequence_parallel_mode ulysses", "ds.ring_attn_size"),
    (SFT, "--ds.zpg 8", "--ds.zpg 8", ""),
    (SFT, "--ds.bucket_mb 8 --ds.zero_stage 0", "--ds.bucket_mb 8", ""),
    (SFT, "--ds.activation_offload", "--ds.activation_offload", "--model.gradient_checkpointing_enable"),
    (PPO, "--ds.activation_offload", "--ds.activation_offload", "--actor.gradient_checkpointing_enable"),
    (SFT, "--train.max_tokens_per_gpu 8", "--train.max_tokens_per_gpu 8", "--train.dynamic_batch_enable"),
    (PPO, "--rollout.max_tokens_per_gpu 8", "--rollout.max_tokens_per_gpu 8", "--train.dynamic_batch_enable"),
    (
        SFT,
        "--data.tokenizer_chat_template {{x}}",
        "--data.tokenizer_chat_template {{x}}",
        "--data.apply_chat_template",
    ),
    (
        PPO,
        "--data.input_template {} --data.apply_chat_template",
        "--data.input_template {}",
        "--data.apply_chat_template",
    ),
    (SFT, "--muon.lr 1", "--muon.lr 1.0", "--optim"),
    (SFT, "--optim muon --max_norm 0 --muon.ns_steps 4", "--muon.ns_steps 4", ""),
    (SFT, "--data.no_cache_enable --data.cache_dir x", "--data.cache_dir x", "--data.cache_enable"),
    (RM, "--model.loss_type logexp --model.margin_loss_enable", "--model.margin_loss_enable", ""),
    (
        DPO,
        "--model.ipo_enable --model.label_smoothing 0.1",
        "--model.label_smoothing 0.1",
        "--model.ipo_enable",
    ),
    (KD, "--model.kd_coef 0 --model.kd_temperature 2", "--model.kd_temperature 2.0", ""),
    (SFT, "--model.pretrain_mode_enable", "--data.output_key out", "--model.pretrain_mode_enable"),
    (PPO, "--teacher.kd_coef 2", "--teacher.kd_coef 2.0", "--teacher.model_name_or_path"),
    (SFT, "--min_lr_ratio 0.5 --lr_scheduler cosine", "--min_lr_ratio 0.5", ""),
    (SFT, "--lr_decay_ratio 0.5", "--lr_decay_ratio 0.5", "--lr_scheduler"),
    (PPO, "--actor.lr_decay_ratio 0.5", "--actor.lr_decay_ratio 0.5", "--actor.lr_scheduler"),
    (
        SFT,
        "--model.gradient_checkpointing_reentrant",
        "--model.gradient_checkpointing_reentrant",
        "--model.gradient_checkpointing_enable",
    ),
    (SFT, "--ds.enable_sleep", "--ds.enable_sleep", ""),
    (PPO, "--algo.advantage.lambd 0.9", "--algo.advantage.lambd 0.9", ""),
    (PPO, GROUP + "rloo --algo.advantage.no_std_norm", "--algo.advantage.no_std_norm", ""),
    (PPO, f"{IS}mode clip", f"{IS}mode clip", LEVEL),
    (PPO, f"{IS}threshold 0.5 2", f"{IS}threshold 0.5 2.0", LEVEL),
    (PPO, "--algo.kl.unbiased_gradient", "--algo.kl.unbiased_gradient", "--algo.kl.use_loss"),
    (PPO, f"{SAMPLER} --algo.kl.target 0.1", "--algo.kl.target 0.1", "--algo.kl.ref rollout"),
    (PPO, f"{SAMPLER} --ref.offload", "--ref.offload", "--algo.kl.ref rollout"),
    (
        PPO,
        "--algo.advantage.is_correction_type icepop",
        "--algo.advantage.is_correction_type icepop",
        "--algo.advantage.is_correction_enable",
    ),
    (
        PPO,
        "--algo.advantage.is_correction_enable --algo.advantage.is_correction_sequence_threshold 0.99 1.01",
        "--algo.advantage.is_correction_sequence_threshold 0.99 1.01",
        "--algo.advantage.is_correction_type",
    ),
    (
        PPO,
        "--algo.advantage.staleness_decay 0.9",
        "--algo.advantage.staleness_decay 0.9",
        "--train.async_enable",
    ),
    (
        PPO,
        "--train.async_enable --train.async_queue_size 0 --algo.advantage.max_token_staleness 2",
        "--algo.advantage.max_token_staleness 2",
        "--train.async_enable",
    ),
    (
        PPO,
        "--train.async_enable --algo.advantage.max_token_staleness 1",
        "--algo.advantage.max_token_staleness 1",
        "",
    ),
    (
        PPO,
        "--train.async_enable --algo.advantage.proximal_policy interpolated",
        "--algo.advantage.proximal_policy interpolated",
        "--train.async_queue_size",
    ),
    (PPO, "--algo.kl.horizon 5", "--algo.kl.horizon 5", "--algo.kl.target"),
    (PPO, "--algo.kl.target 0.1 --algo.kl.horizon 1023", "--algo.kl.horizon 1023", "use 1024"),
    (
        PPO,
        "--algo.dynamic_filtering_range 0 0.9",
        "--algo.dynamic_filtering_range 0.0 0.9",
        "--algo.dynamic_filtering_enable",
    ),
    (
        PPO,
        "--algo.dynamic_filtering_max_batches 3",
        "--algo.dynamic_filtering_max_batches 3",
        "--algo.dynamic_filtering_enable",
    ),
    (
        PPO,
        "--actor.eps_clip 0.1 --actor.eps_clip_low_high 0.2 0.3",
        "--actor.eps_clip 0.1",
        "--actor.eps_clip_low_high",
    ),
    (PPO, "--actor.muon.lr 1", "--actor.muon.lr 1.0", "--actor.optim"),
    (PPO, "--actor.optim muon --actor.max_norm 0 --actor.muon.ns_steps 4", "--actor.muon.ns_steps 4", ""),
    (PPO, "--actor.min_lr_ratio 0.5 --actor.lr_scheduler linear", "--actor.min_lr_ratio 0.5", ""),
    (
        PPO,
        "--actor.gradient_checkpointing_reentrant",
        "--actor.gradient_checkpointing_reentrant",
        "--actor.gradient_checkpointing_enable",
    ),
    (
        PPO,
        "--reward.overlong_penalty_factor 2",
        "--reward.overlong_penalty_factor 2.0",
        "--reward.overlong_buffer_len",
    ),
    (PPO, "--train.async_queue_size 2", "--train.async_queue_size 2", "--train.async_enable"),
    (
        PPO,
        "--train.async_enable --train.async_queue_size 2",
        "--train.async_queue_size 2",
        "--algo.advantage.is_correction_level token",
    ),
    (
        PPO,
        "--train.async_enable --train.colocate_all --vllm.num_engines 2 --vllm.tensor_parallel_size 2",
        "--train.async_enable",
        "train.colocate_all",
    ),
    (PPO, "--train.ema_beta 0.5", "--train.ema_beta 0.5", "--train.enable_ema"),
    (PPO, "--ds.lora.rank 4 --ref.offload", "--ref.offload", ""),
    (PPO, "--data.image_key .", "--data.image_key .", "--data.max_images_per_prompt"),
    (PPO, "--data.image_root .", "--data.image_root .", "--data.max_images_per_prompt"),
    (RM, "--data.image_key .", "--data.image_key .", "--data.max_images_per_prompt"),
    (RM, "--data.image_root .", "--data.image_root .", "--data.max_images_per_prompt"),
    (DPO, "--data.image_key .", "--data.image_key .", "--data.max_images_per_prompt"),
    (DPO, "--data.image_root .", "--data.image_root .", "--data.max_images_per_prompt"),
    (KTO, "--model.freeze_visual_encoder", "--model.freeze_visual_encoder", "data.max_images_per_prompt"),
    (RM, "--data.image_hosts a.org", "--data.image_hosts a.org", "--data.max_images_per_prompt"),
    (PPO, "--actor.freeze_visual_encoder", "--actor.freeze_visual_encoder", "--data.max_images_per_prompt"),
    (PPO, "--critic_learning_rate 1", "--critic.adam.lr 1.0", ""),
    (
        PPO,
        "--use_icepop",
        "--algo.advantage.is_correction_type icepop",
        "--algo.advantage.is_correction_enable",
    ),
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
    template = "--data.input_template"
    for more in (f"{template} None", f"{template} Q:{{}}", "--data.apply_chat_template", ""):
        parse(command, [*base.split(), *more.split()])
        assert (f"note: {template}: " in capsys.readouterr().err) == (more == "")


@pytest.mark.parametrize(
    ("command", "line", "place", "told"), REMARKS, ids=[str(line) for _, line, *_ in REMARKS]
)
def test_remarks_do_not_stop_a_run(command, line, place, told, say):
    config, lines = say(command, line)
    assert config is not None
    (remark,) = [text for text in lines if " is now --" not in text]
    assert remark.startswith(f"note: {place}: ") and told in remark


@pytest.mark.parametrize(
    "line",
    [
        SKIP + "--algo.kl.init_coef 0",
        SKIP + "--algo.kl.use_loss --algo.kl.estimator k3",
        SKIP + "--algo.kl.init_coef 0 --actor.policy_loss_type gspo",
        GSPO + "--actor.loss_aggregation sample_mean",
        GSPO + "--algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop",
        "--actor.policy_loss_type cispo --actor.loss_aggregation constant_length",
        f"{LEVEL} seq {IS}gating binary_kl {IS}threshold 0.05",
        f"{LEVEL} token {IS}mode clip {IS}threshold 2",
        SAMPLER,
        "--algo.kl.use_loss --algo.kl.unbiased_gradient",
        GSPO + "--algo.advantage.proximal_policy rollout",
        "--train.async_enable --train.async_queue_size 4 --algo.advantage.is_correction_enable "
        "--algo.advantage.proximal_policy interpolated --algo.advantage.staleness_decay 0.9 "
        "--algo.advantage.max_token_staleness 3",
    ],
)
def test_policy_losses_without_a_word(line, say):
    config, lines = say(PPO, line)
    assert config is not None and not lines


@pytest.mark.parametrize(
    ("command", "flags", "flag"),
    [
        (PPO, "--actor.adam.lr 5e-4", None),  # the demo
        (PPO, "--actor.adam.lr 1e-2", "--actor.adam.lr 0.01"),
        (PPO, "--actor.adam.lr 1e-2 --ds.lora.rank 8", None),
        (PPO, "--actor.adam.lr 1e-1 --ds.lora.rank 8", "--actor.adam.lr 0.1"),
        (PPO, "--algo.advantage.estimator gae --critic.adam.lr 0.1", "--critic.adam.lr 0.1"),
        (SFT, "--adam.lr 4e-3", None),  # the pictures of examples/
        (SFT, "--adam.lr 0.5", "--adam.lr 0.5"),
        (SFT, "--optim muon --max_norm 0", None),
        (SFT, "--optim muon --max_norm 0 --muon.lr 0.5", "--muon.lr 0.5"),
    ],
)
def test_a_learning_rate_that_destroys_models_of_any_size(command, flags, flag, say):
    _, lines = say(command, flags)
    told = [line for line in lines if "too large for tiny models too" in line]
    assert [line.partition(": is ")[0] for line in told] == ([f"note: {flag}"] if flag else [])


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
    _, lines = say(command, "")
    assert problems_of(lines) == [("missing-package", "--train.backend deepspeed (default)")]
    assert 'pip install "openrlhf[deepspeed]"' in lines[0] and "--train.backend torch" in lines[0]
    assert say(command, "--train.backend torch --ds.zero_stage 2")[0] is not None


def test_rl_without_vllm(say, installed):
    installed.remove("vllm")
    _, lines = say(PPO, "")
    assert problems_of(lines) == [("missing-package", "--rollout.engine vllm (default)")]
    install = 'pip install "openrlhf[gpu]" ("openrlhf[cpu]" without a GPU)'
    assert install in lines[0] and "--rollout.engine transformers" in lines[0]
    assert say(PPO, "--rollout.engine transformers")[0] is not None


@pytest.mark.parametrize("command", [SFT, PPO])
def test_packages_are_looked_for_before_anything_starts(command, say, monkeypatch, installed):
    installed.add("flash_attn")
    _, lines = say(command, "--flash_attn --ds.param_dtype fp32 --use_wandb True")
    assert problems_of(lines) == [
        ("conflict", "--ds.attn_implementation flash_attention_2"),
        ("missing-package", "--logger.wandb.key"),
    ]
    told = "\n".join(lines)
    assert 'pip install "openrlhf[wandb]"' in told and "WANDB_MODE=disabled" in told
    monkeypatch.setenv("WANDB_MODE", "disabled")
    config, lines = say(command, "--logger.wandb.key True")
    assert not config.logger.wandb.is_used
    assert any(line.startswith("note: --logger.wandb.key: ") and "WANDB_MODE" in line for line in lines)
    monkeypatch.delenv("WANDB_MODE")
    installed.add("wandb")
    assert say(command, "--flash_attn --use_wandb True")[0] is not None
    installed.remove("flash_attn")
    _, lines = say(command, "--flash_attn --ds.param_dtype fp32")
    assert any("package flash_attn" in line and line.startswith("note: ") for line in lines)
    assert not problems_of(lines)


@pytest.mark.parametrize("command", [SFT, PPO, SERVE_RM, BATCH_INFERENCE, CHAT])
def test_kernels_of_the_hub(command, say, installed):
    line = "--ds.attn_implementation kernels-community/flash-attn2"
    _, lines = say(command, line)
    assert problems_of(lines) == [("missing-package", line)] and '"openrlhf[kernels]"' in lines[0]
    installed.add("kernels")
    assert say(command, line)[0] is not None


@pytest.mark.parametrize("command", [SFT, RM, PPO])
def test_modelscope(command, say, installed):
    _, lines = say(command, "--use_ms")
    assert problems_of(lines) == [("missing-package", "--use_ms")] and '"openrlhf[modelscope]"' in lines[0]
    installed.add("modelscope")
    assert say(command, "--use_ms")[0].use_ms


@pytest.mark.parametrize("command", [SFT, RM, PPO])
def test_liger_kernels(command, say, installed):
    _, lines = say(command, "--use_liger_kernel")
    assert problems_of(lines) == [("missing-package", "--ds.use_liger_kernel")]
    assert any('"openrlhf[liger]"' in line for line in lines)
    installed.add("liger_kernel")
    assert say(command, "--use_liger_kernel")[0].ds.use_liger_kernel
    found = problems_of(say(command, "--use_liger_kernel --ds.experts_implementation grouped_mm")[1])
    assert found == [("conflict", "--ds.experts_implementation grouped_mm")]


@pytest.mark.parametrize("optim", [OptimConfig(), OptimConfig(optim="muon", lr_scheduler="linear")])
def test_the_optimizer_of_a_section_has_the_flags_without_effect_of_any_other(optim):
    of_actor = [keys.replace("actor.", "") for keys, _ in optimizer_unread(optim, "actor.")]
    assert of_actor == [keys for keys, _ in optimizer_unread(optim)]


CHECKED = {
    checks: ("image_rows", "precision", "common_unread", "template_unread"),
    supervised_checks: ("_unread", "_pretraining_unread", "_pretraining", "_balance", "_no_dropout"),
    ppo_checks: (
        *(
            "_sources",
            "_policy",
            "_skipped_log_probs",
            "_sampling",
            "_asynchronous",
            "_unread",
            "_unread_by_algorithm",
        ),
        *("_kl", "_policy_loss"),
    ),
}
"""Functions of the checks, by module, whose texts are all tested."""


def texts_in(module, names):
    """Returns the constant texts in functions that are more than names of flags."""
    for function in ast.parse(inspect.getsource(module)).body:
        if isinstance(function, ast.FunctionDef) and function.name in names:
            nodes = [node for statement in function.body for node in ast.walk(statement)]
            texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
            words = [text.split() for text in texts if isinstance(text, str)]
            words = words[1:] if ast.get_docstring(function) else words
            yield from (" ".join(w) for w in words if len(w) > 3 and not all("." in word for word in w))


@pytest.mark.processes
def test_every_reason_is_tested(say):
    """Each text of these checks is told about a command line above."""
    told = " ".join(line for command, words, *_ in CHECKS + REMARKS for line in say(command, words)[1])
    texts = [text for module, names in CHECKED.items() for text in texts_in(module, names)]
    assert len(texts) > 90
    told = " ".join(told.split())
    assert not [text for text in texts if text not in told]


def test_ranks_come_from_the_launcher(say, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    _, lines = say(SFT, "--train.batch_size 128")
    assert problems_of(lines) == [("conflict", "--train.batch_size 128")] and "120 or 144" in lines[0]


def test_a_small_batch_is_one_row(say):
    assert say(SFT, "--train.batch_size 4")[0].train.batch_size == 4


def test_a_reward_file_may_have_a_comma_in_its_path(say, tmp_path):
    (folder := tmp_path / "a, b").mkdir()
    (folder / "reward.py").touch()
    config, _ = say(PPO, ["--reward.remote_url", f"{folder}/reward.py"])
    assert (config.reward.function, config.reward.servers) == (f"{folder}/reward.py", ())
    servers = say(PPO, ["--reward.remote_url", "http://a/x, http://b/y"])[0].reward.servers
    assert servers == ("http://a/x", "http://b/y")
    _, lines = say(PPO, ["--reward.remote_url", f"{tmp_path}/c, d/reward.py"])
    assert any("commas separate sources" in line for line in lines)


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
    ("line", "limit"),
    [
        ("", None),
        ("--rollout.top_p 0.9", None),  # training normalises over the recorded supports
        ("--rollout.max_kept_tokens 0", None),  # nothing is truncated
        ("--rollout.top_p 0.9 --rollout.max_kept_tokens 0", math.inf),
        ("--rollout.top_k 20 --rollout.max_kept_tokens 0", math.inf),
        ("--rollout.top_p 0.9 --rollout.max_kept_tokens 0 --algo.max_mismatch 0.2", 0.2),
    ],
)
def test_samples_of_an_unrecorded_truncated_distribution_have_no_default_limit(line, limit, say):
    assert say(PPO, line)[0].largest_mismatch == limit


@pytest.mark.parametrize(
    ("line", "remarked"), [("", True), ("--algo.advantage.proximal_policy rollout", False)]
)
def test_the_clip_is_read_in_a_step_of_one_update_where_it_counts_from_the_sampler(line, remarked, say):
    _, problems = say(PPO, f"{ONE_UPDATE} --algo.kl.init_coef 0 --actor.eps_clip 0.3 {line}")
    assert any(text.startswith("note: --actor.eps_clip 0.3: ") for text in problems) is remarked


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
    assert [any("algo.advantage.is_correction_level" in text for text in texts) for texts in remarks] == [
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


@pytest.mark.processes
@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        ([], 0, "openrlhf sft "),
        (["--help"], 0, "openrlhf ppo "),
        (["trian_sft"], 2, "did you mean `openrlhf sft`?"),
        (["dmo"], 2, "did you mean `openrlhf demo`?"),
        (["grpo"], 2, "did you mean `openrlhf ppo`?"),
        (["trian"], 2, "the commands are sft, rm, prm, dpo, "),
        (["train"], 2, "the commands are sft, rm, prm, dpo, "),
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
    assert lines == [f"note: --{key} 1 overrides the variable {variable}, 4"]
    assert [asked("--config run.yaml"), asked(f"--{key} 4")] == [5, 4]
    monkeypatch.setenv(variable, wrong)
    config, lines = say(PPO, "")
    assert config is None and f"error: the variable {variable}: --{key} {wrong}: " in "\n".join(lines)


def test_a_queue_by_a_variable_is_compared_at_a_resume(say, monkeypatch):
    origin = lambda: Origin.of("ppo", say(PPO, "--train.async_enable")[0], {})
    without = origin()
    monkeypatch.setenv("OPENRLHF_ASYNC_QUEUE_SIZE", "4")
    assert compare(origin(), without).differences == ["--train.async_queue_size was 4, is 1"]


WHOLE = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({}, None),
        (WHOLE, None),
        (WHOLE | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "0"}, None),
        ({"MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}, None),
        ({"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT must be set"),
        ({"WORLD_SIZE": "2"}, "RANK, MASTER_ADDR, MASTER_PORT must be set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT must be set"),
        ({"LOCAL_RANK": "1"}, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT must be set"),
        (WHOLE | {"RANK": "4"}, "RANK must be below WORLD_SIZE"),
        (WHOLE | {"RANK": "-1"}, "RANK must be a number"),
        (WHOLE | {"WORLD_SIZE": ""}, "WORLD_SIZE must be a number"),
        (WHOLE | {"WORLD_SIZE": "0"}, "RANK must be below WORLD_SIZE"),
        (
            WHOLE | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"},
            None,
        ),  # not set by DeepSpeed's launcher
        (WHOLE | {"MASTER_PORT": "99999"}, "MASTER_PORT must be 1 to 65535"),
    ],
)
def test_variables_of_a_launcher_are_whole_or_refused(monkeypatch, variables, reason):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if reason is None:
        check_launcher()
        return
    shown = " ".join(f"{name}={variables[name]}" for name in LAUNCHER if name in variables)
    with refusals.refused(ErrorCode.INVALID_VALUE, value=shown) as refusal:
        check_launcher()
    assert refusal.value.text.startswith(reason)
    unset = " ".join("-u " + word.partition("=")[0] for word in shown.split())
    assert f"env {unset} COMMAND" in refusal.value.text


def test_reinforcement_learning_is_started_by_one_process(monkeypatch):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")  # as for the first of several pods
    check_launcher(alone=True)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
        with refusals.refused(ErrorCode.INVALID_VALUE) as refusal:
            check_launcher(alone=True)
        assert "starts all other processes itself" in refusal.value.text
        monkeypatch.setenv(name, "0")
