"""Command lines: forms of values, names that are no flags, variables of a launcher."""

import dataclasses
import random
import string

import pytest
import refusals
import yaml
from command_lines import problems_of, refused, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openrlhf.checkpoint.run_fingerprint import RunFingerprint, compare
from openrlhf.config.checks import LAUNCHER, check_launcher
from openrlhf.config.commands import COMMANDS, PPO, SFT
from openrlhf.config.fields import flag_values, list_flags
from openrlhf.config.old_flags import OTHER_NAMES
from openrlhf.config.parse import parse, suggest, to_yaml
from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import ErrorCode


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
    names = {key: {key} for key in list_flags(command.config_type)}
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
    flags = set().union(*(list_flags(command.config_type) for command in COMMANDS))
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
                [f"--{key}" for key in list_flags(PPOConfig)] + [f"--{old}" for old in PPO.old_flags]
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
    asked = lambda line: flag_values(say(PPO, f"--train.async_enable {line}")[0])[key]
    default = asked("")
    monkeypatch.setenv(variable, "")
    assert asked("") == default
    monkeypatch.setenv(variable, "4")
    config, lines = say(PPO, "--train.async_enable")
    assert flag_values(config)[key] == 4 and f"note: the variable {variable} sets --{key} 4" in lines
    assert yaml.safe_load(to_yaml(config))[key.partition(".")[0]][key.partition(".")[2]] == 4
    config, lines = say(PPO, f"--train.async_enable --{key} 1")
    assert flag_values(config)[key] == 1
    assert lines == [f"note: --{key} 1 overrides the variable {variable}, 4"]
    assert [asked("--config run.yaml"), asked(f"--{key} 4")] == [5, 4]
    monkeypatch.setenv(variable, wrong)
    config, lines = say(PPO, "")
    assert config is None and f"error: the variable {variable}: --{key} {wrong}: " in "\n".join(lines)


def test_a_queue_by_a_variable_is_compared_at_a_resume(say, monkeypatch):
    origin = lambda: RunFingerprint.of("ppo", say(PPO, "--train.async_enable")[0], {})
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
        (WHOLE | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, None),  # not set by DeepSpeed's launcher
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
        with refusals.refused(ErrorCode.INVALID_VALUE, told="starts all other processes itself"):
            check_launcher(alone=True)
        monkeypatch.setenv(name, "0")
