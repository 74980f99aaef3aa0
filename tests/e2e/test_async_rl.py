"""Sampling while the models train: no sample is lost or used twice, recorded weight versions are right, and
without staleness the run equals the synchronous one."""

from itertools import product
from pathlib import Path

import pytest
import torch
from records import sequence
from safetensors.torch import load_file
from test_rl import COMMON, check_samplers_hold_the_trained_weights, tokens_of, train
from transformers import AutoModelForCausalLM

from openrlhf.observability.journal import read_journal
from openrlhf.tasks.prepare import TaskFiles
from openrlhf.tools.reference.outputs import plain_log_probs
from openrlhf.types import Trajectory

pytestmark = pytest.mark.usefixtures("running_ray")
FLAGS = (
    f"{COMMON} --algo.kl.init_coef 0.01 --actor.adam.lr 1e-3 --train.batch_size 32 --train.max_steps 4 "
    "--eval.steps 2 "
)
TWO = "--ds.zero_stage 3 --actor.num_gpus_per_node 2 --vllm.num_engines 2"
PLACES = {
    "alone": "--ds.zero_stage 2 --actor.num_gpus_per_node 1 --train.colocate_all --vllm.num_engines 1 "
    "--ds.lora.rank 4 --algo.advantage.estimator gae --actor.adam.lr 1e-2 --critic.adam.lr 1e-2",
    "colocated": f"{TWO} --train.colocate_all",
    "separate": f"{TWO} --ref.num_gpus_per_node 1",
}
AHEAD = {
    "at once": "",
    "waits": "--train.async_enable --train.async_queue_size 1 --rollout.max_new_tokens 48",
    # Few long answers, four at a time: sampling a batch takes many times as long as training on one.
    "pauses": "--train.async_enable --train.async_queue_size 2 --train.partial_rollout_enable "
    "--rollout.batch_size 2 --rollout.n_samples_per_prompt 2 --train.batch_size 4 "
    "--data.max_len 480 --rollout.max_new_tokens 400",
}
STALENESS = {"at once": 0, "waits": 1, "pauses": 2}
IN_EVERY_RUN = ("alone", "pauses")
CASES = [IN_EVERY_RUN, *product(("colocated", "separate"), AHEAD)]


def steps_of(folder: Path, count: int = 4) -> list[list[Trajectory]]:
    rollouts = folder / "run" / "rollouts"
    return [read_journal(rollouts / f"step_{step:06d}.parquet") for step in range(1, count + 1)]


@pytest.mark.parametrize(
    ("place", "ahead"),
    [pytest.param(*case, marks=() if case == IN_EVERY_RUN else pytest.mark.slow) for case in CASES],
)
def test_places_and_ways_to_sample(task: TaskFiles, tmp_path: Path, place: str, ahead: str) -> None:
    """With two engines and two ranks, placed anyhow and whoever waits, no prompt is lost or trained on twice,
    weights of version v are those after v steps, and engines hold them. Where syncs pause requests, these go
    on with new weights, and every log-prob is that of the weights which chose the token.
    The run with one engine trains adapters of the policy and of a critic; its reference is the policy without
    them."""
    flags = f"{FLAGS} {PLACES[place]} {AHEAD[ahead]} --ckpt.save_steps 1 --ckpt.save_hf --ckpt.disable_ds"
    metrics = train(task, tmp_path, f"{flags} --ckpt.max_num 9")
    steps, staleness, prompts = steps_of(tmp_path), STALENESS[ahead], 2 if ahead == "pauses" else 8
    groups = [t.group for step in steps for t in step if t.sample_index == 0]
    assert len(groups) == len({*groups}) == 4 * prompts
    assert all(t.ok for step in steps for t in step)
    for number, step in enumerate(steps):
        for t in step:
            versions = t.weight_versions[:, 0].tolist()
            assert versions == sorted({*versions})
            assert number - staleness <= versions[0] and versions[-1] <= number
    mixed = [t for step in steps for t in step if len(t.weight_versions) > 1]
    assert bool(mixed) == (ahead == "pauses")
    assert bool(metrics[4]["rollout/staleness_max"]) == (ahead != "at once")
    check_log_probs(task, tmp_path, [*mixed[:4], *steps[-1][:4]])
    if place == "alone":
        assert metrics[1]["kl/mean"] == pytest.approx(0, abs=1e-6) and abs(metrics[4]["kl/mean"]) > 1e-5
        norms = [m["critic/grad_norm"] for m in metrics.values() if "critic/grad_norm" in m]
        assert norms and min(norms) > 0
        adapter = load_file(tmp_path / "policy" / "adapter_model.safetensors")
        assert adapter and all(".lora_" in name for name in adapter)
    for name in ("eval_000002", "eval_000004"):
        evaluated = read_journal(tmp_path / "run" / "rollouts" / f"{name}.parquet")
        assert {v for t in evaluated for v, _ in t.weight_versions} == {int(name[-1])}
    (tmp_path / "run" / "rollouts" / "eval_000004.parquet").rename(
        tmp_path / "run" / "rollouts" / "eval_000002.parquet"
    )
    check_samplers_hold_the_trained_weights(tmp_path)


def check_log_probs(task: TaskFiles, folder: Path, trajectories: list[Trajectory]) -> None:
    """Checks the log-prob of each token against the weights of its version."""
    models = {0: AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)}
    for version in range(1, 5):
        path = folder / "ckpt" / f"global_step{version}_hf"
        models[version] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for t in trajectories:
        token_ids = torch.tensor(t.token_ids.tolist())
        start = t.prompt_length
        for version, count in t.weight_versions.tolist():
            with torch.no_grad():
                log_probs = plain_log_probs(models[version], sequence(token_ids[: start + count], start))
            first = start - t.prompt_length
            told = torch.tensor(t.rollout_log_probs[first : first + count])
            torch.testing.assert_close(told, log_probs, atol=1e-4, rtol=0)
            start += count


@pytest.mark.slow
def test_without_staleness_it_is_the_synchronous_run(task: TaskFiles, tmp_path: Path) -> None:
    """Tokens, rewards and weights are equal bit for bit."""
    flags = (
        f"{FLAGS} {PLACES['separate'].replace('--actor.num_gpus_per_node 2', '--actor.num_gpus_per_node 1')}"
    )
    train(task, tmp_path / "sync", flags)
    train(task, tmp_path / "async", f"{flags} --train.async_enable --train.async_queue_size 0")
    for one, other in zip(steps_of(tmp_path / "sync"), steps_of(tmp_path / "async"), strict=True):
        assert tokens_of(one) == tokens_of(other)
        assert [t.reward for t in one] == [t.reward for t in other]
        assert [t.weight_versions.tolist() for t in one] == [t.weight_versions.tolist() for t in other]
    one, other = (load_file(tmp_path / run / "policy" / "model.safetensors") for run in ("sync", "async"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
