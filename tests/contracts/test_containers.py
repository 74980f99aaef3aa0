"""Container files and Kubernetes manifests agree with pyproject.toml and with the commands."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from openrlhf.cluster.layout import compute_layout
from openrlhf.config.commands import PPO
from openrlhf.config.parse import parse
from openrlhf.config.ppo import PPOConfig

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


def config_of_the_job(folder: Path) -> PPOConfig:
    """Returns the configuration of the job's command, with `folder` in the place of /shared."""
    (folder / "run.yaml").write_text(
        "actor: {model_name_or_path: org/model}\ndata: {prompt_dataset: org/rows}\n"
        "reward: {remote_url: 'http://127.0.0.1:5000/get_reward'}\nalgo: {advantage: {estimator: rloo}}\n"
    )
    program, flag, module, *flags = shlex.split(JOB["spec"]["entrypoint"].replace("/shared", str(folder)))
    assert (program, flag, module) == ("python", "-m", "openrlhf.cli.train_ppo_ray")
    return parse(PPO, flags).config


def test_its_command_takes_exactly_the_gpus_that_it_asks_for(tmp_path: Path) -> None:
    config = config_of_the_job(tmp_path)
    (group,) = CLUSTER["workerGroupSpecs"]
    gpus = PODS["worker"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    layout = compute_layout(config, [{"CPU": 16}, *[{"CPU": 64, "GPU": gpus}] * group["replicas"]])
    assert sum(layout.bundles) == gpus * group["replicas"]
    for path in (config.ckpt.output_dir, config.ckpt.folder, config.run_dir):
        assert Path(path).is_relative_to(tmp_path)  # the shared folder, which all nodes see
