"""Commands of OpenRLHF 0.9 to 0.11.2 and of Molt 0.2.1: each flag of their scripts parses, or is refused with
a line of its own."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from openrlhf.config.commands import PPO, SFT

TOOL = runpy.run_path(str(Path(__file__).parents[3] / "tools" / "generations.py"))
PAGE = TOOL["PAGE"].read_text()
REPRESENTATIVE = [("openrlhf", "0.9.0"), ("openrlhf", "0.11.2"), ("molt-rl", "0.2.1")]
OTHERS = [release for release in TOOL["RELEASES"] if release not in REPRESENTATIVE]


@pytest.fixture(scope="module")
def flags_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, found = tmp_path_factory.mktemp("wheels"), {}

    def flags_of(release: tuple[str, str]) -> Any:
        if release not in found:
            try:
                found[release] = TOOL["flags_of"](TOOL["download"](*release, folder))
            except TOOL["Unreachable"] as error:
                pytest.skip(f"the package index has no {' '.join(release)}: {str(error)[-200:]}")
        return found[release]

    return flags_of


@pytest.mark.processes
@pytest.mark.parametrize(
    "release", [*REPRESENTATIVE, *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)], ids="-".join
)
def test_every_flag_of_a_published_script_is_known(release: tuple[str, str], flags_of: Any) -> None:
    for script, flags in flags_of(release).items():
        command = TOOL["BY_NAME"][TOOL["SCRIPTS"][script]]
        assert len(flags) > 4, script
        for flag in flags:
            for words in flag.examples:
                problem = TOOL["problem"](command, flag.name, words)
                spelled = [flag.name, " ".join([flag.name, *words])]
                removed = [command.old_flags[s].removed for s in spelled if s in command.old_flags]
                assert not problem or any(text and text in problem for text in removed), problem


@pytest.mark.processes
@pytest.mark.slow
def test_the_page_has_the_flags_of_the_published_scripts(flags_of: Any) -> None:
    found = {release: flags_of(release) for release in TOOL["RELEASES"]}
    assert TOOL["page"](found, PAGE.partition(TOOL["MARK"])[0]) == PAGE


ROWS = re.findall(r"^\| `--(\S+(?: \S+)?)` \| (.*?) \| (.*) \|$", PAGE.partition(TOOL["MARK"])[2], re.M)


def test_each_row_of_the_page_says_what_the_code_does() -> None:
    assert len(ROWS) > 60
    for name, where, text in ROWS:
        for command in re.findall(r"(?:^|; )(\w+):", where):
            assert TOOL["here"](TOOL["BY_NAME"][command], name) == text, name


def test_each_dotted_spelling_is_a_row_of_the_page() -> None:
    named, missing = {name for name, *_ in ROWS}, set()
    for command in TOOL["BY_NAME"].values():
        missing |= {spelled for spelled in command.old_flags if "." in spelled.split()[0]} - named
    unlisted = {"te", "none", "off", "selective"}  # values that the published scripts do not list
    assert {spelled.partition(" ")[2] for spelled in missing} <= unlisted


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        ("--algo.advantage.estimator grpo", {"algo.advantage.estimator": "group_norm"}),
        ("--algo.advantage.is_correction_level geo", {"algo.advantage.is_correction_level": "seq"}),
        ("--actor.loss_mode ppo", {"actor.policy_loss_type": "ppo"}),
        (
            "--actor.loss_mode gspo",
            {"actor.policy_loss_type": "gspo", "actor.loss_aggregation": "token_mean"},
        ),
        (
            "--actor.loss_mode gspo --actor.loss_agg_mode seq-mean-token-mean",
            {"actor.policy_loss_type": "gspo", "actor.loss_aggregation": "sample_mean"},
        ),
        ("--fsdp.offload optimizer --fsdp.cp_size 2", {"ds.adam_offload": True, "ds.ring_attn_size": 2}),
        ("--fsdp.attn_implementation te", {"ds.attn_implementation": "auto"}),
        ("--fsdp.attn_implementation sdpa", {"ds.attn_implementation": "sdpa"}),
        ("--fsdp.offload none", {"ds.adam_offload": False}),
        ("--actor.gradient_checkpoint", {"actor.gradient_checkpointing_enable": True}),
        ("--actor.gradient_checkpoint off", {"actor.gradient_checkpointing_enable": False}),
        (
            "--actor.lora_dim 8 --actor.lora_target_modules *.q_proj *.v_proj",
            {"ds.lora.rank": 8, "ds.lora.target_modules": ("q_proj", "v_proj")},
        ),
        ("--vllm.mtp_num_speculative_tokens 2", {"vllm.speculative": "mtp:2"}),
        ("--vllm.mtp_num_speculative_tokens 0", {"vllm.speculative": None}),
        ("--train.routing_replay", {"algo.router_replay": True, "vllm.enable_prefix_caching": True}),
        ("--train.force_sync_mode", {"train.async_enable": False}),
    ],
)
def test_flags_and_values_of_molt(line: str, flags: dict[str, Any]) -> None:
    alone = TOOL["replace"](PPO, problems=lambda config, explicit: [], placed=lambda config, explicit: [])
    found = TOOL["parse"](alone, line.split())
    assert found.explicit.keys() == flags.keys()
    for key, value in flags.items():
        *sections, name = key.split(".")
        section = found.config
        for each in sections:
            section = getattr(section, each)
        assert getattr(section, name) == value


@pytest.mark.parametrize(
    ("command", "line", "remedy"),
    [
        (PPO, "--vllm.dtype bfloat16", "engines compute in --ds.param_dtype"),
        (PPO, "--actor.loss_mode cispo", "use --actor.policy_loss_type cispo"),
        (PPO, "--algo.advantage.no_whiten", "use --algo.advantage.no_std_norm"),
        (SFT, "--fsdp.offload full", "use --ds.adam_offload"),
    ],
)
def test_what_has_no_equal_is_refused_with_a_remedy(command: Any, line: str, remedy: str, say: Any) -> None:
    config, lines = say(command, line)
    errors = [text for text in lines if text.startswith("error: ")]
    assert config is None and len(errors) == 1 and remedy in errors[0]
