"""Reward models in the whole loop give the scores that transformers gives."""

from pathlib import Path

import pytest
import torch
from test_rl import COMMON, train
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from openrlhf.observability.journal import read_journal
from openrlhf.tasks.prepare import TaskFiles

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("running_ray")]


@pytest.mark.parametrize("shared", ["ring_attn_size", "tensor_parallel_size"])
def test_reward_models_whose_ranks_share(task: TaskFiles, tmp_path: Path, shared: str) -> None:
    """Ranks share rows or matrices. A response gets the sum of the scores that transformers gives it."""
    paths = [tmp_path / f"scorer_{seed}" for seed in range(2)]
    models = [untrained_scorer(task, path, seed=seed) for seed, path in enumerate(paths)]
    train(
        task,
        tmp_path,
        f"{COMMON} --actor.num_gpus_per_node 2 --train.colocate_all --ds.zero_stage 2 --ds.{shared} 2 "
        "--train.max_steps 1 --eval.steps -1 --train.dynamic_batch_enable --train.max_tokens_per_gpu 256",
        reward=f"--reward.model_name_or_path {paths[0]},{paths[1]}",
    )
    sampled = read_journal(tmp_path / "run" / "rollouts" / "step_000001.parquet")
    assert len(sampled) == 32
    for t in sampled:
        token_ids = torch.tensor(t.token_ids.tolist())[None]
        with torch.no_grad():
            scores = [model(token_ids).logits.item() for model in models]
        assert t.reward == pytest.approx(sum(scores), abs=1e-4)


def untrained_scorer(task: TaskFiles, folder: Path, *, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_pretrained(
            task.model, num_labels=1, dtype=torch.float32
        )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(task.model).save_pretrained(folder)
    model.config.pad_token_id = None  # transformers then scores the last token, whichever was sampled
    return model.eval()
