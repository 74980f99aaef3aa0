"""Container files and the jobs of clusters agree with pyproject.toml and with the commands."""

import re
import shlex
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from openrlhf.cluster.layout import compute_layout
from openrlhf.config.commands import PPO
from openrlhf.config.parse import parse
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised_commands import DPO, RM, SFT
from openrlhf.stopping import EXIT_STOPPED

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCKERFILES = sorted((ROOT / "dockerfile").iterdir())
MANIFEST = ROOT / "examples" / "kubernetes" / "train_ppo_ray.yaml"
JOB = yaml.safe_load(MANIFEST.read_text())
CLUSTER = JOB["spec"]["rayClusterSpec"]
PODS = {
    "head": CLUSTER["headGroupSpec"]["template"]["spec"],
    "worker": CLUSTER["workerGroupSpecs"][0]["template"]["spec"],
}


def image_of(dockerfile: Path) -> str:
    (image,) = re.findall(r"^ARG IMAGE=(\S+)$", dockerfile.read_text(), re.MULTILINE)
    return image


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_has_the_versions_of_the_project(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    assert "\nFROM ${IMAGE}\n" in text and "\nCOPY . .\n" in text
    assert "==" not in text  # versions are pinned in pyproject.toml only
    extras = re.findall(r"pip install .*\.\[([\w,]+)\]", text)
    assert extras or "\nRUN make env\n" in text
    assert set(",".join(extras).split(",")) - {""} <= PROJECT["optional-dependencies"].keys()
    if version := re.fullmatch(r"python:([\d.]+)-slim", image_of(dockerfile)):
        assert version[1] in SpecifierSet(PROJECT["requires-python"])


def test_no_image_has_what_was_made_on_this_machine() -> None:
    """No image copies what was made on this machine, above all not its Python environment."""
    left_out = (ROOT / ".dockerignore").read_text().splitlines()
    assert {".git/", ".venv/", "ckpt/", "demo/"} <= {*left_out}


def test_scripts_run_the_image_that_is_built_upon() -> None:
    image = image_of(ROOT / "dockerfile" / "Dockerfile")
    for script in ("docker_run.sh", "nvidia_docker_install.sh"):
        assert f"${{IMAGE:-{image}}}" in (ROOT / "examples" / "scripts" / script).read_text()


def test_the_manifest_is_a_job_of_a_cluster_of_rays_version() -> None:
    assert (JOB["apiVersion"], JOB["kind"]) == ("ray.io/v1", "RayJob")
    assert JOB["spec"].keys() == {"entrypoint", "shutdownAfterJobFinishes", "rayClusterSpec"}
    assert CLUSTER.keys() == {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
    (ray,) = [r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "ray"]
    assert CLUSTER["rayVersion"] in ray.specifier
    # without a token, whoever reaches the cluster could run anything on it
    assert CLUSTER["authOptions"] == {"mode": "token"}
    (group,) = CLUSTER["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]


@pytest.mark.parametrize("pod", PODS.values(), ids=PODS)
def test_a_pod_has_shared_memory_and_the_shared_folder(pod: dict) -> None:
    (container,) = pod["containers"]
    assert container["image"] == "openrlhf"
    assert "docker build -t openrlhf -f" in (ROOT / "dockerfile" / "Dockerfile").read_text()
    assert {"cpu", "memory"} <= container["resources"]["limits"].keys()
    at = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[at["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert "claimName" in volumes[at["/shared"]]["persistentVolumeClaim"]


def config_of(command: str, folder: Path) -> PPOConfig:
    """Returns the configuration of a job's command, with `folder` in the place of /shared."""
    (folder / "run.yaml").write_text(
        "actor: {model_name_or_path: org/model}\ndata: {prompt_dataset: org/rows}\n"
        "reward: {remote_url: 'http://127.0.0.1:5000/get_reward'}\nalgo: {advantage: {estimator: rloo}}\n"
    )
    program, flag, module, *flags = shlex.split(command.replace("/shared", str(folder)))
    assert (program, flag, module) == ("python", "-m", "openrlhf.cli.train_ppo_ray")
    return parse(PPO, flags).config


def test_its_command_takes_exactly_the_gpus_that_it_asks_for(tmp_path: Path) -> None:
    config = config_of(JOB["spec"]["entrypoint"], tmp_path)
    (group,) = CLUSTER["workerGroupSpecs"]
    gpus = PODS["worker"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    layout = compute_layout(config, [{"CPU": 16}, *[{"CPU": 64, "GPU": gpus}] * group["replicas"]])
    assert sum(layout.bundles) == gpus * group["replicas"]
    for path in (config.ckpt.output_dir, config.ckpt.folder, config.run_dir):
        assert Path(path).is_relative_to(tmp_path)  # the shared folder, which all nodes see


def resumes_on_the_shared_folder(config: PPOConfig, folder: Path) -> bool:
    places = (config.ckpt.output_dir, config.ckpt.folder, config.run_dir)
    return config.ckpt.load_enable and all(Path(path).is_relative_to(folder) for path in places)


SKYPILOT = ROOT / "examples" / "skypilot" / "train_ppo_ray.yaml"


def test_a_task_of_skypilot_runs_the_command(tmp_path: Path) -> None:
    task = yaml.safe_load(SKYPILOT.read_text())
    command = task["run"].partition('RAY_ADDRESS="$HEAD:6379"')[2].replace("\\\n", " ")
    assert resumes_on_the_shared_folder(config_of(command, tmp_path), tmp_path)
    assert task["resources"]["image_id"] == f"docker:{image_of(ROOT / 'dockerfile' / 'Dockerfile')}"
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [EXIT_STOPPED]
    assert task["volumes"].keys() == {"/shared"} and task["secrets"].keys() == {"RAY_AUTH_TOKEN"}
    extras = re.findall(r'pip install "\.\[([\w,]+)\]"', task["setup"])
    assert set(extras[0].split(",")) <= PROJECT["optional-dependencies"].keys()


@pytest.mark.slow
def test_skypilot_itself_reads_the_task(tmp_path: Path) -> None:
    """In an environment of its own, because it needs other versions of packages."""
    venv.create(tmp_path / "sky", with_pip=True)
    python = tmp_path / "sky" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "skypilot>=0.14,<0.15"], check=True, timeout=900)
    code = "import sky, sys; task = sky.Task.from_yaml(sys.argv[1]); print(task.num_nodes, task.name)"
    environment = {"HOME": str(tmp_path), "PATH": str(python.parent), "RAY_AUTH_TOKEN": "a"}
    run = subprocess.run(
        [python, "-c", code, SKYPILOT],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert run.stdout.split()[-2:] == ["2", "openrlhf"]


@pytest.mark.processes
def test_the_job_of_hugging_face_is_one_that_its_client_submits(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "clusters.md").read_text()
    (command,) = re.findall(r"^hf jobs run .*", page, re.MULTILINE)
    own, _, run = command.partition(" me/openrlhf python")
    assert resumes_on_the_shared_folder(config_of(f"python{run}", tmp_path), tmp_path)
    words = [*shlex.split(own)[1:], "--dry-run", "--namespace", "me", "me/openrlhf", "true"]
    said = subprocess.run(
        [Path(sys.executable).with_name("hf"), *words],
        env={"HOME": str(tmp_path), "HF_TOKEN": "a", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    assert "h200x8" in said and "hf://buckets/me/openrlhf" in said


GALLERY = {
    "sft": r"""--max_len 2048 --dataset Open-Orca/OpenOrca --input_key question --output_key response
        --input_template 'User: {} Assistant: ' --train_batch_size 256 --micro_train_batch_size 8
        --max_samples 500000 --pretrain meta-llama/Llama-3.2-1B --save_path /checkpoints/llama3_2-1b-sft
        --save_steps -1 --logging_steps 1 --eval_steps -1 --zero_stage 2 --max_epochs 1 --bf16
        --attn_implementation flash_attention_2 --packing_samples --learning_rate 5e-6
        --gradient_checkpointing --use_wandb TOKEN --wandb_project openrlhf --wandb_run_name sft-training""",
    "dpo": r"""--save_path /checkpoints/llama3-8b-dpo --save_steps -1 --logging_steps 1 --eval_steps -1
        --train_batch_size 256 --micro_train_batch_size 1 --pretrain OpenRLHF/Llama-3-8b-sft-mixture --bf16
        --max_samples 50000 --max_epochs 1 --max_len 8192 --zero_stage 3 --learning_rate 5e-7 --beta 0.1
        --dataset OpenRLHF/preference_dataset_mixture2_and_safe_pku --apply_chat_template --chosen_key chosen
        --rejected_key rejected --attn_implementation flash_attention_2 --gradient_checkpointing
        --use_wandb TOKEN --wandb_project openrlhf --wandb_run_name dpo-training""",
    "rm": r"""--save_path /checkpoints/llama3-8b-rm --save_steps -1 --logging_steps 1 --eval_steps -1
        --train_batch_size 256 --micro_train_batch_size 4 --pretrain OpenRLHF/Llama-3-8b-sft-mixture --bf16
        --max_samples 50000 --max_epochs 1 --max_len 8192 --zero_stage 3 --learning_rate 9e-6
        --dataset OpenRLHF/preference_dataset_mixture2_and_safe_pku --apply_chat_template --chosen_key chosen
        --rejected_key rejected --attn_implementation flash_attention_2 --packing_samples
        --gradient_checkpointing --use_wandb TOKEN --wandb_project openrlhf --wandb_run_name rm-training""",
}
"""The flags of SkyPilot's own examples, llm/openrlhf, of August 2026."""


@pytest.mark.parametrize("name", GALLERY)
def test_the_flags_of_skypilots_own_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "openrlhf.config.checks.importlib.util.find_spec", lambda name: name
    )  # as if wandb were there
    (command,) = [command for command in (SFT, RM, DPO) if command.name == name]
    config = parse(command, shlex.split(GALLERY[name])).config
    assert config.ckpt.output_dir.startswith("/checkpoints/") and config.logger.wandb.key == "TOKEN"
