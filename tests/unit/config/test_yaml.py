"""YAML files: who wins, what is wrong in them, and configurations that are printed as YAML."""

import dataclasses
import shlex

import pytest
from command_lines import refused
from refusals import printed

from openrlhf.config.commands import COMMANDS, PPO, SFT
from openrlhf.config.fields import flag_values, list_flags
from openrlhf.config.parse import parse, to_yaml
from openrlhf.config.ppo import PPOConfig, PromptDataConfig


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


def test_an_empty_value_is_no_text_of_four_letters(say, tmp_path):
    (tmp_path / "a.yaml").write_text("ckpt:\n  output_dir:\n")
    (found,) = printed("\n".join(say(SFT, "--config a.yaml")[1]))
    assert (found.place, found.text.partition(": ")[0]) == ("a.yaml:2", "ckpt.output_dir None")


def test_a_text_in_a_list_keeps_its_commas(say, tmp_path):
    (tmp_path / "a.yaml").write_text('rollout: {stop: ["a, b"]}\n')
    config, _ = say(PPO, "--config a.yaml")
    assert config.rollout.stop == ("a, b",)
    (tmp_path / "b.yaml").write_text(to_yaml(config))
    assert say(PPO, "--config b.yaml")[0].rollout.stop == ("a, b",)


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
    for key, field in list_flags(command.config_type).items():
        argv += [f"--{key}", *another_value(field, flag_values(config)[key])]
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
    again, first = (
        flag_values(parse(bare, ["--config", str(tmp_path / "out.yaml")]).config),
        flag_values(config),
    )
    for key in list_flags(command.config_type):
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
        "JSON": ['{"name": {"inner": [1, "1", null, true]}}'],
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
