"""Two tasks in a run, with rewards, temperatures and quotas of their own, and a curriculum that a resumed run
continues bit for bit."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_rl import COMMON, cut_after_step_2, tokens_of, train

from openrlhf.observability.journal import read_journal
from openrlhf.tasks.prepare import TaskFiles
from openrlhf.tools.selftest.mismatch import fresh_mismatch
from openrlhf.types import Trajectory, not_none

pytestmark = pytest.mark.usefixtures("running_ray")
LETTERS = Path(__file__).with_name("letters_reward.py")
FLAGS = (
    f"{COMMON} --train.backend torch --rollout.engine transformers --actor.num_gpus_per_node 1 "
    "--algo.kl.init_coef 0 --actor.adam.lr 1e-3 --train.batch_size 32 --train.max_steps 4 "
    "--tasks.digits.quota 6 --tasks.letters.quota 2 --tasks.letters.temperature 0.5 "
    f"--tasks.letters.reward {LETTERS} --data.curriculum difficulty "
)


def two_tasks(task: TaskFiles, folder: Path) -> str:
    """Writes the task's prompts as those of two sources, and held-out prompts of a third, which no step
    trains on. Returns the flags that name them."""
    rows, held_out = (
        [json.loads(line) for line in path.read_text().splitlines()] for path in (task.prompts, task.eval)
    )
    for name, own in {"digits": rows[:6], "letters": rows[6:16], "held-out": held_out[:4]}.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in own))
    sets = f"--data.prompt_dataset {folder}/digits.jsonl,{folder}/letters.jsonl --train.num_episodes 4"
    return f"{sets} --eval.dataset {folder}/held-out.jsonl,{folder}/letters.jsonl --eval.max_samples 4"


def steps_of(folder: Path, first: int = 1) -> list[list[Trajectory]]:
    rollouts = folder / "run" / "rollouts"
    return [read_journal(rollouts / f"step_{step:06d}.parquet") for step in range(first, 5)]


def test_each_task_has_its_quota_reward_and_temperature_and_a_resumed_run_continues(task, tmp_path):
    """Twelve prompts are sampled at a time, and the surplus waits. The log-probs of the sampler at 0.5 are
    those that training computes. The set `held_out` has a reward, and no step trains on it."""
    flags = f"{FLAGS} {two_tasks(task, tmp_path)} --tasks.held_out.reward {LETTERS} "
    flags += "--rollout.vllm_generate_batch_size 12 --ckpt.save_steps 2 --ckpt.max_num 2"
    metrics = train(task, tmp_path / "whole", flags)
    whole = steps_of(tmp_path / "whole")
    for number, step in enumerate(whole, 1):
        assert Counter(t.prompt.source for t in step) == {"digits": 6 * 4, "letters": 2 * 4}
        for source in ("digits", "letters"):
            own = [t for t in step if t.prompt.source == source]
            assert {t.extra_texts.get("judge") for t in own} == {"letters" if source == "letters" else None}
            mean = sum(not_none(t.reward) for t in own) / len(own)
            assert metrics[number][f"rollout/{source}_reward_mean"] == pytest.approx(mean)
            assert metrics[number][f"rollout/{source}_num_samples"] == len(own)
        assert next(iter(fresh_mismatch(metrics[number]).values()), 0.0) < 1e-4
    assert fresh_mismatch(metrics[1])
    assert {"eval/held_out_score_mean", "eval/letters_score_mean"} < metrics[4].keys()
    cut_after_step_2(tmp_path / "whole", tmp_path / "halves")
    train(task, tmp_path / "halves", f"{flags} --ckpt.load_enable")
    again = steps_of(tmp_path / "halves", first=3)
    assert [tokens_of(step) for step in again] == [tokens_of(step) for step in whole[2:]]
    one, other = (load_file(tmp_path / run / "policy" / "model.safetensors") for run in ("whole", "halves"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["", "--train.partial_rollout_enable", "--rollout.vllm_generate_batch_size 12"]
)
def test_a_resumed_asynchronous_run_continues_with_the_groups_of_each_quota(task, tmp_path, how):
    """Sampling is a step ahead when the checkpoint is written. The groups in flight are sampled again, by
    newer weights, and belong to the steps that they would have belonged to. Each is trained on once."""
    flags = f"{FLAGS.replace('--data.curriculum difficulty', '')} {two_tasks(task, tmp_path)} {how} "
    flags += "--train.async_enable --train.async_queue_size 1 --ckpt.save_steps 2 --ckpt.max_num 2"
    train(task, tmp_path / "whole", flags)
    whole = steps_of(tmp_path / "whole")
    cut_after_step_2(tmp_path / "whole", tmp_path / "halves")
    train(task, tmp_path / "halves", f"{flags} --ckpt.load_enable")
    again = steps_of(tmp_path / "halves", first=3)
    assert [groups_of(step) for step in again] == [groups_of(step) for step in whole[2:]]
    for run in (whole, [*whole[:2], *again]):
        trained = [group for step in run for group in groups_of(step)]
        assert len(trained) == len({*trained}) == 4 * 8
        for number, step in enumerate(run, 1):
            assert Counter(t.prompt.source for t in step) == {"digits": 6 * 4, "letters": 2 * 4}
            assert all(t.ok and t.num_actions for t in step)
            sampled_by = {int(version) for t in step for version, _ in t.weight_versions}
            assert max(sampled_by) < number
            assert how.endswith("12") or min(sampled_by) >= number - 2
    ahead = {int(version) for t in whole[3] for version, _ in t.weight_versions}
    assert min(ahead) < 3  # the step before was trained meanwhile


def groups_of(step: list[Trajectory]) -> list[tuple[str, int, int]]:
    """Returns source, epoch and row of the groups of a step."""
    return sorted({(t.prompt.source, *t.group) for t in step})
