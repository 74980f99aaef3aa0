"""Changes of a run that may resume from a checkpoint, and changes that may not."""

import json
import re
from dataclasses import replace

import pytest
from refusals import changes

from openrlhf.checkpoint.fork import ORDER, SHAPES
from openrlhf.checkpoint.run_fingerprint import RunFingerprint, compare
from openrlhf.config.command import SECRETS
from openrlhf.config.commands import COMMANDS
from openrlhf.config.fields import find_change, flag_values, list_flags, with_values
from openrlhf.config.resume import Change
from openrlhf.config.supervised import SFTConfig

TYPES = {c.name: c.config_type for c in COMMANDS if "ckpt.load_enable" in list_flags(c.config_type)}
FLAGS = [(name, key) for name, type_ in TYPES.items() for key in list_flags(type_) if key not in SECRETS]


def build_run_fingerprint(command: str, contents: dict[str, str] | None = None, **flags) -> RunFingerprint:
    values = {key.replace("__", "."): value for key, value in flags.items()}
    return RunFingerprint.of(command, with_values(TYPES[command](), values), contents or {})


def test_the_commands():
    assert set(TYPES) == {"sft", "rm", "prm", "dpo", "kto", "kd", "ppo"}


@pytest.mark.parametrize("command", TYPES)
def test_a_flag_has_a_remark_if_it_may_change_with_one(command):
    for key in list_flags(TYPES[command]):
        mark = find_change(TYPES[command], key)
        assert bool(mark.remark) == (mark.change is Change.REMARKED), key


def test_forks_name_flags_that_exist():
    assert {key for _, key in FLAGS} >= (SHAPES | ORDER) - {"tasks"}  # a table of flags


@pytest.mark.parametrize(
    ("command", "key", "expected"),
    [
        ("sft", "adam.lr", Change.REFUSED),
        ("ppo", "actor.adam.lr", Change.REFUSED),
        ("ppo", "rollout.n_samples_per_prompt", Change.REFUSED),
        ("ppo", "train.max_epochs", Change.REFUSED),  # passes over each step's samples
        ("sft", "train.max_epochs", Change.REMARKED),  # the length of the run
        ("ppo", "train.num_episodes", Change.REMARKED),
        ("ppo", "actor.model_name_or_path", Change.CONTENT),
        ("kto", "data.dataset", Change.CONTENT),
        ("ppo", "vllm.gpu_memory_utilization", Change.FREE),
        ("rm", "ckpt.save_steps", Change.FREE),
        ("sft", "a.flag_of_tomorrow", Change.REFUSED),
    ],
)
def test_a_flag_has_its_class_of_change(command, key, expected):
    assert find_change(TYPES[command], key).change is expected


@pytest.mark.parametrize("command", TYPES)
def test_another_value_of_each_flag(command):
    now = build_run_fingerprint(command)
    for key in (key for name, key in FLAGS if name == command):
        before = replace(now, flags={**now.flags, key: "another"})
        named = [f"--{key}"]
        by_class = {
            Change.FREE: ([], []),
            Change.REMARKED: ([], named),
            Change.CONTENT: (named, []),
            Change.REFUSED: (named, []),
        }
        found = [changes("\n".join(texts)) for texts in compare(before, now)]
        assert all(change.before == "another" for of_kind in found for change in of_kind)
        names = tuple([change.name for change in of_kind] for of_kind in found)
        assert names == by_class[find_change(TYPES[command], key).change], key


def test_what_a_flag_names_is_compared_where_it_is_known():
    names = {"model__model_name_or_path": "a", "data__dataset": "b.jsonl"}
    before = build_run_fingerprint(
        "sft", {"--model.model_name_or_path": "x", "--data.dataset": "2 samples"}, **names
    )
    moved = {key: f"/elsewhere/{name}" for key, name in names.items()}
    assert compare(before, build_run_fingerprint("sft", dict(before.contents), **moved)) == ([], [])
    trained = {"--model.model_name_or_path": "y", "--data.dataset": "2 samples"}
    differences, remarks = compare(before, build_run_fingerprint("sft", trained, **names))
    assert changes(*differences) == [("--model.model_name_or_path", "a (x)", "a (y)")] and not remarks


def test_all_differences_are_in_one_list():
    before = build_run_fingerprint("sft", {"ranks": "2"}, adam__lr=1e-3, data__max_len=10)
    now = build_run_fingerprint("sft", {"ranks": "1"}, adam__betas=(0.5, 0.6), train__micro_batch_size=1)
    assert changes("\n".join(compare(before, now).differences)) == [
        ("--adam.lr", "0.001", "5e-06"),
        ("--adam.betas", "0.9 0.95", "0.5 0.6"),
        ("--data.max_len", "10", "2048"),
        ("ranks", "2", "1"),
    ]


def test_a_checkpoint_of_another_command_is_refused():
    differences, remarks = compare(build_run_fingerprint("dpo"), build_run_fingerprint("sft"))
    (difference,) = differences
    assert "`openrlhf dpo`" in difference and "`openrlhf sft`" in difference and remarks == []


def test_what_only_one_version_knows_is_remarked_upon():
    now = build_run_fingerprint("sft")
    flags = {key: value for key, value in now.flags.items() if key not in ("adam.lr", "ckpt.max_num")}
    differences, (remark,) = compare(replace(now, flags={**flags, "gone": 1}), now)
    assert differences == [] and re.findall(r"--\S+\b", remark) == ["--adam.lr", "--gone"]


def test_no_secret_is_kept():
    values = {"logger.wandb.key": "MARKER", "eval.dataset": "https://me:MARKER@host/x"}
    origin = RunFingerprint.of("sft", with_values(SFTConfig(), values), {})
    assert "MARKER" not in json.dumps(origin.as_dict())
    assert origin.flags.keys() == flag_values(SFTConfig()).keys() - {"logger.wandb.key", "api_key"}


def test_a_changed_reward_or_agent_is_remarked_upon():
    """The location and name of its file do not matter."""
    name = "--train.agent_func_path"
    before = build_run_fingerprint("ppo", {name: "checksum a"}, train__agent_func_path="agent.py")
    moved = build_run_fingerprint(
        "ppo", {name: "checksum a"}, train__agent_func_path="/x/agent.py:AgentExecutor"
    )
    assert compare(before, moved) == ([], [])
    changed = build_run_fingerprint("ppo", {name: "checksum b"}, train__agent_func_path="agent.py")
    differences, (remark,) = compare(before, changed)
    assert differences == []
    assert changes(remark) == [(name, "agent.py (checksum a)", "agent.py (checksum b)")]
