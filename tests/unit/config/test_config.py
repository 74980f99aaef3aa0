"""Checks between flags: what is refused, what is remarked, and what follows from several flags."""

import ast
import csv
import dataclasses
import inspect
import math
import shlex
import time
from pathlib import Path

import pytest
from command_lines import problems_of

from openrlhf.config import checks, ppo_checks, supervised_checks
from openrlhf.config.checks import optimizer_ignored, sequence_parallel
from openrlhf.config.commands import COMMANDS, KD, KTO, PPO, RM, SFT
from openrlhf.config.fields import flag_values, to_words
from openrlhf.config.parse import parse
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.sections import DeepSpeedConfig, OptimConfig, is_due
from openrlhf.config.supervised import DPOConfig
from openrlhf.mesh import Mesh

# ---- what is wrong between flags

GSPO = "--actor.policy_loss_type gspo --actor.eps_clip_low_high 3e-4 4e-4 "
SKIP = "--algo.skip_old_log_probs --train.batch_size 1024 "
IS = "--algo.advantage.is_correction_"
LEVEL = f"{IS}level"
CENTERED, ONE_STEP = "--algo.advantage.score_centering_top_k 32", "--train.force_on_policy"
SAMPLER = "--algo.kl.ref rollout --algo.kl.use_loss --algo.kl.estimator k3"
FILTER = "--rollout.n_samples_per_prompt 8 --algo.dynamic_filtering_enable "


def rows_of(table):
    """Yields the command, the words of the command line and the other columns of the rows of a table of this
    folder; its paths are those of this repository."""
    here = Path(__file__).parent
    text = (here / table).read_text().replace("<repository>", str(here.parents[2]))
    commands = {command.name: command for command in COMMANDS}
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE, restval=""):
        yield commands[row.pop("command")], shlex.split(row.pop("flags")), *row.values()


REFUSALS, REMARKS = list(rows_of("refusals.tsv")), list(rows_of("remarks.tsv"))


@pytest.mark.parametrize(
    ("command", "line", "code", "place", "told"), REFUSALS, ids=[shlex.join(row[1]) for row in REFUSALS]
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


def test_a_text_is_one_prompt_in_every_command():
    """A text that SFT learned to answer is the text that RL and inference ask, also if nobody names a
    template."""
    templates = {c.name: flag_values(c.config_type()).get("data.input_template") for c in COMMANDS}
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
    ("command", "line", "place", "told"), REMARKS, ids=[shlex.join(row[1]) for row in REMARKS]
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


@pytest.mark.parametrize(("flags", "told"), [("--rollout.max_new_tokens 64", True), ("", False)])
def test_the_length_penalty_of_an_episode_with_the_limit_of_an_answer_is_told(flags, told, say):
    line = f"--train.agent_func_path agents:Guess --reward.overlong_buffer_len 8 {flags}"
    _, lines = say(PPO, line)
    assert any("max_new_tokens 64 is the limit of one answer" in text for text in lines) == told


def test_what_is_said_twice_over_two_models_is_no_remark(say):
    """`--max_norm` sets actor and critic; without a critic this is nobody's mistake."""
    _, lines = say(PPO, "--max_norm 2 --l2 0.1 --adam_betas 0.8 0.9")
    assert all(" is now --" in line for line in lines) and len(lines) == 3


def test_setting_a_default_is_no_mistake(say):
    line = "--critic.adam.lr 9e-6 --algo.advantage.gamma 1.0 --algo.advantage.lambd 1 --ema_beta 0.992"
    config, _ = say(PPO, line)
    assert config is not None


@pytest.mark.parametrize("optim", [OptimConfig(), OptimConfig(optim="muon", lr_scheduler="linear")])
def test_the_optimizer_of_a_section_has_the_flags_without_effect_of_any_other(optim):
    of_actor = [keys.replace("actor.", "") for keys, _ in optimizer_ignored(optim, "actor.")]
    assert of_actor == [keys for keys, _ in optimizer_ignored(optim)]


CHECKED = {
    checks: ("image_rows", "precision", "common_ignored", "template_ignored"),
    supervised_checks: ("_ignored", "_pretraining_ignored", "_pretraining", "_balance", "_no_dropout"),
    ppo_checks: (
        *("_sources", "_tasks", "_quotas", "_policy", "_skipped_log_probs", "_sampling", "_asynchronous"),
        *("_correction", "_ignored", "_ignored_by_algorithm", "_kl", "_policy_loss"),
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
    told = " ".join(line for command, words, *_ in REFUSALS + REMARKS for line in say(command, words)[1])
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
    (tmp_path / "x,y").mkdir()
    config, lines = say(SFT, f"--model.model_name_or_path {tmp_path}/x,y")
    assert config is not None, lines


# ---- what follows from several flags


@pytest.mark.parametrize(
    ("line", "column"),
    [
        ("", None),
        ("--model.margin_loss_enable", "margin"),
        ("--model.margin_loss_enable --model.loss_type logexp", None),
    ],
)
def test_the_column_of_margins_belongs_to_those_that_are_read(line, column, say):
    config, _ = say(RM, line)
    assert config.columns["--model.margin_loss_enable"] == column


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


@pytest.mark.parametrize("place", ["", "--train.colocate_all"])
def test_an_evaluation_alone_has_the_policy_and_what_gives_rewards(say, place):
    """The critic, which hosts the reward models of a run that learns, the reference and the teacher are left
    out, with their GPUs."""
    words = f"--algo.advantage.estimator gae --algo.kl.init_coef 0.1 --reward.model_name_or_path rm {place} "
    words += "--reward.model_weights 1 --train.colocate_critic_reward"
    learning, _ = say(PPO, words)
    alone, _ = say(PPO, f"{words} --eval.eval_only --eval.dataset org/x")
    assert learning.placements.keys() == {"actor", "critic", "ref", "reward"}
    assert alone.placements.keys() == {"actor", "reward"}
    host = "actor" if place else None
    assert alone.placements["reward"].colocated_with == host
    assert learning.placements["reward"].colocated_with == (host or "critic")


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
    more = ("", "--algo.advantage.proximal_policy rollout", f"{CENTERED} {ONE_STEP}")
    remarks = [say(PPO, f"{line} {flags}")[1] for flags in more]
    assert [any("algo.advantage.is_correction_level" in text for text in texts) for texts in remarks] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    "line",
    [
        "",
        f"{LEVEL} token",
        f"{LEVEL} token {IS}mode clip {IS}threshold 2",
        f"{IS}enable {IS}type icepop",
        "--actor.policy_loss_type cispo",
        "--rollout.top_p 0.9",
        "--algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.ref rollout",
        "--rollout.temperature 0.7",
    ],
)
def test_what_scores_can_be_centered_with(line, say):
    config, problems = say(PPO, f"{ONE_STEP} {CENTERED} {line}")
    assert config is not None, problems
    assert config.algo.advantage.score_centering_top_k == 32
    assert not any("score_centering" in text for text in problems)


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
