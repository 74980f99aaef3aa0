"""Every script of examples/scripts passes flags that the commands understand. The scripts run for real, with
stand-ins for programs that only record how they were called."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import pytest
from ray.scripts.scripts import cli

from openrlhf.cli import main
from openrlhf.config.commands import COMMANDS
from openrlhf.config.fields import flag_values
from openrlhf.config.parse import Invocation, parse
from openrlhf.tasks.prepare_pictures import prepare_pictures

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(script for script in (EXAMPLES / "scripts").glob("*.sh") if not script.is_symlink())
"""Scripts of the examples; links, which are other names of a script, are left out."""

DOCUMENTED = {
    *("agent_func_gem_multiturn.py", "agent_func_nemogym_executor.py"),
    "agent_func_openai_server_executor.py",
    *("ckpt_ds_zero_to_universal.sh", "docker_run.sh", "nvidia_docker_install.sh", "reward_func.py"),
    *("math_reward_func.py", "serve_remote_rm.sh", "train_conditional.sh", "train_dapo_ray_hybrid_engine.sh"),
    *("train_dpo_llama.sh", "train_dpo_ring_llama.sh", "train_iterative_dpo.sh", "train_kto_llama.sh"),
    *("train_knowledge_distillation.sh", "train_llama_slurm.sh", "train_nonrl_slurm.sh"),
    *("train_ppo_llama_ray.sh", "train_ppo_llama_ray_70b.sh", "train_ppo_llama_ray_hybrid_engine.sh"),
    *("train_ppo_llama_ray_slurm.sh", "train_ppo_llama_with_reward_fn.sh", "train_ppo_ray_hybrid_engine.sh"),
    *("train_ppo_ray_slurm.sh", "train_ppo_with_reward_fn.sh", "train_prm_mistral.sh"),
    *("train_prorlv2_math_hybrid_engine.sh", "train_reinforce_baseline_hybrid_engine.sh"),
    *("train_reinforce_baseline_ray_agent_async.sh", "train_reinforce_llama_ray.sh"),
    *("train_rejection_sampling_llama.sh", "train_rm.sh", "train_rm_llama.sh", "train_sft.sh"),
    *("train_sft_llama.sh", "train_sft_llama_tensor_parallelism.sh", "train_sft_mixtral_lora.sh"),
    *("train_sft_moe.sh", "train_vlm_math_hybrid_engine.sh"),
}
"""Files of examples/ that the instructions of any version link to."""

PROGRAMS = ("python", "deepspeed", "torchrun", "openrlhf", "ray", "srun", "scontrol", "docker")
PROGRAMS += ("nvidia-smi", "sudo", "apt-cache")
STUB = """#!/bin/bash
printf '%s\\0' "$(($# + 1))" "${0##*/}" "$@" >> "$RECORD"
case ${0##*/} in
    scontrol) printf 'node-%s\\n' 0 1 ;;
    srun) while [[ $1 == -* ]]; do shift; done; exec "$@" ;;
    ray) while [[ $1 != -- ]]; do shift; done; shift; exec "$@" ;;
esac
"""
SETTINGS = {
    "AGENT": "agent.py",
    "CKPT": "ckpt",
    "ITERATIONS": "2",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "node-[0-1]",
    "SLURM_NNODES": "2",
}
"""Variables that the scripts expect, and those that SLURM sets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One program call of a script."""

    words: list[str]

    @property
    def name(self) -> str | None:
        """Command of `openrlhf` that the call stands for. None: another program, or one that starts another
        program."""
        if self.words[0] not in ("python", "deepspeed", "torchrun", "openrlhf"):
            return None
        if self.words[0] == "openrlhf":
            return self.words[1]
        modules = {f"openrlhf.cli.{at.rpartition('.')[2]}": name for name, (at, _) in main.COMMANDS.items()}
        module = next((word for word in self.words if word.startswith("openrlhf.cli.")), None)
        return None if module is None else modules.get(module, module.rpartition(".")[2])

    @property
    def flags(self) -> list[str]:
        start = next(i for i, word in enumerate(self.words) if word.startswith("openrlhf"))
        return self.words[start + (2 if self.words[start] == "openrlhf" else 1) :]

    @property
    def ranks(self) -> int:
        return {"deepspeed": 8, "torchrun": 16}.get(self.words[0], 1)


Run = Callable[..., list[Call]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Returns run("train_sft.sh", *flags, **variables), which runs a script and returns its calls. All runs
    of a test share one folder, which keeps what earlier ones made."""
    stubs, folder = tmp_path / "stubs", tmp_path / "folder"
    stubs.mkdir()
    for name in PROGRAMS:
        (stubs / name).write_text(STUB)
        (stubs / name).chmod(0o755)
    folder.mkdir()
    (folder / "agent.py").write_text("class AgentExecutor: ...")
    (folder / "ckpt" / "global_step5").mkdir(parents=True)
    (folder / "ckpt" / "latest").write_text("global_step5")
    (folder / "examples").symlink_to(EXAMPLES)
    monkeypatch.chdir(folder)

    def run(script: str, *flags: str, **variables: str) -> list[Call]:
        record = tmp_path / "record"
        record.write_bytes(b"")
        environ = SETTINGS | {"PATH": f"{stubs}:/usr/bin:/bin", "RECORD": str(record), "HOME": str(folder)}
        command = ["bash", f"examples/scripts/{script}", *flags]
        done = subprocess.run(command, env=environ | variables, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        words = iter(record.read_text().split("\0")[:-1])
        return [Call(words=[next(words) for _ in range(int(count))]) for count in words]

    return run


def understood(call: Call, capsys: pytest.CaptureFixture[str]) -> Invocation:
    """Parses the flags of a call and checks that each exists by today's name with a value of its type."""
    command = next(command for command in COMMANDS if command.name == call.name)
    try:
        invocation = parse(replace(command, problems=lambda config, explicit: []), call.flags)
    except SystemExit:
        pytest.fail(capsys.readouterr().err)
    assert capsys.readouterr().err == ""
    return invocation


def make_outputs(config) -> None:
    values = flag_values(config)
    if output := values.get("output_path"):
        Path(output).write_text("")
    if folder := values.get("ckpt.output_dir"):
        Path(folder).mkdir(parents=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_nothing_is_wrong(script, run, monkeypatch, capsys):
    check(run(script.name), monkeypatch, capsys)


def check(calls: Sequence[Call], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert calls
    known = {command.name: command for command in COMMANDS}
    for call in calls:
        if "openrlhf.tasks.prepare_pictures" in call.words:
            prepare_pictures(call.words[-1], num_pictures=2, num_eval=1)
        if call.name is None:
            continue
        monkeypatch.setenv("WORLD_SIZE", str(call.ranks))
        invocation = understood(call, capsys)
        assert not known[call.name].problems(invocation.config, invocation.explicit)
        make_outputs(invocation.config)


def names_of_today() -> dict[str, list[str]]:
    """Reads the table of README.md: maps each older name to the words of today's command."""
    section = (EXAMPLES / "README.md").read_text().partition("## Names of older versions\n")[2]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return {
        name: shlex.split(re.findall("`(.+?)`", new)[0])
        for olds, new in rows
        for name in re.findall("`(.+?)`", olds)
    }


def test_names_of_older_versions_are_told() -> None:
    told, there = names_of_today(), {path.name for path in EXAMPLES.rglob("*")}
    assert not DOCUMENTED - told.keys() - there
    assert not told.keys() & there


@pytest.mark.parametrize("name", names_of_today())
def test_an_older_name_maps_to_a_script_of_today(name, run, monkeypatch, capsys):
    words = names_of_today()[name]
    variables = dict(word.split("=", 1) for word in takewhile(re.compile("[A-Z]+=").match, words))
    script, *flags = words[len(variables) :]
    if script.endswith(".py"):
        assert (EXAMPLES / "python" / script).exists()
    else:
        check(run(script, *flags, **variables), monkeypatch, capsys)


def values(calls: Sequence[Call], capsys: pytest.CaptureFixture[str]) -> list[dict]:
    return [
        {"command": call.name} | flag_values(understood(call, capsys).config)
        for call in calls
        if call.name is not None
    ]


def test_iterative_dpo_goes_on_from_its_last_model(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    steps = values(run("train_iterative_dpo.sh"), capsys)
    assert [(step["command"], step.get("task")) for step in steps] == 2 * [
        *(("batch_inference", "generate_vllm"), ("batch_inference", "rm"), ("dpo", None))
    ]
    for i, policy in enumerate(("OpenRLHF/Llama-3-8b-sft-mixture", "ckpt/iterative_dpo/iter0/model")):
        generate, score, train = steps[3 * i : 3 * i + 3]
        assert generate["model.model_name_or_path"] == train["model.model_name_or_path"] == policy
        assert train["ref.model_name_or_path"] == policy
        assert (generate["iter"], generate["rollout.batch_size"]) == (i, 10240)
        assert generate["rollout.n_samples_per_prompt"] == 8
        assert generate["output_path"] == score["data.dataset"]
        assert score["post_processor"] == "iter_dpo"
        assert score["output_path"] == train["data.dataset"]
        assert train["ckpt.output_dir"] == f"ckpt/iterative_dpo/iter{i}/model"


def test_rejection_sampling_goes_on_from_its_last_model(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    steps = values(run("train_rejection_sampling_llama.sh"), capsys)
    for i, policy in enumerate(("OpenRLHF/Llama-3-8b-sft-mixture", "ckpt/rejection_sampling/iter0/model")):
        generate, score, train = steps[3 * i : 3 * i + 3]
        assert generate["model.model_name_or_path"] == train["model.model_name_or_path"] == policy
        assert (generate["iter"], generate["rollout.n_samples_per_prompt"]) == (i, 4)
        assert generate["output_path"] == score["data.dataset"]
        assert score["post_processor"] == "rs"
        assert (train["command"], train["data.dataset"]) == ("sft", score["output_path"])
    assert len(steps) == 6


def test_conditional_sft_asks_for_the_scores_that_it_learned(run, capsys):
    score, train, generate = values(run("train_conditional.sh"), capsys)
    assert (score["post_processor"], score["reward.normalize_enable"]) == ("csft", True)
    assert score["output_path"] == train["data.dataset"]
    assert generate["model.model_name_or_path"] == train["ckpt.output_dir"]
    learned = score["reward.template"].replace("{input}", "PROMPT").replace("{reward}", "2.00")
    assert generate["csft.enable"] and learned == f"PROMPT {generate['csft.prompt']} "


@pytest.mark.parametrize("script", ["train_iterative_dpo.sh", "train_rejection_sampling_llama.sh"])
def test_finished_iterations_are_not_repeated(script: str, run: Run) -> None:
    assert len(run(script)) == 6
    assert run(script) == []


def test_a_supervised_recipe_runs_on_all_nodes_of_a_slurm_job(run: Run) -> None:
    (train,) = (call for call in run("train_nonrl_slurm.sh") if call.name == "sft")
    options = [word for word in train.words if word.startswith(("--nnodes", "--nproc", "--rdzv"))]
    assert train.words[0] == "torchrun" and options == [
        *("--nnodes=2", "--nproc-per-node=8", "--rdzv-id=7", "--rdzv-backend=c10d"),
        "--rdzv-endpoint=node-0:29500",
    ]


def test_ray_knows_what_the_slurm_script_asks_of_it(run: Run) -> None:
    (ray,) = (call for call in run("train_ppo_ray_slurm.sh") if call.words[0] == "ray")
    _, name, *words = ray.words
    asked = cli.commands[name].make_context(name, list(words)).params
    assert (asked["address"], asked["min_nodes"]) == ("node-0:6379", 2)
    of_start = takewhile(lambda word: word != "env", asked["ray_args_and_entrypoint"])
    assert cli.commands["start"].make_context("start", [*of_start]).params["num_gpus"] == 8


def test_an_rl_recipe_takes_all_nodes_of_a_slurm_job(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (rl,) = values(run("train_ppo_ray_slurm.sh"), capsys)
    assert (rl["actor.num_nodes"], rl["actor.num_gpus_per_node"], rl["vllm.num_engines"]) == (2, 8, 8)


@pytest.mark.parametrize("models", [["ckpt"], ["ckpt/_critic", "ckpt/_actor"]])
def test_a_converted_checkpoint_is_found(run: Run, models: list[str]) -> None:
    own = ("origin.json", "random_state_0.pt", "moving_average_0.safetensors")
    for model in models:
        Path(model, "global_step5").mkdir(parents=True, exist_ok=True)
        for name in ("mp_rank_00_model_states.pt", "manifest.json", *own):
            Path(model, "global_step5", name).write_text(name)
    Path(models[-1], "latest").write_text("global_step5")
    calls = run("ckpt_ds_zero_to_universal.sh")
    for model, convert in zip(models, calls, strict=True):
        options = dict(zip(convert.words[4::2], convert.words[5::2], strict=True))
        assert convert.words[3] == "--inject_missing_state"
        assert options["--input_folder"] == f"{model}/global_step5"
        assert options["--output_folder"] == f"{model}/global_step5_universal"
        assert Path(model, "latest_universal").read_text().strip() == "global_step5_universal"
        assert {path.name for path in Path(f"{model}/global_step5_universal").iterdir()} == set(own)


def test_every_script_is_in_the_table() -> None:
    table = (EXAMPLES / "README.md").read_text()
    assert not [script.name for script in SCRIPTS if f"[{script.name}](scripts/{script.name})" not in table]
    assert all(os.access(script, os.X_OK) for script in SCRIPTS)


def test_the_mathematical_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "python")
    sys.modules.pop("math_reward_func", None)
    from math_reward_func import reward_func

    answers = [r"so \boxed{0.5}", "it is 3", r"\boxed{x}", ""]
    result = reward_func([f"Q: {answer}" for answer in answers], ["Q: "] * 4, [r"\frac{1}{2}", "3", "y", "1"])
    assert result["rewards"] == result["scores"] == [1.0, 0.0, 0.0, 0.0]
    assert result["extra_logs"] == {"boxed": [1.0, 0.0, 1.0, 0.0]}
