"""Reinforcement learning on an environment makes the policy play better after some steps."""

import json
import random
import runpy
from pathlib import Path

import pytest

from openrlhf.observability.trackers.metrics_file import read_metrics

EXAMPLE = Path(__file__).parents[2] / "examples" / "python" / "agent_guess.py"
COMMON = "--data.max_len 320 --ds.param_dtype fp32"

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("running_ray")]


def random_games(count: int) -> list[dict]:
    """Returns games of a player who guesses at random, each turn in the form that the game asks for."""
    example, rng, rows = runpy.run_path(str(EXAMPLE)), random.Random(0), []
    for seed in range(count):
        game, over, messages = example["Guess"](), False, []
        told, _ = game.reset(seed=seed)
        while not over:
            messages = [*messages, {"role": "user", "content": told}]
            guess = f"\\boxed{{{rng.randint(1, game.highest)}}}"
            rows.append({"input": messages, "output": guess})
            messages = [*messages, {"role": "assistant", "content": guess}]
            told, _, right, out_of_tries, _ = game.step(guess)
            over = right or out_of_tries
    return rows


def test_hints_are_learned(openrlhf, knowing, tmp_path: Path) -> None:
    """A player that heeds the hints finds any of eight numbers in four tries and pays nothing for excluded
    guesses; a player that guesses at random finds it in 1 - (7/8)^4 = 41 % of the games, and pays."""
    example = runpy.run_path(str(EXAMPLE))
    games, rows = tmp_path / "games.jsonl", tmp_path / "rows.jsonl"
    games.write_text("".join(json.dumps(row) + "\n" for row in random_games(300)))
    rows.write_text("".join(json.dumps(row) + "\n" for row in example["rows"]()))
    openrlhf(
        f"sft --model.model_name_or_path {knowing.chat} --data.dataset {games} --data.output_key output "
        f"--data.apply_chat_template --ckpt.output_dir {tmp_path / 'start'} --adam.lr 1e-3 "
        f"--train.batch_size 8 --train.max_epochs 1 --ds.zero_stage 0 {COMMON}"
    )
    openrlhf(
        f"ppo --actor.model_name_or_path {tmp_path / 'start'} --data.prompt_dataset {rows} "
        f"--data.label_key label --train.agent_func_path {EXAMPLE} --ckpt.output_dir {tmp_path / 'policy'} "
        f"--logger.run_dir {tmp_path / 'run'} --train.max_steps 80 --train.num_episodes 5 "
        "--rollout.n_samples_per_prompt 8 --rollout.batch_size 32 --rollout.max_new_tokens 5 "
        "--train.batch_size 256 --train.dynamic_batch_enable --train.max_tokens_per_gpu 16384 "
        "--actor.adam.lr 1e-3 --actor.lr_scheduler constant --actor.num_gpus_per_node 1 "
        "--train.colocate_all --ds.zero_stage 2 --algo.kl.init_coef 0 "
        f"--algo.advantage.estimator group_norm {COMMON}"
    )
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    reward = [metrics[step]["rollout/reward_mean"] for step in metrics]
    assert sum(reward[-10:]) / 10 > sum(reward[:10]) / 10 + 0.25
    assert max(metrics[step]["rollout/failed_ratio"] for step in metrics) == 0
