"""Recipes: loops of users' own, as users start them."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
from safetensors.torch import load_file
from torch import equal

from openrlhf.observability.run_folder import read_jsonl

RECIPES = Path(__file__).parents[2] / "recipes"


def metrics_of(folder: Path) -> list[dict]:
    (file,) = folder.rglob("metrics.jsonl")
    return list(read_jsonl(file))


def run(program: str, folder: Path) -> list[dict]:
    """Runs a program in the folder of the recipes, and returns the metrics of its steps."""
    own = {"PYTHONPATH": f"{RECIPES}:{RECIPES.parent}", "OMP_NUM_THREADS": "1"}
    made = subprocess.run(
        [sys.executable, *shlex.split(program)],
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert made.returncode == 0, made.stderr[-3000:]
    return metrics_of(folder)


@pytest.mark.slow
def test_the_recipe_of_supervised_training_learns_the_answers(knowing, tmp_path):
    rows = run(f"{RECIPES}/sft.py {knowing.base} {knowing.files.sft} {tmp_path}", tmp_path)
    losses = [row["policy/loss"] for row in rows]
    assert len(losses) == 10 and losses[-1] < 0.7 * losses[0], losses
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({path.stem for path in RECIPES.glob("*.py")} - {"sft"}))
def test_a_recipe_learns_the_task(knowing, tmp_path, name):
    rows = run(f"{RECIPES}/{name}.py {knowing.chat} {knowing.files.prompts} {tmp_path}", tmp_path)
    rewards = [row["rollout/reward_mean"] for row in rows]
    assert len(rewards) == 10
    assert fmean(rewards[-3:]) > fmean(rewards[:2]) + 0.15, rewards
    assert (tmp_path / "model.safetensors").exists()


PLACED = {
    "local": {
        "rollout.engine": "transformers",
        "train.backend": "torch",
        "actor.num_gpus_per_node": 1,
        "train.colocate_all": True,
    },
    "ray": {"actor.num_gpus_per_node": 2, "vllm.num_engines": 1, "ds.zero_stage": 2},
    "ray, colocated": {"actor.num_gpus_per_node": 1, "train.colocate_all": True, "vllm.enable_sleep": True},
}
"""Placement of the loop -> flags of the command that places the same ranks and engines."""


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACED)
def test_the_loop_of_grpo_takes_the_steps_of_the_command(knowing, tmp_path, openrlhf, placement):
    sys.path.insert(0, str(RECIPES))
    from grpo import FLAGS

    place = PLACED[placement]
    flags = " ".join(f"--{name} {str(value).lower()}" for name, value in (FLAGS | place).items())
    openrlhf(
        f"ppo --actor.model_name_or_path {knowing.chat} --data.prompt_dataset {knowing.files.prompts} "
        f"{flags} --reward.remote_url {RECIPES}/grpo.py:reward --rollout.batch_size 16 --train.max_steps 3 "
        f"--actor.lr_scheduler constant --actor.lr_warmup_ratio 0 --ckpt.output_dir {tmp_path}/command"
    )
    own = FLAGS | ({"placement": "ray"} | place if placement != "local" else {})
    files = f"'{knowing.chat}', '{knowing.files.prompts}', '{tmp_path}/own'"
    program = f"from grpo import main; main({files}, 3, {own})"
    rows = run(f"-c {shlex.quote(program)}", tmp_path / "own")
    for own, command in zip(rows, metrics_of(tmp_path / "command"), strict=True):
        for name in ("rollout/reward_mean", "policy/loss", "grad_norm", "lr", "num_tokens"):
            assert own[name] == command[name], (own["step"], name)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("own", "command"))
    assert one.keys() == other.keys()
    assert all(equal(one[name], other[name]) for name in one)


LOSES_A_RANK = """
import os, ray, openrlhf as rl
flags = {"actor.num_gpus_per_node": 1, "rollout.engine": "transformers", "train.backend": "torch"}
flags |= {"rollout.max_new_tokens": 4, "data.max_len": 64}
flags |= {"ckpt.output_dir": FOLDER, "ckpt.path": FOLDER + "/ckpt"}
with rl.Run(actor=MODEL, placement="ray", **flags, **MORE) as run:
    if MORE:
        print("state", run.load_state())
    groups = run.reward(run.sample(["1 2 3"], n=2), lambda queries, prompts, labels: [0.0, 1.0]).result()
    assert [len(group.trajectories) for group in groups] == [2]
    if not run.state:
        run.save_state({"seen": 1}).result()
        ray.kill(run._roles.policy.workers[0])
    run.update(run.batch(groups)).result()
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_a_loop_on_a_cluster_names_the_process_that_it_lost(knowing, tmp_path, again):
    """With restarts, the same program goes on from its checkpoint."""
    more = {"train.max_restarts": 1} if again else {}
    names = {"FOLDER": str(tmp_path), "MODEL": str(knowing.chat), "MORE": more}
    program = LOSES_A_RANK
    for name, value in names.items():
        program = program.replace(name, repr(value))
    file = tmp_path / "loop.py"
    file.write_text(program)
    made = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=400)
    assert made.returncode == int(not again), made.stderr[-3000:]
    assert "a rank of the policy died" in made.stderr
    assert made.stdout.split("\n")[:-1] == (["state None", "state {'seen': 1}", "done"] if again else [])


SHARDINGS = {
    "one rank": (1, {"backend": "deepspeed", "stage": 0}),
    "ZeRO 1": (2, {"backend": "deepspeed", "stage": 1}),
    "ZeRO 2": (2, {"backend": "deepspeed", "stage": 2}),
    "ZeRO 3": (2, {"backend": "deepspeed", "stage": 3}),
    "sequence": (2, {"backend": "deepspeed", "stage": 2, "sequence": 2}),
    "tensor": (2, {"backend": "deepspeed", "stage": 2, "tensor": 2}),
    "torch": (1, {"backend": "torch", "stage": 0}),
    "torch, sharded": (2, {"backend": "torch", "stage": 0}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDINGS)
def test_a_function_has_the_gradient_of_the_built_in_loss_under_any_sharding(task, run_worker, name):
    ranks, how = SHARDINGS[name]
    for report in run_worker("given_gradient", ranks, model=str(task.model), attention="auto", **how):
        assert report["norm"] > 0.01
        assert report["error"] < 1e-6
