"""The commands of docs/clusters.md run as the page has them, with other ports and addresses."""

import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import yaml
from namespaces import needs_namespaces
from processes import port_for_later
from refusals import printed

from openrlhf.errors import ErrorCode
from openrlhf.tasks.prepare import TaskFiles

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "clusters.md").read_text()
RUN = {
    "reward.remote_url": str(Path(__file__).with_name("digits_reward.py")),
    "data.apply_chat_template": True,
    "data.label_key": "label",
    "data.max_len": 96,
    "rollout.max_new_tokens": 12,
    "rollout.batch_size": 4,
    "rollout.n_samples_per_prompt": 2,
    "train.batch_size": 8,
    "train.max_steps": 1,
    "placement": "auto",
    "algo.advantage.estimator": "group_norm",
    "algo.kl.init_coef": 0,
    "ds.param_dtype": "fp32",
}
HOLDER = """
import sys, time, ray
from ray.util.placement_group import placement_group
ray.init(logging_level="ERROR")
ray.get(placement_group([{"GPU": 6}], name="their run").ready())
print("held", flush=True)
sys.stdin.read()
"""


def commands(heading: str) -> list[list[str]]:
    """Returns the commands of each code block under a heading of the page."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert section
    return [block.splitlines() for block in re.findall(r"```bash\n(.*?)```", section[1], re.DOTALL)]


@dataclass(kw_only=True)
class Machine:
    """User's machine with nobody else on it: a home, a folder to work in, ports."""

    folder: Path
    environment: dict[str, str]
    port: int = field(default_factory=port_for_later)
    dashboard: int = field(default_factory=port_for_later)

    @property
    def address(self) -> str:
        return (Path(self.environment["RAY_TMPDIR"]) / "ray" / "ray_current_cluster").read_text().strip()

    def start(self, command: str, **options) -> subprocess.Popen:
        """Starts a command with this machine's ports and addresses in the place of the page's. `ray stop` is
        replaced, because it would stop every Ray of the user."""
        own = f"--port {self.port} --dashboard-port {self.dashboard} "
        own += f"--ray-client-server-port {port_for_later()}"
        own += " --dashboard-agent-listen-port 0 --object-store-memory 100000000"
        command = command.replace("ray start --head", f"ray start --head {own}")
        command = command.replace("127.0.0.1:8265", f"127.0.0.1:{self.dashboard}")
        if "10.0.0.1:6379" in command:  # a node more
            own = "--dashboard-agent-listen-port 0 --object-store-memory 100000000"
            command = command.replace("ray start --address", f"ray start {own} --address")
            command = command.replace("10.0.0.1:6379", self.address)
        return subprocess.Popen(
            command.replace("ray stop", "true"),
            shell=True,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            **options,
        )

    def run(self, command: str) -> tuple[int, str]:
        """Returns (exit code, output). An `export` holds for later commands."""
        if command.startswith("export "):
            name, value = command.removeprefix("export ").split("=")
            self.environment[name] = value
            return 0, ""
        process = self.start(command)
        output, _ = process.communicate(timeout=400)
        return process.returncode, output

    def stop(self) -> None:
        folder = self.environment["RAY_TMPDIR"]
        mine = [
            process
            for process in psutil.process_iter(["environ"])
            if (process.info["environ"] or {}).get("RAY_TMPDIR") == folder
        ]
        for process in mine:
            process.kill()
        psutil.wait_procs(mine, timeout=30)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def machine(tmp_path: Path, task: TaskFiles) -> Iterator[Machine]:
    ray_folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # sockets have short names
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RAY_") and not name.endswith("VISIBLE_DEVICES")
    }
    environment |= {
        "HOME": str(tmp_path),
        "RAY_TMPDIR": ray_folder,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    flags = {"actor.model_name_or_path": str(task.model), "data.prompt_dataset": str(task.prompts)}
    flags |= {"ckpt.output_dir": str(tmp_path / "policy"), "ckpt.path": str(tmp_path / "ckpt")}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN | flags))
    machine = Machine(folder=tmp_path, environment=environment)
    yield machine
    machine.stop()


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_engines")
def test_a_run_starts_ray_where_a_dead_cluster_left_its_file(machine: Machine) -> None:
    folder = Path(machine.environment["RAY_TMPDIR"]) / "ray"
    folder.mkdir()
    (folder / "ray_current_cluster").write_text("127.0.0.1:1")
    ((command,),) = commands("One machine")
    code, output = machine.run(command)
    assert code == 0, output
    assert re.search(rf"{folder}/ray_current_cluster\b.* \(127\.0\.0\.1:1\)", output)
    chosen = "--actor.num_gpus_per_node 1 --train.colocate_all"
    assert re.search(rf"^note: .*: {chosen}$", output, re.MULTILINE)
    assert not re.search(r"pid=|Triton|WARNING|\x1b", output), output
    assert not (machine.folder / ".ray").exists()
    (saved,) = machine.folder.glob("policy/runs/*/config.yaml")
    written = yaml.safe_load(saved.read_text())
    assert written["actor"]["num_gpus_per_node"] == 1 and written["train"]["colocate_all"]
    assert (machine.folder / "policy" / "config.json").exists()


def submitted(machine: Machine, command: str) -> tuple[int, str]:
    """Submits a job like `machine.run`, once Ray takes jobs."""
    deadline = time.monotonic() + 60
    while "No available agent" in (done := machine.run(command))[1] and time.monotonic() < deadline:
        pass
    return done


@pytest.mark.slow
def test_a_cluster_that_is_too_small_or_busy(machine: Machine) -> None:
    """The cluster has a token, which the second run finds by itself. The first run is a submitted job."""
    assert machine.run("ray get-auth-token --generate")[0] == 0
    (start, _, _), (named,) = commands("A long-running cluster")
    assert machine.run(start)[0] == 0
    flags = "--actor.num_gpus_per_node 16 --rollout.batch_size 8 --train.batch_size 16"
    submit = commands("Token authentication")[0][3].replace(
        '"working_dir"', '"setup_commands": ["exit 1"], "working_dir"'
    )
    code, output = submitted(machine, f"RAY_AUTH_MODE=token {submit} {flags}")
    assert code == 1, output  # as `ray job submit` says of every job that failed
    assert re.search(r"^note: --runtime-env-json: .*\bsetup_commands\b", output, re.MULTILINE)
    assert f"{machine.address}: 1 node, 8 GPUs" in output
    assert re.search(r"^error: .*\b16 GPUs\b.*\b8\b", output, re.MULTILINE)

    holder = machine.start(f"exec {shlex.quote(sys.executable)} -c {shlex.quote(HOLDER)}")
    assert holder.stdout and holder.stdin
    assert any("held" in line for line in holder.stdout)
    process = machine.start(f"exec env {named} --actor.num_gpus_per_node 8")
    assert process.stdout
    said = ""
    for line in process.stdout:
        said += line
        if line.startswith("waiting: "):
            break
    assert re.search(r"\b8 GPUs \(2 ", said)
    assert re.search(r"^waiting: .*\b8\b.*\b2\b.*\btheir run\b.*\b6\b", said, re.MULTILINE)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    holder.stdin.close()
    holder.wait(60)


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_engines")
def test_a_run_joins_a_cluster_that_stays(machine: Machine) -> None:
    (start, run, stop), _ = commands("A long-running cluster")
    assert machine.run(start.replace("--num-gpus 8", "--num-gpus 0"))[0] == 0
    code, output = machine.run(run)
    assert code == 0, output
    assert f"{machine.address}: 1 node, 0 GPUs" in output
    assert not re.search(r"pid=|Triton|Loading weights|model shards|repeated|WARNING|\x1b", output), output
    assert machine.run(stop)[0] == 0
    code, output = machine.run(f"RAY_ADDRESS={machine.address} ray status")  # the cluster is still running
    assert code == 0, output


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_engines")
@pytest.mark.parametrize("heading", ["Ray jobs", "Token authentication"])
def test_a_run_as_a_job(machine: Machine, heading: str) -> None:
    block, *_ = commands(heading)
    for command in block:
        code, output = submitted(machine, command.replace("--num-gpus 8", "--num-gpus 0"))
        assert code == 0, output
        if "submit" in command:
            assert f"{machine.address}: 1 node" in output and "succeeded" in output
    assert (machine.folder / ".ray" / "auth_token").exists() == (heading == "Token authentication")
    assert (machine.folder / "policy" / "config.json").exists()


@pytest.mark.slow
@needs_namespaces
@pytest.mark.usefixtures("cpu_engines")
def test_a_run_on_two_nodes(machine: Machine, task: TaskFiles) -> None:
    """The nodes share a folder, and each has a disk of its own."""
    head, other, status = commands("Several nodes")[0]
    own, cores = machine.folder / "own", "--num-gpus 0 --num-cpus 1 --node-ip-address"
    shutil.copytree(task.model, own / "model")
    assert machine.run(head.replace("--num-gpus 8", f"{cores} 127.0.0.2"))[0] == 0
    start = f"mount -t tmpfs none {own} && {other.replace('--num-gpus 8', f'{cores} 127.0.0.3')}"
    assert machine.run(f"unshare --mount --user --map-root-user sh -c '{start}'")[0] == 0
    assert machine.run(status)[1].count("node_") == 2
    ((run,),) = commands("One machine")
    run += " --actor.num_nodes 2 --actor.num_gpus_per_node 1 --vllm.num_engines 2 --ds.zero_stage 3"

    name = platform.node()
    code, output = machine.run(
        f"{run} --ckpt.save_steps 1 --actor.model_name_or_path {own}/model "
        f"--ckpt.path {own}/ckpt --ckpt.output_dir {own}/policy"
    )
    assert code == 2, output
    (refusal,) = printed(output)
    assert (refusal.code, refusal.place) == (ErrorCode.NOT_FOUND, f"--actor.model_name_or_path {own}/model")
    assert f"127.0.0.3 ({name})" in refusal.text.splitlines()[0]
    assert re.search(rf"^--ckpt\.path {own}/ckpt: .*127\.0\.0\.3 \({name}\)", output, re.MULTILINE)
    assert "--ckpt.output_dir" not in output  # the path is on a disk that the actor's rank 0 writes to

    code, output = machine.run(
        f"{run} --train.max_steps 2 --ckpt.save_steps 1 --algo.advantage.estimator gae"
    )
    assert code == 0, output
    assert f"{machine.address}: 2 nodes, 0 GPUs, 2 CPU cores" in output
    lines = [re.split("  +", line) for line in output.partition("placement:\n")[2].splitlines()[:7]]
    assert [line[:4] for line in lines] == [
        ["role", "ranks", "node", "devices"],
        *(
            [role, str(rank), f"127.0.0.{2 + rank} ({name})", "cores"]
            for role in ("engines", "policy", "critic")
            for rank in range(2)
        ),
    ]
    assert len({pid for *_, pid in lines}) == len(lines)
    shards = (machine.folder / "ckpt" / "_actor" / "global_step2").glob("*_optim_states.pt")
    assert len(list(shards)) == 2


NODE = """
import ray
ray.init(logging_level="ERROR")
print(next(node["NodeID"] for node in ray.nodes() if node["NodeManagerAddress"] == "127.0.0.3"))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_engines")
def test_a_node_that_is_drained_ends_the_run_with_a_checkpoint(machine: Machine) -> None:
    head, other, _ = commands("Several nodes")[0]
    cores = "--num-gpus 0 --num-cpus 1 --node-ip-address"
    assert machine.run(head.replace("--num-gpus 8", f"{cores} 127.0.0.2"))[0] == 0
    assert machine.run(other.replace("--num-gpus 8", f"{cores} 127.0.0.3"))[0] == 0
    ((run,),) = commands("One machine")
    flags = "--actor.num_nodes 2 --actor.num_gpus_per_node 1 --train.max_steps 500 --train.num_episodes 50"
    process = machine.start(f"exec {run} {flags} --ckpt.save_steps 500 --train.grace_seconds 100")
    assert process.stdout
    said = ""
    for line in process.stdout:
        said += line
        if re.search(r" step \d+/", line):
            break
    _, node = machine.run(f"{shlex.quote(sys.executable)} -c {shlex.quote(NODE)}")
    drain = "ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message spot"
    code, output = machine.run(f"{drain} --node-id {node.split()[-1]} --deadline-remaining-seconds 300")
    assert code == 0, output
    rest, _ = process.communicate(timeout=200)
    assert process.returncode == 75, said + rest
    assert re.search(
        rf"Ray drains {platform.node()} until \d\d:\d\d:\d\d: the run ends as after SIGTERM", rest
    )
    saved = re.findall(r"global_step(\d+)", "\n".join(map(str, machine.folder.glob("ckpt/_actor/*"))))
    assert saved and int(saved[0]) < 500
